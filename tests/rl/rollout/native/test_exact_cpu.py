"""Exact mode on a CPU: engine and trainer give every token the same bits, whatever came with it on either side."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import FSDPConfig
from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, iter_hf_tensors, load_hf_tensor, save_hf_model
from xtuner.v1.ops.cpu import cpu_kernels_available
from xtuner.v1.ops.rotary import rotary_table
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.trainer.packing import pack_samples
from xtuner.v1.rl.trainer.samples import IGNORE, TrainingSample

if not cpu_kernels_available():
    pytest.skip("no Numba here", allow_module_level=True)

from xtuner.v1.rl.rollout.backends.native import kernel_runner  # noqa: E402

FAMILIES = {
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "llama": {"qkv_bias": True, "o_bias": True, "head_dim": 64},
    "mistral": {"head_dim": 16},
}
VOCAB = 131
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def one_process_group():
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if own:
        dist.destroy_process_group()


def write(folder: Path, family: str) -> Path:
    attention = MHAConfig(num_attention_heads=6, num_key_value_heads=2, **FAMILIES[family])
    config = DenseModelConfig(
        model_type=family, vocab_size=VOCAB, max_position_embeddings=256, num_hidden_layers=2, hidden_size=88,
        intermediate_size=104, eos_token_id=1, tie_word_embeddings=family == "qwen3", attention=attention,
        mlp_bias=family == "llama",
    )  # fmt: skip
    model = config.build("cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = 0.2 * torch.randn(param.shape, generator=generator)
            param.copy_(noise + 1 if name.endswith("norm.weight") else noise)
    save_hf_model(export_hf_tensors(model, torch.float32), config, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def requests(count: int = 24, **params) -> list[GenerateRequest]:
    """Groups of three with one prompt, lengths from 1 to 60, temperatures other than 1."""
    rng, out = random.Random(0), []
    for i in range(count):
        if i % 3 == 0:
            prompt = [rng.randrange(2, VOCAB) for _ in range(1 + (i * 7) % 60)]
        p = SampleParams(max_tokens=5 + (i * 5) % 50, temperature=(1.0, 0.7, 1.6)[i % 3], **params)
        out.append(GenerateRequest(i, prompt, p, 1000 + i))
    return out


def generate(folder: Path, dtype: torch.dtype, asked: list[GenerateRequest], **kwargs) -> dict[int, tuple]:
    """(ids, log-probs) of each request."""

    async def run() -> dict[int, tuple]:
        engine = NativeEngine(folder, dtype=dtype, deterministic=True, **kwargs)
        await engine.start()
        outputs = await asyncio.gather(*(engine.generate(r) for r in asked))
        await engine.stop()
        assert not [o.error for o in outputs if o.error]
        return {r.request_id: (o.token_ids, o.logprobs) for r, o in zip(asked, outputs, strict=True)}

    return asyncio.run(run())


def samples(asked: list[GenerateRequest], answers: dict[int, tuple]) -> list[TrainingSample]:
    out = []
    for r in asked:
        ids, logprobs = answers[r.request_id]
        before = len(r.prompt_ids) - 1
        labels = [IGNORE] * before + ids
        out.append(
            TrainingSample(
                r.request_id, r.prompt_ids + ids[:-1], labels, [1.0] * len(labels), [0.0] * before + logprobs,
                len(r.prompt_ids), r.params.temperature,
            )  # fmt: skip
        )
    return out


def train_engine(folder: Path, dtype: torch.dtype, **kwargs) -> TrainEngine:
    fsdp = FSDPConfig(recompute_ratio=0.0, torch_compile=False, cpu_param_dtype=dtype)
    engine = TrainEngine(
        get_model_config_from_hf(folder), fsdp, device=torch.device("cpu"), exact=True, **kwargs
    )  # fmt: skip
    engine.load_hf(folder)
    return engine


def gaps(engine: TrainEngine, of: list[TrainingSample], length: int, share: bool) -> tuple[float, int]:
    """The largest difference from the engine's log-probs in any pack, and the number of tokens."""
    (parts,) = pack_samples(
        of, ranks=1, optimizer_steps=1, pack_max_length=length, hidden_size=88, share_prompts=share
    )[0]  # fmt: skip
    most, count = 0.0, 0
    for pack in parts:
        most = max(most, (engine.logprobs(pack) - pack.rollout_logprobs).abs().max().item())
        count += pack.num_targets
    return most, count


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_the_trainer_finds_the_engines_logprobs_in_any_pack(folder, dtype):
    asked = requests()
    answers = generate(folder, dtype, asked)
    of = samples(asked, answers)
    trainer = train_engine(folder, dtype)
    for length, share in ((100, False), (1000, False), (1000, True)):
        gap, count = gaps(trainer, of, length, share)
        assert count == sum(len(ids) for ids, _ in answers.values()) > 500
        assert gap == 0.0, (length, share)
    trainer.chunk_size = 7
    assert gaps(trainer, of, 300, True)[0] == 0.0


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_company_arrival_threads_and_memory_change_no_bit(folder, dtype, monkeypatch):
    asked = requests()
    expected = generate(folder, dtype, asked)
    assert generate(folder, dtype, asked[::-1], max_batch_size=3) == expected
    assert generate(folder, dtype, asked[:1]) == {0: expected[0]}
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert generate(folder, dtype, asked) == expected
    monkeypatch.setattr(kernel_runner, "_TEAM_PARAMETERS", 0)
    assert generate(folder, dtype, asked) == expected, "threads that share the work"
    torch.set_num_threads(threads)
    # Room for about three of the longest: sequences wait, lose their cache and go on.
    token = 2 * 2 * 2 * FAMILIES[folder.name]["head_dim"] * dtype.itemsize
    assert generate(folder, dtype, asked, cpu_cache_bytes=400 * token) == expected
    assert generate(folder, dtype, asked, max_prefill_rows=16) == expected


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_the_kernels_of_whole_steps_are_torchs_path(folder, dtype):
    asked = requests()
    of = samples(asked, generate(folder, dtype, asked, cpu_kernels=False))
    assert gaps(train_engine(folder, dtype), of, 300, True)[0] == 0.0
    assert generate(folder, dtype, asked) == generate(folder, dtype, asked, cpu_kernels=False)


@pytest.mark.parametrize("cpu_kernels", [True, False])
def test_pushed_weights_are_packed_anew(folder, cpu_kernels):
    asked = requests(6)
    tensors = {name: 1.25 * tensor for name, tensor in iter_hf_tensors(folder)}

    async def run() -> list[tuple]:
        engine = NativeEngine(folder, deterministic=True, cpu_kernels=cpu_kernels)
        await engine.start()
        await asyncio.gather(*(engine.generate(r) for r in asked))
        await engine.update_weights([WeightBucket(tensors)], 1)
        return [(o.token_ids, o.logprobs) for o in await asyncio.gather(*(engine.generate(r) for r in asked))]

    answers = {r.request_id: answer for r, answer in zip(asked, asyncio.run(run()), strict=True)}
    trainer = train_engine(folder, torch.float32)
    for name, tensor in tensors.items():
        load_hf_tensor(trainer.model, name, tensor)
    assert gaps(trainer, samples(asked, answers), 1000, False)[0] == 0.0


@pytest.mark.parametrize("half", [8, 20, 32])
def test_a_positions_angles_do_not_depend_on_the_others(half):
    frequencies = 10_000 ** -(torch.arange(half) / half)
    whole, threads = rotary_table(torch.arange(9000), frequencies), torch.get_num_threads()
    for count, torch_threads in ((1, 1), (3, 1), (1001, 2), (5003, 3)):
        torch.set_num_threads(torch_threads)
        index = torch.randint(0, 9000, (count,), generator=torch.Generator().manual_seed(count))
        some = rotary_table(index, frequencies)
        assert torch.equal(some.cos, whole.cos[index]) and torch.equal(some.sin, whole.sin[index])
    torch.set_num_threads(threads)
