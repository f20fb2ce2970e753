"""The layer with adapters against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from xtuner.v1.ops.lora_linear import lora_linear, merge_lora

T, IN, OUT, RANK, SCALING = 7, 6, 10, 2, 0.5
BOUNDS = [0, 4, 6, 9]
"""Two adapters: outputs 0 to 3 and 6 to 8."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g).to(dtype) for shape in ((T, IN), (OUT, IN), (OUT,)))
    lora_a, lora_b = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((2 * RANK, IN), (7, RANK)))
    return x.requires_grad_(), weight, bias, lora_a, lora_b


def exact(x, weight, bias, lora_a, lora_b):
    delta = torch.zeros(OUT, IN, dtype=torch.float64)
    delta[0:4] = lora_b[:4] @ lora_a[:RANK]
    delta[6:9] = lora_b[4:] @ lora_a[RANK:]
    return F.linear(x, weight + SCALING * delta, bias)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-2)])
def test_values_and_gradients(dtype, tolerance, with_bias):
    x, weight, bias, lora_a, lora_b = inputs(dtype)
    out = lora_linear(x, weight, bias if with_bias else None, lora_a, lora_b, SCALING, BOUNDS)
    grad = torch.randn(T, OUT, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, (x, lora_a, lora_b), grad)
    x64, a64, b64 = (t.detach().double().requires_grad_() for t in (x, lora_a, lora_b))
    expected = exact(x64, weight.double(), bias.double() if with_bias else None, a64, b64)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(got, torch.autograd.grad(expected, (x64, a64, b64), grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=4 * tolerance)
    assert out.dtype == got[0].dtype == dtype and got[1].dtype == got[2].dtype == torch.float32


def test_the_layer_computes_with_the_weight_that_is_exported():
    """Adapters applied beside the product would keep what rounding takes from the engine's weights."""
    x, weight, bias, lora_a, lora_b = inputs(torch.bfloat16)
    merged = merge_lora(weight, lora_a, lora_b, SCALING, BOUNDS, torch.bfloat16)
    assert torch.equal(lora_linear(x, weight, bias, lora_a, lora_b, SCALING, BOUNDS), F.linear(x, merged, bias))
    once = merge_lora(weight.float(), lora_a, lora_b, SCALING, BOUNDS, torch.float32).to(torch.bfloat16)
    assert torch.equal(merged, once), "summed in float32, rounded once"


def test_rows_of_no_adapter_stay_and_the_inputs_too():
    _, weight, _, lora_a, lora_b = inputs()
    before = weight.clone()
    merged = merge_lora(weight, lora_a, lora_b, SCALING, BOUNDS, torch.float32)
    assert torch.equal(weight, before)
    free = [4, 5, 9]
    assert torch.equal(merged[free], weight[free])
    adapted = [row for row in range(OUT) if row not in free]
    assert (merged[adapted] != weight[adapted]).any(1).all()


def test_an_input_without_gradient_costs_none():
    x, weight, bias, lora_a, lora_b = inputs()
    without, with_x = (
        torch.autograd.grad(lora_linear(v, weight, bias, lora_a, lora_b, SCALING, BOUNDS).sum(), (lora_a, lora_b))
        for v in (x.detach(), x)
    )
    assert all(torch.equal(one, two) for one, two in zip(without, with_x, strict=True))


def test_a_compiler_sees_an_honest_operator():
    torch.library.opcheck(lora_linear, (*inputs()[:2], None, *inputs()[3:], SCALING, BOUNDS))
