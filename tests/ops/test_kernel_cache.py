"""Kernels that come from the disk round as those that were just compiled."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

SCRIPT = """
import hashlib, torch
from xtuner.v1.ops.swiglu import swiglu
x = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
swiglu(x).square().sum().backward()
print(hashlib.sha256(x.grad.numpy().tobytes()).hexdigest())
"""


def test_a_kernel_from_the_disk_gives_the_same_bits(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert any(tmp_path.rglob("*.nbc"))
    assert runs[0].stdout == runs[1].stdout
