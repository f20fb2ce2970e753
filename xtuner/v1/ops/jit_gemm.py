"""Products with weights inside Numba kernels, at the speed of a numerical library also for few rows."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .jit import part, types
from .simd import LANES

ROWS = 4
"""Rows of one tile: matrices have a multiple of this many."""
_VECTORS = 4 if LANES == 16 else 2
PANEL = _VECTORS * LANES
"""Columns of one tile. Its sums keep two multipliers busy and fit into the registers: 32, or 16 without AVX-512."""

_INT, _VECTOR, _ORDER = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


def padded(columns: int) -> int:
    """How many columns a product of so many writes."""
    return -(-columns // PANEL) * PANEL


def pack(weight: Tensor) -> Tensor:
    """float32 [N, K] -> [panels, K, PANEL], which products read from front to back. Columns beyond N are 0."""
    n, k = weight.shape
    packed = weight.new_zeros(padded(n) // PANEL, k, PANEL)
    whole = n // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, k).transpose(1, 2)
    if n % PANEL:
        packed[whole, :, : n % PANEL] = weight[whole * PANEL :].t()
    return packed


@intrinsic
def _tile(
    typing_context: Any, a: Any, a_at: Any, a_step: Any, depth: Any, b: Any, b_at: Any, out: Any, out_at: Any,
    out_step: Any, add: Any,
) -> Any:  # fmt: skip
    """One tile of out (+)= a b: a place is that of the tile's first number in the array, a step leads to the next row.

    Its ROWS x PANEL sums stay in registers over the whole depth, which is at least 1.
    """
    n = types.int64
    return types.void(a, n, n, n, b, n, out, n, n, types.boolean), _generate_tile


def _generate_tile(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    def pointer(argument: int) -> Any:
        array = context.make_array(signature.args[argument])(context, builder, values[argument])
        return builder.gep(array.data, [values[argument + 1]])

    def row(base: Any, step: Any, index: int) -> Any:
        return builder.gep(base, [builder.mul(step, _INT(index))])

    def vector(base: Any, index: int) -> Any:
        return builder.bitcast(builder.gep(base, [_INT(index * LANES)]), _VECTOR.as_pointer())

    def splat(number: Any) -> Any:
        none = ir.Constant(_VECTOR, ir.Undefined)
        return builder.shuffle_vector(builder.insert_element(none, number, _INT(0)), none, _ORDER([0] * LANES))

    a, b, out = pointer(0), pointer(4), pointer(6)
    a_step, depth, out_step, add = values[2], values[3], values[8], values[9]
    fma_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")
    a_rows = [row(a, a_step, r) for r in range(ROWS)]
    tile = [(r, v) for r in range(ROWS) for v in range(_VECTORS)]

    before, loop, end = builder.block, *(builder.append_basic_block(name) for name in ("depth", "depth_end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(_INT), [builder.phi(_VECTOR) for _ in tile]
    b_row = builder.gep(b, [builder.mul(k, _INT(PANEL))])
    b_vectors = [builder.load(vector(b_row, v), align=4) for v in range(_VECTORS)]
    factors = [splat(builder.load(builder.gep(a_row, [k]))) for a_row in a_rows]
    totals = [builder.call(fma, [factors[r], b_vectors[v], total]) for (r, v), total in zip(tile, sums, strict=True)]
    next_k = builder.add(k, _INT(1))
    for phi, following in zip([k, *sums], [next_k, *totals], strict=True):
        phi.add_incoming(ir.Constant(phi.type, None), before)  # zero
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, end)

    builder.position_at_end(end)
    places = [vector(row(out, out_step, r), v) for r, v in tile]
    with builder.if_else(builder.trunc(add, ir.IntType(1))) as (adding, setting):
        with adding:
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.fadd(builder.load(place, align=4), total), place, align=4)
        with setting:
            for place, total in zip(places, totals, strict=True):
                builder.store(total, place, align=4)
    return context.get_dummy_value()


@part
def matmul(rows, a, weight, layer, out, add):
    """out[:rows] (+)= a[:rows, :K] times one layer of packed weights [layers, panels, K, PANEL].

    a and out are contiguous matrices; their rows reach to a multiple of ROWS, and out has `padded` columns. A row's
    result has the same bits whatever other rows there are.
    """
    panels, depth = weight.shape[1], weight.shape[2]
    for panel in range(panels):
        at = (layer * panels + panel) * depth * PANEL
        for i in range(0, rows, ROWS):
            out_at = i * out.shape[1] + panel * PANEL
            _tile(a, i * a.shape[1], a.shape[1], depth, weight, at, out, out_at, out.shape[1], add)
