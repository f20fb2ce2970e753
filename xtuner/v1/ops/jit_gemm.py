"""Products with weights inside Numba kernels, at the speed of a numerical library also for few rows."""

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .jit import part
from .simd import (
    LANES,
    emit_load_first,
    emit_splat,
    emit_store_first,
    emit_widened,
    load_first,
    rounded,
    splat,
    store_first,
)  # fmt: skip

_HEIGHT, _VECTORS = (8, 3) if LANES == 16 else (4, 2)
PANEL = _VECTORS * LANES
"""Columns of a tile; twice as many of float16, whose vectors are of twice as many numbers. A tile's sums keep two
multipliers busy and leave registers for what they are made of."""
_LINES = -(-PANEL * 4 // 64)
"""Of memory that a row of a panel takes at most."""
_DEPTH = 64
"""Rows of a panel that all tiles are multiplied by before the next: they stay in a core's nearest memory, with the
tiles' factors. Meanwhile the next ones are asked for, which have a long way."""
_ROWS = 64
"""Rows of factors that stay there."""

_INT, _INT32, _BYTES, _FLOATS = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer(), ir.FloatType().as_pointer()
_VECTOR, _SHORTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(16), LANES)
_HALVES = ir.VectorType(ir.HalfType(), 2 * LANES)
_numbers = types.CPointer(types.float32)


def pack(weight: Tensor) -> Tensor:
    """[N, K] -> [panels, K, width], which products read from front to back. Columns beyond N are 0."""
    n, k = weight.shape
    width = 2 * PANEL if weight.dtype == torch.float16 else PANEL
    packed = weight.new_zeros(-(-n // width), k, width)
    whole = n // width
    packed[:whole] = weight[: whole * width].view(whole, width, k).transpose(1, 2)
    if n % width:
        packed[whole, :, : n % width] = weight[whole * width :].t()
    return packed


def _place(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


@intrinsic
def _scratch(typing_context: Any) -> Any:
    """Room for the widened rows of a panel, until the kernel returns."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), _DEPTH * PANEL))
        room.align = 64
        return builder.bitcast(room, _FLOATS)

    return _numbers(), generate


@intrinsic
def _panel_rows(typing_context: Any, weight: Any, at: Any, rows: Any, scratch: Any) -> Any:
    """Where tiles find so many rows of a panel: those of float32 and float16 where they are, bfloat16 ones widened."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        source = _place(context, builder, weight, *values[:2])
        if weight.dtype != types.int16:
            return builder.bitcast(source, _FLOATS)
        with cgutils.for_range(builder, values[2]) as loop:
            for v in range(_VECTORS):
                at = builder.add(builder.mul(loop.index, _INT(PANEL)), _INT(v * LANES))
                shorts = builder.load(builder.bitcast(builder.gep(source, [at]), _SHORTS.as_pointer()), align=2)
                target = builder.bitcast(builder.gep(values[3], [at]), _VECTOR.as_pointer())
                builder.store(emit_widened(builder, shorts), target, align=64)
        return values[3]

    return _numbers(weight, types.int64, types.int64, _numbers), generate


def _tile_of(height: int, asks_for: int) -> Any:
    """Tiles of so many rows, which ask for so many lines of memory a row of the panel."""

    @intrinsic
    def tile(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, weight: Any, depth: Any, b: Any, out: Any, out_at: Any,
        out_step: Any, columns: Any, wanted_at: Any, wanted_step: Any,
    ) -> Any:  # fmt: skip
        """Add one tile of a b to that of out, of which there are `columns`.

        A place is that of the tile's first number in the array, a step leads to the next row. b is what `_panel_rows`
        made of the weight, at least 1. The sums stay in registers, and go on in the order of the depth. From
        `wanted_at` on the weight is asked for, `wanted_step` further each row.

        float16: a holds each number twice, as `pair_row` makes it. Sums begin at 0, and are added to out in float32.
        """
        n = types.int64
        signature = types.void(a, n, n, weight, n, _numbers, out, n, n, n, n, n)
        return signature, lambda *arguments: _generate_tile(height, asks_for, *arguments)

    return tile


def _generate_tile(
    height: int, asks_for: int, context: Any, builder: ir.IRBuilder, signature: Any, values: Any
) -> Any:  # fmt: skip
    a, weight, out = (
        _place(context, builder, signature.args[array], values[array], values[at])
        for array, at in ((0, 1), (3, 10), (6, 7))
    )
    a_step, depth, b, out_step, columns, wanted_step = (values[i] for i in (2, 4, 5, 8, 9, 11))
    halves = signature.args[3].dtype == types.uint16
    kind, name = (_HALVES, f"v{2 * LANES}f16") if halves else (_VECTOR, f"v{LANES}f32")
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{name}")
    prefetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTES, *[_INT32] * 3]), "llvm.prefetch.p0i8"
    )
    tile = [(r, v) for r in range(height) for v in range(_VECTORS)]

    def row(base: Any, step: Any, index: int) -> Any:
        return builder.gep(base, [builder.mul(step, _INT(index))])

    def vector(base: Any, index: int, kind: Any) -> Any:
        return builder.bitcast(builder.gep(base, [_INT(index * LANES)]), kind.as_pointer())

    def sum_of(r: int, v: int) -> Any:
        left = builder.sub(columns, _INT(v * LANES))
        return emit_load_first(builder, vector(row(out, out_step, r), v, _VECTOR), left, ir.Constant(_VECTOR, None))

    def keep(r: int, v: int, total: Any) -> None:
        place = builder.gep(row(out, out_step, r), [_INT(v * LANES)])
        emit_store_first(builder, place, builder.sub(columns, _INT(v * LANES)), total)

    starts = [ir.Constant(kind, None) if halves else sum_of(r, v) for r, v in tile]
    before, loop, end = builder.block, *(builder.append_basic_block(name) for name in ("depth", "depth_end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(_INT), [builder.phi(kind) for _ in tile]
    wanted = builder.bitcast(builder.gep(weight, [builder.mul(k, wanted_step)]), _BYTES)
    for line in range(asks_for):
        builder.call(prefetch, [builder.gep(wanted, [_INT(64 * line)]), _INT32(0), _INT32(2), _INT32(1)])
    b_row = builder.gep(b, [builder.mul(k, _INT(PANEL))])
    b_vectors = [builder.load(vector(b_row, v, kind), align=4) for v in range(_VECTORS)]
    factors = [builder.load(builder.gep(row(a, a_step, r), [k])) for r in range(height)]
    factors = [builder.bitcast(emit_splat(builder, factor), kind) for factor in factors]
    totals = [builder.call(fma, [factors[r], b_vectors[v], total]) for (r, v), total in zip(tile, sums, strict=True)]
    next_k = builder.add(k, _INT(1))
    for phi, start, following in zip([k, *sums], [_INT(0), *starts], [next_k, *totals], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, end)

    builder.position_at_end(end)
    for (r, v), total in zip(tile, totals, strict=True):
        if not halves:
            keep(r, v, total)
            continue
        for first in (0, LANES):
            lanes = ir.Constant(ir.VectorType(_INT32, LANES), list(range(first, first + LANES)))
            numbers = builder.fpext(builder.shuffle_vector(total, total, lanes), _VECTOR)
            at = 2 * v + first // LANES
            keep(r, at, builder.fadd(sum_of(r, at), numbers))
    return context.get_dummy_value()


_tile, _tile_of_few, _tile_4, _tile_2, _tile_1 = (
    _tile_of(*kind) for kind in ((_HEIGHT, 1), (_HEIGHT, _LINES), (4, _LINES), (2, _LINES), (1, _LINES))
)


@part
def multiply_panel(panel, threads, rows, a, weight, layer, bias, out, rounds):
    """The columns of a panel of out[:rows] = a[:rows, :K] times one layer of packed weights, plus bias.

    a and out are contiguous matrices, out at least as wide as the weights are long, and not the same; weight [layers,
    panels, K, width] is float32, or int16 with the bits of bfloat16; bias [layers, N], or [layers, 0]. With `rounds`
    results are rounded to bfloat16. A number's bits depend on its own row and column alone. `threads` take panels in
    turn.

    uint16: the bits of float16. Then a is of pairs, see `pair_row`, and parts of a sum are rounded to float16.
    """
    panels, depth, width = weight.shape[1], weight.shape[2], weight.shape[3]
    at, c, a_step, out_step = (layer * panels + panel) * depth * width, panel * width, a.shape[1], out.shape[1]
    columns, scratch, line = out_step - c, _scratch(), 64 // weight.itemsize
    for first in range(0, rows, _ROWS):
        last = min(rows, first + _ROWS)
        few = last - first <= 2 * _HEIGHT
        _begin(first, last, bias, layer * bias.shape[1] + c, bias.shape[1] - c, out, c, min(columns, width))
        for k in range(0, depth, _DEPTH):
            count = min(_DEPTH, depth - k)
            b = _panel_rows(weight, at + k * width, count, scratch)
            wanted = at + (k + count) * width
            if k + count == depth:
                wanted = at if last < rows else at + threads * depth * width
            wanted_end, i = wanted + count * width, first
            while i < last:
                a_at, out_at, left = i * a_step + k, i * out_step + c, last - i
                step = line if wanted < wanted_end else 0
                if left >= _HEIGHT and not few:
                    _tile(a, a_at, a_step, weight, count, b, out, out_at, out_step, columns, wanted, step)
                    i, wanted = i + _HEIGHT, wanted + count * line
                    continue
                step = width if wanted < wanted_end else 0
                if left >= _HEIGHT:
                    _tile_of_few(a, a_at, a_step, weight, count, b, out, out_at, out_step, columns, wanted, step)
                    i += _HEIGHT
                elif left >= 4:
                    _tile_4(a, a_at, a_step, weight, count, b, out, out_at, out_step, columns, wanted, step)
                    i += 4
                elif left >= 2:
                    _tile_2(a, a_at, a_step, weight, count, b, out, out_at, out_step, columns, wanted, step)
                    i += 2
                else:
                    _tile_1(a, a_at, a_step, weight, count, b, out, out_at, out_step, columns, wanted, step)
                    i += 1
                wanted = wanted_end
        if rounds:
            for i in range(first, last):
                _round(out, i * out_step + c, min(columns, width))


@part
def _begin(first, last, bias, bias_at, biased, out, c, columns):
    """The bias of a panel's columns, of which the first `biased` have one, in every row."""
    for v in range(0, columns, LANES):
        numbers = load_first(bias, bias_at + v, biased - v, splat(0.0))
        for i in range(first, last):
            store_first(out, i * out.shape[1] + c + v, columns - v, numbers)


@part
def _round(out, at, columns):
    for v in range(0, columns, LANES):
        numbers = load_first(out, at + v, columns - v, splat(0.0))
        store_first(out, at + v, columns - v, rounded(numbers))
