"""Many tensors into many others, types cast on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

_KNOWN = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """target.copy_(source) for all pairs, of equal shapes; on one CUDA device in a single pass over all of them."""
    if not targets:
        return
    device = targets[0].device
    if device.type == "cuda" and all(
        t.device == device and t.dtype in _KNOWN and t.is_contiguous() for side in (targets, sources) for t in side
    ):
        from .copy_all_kernel import copy_all as kernel

        kernel(targets, sources)
    else:
        torch._foreach_copy_(list(targets), list(sources))
