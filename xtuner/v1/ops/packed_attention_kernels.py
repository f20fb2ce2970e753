"""Packed causal attention on Hopper: Gluon kernels of tensor-core products that wait for nobody.

In each program one warp copies tiles into shared memory ahead of time, and two groups of four warps, each with half
a tile's rows, multiply what has come (Shah et al. 2024, arXiv 2407.08608). A program lives as long as the kernel and
goes through its own list of tiles, so the copies for the next tile run while the last one is finished. Nothing is
added up across programs: results are the same in every run.

A query tile is [first row, end of its segment, start of its segment, start and end of the prefix, query head]; its
keys are visited from the diagonal back to the segment's start, then the prefix. A key tile is [first row, end of its
segment, end of the rows that see it, key head].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

REGISTERS = 168
"""A thread's share of the registers at launch. Then the groups that multiply take 240, the copying warp keeps 24."""

_ANY_SIZE = ("slots", "rows", "num_q", "num_kv", "group")
_QUERY_FIELDS, _KEY_FIELDS = gl.constexpr(6), gl.constexpr(4)


@gluon.jit(do_not_specialize=_ANY_SIZE)
def attention_forward(
    q_desc, k_desc, v_desc, out, lse, tiles, counts, slots, rows, num_q, group, scale,
    D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFIX: gl.constexpr,
):  # fmt: skip
    """out [T, num_q, D]; lse float32 [num_q, T], in base 2. `scale` includes log2(e). BLOCK keys at a time: a tile."""
    tiles += gl.program_id(0) * slots * _QUERY_FIELDS
    count = gl.load(counts + gl.program_id(0))
    q_tile = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK // 2, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], v_desc.layout)
    buffers = (q_tile, k_ring, v_ring)
    barriers = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
                _barriers(STAGES, 2))  # fmt: skip
    shared = (buffers, barriers, tiles, count, out, lse, rows, num_q, scale)
    gl.warp_specialize([
        (_forward_attend, (shared, 0, D, BLOCK, STAGES, PREFIX)),
        (_forward_attend, (shared, 1, D, BLOCK, STAGES, PREFIX)),
        (_forward_copy, (buffers, barriers, tiles, count, q_desc, k_desc, v_desc, group, D, BLOCK, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=_ANY_SIZE)
def attention_backward_queries(
    q_desc, grad_desc, out_desc, k_desc, v_desc, lse, delta, grad_q, tiles, counts, slots, rows, num_q, group,
    scale, scale_out,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFIX: gl.constexpr,
):  # fmt: skip
    """grad_q [T, num_q, D]; delta float32 [num_q, T]: output times its gradient, summed over the head's numbers."""
    tiles += gl.program_id(0) * slots * _QUERY_FIELDS
    count = gl.load(counts + gl.program_id(0))
    q_tile = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, D], q_desc.layout)
    grad_tile = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, D], grad_desc.layout)
    out_tile = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, D], out_desc.layout)
    k_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], v_desc.layout)
    buffers = (q_tile, grad_tile, out_tile, k_ring, v_ring)
    barriers = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
                _barriers(STAGES, 2))  # fmt: skip
    shared = (buffers, barriers, tiles, count, lse, delta, grad_q, rows, num_q, scale, scale_out)
    descriptors = (q_desc, grad_desc, out_desc, k_desc, v_desc)
    gl.warp_specialize([
        (_queries_attend, (shared, 0, D, ROWS, BLOCK, STAGES, PREFIX)),
        (_queries_attend, (shared, 1, D, ROWS, BLOCK, STAGES, PREFIX)),
        (_queries_copy, (buffers, barriers, tiles, count, descriptors, group, D, ROWS, BLOCK, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit(do_not_specialize=_ANY_SIZE)
def attention_backward_keys(
    q_desc, grad_desc, k_desc, v_desc, lse, delta, grad_k, grad_v, tiles, counts, slots, rows, num_kv, group,
    scale, scale_out,
    D: gl.constexpr, KEYS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """grad_k and grad_v [T, num_kv, D], summed over the `group` query heads. BLOCK query rows at a time."""
    tiles += gl.program_id(0) * slots * _KEY_FIELDS
    count = gl.load(counts + gl.program_id(0))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_tile = gl.allocate_shared_memory(q_desc.dtype, [2, KEYS // 2, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(q_desc.dtype, [2, KEYS // 2, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], q_desc.layout)
    grad_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], grad_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], plain)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], plain)
    buffers = (k_tile, v_tile, q_ring, grad_ring, lse_ring, delta_ring)
    barriers = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, 2))
    shared = (buffers, barriers, tiles, count, grad_k, grad_v, num_kv, group, scale, scale_out)
    sources = (q_desc, grad_desc, k_desc, v_desc, lse, delta)
    gl.warp_specialize([
        (_keys_attend, (shared, 0, D, KEYS, BLOCK, STAGES)),
        (_keys_attend, (shared, 1, D, KEYS, BLOCK, STAGES)),
        (_keys_copy, (buffers, barriers, tiles, count, rows, sources, group, D, KEYS, BLOCK, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _query_tile(tiles, index, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """The tile's fields, then how many blocks of its own segment's keys it sees, and how many blocks in all."""
    tile = tiles + index * _QUERY_FIELDS
    first, end, start = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
    prefix, prefix_end, head = gl.load(tile + 3), gl.load(tile + 4), gl.load(tile + 5)
    own = gl.cdiv(gl.minimum(first + ROWS, end) - start, BLOCK)
    return first, end, start, prefix, prefix_end, head, own, own + gl.cdiv(prefix_end - prefix, BLOCK)


@gluon.jit
def _key_tile(tiles, index):
    tile = tiles + index * _KEY_FIELDS
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)


@gluon.jit
def _key_block(index, own, start, end, prefix, prefix_end, BLOCK: gl.constexpr):
    """The block's first key and the last one of its range."""
    is_own = index < own
    first = gl.where(is_own, start + (own - 1 - index) * BLOCK, prefix + (index - own) * BLOCK)
    return first, gl.where(is_own, end, prefix_end) - 1


@gluon.jit
def _seen(row, key, last, L: gl.constexpr, BLOCK: gl.constexpr):
    """bool [rows, BLOCK]: keys of a row's past that lie in the range. Prefixes stand before their users."""
    keys = key + gl.arange(0, BLOCK, gl.SliceLayout(0, L))
    return keys[None, :] <= gl.minimum(row, last)[:, None]


@gluon.jit
def _store(target, tile, first, end, head, heads, D: gl.constexpr):
    """tile [R, D] to rows first.. of one head of target [T, heads, D], up to row `end`."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile = gl.convert_layout(tile.to(target.dtype.element_ty), L)
    row = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, L))
    column = gl.arange(0, D, gl.SliceLayout(0, L))
    place = row.to(gl.int64)[:, None] * (heads * D) + head * D + column[None, :]
    gl.store(target + place, tile, mask=(row < end)[:, None])


@gluon.jit
def _copy_halves(desc, target, barrier, row, column, ROWS: gl.constexpr):
    tma.async_copy_global_to_shared(desc, [row, column], barrier, target.index(0))
    tma.async_copy_global_to_shared(desc, [row + ROWS // 2, column], barrier, target.index(1))


@gluon.jit
def _copy_block(desc, ring, full, free, step, row, column, BYTES: gl.constexpr, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), ring.index(stage))


@gluon.jit
def _clear_rows(tile, count, BLOCK: gl.constexpr, D: gl.constexpr):
    """Zeros behind the first `count` rows of a tile [BLOCK, D] that is there. Both groups do it, with one result."""
    PART: gl.constexpr = 1024 // D
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.arange(0, PART, gl.SliceLayout(1, WIDE))
    for i in gl.static_range(BLOCK // PART):
        if count < (i + 1) * PART:
            part = tile.slice(i * PART, PART)
            rows = part.load(WIDE)
            part.store(gl.where((row < count - i * PART)[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _forward_copy(
    buffers, barriers, tiles, count, q_desc, k_desc, v_desc, group,
    D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tile, k_ring, v_ring = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    bytes: gl.constexpr = BLOCK * D * 2
    step = 0
    for t in range(count):
        first, end, start, prefix, prefix_end, head, own, blocks = _query_tile(tiles, t, BLOCK, BLOCK)
        mbarrier.wait(q_free.index(0), (t & 1) ^ 1)
        mbarrier.expect(q_full.index(0), bytes)
        _copy_halves(q_desc, q_tile, q_full.index(0), first, head * D, BLOCK)
        column = head // group * D
        for i in range(blocks):
            key, _ = _key_block(i, own, start, end, prefix, prefix_end, BLOCK)
            _copy_block(k_desc, k_ring, k_full, k_free, step, key, column, bytes, STAGES)
            _copy_block(v_desc, v_ring, v_full, v_free, step, key, column, bytes, STAGES)
            step += 1


@gluon.jit
def _forward_attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PREFIX: gl.constexpr,
):  # fmt: skip
    """The product of weights and values of one block runs while the next block's weights are made."""
    buffers, barriers, tiles, count, out, lse, rows, num_q, scale = shared
    q_tile, k_ring, v_ring = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    HALF: gl.constexpr = BLOCK // 2
    dtype: gl.constexpr = out.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    queries = q_tile.index(PART)
    step = 0
    for t in range(count):
        first, end, start, prefix, prefix_end, head, own, blocks = _query_tile(tiles, t, BLOCK, BLOCK)
        first += PART * HALF
        row = first + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        none = gl.zeros([HALF, BLOCK], gl.float32, SCORES)
        result = gl.zeros([HALF, D], gl.float32, RESULT)
        stage, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(q_full.index(0), t & 1)
        mbarrier.wait(k_full.index(stage), phase)
        s_token = warpgroup_mma(queries, k_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [s_token])
        mbarrier.arrive(k_free.index(stage), count=1)
        key, last = _key_block(0, own, start, end, prefix, prefix_end, BLOCK)
        scores = gl.where(_seen(row, key, last, SCORES, BLOCK), scores, -float("inf"))
        peak = gl.max(scores, 1)
        weights = gl.exp2(scores * scale - (peak * scale)[:, None])
        total = gl.sum(weights, 1)
        operand = gl.convert_layout(weights.to(dtype), OPERAND)
        if key + BLOCK - 1 > last:
            # A weight of 0 does not keep another sample's infinities out.
            mbarrier.wait(v_full.index(stage), phase)
            _clear_rows(v_ring.index(stage), last + 1 - key, BLOCK, D)
        for i in range(1, blocks):
            before, before_phase = stage, phase
            step += 1
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s_token = warpgroup_mma(queries, k_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            o_token = warpgroup_mma(operand, v_ring.index(before), result, is_async=True)
            scores = warpgroup_mma_wait(1, [s_token])
            mbarrier.arrive(k_free.index(stage), count=1)
            if PREFIX:
                key, last = _key_block(i, own, start, end, prefix, prefix_end, BLOCK)
                if key + BLOCK - 1 > last:
                    scores = gl.where(_seen(row, key, last, SCORES, BLOCK), scores, -float("inf"))
                    mbarrier.wait(v_full.index(stage), phase)
                    _clear_rows(v_ring.index(stage), last + 1 - key, BLOCK, D)
            new_peak = gl.maximum(peak, gl.max(scores, 1))
            weights = gl.exp2(scores * scale - (new_peak * scale)[:, None])
            shrink = gl.exp2((peak - new_peak) * scale)
            total = total * shrink + gl.sum(weights, 1)
            peak = new_peak
            next_operand = gl.convert_layout(weights.to(dtype), OPERAND)
            result, operand = warpgroup_mma_wait(0, [o_token, operand])
            mbarrier.arrive(v_free.index(before), count=1)
            result = result * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
            operand = next_operand
        mbarrier.arrive(q_free.index(0), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        o_token = warpgroup_mma(operand, v_ring.index(stage), result, is_async=True)
        gl.store(lse + head * rows + row, peak * scale + gl.log2(total), mask=row < end)
        result, operand = warpgroup_mma_wait(0, [o_token, operand])
        mbarrier.arrive(v_free.index(stage), count=1)
        step += 1
        result = result * gl.convert_layout(1.0 / total, gl.SliceLayout(1, RESULT))[:, None]
        _store(out, result, first, end, head, num_q, D)


@gluon.jit
def _queries_copy(
    buffers, barriers, tiles, count, descriptors, group,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tile, grad_tile, out_tile, k_ring, v_ring = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    q_desc, grad_desc, out_desc, k_desc, v_desc = descriptors
    step = 0
    for t in range(count):
        first, end, start, prefix, prefix_end, head, own, blocks = _query_tile(tiles, t, ROWS, BLOCK)
        full = q_full.index(0)
        mbarrier.wait(q_free.index(0), (t & 1) ^ 1)
        mbarrier.expect(full, 3 * ROWS * D * 2)
        _copy_halves(q_desc, q_tile, full, first, head * D, ROWS)
        _copy_halves(grad_desc, grad_tile, full, first, head * D, ROWS)
        _copy_halves(out_desc, out_tile, full, first, head * D, ROWS)
        for i in range(blocks):
            key, _ = _key_block(i, own, start, end, prefix, prefix_end, BLOCK)
            _copy_block(k_desc, k_ring, k_full, k_free, step, key, head // group * D, BLOCK * D * 2, STAGES)
            _copy_block(v_desc, v_ring, v_full, v_free, step, key, head // group * D, BLOCK * D * 2, STAGES)
            step += 1


@gluon.jit
def _queries_attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, PREFIX: gl.constexpr,
):  # fmt: skip
    """The product with one block's keys runs while the next block's gradients of scores are made."""
    buffers, barriers, tiles, count, lse, delta, grad_q, rows, num_q, scale, scale_out = shared
    q_tile, grad_tile, out_tile, k_ring, v_ring = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = barriers
    HALF: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = grad_q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    queries, grads = q_tile.index(PART), grad_tile.index(PART)
    step = 0
    for t in range(count):
        first, end, start, prefix, prefix_end, head, own, blocks = _query_tile(tiles, t, ROWS, BLOCK)
        first += PART * HALF
        row = first + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        norm = gl.load(lse + head * rows + row, mask=row < end, other=float("inf"))
        none = gl.zeros([HALF, BLOCK], gl.float32, SCORES)
        result = gl.zeros([HALF, D], gl.float32, RESULT)
        stage, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(q_full.index(0), t & 1)
        mbarrier.wait(k_full.index(stage), phase)
        s_token = warpgroup_mma(queries, k_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)
        w_token = warpgroup_mma(grads, v_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        dots = gl.sum(grads.load(WIDE).to(gl.float32) * out_tile.index(PART).load(WIDE).to(gl.float32), 1)
        shift = gl.convert_layout(dots, gl.SliceLayout(1, SCORES))
        gl.store(delta + head * rows + row, shift, mask=row < end)
        scores = warpgroup_mma_wait(1, [s_token])
        weights = gl.exp2(scores * scale - norm[:, None])
        key, last = _key_block(0, own, start, end, prefix, prefix_end, BLOCK)
        weights = gl.where(_seen(row, key, last, SCORES, BLOCK), weights, 0.0)
        grad_weights = warpgroup_mma_wait(0, [w_token])
        mbarrier.arrive(v_free.index(stage), count=1)
        operand = gl.convert_layout((weights * (grad_weights - shift[:, None])).to(dtype), OPERAND)
        for i in range(1, blocks):
            before = stage
            step += 1
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s_token = warpgroup_mma(queries, k_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            w_token = warpgroup_mma(grads, v_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            q_token = warpgroup_mma(operand, k_ring.index(before), result, is_async=True)
            scores = warpgroup_mma_wait(2, [s_token])
            weights = gl.exp2(scores * scale - norm[:, None])
            if BLOCK < ROWS or PREFIX:
                key, last = _key_block(i, own, start, end, prefix, prefix_end, BLOCK)
                if key + BLOCK - 1 > gl.minimum(first, last):
                    weights = gl.where(_seen(row, key, last, SCORES, BLOCK), weights, 0.0)
            grad_weights = warpgroup_mma_wait(1, [w_token])
            mbarrier.arrive(v_free.index(stage), count=1)
            next_operand = gl.convert_layout((weights * (grad_weights - shift[:, None])).to(dtype), OPERAND)
            result, operand = warpgroup_mma_wait(0, [q_token, operand])
            mbarrier.arrive(k_free.index(before), count=1)
            operand = next_operand
        fence_async_shared()
        mbarrier.arrive(q_free.index(0), count=1)
        q_token = warpgroup_mma(operand, k_ring.index(stage), result, is_async=True)
        result, operand = warpgroup_mma_wait(0, [q_token, operand])
        mbarrier.arrive(k_free.index(stage), count=1)
        step += 1
        _store(grad_q, result * scale_out, first, end, head, num_q, D)


@gluon.jit
def _keys_copy(
    buffers, barriers, tiles, count, rows, sources, group,
    D: gl.constexpr, KEYS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_ring, grad_ring, lse_ring, delta_ring = buffers
    kv_full, kv_free, q_full, grad_full, free = barriers
    q_desc, grad_desc, k_desc, v_desc, lse, delta = sources
    offset = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [1], [0]))
    step = 0
    for t in range(count):
        first, end, row_end, kv_head = _key_tile(tiles, t)
        mbarrier.wait(kv_free.index(0), (t & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * KEYS * D * 2)
        _copy_halves(k_desc, k_tile, kv_full.index(0), first, kv_head * D, KEYS)
        _copy_halves(v_desc, v_tile, kv_full.index(0), first, kv_head * D, KEYS)
        for member in range(group):
            head = kv_head * group + member
            for row in range(first, row_end, BLOCK):
                stage = step % STAGES
                place, inside = head * rows + row + offset, row + offset < row_end
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                async_copy.async_copy_global_to_shared(lse_ring.index(stage), lse + place, mask=inside)
                async_copy.mbarrier_arrive(q_full.index(stage))
                mbarrier.expect(q_full.index(stage), BLOCK * D * 2)
                tma.async_copy_global_to_shared(q_desc, [row, head * D], q_full.index(stage), q_ring.index(stage))
                async_copy.async_copy_global_to_shared(delta_ring.index(stage), delta + place, mask=inside)
                async_copy.mbarrier_arrive(grad_full.index(stage))
                mbarrier.expect(grad_full.index(stage), BLOCK * D * 2)
                tma.async_copy_global_to_shared(
                    grad_desc, [row, head * D], grad_full.index(stage), grad_ring.index(stage)
                )
                step += 1


@gluon.jit
def _keys_attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores are made transposed, [keys, rows]: so they are operands of both sums as they are."""
    buffers, barriers, tiles, count, grad_k, grad_v, num_kv, group, scale, scale_out = shared
    k_tile, v_tile, q_ring, grad_ring, lse_ring, delta_ring = buffers
    kv_full, kv_free, q_full, grad_full, free = barriers
    HALF: gl.constexpr = KEYS // 2
    dtype: gl.constexpr = grad_k.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    keys, values = k_tile.index(PART), v_tile.index(PART)
    step = 0
    for t in range(count):
        first, end, row_end, kv_head = _key_tile(tiles, t)
        mine = first + PART * HALF
        key = mine + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
        none = gl.zeros([HALF, BLOCK], gl.float32, SCORES)
        sum_k, sum_v = gl.zeros([HALF, D], gl.float32, RESULT), gl.zeros([HALF, D], gl.float32, RESULT)
        row0 = first
        mbarrier.wait(kv_full.index(0), t & 1)
        for _ in range(gl.cdiv(row_end - first, BLOCK) * group):
            stage, phase = step % STAGES, step // STAGES & 1
            mbarrier.wait(q_full.index(stage), phase)
            s_token = warpgroup_mma(keys, q_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            norm = lse_ring.index(stage).load(ACROSS)
            mbarrier.wait(grad_full.index(stage), phase)
            w_token = warpgroup_mma(values, grad_ring.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, [s_token])
            weights = gl.exp2(scores * scale - norm[None, :])
            if (row0 < mine + HALF - 1) | (row0 + BLOCK > row_end):
                row = row0 + gl.arange(0, BLOCK, ACROSS)
                seen = (row[None, :] >= key[:, None]) & (row < row_end)[None, :]
                weights = gl.where(seen, weights, 0.0)
            v_operand = gl.convert_layout(weights.to(dtype), OPERAND)
            v_token = warpgroup_mma(v_operand, grad_ring.index(stage), sum_v, is_async=True)
            shift = delta_ring.index(stage).load(ACROSS)
            grad_weights = warpgroup_mma_wait(1, [w_token])
            k_operand = gl.convert_layout((weights * (grad_weights - shift[None, :])).to(dtype), OPERAND)
            k_token = warpgroup_mma(k_operand, q_ring.index(stage), sum_k, is_async=True)
            sum_v, sum_k, v_operand, k_operand = warpgroup_mma_wait(0, [v_token, k_token, v_operand, k_operand])
            mbarrier.arrive(free.index(stage), count=1)
            row0 = gl.where(row0 + BLOCK >= row_end, first, row0 + BLOCK)
            step += 1
        mbarrier.arrive(kv_free.index(0), count=1)
        _store(grad_v, sum_v, mine, end, kv_head, num_kv, D)
        _store(grad_k, sum_k * scale_out, mine, end, kv_head, num_kv, D)
