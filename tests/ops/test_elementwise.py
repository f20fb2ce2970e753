"""The CPU paths of norm, SwiGLU and the query/key/value split against recorded operations in float64."""

import pytest
import torch

from xtuner.v1.ops.norm import reference_rms_norm, rms_norm
from xtuner.v1.ops.qkv import reference_split_qkv, split_qkv
from xtuner.v1.ops.rotary import apply_rotary, rotary_table
from xtuner.v1.ops.swiglu import reference_swiglu, swiglu

G = torch.Generator().manual_seed(0)


def _compare(fast, reference, inputs: list[torch.Tensor]) -> None:
    """Values and gradients of `fast` in float32 against `reference` in float64."""
    inputs = [x.requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    outputs, exact = fast(*inputs), reference(*exact_inputs)
    outputs, exact = (o if isinstance(o, tuple) else (o,) for o in (outputs, exact))
    weights = [torch.randn(o.shape, generator=G) for o in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights)
    exact_grads = torch.autograd.grad(exact, exact_inputs, [w.double() for w in weights])
    for ours, theirs in zip((*outputs, *grads), (*exact, *exact_grads), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 16), (3, 4, 8), (1, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(shape, generator=G), torch.randn(shape[-1], generator=G)]
    _compare(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: reference_rms_norm(x, w, 1e-6), inputs)


def test_rms_norm_of_zeros_is_zero_with_finite_gradient() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(x, torch.ones(8), 1e-6)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("rows", [1, 255, 600])
def test_swiglu(rows: int) -> None:
    _compare(swiglu, reference_swiglu, [3 * torch.randn(rows, 24, generator=G)])


@pytest.mark.parametrize("rows", [1, 2100])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_split_qkv(rows: int, qk_norm: bool) -> None:
    table = rotary_table(torch.arange(rows) % 50, torch.tensor([1.0, 0.3, 0.1, 0.01]))
    inputs = [torch.randn(rows, 8 * 8, generator=G)]
    if qk_norm:
        inputs += [torch.randn(8, generator=G), torch.randn(8, generator=G)]

    def reference(*args):
        # Norm weights' gradients sum over all rows: the comparison needs the reference's rotation in float64.
        qkv, *weights = args
        heads = qkv.view(rows, 8, 8)
        q, k, v = heads.split((4, 2, 2), dim=1)
        if weights:
            q, k = (reference_rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
        cos, sin = (torch.cat((t, t), -1).double() for t in (table.cos, table.sin))
        halves = [torch.cat((-x[..., 4:], x[..., :4]), -1) for x in (q, k)]
        return q * cos + halves[0] * sin, k * cos + halves[1] * sin, v

    scaled = [inputs[0], *inputs[1:]]
    _compare(lambda *a: split_qkv(a[0], 4, 2, table, *a[1:]), reference, scaled)
    eager = reference_split_qkv(inputs[0], 4, 2, table, *inputs[1:])
    for ours, theirs in zip(split_qkv(inputs[0], 4, 2, table, *inputs[1:]), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 8, generator=G)
    frequencies = torch.tensor([1.0, 0.5, 0.2, 0.05])
    scores = []
    for query, key in ((3, 1), (103, 101)):
        q_rotated = apply_rotary(q, rotary_table(torch.tensor([query]), frequencies))
        k_rotated = apply_rotary(k, rotary_table(torch.tensor([key]), frequencies))
        scores.append((q_rotated * k_rotated).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)


def test_rotary_angles_are_float32_in_a_bf16_model() -> None:
    """At position 1000 a bfloat16 angle is off by up to 4 radians."""
    x = torch.randn(1, 1, 8, generator=G)
    table = rotary_table(torch.tensor([1001]), torch.tensor([1.0, 0.5, 0.2, 0.05]))
    torch.testing.assert_close(
        apply_rotary(x.bfloat16(), table).float(), apply_rotary(x.bfloat16().float(), table), rtol=1e-2, atol=1e-2
    )
