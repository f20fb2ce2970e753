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

_FEATURES = llvm.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8
"""float32 numbers in a vector."""
MULTIPLIES_FLOAT16 = bool(_FEATURES.get("avx512fp16"))
"""Whether there are vectors of twice as many float16 numbers, multiplied as fast."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_BITS, _SHORTS = ir.VectorType(ir.IntType(1), LANES), ir.VectorType(ir.IntType(16), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


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


# Arrays are of float32, or of the bits of bfloat16 (int16) or float16 (uint16), which become float32 on the way. They
# are contiguous, whatever their dimensions.


def _halves(builder: ir.IRBuilder, shorts: Any, kind: types.Type) -> Any:
    """float32 numbers from bits of shorter ones."""
    if kind == types.int16:
        return emit_widened(builder, shorts)
    return builder.fpext(builder.bitcast(shorts, _HALVES), _VECTOR)


def _shorts(builder: ir.IRBuilder, numbers: Any, kind: types.Type) -> Any:
    """The way back: float16 is rounded, bfloat16 must be already."""
    if kind == types.int16:
        return builder.trunc(builder.lshr(builder.bitcast(numbers, _INTS), _constant(_INTS, 16)), _SHORTS)
    return builder.bitcast(builder.fptrunc(numbers, _HALVES), _SHORTS)


@intrinsic
def load(typing_context: Any, array: Any, start: Any) -> Any:
    """Numbers [start, start + LANES)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = _place(context, builder, array, *values)
        if array.dtype == types.float32:
            return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)
        shorts = builder.load(builder.bitcast(place, _SHORTS.as_pointer()), align=2)
        return _halves(builder, shorts, array.dtype)

    return vector(array, types.int64), generate


@intrinsic
def load_first(typing_context: Any, array: Any, start: Any, count: Any, rest: Any) -> Any:
    """Numbers [start, start + count), at most LANES, and those of `rest` behind them. Nothing else is read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place, count, rest = _place(context, builder, array, *values[:2]), values[2], values[3]
        if array.dtype == types.float32:
            return emit_load_first(builder, place, count, rest)
        shorts = emit_load_first(builder, place, count, ir.Constant(_SHORTS, None))
        return _emit_first(builder, _halves(builder, shorts, array.dtype), count, rest)

    return vector(array, types.int64, types.int64, vector), generate


def emit_load_first(builder: ir.IRBuilder, place: Any, count: Any, rest: Any) -> Any:
    """The first `count` numbers of a vector of floats or shorts, and those of `rest`, which is one, behind them."""
    pointer, size, name = rest.type.as_pointer(), *((4, "f32") if rest.type == _VECTOR else (2, "i16"))
    kind = ir.FunctionType(rest.type, [pointer, _INT, _BITS, rest.type])
    function = cgutils.get_or_insert_function(
        builder.module, kind, f"llvm.masked.load.v{LANES}{name}.p0v{LANES}{name}"
    )
    return builder.call(function, [builder.bitcast(place, pointer), _INT(size), emit_in_first(builder, count), rest])


def emit_widened(builder: ir.IRBuilder, shorts: Any) -> Any:
    """float32 numbers from the bits of bfloat16 ones."""
    return builder.bitcast(builder.shl(builder.zext(shorts, _INTS), _constant(_INTS, 16)), _VECTOR)


@intrinsic
def load_one(typing_context: Any, array: Any, place: Any) -> Any:
    """Number `place` of a float32 array in every lane."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return emit_splat(builder, builder.load(_place(context, builder, array, *values)))

    return vector(array, types.int64), generate


@intrinsic
def store(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
    """Write numbers [start, start + LANES)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place, numbers = _place(context, builder, array, *values[:2]), values[2]
        if array.dtype != types.float32:
            numbers = _shorts(builder, numbers, array.dtype)
        builder.store(numbers, builder.bitcast(place, numbers.type.as_pointer()), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def store_apart(typing_context: Any, array: Any, start: Any, step: Any, value: Any) -> Any:
    """Write LANES numbers, each `step` places behind the one before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place, numbers = _place(context, builder, array, *values[:2]), values[3]
        if array.dtype != types.float32:
            numbers = _shorts(builder, numbers, array.dtype)
        for lane in range(LANES):
            target = builder.gep(place, [builder.mul(values[2], ir.IntType(64)(lane))])
            target = builder.bitcast(target, numbers.type.element.as_pointer())
            builder.store(builder.extract_element(numbers, _INT(lane)), target)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, vector), generate


@intrinsic
def store_pairs(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
    """Write float16 numbers to places [start, start + LANES) of a float32 array, each twice."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *values[:2]), _INTS.as_pointer())
        halves = builder.zext(_shorts(builder, values[2], types.uint16), _INTS)
        builder.store(builder.or_(halves, builder.shl(halves, _constant(_INTS, 16))), place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


@intrinsic
def is_float16(typing_context: Any, array: Any) -> Any:
    """Whether an array is of the bits of float16 numbers; known when a kernel is compiled."""
    return types.boolean(array), lambda *_: ir.Constant(ir.IntType(1), array.dtype == types.uint16)


@intrinsic
def is_bfloat16(typing_context: Any, array: Any) -> Any:
    """Whether an array is of the bits of bfloat16 numbers; known when a kernel is compiled."""
    return types.boolean(array), lambda *_: ir.Constant(ir.IntType(1), array.dtype == types.int16)


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
