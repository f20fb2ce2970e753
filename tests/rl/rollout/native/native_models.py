"""Tiny random models in Hugging Face's format, engines over them, and requests."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.paged_cache import PagedCache
from xtuner.v1.rl.rollout.backends.native.paged_runner import MAX_STEPS, PagedRunner
from xtuner.v1.rl.rollout.backends.native.sampler import SAMPLING_FIELDS, SamplingBatch, sample
from xtuner.v1.rl.rollout.backends.native.scheduler import Done, Scheduler

VOCAB = 64
EOS = [2, 5]
ROW_BYTES = 2 * 2 * 2 * 32 * 4
"""Keys and values of one token."""


def write_model(path: Path, model_type: str = "qwen3", seed: int = 0, std: float = 0.2) -> Path:
    qwen = model_type == "qwen3"
    attention = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32, qk_norm=qwen)
    config = DenseModelConfig(
        model_type=model_type, vocab_size=VOCAB, max_position_embeddings=256, num_hidden_layers=2, hidden_size=64,
        intermediate_size=96, eos_token_id=EOS[0], tie_word_embeddings=qwen, attention=attention,
    )  # fmt: skip
    model = config.build("cpu")
    model.init_weights(seed, std)
    save_hf_model(export_hf_tensors(model, torch.float32), config, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return path


DEFAULTS: dict[str, bool] = {}
"""Of every engine's arguments; set by the fixture `kernels`."""


def started(path: Path, **kwargs) -> NativeEngine:
    engine = NativeEngine(path, **DEFAULTS | kwargs)
    asyncio.run(engine.start())
    return engine


def prompt(seed: int, length: int = 9) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, VOCAB, (length,), generator=generator).tolist()


def request(i: int = 0, ids: list[int] | None = None, seed: int | None = None, **params) -> GenerateRequest:
    params.setdefault("max_tokens", 12)
    return GenerateRequest(
        i, prompt(i) if ids is None else ids, SampleParams(**params), 100 + i if seed is None else seed
    )


def run(engine: NativeEngine, *requests: GenerateRequest) -> list[GenerateOutput]:
    async def all_of_them() -> list[GenerateOutput]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(all_of_them())


def weights(path: Path) -> dict[str, torch.Tensor]:
    from xtuner.v1.model.hf import iter_hf_tensors

    return dict(iter_hf_tensors(path))


def buckets(tensors: dict[str, torch.Tensor], parts: int = 3) -> list[WeightBucket]:
    items = list(tensors.items())
    return [WeightBucket(dict(items[i::parts])) for i in range(parts)]


class AheadRunner(PagedRunner):
    """Runs as on CUDA, with the CPU as the device: it draws several tokens a call, ahead of the host if it may."""

    def __init__(self, model: DecoderModel, cache: PagedCache) -> None:
        super().__init__(model, cache)
        self._draws_on_device = True
        self.calls_ahead = self.moves_ahead = 0

    @classmethod
    def put_into(cls, engine: NativeEngine) -> "AheadRunner":
        """In the place of a started engine's own."""
        old = engine._runner.cache
        cache = PagedCache(
            len(engine._model.layers), old.num_heads, old._key_dim, old._value_dim, old.dtype, old.device,
            old.max_slots, old.max_length, 2 * MAX_STEPS, old.experts_shape,
        )  # fmt: skip
        engine._cache, engine._runner = cache, (runner := cls(engine._model, cache))
        engine._set_cache_budget()
        return runner

    def begin_decode(self, scheduler: Scheduler, steps: int, ahead: int = 0) -> Callable[[], list[Done]]:
        self.calls_ahead += ahead > 0
        self.moves_ahead += ahead > 0 and self.cache.recomposed
        return super().begin_decode(scheduler, steps, ahead)

    def _draw(self, size: int, shaped: bool, sharing: bool) -> None:
        state = self._state
        size = int((state.lengths > 0).sum())
        logits, lengths = self._forward(size, sharing=False), state.lengths[:size]
        column = {name: values[:size].numpy() for name, values in state._columns.items()}
        rows = np.zeros(size, [("length", np.int64), *SAMPLING_FIELDS])
        for name in {*rows.dtype.names} & {*column}:
            rows[name] = column[name]
        rows["penalised"], rows["special"] = False, True
        if state.counts is not None:
            own = torch.from_numpy(column["penalised"])[:, None]
            repetition = torch.from_numpy(column["repetition"])[:, None]
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(own & (state.counts[:size] > 0), penalised, logits)
        drawn = sample(logits, SamplingBatch.build(rows, np.zeros((size, 1), np.int32), column["stop_ids"]))
        if state.counts is not None:
            state.counts[:size].scatter_add_(1, drawn.tokens[:, None], own.int())
        bits = drawn.logprobs.view(torch.int32).long()
        state.history[int(state.step), :, :size] = torch.stack((drawn.tokens, bits))
        state.step += 1
        if drawn.top_ids is not None and drawn.top_logprobs is not None:
            state.top[0, :size], state.top[1, :size] = -1, 0
            state.top[0, :size, : drawn.top_ids.shape[1]] = drawn.top_ids
            state.top[1, :size, : drawn.top_ids.shape[1]] = drawn.top_logprobs.view(torch.int32)
        state.tokens[:size] = drawn.tokens
        lengths += 1
