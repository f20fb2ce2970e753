"""Whole tensors from the parts of four ranks, many in one exchange."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from xtuner.v1.model.blocks import gather_all, gather_whole

CUTS = [
    ((7, 5), (Shard(0), Shard(1))), ((1, 3), (Shard(0), Replicate())), ((3, 2), (Shard(0), Shard(0))),
    ((5,), (Replicate(), Shard(0))), ((4, 6, 3), (Shard(2), Shard(1))), ((1,), (Shard(0), Shard(0))),
    ((2, 1), (Shard(1), Shard(0))), ((8, 8), (Shard(0), Shard(1))),
]  # fmt: skip
"""Shapes, and how they are cut over 2 x 2 ranks: evenly or not, with and without empty parts."""


def _rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape, _ in CUTS]
    cut = [distribute_tensor(whole, mesh, placements) for whole, (_, placements) in zip(wholes, CUTS, strict=True)]
    types = [(torch.float32, torch.bfloat16)[i % 2] for i in range(len(CUTS))]
    alone = [gather_whole(tensor) for tensor in cut]
    together = gather_all([(tensor, dtype, None) for tensor, dtype in zip(cut, types, strict=True)])
    for whole, one, many, dtype in zip(wholes, alone, together, types, strict=True):
        assert torch.equal(one, whole) and many.dtype == dtype and torch.equal(many, whole.to(dtype))
    plain = torch.arange(3.0)
    assert torch.equal(gather_all([(plain, torch.bfloat16, None)])[0], plain.bfloat16())
    dist.destroy_process_group()


def test_four_ranks(tmp_path) -> None:
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=4)
