"""Numba kernels on torch's own threads."""

import ctypes
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import part

_BYTES, _INT, _INT32 = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
_BODY = ir.FunctionType(ir.VoidType(), [_BYTES])
_START = "GOMP_parallel"
_C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, _C_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _start_alone(body: Any, data: Any, threads: int, flags: int) -> None:
    body(data)


def _start_of_torch() -> Any:
    """How torch's OpenMP runtime starts a parallel region; looked up through torch, whatever runtime it came with.

    Numba finds a runtime of its own, and two pools of threads that wait for work take the processors from each other.
    """
    try:
        return getattr(ctypes.CDLL(torch._C.__file__), _START)
    except (AttributeError, OSError):
        return _start_alone


llvm.add_symbol(_START, ctypes.cast(_start_of_torch(), ctypes.c_void_p).value)


def num_threads() -> int:
    """How many threads a kernel may use: as many as torch."""
    return torch.get_num_threads()


@intrinsic
def run_blocks(typing_context: Any, function: Any, blocks: Any, threads: Any, arguments: Any) -> Any:
    """function(block, *arguments) for every block in [0, blocks), each in one of `threads` threads.

    A thread takes the next block when it is done with one, so blocks may differ in size. They must not write the
    same places: then the result does not depend on the threads. `function` is a compiled kernel, `arguments` a tuple.

    Raises:
        MemoryError: a block could not get its memory.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        call = typing_context.resolve_function_type(function, (types.int64, *arguments.types), {})
        compiled = function.dispatcher.get_compile_result(call)
        # The next block, the number of blocks, whether one has failed, and the arguments.
        work_type = ir.LiteralStructType([_INT, _INT, _INT, values[3].type])
        name = context.mangler(f"blocks_of_{compiled.fndesc.mangled_name}", ())
        body = builder.module.globals.get(name)
        if body is None:  # else this kernel has called it before
            body = ir.Function(builder.module, _BODY, name=name)
            body.linkage = "internal"
            _fill_body(context, body, work_type, compiled, (types.int64, *arguments.types))
        context.active_code_library.add_linking_library(compiled.library)

        work = cgutils.alloca_once(builder, work_type)
        none = ir.Constant(_INT, 0)
        builder.store(cgutils.pack_struct(builder, [none, values[1], none, values[3]]), work)
        data = builder.bitcast(work, _BYTES)
        more = builder.and_(*(builder.icmp_signed(">", value, ir.Constant(_INT, 1)) for value in values[1:3]))
        with builder.if_else(more) as (many, one):
            with many:
                start = cgutils.get_or_insert_function(
                    builder.module, ir.FunctionType(ir.VoidType(), [_BODY.as_pointer(), _BYTES, _INT32, _INT32]), _START
                )
                builder.call(start, [body, data, builder.trunc(values[2], _INT32), ir.Constant(_INT32, 0)])
            with one:
                builder.call(body, [data])
        failed = builder.load(cgutils.gep_inbounds(builder, work, 0, 2))
        with builder.if_then(builder.icmp_signed("!=", failed, none), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("no memory for a block of a kernel",))
        return context.get_dummy_value()

    return types.void(function, types.int64, types.int64, arguments), generate


def _fill_body(context: Any, body: ir.Function, work_type: ir.Type, compiled: Any, arguments: tuple[Any, ...]) -> None:
    """What each thread does: take blocks until there are none."""
    builder = ir.IRBuilder(body.append_basic_block("entry"))
    work = builder.bitcast(body.args[0], work_type.as_pointer())
    blocks = builder.load(cgutils.gep_inbounds(builder, work, 0, 1))
    values = cgutils.unpack_tuple(builder, builder.load(cgutils.gep_inbounds(builder, work, 0, 3)))
    function = context.declare_function(builder.module, compiled.fndesc)
    take, run, done = (body.append_basic_block(name) for name in ("take", "run", "done"))
    one = ir.Constant(_INT, 1)
    builder.branch(take)
    builder.position_at_end(take)
    block = builder.atomic_rmw("add", cgutils.gep_inbounds(builder, work, 0, 0), one, "monotonic")
    builder.cbranch(builder.icmp_signed("<", block, blocks), run, done)
    builder.position_at_end(run)
    status, _ = context.call_conv.call_function(builder, function, types.none, arguments, [block, *values])
    with builder.if_then(status.is_error, likely=False):
        builder.store(one, cgutils.gep_inbounds(builder, work, 0, 2))
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()


@part
def sum_rows(partial, out):
    """Add up what blocks left, one row of `partial` [blocks, N] after the other: the same sum in every run."""
    for j in range(out.size):
        out[j] = 0
    for i in range(partial.shape[0]):
        for j in range(out.size):
            out[j] += partial[i, j]
