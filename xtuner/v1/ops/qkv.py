"""From the fused projection to rotated queries and keys, and values."""

import torch
from torch import Tensor

from .cpu import takes_cpu_kernels
from .norm import rms_norm
from .paged_attention import NewRows, store_rows
from .recompute import recomputable
from .rotary import RotaryTable, apply_rotary


@recomputable
def split_qkv(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut into heads, RMS-norm the query and key heads if they have weights [D], and rotate them.

    qkv [T, (num_q + 2 num_kv) * D], heads in the order queries, keys, values. Returns q [T, num_q, D], k and
    v [T, num_kv, D].
    """
    head_dim = qkv.shape[1] // (num_q + 2 * num_kv)
    if qkv.is_cuda and table.cos.shape[-1] * 2 == head_dim and not torch.compiler.is_compiling():
        from . import qkv_kernels

        return qkv_kernels.split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
    if takes_cpu_kernels(qkv, q_weight, k_weight, widened=True):
        from . import cpu_qkv

        if cpu_qkv.fits(table, head_dim):
            return cpu_qkv.split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
    return reference_split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)


def split_qkv_into(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rows: NewRows,
) -> Tensor:
    """`split_qkv` for inference, whose keys and values go to pages as they are made. Returns q [T, num_q, D]."""
    if qkv.is_cuda and table.cos.shape[-1] * 2 * (num_q + 2 * num_kv) == qkv.shape[1]:
        from . import qkv_kernels

        return qkv_kernels.split_qkv_into(qkv, num_q, num_kv, table, q_weight, k_weight, eps, rows)
    q, k, v = split_qkv(qkv, num_q, num_kv, table, q_weight, k_weight, eps)
    store_rows(k, v, rows)
    return q


def reference_split_qkv(
    qkv: Tensor,
    num_q: int,
    num_kv: int,
    table: RotaryTable,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of recorded operations."""
    heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, -1)
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return apply_rotary(q, table), apply_rotary(k, table), v
