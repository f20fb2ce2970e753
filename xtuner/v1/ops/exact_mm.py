"""Exact matrix products on CUDA; see `exact`. Hopper, half precision."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_AT_ONCE = 264
"""Small tiles that run at one time: two on each multiprocessor."""
_ENOUGH = 90
"""Large tiles from which on they pay."""


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `exact.exact_linear`."""
    return _ExactLinear.apply(x, weight, bias)


def exact_head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """See `exact.exact_head_logits`."""
    return product(hidden.detach(), weight.detach(), None, torch.float32)


def exact_linear32(x: Tensor, weight: Tensor) -> Tensor:
    """See `exact.exact_linear32`."""
    return _ExactLinear32.apply(x, weight)


def exact_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """See `exact.exact_grouped_mm`."""
    return _ExactGroupedMM.apply(x, weight, ends)


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.flatten(0, -2)
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return product(flat, weight, bias, x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat, flat_grad = x.flatten(0, -2), grad.flatten(0, -2)
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = (flat_grad @ weight).view_as(x) if need_x else None
        grad_weight = flat_grad.t() @ flat if need_weight else None
        grad_bias = flat_grad.sum(0) if ctx.has_bias and need_bias else None
        return grad_x, grad_weight, grad_bias


class _ExactLinear32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, None, torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        grad_x = (grad @ weight.float()).to(x.dtype) if need_x else None
        grad_weight = (grad.t() @ x.float()).to(weight.dtype) if need_weight else None
        return grad_x, grad_weight


class _ExactGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped_product(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        if not x.shape[0]:
            return torch.zeros_like(x), torch.zeros_like(weight), None
        grad_x = F.grouped_mm(grad, weight, offs=ends) if need_x else None
        grad_weight = F.grouped_mm(grad.t(), x, offs=ends) if need_weight else None
        return grad_x, grad_weight, None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [M, K] sorted by expert, weight [E, N, K], ends int32 [E] -> [M, N] in x's type."""
    from .exact_mm_kernels import plan_tiles

    (rows, inner), (experts, columns, _) = x.shape, weight.shape
    stacked = weight.reshape(experts * columns, inner)
    _check(x, stacked)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    x, stacked, mean = _aligned(x), _aligned(stacked), rows / experts
    tile_rows = 16 if mean <= 16 else 32 if mean <= 48 else 64 if mean <= 256 else 128
    plan = torch.empty(-(-rows // tile_rows) + experts, 3, dtype=torch.int32, device=x.device)
    width = 1 << (experts - 1).bit_length()
    plan_tiles[(-(-len(plan) // 64),)](ends, plan, experts, len(plan), ROWS=tile_rows, EXPERTS=width, BLOCK=64)
    if tile_rows == 128:
        _large(x, stacked, None, out, columns, plan)
    else:
        _small(x, stacked, None, out, columns, tile_rows, 128 if columns > 512 else 64, 64, 4, plan)
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] in `dtype`, summed in float32."""
    rows, columns = x.shape[0], weight.shape[0]
    _check(x, weight)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if rows:
        x, weight = _aligned(x), _aligned(weight)
        if is_large(rows, columns):
            _large(x, weight, bias, out, columns)
        else:
            _small(x, weight, bias, out, columns, *small_tiles(rows, columns))
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"exact mode on CUDA multiplies bfloat16 or float16, not {x.dtype} and {weight.dtype}: set "
            "fsdp_cfg.param_dtype and rollout_config.dtype to torch.bfloat16."
        )
    if x.shape[1] % 8:
        raise ValueError(f"exact mode on CUDA needs widths that are multiples of 8, not {x.shape[1]}.")


def _aligned(x: Tensor) -> Tensor:
    """x with rows that the copy engine can address."""
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _small(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, columns: int, tile_rows: int, tile_columns: int,
    block: int, stages: int, plan: Tensor | None = None,
) -> None:  # fmt: skip
    from triton.tools.tensor_descriptor import TensorDescriptor

    from .exact_mm_kernels import small_product

    rows = x.shape[0] if plan is None else len(plan) * tile_rows
    small_product[(-(-rows // tile_rows) * -(-columns // tile_columns),)](
        TensorDescriptor.from_tensor(x, [tile_rows, block]),
        TensorDescriptor.from_tensor(weight, [tile_columns, block]), bias, out, plan, rows, columns, x.shape[1],
        BIAS=bias is not None, ROWS=tile_rows, COLUMNS=tile_columns, BLOCK=block, EXPERTS=plan is not None,
        num_warps=4, num_stages=stages,
    )  # fmt: skip


def is_large(rows: int, columns: int) -> bool:
    """Whether tiles of 128 rows and 256 columns keep most of the device busy."""
    return rows > 128 and -(-rows // 128) * -(-columns // 256) >= _ENOUGH


def small_tiles(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, length of a block along the sum, blocks on their way at a time.

    The narrowest tiles of which the device holds all at once; what was fastest on an H200 for 1 to 512 rows.
    """
    tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = -(-rows // tile_rows)
    if tiles * -(-columns // 32) <= _AT_ONCE:
        return tile_rows, 32, 128, 4
    if (count := tiles * -(-columns // 64)) <= _AT_ONCE:
        return (tile_rows, 64, 128, 4) if count <= _AT_ONCE // 2 else (tile_rows, 64, 64, 6)
    return tile_rows, 128, 64, 4


def _large(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, columns: int, plan: Tensor | None = None
) -> None:
    from .exact_mm_kernels import REGISTERS, large_product

    rows = x.shape[0] if plan is None else len(plan) * 128
    tile_columns, block, stages = 256, 64, 4
    tiles = -(-rows // 128) * -(-columns // tile_columns)
    programs = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
    large_product[(programs,)](
        _tiles_of(x, 64, block), _tiles_of(weight, tile_columns, block), bias, out, plan, rows, columns,
        x.shape[1],
        BIAS=bias is not None, COLUMNS=tile_columns, BLOCK=block, STAGES=stages, GROUP=8, EXPERTS=plan is not None,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


def _tiles_of(x: Tensor, rows: int, columns: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)
