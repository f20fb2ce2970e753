"""Products with packed weights."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from xtuner.v1.ops.jit import kernel  # noqa: E402
from xtuner.v1.ops.jit_gemm import PANEL, multiply_panel, pack  # noqa: E402


@kernel
def _product(a, weight, layer, bias, out, rounds):
    for panel in range(weight.shape[1]):
        multiply_panel(panel, 1, a.shape[0], a, weight, layer, bias, out, rounds)


def _packed(weights: torch.Tensor) -> np.ndarray:
    packed = torch.stack([pack(w) for w in weights])
    return (packed.view(torch.int16) if packed.dtype == torch.bfloat16 else packed).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "rows, depth, columns", [(1, 1, 1), (3, 17, PANEL), (8, 128, 3 * PANEL + 5), (31, 200, 2 * PANEL - 1)]
)
def test_products_are_those_of_float64(rows, depth, columns, biased, dtype):
    generator = torch.Generator().manual_seed(rows * depth + columns)
    weights = torch.randn(2, columns, depth, generator=generator).to(dtype)
    a, bias = (torch.randn(*size, generator=generator) for size in ((rows, depth + 3), (2, columns if biased else 0)))
    factors, weight = a[:, :depth].double(), weights[1].double().t()
    expected = factors @ weight + (bias[1] if biased else 0)
    out = torch.full((rows, columns), torch.nan)
    _product(a.numpy(), _packed(weights), 1, bias.numpy(), out.numpy(), False)
    # Higham 2002, (3.5): what any order of additions keeps.
    bound = (depth + 2) * 2.0**-24 * (factors.abs() @ weight.abs() + (bias[1].abs() if biased else 0))
    assert ((out - expected).abs() <= bound).all()
    rounded = torch.empty_like(out)
    _product(a.numpy(), _packed(weights), 1, bias.numpy(), rounded.numpy(), True)
    assert torch.equal(rounded, out.bfloat16().float())


def test_a_rows_result_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    weight, none = _packed(torch.randn(1, 150, 90, generator=generator)), np.empty((1, 0), np.float32)
    a, whole = torch.randn(23, 90, generator=generator), np.zeros((23, 150), np.float32)
    _product(a.numpy(), weight, 0, none, whole, False)
    for i in range(23):
        for rows in (1, 2, 4, 8):
            beside = torch.full((rows, 90), torch.nan)
            beside[-1] = a[i]
            alone = np.zeros((rows, 150), np.float32)
            _product(beside.numpy(), weight, 0, none, alone, False)
            assert (alone[-1] == whole[i]).all()
