"""An update by way of files: for any engine that can read a model folder, and any file system both sides see."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.hf import INDEX_NAME
from xtuner.v1.utils.files import write_json
from xtuner.v1.utils.tensor_file import write_tensor_file

from .inventory import DeliveryError, some


def write_weights(buckets: Iterable[WeightBucket], folder: Path, version: int) -> None:
    """Write an update into a new folder, one safetensors file a bucket; it has its name when it is complete.

    The index is Hugging Face's, so other readers of weights need only the model's config.json beside it.

    Raises:
        DeliveryError: the file system has no room or refuses; nothing is left there.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write(buckets, part, version)
        part.rename(folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise DeliveryError(f"version {version} of the weights cannot be written to {folder} ({error}).") from error


def _write(buckets: Iterable[WeightBucket], part: Path, version: int) -> None:
    part.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    checksums: dict[str, int] = {}
    num_bytes = 0
    for number, bucket in enumerate(buckets):
        bucket.refuse_parameters()
        file = f"bucket-{number:05d}.safetensors"
        write_tensor_file(part / file, bucket.rounded(), {"format": "pt"})
        weight_map |= dict.fromkeys(bucket.tensors, file)
        num_bytes += bucket.num_bytes
        if bucket.checksums is not None:
            checksums |= dict(zip(bucket.tensors, bucket.checksums.tolist(), strict=True))
    metadata = {"total_size": num_bytes, "version": version, "checksums": checksums}
    write_json(part / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})


def read_weights(folder: Path, version: int) -> Iterator[WeightBucket]:
    """The buckets of an update of this version, on the CPU.

    Raises:
        DeliveryError: it is not there, of another version, or a file is gone or cut off; names what is in that one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        index: dict[str, Any] = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        metadata, weight_map = index["metadata"], dict(index["weight_map"])
        came, sums = metadata["version"], dict(metadata["checksums"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeliveryError(f"{folder} holds no complete update ({error!r}).") from error
    if came != version:
        raise DeliveryError(f"{folder} holds version {came} of the weights where version {version} was due.")
    if sums and (without := weight_map.keys() - sums.keys()):
        raise DeliveryError(f"{folder} holds no complete update (no checksums of {some(sorted(without))}).")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(folder / file, framework="pt", device="cpu") as opened:
                bucket = WeightBucket({name: opened.get_tensor(name) for name in names})
        except (OSError, SafetensorError) as error:
            raise DeliveryError(f"{folder / file} with {some(names)} is not whole ({error}).") from error
        if sums:
            bucket.checksums = torch.tensor([sums[name] for name in names], dtype=torch.int64)
        yield bucket
