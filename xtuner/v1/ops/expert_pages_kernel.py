"""`store_experts` by Triton."""

import triton
import triton.language as tl
from torch import Tensor


def store_experts(chosen: Tensor, pages: Tensor, places: Tensor) -> None:
    """See `expert_pages`."""
    rows, columns = chosen.shape
    if rows:
        _store[(rows,)](
            chosen, pages, places, chosen.stride(0), pages.stride(0),
            PAGE=pages.shape[1], C=columns, BLOCK=triton.next_power_of_2(columns), num_warps=1,
        )  # fmt: skip


@triton.jit
def _store(chosen, pages, places, row_stride, page_stride, PAGE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place >= 0:
        column = tl.arange(0, BLOCK)
        value = tl.load(chosen + row * row_stride + column, mask=column < C, other=0)
        target = pages + place // PAGE * page_stride + place % PAGE * C + column
        tl.store(target, value.to(tl.int16), mask=column < C)
