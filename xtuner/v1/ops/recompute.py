"""Cheap operations whose results are not kept for the backward but made again from their inputs.

Within `selective(...)` an operation marked `@recomputable` keeps its inputs alone. Whoever saves one of its results
for the backward (a matrix product saves its input, attention its queries and keys) is handed a recipe in its place,
which is followed once in the backward. What no marked operation made is kept: the outputs of matrix products and of
attention.

torch's selective checkpointing reaches the same by catching every kernel launch of a layer, twice: that adds Python to
each of them, and forbids operations that finish their output in place.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

P = ParamSpec("P")
R = TypeVar("R")

_local = threading.local()


def recomputable(operation: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of tensors that is cheaper to run again than its results are to keep.

    Its tensors come as positional arguments. It gives the same bits for the same inputs, and changes nothing else.
    """

    @wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return operation(*args, **kwargs)
        scope: _Scope | None = getattr(_local, "scope", None)
        tensors = [a for a in args if isinstance(a, Tensor)]
        # Sharded tensors are wrappers without memory of their own to be known by.
        if scope is None or any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
            return operation(*args, **kwargs)
        outputs = _Replayed.apply(scope, _Call(operation, args, kwargs), *tensors)
        return outputs[0] if len(outputs) == 1 else outputs

    return call


def selective(forward: Callable[P, R]) -> Callable[P, R]:
    """`forward` with the results of its marked operations made again in the backward. Same values, same gradients."""

    @wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        scope = _Scope()
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, _unpack), _Entered(scope):
            return forward(*args, **kwargs)

    return call


class _Call:
    """One call of an operation, without its tensors; in the backward, from the first use on, its results too."""

    def __init__(self, operation: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.operation, self.kwargs = operation, kwargs
        self.constants = [None if isinstance(a, Tensor) else a for a in args]
        self.places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.needs_grad = [args[i].requires_grad for i in self.places]
        self.replayed: tuple[list[Tensor], tuple[Tensor, ...]] | None = None

    def run(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        args = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        # With gradients enabled, wanted or not: some operations take another path without.
        with torch.enable_grad(), _Entered(None):
            outputs = self.operation(*args, **self.kwargs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def replay(self, tensors: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The inputs, cut from the graph, and the results as functions of them."""
        if self.replayed is None:
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, self.needs_grad, strict=True)]
            self.replayed = leaves, self.run(leaves)
        return self.replayed


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scope, call, *tensors):
        ctx.set_materialize_grads(False)
        outputs = call.run([t.detach() for t in tensors])
        scope.remember(call, tensors, outputs)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        # Whoever saved a result has had its turn: its gradient is among those that come in here.
        leaves, outputs = ctx.call.replay(list(ctx.saved_tensors))
        ctx.call.replayed = None
        given = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad([out for out, _ in given], wanted, [grad for _, grad in given]))
        return None, None, *(next(found) if leaf.requires_grad else None for leaf in leaves)


@dataclass(slots=True)
class _Kept:
    """A saved tensor as it was."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that the backward needs was changed in place after the forward."
            )
        return self.tensor


@dataclass(slots=True)
class _Result:
    """A result of a call, and what the call needs to make it again."""

    call: _Call
    inputs: "list[_Kept | _Remade]"
    index: int
    dtype: torch.dtype
    version: int


@dataclass(slots=True)
class _Remade:
    """A saved tensor that is some view of a result."""

    result: _Result
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        _, outputs = self.result.call.replay([saved.get() for saved in self.result.inputs])
        return outputs[self.result.index].detach().as_strided(self.size, self.stride, self.offset)


def _unpack(saved: _Kept | _Remade) -> Tensor:
    return saved.get()


class _Scope:
    """One forward: which memory holds the result of which call. It keeps none of that memory alive."""

    def __init__(self) -> None:
        self.results: dict[StorageWeakRef, _Result] = {}

    def remember(self, call: _Call, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        inputs = [self.pack(t.detach()) for t in tensors]
        given = {_memory(t) for t in tensors}
        for index, out in enumerate(outputs):
            # A result that is a view of an input costs nothing to keep.
            if (memory := _memory(out)) not in given:
                self.results[memory] = _Result(call, inputs, index, out.dtype, out._version)

    def pack(self, tensor: Tensor) -> _Kept | _Remade:
        """What to keep for a tensor that autograd wants to save."""
        result = self.results.get(_memory(tensor)) if type(tensor) is Tensor else None
        if result is None or tensor._version != result.version or tensor.dtype != result.dtype:
            return _Kept(tensor, tensor._version)
        return _Remade(result, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _memory(tensor: Tensor) -> StorageWeakRef:
    # The address that it is compared by is not given to other memory while the reference exists.
    return StorageWeakRef(tensor.untyped_storage())


class _Entered:
    """Sets the scope of this thread; with None, marked operations run as they are."""

    def __init__(self, scope: _Scope | None) -> None:
        self.scope = scope

    def __enter__(self) -> None:
        self.before = getattr(_local, "scope", None)
        _local.scope = self.scope

    def __exit__(self, *_: Any) -> None:
        _local.scope = self.before
        if self.scope is not None:
            self.scope.results.clear()
