"""Layouts over NCCL, in the types and with the kernels of a GPU run: gradients of two cards are those of one."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ranks
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests.engine

import ranks

from tests.engine.helpers import make_samples, packs_of, weights
from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import DenseModelConfig, MHAConfig, MoEModelConfig
from xtuner.v1.model.blocks import gather_whole

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

_SHAPE = dict(
    vocab_size=61, max_position_embeddings=256, hidden_size=256, num_hidden_layers=2,
    attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=64, qk_norm=True),
)  # fmt: skip
MODELS = {
    "qwen3": DenseModelConfig(model_type="qwen3", intermediate_size=512, **_SHAPE),
    # All experts are used: which ones would be chosen differs between precisions.
    "qwen3_moe": MoEModelConfig(
        model_type="qwen3_moe", n_routed_experts=4, num_experts_per_tok=4, moe_intermediate_size=128, **_SHAPE
    ),
}
LIMIT_S = 130
EAGER = ("float32", "bfloat16, recomputed")
CASES = {
    "float32": {"param_dtype": "float32", "reduce_dtype": "float32", "torch_compile": False, "recompute_ratio": 0.0},
    "bfloat16, recomputed": {"torch_compile": False},
    "bfloat16, recomputed, compiled": {"torch_compile": True},
}


@dataclass(frozen=True)
class Layout:
    world: int = 2
    model: str = "qwen3"
    fsdp: dict[str, Any] = field(default_factory=dict)
    sp: int = 1
    cases: tuple[str, ...] = EAGER


LAYOUTS = {
    "one": Layout(1, cases=tuple(CASES)),
    "one with experts": Layout(1, "qwen3_moe"),
    "dp": Layout(cases=tuple(CASES)),
    "replicas": Layout(fsdp={"hsdp_sharding_size": 1}),
    "sp": Layout(sp=2),
    "tp": Layout(fsdp={"tp_size": 2}, cases=tuple(CASES)),
    "ep": Layout(2, "qwen3_moe", {"ep_size": 2}),
}
ERRORS = {"float32": 1e-4, "bfloat16, recomputed": 3e-2, "bfloat16, recomputed, compiled": 3e-2}
"""Of a parameter's gradient, relative. A bfloat16 number errs by up to 2^-9 = 0.2 %, at each of the dozen roundings
between a row and the sum of its gradients, which layouts do in other orders."""


def update(device: torch.device, layout: Layout, case: str) -> dict[str, Any]:
    """Gradients, norm and weights of one step on packs of a few hundred rows."""
    engine = TrainEngine(
        MODELS[layout.model], FSDPConfig(**(CASES[case] | layout.fsdp)), device=device, sp_size=layout.sp,
        optim_cfg=AdamWConfig(lr=1e-3, eps=1e-2), lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=10,
    )  # fmt: skip
    engine.model.init_weights(seed=7, std=0.05)
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_: Any) -> None:
        for name, param in engine.model.named_parameters():
            whole = gather_whole(param.grad, engine.model.row_orders.get(name))
            gradients[name] = whole.to("cpu", torch.float32, copy=True)

    engine.optimizer.register_step_pre_hook(keep_gradients)
    per_pack = layout.sp * layout.fsdp.get("tp_size", 1)
    samples = make_samples(40)
    total = sum(s.num_trained for s in samples)
    packs = packs_of(samples, ranks=dist.get_world_size() // per_pack, length=200, share=True)
    own = [pack.to(device) for pack in packs[dist.get_rank() // per_pack][0]]
    for pack in own:
        logprobs, _ = engine.forward(pack)
        engine.backward(-(pack.advantages * logprobs).sum() / total, last=pack is own[-1])
    norm = engine.step().grad_norm
    engine.offload()
    engine.onload()
    after = {name: tensor.cpu() for name, tensor in weights(engine).items()}
    return {"norm": norm, "gradients": gradients, "weights": after}


def train(device: torch.device, name: str, folder: str) -> None:
    layout = LAYOUTS[name]
    results = {case: update(device, layout, case) for case in layout.cases}
    if dist.get_rank() == 0:
        torch.save(results, Path(folder) / f"{name}.pt")


def train_all(device_type: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Every layout in processes of its own, all at the same time: most of it is imports and the compiler."""
    groups = [ranks.start(device_type, layout.world, train, name, str(folder)) for name, layout in LAYOUTS.items()]
    ranks.finish(groups, LIMIT_S)
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in LAYOUTS}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return train_all("cuda", tmp_path_factory.mktemp("gpus"))


@pytest.mark.parametrize(
    "layout, case", [(name, case) for name, layout in LAYOUTS.items() if layout.world == 2 for case in layout.cases]
)
def test_two_gpus_equal_one(results, layout, case):
    one = results["one with experts" if LAYOUTS[layout].model == "qwen3_moe" else "one"][case]
    two, tolerance = results[layout][case], ERRORS[case]

    def error(kind: str, name: str) -> float:
        return float((two[kind][name] - one[kind][name]).norm() / one[kind][name].norm())

    errors = {name: error("gradients", name) for name in one["gradients"]}
    worst = max(errors, key=errors.__getitem__)
    print(f"{layout}, {case}: norm {two['norm'] / one['norm'] - 1:+.1e}, worst gradient {worst} {errors[worst]:.1e}")
    assert two["norm"] == pytest.approx(one["norm"], rel=tolerance)
    assert errors[worst] < tolerance, worst
    for name in one["weights"]:
        assert error("weights", name) < tolerance / 10, name
