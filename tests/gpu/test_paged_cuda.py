"""Pages on the card: parts of prompts against all of their tokens; whatever the cache does changes nobody's tokens."""

import asyncio
import json

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from xtuner.v1.data_proto import SampleParams, SegmentLayout
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, load_hf_model, save_hf_model
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.paged_runner import PagedRunner

PAGE, VOCAB = 64, 500


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("heads, dims", [((16, 8), (128, 128)), ((6, 2), (192, 128)), ((3, 1), (64, 64))])
@pytest.mark.parametrize("kind", ["plain", "window", "sinks"])
def test_rows_against_pages(dtype, tolerance, heads, dims, kind):
    from xtuner.v1.ops.paged_attention import PagedRows, attend_rows

    (num_q, num_kv), (dim, dim_v) = heads, dims
    lengths, before = np.array([1, 70, 64, 130, 3]), np.array([63, 0, 64, 100, 261])
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    tables = np.random.default_rng(0).permutation(40)[:25].reshape(5, 5).astype(np.int32)
    keys, values = (torch.full((40, num_kv, PAGE, d), float("nan"), device="cuda", dtype=dtype) for d in dims)
    for row, end in enumerate(before + lengths):
        at = torch.arange(end, device="cuda")
        where = torch.from_numpy(tables[row]).cuda().long()[at // PAGE], slice(None), at % PAGE
        keys[where], values[where] = random(end, num_kv, dim), random(end, num_kv, dim_v)
    q, sinks = random(int(lengths.sum()), num_q, dim), random(num_q) if kind == "sinks" else None
    window = 100 if kind == "window" else None
    rows = PagedRows.build(tables, lengths, before, torch.device("cuda"))
    out = attend_rows(q, keys, values, rows, dim**-0.5, window, sinks)
    expected = attend_rows(
        q.cpu().double(), keys.cpu().double(), values.cpu().double(),
        PagedRows.build(tables, lengths, before, torch.device("cpu")), dim**-0.5, window,
        None if sinks is None else sinks.cpu().double(),
    )  # fmt: skip
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    attention = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=64, qk_norm=True)
    config = DenseModelConfig(
        model_type="qwen3", vocab_size=VOCAB, max_position_embeddings=1024, num_hidden_layers=3, hidden_size=128,
        intermediate_size=256, eos_token_id=2, attention=attention,
    )  # fmt: skip
    model = config.build("cpu")
    model.init_weights(0, 0.15)
    save_hf_model(export_hf_tensors(model, torch.float32), config, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    return path


def _engine(path, dtype, **kwargs):
    engine = NativeEngine(path, device="cuda", dtype=dtype, gpu_memory_utilization=0.3, max_batch_size=48, **kwargs)
    asyncio.run(engine.start())
    return engine


def _requests(temperature=0.0):
    """Groups of siblings, prompts that begin alike, and lengths on and around the borders of pages."""
    rng = np.random.default_rng(0)
    common = rng.integers(5, VOCAB, 200).tolist()
    prompts = [common[:n] for n in (1, 63, 64, 65, 128, 150)] + [common[:130] + [7] * n for n in (1, 70)]
    prompts += [rng.integers(5, VOCAB, n).tolist() for n in (3, 64, 300)]
    return [
        GenerateRequest(i, ids, SampleParams(max_tokens=100 + i % 50, temperature=temperature), 7 + i)
        for i, ids in enumerate(ids for ids in prompts for _ in range(4))
    ]


def _run(engine, requests, delay=0):
    async def later(i, request):
        for _ in range(delay * (i % 4)):
            await asyncio.sleep(0)
        return await engine.generate(request)

    async def main():
        return await asyncio.gather(*(later(i, r) for i, r in enumerate(requests)))

    outputs = asyncio.run(main())
    assert [o.error for o in outputs] == [None] * len(requests)
    return outputs


def _check_logprobs(path, dtype, requests, outputs, tolerance):
    """Against one forward of the trainer's model in float32 over each sequence."""
    from xtuner.v1.model.hf_config import get_model_config_from_hf

    model = get_model_config_from_hf(path).build("cuda", torch.float32)
    load_hf_model(model, path)
    for request, output in zip(requests, outputs, strict=True):
        ids = torch.tensor(request.prompt_ids + output.token_ids[:-1], device="cuda")
        attention = PackedAttention(SegmentLayout([len(ids)], [-1]), "cuda")
        with torch.no_grad():
            hidden = model.hidden_states(ids, torch.arange(len(ids), device="cuda"), attention)
            logits = model.logits(hidden[len(request.prompt_ids) - 1 :])
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids, device="cuda")[:, None])[:, 0]
        difference = (torch.tensor(output.logprobs, device="cuda") - expected).abs()
        assert difference.mean() < tolerance, (dtype, len(ids), difference.mean())


VARIANTS = {
    "whole": {},
    "cut": {"max_prefill_rows": 50},
    "late": {},
    "tight": {},
    "again": {},
    "eager": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-4), (torch.bfloat16, 0.05)])
def test_logprobs_are_the_trainers_however_the_cache_is_used(model_path, dtype, tolerance, variant):
    """Graphs and eager steps, prompts whole and in parts, siblings at once and late, prefixes found, preemption."""
    engine = _engine(model_path, dtype, **VARIANTS[variant])
    requests = _requests(1.0)
    if variant == "eager":
        engine._runner = PagedRunner(engine._model, engine._cache, use_graphs=False)
    if variant == "tight":
        engine._cache.set_budget(14 * PAGE * engine._cache.row_bytes)
    begin, aheads = engine._runner.begin_decode, []
    engine._runner.begin_decode = lambda *args: aheads.append(args[2]) or begin(*args)
    outputs = _run(engine, requests, delay=7 if variant == "late" else 0)
    assert any(aheads) and not all(aheads)
    _check_logprobs(model_path, dtype, requests, outputs, tolerance)
    if variant == "again":
        before, hits = engine._runner.prefilled_rows, engine._cache.hits
        outputs = _run(engine, requests)
        _check_logprobs(model_path, dtype, requests, outputs, tolerance)
        assert engine._runner.prefilled_rows - before < before / 2 and engine._cache.hits > hits
    assert (engine.statistics()["preemptions"] > 0) == (variant == "tight")
    assert engine._cache.free_pages == engine._cache.num_pages
    if dtype == torch.float32:
        # Ties of a model with random weights are rare, and its logits in float32 agree to 1e-5.
        plain = _run(_engine(model_path, dtype), requests)
        same = [a.token_ids == b.token_ids for a, b in zip(plain, outputs, strict=True)]
        assert sum(same) >= len(same) - 2
    asyncio.run(engine.stop())
