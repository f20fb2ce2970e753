"""Vectors of float32 as values inside Numba kernels.

A sum has the order in which it is written, so sums over rows are written in vectors; loops without sums are left to
the compiler. A product of small matrices is faster by an order if sums stay in registers over its innermost loop,
which the compiler does not find out.
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
_BITS, _SHORTS = ir.VectorType(ir.IntType(1), LANES), ir.VectorType(ir.IntType(16), LANES)


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
def load_first(typing_context: Any, array: Any, start: Any, count: Any, rest: Any) -> Any:
    """Numbers [start, start + count), at most LANES, and those of `rest` behind them. Nothing else is read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values[:2]), _VECTOR.as_pointer())
        kind = ir.FunctionType(_VECTOR, [_VECTOR.as_pointer(), _INT, _BITS, _VECTOR])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0v{LANES}f32")
        return builder.call(function, [place, _INT(4), emit_in_first(builder, values[2]), values[3]])

    return vector(array, types.int64, types.int64, vector), generate


@intrinsic
def load_bfloat16(typing_context: Any, array: Any, start: Any, count: Any) -> Any:
    """As `load_first` with zeros behind, of an int16 array with the bits of bfloat16 numbers."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values[:2]), _SHORTS.as_pointer())
        kind = ir.FunctionType(_SHORTS, [_SHORTS.as_pointer(), _INT, _BITS, _SHORTS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}i16.p0v{LANES}i16")
        arguments = [place, _INT(2), emit_in_first(builder, values[2]), ir.Constant(_SHORTS, None)]
        return emit_widened(builder, builder.call(function, arguments))

    return vector(array, types.int64, types.int64), generate


@intrinsic
def bfloat16_bits(typing_context: Any, number: Any) -> Any:
    """A bfloat16 number, given as float32, as int16."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.trunc(builder.lshr(builder.bitcast(values[0], _INT), _INT(16)), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def store_bfloat16(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
    """Write LANES bfloat16 numbers, given as float32, to an int16 array."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values[:2]), _SHORTS.as_pointer())
        bits = builder.lshr(builder.bitcast(values[2], _INTS), _constant(_INTS, 16))
        builder.store(builder.trunc(bits, _SHORTS), place, align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


def emit_widened(builder: ir.IRBuilder, shorts: Any) -> Any:
    """float32 numbers from the bits of bfloat16 ones."""
    return builder.bitcast(builder.shl(builder.zext(shorts, _INTS), _constant(_INTS, 16)), _VECTOR)


@intrinsic
def load_one(typing_context: Any, array: Any, place: Any) -> Any:
    """Number `place` of a contiguous float32 array in every lane."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return emit_splat(builder, builder.load(_place(context, builder, array, *values)))

    return vector(array, types.int64), generate


@intrinsic
def store(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
    """Write numbers [start, start + LANES)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values[:2]), _VECTOR.as_pointer())
        builder.store(values[2], place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, place: Any) -> Any:
    """Let the line of this number come nearer; beyond the array's end nothing happens."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.bitcast(_place(context, builder, array, *values), ir.IntType(8).as_pointer())
        builder.call(function, [place, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def store_first(typing_context: Any, array: Any, start: Any, count: Any, value: Any) -> Any:
    """Write the first `count` numbers of a vector."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        emit_store_first(builder, _place(context, builder, array, *values[:2]), values[2], values[3])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, vector), generate


def emit_store_first(builder: ir.IRBuilder, place: Any, count: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), _INT, _BITS])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0v{LANES}f32")
    place = builder.bitcast(place, _VECTOR.as_pointer())
    builder.call(function, [value, place, _INT(4), emit_in_first(builder, count)])


def _place(context: Any, builder: ir.IRBuilder, kind: Any, array: Any, start: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [start])


# ---------------------------------------------------------------- arithmetic


def _of(emit: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (builder, *values) as Numba wants it."""
    return lambda context, builder, signature, values: emit(builder, *values)


def emit_splat(builder: ir.IRBuilder, number: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    single = builder.insert_element(nothing, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, nothing, _constant(_INTS, 0))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: Any) -> Any:
    """LLVM's function of this name for vectors."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32")
    return builder.call(function, values)


def emit_in_first(builder: ir.IRBuilder, count: Any) -> Any:
    """Which lanes come before lane `count`."""
    lanes = ir.Constant(_INTS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, emit_splat(builder, builder.trunc(count, _INT)))


def _emit_first(builder: ir.IRBuilder, x: Any, count: Any, rest: Any) -> Any:
    return builder.select(emit_in_first(builder, count), x, rest)


def emit_rounded(builder: ir.IRBuilder, x: Any) -> Any:
    bits, sixteen = builder.bitcast(x, _INTS), _constant(_INTS, 16)
    odd = builder.and_(builder.lshr(bits, sixteen), _constant(_INTS, 1))
    bits = builder.add(bits, builder.add(odd, _constant(_INTS, 0x7FFF)))
    rounded = builder.bitcast(builder.and_(bits, _constant(_INTS, 0xFFFF0000)), _VECTOR)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, rounded)


def _emit_power_of_two(builder: ir.IRBuilder, n: Any) -> Any:
    exponent = builder.add(builder.fptosi(n, _INTS), _constant(_INTS, 127))
    return builder.bitcast(builder.shl(exponent, _constant(_INTS, 23)), _VECTOR)


def _emit_halved(builder: ir.IRBuilder, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """One number of all lanes: each half is joined with the other until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        order = ir.Constant(_INTS, [(lane + width) % LANES for lane in range(LANES)])
        x = join(x, builder.shuffle_vector(x, x, order))
    return builder.extract_element(x, ir.Constant(_INT, 0))


def _emit_total(builder: ir.IRBuilder, x: Any) -> Any:
    return _emit_halved(builder, x, lambda a, b: builder.fadd(a, b))


def _emit_largest(builder: ir.IRBuilder, x: Any) -> Any:
    # LLVM's own maximum of a vector goes number by number, because of NaNs.
    return _emit_halved(builder, x, lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))


@intrinsic
def splat(context: Any, number: Any) -> Any:
    """The number in every lane."""
    return vector(types.float32), _of(emit_splat)


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
def rounded(context: Any, x: Any) -> Any:
    """The nearest bfloat16 numbers, ties to even."""
    return vector(vector), _of(emit_rounded)


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
    """The sum of all lanes, halves first."""
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
    """e^x, relative error below 2e-7. Clamped at x of -87 and 88."""
    x = smaller(larger(x, splat(np.float32(-87))), splat(np.float32(88)))
    n = floor(fma(x, splat(np.float32(1.4426950408889634)), splat(np.float32(0.5))))
    # ln 2 in two parts, the first short enough for n times it to be exact (Cody & Waite 1980).
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
