"""Packed attention against the plain loop over segments."""

import pytest
import torch

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention, reference_attention

LAYOUTS = {
    "one": SegmentLayout([7], [-1]),
    "plain": SegmentLayout([5, 1, 9, 40, 3], [-1] * 5),
    "shared": SegmentLayout([6, 4, 9, 1, 3, 2, 5], [-1, 0, 0, 0, -1, 4, -1]),
    # The user of the first prefix comes after another group, and lengths are far apart.
    "mixed": SegmentLayout([30, 12, 2, 60, 5, 70], [-1, -1, 1, 0, 1, 0]),
    "long": SegmentLayout([150, 20, 90, 200], [-1, 0, 0, -1]),
}


def _qkv(layout: SegmentLayout, num_q: int, num_kv: int, dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = sum(layout.lengths)
    shapes = ((rows, num_q, dim), (rows, num_kv, dim), (rows, num_kv, dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_values_and_gradients_equal_the_loop(name: str, heads: tuple[int, int]) -> None:
    layout = LAYOUTS[name]
    inputs = _qkv(layout, *heads)
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = reference_attention(layout, *inputs, scale=0.3)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    context = PackedAttention(layout, "cpu")
    for layer in range(2):  # indices and masks are kept from the first layer on
        out = context.attend(layer, *inputs, scale=0.3)
        grads = torch.autograd.grad((out * weights).sum(), inputs)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "mixed"])
def test_a_nan_in_one_sample_stays_there(name: str) -> None:
    layout = LAYOUTS[name]
    inputs = _qkv(layout, 4, 2)
    clean = PackedAttention(layout, "cpu").attend(0, *inputs, scale=0.3)
    last = layout.lengths[-1]
    with torch.no_grad():
        for tensor in inputs:
            tensor[-last:] = float("nan")
    out = PackedAttention(layout, "cpu").attend(0, *inputs, scale=0.3)
    assert torch.equal(out[:-last], clean[:-last])
    assert out[-last:].isnan().all()
    grads = torch.autograd.grad(out[:-last].sum(), inputs[0])[0]
    assert grads[:-last].isfinite().all()


def test_strided_inputs() -> None:
    layout = LAYOUTS["shared"]
    fused = torch.randn(sum(layout.lengths), 8, 8, generator=torch.Generator().manual_seed(3))
    parts = fused.split((4, 2, 2), dim=1)
    out = PackedAttention(layout, "cpu").attend(0, *parts, scale=0.5)
    torch.testing.assert_close(out, reference_attention(layout, *parts, scale=0.5), rtol=0, atol=1e-6)
