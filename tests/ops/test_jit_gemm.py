"""Products with packed weights."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from xtuner.v1.ops.cpu import bits  # noqa: E402
from xtuner.v1.ops.cpu_rows import pair_row  # noqa: E402
from xtuner.v1.ops.jit import kernel  # noqa: E402
from xtuner.v1.ops.jit_gemm import _DEPTH, PANEL, multiply_panel, pack  # noqa: E402
from xtuner.v1.ops.simd import MULTIPLIES_FLOAT16  # noqa: E402

TYPES = [torch.float32, torch.bfloat16]
if MULTIPLIES_FLOAT16:
    TYPES.append(torch.float16)


@kernel
def _product(a, weight, layer, bias, out, rounds):
    for panel in range(weight.shape[1]):
        multiply_panel(panel, 1, a.shape[0], a, weight, layer, bias, out, rounds)


@kernel
def _pair(a):
    for i in range(a.shape[0]):
        pair_row(a, i * a.shape[1], a.shape[1])


def _packed(weights: torch.Tensor) -> np.ndarray:
    return bits(torch.stack([pack(w) for w in weights]))


def _factors(a: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """As a product with weights of this type wants them."""
    a = a.clone().numpy()
    if dtype == torch.float16:
        _pair(a)
    return a


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "rows, depth, columns",
    [(1, 1, 1), (3, 17, PANEL), (8, 128, 3 * PANEL + 5), (31, 200, 2 * PANEL - 1), (150, 90, 4 * PANEL)],
)
def test_products_are_those_of_float64(rows, depth, columns, biased, dtype):
    generator = torch.Generator().manual_seed(rows * depth + columns)
    weights = torch.randn(2, columns, depth, generator=generator).to(dtype)
    a, bias = torch.full((rows, -(-(depth + 3) // 16) * 16), torch.nan), torch.empty(2, columns if biased else 0)
    a[:, :depth].normal_(generator=generator)
    bias.normal_(generator=generator)
    if dtype == torch.float16:
        a = a.half().float()
    factors, weight = a[:, :depth].double(), weights[1].double().t()
    expected = factors @ weight + (bias[1] if biased else 0)
    out = torch.full((rows, columns), torch.nan)
    _product(_factors(a, dtype), _packed(weights), 1, bias.numpy(), out.numpy(), False)
    # Higham 2002, (3.5): what any order of additions keeps.
    size = factors.abs() @ weight.abs() + (bias[1].abs() if biased else 0)
    bound = (depth + 2) * 2.0**-24 * size
    if dtype == torch.float16:
        bound += (min(depth, _DEPTH) + 1) * 2.0**-11 * size
    assert ((out - expected).abs() <= bound).all()
    rounded = torch.empty_like(out)
    _product(_factors(a, dtype), _packed(weights), 1, bias.numpy(), rounded.numpy(), True)
    assert torch.equal(rounded, out.bfloat16().float())


@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_result_does_not_depend_on_the_others(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, none = _packed(torch.randn(1, 150, 90, generator=generator).to(dtype)), np.empty((1, 0), np.float32)
    a, whole = torch.randn(100, 96, generator=generator), np.zeros((100, 150), np.float32)
    _product(_factors(a, dtype), weight, 0, none, whole, False)
    for i in range(0, 100, 9):
        for rows in (1, 2, 4, 8, 24, 70):
            beside = torch.full((rows, 96), torch.nan)
            beside[-1] = a[i]
            alone = np.zeros((rows, 150), np.float32)
            _product(_factors(beside, dtype), weight, 0, none, alone, False)
            assert (alone[-1] == whole[i]).all()
