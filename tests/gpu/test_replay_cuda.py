"""Experts that the engine returns on a GPU: kept by graphs in the pages, and used by the trainer's forward."""

import asyncio
import json

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import SampleParams, SegmentLayout
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.ops.expert_pages import read_experts, store_experts
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "eos_token_id": 2, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "mlp_only_layers": [1],
}  # fmt: skip


@pytest.mark.parametrize("columns", [5, 16, 384])
def test_rows_go_to_their_pages_and_nobodys_nowhere(columns) -> None:
    flat = torch.zeros(6, 40 + 64 * columns, dtype=torch.int16, device="cuda")
    pages = flat[:, 40:].unflatten(1, (64, -1))
    chosen = torch.randint(0, 256, (200, columns), device="cuda")
    places = torch.randperm(6 * 64, device="cuda")[:200]
    places[::7] = -1
    before = flat.clone()
    store_experts(chosen, pages, places)
    assert torch.equal(read_experts(pages, places[places >= 0]), chosen[places >= 0].short())
    pages[places[places >= 0] // 64, places[places >= 0] % 64] = 0
    assert torch.equal(flat, before)


@pytest.fixture(scope="module")
def model_and_path(tmp_path_factory):
    """A model in the type of compute, whose routers' logits differ by little more than it resolves."""
    path, config = tmp_path_factory.mktemp("experts") / "m", model_config_from_dict(CONFIG)
    model = config.build("cpu")
    model.init_weights(0, std=0.1)
    with torch.no_grad():
        for layer in (0, 2):
            weight = model.layers[layer].mlp.gate.weight
            weight.copy_(weight[:1] + 0.05 * weight)
    save_hf_model(export_hf_tensors(model, torch.bfloat16), config, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return model.to("cuda", torch.bfloat16), path


def logprobs_and_experts(model, prompt, tokens, given=None):
    """Of the response by the trainer's forward, and what the routers would choose by themselves."""
    whole = torch.tensor(prompt + tokens[:-1], device="cuda")
    rows = torch.arange(len(prompt) - 1, len(whole), device="cuda")
    own: list[torch.Tensor] = []
    hooks = [
        model.layers[layer].mlp.gate.register_forward_hook(lambda gate, args, out: own.append(out[1]))
        for layer in (0, 2)
    ]
    with torch.no_grad():
        logprobs, _ = model(
            whole, torch.arange(len(whole), device="cuda"), PackedAttention(SegmentLayout([len(whole)], [-1]), "cuda"),
            rows, torch.tensor(tokens, device="cuda"), torch.ones(len(rows), device="cuda"), 64,
            routed_experts=None if given is None else torch.from_numpy(given).cuda(),
        )  # fmt: skip
    for hook in hooks:
        hook.remove()
    return logprobs.cpu(), torch.stack(own, 1).cpu().numpy()


def test_experts_of_graphs_prefixes_and_wakes(model_and_path) -> None:
    model, path = model_and_path
    engine = NativeEngine(
        path, device="cuda", max_batch_size=16, gpu_memory_utilization=0.3, max_prefill_rows=100,
        return_routed_experts=True,
    )  # fmt: skip
    prompts = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 30, 130)]
    prompts += [prompts[1], prompts[2], prompts[2]]
    params = SampleParams(temperature=1.0, max_tokens=90, min_tokens=70)

    async def rounds():
        await engine.start()
        engine._cache.set_budget(48 * PAGE * engine._cache.row_bytes)
        out = []
        for round_ in range(3):
            if round_ == 2:  # more pages than the graphs knew when they were captured
                await engine.sleep(("kv_cache",))
                await engine.wake(("kv_cache",))
                assert engine._cache.num_pages > 48
            requests = [GenerateRequest(i, p, params, 10 * round_ + i) for i, p in enumerate(prompts)]
            out.append(await asyncio.gather(*map(engine.generate, requests)))
        await engine.stop()
        return out

    gaps: dict[str, list[float]] = {"own": [], "replayed": []}
    alike = []
    for outputs in asyncio.run(rounds()):
        for prompt, out in zip(prompts, outputs, strict=True):
            given = out.routed_experts
            assert given.shape == (len(prompt) + len(out.token_ids) - 1, 2, 4)
            logprobs, own = logprobs_and_experts(model, prompt, out.token_ids)
            replayed, _ = logprobs_and_experts(model, prompt, out.token_ids, given)
            alike.append(float(np.mean((given[..., None] == own[..., None, :]).any(-1))))
            for name, values in (("own", logprobs), ("replayed", replayed)):
                gaps[name].append(float((values - torch.tensor(out.logprobs)).abs().mean()))
    print("alike", min(alike), max(alike), {name: float(np.mean(values)) for name, values in gaps.items()})
    assert min(alike) > 0.8
    assert np.mean(gaps["replayed"]) < 0.7 * np.mean(gaps["own"])
