"""Sharded state on disk: safetensors only, readable by any number of ranks in any layout.

Each rank writes its blocks of every tensor and where they belong; each reader takes what it needs of them, from
whichever files hold it. So a checkpoint of two ranks continues on one or four, with another tensor-parallel size.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from xtuner.v1.config import LoRAConfig
from xtuner.v1.model import TransformerConfig
from xtuner.v1.model.blocks import local_pieces
from xtuner.v1.model.lora import add_adapters
from xtuner.v1.model.row_order import RowOrder
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.device import host_rng, set_host_rng
from xtuner.v1.utils.tensor_file import write_tensor_file

from .frozen import check_adapters, check_base, describe_frozen
from .optimizer import Optimizer
from .placement import is_first_copy, local_part
from .train_engine import TrainEngine

_SHOWN = 3
"""Parameters that differ in an error."""
_FACTS = ("layout", "optimizer_step", "world_size", "with_optimizer", "counters", "frozen")
"""What a rank's file must say of itself, as JSON."""


def _kept_parameters(model: nn.Module, lora_cfg: LoRAConfig | None) -> dict[str, Tensor]:
    """With adapters these alone: the frozen weights are those of `load_from`."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or lora_cfg is None}


def _named_state(engine: TrainEngine, with_optimizer: bool) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """(kind, parameter's name, parameter, this rank's part of the parameter or of a moment)"""
    for name, param in _kept_parameters(engine.model, engine.lora_cfg).items():
        yield "param", name, param.detach(), local_part(param.detach())
        if with_optimizer and engine.optimizer is not None:
            for moment, local in engine.optimizer.moments_of(param).items():
                yield moment, name, param.detach(), local


def save_train_state(
    engine: TrainEngine, folder: Path, with_optimizer: bool = True, counters: dict[str, int] | None = None
) -> None:
    """Write this rank's part, and `counters`, into `folder`, which the caller publishes. Call on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine.check_awake()
    engine.parking.moments_ready()
    tensors: dict[str, Tensor] = {}
    where: dict[str, dict] = {}
    for kind, name, tensor, values in _named_state(engine, with_optimizer):
        pieces = local_pieces(tensor, engine.model.row_orders.get(name), values) if is_first_copy(tensor) else []
        for number, (local, offset) in enumerate(pieces):
            if local.numel():
                tensors[f"{kind}/{name}@{number}"] = local
                where[f"{kind}/{name}@{number}"] = {"offset": offset, "shape": list(tensor.shape)}
    if with_optimizer and engine.optimizer is not None:
        for name, param in engine.model.named_parameters():
            if "step" in (state := engine.optimizer.state.get(param, {})):
                tensors[f"step/{name}"] = torch.as_tensor(float(state["step"]))
    if engine.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(engine.device)
    meta = {
        "layout": json.dumps(where), "optimizer_step": str(engine.optimizer_step), "world_size": str(world),
        "with_optimizer": json.dumps(with_optimizer), "counters": json.dumps(counters or {}),
        "frozen": json.dumps(describe_frozen(engine)), "rng": host_rng(),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_tensor_file(folder / f"rank-{rank:05d}-of-{world:05d}.safetensors", tensors, meta)
    dist.barrier()


def damaged(path: Path, error: Exception) -> str:
    """What to tell of a checkpoint's file that cannot be read. Going on from an older one is not for us to decide."""
    return (
        f"{path} is damaged ({type(error).__name__}: {error}). Delete the folder of this checkpoint, so that the one "
        "before it is used, or restore the file."
    )


def check_train_state(folder: Path, model_cfg: TransformerConfig, lora_cfg: LoRAConfig | None = None) -> None:
    """See, in any process, whether all files of a checkpoint are there and whole, and of this model.

    Raises:
        FileNotFoundError, ValueError: it is no checkpoint, not complete, damaged, or of another model.
    """
    model = model_cfg.build(device="meta")
    if lora_cfg is not None:
        add_adapters(model, lora_cfg)
    _Shards(folder).check_model(model, lora_cfg)


def _open_shard(path: Path) -> tuple[Any, dict[str, Any]]:
    """A rank's file and what it says of itself."""
    try:
        file = safe_open(path, framework="pt")
        meta = file.metadata()
        return file, {key: json.loads(meta[key]) for key in _FACTS}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(damaged(path, error)) from error


class _Shards:
    """The files of one checkpoint, with an index from key to the blocks that they hold."""

    def __init__(self, folder: Path):
        paths = sorted(folder.glob("rank-*-of-*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder}: no rank-*.safetensors files; this is not a training checkpoint.")
        opened = [_open_shard(path) for path in paths]
        self.files, facts = [file for file, _ in opened], opened[0][1]
        self.optimizer_step: int = facts["optimizer_step"]
        self.world_size: int = facts["world_size"]
        self.with_optimizer: bool = facts["with_optimizer"]
        self.counters: dict[str, int] = facts["counters"]
        self.frozen: dict[str, Any] | None = facts["frozen"]
        if len(paths) != self.world_size:
            raise ValueError(f"{folder}: {len(paths)} of {self.world_size} rank files are there; it is incomplete.")
        self.index: dict[str, list[tuple[int, str, dict]]] = {}
        for number, (_, own) in enumerate(opened):
            for stored, place in own["layout"].items():
                self.index.setdefault(stored.rpartition("@")[0], []).append((number, stored, place))
        self.scalars = {key for key in self.files[0].keys() if key.startswith("step/")}
        self.folder = folder

    def check_model(self, model: nn.Module, lora_cfg: LoRAConfig | None) -> None:
        """Raise ValueError unless the model's parameters have the names and shapes of those that were saved."""
        check_adapters(self.frozen, model, lora_cfg, self.folder)
        own = {name: list(p.shape) for name, p in _kept_parameters(model, lora_cfg).items()}
        whole = {key: places[0][2]["shape"] for key, places in self.index.items()}
        saved = {key.removeprefix("param/"): shape for key, shape in whole.items() if key.startswith("param/")}
        if differing := [name for name in own | saved if own.get(name) != saved.get(name)]:
            shown = (f"{n} is {saved.get(n, 'not')} there, {own.get(n, 'not')} here" for n in differing[:_SHOWN])
            more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
            raise ValueError(
                f"{self.folder} is of another model than train_worker_cfg.model_cfg: {', '.join(shown)}{more}. Give "
                "another load_checkpoint_cfg.checkpoint_path, or the load_from that it began with; auto_resume also "
                "needs another work_dir."
            )

    def fill(self, key: str, target: Tensor, order: RowOrder | None, values: Tensor | None = None) -> None:
        """Copy this rank's part of `key` into `target`, or into `values` of the shape of its local part."""
        wanted = filled = 0
        for local, offset in local_pieces(target, order, values):
            wanted += local.numel()
            for number, stored, place in self.index[key]:
                part = self.files[number].get_slice(stored)
                there, here = _overlap(place["offset"], part.get_shape(), offset, local.shape)
                block = local[here]
                if block.numel():
                    block.copy_(part[there])
                    filled += block.numel()
        if filled < wanted:
            raise ValueError(f"checkpoint's {key}: {filled} of {wanted} elements found; it is incomplete.")


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where two blocks of one tensor meet, as an index into each; empty where they do not."""
    one, other = [], []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        start = max(a, b)
        end = max(start, min(a + n, b + m))
        one.append(slice(start - a, end - a))
        other.append(slice(start - b, end - b))
    return tuple(one), tuple(other)


def load_train_state(engine: TrainEngine, folder: Path, with_optimizer: bool = True) -> dict[str, int]:
    """Fill weights, moments, step counters and random state from `folder`; returns the saved counters.

    Call on all ranks, as many as there are.

    Raises:
        FileNotFoundError, ValueError: it is no checkpoint, not complete, damaged, or of another model.
        RuntimeError: the engine's memory is parked on the host.
    """
    engine.check_awake()
    engine.parking.moments_ready()
    shards = _Shards(folder)
    shards.check_model(engine.model, engine.lora_cfg)
    check_base(shards.frozen, engine.model, folder)
    if with_optimizer and not shards.with_optimizer and dist.get_rank() == 0:
        get_logger().warning(f"{folder} was saved without moments: the optimizer begins its statistics anew.")
    engine.optimizer_step = shards.optimizer_step
    with torch.no_grad():
        for name, param in _kept_parameters(engine.model, engine.lora_cfg).items():
            order = engine.model.row_orders.get(name)
            shards.fill(f"param/{name}", param, order)
            if with_optimizer and engine.optimizer is not None and f"step/{name}" in shards.scalars:
                _fill_moments(engine.optimizer, name, param, order, shards)
    engine.parking.frozen_changed()
    own = shards.files[min(dist.get_rank(), len(shards.files) - 1)]
    if "rng/cpu" in own.keys():  # of an older checkpoint
        torch.set_rng_state(own.get_tensor("rng/cpu"))
    if engine.device.type == "cuda" and "rng/cuda" in own.keys():
        torch.cuda.set_rng_state(own.get_tensor("rng/cuda"), engine.device)
    if "rng" in (meta := own.metadata()):
        set_host_rng(meta["rng"])
    dist.barrier()
    return shards.counters


def _fill_moments(optimizer: Optimizer, name: str, param: Tensor, order: RowOrder | None, shards: _Shards) -> None:
    optimizer.make_state()
    optimizer.state[param]["step"] = int(shards.files[0].get_tensor(f"step/{name}"))
    for moment, values in optimizer.moments_of(param).items():
        if f"{moment}/{name}" not in shards.index:
            raise ValueError(
                f"the checkpoint has no {moment} of {name}: it is of another optimizer. Keep optim_cfg's class, or "
                "begin a new run with new moments: auto_resume=False and load_checkpoint_cfg with this checkpoint_path "
                "and load_optimizer_states=False."
            )
        shards.fill(f"{moment}/{name}", param, order, values)
