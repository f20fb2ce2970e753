"""Memory of the training engine on a GPU: what is kept, what is lent out, and that no option changes the numbers."""

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig, MuonConfig
from xtuner.v1.data_proto import PackedBatch, SegmentLayout
from xtuner.v1.engine import TrainEngine, load_train_state, save_train_state
from xtuner.v1.engine.host_memory import HostCopy, PinnedBuffer
from xtuner.v1.model import DenseModelConfig, MHAConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
MIB = 2**20
MODEL = DenseModelConfig(
    vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, max_position_embeddings=4096,
    attention=MHAConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=128, qk_norm=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def process_group():
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.empty_cache()
    yield
    if own:
        dist.destroy_process_group()


def make(optim=None, **fsdp):
    options = {"torch_compile": False, "recompute_ratio": 0.0} | fsdp
    engine = TrainEngine(
        MODEL, FSDPConfig(**options), device=CUDA, optim_cfg=optim or AdamWConfig(lr=1e-3),
        lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=20, chunk_size=512,
    )  # fmt: skip
    engine.model.init_weights(seed=1)
    return engine


def pack(rows=4096, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [rows // 4] * 4
    ids = torch.randint(3, MODEL.vocab_size, (rows,), generator=generator)
    targets = torch.arange(rows - 1)
    return PackedBatch(
        input_ids=ids, position_ids=torch.cat([torch.arange(n) for n in lengths]),
        layout=SegmentLayout(lengths, [-1] * 4), target_rows=targets, labels=ids[targets + 1],
        advantages=torch.randn(rows - 1, generator=generator), inv_temperature=torch.ones(rows - 1),
        sample_index=torch.zeros(rows - 1, dtype=torch.int64), rollout_ids=[0],
    ).to(CUDA)  # fmt: skip


def backward(engine, batch):
    logprobs, _ = engine.forward(batch)
    engine.backward(-(batch.advantages * logprobs).mean())


def same_gradients(engine, seed):
    """The same on every engine: attention's backward adds in another order each time."""
    for i, param in enumerate(engine.model.parameters()):
        generator = torch.Generator("cuda").manual_seed(1000 * seed + i)
        param.grad = torch.zeros_like(param)
        param.grad.to_local().normal_(generator=generator).mul_(10.0 ** (i % 4 - 4))


def local_weights(engine):
    return {name: p.to_local().clone() for name, p in engine.model.named_parameters()}


def num_bytes(engine, itemsize=4):
    return sum(p.numel() for p in engine.model.parameters()) * itemsize


def test_pinned_memory_is_exact_and_pinned():
    buffer, parts = PinnedBuffer.of_sizes([33 * MIB + 5, 7], CUDA)
    assert buffer.bytes.numel() < 33 * MIB + 1024
    assert all(part.is_pinned() for part in parts)
    del buffer, parts
    PinnedBuffer(33 * MIB, CUDA)  # the same pages may be locked again


def test_parked_tensors_free_the_device_and_reuse_the_host():
    tensors = [torch.randn(8 * MIB, device=CUDA), torch.randn(1001, device=CUDA)]
    values = [t.cpu() for t in tensors]
    copy = HostCopy(tensors, CUDA)
    before, addresses = torch.cuda.memory_allocated(), set()
    for _ in range(3):
        copy.park()
        assert torch.cuda.memory_allocated() <= before - 32 * MIB
        addresses.add(copy._buffer.bytes.data_ptr())
        occupied = torch.full((9 * MIB,), float("nan"), device=CUDA)  # another's values in the same memory
        del occupied
        copy.restore()
        copy.ready()
        assert all(torch.equal(t.cpu(), v) for t, v in zip(tensors, values, strict=True))
    assert len(addresses) == 1
    assert set(copy.seconds()) == {"to_host", "to_device"}


@pytest.mark.parametrize("options", [{}, {"moment_dtype": "bfloat16"}, {"swap_optimizer": True}])
def test_offload_gives_all_memory_back_and_changes_nothing(options):
    stays, moves = (make(AdamWConfig(lr=1e-3, **options)) for _ in range(2))
    for seed in range(3):
        same_gradients(stays, seed)
        stays.step()
        with torch.no_grad():
            moves.logprobs(pack())
        held = torch.cuda.memory_allocated()
        moves.offload()
        moments = 0 if options.get("swap_optimizer") or not seed else (4 if options else 8)
        assert held - torch.cuda.memory_allocated() >= num_bytes(moves, 4 + moments)
        moves.onload()
        same_gradients(moves, seed)
        moves.step()
    for name, tensor in local_weights(stays).items():
        assert torch.equal(local_weights(moves)[name], tensor), name
    rates = moves.parking.rates()
    assert {"to_host", "to_device"} == set(rates) and min(rates.values()) > 0


@pytest.mark.parametrize(
    "optim", [AdamWConfig(lr=1e-3), AdamWConfig(lr=1e-3, moment_dtype="bfloat16"), MuonConfig(lr=1e-3)]
)
def test_swapped_moments_change_no_bit_and_take_no_memory(optim, tmp_path):
    plain, swapped = make(optim), make(optim.model_copy(update={"swap_optimizer": True}))
    swapped.optimizer.keeper.bucket_numel = 1 << 22  # many buckets; one parameter has 8 * 2^20 elements
    plain.optimizer.keeper.bucket_numel = plain.optimizer.keeper.bucket_numel and 1 << 22
    for seed in range(3):
        for engine in (plain, swapped):
            same_gradients(engine, seed)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.step()
            if engine is swapped and not isinstance(optim, MuonConfig):
                assert torch.cuda.max_memory_allocated() - before < 200 * MIB < num_bytes(engine)
                assert torch.cuda.memory_allocated() < before
    for name, tensor in local_weights(plain).items():
        assert torch.equal(local_weights(swapped)[name], tensor), name
    for p, q in zip(plain.model.parameters(), swapped.model.parameters(), strict=True):
        for name, moment in plain.optimizer.moments_of(p).items():
            kept = swapped.optimizer.moments_of(q)[name]
            assert kept.is_pinned() and torch.equal(kept, moment.cpu()), name
    save_train_state(swapped, tmp_path / "ckpt")
    resumed = make(optim)
    load_train_state(resumed, tmp_path / "ckpt")
    for engine in (swapped, resumed):
        same_gradients(engine, 9)
        engine.step()
    for name, tensor in local_weights(swapped).items():
        assert torch.equal(local_weights(resumed)[name], tensor), name


def test_bfloat16_moments_take_half_and_follow_float32_ones():
    start, exact, small = make(), make(AdamWConfig(lr=1e-3)), make(AdamWConfig(lr=1e-3, moment_dtype="bfloat16"))
    for engine in (exact, small):
        before = torch.cuda.memory_allocated()
        engine.optimizer.make_state()
        assert torch.cuda.memory_allocated() - before == pytest.approx(
            num_bytes(engine, 8 if engine is exact else 4), rel=0.02
        )
        for seed in range(20):
            same_gradients(engine, seed)
            engine.step()
    reference, want, got = local_weights(start), local_weights(exact), local_weights(small)
    for name, tensor in reference.items():
        assert 0 < (want[name] - got[name]).norm() < 0.02 * (want[name] - tensor).norm(), name


def test_rounding_kernel_equals_the_reference_in_law():
    from xtuner.v1.ops.rounding import reference_round_stochastically_, round_stochastically_

    x = torch.randn(1 << 16, device=CUDA)
    means = []
    for function in (round_stochastically_, reference_round_stochastically_):
        total, out = torch.zeros_like(x), torch.empty(x.shape, dtype=torch.bfloat16, device=CUDA)
        for seed in range(256):
            function(out, x, seed + 2**40)
            assert ((out.float() - x).abs() < x.abs() * 2**-7).all()
            total += out.float()
        means.append(((total / 256 - x) / x).abs().mean())
        again = torch.empty_like(out)
        function(again, x, 255 + 2**40)
        assert torch.equal(out, again)
    assert means[0] < 2e-4 and means[1] < 2e-4


def test_policies_of_recomputation_order_the_memory():
    kept, grads = {}, {}
    policies = {
        "none": {"recompute_ratio": 0.0},
        "selective": {"recompute": "selective", "recompute_ratio": 1.0},
        "mixed": {"recompute": "mixed", "recompute_ratio": 0.5},
        "full": {"recompute_ratio": 1.0},
    }
    for name, options in policies.items():
        engine, batch = make(**options), pack(16384)
        backward(engine, batch)
        engine.optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        logprobs, _ = engine.forward(batch)
        kept[name] = torch.cuda.memory_allocated() - before
        engine.backward(-(batch.advantages * logprobs).mean())
        grads[name] = {n: p.grad.to_local().clone() for n, p in engine.model.named_parameters()}
        del logprobs, engine
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.3 * kept["mixed"] > 1.3 * kept["full"]
    for name in ("selective", "mixed", "full"):
        for param, grad in grads["none"].items():
            # Attention's backward adds in another order each time.
            assert (grads[name][param] - grad).norm() < 1e-2 * grad.norm(), (name, param)
