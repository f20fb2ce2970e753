"""An engine that does not compute with the trainer's weights ends the run before its tokens are trained on.

The faults are engines (or ways of weights) that misbehave, in place of the real ones. Each sets in with the first new
weights, version 1, after the first train step: only that one may have been trained.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, LoRAConfig, LRConfig
from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model.hf import iter_hf_tensors, load_hf_model
from xtuner.v1.rl.rollout.backends import native
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.rl.weight_update import StaleWeightsError
from xtuner.v1.train.canary import gap_limit

from .helpers import config, fit, read_rows, write_model, write_moe_model

HONEST = native.NativeEngine


def nothing(*args: Any) -> None:
    """In the place of something."""


class SkipsTheUpdate(HONEST):
    async def start(self):
        await super().start()
        self._weights.drop = self._weights.restore = nothing

    async def update_weights(self, buckets, version):
        if version == 0:
            await super().update_weights(buckets, version)
        for _ in buckets:
            pass
        self._obstacle.pop("update", None)
        self.version = version


class TakesTheOldOnesAgain(HONEST):
    """Those of the update before, under the new version."""

    last: list[WeightBucket] | None = None

    async def update_weights(self, buckets, version):
        came = [replace(b, tensors={n: t.clone() for n, t in b.tensors.items()}) for b in buckets]
        await super().update_weights(self.last or came, version)
        self.last = came


class Receives(HONEST):
    """With a receiver that changes what it takes."""

    receiver: type[WeightReceiver]

    async def start(self):
        await super().start()
        self._receiver = self.receiver(self._model)


class LosesHalf(Receives):
    class receiver(WeightReceiver):  # noqa: N801
        updates = 0

        def take(self, buckets):
            super().take(buckets)
            self.updates += 1

        def _copy(self, pairs, bucket):
            super()._copy(pairs[len(pairs) // 2 :] if self.updates else pairs, bucket)


class SwapsTwo(Receives):
    """The weights of keys and values."""

    class receiver(WeightReceiver):  # noqa: N801
        def _copy(self, pairs, bucket):
            (place,) = (i for i, name in enumerate(bucket.tensors) if "qkv_proj" in name)
            target, source = pairs[place]
            q, k, v = source.split((32, 16, 16))
            pairs[place] = target, torch.cat((q, v, k))
            super()._copy(pairs, bucket)


class RoundsOnTheWay(Receives):
    class receiver(WeightReceiver):  # noqa: N801
        def _copy(self, pairs, bucket):
            super()._copy([(target, source.to(torch.bfloat16).float()) for target, source in pairs], bucket)


class KeepsThePackedHead(HONEST):
    """Its kernels go on with their packed copy of the head, which is tied to the embedding."""

    async def update_weights(self, buckets, version):
        await super().update_weights(buckets, version)
        if version == 0:
            self.head = self._runner._weights.head
        self._runner._weights = self._runner._weights._replace(head=self.head)


class KeepsAFloat32Head(HONEST):
    """Beside the bfloat16 weights: that of the first update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, cpu_kernels=False, **kwargs)

    async def update_weights(self, buckets, version):
        await super().update_weights(buckets, version)
        if version == 0:
            head = self._model.embed_tokens.weight.detach().float()
            self._model.logits = lambda hidden: hidden.float() @ head.T


class KeepsItsPrefixes(HONEST):
    async def start(self):
        await super().start()
        self._cache.forget = self._cache.free = self._cache.set_budget = nothing


class WakesWithoutWeights(HONEST):
    """They are gone when the cache comes back."""

    async def wake(self, tags=("weights", "kv_cache")):
        await super().wake(tags)
        if "kv_cache" in tags and self.version > 0:
            self._weights.drop()
            self._weights.restore()
            self._receiver.forget()
            for parameter in self._model.parameters():
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
            self._runner.weights_changed()


class RestartsWithBaseWeights(HONEST):
    """In the middle of the step."""

    answers = 0

    async def generate(self, request):
        output = await super().generate(request)
        self.answers += self.version > 0
        if self.answers == 6:
            load_hf_model(self._model, self.model_path)
            self._runner.weights_changed()
        return output


def without_adapters(model) -> Any:
    def weight_buckets(engine, *args, **kwargs) -> Iterator[WeightBucket]:
        yield WeightBucket(dict(iter_hf_tensors(model)))

    return weight_buckets


def experts_elsewhere(engine: TrainEngine, *args, **kwargs) -> Iterator[WeightBucket]:
    """Those of the other rank in the place of one rank's."""
    for bucket in weight_buckets(engine, *args, **kwargs):
        tensors = {n: t.roll(t.shape[0] // 2, 0) if ".experts." in n else t for n, t in bucket.tensors.items()}
        yield replace(bucket, tensors=tensors)


weight_buckets = TrainEngine.weight_buckets
BITS, LOGPROBS = "have other bits", "log-probs of the canary's"
HALF = {
    "rollout": {"cpu_dtype": "bfloat16"},
    "worker": {
        "fsdp_cfg": FSDPConfig(torch_compile=False, recompute_ratio=0.0, cpu_param_dtype=torch.bfloat16),
        "optim_cfg": AdamWConfig(lr=5e-2), "lr_cfg": LRConfig(warmup_ratio=0),
    },
}
FAULTS = {
    SkipsTheUpdate: (BITS, {}), LosesHalf: (BITS, {}), SwapsTwo: (BITS, {}), TakesTheOldOnesAgain: (BITS, {}),
    RoundsOnTheWay: (BITS, {}), WakesWithoutWeights: (BITS, {}), RestartsWithBaseWeights: (BITS, {}),
    KeepsThePackedHead: (LOGPROBS, {}), KeepsItsPrefixes: (LOGPROBS, {"rollout": {"context_length": 256}}),
    KeepsAFloat32Head: (LOGPROBS, HALF),
}  # fmt: skip
AT_ONCE = {SwapsTwo, RoundsOnTheWay}
"""Wrong from the first weights on."""


def stops(cfg, message: str, trained: int = 1) -> str:
    """`fit` ends with a StaleWeightsError, after so many train steps, and nothing is saved. Its words."""
    trainer = cfg.build()
    with pytest.raises(StaleWeightsError, match=message) as caught:
        trainer.fit()
    run = trainer.run_dir
    assert len(read_rows(run / "logs" / "optimizer_steps.jsonl")) == trained
    assert not list(run.glob("hf/hf-step-3")) and not list(run.rglob("*.part"))
    return str(caught.value)


@pytest.mark.parametrize("engine", FAULTS, ids=lambda e: e.__name__)
def test_a_faulty_engine_is_caught_within_the_step(model, tmp_path, monkeypatch, engine):
    message, changes = FAULTS[engine]
    if engine is KeepsThePackedHead:
        model = write_model(tmp_path / "packed", hidden_size=128)  # which the kernels know
    monkeypatch.setattr(native, "NativeEngine", engine)
    at_once = engine in AT_ONCE
    said = stops(config(model, tmp_path, **changes), message, trained=0 if at_once else 1)
    assert said.startswith("rollout_0 does not") and f"version {0 if at_once else 1} " in said


def test_adapters_that_are_not_merged_are_caught(model, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainEngine, "weight_buckets", without_adapters(model))
    worker = {"lora_cfg": LoRAConfig(rank=4, alpha=16), "optim_cfg": AdamWConfig(lr=3e-2)}
    stops(config(model, tmp_path, worker=worker), LOGPROBS)


def test_experts_in_the_place_of_others_are_caught(tmp_path, monkeypatch):
    model = write_moe_model(tmp_path / "moe")
    monkeypatch.setattr(TrainEngine, "weight_buckets", experts_elsewhere)
    stops(config(model, tmp_path), LOGPROBS, trained=0)


def test_without_the_canary_a_fault_goes_by(model, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "NativeEngine", SkipsTheUpdate)
    run = fit(config(model, tmp_path, worker={"weight_canary": {"enabled": False}}))
    assert len(run.rows) == 3 and run.series("mismatch/mismatch_logprob_abs_diff")[2] > 1e-2
    assert not [key for key in run.last if key.startswith("canary/")]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "adapters", "experts"])
def test_healthy_steps_go_on(tmp_path, kind):
    model = write_moe_model(tmp_path / "moe") if kind == "experts" else write_model(tmp_path / "dense")
    changes = {"bfloat16": HALF, "adapters": {"worker": {"lora_cfg": LoRAConfig(rank=4, alpha=16)}}}.get(kind, {})
    run = fit(config(model, tmp_path, total_train_steps=8, save_final_hf=False, **changes))
    assert len(run.rows) == 8 and max(run.series("canary/logprob_gap")) < (0.1 if kind == "bfloat16" else 1e-5)
    assert run.series("canary/engines") == [1.0] * 8 and min(run.series("canary/weights_compared")) > 0.3


class DoesNotAnswerAtFirst(HONEST):
    """The canary's prompt: neither beside the first others, nor when it is asked again."""

    failures = 2

    async def generate(self, request):
        if request.request_id == -1 and self.failures:
            self.failures -= 1
            raise RuntimeError("a connection broke")
        return await super().generate(request)


def test_an_engine_that_did_not_answer_is_not_judged_by_later_weights(model, tmp_path, monkeypatch):
    """It keeps its own for two steps, and is asked again about the next ones."""
    monkeypatch.setattr(native, "NativeEngine", DoesNotAnswerAtFirst)
    run = fit(config(model, tmp_path, sync_weights_interval=2))
    assert [row.get("canary/engines") for row in run.rows] == [None, None, 1.0]


def test_one_lost_answer_costs_no_verdict(model, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "NativeEngine", DoesNotAnswerAtFirst)
    monkeypatch.setattr(DoesNotAnswerAtFirst, "failures", 1)
    assert fit(config(model, tmp_path)).series("canary/engines") == [1.0] * 3


def test_the_limit_is_that_of_the_coarser_rounding(model, tmp_path):
    """Float32 is multiplied as TF32 by the attention of served engines on a GPU."""

    def limit(accelerator: str, backend: str, ours: torch.dtype, theirs: torch.dtype) -> float:
        prefix = "cpu_" if accelerator == "CPU" else ""
        fsdp = FSDPConfig(**{"torch_compile": False, f"{prefix}param_dtype": ours})
        return gap_limit(
            config(
                model, tmp_path, resources=AcceleratorResourcesConfig(accelerator=accelerator, num_workers=1),
                rollout={"backend": backend, f"{prefix}dtype": theirs}, worker={"fsdp_cfg": fsdp},
            )
        )  # fmt: skip

    float32, half = torch.float32, torch.bfloat16
    assert limit("CPU", "vllm", float32, float32) == limit("GPU", "native", float32, float32) == 1e-3
    assert limit("GPU", "vllm", float32, float32) == limit("GPU", "sglang", float32, float32) == 0.02
    for accelerator in ("CPU", "GPU"):
        assert limit(accelerator, "vllm", float32, half) == limit(accelerator, "native", half, half) == 0.15
