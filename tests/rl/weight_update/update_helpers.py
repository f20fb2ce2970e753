"""Two engines' worth of tiny weights, an update between two threads, and what can go wrong with it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model, weight_views
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.weight_update import Line, WeightUpdateError, receive_weights, send_weights

CPU = torch.device("cpu")
BUCKET = 20_000
"""Bytes: several buckets a model."""


def write_model(path: Path, tied: bool = True, seed: int = 0) -> Path:
    attention = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True)
    config = DenseModelConfig(
        model_type="qwen3", vocab_size=64, max_position_embeddings=64, num_hidden_layers=2, hidden_size=32,
        intermediate_size=48, eos_token_id=2, tie_word_embeddings=tied, attention=attention,
    )  # fmt: skip
    model = config.build("cpu")
    model.init_weights(seed, 0.2)
    save_hf_model(export_hf_tensors(model, torch.float32), config, path)
    return path


def started(path: Path, **kwargs) -> NativeEngine:
    engine = NativeEngine(path, cpu_kernels=False, **kwargs)
    asyncio.run(engine.start())
    return engine


def held(engine: NativeEngine) -> dict[str, Tensor]:
    """The weights that an engine has, by name."""
    return {name: view.clone() for name, view in weight_views(engine._model).items()}


def grouped(tensors: dict[str, Tensor], dtype: torch.dtype | None = None, parts: int = 4) -> Iterator[WeightBucket]:
    """Buckets, made one after the other."""
    items = list(tensors.items())
    size = -(-len(items) // parts)
    for start in range(0, len(items), size):
        yield WeightBucket(dict(items[start : start + size]), dtype)


def serves(engine: NativeEngine) -> str | None:
    """None if it answers, else why it does not."""
    request = GenerateRequest(0, [5, 6, 7], SampleParams(max_tokens=2), 1)
    return asyncio.run(engine.generate(request)).error


def deliver(
    engine: NativeEngine, buckets: Iterator[WeightBucket], version: int, lines: tuple[Line, Line] | None = None,
    expected: int | None = None, send: Callable[..., None] = send_weights,
) -> tuple[str | None, str | None]:  # fmt: skip
    """Send from a thread, receive here. What the two sides complained about."""
    ends = lines or Line.pair(20.0)
    complaint: list[str] = []

    def run() -> None:
        try:
            send(buckets, ends[0], version, "host", CPU)
        except WeightUpdateError as error:
            complaint.append(str(error))

    sender = threading.Thread(target=run)
    sender.start()
    try:
        asyncio.run(receive_weights(engine, ends[1], CPU, expected))
        received = None
    except Exception as error:
        received = f"{type(error).__name__}: {error}"
    sender.join(30)
    assert not sender.is_alive()
    return (complaint[0] if complaint else None), received
