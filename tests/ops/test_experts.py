"""Matmuls of experts, and tokens in their order: values and gradients against plain loops in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from xtuner.v1.ops.expert_order import ExpertOrder, combine_tokens, reorder, spread_tokens
from xtuner.v1.ops.grouped_mm import grouped_mm, waits_for_device


def _ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0], [4, 4, 1, 0], [0, 0, 0, 0]])
def test_each_row_meets_its_own_expert_once(sizes: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 6, generator=g).requires_grad_()
    weight = torch.randn(4, 5, 6, generator=g).requires_grad_()
    seed = torch.randn(sum(sizes), 5, generator=g)
    out = grouped_mm(x, weight, _ends(sizes))
    out.backward(seed)
    experts = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    a, b = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = torch.einsum("mk,mnk->mn", a, b[experts])
    expected.backward(seed.double())
    for ours, exact in ((out, expected), (x.grad, a.grad), (weight.grad, b.grad)):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)


def _ids(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)).topk(top_k).indices


def test_order_is_by_expert_and_then_by_token() -> None:
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order = ExpertOrder.build(ids, 5)
    assert order.order.tolist() == [1, 2, 0, 4, 3, 5]
    assert order.ends.tolist() == [2, 2, 4, 6, 6] and order.ends.dtype == torch.int32
    assert order.order[order.places].tolist() == list(range(6))


def test_spreading_and_combining_have_the_gradients_of_their_definition() -> None:
    ids = _ids(7, 5, 3)
    order, expert = ExpertOrder.build(ids, 5), ids.flatten().sort(stable=True).values
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(5, 1, dtype=torch.float64)

    def routed(x, weights):
        return combine_tokens(spread_tokens(x, order) * scale[expert], order, weights)

    torch.testing.assert_close(routed(x, weights), x * (weights[..., None] * scale[ids]).sum(1))
    assert torch.autograd.gradcheck(routed, (x, weights))


def test_reorder_and_back_is_the_identity() -> None:
    order = ExpertOrder.build(_ids(9, 4, 1), 4)
    x = torch.randn(9, 3, requires_grad=True)
    back = reorder(reorder(x, order.order, order.places), order.places, order.order)
    seed = torch.randn(9, 3)
    back.backward(seed)
    assert torch.equal(back, x) and torch.equal(x.grad, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [32, 36])
def test_what_waits_for_the_device_is_known_beforehand(dtype, width):
    """On Hopper; what waits cannot be captured."""
    with FakeTensorMode():
        x, weight = (torch.empty(*shape, device="cuda", dtype=dtype) for shape in ((8, 16), (4, width, 16)))
        ends = torch.empty(4, device="cuda", dtype=torch.int32)
        try:
            grouped_mm(x, weight, ends)
            waits = False
        except DataDependentOutputException:
            waits = True
    assert waits_for_device(dtype, (16, width), (9, 0)) == waits
    assert waits_for_device(dtype, (16, width), (8, 0)), "torch goes expert by expert there"
