"""One engine on two ranks does what one on a single rank does. Every rank runs the same script of calls."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from native_models import ROW_BYTES, VOCAB, buckets, prompt, request, run, started, weights, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))  # tests.engine.helpers
from tests.engine.helpers import on_ranks
from xtuner.v1.engine.placement import local_part
from xtuner.v1.model import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.rl.rollout.backends.native import TensorParallelEngine
from xtuner.v1.rl.weight_update import with_checksums

FAMILIES = ("qwen3", "llama with biases")
PLAIN = [request(i, prompt(i % 3, 5 + i % 3), temperature=0.0) for i in range(4)]
MIXED = [
    request(10), request(11, top_k=7), request(12, top_p=0.6, temperature=1.3), request(13, repetition_penalty=1.4),
    request(14, prompt(0), max_tokens=30, min_tokens=25), request(15, prompt(0), max_tokens=3), request(16),
]  # fmt: skip
LONG = [request(i, max_tokens=70, min_tokens=70) for i in range(5)]


def said(outputs) -> list[tuple[list[int], list[float], str]]:
    assert all(o.error is None for o in outputs), outputs
    return [(o.token_ids, o.logprobs, o.finish_reason) for o in outputs]


def write_biased(path: Path) -> None:
    config = DenseModelConfig(
        model_type="llama", vocab_size=VOCAB, max_position_embeddings=256, num_hidden_layers=2, hidden_size=64,
        intermediate_size=96, eos_token_id=2, mlp_bias=True,
        attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16, qkv_bias=True, o_bias=True),
    )  # fmt: skip
    model = config.build("cpu")
    model.init_weights(1, 0.2)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(param, 0, 0.3)
    save_hf_model(export_hf_tensors(model, torch.float32), config, path)


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Script:
    """What each rank of an engine runs; `results` are the first rank's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.leads = folder, dist.get_rank() == 0
        self.results: dict[str, Any] = {}

    def engine(self, model: str = "qwen3", **options: Any) -> TensorParallelEngine:
        return TensorParallelEngine(self.folder / model, num_ranks=2, **options)

    async def ask(self, name: str, engine: TensorParallelEngine, *requests) -> None:
        """The other rank goes on to its next call, where it waits and follows."""
        if self.leads:
            self.results[name] = said(await asyncio.gather(*(engine.generate(r) for r in requests)))

    async def run(self) -> None:
        await self.families()
        await self.batches()
        await self.interruptions()
        await self.sleep_and_update()
        await self.trainer()
        await self.failures()

    async def families(self) -> None:
        for model in FAMILIES:
            engine = self.engine(model)
            await engine.start()
            await self.ask(f"greedy {model}", engine, *PLAIN)
            await engine.stop()
            assert not await engine.health()

    async def batches(self) -> None:
        engine = self.engine(max_batch_size=3, max_prefill_rows=12)
        await engine.start()
        await self.ask("mixed", engine, *MIXED)
        if not self.leads:
            out = await engine.generate(request(0))
            assert out.finish_reason == "error" and "first rank" in out.error
        await engine.stop()
        engine = self.engine(max_batch_size=3, cpu_cache_bytes=ROW_BYTES // 2 * 256)
        await engine.start()
        await self.ask("tight", engine, *(request(i, max_tokens=60, min_tokens=60) for i in range(3)))
        await engine.stop()

    async def interruptions(self) -> None:
        engine = self.engine(max_batch_size=3)
        await engine.start()
        if self.leads:
            tasks = [asyncio.create_task(engine.generate(r)) for r in LONG]
            await steps(8)
            tasks[1].cancel()
            await steps(4)
            await engine.abort()
            outputs = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(outputs.pop(1), asyncio.CancelledError)
            self.results["aborted"] = said(outputs)
        else:
            await engine.abort()
        await self.ask("after abort", engine, *PLAIN)
        if self.leads:
            late = [asyncio.create_task(engine.generate(r)) for r in LONG[:2]]
            await steps(6)
            late += [asyncio.create_task(engine.generate(r)) for r in MIXED]
            self.results["arrivals"] = said(await asyncio.gather(*late))
        await engine.stop()

    async def sleep_and_update(self) -> None:
        engine = self.engine()
        await engine.start()
        await self.ask("before", engine, *PLAIN)
        await engine.sleep()
        assert sum(local_part(p).untyped_storage().nbytes() for p in engine._model.parameters()) == 0
        await engine.wake()
        assert (await engine.generate(request(0))).error
        part = buckets(weights(self.folder / "other"))
        with pytest.raises(RuntimeError, match="missing"):
            await engine.update_weights(part[1:], 3)
        wrong = buckets(weights(self.folder / "other"))
        wrong[1].checksums = torch.zeros(len(wrong[1].tensors), dtype=torch.int64)
        with pytest.raises(RuntimeError, match="do not have the checksums of the trainer's"):
            await engine.update_weights(wrong, 3)
        assert (await engine.generate(request(0))).error
        await engine.update_weights(part, 4)
        assert engine.version == 4
        await self.ask("updated", engine, *PLAIN)
        await engine.stop()

    async def trainer(self) -> None:
        """Weights from a trainer that is cut too."""
        from xtuner.v1.config import AdamWConfig, FSDPConfig
        from xtuner.v1.engine import TrainEngine
        from xtuner.v1.model import get_model_config_from_hf

        for fsdp in ({"tp_size": 2}, {}):
            trainer = TrainEngine(
                get_model_config_from_hf(self.folder / "other"), FSDPConfig(torch_compile=False, **fsdp),
                device=torch.device("cpu"), optim_cfg=AdamWConfig(lr=1e-3),
            )  # fmt: skip
            trainer.load_hf(self.folder / "other")
            engine = self.engine(load_weights=False)
            await engine.start()
            with torch.no_grad():
                with pytest.raises(RuntimeError, match="by Hugging Face name alone"):
                    await engine.update_weights(trainer.weight_buckets(20_000, by_parameter=True), 1)
                await engine.update_weights(with_checksums(trainer.weight_buckets(20_000)), 1)
            await self.ask(f"trained {fsdp}", engine, *PLAIN)
            await engine.stop()

    async def failures(self) -> None:
        engine = self.engine()
        await engine.start()
        broken = weights(self.folder / "qwen3")
        broken["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
        await engine.update_weights(buckets(broken), 5)
        if self.leads:
            out = await engine.generate(request(0))
            assert out.finish_reason == "error" and "not finite" in out.error and "version 5" in out.error
        await engine.sleep()
        assert not await engine.health()
        await engine.start()
        await self.ask("healed", engine, *PLAIN)

        if self.leads:
            out = await asyncio.wait_for(engine.generate(LONG[0]), 60)
            assert out.finish_reason == "error" and "did not draw the same tokens" in out.error, out.error
        else:
            while not any(s.request.params.min_tokens for s in engine._scheduler.running):
                await asyncio.sleep(0.001)
            engine._scheduler._table["seed"] += 1
        await engine.sleep()
        assert not await engine.health()
        await engine.stop()


def script(folder: Path) -> dict[str, Any]:
    it = Script(folder)
    asyncio.run(asyncio.wait_for(it.run(), 240))
    return it.results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "qwen3")
    write_biased(folder / "llama with biases")
    write_model(folder / "other", seed=9)
    return folder


@pytest.fixture(scope="module")
def two(folder) -> dict[str, Any]:
    return on_ranks(2, script, folder)[0]


def same(ours, theirs) -> None:
    assert [(ids, reason) for ids, _, reason in ours] == [(ids, reason) for ids, _, reason in theirs]
    for (_, a, _), (_, b, _) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("model", FAMILIES)
def test_greedy_answers_are_those_of_one_rank(two, folder, model):
    same(two[f"greedy {model}"], said(run(started(folder / model), *PLAIN)))


def test_every_kind_of_request_in_batches_that_change(two, folder):
    same(two["mixed"], said(run(started(folder / "qwen3"), *MIXED)))
    whole = said(run(started(folder / "qwen3"), *LONG[:2], *MIXED))
    same(two["arrivals"], whole)


def test_a_cache_that_is_too_small_for_all_changes_nothing(two, folder):
    requests = [request(i, max_tokens=60, min_tokens=60) for i in range(3)]
    same(two["tight"], said(run(started(folder / "qwen3"), *requests)))


def test_aborted_and_cancelled_requests_leave_all_ranks(two, folder):
    whole = said(run(started(folder / "qwen3"), *LONG))
    del whole[1]
    for (ids, logprobs, reason), (all_ids, _, _) in zip(two["aborted"], whole, strict=True):
        assert reason == "abort" and len(ids) == len(logprobs) < 70 and ids == all_ids[: len(ids)]
    assert len(two["aborted"][0][0]) > 0
    same(two["after abort"], two["greedy qwen3"])


def test_new_weights_after_a_sleep(two, folder):
    same(two["before"], two["greedy qwen3"])
    other = said(run(started(folder / "other"), *PLAIN))
    for name in ("updated", "trained {'tp_size': 2}", "trained {}"):
        same(two[name], other)
    assert two["updated"] != two["before"]


def test_a_failed_engine_is_healed_by_a_start(two):
    same(two["healed"], two["greedy qwen3"])


def dies(folder: Path) -> str | None:
    async def main() -> str | None:
        engine = TensorParallelEngine(folder / "qwen3", num_ranks=2)
        await engine.start()
        if dist.get_rank() == 1:
            torch.save(None, folder / "rank-1-of-2.pt")
            while not engine._scheduler.running:
                await asyncio.sleep(0.001)
            os._exit(0)
        out = await engine.generate(LONG[0])
        assert out.finish_reason == "error" and not await engine.health()
        refused = await engine.generate(LONG[0])
        assert "rank 1" in refused.error
        await engine.sleep()
        await engine.stop()
        return out.error

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_rank_that_dies_ends_the_engine_by_name(folder):
    assert "rank 1 of this engine is gone" in on_ranks(2, dies, folder)[0]
