"""Products with weights inside Numba kernels, at the speed of a numerical library also for few rows."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .jit import part
from .simd import LANES, emit_in_first, emit_rounded, emit_splat, emit_store_first, emit_widened

_HEIGHT, _VECTORS = (8, 3) if LANES == 16 else (4, 2)
PANEL = _VECTORS * LANES
"""Columns of a tile. Its sums keep two multipliers busy and leave registers for what they are made of."""
_AHEAD = 32
"""How many rows of a panel ahead of their use they are asked for. On the way from memory they take longest: the tiles
behind a panel's first also ask for the next panel, so that it arrives while they compute."""

_INT, _INT32, _BYTES = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_VECTOR, _SHORTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(16), LANES)


def num_panels(columns: int) -> int:
    """How many panels hold so many columns."""
    return -(-columns // PANEL)


def pack(weight: Tensor) -> Tensor:
    """[N, K] -> [panels, K, PANEL], which products read from front to back. Columns beyond N are 0."""
    n, k = weight.shape
    packed = weight.new_zeros(num_panels(n), k, PANEL)
    whole = n // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, k).transpose(1, 2)
    if n % PANEL:
        packed[whole, :, : n % PANEL] = weight[whole * PANEL :].t()
    return packed


def _tile_of(height: int) -> Any:
    """Tiles of so many rows."""

    @intrinsic
    def tile(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, depth: Any, b: Any, b_at: Any, bias: Any, bias_at: Any,
        biased: Any, out: Any, out_at: Any, out_step: Any, columns: Any, rounds: Any, wanted_at: Any,
    ) -> Any:  # fmt: skip
        """One tile of out = a b + bias, of which `columns` are written and the first `biased` have a bias.

        A place is that of the tile's first number in the array, a step leads to the next row. b is float32, or int16
        with the bits of bfloat16; with `rounds` results are rounded to such. The sums stay in registers over the whole
        depth, which is at least 1; each begins with the bias and goes on in the order of the depth. From `wanted_at` on
        b is asked for, a line a step.
        """
        n = types.int64
        signature = types.void(a, n, n, n, b, n, bias, n, n, out, n, n, n, types.boolean, n)
        return signature, lambda *arguments: _generate_tile(height, *arguments)

    return tile


def _generate_tile(height: int, context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    def pointer(argument: int) -> Any:
        array = context.make_array(signature.args[argument])(context, builder, values[argument])
        return builder.gep(array.data, [values[argument + 1]])

    def row(base: Any, step: Any, index: int) -> Any:
        return builder.gep(base, [builder.mul(step, _INT(index))])

    def vector(base: Any, index: int, kind: Any = _VECTOR) -> Any:
        return builder.bitcast(builder.gep(base, [_INT(index * LANES)]), kind.as_pointer())

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)

    a, b, bias, out = (pointer(argument) for argument in (0, 4, 6, 9))
    a_step, depth, biased, out_step, columns, rounds = (values[i] for i in (2, 3, 8, 11, 12, 13))
    half = signature.args[4].dtype == types.int16
    line = 32 if half else 16
    wanted = builder.gep(b, [builder.sub(values[14], values[5])])
    fma = function(f"llvm.fma.v{LANES}f32", _VECTOR, *[_VECTOR] * 3)
    masked = function(
        f"llvm.masked.load.v{LANES}f32.p0v{LANES}f32", _VECTOR, _VECTOR.as_pointer(), _INT32,
        ir.VectorType(ir.IntType(1), LANES), _VECTOR,
    )  # fmt: skip
    prefetch = function("llvm.prefetch.p0i8", ir.VoidType(), _BYTES, _INT32, _INT32, _INT32)
    a_rows = [row(a, a_step, r) for r in range(height)]
    tile = [(r, v) for r in range(height) for v in range(_VECTORS)]
    zero = ir.Constant(_VECTOR, None)
    biases = [
        builder.call(masked, [vector(bias, v), _INT32(4), emit_in_first(builder, _behind(builder, biased, v)), zero])
        for v in range(_VECTORS)
    ]

    before, loop, end = builder.block, *(builder.append_basic_block(name) for name in ("depth", "depth_end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(_INT), [builder.phi(_VECTOR) for _ in tile]
    b_row = builder.gep(b, [builder.mul(k, _INT(PANEL))])
    ahead = [builder.gep(b_row, [_INT(_AHEAD * PANEL + column)]) for column in range(0, PANEL, line)]
    for place in (*ahead, builder.gep(wanted, [builder.mul(k, _INT(line))])):
        builder.call(prefetch, [builder.bitcast(place, _BYTES), _INT32(0), _INT32(2), _INT32(1)])
    if half:
        shorts = [builder.load(vector(b_row, v, _SHORTS), align=2) for v in range(_VECTORS)]
        b_vectors = [emit_widened(builder, x) for x in shorts]
    else:
        b_vectors = [builder.load(vector(b_row, v), align=4) for v in range(_VECTORS)]
    factors = [emit_splat(builder, builder.load(builder.gep(a_row, [k]))) for a_row in a_rows]
    totals = [builder.call(fma, [factors[r], b_vectors[v], total]) for (r, v), total in zip(tile, sums, strict=True)]
    next_k = builder.add(k, _INT(1))
    starts = [_INT(0), *(biases[v] for _, v in tile)]
    for phi, start, following in zip([k, *sums], starts, [next_k, *totals], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, end)

    builder.position_at_end(end)
    rounds = builder.trunc(rounds, ir.IntType(1))
    for (r, v), total in zip(tile, totals, strict=True):
        total = builder.select(rounds, emit_rounded(builder, total), total)
        place = builder.gep(row(out, out_step, r), [_INT(v * LANES)])
        emit_store_first(builder, place, _behind(builder, columns, v), total)
    return context.get_dummy_value()


def _behind(builder: ir.IRBuilder, count: Any, vectors: int) -> Any:
    """How many of `count` columns are left behind so many vectors."""
    return builder.sub(count, _INT(vectors * LANES))


_tile_8, _tile_4, _tile_2, _tile_1 = (_tile_of(height) for height in (8, 4, 2, 1))


@part
def multiply_panel(panel, threads, rows, a, weight, layer, bias, out, rounds):
    """The columns of a panel of out[:rows] = a[:rows, :K] times one layer of packed weights, plus bias.

    a and out are contiguous matrices, out as wide as the weights are long; weight [layers, panels, K, PANEL] is
    float32, or int16 with the bits of bfloat16; bias [layers, N], or [layers, 0]. With `rounds` results are rounded to
    bfloat16. A number's bits depend on its own row and column alone. `threads` take panels in turn.
    """
    panels, depth, a_step, out_step = weight.shape[1], weight.shape[2], a.shape[1], out.shape[1]
    at, c = (layer * panels + panel) * depth * PANEL, panel * PANEL
    bias_at, biased, columns = layer * bias.shape[1] + c, bias.shape[1] - c, out_step - c
    i, wanted = 0, at
    while i < rows:
        a_at, out_at, left = i * a_step, i * out_step + c, rows - i
        if _HEIGHT == 8 and left >= 8:
            _tile_8(
                a, a_at, a_step, depth, weight, at, bias, bias_at, biased, out, out_at, out_step, columns, rounds,
                wanted,
            )  # fmt: skip
            i += 8
        elif left >= 4:
            _tile_4(
                a, a_at, a_step, depth, weight, at, bias, bias_at, biased, out, out_at, out_step, columns, rounds,
                wanted,
            )  # fmt: skip
            i += 4
        elif left >= 2:
            _tile_2(
                a, a_at, a_step, depth, weight, at, bias, bias_at, biased, out, out_at, out_step, columns, rounds,
                wanted,
            )  # fmt: skip
            i += 2
        else:
            _tile_1(
                a, a_at, a_step, depth, weight, at, bias, bias_at, biased, out, out_at, out_step, columns, rounds,
                wanted,
            )  # fmt: skip
            i += 1
        of_next = at + threads * depth * PANEL
        wanted = of_next if wanted == at else wanted + depth * (64 // weight.itemsize)
