"""Safetensors files, written tensor by tensor."""

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write `tensors`, from whatever device, through new host memory for the largest of them.

    The library's own writer copies all of them first, and refuses tensors that are parts of one another. A tensor
    that is in host memory already and contiguous is written from where it is.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    # The widest types first, as the library has it: then each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        start, end = end, end + _num_bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    # One for all: memory of one tensor that is freed may not do for the next one.
    moved = [_num_bytes(tensor) for _, tensor in ordered if _must_move(tensor)]
    buffer = torch.empty(max(moved, default=0), dtype=torch.uint8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            here = tensor.detach()
            if (size := _num_bytes(here)) and _must_move(here):
                here = buffer[:size].view(here.dtype).view(here.shape).copy_(here)
            if size:
                # Not by way of NumPy, which forbids the memory to be resized from then on.
                file.write((ctypes.c_char * size).from_address(here.data_ptr()))


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _must_move(tensor: Tensor) -> bool:
    """Whether its values do not lie in host memory as the file has them."""
    return tensor.device.type != "cpu" or not tensor.is_contiguous()
