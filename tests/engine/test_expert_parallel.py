"""Experts on several ranks give the gradients, losses, checkpoints and files of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine, load_train_state, save_train_state
from xtuner.v1.engine.mesh import ParallelMesh
from xtuner.v1.model import BalancingLossConfig, MHAConfig, MoEModelConfig, RouterConfig, ZLossConfig
from xtuner.v1.model.blocks import gather_whole
from xtuner.v1.model.config import MLAConfig
from xtuner.v1.model.hf import load_hf_model

from .helpers import make_samples, on_ranks, packs_of, same_on_all, weights

# Name -> FSDP options and ranks a pack.
TWO = {
    "dp": ({}, 1),
    "ep": ({"ep_size": 2}, 1),
    "sp x ep of the same ranks": ({"ep_size": 2}, 2),
    "sp, load of each pack": ({}, 2),
}
FOUR = {
    "dp x ep": ({"ep_size": 2}, 1),
    "ep 4, recomputed": ({"ep_size": 4, "recompute_ratio": 1.0}, 1),
    "sp x dp x ep": ({"ep_size": 2, "reshard_after_forward": False}, 2),
}
_SHAPE: dict[str, Any] = dict(
    vocab_size=61, max_position_embeddings=256, hidden_size=32, num_hidden_layers=2, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=12,
    # Strong enough to be seen beside the policy loss.
    balancing_loss_cfg=BalancingLossConfig(balancing_loss_alpha=0.1), z_loss_cfg=ZLossConfig(z_loss_alpha=0.05),
)  # fmt: skip
_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
MODELS = {
    "qwen3_moe": MoEModelConfig(attention=MHAConfig(**_HEADS, qk_norm=True), **_SHAPE),
    "deepseek_v3": MoEModelConfig(
        model_type="deepseek_v3", dense_layers=(0,), intermediate_size=40, n_shared_experts=1,
        attention=MLAConfig(
            num_attention_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        router=RouterConfig(
            scoring_func="sigmoid", n_group=4, topk_group=2, router_scaling_factor=2.5, correction_bias=True
        ),
        **_SHAPE,
    ),
    "gpt_oss": MoEModelConfig(
        model_type="gpt_oss", expert_act="clamped_swiglu", expert_bias=True, router=RouterConfig(bias=True),
        attention=MHAConfig(**_HEADS, qkv_bias=True, o_bias=True, sinks=True, sliding_window=4),
        layer_types=["sliding_attention", "full_attention"], **_SHAPE,
    ),
}  # fmt: skip
# Only ranks that have the pack of one process can have its loss.
OF_EACH_PACK = BalancingLossConfig(balancing_loss_alpha=0.1, balancing_loss_global_average=False)
ALONE = {"qwen3_moe, load of each pack": MODELS["qwen3_moe"].model_copy(update={"balancing_loss_cfg": OF_EACH_PACK})}


def models_of(layout: str) -> list[str]:
    if layout == "sp, load of each pack":
        return list(ALONE)
    return list(MODELS) if layout in ("ep", "dp x ep", "sp x ep of the same ranks") else ["qwen3_moe"]


def make(model: str, fsdp: dict[str, Any], sp: int, mesh: ParallelMesh | None = None) -> TrainEngine:
    engine = TrainEngine(
        (MODELS | ALONE)[model], FSDPConfig(**({"recompute_ratio": 0.0, "torch_compile": False} | fsdp)),
        device=torch.device("cpu"), optim_cfg=AdamWConfig(lr=1e-2, max_grad_norm=0.05, eps=1e-3),
        lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=10, chunk_size=7, sp_size=sp, mesh=mesh,
    )  # fmt: skip
    engine.model.init_weights(seed=7, std=0.2)
    with torch.no_grad():  # initial biases are 0
        for name, param in engine.model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                param.copy_(torch.linspace(-0.2, 0.2, 8))
    return engine


def train(engine: TrainEngine, sp: int, steps: range) -> dict[str, Any]:
    """Gradients before clipping, norm and router metrics of each step, and the weights at the end."""
    rank, packs_at_once = dist.get_rank(), dist.get_world_size() // sp
    out: dict[str, Any] = {"gradients": [], "norms": [], "metrics": []}
    for step in steps:
        # Siblings behind one prompt, cut over ranks: their prompt is then computed more than once.
        samples = [s for s in make_samples(9, seed=step) for _ in range(1 + 3 * (s.rollout_id < 2))]
        total = sum(s.num_trained for s in samples)
        (pack,) = packs_of(samples, ranks=packs_at_once, length=4096, share=True)[rank // sp][0]
        routers = engine.router_loss([pack])
        logprobs, _ = engine.forward(pack)
        loss = -(pack.advantages * logprobs).sum() / total
        engine.backward(loss + routers.add(engine.model.router_stats))
        grads = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
        out["gradients"].append({name: gather_whole(grad).clone() for name, grad in grads.items()})
        out["metrics"].append(routers.metrics())
        out["norms"].append(engine.step().grad_norm)
    return out | {"weights": weights(engine)}


def train_all(folder: Path) -> dict[tuple[str, str], Any]:
    """Every layout of this number of ranks: trained and saved, and gone on with from one process's checkpoint."""
    results = {}
    for name, (fsdp, sp) in (TWO if dist.get_world_size() == 2 else FOUR).items():
        mesh = None
        for model in models_of(name):
            engine = make(model, fsdp, sp, mesh)
            mesh = engine.mesh
            result = results[name, model] = train(engine, sp, range(2))
            save_train_state(engine, folder / f"{name}-{model}")
            engine.save_hf(folder / f"{name}-{model}-hf", None, torch.float32)
            resumed = make(model, fsdp, sp, mesh)
            load_train_state(resumed, folder / f"one-{model}")
            result["resumed"] = train(resumed, sp, range(2, 3))["weights"]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def one(folder) -> dict[str, Any]:
    torch.set_num_threads(1)
    results = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for model in MODELS | ALONE:
        engine = make(model, {}, 1)
        results[model] = train(engine, 1, range(2))
        save_train_state(engine, folder / f"one-{model}")
        results[model]["resumed"] = train(engine, 1, range(2, 3))["weights"]
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_experts_on_several_ranks_equal_one_process(one, folder, world) -> None:
    results = same_on_all(on_ranks(world, train_all, folder))
    assert len(results) == (8 if world == 2 else 5)
    for (name, model), got in results.items():
        expected = one[model]
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
        for step, gradients in enumerate(expected["gradients"]):
            assert got["metrics"][step] == pytest.approx(expected["metrics"][step], rel=1e-5), name
            assert got["gradients"][step].keys() == gradients.keys()
            for param, grad in gradients.items():
                error = (got["gradients"][step][param] - grad).norm() / grad.norm()
                assert error < 2e-5, (name, model, step, param, float(error))
        for kind in ("weights", "resumed"):
            assert got[kind].keys() == expected[kind].keys()
            for param, tensor in expected[kind].items():
                error = (got[kind][param] - tensor).norm() / tensor.norm().clamp_min(1e-9)
                assert error < 1e-5, (name, model, kind, param, float(error))


def test_files_of_all_ranks_are_one_model(one, folder, one_process_group) -> None:
    """What expert-parallel ranks wrote, read in one process: the checkpoint, and the Hugging Face folder."""
    for name in ("ep", "dp x ep"):
        for model in MODELS:
            assert len(list((folder / f"{name}-{model}").glob("rank-*"))) == (2 if name == "ep" else 4)
            engine = make(model, {}, 1)
            load_train_state(engine, folder / f"{name}-{model}")
            from_hf = MODELS[model].build("cpu")
            load_hf_model(from_hf, folder / f"{name}-{model}-hf")
            exported = weights(engine)
            for key, tensor in one[model]["weights"].items():
                torch.testing.assert_close(exported[key], tensor, rtol=1e-4, atol=1e-5, msg=key)
            for param, other in zip(engine.model.parameters(), from_hf.parameters(), strict=True):
                assert torch.equal(gather_whole(param), other)


def test_impossible_sizes_are_refused_with_the_numbers(one_process_group) -> None:
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="fsdp_cfg.ep_size=3 does not divide the model's 8 experts"):
        TrainEngine(MODELS["qwen3_moe"], FSDPConfig(ep_size=3), device=device)
    with pytest.raises(ValueError, match="fsdp_cfg.ep_size=2 does not divide num_workers=1"):
        TrainEngine(MODELS["qwen3_moe"], FSDPConfig(ep_size=2), device=device)
    with pytest.raises(ValueError, match="fsdp_cfg.tp_size=2: layers with experts"):
        TrainEngine(MODELS["qwen3_moe"], FSDPConfig(tp_size=2), device=device)
