"""The model under FSDP2: layers as units, the model as root, weights in and out of shards."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.model.hf import export_hf_batches, export_hf_tensors, load_hf_tensor
from xtuner.v1.ops.attention import PackedAttention

from .helpers import random_ids, tiny_config, tiny_model


def _shard(model, mesh, **kw):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kw)
    return fully_shard(model, mesh=mesh, **kw)


def _logprobs(model):
    ids = torch.tensor(random_ids(0, 20))
    context = PackedAttention(SegmentLayout([8, 12], [-1, 0]), "cpu")
    rows = torch.arange(7, 19)
    return model(ids, torch.arange(20), context, rows, ids[rows + 1], torch.ones(12), 5)[0]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_model_equals_plain_model(mesh, tied: bool) -> None:
    plain = tiny_model(tie_word_embeddings=tied)
    sharded = _shard(tiny_config(tie_word_embeddings=tied).build("meta"), mesh).to_empty(device="cpu")
    weights = dict(export_hf_tensors(plain, torch.float32))
    assert sum(load_hf_tensor(sharded, name, tensor) for name, tensor in weights.items()) == sum(
        p.numel() for p in plain.parameters()
    )
    expected, out = _logprobs(plain), _logprobs(sharded)
    assert torch.equal(out, expected)
    expected.sum().backward()
    out.sum().backward()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.full_tensor())
    exported = dict(export_hf_tensors(sharded, torch.float32))
    assert all(torch.equal(weights[name], exported[name]) for name in weights)


def test_angles_stay_float32_under_mixed_precision(mesh) -> None:
    """FSDP casts the tensors among a layer's arguments; bfloat16 angles would blur all long distances."""
    model = tiny_model()
    _shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append((args[0].dtype, args[1].cos.dtype)))
    with torch.no_grad():
        _logprobs(model)
    assert seen == [(torch.bfloat16, torch.float32)] * 2


def _two_ranks(rank: int, port_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    # An odd vocabulary: the last rank's shard is shorter.
    plain = tiny_model()
    sharded = _shard(tiny_config().build("meta"), mesh).to_empty(device="cpu")
    weights = dict(export_hf_tensors(plain, torch.float32))
    for name, tensor in weights.items():
        load_hf_tensor(sharded, name, tensor)
    for dtype in (torch.float32, torch.bfloat16):
        for at_once in (0, 10_000, 1 << 30):
            batches = list(export_hf_batches(sharded, dtype, at_once))
            assert len(batches) == 1 if at_once == 1 << 30 else len(batches) > 3
            exported = {name: tensor for batch in batches for name, tensor in batch.items()}
            assert list(exported) == list(weights)
            assert all(torch.equal(weights[name].to(dtype), exported[name]) for name in weights)
    again = _shard(tiny_config().build("meta"), mesh).to_empty(device="cpu")
    again.init_weights(0, std=0.2)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(again.parameters(), plain.parameters(), strict=True))
    # Mean over ranks of the ranks' gradients; one rank has no targets and must still take part.
    out = _logprobs(sharded)
    (out.sum() if rank == 0 else out[:0].sum()).backward()
    _logprobs(plain).sum().backward()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad / 2, rtol=1e-5, atol=1e-6)
    dist.barrier()
    os._exit(0)  # torch 2.13 aborts now and then when a process ends that has gathered and summed, all being done


def test_two_ranks(tmp_path) -> None:
    mp.spawn(_two_ranks, args=(str(tmp_path / "store"),), nprocs=2)
