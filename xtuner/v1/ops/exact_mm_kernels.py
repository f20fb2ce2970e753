"""Kernels of exact matrix products on Hopper: x [M, K] times the transpose of a weight [N, K].

Each number of the result is one chain of tensor-core additions along K, 16 products at a time, whatever the tile that
it lies in. So tiles may be chosen by what is fast, and a row's result does not depend on the rows beside it.

With experts the weight is [E * N, K], one matrix below the other, and rows are sorted by expert. `plan` int32 [P, 3]
says of each tile of rows whose they are, the first, and the end of that expert's rows; -1: there is no such tile.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

REGISTERS = 168
"""A thread's share of the registers at launch. Then the groups that multiply take 240, the copying warp keeps 24."""


@triton.jit(do_not_specialize=["rows"])
def small_product(
    x_desc, w_desc, bias, out, plan, rows, columns, inner,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One tile a program. Tiles of the same columns are neighbours, so that a weight is read from memory once."""
    tiles = tl.cdiv(rows, ROWS)
    first_row = (tl.program_id(0) % tiles) * ROWS
    first_column = (tl.program_id(0) // tiles) * COLUMNS
    first_weight = first_column
    if EXPERTS:
        tile = plan + (tl.program_id(0) % tiles) * 3
        expert, first_row, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        if expert < 0:
            return
        first_weight += expert * columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, inner, BLOCK):
        x = x_desc.load([first_row, k])
        w = w_desc.load([first_weight, k])
        total = tl.dot(x, w.T, total)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["rows"])
def large_product(
    x_desc, w_desc, bias, out, plan, rows, columns, inner,
    BIAS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    EXPERTS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 rows, each by two groups of four warps that share the weight's tile, while one warp copies ahead."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, BLOCK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, COLUMNS, BLOCK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    rings = (x_ring, w_ring, full, free)
    gl.warp_specialize([
        (_multiply, (rings, bias, out, plan, rows, columns, inner, 0, BIAS, COLUMNS, BLOCK, STAGES, GROUP, EXPERTS)),
        (_multiply, (rings, bias, out, plan, rows, columns, inner, 1, BIAS, COLUMNS, BLOCK, STAGES, GROUP, EXPERTS)),
        (_copy, (rings, x_desc, w_desc, plan, rows, columns, inner, COLUMNS, BLOCK, STAGES, GROUP, EXPERTS)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _tile(index, plan, rows, columns, COLUMNS: gl.constexpr, GROUP: gl.constexpr, EXPERTS: gl.constexpr):
    """First row, end of the rows, first column, and first row of the weight; that is -1 if there is no such tile.

    GROUP tiles of rows go through all columns together, for the cache.
    """
    row_tiles, column_tiles = gl.cdiv(rows, 128), gl.cdiv(columns, COLUMNS)
    group = index // (GROUP * column_tiles)
    size = gl.minimum(row_tiles - group * GROUP, GROUP)
    inside = index % (GROUP * column_tiles)
    tile, column = group * GROUP + inside % size, (inside // size) * COLUMNS
    row, weight = tile * 128, column
    if EXPERTS:
        expert, row, rows = gl.load(plan + tile * 3), gl.load(plan + tile * 3 + 1), gl.load(plan + tile * 3 + 2)
        weight = gl.where(expert >= 0, expert * columns + column, -1)
    return row, rows, column, weight


@gluon.jit
def _copy(
    rings, x_desc, w_desc, plan, rows, columns, inner,
    COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    x_ring, w_ring, full, free = rings
    bytes: gl.constexpr = (128 + COLUMNS) * BLOCK * 2
    step = 0
    for index in range(gl.program_id(0), gl.cdiv(rows, 128) * gl.cdiv(columns, COLUMNS), gl.num_programs(0)):
        row, _, _, weight = _tile(index, plan, rows, columns, COLUMNS, GROUP, EXPERTS)
        if weight >= 0:
            for k in range(0, inner, BLOCK):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                barrier = full.index(stage)
                mbarrier.expect(barrier, bytes)
                tma.async_copy_global_to_shared(x_desc, [row, k], barrier, x_ring.index(2 * stage))
                tma.async_copy_global_to_shared(x_desc, [row + 64, k], barrier, x_ring.index(2 * stage + 1))
                tma.async_copy_global_to_shared(w_desc, [weight, k], barrier, w_ring.index(stage))
                step += 1


@gluon.jit
def _multiply(
    rings, bias, out, plan, rows, columns, inner,
    PART: gl.constexpr, BIAS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """One product is in flight while the next one's operands are waited for."""
    x_ring, w_ring, full, free = rings
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    # Numbers of four bytes fill whole sectors of memory as they lie in the registers.
    STORE: gl.constexpr = TOTAL if out.dtype.element_ty == gl.float32 else WIDE
    step = 0
    for index in range(gl.program_id(0), gl.cdiv(rows, 128) * gl.cdiv(columns, COLUMNS), gl.num_programs(0)):
        row, end, column, weight = _tile(index, plan, rows, columns, COLUMNS, GROUP, EXPERTS)
        if weight >= 0:
            total = gl.zeros([64, COLUMNS], gl.float32, TOTAL)
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            total = warpgroup_mma(
                x_ring.index(2 * stage + PART), w_ring.index(stage).permute((1, 0)), total, use_acc=False, is_async=True
            )
            total = warpgroup_mma_wait(1, [total])
            for _ in range(BLOCK, inner, BLOCK):
                before = stage
                step += 1
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                total = warpgroup_mma(
                    x_ring.index(2 * stage + PART), w_ring.index(stage).permute((1, 0)), total, is_async=True
                )
                total = warpgroup_mma_wait(1, [total])
                mbarrier.arrive(free.index(before), count=1)
            total = warpgroup_mma_wait(0, [total])
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
            if BIAS:
                at = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, TOTAL))
                total += gl.load(bias + at, mask=at < columns, other=0.0).to(gl.float32)[None, :]
            result = gl.convert_layout(total.to(out.dtype.element_ty), STORE)
            at = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORE))
            line = row + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
            inside = (line < end)[:, None] & (at < columns)[None, :]
            gl.store(out + line.to(gl.int64)[:, None] * columns + at[None, :], result, mask=inside)


@triton.jit
def plan_tiles(ends, plan, experts, size, ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Fill a plan [size, 3] from where each expert's rows end, int32 [experts]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    end = tl.load(ends + expert, mask=known, other=0)
    start = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0)
    count = tl.where(known, tl.cdiv(end - start, ROWS), 0)
    reached = tl.cumsum(count, 0)
    owner = tl.sum((reached[None, :] <= index[:, None]).to(tl.int32), 1)
    mine = expert[None, :] == owner[:, None]
    before = tl.sum(tl.where(mine, (reached - count)[None, :], 0), 1)
    first = tl.sum(tl.where(mine, start[None, :], 0), 1) + (index - before) * ROWS
    place = plan + index * 3
    tl.store(place, tl.where(owner < experts, owner, -1), mask=index < size)
    tl.store(place + 1, first, mask=index < size)
    tl.store(place + 2, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=index < size)
