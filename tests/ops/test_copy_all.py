"""Copies of many tensors at once."""

import pytest
import torch

from xtuner.v1.ops.copy_all import copy_all

TYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_every_value_arrives_cast_as_torch_casts_it_and_nothing_beside_it_changes(device, source, target):
    generator = torch.Generator().manual_seed(0)
    # Single values, odd sizes, several chunks, an address that is not aligned, no elements at all.
    shapes = [(1,), (7, 5), (3, 16384), (16385,), (40000,), (0, 3), (2, 3, 4)]
    sources = [(torch.randn(s, generator=generator) * 3).to(source).to(device) for s in shapes]
    sources.append(sources[4][3:20001])
    sources[0][0] = float("inf")
    rooms = [torch.full((s.numel() + 3,), 7.0, dtype=target, device=device) for s in sources]
    targets = [room[: s.numel()].view(s.shape) for room, s in zip(rooms, sources, strict=True)]
    copy_all(targets, sources)
    for room, t, s in zip(rooms, targets, sources, strict=True):
        assert torch.equal(t, s.to(target))
        assert (room[s.numel() :] == 7).all()
    copy_all(targets, [s * 2 for s in sources])
    assert all(torch.equal(t, (s * 2).to(target)) for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_other_strides_are_copied_too(device):
    source = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.zeros(9, 6, dtype=torch.bfloat16, device=device).t()
    copy_all([target], [source])
    assert torch.equal(target, source.bfloat16())
