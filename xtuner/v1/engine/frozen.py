"""What a checkpoint of adapters says about the frozen weights that they were trained on."""

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from xtuner.v1.config import LoRAConfig
from xtuner.v1.model.blocks import local_pieces
from xtuner.v1.model.lora import adapted_targets

if TYPE_CHECKING:
    from .train_engine import TrainEngine

_CHUNK = 1 << 20


def describe_frozen(engine: "TrainEngine") -> dict[str, Any] | None:
    """The base's fingerprint, and what of the adapters their shapes do not tell; None if all weights are trained.

    Collective.
    """
    cfg = engine.lora_cfg
    if cfg is None:
        return None
    return _describe_adapters(engine.model, cfg) | {"base": fingerprint(engine.model)}


def _describe_adapters(model: nn.Module, cfg: LoRAConfig) -> dict[str, Any]:
    return {"alpha": cfg.alpha, "rank": cfg.rank, "target_modules": ", ".join(adapted_targets(model))}


def check_adapters(saved: dict[str, Any] | None, model: nn.Module, cfg: LoRAConfig | None, folder: Path) -> None:
    """Raise ValueError unless the model has the adapters that `describe_frozen` told of, or none either."""
    if (saved is None) != (cfg is None):
        kinds = ("a whole model", "adapters (lora_cfg)")
        raise ValueError(
            f"{folder} holds {kinds[saved is not None]}, but {kinds[cfg is not None]} would be trained: set or remove "
            "train_worker_cfg.lora_cfg, or start from another checkpoint."
        )
    if saved is None or cfg is None:
        return
    for name, value in _describe_adapters(model, cfg).items():
        if saved[name] != value:
            raise ValueError(f"{folder}: its adapters have {name}={saved[name]}, lora_cfg says {value}; give the same.")


def check_base(saved: dict[str, Any] | None, model: nn.Module, folder: Path) -> None:
    """Raise ValueError unless the frozen weights are those that `describe_frozen` told of. Collective."""
    if saved is not None and saved["base"] != (own := fingerprint(model)):
        raise ValueError(
            f"{folder}: its adapters were trained on other frozen weights than those of load_from "
            f"(fingerprint {saved['base']}, here {own}). Give the load_from of that run, on the same kind of device if "
            "its weights are float32."
        )


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits of the frozen weights: other ones for any changed element, the same for any sharding, and
    for bfloat16 and float32 weights that are equal. Collective."""
    total = torch.zeros((), dtype=torch.int64)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            total += _whole_sum(param, zlib.crc32(name.encode())).cpu()
    return f"{int(total) % 2**64:016x}"


def _whole_sum(param: Tensor, salt: int) -> Tensor:
    ((local, offset),) = local_pieces(param.detach())
    own = _weighted_sum(local, offset[0] * param.shape[1:].numel(), salt)
    if not isinstance(param, DTensor):
        return own
    parts = [Replicate() if p.is_replicate() else Partial() for p in param.placements]
    return DTensor.from_local(own, param.device_mesh, parts).full_tensor()


def _weighted_sum(values: Tensor, first: int, salt: int) -> Tensor:
    """Sum of bits times an odd number that depends on the place, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), _CHUNK):
        chunk = values.reshape(-1)[start : start + _CHUNK]
        bits = chunk.float().view(torch.int32).long()
        place = torch.arange(first + start, first + start + chunk.numel(), device=values.device)
        total += (bits * ((place + salt) * 0x9E3779B97F4A7C1 * 2 + 1)).sum()
    return total
