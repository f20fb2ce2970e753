"""One matmul an expert over rows that are sorted by expert."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[rows of e] @ weight[e].T for every expert e; each row is used exactly once.

    Args:
        x: [M, K], the rows of expert 0 first, then those of expert 1, and so on.
        weight: [E, N, K].
        ends: int32 [E], where each expert's rows end; ends[-1] = M. An expert may have none.

    Returns:
        [M, N] in x's type; differentiable in `x` and `weight`.
    """
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return reference_grouped_mm(x, weight, ends)


def reference_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same, expert by expert. Waits for the device: the sizes are needed on the host."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.split(sizes), weight.unbind(0), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in parts])


def waits_for_device(dtype: torch.dtype, widths: tuple[int, int], capability: tuple[int, int]) -> bool:
    """Whether `grouped_mm` by matrices of these widths needs the sizes on the host, which a captured graph cannot have.

    capability: of a CUDA device, as `torch.cuda.get_device_capability` says it. PyTorch has a kernel of its own for
    Hopper and Blackwell of data centres; elsewhere `F.grouped_mm` goes expert by expert too.
    """
    return not _fits(dtype, widths) or capability[0] not in (9, 10)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.shape[0] > 0 and _fits(x.dtype, (weight.shape[1], weight.shape[2]))


def _fits(dtype: torch.dtype, widths: tuple[int, int]) -> bool:
    # Rows begin at multiples of 16 bytes.
    return dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and all(width % 8 == 0 for width in widths)
