"""Gathers whose backward gathers."""

import pytest
import torch

from xtuner.v1.ops.gather import RowIndex, gather_rows


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 3, 0, 1], [3]])
def test_gradient_is_the_sum_over_readers(rows: list[int]) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(rows), 3, dtype=torch.float64)
    index = torch.tensor(rows)
    out = gather_rows(x, RowIndex.build(index, 4))
    assert torch.equal(out, x[index])
    (grad,) = torch.autograd.grad((out * weight).sum(), x)
    expected = torch.zeros(4, 3, dtype=torch.float64).index_add_(0, index, weight)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("rows", [[2, 0, 0, 1], [2, 0, 0, 2]])
def test_padding_has_no_gradient(rows: list[int]) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    padding = torch.tensor([False, False, True, False])
    out = gather_rows(x, RowIndex.build(torch.tensor(rows), 3, padding))
    (grad,) = torch.autograd.grad(out.sum(), x)
    expected = torch.zeros(3, 2).index_add_(0, torch.tensor(rows)[~padding], torch.ones(3, 2))
    assert torch.equal(grad, expected)


def test_inverse_brings_rows_back_and_gives_padding_a_zero_gradient() -> None:
    index = RowIndex.build(torch.tensor([2, 0, 0, 1]), 3, torch.tensor([False, False, True, False]))
    x = torch.randn(3, 2)
    places = gather_rows(x, index).requires_grad_()
    out = gather_rows(places, index.inverse())
    assert torch.equal(out, x)
    (grad,) = torch.autograd.grad(out.sum(), places)
    assert torch.equal(grad, torch.tensor([[1.0, 1], [1, 1], [0, 0], [1, 1]]))
    with pytest.raises(ValueError, match="exactly once"):
        RowIndex.build(torch.tensor([0, 0, 1]), 3).inverse()
