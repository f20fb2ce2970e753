"""deepseek_v3, gpt_oss and windows on a GPU in half precision: against the CPU in float32."""

import asyncio
import json

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto import PackedBatch, SampleParams, SegmentLayout
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.ops.attention import PackedAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip
# All experts of a layer are used: which ones would be chosen differs between precisions.
FAMILIES = {
    "mistral": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24, "num_local_experts": 4,
                "num_experts_per_tok": 4, "swiglu_limit": 1.0},
    "deepseek_v3": {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def model(request):
    """float32 on the CPU; its weights are exact in bfloat16."""
    config = model_config_from_dict({"model_type": request.param, **_BASE, **FAMILIES[request.param]})
    model = config.build("cpu")
    model.init_weights(0, std=0.15)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("sinks"):
                param.copy_(torch.linspace(-1, 1, len(param)))
            param.copy_(param.bfloat16())
    return model


def _error(got, want):
    return float(((got.cpu().double() - want.double()).norm() / want.double().norm()).detach())


def test_logprobs_and_gradients(model) -> None:
    layout = SegmentLayout([60, 40, 90, 33, 20, 5], [-1, 0, 0, -1, 3, 3])
    rows, generator = sum(layout.lengths), torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 128, (rows,), generator=generator) for _ in range(2))
    firsts = [layout.lengths[p] if p >= 0 else 0 for p in layout.prefix]
    positions = torch.cat([torch.arange(n) + f for n, f in zip(layout.lengths, firsts, strict=True)])
    on_gpu = model.config.build("cuda", torch.bfloat16)
    results = []
    for m, device in ((model, "cpu"), (on_gpu, "cuda")):
        if m is on_gpu:
            with torch.no_grad():
                for name, param in m.named_parameters():
                    param.copy_(model.get_parameter(name))
        inputs = [t.to(device) for t in (torch.arange(rows), labels, torch.ones(rows))]
        logprobs, _ = m(ids.to(device), positions.to(device), PackedAttention(layout, device), *inputs, 64)
        logprobs.mean().backward()
        results.append(logprobs)
    assert _error(results[1], results[0]) < 2e-2
    for name, param in on_gpu.named_parameters():
        if param.requires_grad:
            # Rounding moves values over the clamp, and some gradients are small sums of large parts.
            assert _error(param.grad, model.get_parameter(name).grad) < 0.25, name


def test_engine_log_probs_equal_the_models(model, tmp_path) -> None:
    from xtuner.v1.rl.rollout.backends.base import GenerateRequest
    from xtuner.v1.rl.rollout.backends.native import NativeEngine

    save_hf_model(export_hf_tensors(model, torch.bfloat16), model.config, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    engine = NativeEngine(tmp_path / "m", device="cuda", max_batch_size=8, gpu_memory_utilization=0.3)
    params = SampleParams(temperature=1.0, max_tokens=60, min_tokens=60)
    prompts = [[5 + i] * n for i, n in enumerate((3, 30, 100))]

    async def outputs():
        await engine.start()
        requests = [GenerateRequest(i, p, params, i) for i, p in enumerate(prompts)]
        done = await asyncio.gather(*map(engine.generate, requests))
        await engine.stop()
        return done

    for ids, out in zip(prompts, asyncio.run(outputs()), strict=True):
        whole = torch.tensor(ids + out.token_ids[:-1])
        rows, count = torch.arange(len(ids) - 1, len(whole)), len(whole)
        context = PackedAttention(SegmentLayout([count], [-1]), "cpu")
        labels = torch.tensor(out.token_ids)
        with torch.no_grad():
            expected, _ = model(whole, torch.arange(count), context, rows, labels, torch.ones(len(rows)), 64)
        # min_tokens takes the end token out of the distribution.
        assert (torch.tensor(out.logprobs) - expected).abs().mean() < 0.1


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_updates_on_the_host_are_those_on_the_card(family) -> None:
    """Parameters that FSDP leaves alone, such as DeepSeek's correction bias, do not come from the host with it."""
    config = model_config_from_dict({"model_type": family, **_BASE, **FAMILIES[family]})
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    generator, rows = torch.Generator().manual_seed(0), 200
    ids, labels = (torch.randint(3, 128, (rows,), generator=generator) for _ in range(2))
    pack = PackedBatch(
        input_ids=ids, position_ids=torch.arange(rows), layout=SegmentLayout([rows], [-1]),
        target_rows=torch.arange(rows), labels=labels, advantages=torch.randn(rows, generator=generator),
        inv_temperature=torch.ones(rows), sample_index=torch.zeros(rows, dtype=torch.int64), rollout_ids=[0],
    ).to("cuda")  # fmt: skip
    found = []
    try:
        for offload in (False, True):
            engine = TrainEngine(
                config, FSDPConfig(torch_compile=False, cpu_offload=offload), device=torch.device("cuda", 0),
                optim_cfg=AdamWConfig(lr=1e-2, eps=1e-3), lr_cfg=LRConfig(warmup_ratio=0),
            )  # fmt: skip
            engine.model.init_weights(0, std=0.15)
            with torch.no_grad():
                for name in engine.model.float32_names:
                    bias = engine.model.get_parameter(name)
                    bias.copy_(torch.linspace(-1, 1, bias.numel()))
            norms = []
            for _ in range(2):
                routers = engine.router_loss([pack])
                logprobs, _ = engine.forward(pack)
                engine.backward(-(pack.advantages * logprobs).mean() + routers.add(engine.model.router_stats))
                norms.append(engine.step().grad_norm)
                engine.offload()
                engine.onload()
            buckets = engine.weight_buckets(1 << 30, torch.float32)
            found.append((norms, {name: t.cpu() for bucket in buckets for name, t in bucket.tensors.items()}))
    finally:
        dist.destroy_process_group()
    (norms, expected), (offloaded_norms, got) = found
    assert offloaded_norms == pytest.approx(norms, rel=2e-2)
    for name, tensor in expected.items():
        limit = 5e-2 if name.endswith("bias") else 1e-2  # whose gradient is the small rest of a large sum of rows
        error = float((got[name] - tensor).norm() / tensor.norm())
        assert error <= limit, (name, error)
