"""Products with weights inside Numba kernels, at the speed of a numerical library also for few rows."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .jit import part
from .simd import LANES, emit_splat, emit_widened, load_first, rounded, splat, store_first, vector

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

_ZERO, _ALIGNED = np.float32(0), 4 * LANES
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


def _room_of(numbers: int) -> Any:
    """Memory for so many numbers, until the kernel returns."""

    @intrinsic
    def room(typing_context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            with builder.goto_entry_block():  # Numba's own function would fill it with zeros for every panel
                place = builder.alloca(ir.ArrayType(ir.FloatType(), numbers))
            place.align = 64
            return builder.bitcast(place, _FLOATS)

        return _numbers(), generate

    return room


_room_for_panel, _room_for_sums = _room_of(_DEPTH * PANEL), _room_of(_ROWS * 2 * PANEL)


@intrinsic
def _read(typing_context: Any, numbers: Any, at: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.load(builder.bitcast(builder.gep(values[0], [values[1]]), _VECTOR.as_pointer()), align=_ALIGNED)

    return vector(_numbers, types.int64), generate


@intrinsic
def _write(typing_context: Any, numbers: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(builder.gep(values[0], [values[1]]), _VECTOR.as_pointer())
        builder.store(values[2], place, align=_ALIGNED)
        return context.get_dummy_value()

    return types.void(_numbers, types.int64, vector), generate


@intrinsic
def _panel_rows(typing_context: Any, weight: Any, at: Any, rows: Any, room: Any) -> Any:
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
                builder.store(emit_widened(builder, shorts), target, align=_ALIGNED)
        return values[3]

    return _numbers(weight, types.int64, types.int64, _numbers), generate


def _tile_of(height: int, asks_for: int) -> Any:
    """Tiles of so many rows, which ask for so many lines of memory a row of the panel."""

    @intrinsic
    def tile(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, weight: Any, depth: Any, b: Any, sums: Any, sums_at: Any,
        wanted_at: Any, wanted_step: Any,
    ) -> Any:  # fmt: skip
        """Add one tile of a b to that of the sums, whose rows are as wide as a panel.

        A place is that of the tile's first number, a step leads to the next row. b is what `_panel_rows` made of the
        weight, at least 1. The sums stay in registers, and go on in the order of the depth. From `wanted_at` on the
        weight is asked for, `wanted_step` further each row.

        float16: a holds each number twice, as `pair_row` makes it. Sums begin at 0, and are added in float32.
        """
        n = types.int64
        signature = types.void(a, n, n, weight, n, _numbers, _numbers, n, n, n)
        return signature, lambda *arguments: _generate_tile(height, asks_for, *arguments)

    return tile


def _generate_tile(
    height: int, asks_for: int, context: Any, builder: ir.IRBuilder, signature: Any, values: Any
) -> Any:  # fmt: skip
    a, weight = (_place(context, builder, signature.args[i], values[i], values[at]) for i, at in ((0, 1), (3, 8)))
    a_step, depth, b, wanted_step = (values[i] for i in (2, 4, 5, 9))
    halves = signature.args[3].dtype == types.uint16
    kind, name = (_HALVES, f"v{2 * LANES}f16") if halves else (_VECTOR, f"v{LANES}f32")
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{name}")
    prefetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_BYTES, *[_INT32] * 3]), "llvm.prefetch.p0i8"
    )
    tile = [(r, v) for r in range(height) for v in range(_VECTORS)]
    width = 2 * PANEL if halves else PANEL

    def vector_at(base: Any, numbers: int, kind: Any) -> Any:
        return builder.bitcast(builder.gep(base, [_INT(numbers)]), kind.as_pointer())

    def sum_at(r: int, v: int) -> Any:
        return vector_at(builder.gep(values[6], [values[7]]), r * width + v * LANES, _VECTOR)

    a_rows = [builder.gep(a, [builder.mul(a_step, _INT(r))]) for r in range(height)]
    starts = [ir.Constant(kind, None) if halves else builder.load(sum_at(r, v), align=_ALIGNED) for r, v in tile]
    before, loop, end = builder.block, *(builder.append_basic_block(name) for name in ("depth", "depth_end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(_INT), [builder.phi(kind) for _ in tile]
    wanted = builder.bitcast(builder.gep(weight, [builder.mul(k, wanted_step)]), _BYTES)
    for line in range(asks_for):
        builder.call(prefetch, [builder.gep(wanted, [_INT(64 * line)]), _INT32(0), _INT32(2), _INT32(1)])
    b_row = builder.gep(b, [builder.mul(k, _INT(PANEL))])
    b_vectors = [builder.load(vector_at(b_row, v * LANES, kind), align=4) for v in range(_VECTORS)]
    factors = [builder.load(builder.gep(a_row, [k])) for a_row in a_rows]
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
            builder.store(total, sum_at(r, v), align=_ALIGNED)
            continue
        for first in (0, LANES):
            lanes = ir.Constant(ir.VectorType(_INT32, LANES), list(range(first, first + LANES)))
            numbers = builder.fpext(builder.shuffle_vector(total, total, lanes), _VECTOR)
            place = sum_at(r, 2 * v + first // LANES)
            builder.store(builder.fadd(builder.load(place, align=_ALIGNED), numbers), place, align=_ALIGNED)
    return context.get_dummy_value()


_tile, _tile_of_few, _tile_4, _tile_2, _tile_1 = (
    _tile_of(*kind) for kind in ((_HEIGHT, 1), (_HEIGHT, _LINES), (4, _LINES), (2, _LINES), (1, _LINES))
)


@part
def multiply_panel(panel, threads, rows, a, weight, layer, bias, out, rounds):
    """The columns of a panel of out[:rows] = a[:rows, :K] times one layer of packed weights, plus bias.

    a and out are contiguous matrices, out at least as wide as the weights are long; weight [layers, panels, K, width]
    is float32, or int16 with the bits of bfloat16; bias [layers, N], or [layers, 0]. With `rounds` results are rounded
    to bfloat16. A number's bits depend on its own row and column alone. `threads` take panels in turn.

    uint16: the bits of float16. Then a is of pairs, see `pair_row`, and parts of a sum are rounded to float16.
    """
    panels, depth, width = weight.shape[1], weight.shape[2], weight.shape[3]
    at, c, a_step, line = (layer * panels + panel) * depth * width, panel * width, a.shape[1], 64 // weight.itemsize
    room, sums = _room_for_panel(), _room_for_sums()
    for first in range(0, rows, _ROWS):
        last = min(rows, first + _ROWS)
        few = last - first <= 2 * _HEIGHT
        _begin(sums, last - first, width, bias, layer * bias.shape[1] + c, bias.shape[1] - c)
        for k in range(0, depth, _DEPTH):
            count = min(_DEPTH, depth - k)
            b = _panel_rows(weight, at + k * width, count, room)
            wanted = at + (k + count) * width
            if k + count == depth:
                wanted = at if last < rows else at + threads * depth * width
            wanted_end, i = wanted + count * width, first
            while i < last:
                a_at, sums_at, left = i * a_step + k, (i - first) * width, last - i
                step = line if wanted < wanted_end else 0
                if left >= _HEIGHT and not few:
                    _tile(a, a_at, a_step, weight, count, b, sums, sums_at, wanted, step)
                    i, wanted = i + _HEIGHT, wanted + count * line
                    continue
                step = width if wanted < wanted_end else 0
                if left >= _HEIGHT:
                    _tile_of_few(a, a_at, a_step, weight, count, b, sums, sums_at, wanted, step)
                    i += _HEIGHT
                elif left >= 4:
                    _tile_4(a, a_at, a_step, weight, count, b, sums, sums_at, wanted, step)
                    i += 4
                elif left >= 2:
                    _tile_2(a, a_at, a_step, weight, count, b, sums, sums_at, wanted, step)
                    i += 2
                else:
                    _tile_1(a, a_at, a_step, weight, count, b, sums, sums_at, wanted, step)
                    i += 1
                wanted = wanted_end
        _end(sums, first, last, width, out, c, rounds)


@part
def _begin(sums, rows, width, bias, bias_at, biased):
    """The bias of a panel's columns, of which the first `biased` have one, in every row."""
    for v in range(0, width, LANES):
        numbers = load_first(bias, bias_at + v, biased - v, splat(_ZERO))
        for i in range(rows):
            _write(sums, i * width + v, numbers)


@part
def _end(sums, first, last, width, out, c, rounds):
    """To rows [first, last) of out, from column c on."""
    step = out.shape[1]
    for i in range(first, last):
        for v in range(0, width, LANES):
            numbers = _read(sums, (i - first) * width + v)
            if rounds:
                numbers = rounded(numbers)
            store_first(out, i * step + c + v, step - c - v, numbers)
