"""The CPU kernels against the trainer's forward and the sampler, and against themselves in other company."""

import native_models
import numpy as np
import pytest
import torch
from native_models import ROW_BYTES, prompt, request, run, started, write_model

from xtuner.v1.data_proto import SampleParams, SegmentLayout
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.ops.cpu import cpu_kernels_available
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native.requests import RequestLimits, make_sequence
from xtuner.v1.rl.rollout.backends.native.sampler import SamplingBatch, sample, scatter_seed, uniform
from xtuner.v1.rl.rollout.backends.native.scheduler import Scheduler

if not cpu_kernels_available():
    pytest.skip("no Numba here", allow_module_level=True)

from xtuner.v1.ops.jit import kernel  # noqa: E402
from xtuner.v1.rl.rollout.backends.native import kernel_runner, kernels  # noqa: E402
from xtuner.v1.rl.rollout.backends.native.kernel_runner import KernelRunner, kernels_know  # noqa: E402

FAMILIES = {
    "qwen3": {"qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "llama": {"qkv_bias": True, "o_bias": True},
    "mistral": {},
}
VOCAB = 50


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch):
    monkeypatch.setitem(native_models.DEFAULTS, "cpu_kernels", True)


def _model(family: str, seed: int = 0, **fields):
    attention = MHAConfig(num_attention_heads=6, num_key_value_heads=2, head_dim=32, **FAMILIES[family])
    fields = {"hidden_size": 48, "intermediate_size": 88, "vocab_size": VOCAB, "attention": attention} | fields
    config = DenseModelConfig(
        model_type=family, max_position_embeddings=256, num_hidden_layers=3, eos_token_id=1,
        tie_word_embeddings=family == "qwen3", mlp_bias=family == "llama", **fields,
    )  # fmt: skip
    model = config.build("cpu").requires_grad_(False).eval()
    _randomise(model, seed)
    return model


@torch.no_grad()
def _randomise(model, seed):
    # Norms and biases too: `init_weights` gives them values that hide a forgotten one.
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = 0.3 * torch.randn(param.shape, generator=generator)
        param.copy_(noise + 1 if name.endswith("norm.weight") else noise)


def _runner(model, prompts, threads=1, **params):
    """A runner with the prompts in its cache, and the scheduler of their sequences."""
    limits = RequestLimits(VOCAB, 256, [1], lambda ids: "")
    scheduler, runner = Scheduler(len(prompts)), KernelRunner(model, len(prompts), 256, threads)
    runner.cache.set_budget(10**11)
    for i, ids in enumerate(prompts):
        scheduler.add(make_sequence(GenerateRequest(i, ids.tolist(), SampleParams(**params), i), limits))
    assert runner.cache.reserve(len(prompts), max(map(len, prompts)) + 40)
    admitted = scheduler.admit(runner.cache, 10**6)
    assert runner.prefill(scheduler, admitted, 0) == []
    return runner, scheduler


def _logits(runner, scheduler):
    """Of every sequence's next token; the sequences stay where they are."""
    rows = scheduler.rows()
    rows["shaped"] = True
    _, logits = runner._decode(scheduler, rows["shaped"], 1)
    rows["shaped"] = False
    return torch.from_numpy(logits)


def _trainers_logits(model, sequences):
    lengths = [len(ids) for ids in sequences]
    attention = PackedAttention(SegmentLayout(lengths, [-1] * len(lengths)), "cpu")
    ids = torch.from_numpy(np.concatenate(sequences)).long()
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model.hidden_states(ids, positions, attention)[torch.tensor(lengths).cumsum(0) - 1])


def _prompts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_sequence(family):
    model = _model(family)
    short, one, long, two = _prompts(3, 1, 150, 17)
    prompts = [short, long, short, one, two, long, long]
    runner, scheduler = _runner(model, prompts, max_tokens=100, min_tokens=100)
    assert runner.prefilled_rows == 2 + 149 + 0 + 16, "siblings share a prompt's forward"
    for steps in (0, 1, 15, 5):
        before = scheduler.rows()["length"].copy()
        if steps:
            runner.decode(scheduler, steps)
        assert (scheduler.rows()["length"] == before + steps).all()
        sequences = [row[:n] for row, n in zip(scheduler.tokens(), scheduler.rows()["length"], strict=True)]
        expected = _trainers_logits(model, sequences)
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(_logits(runner, scheduler), expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.skipif(torch.float16 not in kernel_runner.kernel_types(), reason="no processor of float16")
@pytest.mark.parametrize("family", FAMILIES)
def test_float16_is_nearer_to_the_weights_than_bfloat16(family):
    model, prompts, errors = _model(family, hidden_size=80), _prompts(3, 40, 17, 90), {}
    expected = _trainers_logits(model, prompts)
    for dtype in (torch.float16, torch.bfloat16):
        short = model.config.build("cpu", dtype).requires_grad_(False)
        short.load_state_dict(model.state_dict())
        errors[dtype] = (_logits(*_runner(short, prompts, max_tokens=9)) - expected).square().mean().sqrt()
    assert errors[torch.float16] < errors[torch.bfloat16] / 1.5 < expected.std() / 10


@pytest.mark.skipif(torch.float16 not in kernel_runner.kernel_types(), reason="no processor of float16")
def test_numbers_beyond_float16_are_an_error():
    model = _model("qwen3").to(torch.float16)
    for layer in model.layers:
        layer.mlp.gate_up_proj.weight.mul_(300)
    runner, scheduler = _runner(model, _prompts(5), max_tokens=9)
    with pytest.raises(FloatingPointError, match="not finite"):
        runner.decode(scheduler, 1)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.3}, {"temperature": 2.5}, {"temperature": 0}, {"min_tokens": 5},
               {"temperature": 0, "min_tokens": 5, "stop_token_ids": list(range(45))}]
)  # fmt: skip
def test_tokens_and_logprobs_are_the_samplers_for_the_same_logits(params):
    model = _model("qwen3", seed=1)
    runner, scheduler = _runner(model, _prompts(*range(2, 90)), max_tokens=100, **params)
    for _ in range(4):
        rows, slots = scheduler.rows(), np.arange(len(scheduler.running))
        logits = _logits(runner, scheduler)
        drawn = sample(logits, SamplingBatch.build(rows, scheduler.tokens(), scheduler.stop_ids()))
        places = rows["length"].copy()
        runner.decode(scheduler, 1)
        assert scheduler.tokens()[slots, places].tolist() == drawn.tokens.tolist()
        torch.testing.assert_close(
            torch.from_numpy(scheduler.logprobs()[slots, places]), drawn.logprobs, rtol=2e-6, atol=2e-6
        )


@kernel
def _compiled_uniform(seeds, positions, out):
    for i in range(seeds.size):
        out[i] = kernels._uniform(seeds[i], positions[i])


def test_random_numbers_are_those_of_the_sampler():
    seeds = np.array([scatter_seed(i) for i in range(500)] + [0, -5, -(2**63)])
    positions, out = np.arange(len(seeds)) * 37, np.empty(len(seeds), np.float32)
    _compiled_uniform(seeds, positions, out)
    assert out.tolist() == uniform(seeds, positions).tolist()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_frequencies_are_those_of_the_distribution(temperature):
    model, n = _model("mistral", seed=2), 10_000
    (ids,) = _prompts(12)
    runner, scheduler = _runner(model, [ids] * n, max_tokens=1, temperature=temperature)
    probs = (_trainers_logits(model, [ids])[0].double() / temperature).softmax(0)
    runner.decode(scheduler, 1)
    counts = torch.bincount(torch.from_numpy(scheduler.tokens()[:, 12]).long(), minlength=VOCAB)
    often = probs * n >= 5
    expected, seen = probs[often] * n, counts[often]
    statistic, freedom = ((seen - expected) ** 2 / expected).sum().item(), int(often.sum()) - 1
    assert freedom > 10
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, "five standard deviations of chi-square"


def _outcome(engine, requests):
    return [(o.token_ids, o.logprobs, o.finish_reason) for o in run(engine, *requests)]


def test_threads_blocks_steps_and_batches_change_no_bit(model_path, monkeypatch):
    kinds = [{}, {"temperature": 0.7}, {"top_k": 9}, {"temperature": 0}, {"min_tokens": 9}]
    requests = [request(i, prompt(i // 3, 5 + i), max_tokens=9 + i, **kinds[i % 5]) for i in range(40)]
    plain = [r for r in requests if r.params.top_k == 0]
    expected = _outcome(started(model_path), plain)

    def check(threads=1, **kwargs):
        engine = started(model_path, **kwargs)
        engine._runner._threads = threads
        assert _outcome(engine, plain) == expected

    check(threads=2)
    check(threads=3)
    check(max_batch_size=5)
    # Requests whose tokens are drawn elsewhere make all take one step at a time.
    mixed = _outcome(started(model_path), requests)
    assert [o for o, r in zip(mixed, requests, strict=True) if r.params.top_k == 0] == expected
    monkeypatch.setattr(kernel_runner, "_MAX_STEPS", 1)
    check()
    monkeypatch.setattr(kernel_runner, "_MAX_STEPS", 7)
    monkeypatch.setattr(kernel_runner, "_BLOCK", 8)
    check(threads=2)


def test_a_sequence_ends_at_any_step_of_a_call(model_path):
    engine = started(model_path)
    i, free = next(
        (i, ids) for i in range(100) if len(ids := run(engine, request(i, max_tokens=40))[0].token_ids) == 40
    )
    outputs = run(engine, *[request(i, max_tokens=40, stop_token_ids=[token]) for token in free])
    for token, out in zip(free, outputs, strict=True):
        assert out.token_ids == free[: free.index(token) + 1] and out.finish_reason == "stop"
    for n, out in enumerate(run(engine, *[request(i, max_tokens=n) for n in range(1, 40)]), 1):
        assert out.token_ids == free[:n] and out.finish_reason == "length"


@pytest.mark.parametrize("found", range(8))
def test_a_long_prompt_whose_beginning_is_in_a_row_that_moves_as_the_cache_grows(model_path, found):
    """It is cut, and the budget leaves no room to keep all rows."""
    engine = started(
        model_path, max_batch_size=64, max_prefill_rows=32, context_length=256, cpu_cache_bytes=400 * ROW_BYTES
    )
    known = [prompt(i, 40) for i in range(8)]
    run(engine, *(request(i, ids, max_tokens=8, min_tokens=8) for i, ids in enumerate(known)))
    asked = request(100, known[found] + prompt(50, 180), max_tokens=20, min_tokens=20)
    (output,), (expected,) = run(engine, asked), run(started(model_path), asked)
    assert output.error is None and output.token_ids == expected.token_ids and output.logprobs == expected.logprobs


@pytest.mark.parametrize(
    "more", [{"top_logprobs": 5}, {"top_logprobs": 2, "temperature": 0.7}, {"temperature": 0.0, "top_logprobs": 2}]
)
def test_exact_log_probs_are_the_same_where_torch_draws(tmp_path, more):
    path = write_model(tmp_path / "m", std=0.1)
    engine = started(path, deterministic=True)
    assert isinstance(engine._runner, KernelRunner)
    plain = {key: value for key, value in more.items() if key != "top_logprobs"}
    numbers = range(20)
    here = run(engine, *(request(i, max_tokens=30, **plain) for i in numbers))
    elsewhere = run(engine, *(request(i, max_tokens=30, **more) for i in numbers))
    for one, other in zip(here, elsewhere, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_models_with_parts_that_the_kernels_lack_run_without_them(tmp_path):
    assert kernels_know(_model("qwen3"))
    assert kernels_know(_model("mistral", attention=_attention(sliding_window=256))), "the window never acts"
    assert not kernels_know(_model("mistral", attention=_attention(sliding_window=100)))
    assert not kernels_know(_model("mistral", attention=_attention(head_dim=8)))
    path = write_model(tmp_path / "m", "llama")
    assert isinstance(started(path)._runner, KernelRunner)
    assert isinstance(started(path, dtype=torch.bfloat16)._runner, KernelRunner)
    assert not isinstance(started(path, cpu_kernels=False)._runner, KernelRunner)


def _attention(**fields):
    return MHAConfig(**{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32} | fields)
