"""Many tensors into many others, types cast on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """target.copy_(source) for all pairs, of equal shapes; on one CUDA device in a single pass over all of them."""
    if targets and all(_has_kernel(t, s) for t, s in zip(targets, sources, strict=True)):
        from .copy_all_kernel import copy_all as kernel

        kernel(targets, sources)
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))


def _has_kernel(target: Tensor, source: Tensor) -> bool:
    known = (torch.bfloat16, torch.float16, torch.float32)
    return (
        target.is_cuda and target.device == source.device and target.dtype in known and source.dtype in known
        and target.shape == source.shape and target.is_contiguous() and source.is_contiguous()
    )  # fmt: skip
