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
    """Write `tensors`, from whatever device, with one of them at a time in new host memory.

    The library's own writer copies all of them first, and refuses tensors that are parts of one another. A tensor
    that is in host memory already and contiguous is written from where it is.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    # The widest types first, as the library has it: then each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            here = tensor.detach().to("cpu").contiguous()
            if size := here.numel() * here.element_size():
                # Not by way of NumPy, which forbids the memory to be resized from then on.
                file.write((ctypes.c_char * size).from_address(here.data_ptr()))
            del here  # before the next one is made
