"""Weight updates on a GPU: the fast ways against the plain one, bit for bit, and memory that two processes see."""

import asyncio
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import DenseModelConfig, MHAConfig
from xtuner.v1.ops.bit_sums import bit_sums, prepared_bit_sums, reference_bit_sum
from xtuner.v1.rl.rollout.backends.native.stable_weights import StableWeights
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver
from xtuner.v1.rl.weight_update import Line, WeightUpdateError, receive_weights, send_weights, with_checksums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
MIB = 2**20
BUCKET = 8 * MIB
MODEL = DenseModelConfig(
    vocab_size=8000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, max_position_embeddings=1024,
    attention=MHAConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=64, qk_norm=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def process_group():
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if own:
        dist.destroy_process_group()


class Engine:
    """The engine's parameters on the device, and how they take updates."""

    def __init__(self):
        self.model = MODEL.build("meta", torch.bfloat16).requires_grad_(False)
        self.memory = StableWeights(self.model, CUDA)
        self.receiver = WeightReceiver(self.model)
        self.version = -1

    async def update_weights(self, buckets, version):
        self.receiver.take(buckets)
        self.version = version

    def held(self):
        return {name: p.clone() for name, p in self.model.named_parameters()}


@pytest.fixture
def trainer():
    engine = TrainEngine(
        MODEL, FSDPConfig(torch_compile=False, recompute_ratio=0.0), device=CUDA, optim_cfg=AdamWConfig(),
        lr_cfg=LRConfig(),
    )  # fmt: skip
    engine.model.init_weights(seed=1)
    return engine


def expected(trainer):
    return {name: p.to_local().detach().to(torch.bfloat16) for name, p in trainer.model.named_parameters()}


def differing(found, wanted):
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counted", [None, torch.bfloat16])
@pytest.mark.parametrize("places", [True, False])
def test_checksums_are_those_of_the_reference(dtype, counted, places):
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = [(1,), (3, 5), (7, 16384), (16384,), (16385,), (0, 4), (2048, 1111)]
    tensors = [torch.randn(s, device=CUDA, generator=generator).to(dtype) for s in shapes]
    tensors += [tensors[2].t(), tensors[6][1:5]]
    tensors += [t[:5] for t in tensors * 30]  # more than a launch takes
    wanted = [int(reference_bit_sum(t, counted, places)) for t in tensors]
    assert bit_sums(tensors, counted, places).tolist() == wanted
    assert wanted == [int(reference_bit_sum(t.cpu(), counted, places)) for t in tensors]


def test_prepared_checksums_are_of_what_is_there_by_then():
    tensors = [torch.randn(shape, device=CUDA) for shape in ((300, 7), (5,), (0, 2))]
    run = prepared_bit_sums(tensors, torch.bfloat16)
    before = run().tolist()
    tensors[0][299, 6] += 1
    assert before != run().tolist() == bit_sums(tensors, torch.bfloat16).tolist()


@pytest.mark.parametrize("by_parameter", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_an_update_in_process_is_the_parameters_rounded_also_after_a_sleep(trainer, cast, by_parameter):
    engine = Engine()
    for turn in range(2):
        with torch.no_grad():
            for param in trainer.model.parameters():
                param.to_local().add_(0.01)
        trainer.offload()
        trainer.onload()
        buckets = list(trainer.weight_buckets(BUCKET, cast=cast, by_parameter=by_parameter))
        engine.receiver.take(with_checksums(buckets))
        assert differing(engine.held(), expected(trainer)) == [], turn
        sent = {name: tensor.to(torch.bfloat16) for bucket in buckets for name, tensor in bucket.tensors.items()}
        sums = engine.receiver.sums(list(sent), torch.bfloat16)
        assert [total for total, _ in sums.values()] == bit_sums(list(sent.values())).tolist(), turn
        engine.memory.drop()
        engine.memory.restore()


def test_an_update_takes_no_memory_of_its_own(trainer):
    engine = Engine()
    engine.receiver.take(trainer.weight_buckets(BUCKET, cast=False))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.receiver.take(trainer.weight_buckets(BUCKET, cast=False))
    assert torch.cuda.max_memory_allocated() - before < MIB


def test_a_changed_bit_is_found_in_the_engine(trainer):
    engine = Engine()

    def changed():
        for bucket in with_checksums(trainer.weight_buckets(BUCKET, cast=False)):
            name = "model.layers.2.mlp.up_proj.weight"
            if name in bucket.tensors:
                bucket.tensors[name] = bucket.tensors[name].clone()
                bucket.tensors[name][7, 7] *= 1.01
            yield bucket

    with pytest.raises(WeightUpdateError, match="1 weights .* model.layers.2.mlp.up_proj.weight"):
        engine.receiver.take(changed())


# ---------------------------------------------------------------- two processes on one GPU


def receiver_process(line, results, dies):
    engine = Engine()
    asyncio.run(receive_weights(engine, line, CUDA))
    results.put((engine.version, bit_sums(list(engine.model.parameters())).tolist()))
    if dies:

        class Dying:
            async def update_weights(self, buckets, version):
                for _ in zip(range(2), buckets, strict=False):
                    pass
                os._exit(9)

        asyncio.run(receive_weights(Dying(), line, CUDA))
    while asyncio.run(receive_weights(engine, line, CUDA)):
        results.put((engine.version, bit_sums(list(engine.model.parameters())).tolist()))


@pytest.mark.parametrize("memory, dies", [("cuda", False), ("host", False), ("cuda", True)])
def test_an_engine_of_another_process_has_the_trainer_s_bits(trainer, memory, dies):
    context = multiprocessing.get_context("spawn")
    mine, its = Line.pair(100.0)
    results = context.Queue()
    process = context.Process(target=receiver_process, args=(its, results, dies))
    process.start()
    its.close()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    send_weights(with_checksums(trainer.weight_buckets(BUCKET, cast=False)), mine, 7, memory, CUDA)
    order = [name for name, _ in Engine().model.named_parameters()]
    assert results.get(timeout=60) == (7, bit_sums([expected(trainer)[n] for n in order]).tolist())
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.to_local().mul_(1.5)
    if dies:
        with pytest.raises(WeightUpdateError, match="the other process is gone"):
            send_weights(trainer.weight_buckets(BUCKET, cast=False), mine, 8, memory, CUDA)
    else:
        for version in (8, 9, 0):
            send_weights(trainer.weight_buckets(BUCKET, cast=False), mine, version, memory, CUDA)
        assert results.get(timeout=60) == (8, bit_sums([expected(trainer)[n] for n in order]).tolist())
    process.join(60)
    assert process.exitcode == (9 if dies else 0)
    assert torch.cuda.memory_allocated() <= before
