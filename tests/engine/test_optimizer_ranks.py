"""Muon and bfloat16 moments on sharded parameters: the updates of one process, to the bit where that can be."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig, MuonConfig, OptimConfig
from xtuner.v1.engine import TrainEngine, load_train_state, save_train_state
from xtuner.v1.engine.mesh import ParallelMesh
from xtuner.v1.model import DenseModelConfig, MHAConfig, MoEModelConfig, TransformerConfig
from xtuner.v1.model.hf import copy_rows

from .helpers import on_ranks, weights

_SHAPE = dict(
    vocab_size=61, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2,
    attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True),
)  # fmt: skip
# 44 rows of gate and up, of which four ranks get 22 each: a rank's part ends within a matrix.
DENSE = DenseModelConfig(intermediate_size=44, **_SHAPE)
EXPERTS = MoEModelConfig(
    model_type="qwen3_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **_SHAPE
)
LAYOUTS: dict[str, tuple[TransformerConfig, dict[str, int]]] = {
    "shard": (DENSE, {}),
    "replicate x shard": (DENSE, {"hsdp_sharding_size": 2}),
    "shard x tp": (DENSE, {"tp_size": 2}),
    "shard, experts": (EXPERTS, {}),
    "shard x ep": (EXPERTS, {"ep_size": 2}),
}
MUON = MuonConfig(lr=1e-2)
SMALL = AdamWConfig(lr=1e-2, moment_dtype="bfloat16")


def make(
    model: TransformerConfig, fsdp: dict[str, int], optim: OptimConfig, device: str = "cpu",
    mesh: ParallelMesh | None = None,
) -> TrainEngine:  # fmt: skip
    engine = TrainEngine(
        model, FSDPConfig(torch_compile=False, **fsdp), device=torch.device(device), optim_cfg=optim,
        lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=10, mesh=mesh,
    )  # fmt: skip
    engine.model.init_weights(seed=7)
    return engine


def train(engine: TrainEngine, steps: range) -> dict[str, torch.Tensor]:
    """Updates with gradients that are the same, whoever holds which part."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, param in engine.model.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
                copy_rows(param.grad, grad, 0, engine.model.row_orders.get(name))
        engine.optimizer.step()
    return weights(engine)


def train_all(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Every layout, trained and gone on with from one process's checkpoint; and weights with bfloat16 moments."""
    results, meshes = {}, {}
    for name, (model, fsdp) in LAYOUTS.items():
        engine = make(model, fsdp, MUON)
        meshes[name] = engine.mesh
        trained = train(engine, range(2))
        save_train_state(engine, folder / name)
        resumed = make(model, fsdp, MUON, mesh=engine.mesh)
        load_train_state(resumed, folder / f"one {model.model_type}")
        results[name] = {"trained": trained, "resumed": train(resumed, range(2, 3))}
    small = make(*LAYOUTS["replicate x shard"], SMALL, mesh=meshes["replicate x shard"])
    train(small, range(3))
    params = small.model.parameters()
    moments = torch.cat([t.flatten() for p in params for t in small.optimizer.moments_of(p).values()])
    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, moments)
    assert torch.equal(replicas[0], replicas[2]) and torch.equal(replicas[1], replicas[3])
    assert not torch.equal(replicas[0], replicas[1])
    save_train_state(small, folder / "small")
    return results, weights(small)


def test_four_ranks_update_like_one(tmp_path):
    one = {}
    for model in (DENSE, EXPERTS):
        engine = make(model, {}, MUON)
        trained = train(engine, range(2))
        save_train_state(engine, tmp_path / f"one {model.model_type}")
        one[model.model_type] = {"trained": trained, "resumed": train(engine, range(2, 3))}
    results, with_small_moments = on_ranks(4, train_all, tmp_path)[0]
    for name, (model, _) in LAYOUTS.items():
        for kind, expected in one[model.model_type].items():
            for param, tensor in expected.items():
                assert torch.equal(results[name][kind][param], tensor), (name, kind, param)
        back = make(model, {}, MUON)
        load_train_state(back, tmp_path / name)
        for param, tensor in train(back, range(2, 3)).items():
            assert torch.equal(tensor, one[model.model_type]["resumed"][param]), (name, param)
    small = make(DENSE, {}, SMALL)
    load_train_state(small, tmp_path / "small")
    for param, tensor in with_small_moments.items():
        assert torch.equal(weights(small)[param], tensor)
    assert all(
        t.float().abs().max() > 0 for p in small.model.parameters() for t in small.optimizer.moments_of(p).values()
    )
