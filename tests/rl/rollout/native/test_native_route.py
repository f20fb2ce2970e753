"""The engine's prefill and decode steps against the trainer's forward over whole sequences."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import SampleParams, SegmentLayout
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.ops import paged_attention
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native.paged_cache import PagedCache
from xtuner.v1.rl.rollout.backends.native.paged_runner import PagedRunner
from xtuner.v1.rl.rollout.backends.native.requests import RequestLimits, make_sequence
from xtuner.v1.rl.rollout.backends.native.scheduler import Scheduler
from xtuner.v1.rl.rollout.backends.native.weights import PlainWeights

FAMILIES = {
    "qwen3": {"qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "llama": {"qkv_bias": True, "o_bias": True},
}


def _model(family: str, dtype: torch.dtype):
    attention = MHAConfig(num_attention_heads=6, num_key_value_heads=2, head_dim=16, **FAMILIES[family])
    config = DenseModelConfig(
        model_type=family, vocab_size=50, max_position_embeddings=256, num_hidden_layers=3, hidden_size=48,
        intermediate_size=80, eos_token_id=1, tie_word_embeddings=family == "qwen3", attention=attention,
        **({"mlp_bias": True} if family == "llama" else {}),
    )  # fmt: skip
    return config.build("cpu", dtype).requires_grad_(False).eval()


@torch.no_grad()
def _randomise(model, seed: int) -> None:
    # Norms and biases too: `init_weights` gives them values that hide a forgotten one.
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = 0.3 * torch.randn(param.shape, generator=generator)
        param.copy_(noise + 1 if name.endswith("norm.weight") else noise)


def _trainers_logprobs(model, prompt, token_ids):
    """Of a response at temperature 1, by one forward over the whole sequence."""
    ids = torch.tensor(prompt + token_ids[:-1])
    attention = PackedAttention(SegmentLayout([len(ids)], [-1]), "cpu")
    hidden = model.hidden_states(ids, torch.arange(len(ids)), attention)[len(prompt) - 1 :]
    return model.logits(hidden).log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def _serve(runner, prompts, max_rows, max_tokens=9):
    """(token ids, log-probs) of a response to each of the prompts, by prefills of at most `max_rows` rows."""
    limits = RequestLimits(50, 256, [1], lambda ids: "")
    params = SampleParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0)
    scheduler, cache = Scheduler(runner.cache.max_slots), runner.cache
    sequences = [make_sequence(GenerateRequest(i, ids, params, i), limits) for i, ids in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    with torch.inference_mode():
        while scheduler.has_work:
            first = len(scheduler.running)
            done = []
            if admitted := scheduler.admit(cache, max_rows):
                done += runner.prefill(scheduler, admitted, first)
            if scheduler.running and not done:
                assert cache.grow(scheduler.rows()["length"])
                done += runner.begin_decode(scheduler, 1)()
            scheduler.release([slot for slot, _ in done], cache)
    return [(s.token_ids, s.logprobs) for s in sequences]


@pytest.mark.parametrize("kernels", [True, False], ids=["numba", "torch"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_whole_sequence(family, dtype, tolerance, kernels, monkeypatch):
    """However prompts are cut, whatever is found in the cache, and whoever shares it."""
    if not kernels:
        monkeypatch.setattr(paged_attention, "takes_cpu_kernels", lambda *tensors, widened=False: False)
    model = _model(family, dtype)
    weights = PlainWeights(model)
    cache = PagedCache(3, 2, 16, 16, dtype, torch.device("cpu"), max_slots=6, max_length=256)
    cache.set_budget(10**7)
    runner = PagedRunner(model, cache)
    rng = np.random.default_rng(0)
    long, longer = rng.integers(0, 50, 64).tolist(), rng.integers(0, 50, 150).tolist()
    prompts = [long[:3], longer, long[:3], longer[:130] + [7], long, longer]
    hits = []
    for round_, max_rows in enumerate((10_000, 41, 64)):
        # Other weights in other memory, and a cache with old content.
        weights.drop()
        weights.restore()
        cache.forget()
        _randomise(model, round_)
        for _ in range(2):
            before = cache.hits
            for prompt, (token_ids, logprobs) in zip(prompts, _serve(runner, prompts, max_rows), strict=True):
                with torch.inference_mode():
                    expected = _trainers_logprobs(model, prompt, token_ids)
                torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=tolerance)
            hits.append(cache.hits - before)
            assert cache.free_pages == cache.num_pages
    # First nothing but the pages that one prompt of a batch has in common with another; then all full pages, but for
    # one row of the prompt that has no other.
    assert hits == [128, 128 + 128 + 63] * 3
