"""The last layer works on the trained rows alone, on a GPU too."""

import pytest
import torch

from tests.model.helpers import random_ids, tiny_model
from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _gradients(rows: list[int], drops: bool, dtype: torch.dtype, compiled: bool) -> list[torch.Tensor]:
    model = tiny_model().to("cuda", dtype)
    model.drops_rows = drops
    if compiled:
        model.compile_layers()
    ids, target_rows = (torch.tensor(values, device="cuda") for values in (random_ids(0, 40), rows))
    labels = torch.arange(5, 5 + len(rows), device="cuda")
    context = PackedAttention(SegmentLayout([10, 30], [-1, 0]), "cuda")
    logprobs, _ = model(
        ids, torch.arange(40, device="cuda"), context, target_rows.long(), labels,
        torch.ones(len(rows), device="cuda"), 8,
    )  # fmt: skip
    logprobs.sum().backward()
    return [logprobs.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_log_probs_and_gradients_are_those_of_all_rows(dtype, tolerance, compiled):
    rows = [9, 9, 12, 20, 38]
    for ours, theirs in zip(
        _gradients(rows, True, dtype, compiled), _gradients(rows, False, dtype, compiled), strict=True
    ):
        assert float((ours.float() - theirs.float()).norm()) <= tolerance * float(theirs.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_trained_rows_give_zero_gradients(dtype):
    """A pack of padding alone: kernels of no rows, and a gradient for every parameter all the same."""
    logprobs, *grads = _gradients([], True, dtype, compiled=False)
    assert logprobs.shape == (0,) and all(g is not None and not g.any() for g in grads)
