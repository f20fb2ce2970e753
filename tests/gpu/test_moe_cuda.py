"""Experts on GPUs: the grouped matmul, a compiled training step, and experts on two devices."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto import PackedBatch, SegmentLayout
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import MHAConfig, MoEModelConfig, ZLossConfig
from xtuner.v1.model.blocks import gather_whole
from xtuner.v1.ops.grouped_mm import _has_kernel, grouped_mm, reference_grouped_mm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _error(got, want):
    return float(((got.double() - want.double()).norm() / want.double().norm()).detach())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [[130, 0, 7, 512, 1], [0, 0, 640, 0, 0], [0, 3, 0, 0, 0]])
def test_grouped_mm_equals_the_loop_in_float64(sizes, transposed) -> None:
    """Groups of any size, empty ones among them, whose gradient is zero and not what lay in memory."""
    torch.empty(1 << 28, device="cuda").fill_(float("nan"))  # what an unwritten gradient would be made of
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    stored = torch.randn(5, *((64, 96) if transposed else (96, 64)), device="cuda", dtype=torch.bfloat16)
    stored = stored.requires_grad_()
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, stored))
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    weight, exact_weight = (t.transpose(1, 2) if transposed else t for t in (stored, exact_w))
    assert _has_kernel(x, weight)
    out, expected = grouped_mm(x, weight, ends), reference_grouped_mm(exact_x, exact_weight, ends)
    seed = torch.randn_like(out)
    out.backward(seed)
    expected.backward(seed.double())
    for got, want in ((out, expected), (x.grad, exact_x.grad), (stored.grad, exact_w.grad)):
        assert _error(got, want) < 1e-2
    for expert, size in enumerate(sizes):
        assert bool(stored.grad[expert].any()) == (size > 0)


# All experts are used: which ones would be chosen differs between precisions.
CONFIG = MoEModelConfig(
    vocab_size=256, max_position_embeddings=512, num_hidden_layers=3, hidden_size=128, n_routed_experts=4,
    num_experts_per_tok=4, moe_intermediate_size=64, dense_layers=(1,), intermediate_size=192,
    attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32, qk_norm=True),
    z_loss_cfg=ZLossConfig(),
)  # fmt: skip


def _packs() -> list[PackedBatch]:
    generator, packs = torch.Generator().manual_seed(0), []
    for lengths in ([100, 60, 33], [20, 150, 7, 30]):
        rows = sum(lengths)
        ids, labels = (torch.randint(0, 256, (rows,), generator=generator) for _ in range(2))
        packs.append(
            PackedBatch(
                input_ids=ids, position_ids=torch.cat([torch.arange(n) for n in lengths]),
                layout=SegmentLayout(lengths, [-1] * len(lengths)), target_rows=torch.arange(rows), labels=labels,
                advantages=torch.randn(rows, generator=generator), inv_temperature=torch.ones(rows),
                sample_index=torch.zeros(rows, dtype=torch.int64), rollout_ids=[0],
            )
        )  # fmt: skip
    return packs


def _gradients(
    device: str, packs: list[PackedBatch], config: MoEModelConfig = CONFIG, **fsdp
) -> dict[str, torch.Tensor]:
    engine = TrainEngine(
        config, FSDPConfig(**({"reduce_dtype": "float32"} | fsdp)), device=torch.device(device),
        optim_cfg=AdamWConfig(lr=1e-3), lr_cfg=LRConfig(warmup_ratio=0),
    )  # fmt: skip
    engine.model.init_weights(0, std=0.1)
    routers = engine.router_loss(packs)
    for pack in (p.to(device) for p in packs):
        logprobs, _ = engine.forward(pack)
        loss = -(pack.advantages * logprobs).sum() / 400
        engine.backward(loss + routers.add(engine.model.router_stats))
    # A copy: the step clips in place.
    grads = {name: gather_whole(p.grad).to("cpu", copy=True) for name, p in engine.model.named_parameters()}
    assert engine.step().skipped is None and routers.metrics()["router/z_loss"] > 0
    return grads


@pytest.fixture
def one_process():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_gradients_of_a_step_equal_the_cpus(one_process, compiled, recompute) -> None:
    expected = _gradients("cpu", _packs(), recompute_ratio=0.0)
    for name, grad in _gradients("cuda", _packs(), torch_compile=compiled, recompute=recompute).items():
        assert _error(grad, expected[name]) < 0.05, name


@pytest.mark.parametrize("options", [{}, {"torch_compile": True}, {"recompute": "selective"}])
def test_given_experts_are_used(one_process, options) -> None:
    """Two of four experts: the own choice would differ between precisions."""
    config, packs = CONFIG.model_copy(update={"num_experts_per_tok": 2}), _packs()
    for pack in packs:
        order = torch.rand(len(pack.input_ids), 2, 4, generator=torch.Generator().manual_seed(1)).argsort(-1)
        pack.routed_experts = order[..., :2].to(torch.int16)
    expected = _gradients("cpu", packs, config, recompute_ratio=0.0)
    for name, grad in _gradients("cuda", packs, config, **options).items():
        assert _error(grad, expected[name]) < 0.05, name


WAYS = {
    "eager": {"torch_compile": False},
    "compiled": {"torch_compile": True, "recompute_ratio": 0.0},
    "compiled, recomputed": {"torch_compile": True, "recompute_ratio": 1.0},
}


def _rank(rank: int, port: int, path: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    grads = {
        way: _gradients(f"cuda:{rank}", _packs()[rank : rank + 1], ep_size=2, **fsdp) for way, fsdp in WAYS.items()
    }
    if rank == 0:
        torch.save(grads, path)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_gpus(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("gpus") / "grads.pt"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(_rank, (port, str(path)), nprocs=2, start_method="spawn")
    return torch.load(path, weights_only=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", WAYS)
def test_experts_on_two_gpus_equal_one(one_process, on_two_gpus, way) -> None:
    """Also where layers are compiled, around the exchange of tokens."""
    expected = _gradients("cuda:0", _packs(), torch_compile=False)
    for name, grad in on_two_gpus[way].items():
        assert _error(grad, expected[name]) < 0.03, name
