"""Files that the safetensors library reads, written without a second copy of everything."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from xtuner.v1.utils.tensor_file import write_tensor_file


def test_the_library_reads_what_was_written(tmp_path):
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    tensors = {
        "whole": base, "rows of it": base[1:3], "columns of it": base[:, 2:4], "transposed": base.t(),
        "empty": base[:0],
        "scalar": torch.tensor(2.5), "half": torch.randn(3, 5).bfloat16(), "odd": torch.arange(3, dtype=torch.uint8),
        "flags": torch.tensor([True, False]), "näme": torch.tensor([2**40]),
    }  # fmt: skip
    write_tensor_file(tmp_path / "x.safetensors", tensors, {"note": 'with "quotes"'})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"note": 'with "quotes"'}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
            assert read.data_ptr() % read.element_size() == 0, name
        assert torch.equal(file.get_slice("whole")[1:2], base[1:2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of the process")
def test_no_second_copy_in_memory(tmp_path):
    size = 32 * 2**20
    tensors = {str(i): torch.ones(size // 2).view(-1, 2)[:, :1] for i in range(8)}  # none can be written as it lies
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten

    def peak() -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

    before = peak()
    write_tensor_file(tmp_path / "x.safetensors", tensors, {})
    assert peak() - before < 2 * size
