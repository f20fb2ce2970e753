"""The flash path. Runs where a CUDA device is."""

import pytest
import torch

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention, reference_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYOUTS = {
    "plain": SegmentLayout([37, 1, 300, 64], [-1] * 4),
    "shared": SegmentLayout([90, 40, 200, 1, 33, 20, 50], [-1, 0, 0, 0, -1, 4, -1]),
    "scattered": SegmentLayout([30, 129, 20, 60, 50, 170], [-1, -1, 1, 0, 1, 0]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 64), ((8, 2), 128), ((4, 2), 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_equal_the_loop(name, heads, dim, dtype) -> None:
    layout = LAYOUTS[name]
    generator = torch.Generator("cuda").manual_seed(1)
    rows = sum(layout.lengths)
    shapes = ((rows, heads[0], dim), (rows, heads[1], dim), (rows, heads[1], dim))
    inputs = [torch.randn(s, generator=generator, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    weights = torch.randn(shapes[0], generator=generator, device="cuda", dtype=dtype)
    expected = reference_attention(layout, *exact, scale=dim**-0.5)
    expected_grads = torch.autograd.grad((expected * weights).sum(), exact)
    out = PackedAttention(layout, "cuda").attend(0, *inputs, scale=dim**-0.5)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, exact_value in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (ours.double() - exact_value).norm() <= tolerance * exact_value.norm()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("window", "with_sinks"), [(None, True), (16, True), (16, False), (128, True), (1000, True)])
@pytest.mark.parametrize(("heads", "dim", "v_dim"), [((8, 2), 64, 64), ((4, 4), 48, 32), ((4, 2), 18, 12)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_windows_sinks_and_sizes_of_values(name, window, with_sinks, heads, dim, v_dim, dtype) -> None:
    layout = LAYOUTS[name]
    generator = torch.Generator("cuda").manual_seed(1)
    rows = sum(layout.lengths)
    shapes = ((rows, heads[0], dim), (rows, heads[1], dim), (rows, heads[1], v_dim), (heads[0],))
    inputs = [torch.randn(s, generator=generator, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if not with_sinks:
        inputs, exact = inputs[:3], exact[:3]
    weights = torch.randn(rows, heads[0], v_dim, generator=generator, device="cuda", dtype=dtype)
    scale = dim**-0.5
    expected = reference_attention(layout, *exact[:3], scale, window, *exact[3:])
    expected_grads = torch.autograd.grad((expected * weights).sum(), exact)
    out = PackedAttention(layout, "cuda").attend(0, *inputs[:3], scale, window, *inputs[3:])
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, exact_value in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (ours.double() - exact_value).norm() <= tolerance * exact_value.norm()
