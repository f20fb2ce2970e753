"""Attention over the rows of a pack."""

from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout

from .cpu import takes_cpu_kernels
from .flash_attention import FlashAttention
from .hopper_attention import HopperAttention
from .padded_attention import PaddedAttention

if TYPE_CHECKING:
    from .cpu_attention import CpuAttention


class AttentionContext(Protocol):
    """Who may see whom, and where keys and values live. The model hands it each layer's rows."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], rotated, flat rows; Hq a multiple of Hkv.

        window: a row sees itself and the window - 1 rows of its sample before it. sinks [Hq]: the score of one
        more key for every row, whose value is 0 (Xiao et al. 2024, arXiv 2309.17453). Returns [T, Hq, Dv].
        """
        ...


def reference_attention(
    layout: SegmentLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The plain loop over segments that the fast paths are tested against; same shapes."""
    starts = [0, *accumulate(layout.lengths)]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    outputs = []
    for length, prefix, start in zip(layout.lengths, layout.prefix, starts, strict=False):
        own = torch.arange(start, start + length, device=q.device)
        seen = own
        if prefix >= 0:
            before = torch.arange(starts[prefix], starts[prefix] + layout.lengths[prefix], device=q.device)
            seen = torch.cat((before, own))
        place = torch.arange(len(seen), device=q.device)
        distance = place[-length:, None] - place
        hidden = (distance < 0) | (distance >= (window or len(seen)))
        scores = torch.einsum("qhd,khd->hqk", q[own], k[seen]) * scale
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), -1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(seen)], v[seen]))
    return torch.cat(outputs)


class PackedAttention:
    """Attention of a whole pack at once, for training and prefill.

    Index tensors are made once a pack and serve all its layers. Half precision on CUDA takes the flash kernels,
    on a CPU those of Numba, everything else padded rectangles.
    """

    def __init__(self, layout: SegmentLayout, device: torch.device | str) -> None:
        self._layout, self._device = layout, torch.device(device)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext`."""
        if self._device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
            if self._hopper.takes(q, v, scale, window, sinks):
                return self._hopper.attend(q, k, v, scale)
            return self._flash.attend(q, k, v, scale, window, sinks)
        if window is None and sinks is None and takes_cpu_kernels(q, k, v, widened=True):
            return self._cpu.attend(q, k, v, scale)
        return self._padded.attend(q, k, v, scale, window, sinks)

    @cached_property
    def _hopper(self) -> HopperAttention:
        return HopperAttention(self._layout, self._device)

    @cached_property
    def _flash(self) -> FlashAttention:
        return FlashAttention(self._layout, self._device)

    @cached_property
    def _cpu(self) -> "CpuAttention":
        from .cpu_attention import CpuAttention

        return CpuAttention(self._layout)

    @cached_property
    def _padded(self) -> PaddedAttention:
        return PaddedAttention(self._layout, self._device)
