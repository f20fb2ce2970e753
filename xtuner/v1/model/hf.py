"""Weights in Hugging Face's format, in and out, one tensor at a time."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtuner.v1.config import parse_dtype
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.tensor_file import write_tensor_file

from .blocks import gather_all, local_pieces
from .config import DenseModelConfig
from .dense import DecoderModel, ParamSlice
from .hf_config import to_hf_config
from .lora import LoRALinear
from .moe_config import MoEModelConfig
from .row_order import RowOrder

INDEX_NAME = "model.safetensors.index.json"
# Companions of the weights that a reader of the model needs.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "*.model", "*.tiktoken", "LICENSE*",
)  # fmt: skip


def iter_hf_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a model folder. One shard is open at a time; tensors are read when they come up."""
    for shard, names in _open_shards(Path(path)):
        for name in names:
            yield name, shard.get_tensor(name)


class StoredTensor:
    """A tensor in an open file, of which the rows that are asked for are read, and no others."""

    def __init__(self, shard: Any, name: str, stacked: bool = False) -> None:
        self._shard, self._name, self._stacked = shard, name, stacked
        self._slice = shard.get_slice(name)
        shape = self._slice.get_shape()
        self.shape = torch.Size((shape[0] * shape[1], *shape[2:]) if stacked else shape)

    def flatten(self, first: int, last: int) -> "StoredTensor":
        """Of a stack of matrices, the rows of all of them."""
        if (first, last) != (0, 1) or self._stacked:
            raise ValueError(f"only the first two dimensions of {self._name} can be joined, once.")
        return StoredTensor(self._shard, self._name, stacked=True)

    def __getitem__(self, rows: slice) -> Tensor:
        if not self._stacked:
            return self._slice[rows]
        height = self._slice.get_shape()[1]
        first = rows.start // height
        whole = self._slice[first : -(-rows.stop // height)].flatten(0, 1)
        return whole[rows.start - first * height : rows.stop - first * height]

    def numel(self) -> int:
        return self.shape.numel()


def check_hf_weights(path: str | Path) -> None:
    """Read the headers of all weight files; raises what `iter_hf_tensors` would."""
    for _ in _open_shards(Path(path)):
        pass


def _open_shards(folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """Weight files, open one by one, with the names to read from each."""
    from safetensors import SafetensorError, safe_open

    for file, names in _shards(folder):
        try:
            opened = safe_open(file, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(
                f"{file} ({file.stat().st_size:,} bytes) is not a whole safetensors file: {error}. Download it again "
                "(a clone made without Git LFS holds only pointers: git lfs pull)."
            ) from error
        with opened as shard:
            present = set(shard.keys())
            for name in names or ():
                if name not in present:
                    raise ValueError(f"{file}: has no tensor {name!r} though {INDEX_NAME} says so.")
            yield shard, sorted(present) if names is None else names


def _shards(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """Weight files with the names to read from each (None: all)."""
    index, single = folder / INDEX_NAME, folder / "model.safetensors"
    if index.is_file():
        by_file: dict[str, list[str]] = {}
        for name, file in _weight_map(index).items():
            by_file.setdefault(file, []).append(name)
        if missing := [file for file in by_file if not (folder / file).is_file()]:
            raise FileNotFoundError(f"{folder}: the index names {_shorten(sorted(missing))}: not there.")
        return [(folder / file, sorted(names)) for file, names in sorted(by_file.items())]
    if single.is_file():
        return [(single, None)]
    hint = " It has .bin files: convert them to safetensors first." if list(folder.glob("*.bin")) else ""
    raise FileNotFoundError(f"{folder}: neither {INDEX_NAME} nor model.safetensors is there.{hint}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not an index of weight files ({error!r}). Download it again.") from error


def load_hf_model(model: DecoderModel, path: str | Path) -> None:
    """Fill all parameters from a model folder, tensor by tensor; of a sharded model each rank reads its rows.

    Raises ValueError that lists missing and unexpected names and shape mismatches.
    """
    left, unexpected, mismatched, left_out = set(model.hf_params), [], [], 0
    stored = ((name, StoredTensor(shard, name)) for shard, names in _open_shards(Path(path)) for name in names)
    for name, tensor in stored:
        if (place := model.hf_params.get(name)) is None:
            if _predicts_further(model, name):
                left_out += 1
            elif not _ignorable(model, name):
                unexpected.append(name)
        elif tuple(tensor.shape) != (expected := _hf_shape(place, model.get_parameter(place.param))):
            mismatched.append(f"{name} is {list(tensor.shape)}, expected {list(expected)}")
            left.discard(name)
        else:
            load_hf_tensor(model, name, tensor)
            left.discard(name)
    problems = {"missing": sorted(left), "unexpected": unexpected, "wrong shape": mismatched}
    if any(problems.values()):
        text = "; ".join(f"{kind}: {_shorten(names)}" for kind, names in problems.items() if names)
        raise ValueError(f"{path}: the weights do not fit config.json. {text}")
    if left_out:
        get_logger().warning(
            f"{path}: its {left_out} tensors of layers for multi-token prediction are not trained, and not exported."
        )


def load_hf_tensor(model: DecoderModel, name: str, tensor: Tensor | StoredTensor) -> int:
    """Copy one tensor into its rows, on every rank the part it holds. Returns its number of elements."""
    if name not in model.hf_params:
        if _ignorable(model, name) or _predicts_further(model, name):
            return 0
        raise KeyError(f"{name!r} is no parameter of this {model.config.model_type} model.")
    place = model.hf_params[name]
    param = model.get_parameter(place.param)
    if tuple(tensor.shape) != (expected := _hf_shape(place, param)):
        raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(expected)}.")
    rows = tensor if place.stack == 1 else tensor.flatten(0, 1)
    copy_rows(param, rows, place.start, model.row_orders.get(place.param))
    return tensor.numel()


@torch.no_grad()
def copy_rows(param: Tensor, tensor: Tensor | StoredTensor, start: int, order: RowOrder | None = None) -> None:
    """param[start : start + len(tensor)] = tensor; of a sharded parameter, the part that this rank holds."""
    for target, (rows, *rest) in places_of_rows(param, start, tensor.shape[0], order):
        if target.is_meta:
            raise RuntimeError("the model is on the meta device: allocate it first, model.to_empty(device=...).")
        # Half the bytes travel, and the device casts faster, than if the copy did both.
        target.copy_(tensor[rows][(slice(None), *rest)].to(target.device))


def places_of_rows(
    param: Tensor, start: int, count: int, order: RowOrder | None = None
) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """What this rank holds of `count` rows of a parameter: views, and which part of the rows each is."""
    for local, (first, *rest) in local_pieces(param, order):
        begin, end = max(start, first), min(start + count, first + local.shape[0])
        if begin < end:
            others = (slice(at, at + size) for at, size in zip(rest, local.shape[1:], strict=True))
            yield local[begin - first : end - first], (slice(begin - start, end - start), *others)


def checkpoint_dtype(path: str | Path) -> torch.dtype:
    """The type that a model folder says it has; else that of its first tensor."""
    values = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    named = values.get("dtype") or values.get("torch_dtype")
    return parse_dtype(named) if named else next(iter_hf_tensors(path))[1].dtype


def export_hf_tensors(model: DecoderModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor in `dtype`) of all parameters, on the model's device; adapters are merged into theirs.

    Collective for a sharded model: every rank iterates to the end. One parameter is gathered at a time.
    """
    for batch in export_hf_batches(model, dtype, 0):
        yield from batch.items()


def export_hf_batches(model: DecoderModel, dtype: torch.dtype, at_once: int) -> Iterator[dict[str, Tensor]]:
    """The same in batches; see `export_batches`."""
    names: dict[str, list[str]] = {}
    for name, place in model.hf_params.items():
        names.setdefault(place.param, []).append(name)
    for batch in export_batches(model, dtype, at_once):
        yield {name: _rows_of(whole, model.hf_params[name]) for param, whole in batch.items() for name in names[param]}


def export_batches(model: DecoderModel, dtype: torch.dtype, at_once: int) -> Iterator[dict[str, Tensor]]:
    """Whole parameters in `dtype` by their own names, adapters merged, as many at a time as make up `at_once` bytes, or
    one that is larger; they are gathered together."""
    batch: list[str] = []
    size = 0
    for param in dict.fromkeys(place.param for place in model.hf_params.values()):
        num_bytes = model.get_parameter(param).numel() * _exported_dtype(model, param, dtype).itemsize
        if batch and size + num_bytes > at_once:
            yield _wholes(model, batch, dtype)
            batch, size = [], 0
        batch.append(param)
        size += num_bytes
    if batch:
        yield _wholes(model, batch, dtype)


def _rows_of(whole: Tensor, place: ParamSlice) -> Tensor:
    rows = whole[place.start : place.end]
    return rows if place.stack == 1 else rows.unflatten(0, (place.stack, -1))


def _wholes(model: DecoderModel, params: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """These parameters whole, in `dtype` but for those that stay float32."""
    wholes: dict[str, Tensor] = {}
    rest = {}
    for name in params:
        layer, _, leaf = name.rpartition(".")
        module = model.get_submodule(layer)
        if isinstance(module, LoRALinear) and leaf == "weight":
            wholes[name] = module.merged_weight(dtype)
        else:
            param, order = module.get_parameter(leaf).detach(), model.row_orders.get(name)
            rest[name] = (param, _exported_dtype(model, name, dtype), order)
    wholes.update(zip(rest, gather_all(list(rest.values())), strict=True))
    return {name: wholes[name] for name in params}


def _exported_dtype(model: DecoderModel, param: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if param in model.float32_names else dtype


def weight_views(model: DecoderModel) -> dict[str, Tensor]:
    """Every weight by its Hugging Face name, as a view of what this rank holds of the parameter; for models that are
    not cut over ranks."""
    params = parameter_views(model)
    return {name: _rows_of(params[place.param], place) for name, place in model.hf_params.items()}


def parameter_views(model: DecoderModel) -> dict[str, Tensor]:
    """What this rank holds of every parameter, by its own name."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in params.items()}


def _hf_shape(place: ParamSlice, param: Tensor) -> tuple[int, ...]:
    rows, rest = place.end - place.start, param.shape[1:]
    return (rows, *rest) if place.stack == 1 else (place.stack, rows // place.stack, *rest)


def _ignorable(model: DecoderModel, name: str) -> bool:
    """Names that old or careless writers add: buffers that we compute, and the second copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.lm_head is None)


def _predicts_further(model: DecoderModel, name: str) -> bool:
    """Whether a tensor belongs to the layers behind the last, which no other part needs."""
    first, extra = model.config.num_hidden_layers, getattr(model.config, "num_nextn_predict_layers", 0)
    return any(name.startswith(f"model.layers.{layer}.") for layer in range(first, first + extra))


def _shorten(names: list[str], show: int = 8) -> str:
    rest = len(names) - show
    return ", ".join(names[:show]) + (f" and {rest} more" if rest > 0 else "")


class HFWriter:
    """Writes a model folder tensor by tensor; holds at most one shard.

    The folder must be new; who needs an all-or-nothing folder renames it after `close`.
    """

    def __init__(
        self,
        config: DenseModelConfig | MoEModelConfig,
        out_dir: str | Path,
        source_dir: str | Path | None = None,
        max_shard_bytes: int = 4 * 2**30,
    ) -> None:
        self._config, self._out, self._max = config, Path(out_dir), max_shard_bytes
        self._source = Path(source_dir) if source_dir is not None else None
        self._out.mkdir(parents=True, exist_ok=True)
        if any(self._out.iterdir()):
            raise FileExistsError(f"{self._out}: not empty; a model is written into a new folder.")
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._shard_names: list[list[str]] = []
        self._total_bytes = 0
        self._dtype: torch.dtype | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one full tensor; it may be reused by the caller afterwards."""
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + size > self._max:
            self._flush()
        self._shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._shard_bytes += size
        self._total_bytes += size
        self._dtype = self._dtype or tensor.dtype

    def close(self) -> None:
        """Write the last shard, the index, config.json and the companions."""
        self._flush()
        if self._dtype is None:
            raise ValueError(f"{self._out}: no tensor was written.")
        count = len(self._shard_names)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shard_names):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._out / _part_name(i)).rename(self._out / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        _write_json(self._out / INDEX_NAME, index)
        _write_json(self._out / "config.json", self._config_json(self._dtype))
        if self._source is not None:
            _copy_companions(self._source, self._out)

    def _flush(self) -> None:
        if not self._shard:
            return
        write_tensor_file(self._out / _part_name(len(self._shard_names)), self._shard, {"format": "pt"})
        self._shard_names.append(list(self._shard))
        self._shard, self._shard_bytes = {}, 0

    def _config_json(self, dtype: torch.dtype) -> dict[str, Any]:
        if self._source is None:
            return to_hf_config(self._config, dtype)
        values = json.loads((self._source / "config.json").read_text(encoding="utf-8"))
        # Old writers say torch_dtype, new ones dtype; a reader may know only one of them.
        for key in [k for k in ("torch_dtype", "dtype") if k in values] or ["torch_dtype"]:
            values[key] = str(dtype).removeprefix("torch.")
        if "num_nextn_predict_layers" in values:
            values["num_nextn_predict_layers"] = 0
        return values


def save_hf_model(
    tensors: Iterable[tuple[str, Tensor]],
    config: DenseModelConfig | MoEModelConfig,
    out_dir: str | Path,
    source_dir: str | Path | None = None,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write (name, full tensor) pairs as a model folder; see `HFWriter`."""
    writer = HFWriter(config, out_dir, source_dir, max_shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()


def _part_name(i: int) -> str:
    return f"part-{i:05d}.safetensors"


def _copy_companions(source: Path, out: Path) -> None:
    for pattern in _COMPANIONS:
        for item in source.glob(pattern):
            if item.is_file():
                shutil.copyfile(item, out / item.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, out / templates.name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
