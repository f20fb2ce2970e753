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


def _qkv(layout: SegmentLayout, num_q: int, num_kv: int, dim: int = 8, v_dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = sum(layout.lengths)
    shapes = ((rows, num_q, dim), (rows, num_kv, dim), (rows, num_kv, v_dim))
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


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("window", "with_sinks"), [(3, False), (3, True), (25, True), (1, False), (None, True)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_windows_sinks_and_sizes_of_values(name: str, window: int | None, with_sinks: bool, heads) -> None:
    layout = LAYOUTS[name]
    inputs = _qkv(layout, *heads, v_dim=5)
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    sinks_or_none = sinks if with_sinks else None
    leaves = [*inputs, sinks] if with_sinks else inputs
    weights = torch.randn(*inputs[0].shape[:2], 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = reference_attention(layout, *inputs, 0.3, window, sinks_or_none)
    expected_grads = torch.autograd.grad((expected * weights).sum(), leaves)
    context = PackedAttention(layout, "cpu")
    context.attend(0, *inputs, 0.3)  # another layer without a window leaves other masks
    out = context.attend(1, *inputs, 0.3, window, sinks_or_none)
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-10)


def test_a_window_crosses_the_border_of_a_prompt() -> None:
    """The loop over segments against one whole sample, with the window's rows written down by hand."""
    q, k, v = _qkv(SegmentLayout([9], [-1]), 1, 1)
    whole = reference_attention(SegmentLayout([9], [-1]), q, k, v, 0.3, 4)
    shared = reference_attention(SegmentLayout([6, 3], [-1, 0]), q, k, v, 0.3, 4)
    torch.testing.assert_close(whole, shared, rtol=0, atol=1e-12)
    by_hand = ((q[7, 0] @ k[4:8, 0].T) * 0.3).softmax(-1) @ v[4:8, 0]
    torch.testing.assert_close(shared[7, 0], by_hand, rtol=0, atol=1e-12)


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    q, k, v = _qkv(SegmentLayout([5], [-1]), 2, 2)
    layout = SegmentLayout([5], [-1])
    plain = PackedAttention(layout, "cpu").attend(0, q, k, v, 0.3)
    sinks = torch.tensor([-1e9, 0.7], dtype=torch.float64)
    out = PackedAttention(layout, "cpu").attend(0, q, k, v, 0.3, sinks=sinks)
    torch.testing.assert_close(out[:, 0], plain[:, 0], rtol=0, atol=1e-12)
    own_score = (q[0, 1] @ k[0, 1]) * 0.3
    torch.testing.assert_close(out[0, 1], v[0, 1] * (own_score - 0.7).sigmoid(), rtol=0, atol=1e-12)


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
