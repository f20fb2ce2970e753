"""Packed attention by the Hopper kernels, against the loop over segments in float64."""

import pytest
import torch

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention, reference_attention
from xtuner.v1.ops.flash_attention import FlashAttention
from xtuner.v1.ops.hopper_attention import HopperAttention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else None
LAYOUTS = {
    "plain": SegmentLayout([37, 1, 300, 64, 129], [-1] * 5),
    "shared": SegmentLayout([90, 40, 200, 1, 33, 20, 50, 260, 140, 128, 1], [-1, 0, 0, 0, -1, 4, -1, -1, 7, 7, -1]),
    "one row": SegmentLayout([1], [-1]),
}


def _inputs(layout: SegmentLayout, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values (a view of a wider tensor, as the model's are) and the weights of the result."""
    generator = torch.Generator("cuda").manual_seed(1)
    rows, (num_q, num_kv) = sum(layout.lengths), heads
    wide = torch.randn(rows, 2 * num_q + 2 * num_kv, dim, generator=generator, device="cuda").to(dtype)
    q, k, v, weights = wide.split((num_q, num_kv, num_kv, num_q), 1)
    return [q.contiguous(), k.contiguous(), v, weights.contiguous()]


def _gradients(attend, inputs: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (64, torch.bfloat16), (128, torch.float16)])
def test_values_and_gradients_equal_the_loop(name, heads, dim, dtype) -> None:
    layout, scale = LAYOUTS[name], dim**-0.5
    *inputs, weights = _inputs(layout, heads, dim, dtype)
    hopper = HopperAttention(layout, DEVICE)
    assert hopper.takes(inputs[0], inputs[2], scale, None, None)
    got = _gradients(lambda q, k, v: hopper.attend(q, k, v, scale), inputs, weights)
    exact = [x.double() for x in inputs]
    want = _gradients(lambda q, k, v: reference_attention(layout, q, k, v, scale), exact, weights.double())
    tolerance = 4e-3 if dtype == torch.bfloat16 else 6e-4
    for ours, exact_value in zip(got, want, strict=True):
        if exact_value.norm() == 0:  # one row: the softmax of one score has no gradient
            assert ours.abs().max() < 1e-2
        else:
            assert _error(ours, exact_value) < tolerance


def test_many_tiles_a_program_and_the_same_bits_each_time() -> None:
    lengths = [700 + 37 * i for i in range(24)]
    prefix = [-1] * 12 + [-1] + [12] * 5 + [-1] * 6
    layout, scale = SegmentLayout(lengths, prefix), 128**-0.5
    *inputs, weights = _inputs(layout, (16, 8), 128, torch.bfloat16)
    hopper, flash = HopperAttention(layout, DEVICE), FlashAttention(layout, DEVICE)
    got = _gradients(lambda q, k, v: hopper.attend(q, k, v, scale), inputs, weights)
    again = _gradients(lambda q, k, v: hopper.attend(q, k, v, scale), inputs, weights)
    want = _gradients(lambda q, k, v: flash.attend(q, k, v, scale), inputs, weights)
    for ours, second, theirs in zip(got, again, want, strict=True):
        assert torch.equal(ours, second)
        assert _error(ours, theirs.double()) < 6e-3


@pytest.mark.parametrize("name", ["plain", "shared"])
def test_infinities_of_one_sample_stay_there(name: str) -> None:
    layout, scale = LAYOUTS[name], 128**-0.5
    q, k, v, _ = _inputs(layout, (4, 2), 128, torch.bfloat16)
    hopper = HopperAttention(layout, DEVICE)
    clean = hopper.attend(q, k, v, scale)
    start = sum(layout.lengths[:2])
    rows = slice(start, start + layout.lengths[2])
    spoilt = [x.clone() for x in (q, k, v)]
    for x in spoilt:
        x[rows] = float("inf")
    out = hopper.attend(*spoilt, scale)
    out[rows] = clean[rows]
    assert torch.equal(out, clean)


def test_who_takes_what() -> None:
    layout, scale = LAYOUTS["shared"], 0.1
    q, k, v, _ = _inputs(layout, (4, 2), 128, torch.bfloat16)
    hopper = HopperAttention(layout, DEVICE)
    assert hopper.takes(q, v, scale, 10_000, None)
    assert not hopper.takes(q, v, scale, 100, None)
    assert not hopper.takes(q, v, scale, None, q[0, :, 0])
    assert not hopper.takes(q[..., :96], v[..., :96], scale, None, None)
    scattered = SegmentLayout([30, 129, 20, 60], [-1, -1, 1, 0])
    assert not HopperAttention(scattered, DEVICE).takes(q, v, scale, None, None)
    ours = PackedAttention(layout, DEVICE).attend(0, q, k, v, scale)
    assert torch.equal(ours, hopper.attend(q, k, v, scale))
