"""The engine on the card with requests of every kind: each token is the one that the CPU's sampler draws from the
model's logits, whatever step, batch and slot it was drawn in."""

import asyncio
import json
import random

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
from xtuner.v1.rl.rollout.backends.native.requests import RequestLimits, make_sequence
from xtuner.v1.rl.rollout.backends.native.sampler import SAMPLING_FIELDS, SamplingBatch, sample

VOCAB = 5000
WISHES = [
    {}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0}, {"repetition_penalty": 1.3},
    {"min_tokens": 6, "frequency_penalty": 0.4, "min_p": 0.05}, {"presence_penalty": 0.5, "top_k": 20},
    {"temperature": 0, "presence_penalty": 2.0, "top_logprobs": 3}, {"temperature": 1.2, "top_p": 0.95, "top_k": 50},
    {"top_logprobs": 20}, {"stop_token_ids": [7, 8, 9, 11], "min_tokens": 3, "top_p": 0.5, "top_logprobs": 5},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    attention = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=64, qk_norm=True)
    config = DenseModelConfig(
        model_type="qwen3", vocab_size=VOCAB, max_position_embeddings=512, num_hidden_layers=2, hidden_size=128,
        intermediate_size=256, eos_token_id=2, attention=attention,
    )  # fmt: skip
    model = config.build("cpu")
    model.init_weights(0, 0.15)
    save_hf_model(export_hf_tensors(model, torch.float32), config, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    model = config.build("cuda", torch.float32)
    load_hf_model(model, path)
    return path, model


def test_every_token_is_the_cpus(folder):
    path, model = folder
    engine = NativeEngine(path, device="cuda", dtype=torch.float32, max_batch_size=12, gpu_memory_utilization=0.2)
    asyncio.run(engine.start())
    rng = random.Random(0)
    requests = [
        GenerateRequest(
            i, [rng.randrange(10, VOCAB) for _ in range(4 + i % 9)] * (1 + i % 3),
            SampleParams(max_tokens=6 + rng.randrange(60), **WISHES[i % len(WISHES)]), 100 + i,
        )
        for i in range(72)
    ]  # fmt: skip

    async def later(r):
        for _ in range(r.request_id // 2):
            await asyncio.sleep(0)
        return await engine.generate(r)

    async def main():
        # The first are plain: the state on the device has to grow for those behind them.
        first = await asyncio.gather(*(engine.generate(r) for r in requests[:: len(WISHES)]))
        rest = [r for i, r in enumerate(requests) if i % len(WISHES)]
        return {out.request_id: out for out in [*first, *await asyncio.gather(*map(later, rest))]}

    outputs = asyncio.run(main())
    limits = RequestLimits(VOCAB, 512, [2], str)
    fields = [("prompt_length", np.int64), ("length", np.int64), *SAMPLING_FIELDS]
    odd = total = 0
    for r in requests:
        out, prompt = outputs[r.request_id], len(r.prompt_ids)
        assert out.error is None
        ids = r.prompt_ids + out.token_ids
        with torch.no_grad():
            attention = PackedAttention(SegmentLayout([len(ids)], [-1]), torch.device("cuda"))
            hidden = model.hidden_states(torch.tensor(ids).cuda(), torch.arange(len(ids)).cuda(), attention)
            logits = model.logits(hidden)[prompt - 1 : -1].cpu()
        count, sequence = len(out.token_ids), make_sequence(r, limits)
        rows = np.array([(prompt, prompt + t, *sequence.parameters) for t in range(count)], fields)
        tokens = np.array([ids] * count, np.int32)
        drawn = sample(logits, SamplingBatch.build(rows, tokens, np.array([sequence.stop_ids] * count)))
        same = drawn.tokens == torch.tensor(out.token_ids)
        odd, total = odd + int((~same).sum()), total + count
        assert (drawn.logprobs - torch.tensor(out.logprobs))[same].abs().max() < 1e-3, r.params
        if r.params.top_logprobs > 1:
            assert len(out.top_logprobs) == count
            for t, top in enumerate(out.top_logprobs):
                there = drawn.top_ids[t] >= 0
                assert len(top) == there.sum()
                values = torch.tensor([value for _, value in top])
                assert (values - drawn.top_logprobs[t][there]).abs().max() < 1e-3
        else:
            assert out.top_logprobs is None
    assert total > 1200 and odd <= total // 500, (odd, total)
    asyncio.run(engine.stop())
