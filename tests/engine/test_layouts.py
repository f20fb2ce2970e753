"""Every parallel layout gives the gradients, norms and weights of one process."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig, MuonConfig
from xtuner.v1.engine import TrainEngine, load_train_state, save_train_state
from xtuner.v1.engine.mesh import ParallelMesh
from xtuner.v1.model import DenseModelConfig, MHAConfig
from xtuner.v1.model.blocks import gather_whole

from .helpers import make_samples, on_ranks, packs_of, same_on_all, weights


@dataclass(frozen=True)
class Layout:
    models: tuple[str, ...]
    fsdp: dict[str, Any] = field(default_factory=dict)
    sp: int = 1

    @property
    def ranks_per_pack(self) -> int:
        return self.sp * self.fsdp.get("tp_size", 1)


ONE = Layout(("qwen3", "qwen2", "llama", "qwen2, muon"))
TWO = {
    "dp": Layout(("qwen3",)),
    "sp": Layout(("qwen3",), sp=2),
    "tp": Layout(("qwen3", "qwen2", "llama"), {"tp_size": 2}),
}
FOUR = {
    "hsdp": Layout(("qwen2",), {"hsdp_sharding_size": 2}),
    "sp 4, more ranks than key heads": Layout(("qwen3",), {"recompute_ratio": 1.0}, sp=4),
    "dp x sp": Layout(("qwen2",), {"reshard_after_forward": False}, sp=2),
    "dp x tp": Layout(("qwen2, muon",), {"tp_size": 2, "recompute_ratio": 1.0}),
    "sp x tp": Layout(("qwen3",), {"tp_size": 2, "recompute_ratio": 1.0, "recompute": "selective"}, sp=2),
    "hsdp x sp": Layout(("qwen3",), {"hsdp_sharding_size": 2}, sp=2),
    "hsdp x tp": Layout(("llama",), {"hsdp_sharding_size": 1, "tp_size": 2}),
}
_SHAPE = dict(vocab_size=61, max_position_embeddings=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
MODELS = {
    "qwen3": DenseModelConfig(
        model_type="qwen3", attention=MHAConfig(**_HEADS, qk_norm=True), tie_word_embeddings=True, **_SHAPE
    ),
    "qwen2": DenseModelConfig(model_type="qwen2", attention=MHAConfig(**_HEADS, qkv_bias=True), **_SHAPE),
    "llama": DenseModelConfig(
        model_type="llama", attention=MHAConfig(**_HEADS, qkv_bias=True, o_bias=True), mlp_bias=True, **_SHAPE
    ),
}
MODELS["qwen2, muon"] = MODELS["qwen2"]
# With a small eps Adam divides a gradient by its own size, and moves a weight by the sign of a rounding error.
ADAMW = AdamWConfig(lr=1e-2, max_grad_norm=0.05, eps=1e-3)
MUON = MuonConfig(lr=1e-3, max_grad_norm=0.05, eps=1e-3)


def make(model: str, layout: Layout, mesh: ParallelMesh | None = None) -> TrainEngine:
    fsdp = FSDPConfig(**({"recompute_ratio": 0.0, "torch_compile": False} | layout.fsdp))
    optim = MUON if "muon" in model else ADAMW
    engine = TrainEngine(
        MODELS[model], fsdp, device=torch.device("cpu"), optim_cfg=optim,
        lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=10, chunk_size=7, sp_size=layout.sp, mesh=mesh,
    )  # fmt: skip
    engine.model.init_weights(seed=7, std=0.1)
    return engine


def train(engine: TrainEngine, layout: Layout, steps: range) -> dict[str, Any]:
    """Clipped gradients and norm of each step, and the weights at the end."""
    data_rank, data_ranks = dist.get_rank() // layout.ranks_per_pack, dist.get_world_size() // layout.ranks_per_pack
    out: dict[str, Any] = {"gradients": [], "norms": []}
    orders = engine.model.row_orders

    def keep_gradients(*_: Any) -> None:
        params = engine.model.named_parameters()
        out["gradients"].append({name: gather_whole(p.grad, orders.get(name)).clone() for name, p in params})

    hook = engine.optimizer.register_step_pre_hook(keep_gradients)
    for step in steps:
        # Siblings with a shared prompt, rows in no multiple of anything; the second step has too few for four ranks.
        first, *others = make_samples(9 if step != 1 else 1, seed=step)
        samples = [first, first, *others]
        total = sum(s.num_trained for s in samples)
        packs = packs_of(samples, ranks=data_ranks, length=60, share=True)[data_rank][0]
        for pack in packs:
            logprobs, entropy = engine.forward(pack, with_entropy=True)
            loss = -(pack.advantages * logprobs + 0.1 * entropy).sum() / total
            engine.backward(loss, last=pack is packs[-1])
        out["norms"].append(engine.step().grad_norm)
    hook.remove()
    return out | {"weights": weights(engine)}


def train_all(folder: Path) -> dict[tuple[str, str], Any]:
    """Every layout of this number of ranks: trained and saved, and gone on with from one process's checkpoint."""
    results = {}
    for name, layout in (TWO if dist.get_world_size() == 2 else FOUR).items():
        for model in layout.models:
            engine = make(model, layout)
            results[name, model] = train(engine, layout, range(2))
            save_train_state(engine, folder / f"{name}-{model}")
            resumed = make(model, layout, engine.mesh)
            load_train_state(resumed, folder / f"one-{model}")
            results[name, model]["resumed"] = train(resumed, layout, range(2, 3))["weights"]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(folder) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    results = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for model in MODELS:
        engine = make(model, ONE)
        results[model] = train(engine, ONE, range(2))
        save_train_state(engine, folder / f"one-{model}")
        results[model]["resumed"] = train(engine, ONE, range(2, 3))["weights"]
    yield results
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_equals_one_process(one, folder, world):
    results = same_on_all(on_ranks(world, train_all, folder))
    for (name, model), got in results.items():
        expected = one[model]
        # Muon rounds gradients to bfloat16 before it makes them orthogonal.
        weight_error = 1e-4 if "muon" in model else 1e-5
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5), name
        for step, gradients in enumerate(expected["gradients"]):
            for param, grad in gradients.items():
                error = (got["gradients"][step][param] - grad).norm() / grad.norm()
                assert error < (2e-5 if step == 0 else 2 * weight_error), (name, model, step, param, float(error))
        for kind in ("weights", "resumed"):
            for param, tensor in expected[kind].items():
                error = (got[kind][param] - tensor).norm() / tensor.norm()
                assert error < weight_error, (name, model, kind, param, float(error))
        back = make(model, ONE)
        load_train_state(back, folder / f"{name}-{model}")
        for param, tensor in weights(back).items():
            assert torch.equal(tensor, got["weights"][param]), (name, model, param)
