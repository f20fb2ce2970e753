"""Tiny random models in Hugging Face's format, engines over them, and requests."""

import asyncio
import json
from pathlib import Path

import torch

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine

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
