"""The functions of vectors of the CPU kernels."""

import numpy as np
import pytest

pytest.importorskip("numba")

from xtuner.v1.ops.jit import kernel  # noqa: E402
from xtuner.v1.ops.simd import LANES, exp_lanes, load, store  # noqa: E402


@kernel
def _exp_all(x, out):
    for i in range(0, x.size, LANES):
        store(out, i, exp_lanes(load(x, i)))


def test_exp_is_within_two_units_in_the_last_place_of_float32():
    x = np.linspace(-86, 87, 200_000).astype(np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 2e-7


def test_exp_keeps_nan_and_is_finite_and_tiny_beyond_its_range():
    x = np.resize(np.array([np.nan, -np.inf, -1000, 1000], np.float32), LANES)
    out = np.empty_like(x)
    _exp_all(x, out)
    assert np.isnan(out[0]) and 0 < out[1] < 1e-37 and out[2] == out[1] and np.isfinite(out[3]) and out[3] > 1e38
