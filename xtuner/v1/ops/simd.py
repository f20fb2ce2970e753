"""Vectors of float32 as values inside Numba kernels.

Loops over long rows are left to the compiler. A product of small matrices is faster by an order if sums stay in
registers over its innermost loop, which the compiler does not find out: such kernels are written in vectors.
"""

import operator
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, lower_builtin, register_model, type_callable

from .jit import scalar

LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
"""float32 numbers in a vector."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


# ---------------------------------------------------------------- memory


@intrinsic
def load(typing_context: Any, array: Any, start: Any) -> Any:
    """Numbers [start, start + LANES) of a contiguous float32 array, whatever its dimensions."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values), _VECTOR.as_pointer())
        return builder.load(place, align=4)

    return vector(array, types.int64), generate


@intrinsic
def load_one(typing_context: Any, array: Any, place: Any) -> Any:
    """Number `place` of a contiguous float32 array in every lane."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _emit_splat(builder, builder.load(_place(context, builder, array, *values)))

    return vector(array, types.int64), generate


@intrinsic
def store(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
    """Write numbers [start, start + LANES)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values[:2]), _VECTOR.as_pointer())
        builder.store(values[2], place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


def _place(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, start: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [start])


# ---------------------------------------------------------------- arithmetic


def _of(emit: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (builder, *values) as Numba wants it."""
    return lambda context, builder, signature, values: emit(builder, *values)


def _emit_splat(builder: ir.IRBuilder, number: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    single = builder.insert_element(nothing, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, nothing, _constant(_INTS, 0))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: Any, flags: tuple[str, ...] = ()) -> Any:
    """LLVM's function of this name for vectors."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, values, fastmath=flags)


def _emit_first(builder: ir.IRBuilder, x: Any, count: Any, rest: Any) -> Any:
    lanes = ir.Constant(_INTS, list(range(LANES)))
    return builder.select(builder.icmp_signed("<", lanes, _emit_splat(builder, builder.trunc(count, _INT))), x, rest)


def _emit_power_of_two(builder: ir.IRBuilder, n: Any) -> Any:
    exponent = builder.add(builder.fptosi(n, _INTS), _constant(_INTS, 127))
    return builder.bitcast(builder.shl(exponent, _constant(_INTS, 23)), _VECTOR)


def _emit_total(builder: ir.IRBuilder, x: Any) -> Any:
    return _call(builder, "vector.reduce.fadd", _FLOAT, ir.Constant(_FLOAT, -0.0), x, flags=("reassoc",))


def _emit_largest(builder: ir.IRBuilder, x: Any) -> Any:
    # LLVM's own maximum of a vector goes number by number, because of NaNs.
    width = LANES
    while width > 1:
        width //= 2
        order = ir.Constant(_INTS, [(lane + width) % LANES for lane in range(LANES)])
        other = builder.shuffle_vector(x, x, order)
        x = builder.select(builder.fcmp_ordered("<", x, other), other, x)
    return builder.extract_element(x, ir.Constant(_INT, 0))


@intrinsic
def splat(context: Any, number: Any) -> Any:
    """The number in every lane."""
    return vector(types.float32), _of(_emit_splat)


@intrinsic
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return vector(vector, vector, vector), _of(lambda builder, *abc: _call(builder, "fma", _VECTOR, *abc))


@intrinsic
def larger(context: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; a where one is NaN."""
    return vector(vector, vector), _of(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))


@intrinsic
def smaller(context: Any, a: Any, b: Any) -> Any:
    """The smaller of each pair; a where one is NaN."""
    return vector(vector, vector), _of(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), b, a))


@intrinsic
def first(context: Any, x: Any, count: Any, rest: Any) -> Any:
    """The first `count` lanes of x, and those of `rest` behind them."""
    return vector(vector, types.int64, vector), _of(_emit_first)


@intrinsic
def floor(context: Any, x: Any) -> Any:
    return vector(vector), _of(lambda builder, x: _call(builder, "floor", _VECTOR, x))


@intrinsic
def power_of_two(context: Any, n: Any) -> Any:
    """2^n of whole numbers in [-126, 127]."""
    return vector(vector), _of(_emit_power_of_two)


@intrinsic
def largest(context: Any, x: Any) -> Any:
    """The largest lane; anything where one is NaN."""
    return types.float32(vector), _of(_emit_largest)


@intrinsic
def total(context: Any, x: Any) -> Any:
    """The sum of all lanes."""
    return types.float32(vector), _of(_emit_total)


def _define(operation: Any, emit: Callable[..., Any]) -> None:
    @type_callable(operation)
    def typer(context: Any) -> Any:
        return lambda a, b: vector if a == b == vector else None

    lower_builtin(operation, _VectorType, _VectorType)(_of(emit))


_define(operator.add, lambda builder, a, b: builder.fadd(a, b))
_define(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_define(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_define(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


@scalar
def exp_lanes(x):
    """`jit.exp` of every lane."""
    x = smaller(larger(x, splat(np.float32(-87))), splat(np.float32(88)))
    n = floor(fma(x, splat(np.float32(1.4426950408889634)), splat(np.float32(0.5))))
    r = fma(n, splat(np.float32(-0.693359375)), x)
    r = fma(n, splat(np.float32(2.12194440e-4)), r)
    p = splat(np.float32(1 / 5040))
    p = fma(p, r, splat(np.float32(1 / 720)))
    p = fma(p, r, splat(np.float32(1 / 120)))
    p = fma(p, r, splat(np.float32(1 / 24)))
    p = fma(p, r, splat(np.float32(1 / 6)))
    p = fma(p, r, splat(np.float32(0.5)))
    p = fma(p, r, splat(np.float32(1)))
    p = fma(p, r, splat(np.float32(1)))
    return p * power_of_two(n)
