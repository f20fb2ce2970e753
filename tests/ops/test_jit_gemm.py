"""Products with packed weights."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from xtuner.v1.ops.jit import kernel  # noqa: E402
from xtuner.v1.ops.jit_gemm import PANEL, ROWS, matmul, pack, padded  # noqa: E402


@kernel
def _product(rows, a, weight, layer, out, add):
    matmul(rows, a, weight, layer, out, add)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    "rows, depth, columns", [(1, 1, 1), (3, 17, PANEL), (8, 128, 3 * PANEL + 5), (33, 200, 2 * PANEL - 1)]
)
def test_products_are_those_of_float64(rows, depth, columns, add):
    generator = torch.Generator().manual_seed(rows * depth + columns)
    height = -(-rows // ROWS) * ROWS
    weights = torch.randn(2, columns, depth, generator=generator)
    a, out = (torch.randn(height, width, generator=generator) for width in (depth + 3, padded(columns)))
    factors, weight, before = a[:rows, :depth].double(), weights[1].double().t(), out[:rows, :columns].double()
    expected = factors @ weight + (before if add else 0)
    _product(rows, a.numpy(), torch.stack([pack(w) for w in weights]).numpy(), 1, out.numpy(), add)
    # Higham 2002, (3.5): what any order of additions keeps.
    bound = (depth + 2) * 2.0**-24 * (factors.abs() @ weight.abs() + before.abs())
    assert ((out[:rows, :columns] - expected).abs() <= bound).all()


def test_a_rows_result_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    weight = pack(torch.randn(150, 90, generator=generator))[None].numpy()
    a = torch.randn(20, 90, generator=generator)
    whole = np.zeros((20, padded(150)), np.float32)
    _product(20, a.numpy(), weight, 0, whole, False)
    for i in range(20):
        alone = np.zeros((ROWS, padded(150)), np.float32)
        _product(1, torch.cat((a[i : i + 1], torch.full((ROWS - 1, 90), torch.nan))).numpy(), weight, 0, alone, False)
        assert (alone[0] == whole[i]).all()
