"""Sharded state on disk: safetensors only, readable by any number of ranks.

Each rank writes its rows of every tensor and where they belong; each reader takes the rows that it needs, from
whichever files hold them. So a checkpoint of two ranks continues on one or four.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from xtuner.v1.model.hf import local_rows
from xtuner.v1.utils import get_logger

from .train_engine import TrainEngine

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def _named_state(engine: TrainEngine, with_optimizer: bool) -> Iterator[tuple[str, Tensor]]:
    for name, param in engine.model.named_parameters():
        yield f"param/{name}", param.detach()
        if with_optimizer and engine.optimizer is not None:
            state = engine.optimizer.state.get(param, {})
            for moment in _MOMENTS:
                if moment in state:
                    yield f"{moment}/{name}", state[moment]


def save_train_state(
    engine: TrainEngine, folder: Path, with_optimizer: bool = True, counters: dict[str, int] | None = None
) -> None:
    """Write this rank's part, and `counters`, into `folder`, which the caller publishes. Call on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors: dict[str, Tensor] = {}
    where: dict[str, dict] = {}
    for key, tensor in _named_state(engine, with_optimizer):
        local, start = local_rows(tensor)
        if local.numel() == 0:
            continue
        tensors[key] = local.detach().to("cpu").contiguous()
        where[key] = {"start": start, "shape": list(tensor.shape)}
    if with_optimizer and engine.optimizer is not None:
        for name, param in engine.model.named_parameters():
            if "step" in (state := engine.optimizer.state.get(param, {})):
                tensors[f"step/{name}"] = torch.as_tensor(float(state["step"]))
    tensors["rng/cpu"] = torch.get_rng_state()
    if engine.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(engine.device)
    meta = {
        "layout": json.dumps(where), "optimizer_step": str(engine.optimizer_step), "world_size": str(world),
        "with_optimizer": json.dumps(with_optimizer), "counters": json.dumps(counters or {}),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"rank-{rank:05d}-of-{world:05d}.safetensors", metadata=meta)
    dist.barrier()


class _Shards:
    """The files of one checkpoint, with an index from key to the row ranges that they hold."""

    def __init__(self, folder: Path):
        paths = sorted(folder.glob("rank-*-of-*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder}: no rank-*.safetensors files; this is not a training checkpoint.")
        self.files = [safe_open(p, framework="pt") for p in paths]
        meta = self.files[0].metadata()
        self.optimizer_step, self.world_size = int(meta["optimizer_step"]), int(meta["world_size"])
        self.with_optimizer: bool = json.loads(meta["with_optimizer"])
        self.counters: dict[str, int] = json.loads(meta["counters"])
        if len(paths) != self.world_size:
            raise ValueError(f"{folder}: {len(paths)} of {self.world_size} rank files are there; it is incomplete.")
        self.index: dict[str, list[tuple[int, dict]]] = {}
        for number, file in enumerate(self.files):
            for key, place in json.loads(file.metadata()["layout"]).items():
                self.index.setdefault(key, []).append((number, place))
        self.scalars = set(self.files[0].keys()) - set(self.index)

    def fill(self, key: str, target: Tensor) -> None:
        """Copy this rank's rows of `key` into `target`."""
        local, start = local_rows(target)
        shape = list(target.shape)
        if key not in self.index:
            raise KeyError(f"checkpoint has no {key!r}: was it written by another model or without the optimizer?")
        filled = 0
        for number, place in self.index[key]:
            if place["shape"] != shape:
                raise ValueError(f"checkpoint's {key} has shape {place['shape']}, the model's has {shape}.")
            part = self.files[number].get_slice(key)
            if not shape:
                local.copy_(self.files[number].get_tensor(key))
                return
            rows = part.get_shape()[0]
            first, last = max(start, place["start"]), min(start + local.shape[0], place["start"] + rows)
            if first < last:
                local[first - start : last - start].copy_(part[first - place["start"] : last - place["start"]])
                filled += last - first
        if filled < local.shape[0]:
            raise ValueError(f"checkpoint's {key}: {filled} of {local.shape[0]} rows found; it is incomplete.")


def load_train_state(engine: TrainEngine, folder: Path, with_optimizer: bool = True) -> dict[str, int]:
    """Fill weights, moments, step counters and random state from `folder`; returns the saved counters.

    Call on all ranks, as many as there are.

    Raises:
        FileNotFoundError, ValueError, KeyError: it is no checkpoint, not complete, or of another model.
    """
    shards = _Shards(folder)
    params = dict(engine.model.named_parameters())
    if unknown := sorted(k for k in shards.index if k.startswith("param/") and k[len("param/") :] not in params):
        raise ValueError(f"{folder} is of another model: it has {', '.join(unknown[:5])}, which this one lacks.")
    if with_optimizer and not shards.with_optimizer and dist.get_rank() == 0:
        get_logger().warning(f"{folder} was saved without moments: the optimizer begins its statistics anew.")
    engine.optimizer_step = shards.optimizer_step
    with torch.no_grad():
        for name, param in params.items():
            shards.fill(f"param/{name}", param)
            if with_optimizer and engine.optimizer is not None and f"step/{name}" in shards.scalars:
                _fill_moments(engine.optimizer, name, param, shards)
    own = shards.files[min(dist.get_rank(), len(shards.files) - 1)]
    torch.set_rng_state(own.get_tensor("rng/cpu"))
    if engine.device.type == "cuda" and "rng/cuda" in own.keys():
        torch.cuda.set_rng_state(own.get_tensor("rng/cuda"), engine.device)
    dist.barrier()
    return shards.counters


def _fill_moments(optimizer: torch.optim.Optimizer, name: str, param: Tensor, shards: _Shards) -> None:
    state = optimizer.state[param]
    made = shards.files[0].get_tensor(f"step/{name}")
    state["step"] = made.to(local_rows(param)[0].device) if optimizer.defaults.get("fused") else made
    for moment in _MOMENTS:
        if f"{moment}/{name}" in shards.index:
            state[moment] = torch.zeros_like(param)
            shards.fill(f"{moment}/{name}", state[moment])
