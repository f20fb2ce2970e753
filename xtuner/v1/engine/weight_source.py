"""A training engine's weights on their way out."""

from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import export_batches, export_hf_batches, parameter_views, weight_views
from xtuner.v1.model.lora import adapted_layers

from .host_memory import Lane, mark, wait


class WeightSource:
    """Buckets of a model's weights, by Hugging Face name or by parameter.

    Weights that are cut over ranks, or merged with adapters, are gathered bucket by bucket, on a GPU one bucket ahead
    of the one in use. If all of them lie whole on this rank's device, they can be lent as they lie instead.
    """

    def __init__(self, model: DecoderModel, device: torch.device) -> None:
        self._model, self._device = model, device

    def buckets(
        self, bucket_bytes: int, dtype: torch.dtype, cast: bool = True, by_parameter: bool = False
    ) -> Iterator[WeightBucket]:
        """See `TrainEngine.weight_buckets`."""
        if cast or not self._lies_here:
            batches = (export_batches if by_parameter else export_hf_batches)(self._model, dtype, bucket_bytes)
            buckets = chain.from_iterable(_group(batch, None, bucket_bytes, by_parameter) for batch in batches)
            yield from _ahead(buckets, bucket_bytes, self._lane, self._device)
        else:
            lent = self._own_parameters if by_parameter else self._own_weights
            for tensors, kept in zip(lent, (dtype, None), strict=True):
                yield from _group(tensors, kept, bucket_bytes, by_parameter)

    @cached_property
    def _lane(self) -> Lane:
        """One for all updates: memory that was freed on a stream serves that stream alone."""
        return Lane(self._device)

    @cached_property
    def _lies_here(self) -> bool:
        """Whether the parameters lie whole on this rank's device, and are what is to go out."""
        if next(adapted_layers(self._model), None) is not None:
            return False
        params = list(self._model.parameters())
        cut = any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in params)
        return not cut and all(p.device.type == self._device.type for p in params)

    # The parameters themselves: those to be rounded, and those that stay float32. Their memory is exchanged when they
    # are parked, but never they themselves.

    @cached_property
    def _own_parameters(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return _split(parameter_views(self._model), self._model.float32_names)

    @cached_property
    def _own_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        exact = {name for name, place in self._model.hf_params.items() if place.param in self._model.float32_names}
        return _split(weight_views(self._model), exact)


def _split(tensors: dict[str, Tensor], names: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those without and those with these names."""
    return {n: t for n, t in tensors.items() if n not in names}, {n: t for n, t in tensors.items() if n in names}


def _group(
    tensors: dict[str, Tensor], dtype: torch.dtype | None, bucket_bytes: int, by_parameter: bool
) -> Iterator[WeightBucket]:
    """Buckets of at most `bucket_bytes` in `dtype`, or of one tensor that is larger."""
    bucket, size = WeightBucket({}, dtype, by_parameter=by_parameter), 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket.tensors and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = WeightBucket({}, dtype, by_parameter=by_parameter), 0
        bucket.tensors[name] = tensor
        size += num_bytes
    if bucket.tensors:
        yield bucket


def _ahead(
    buckets: Iterator[WeightBucket], bucket_bytes: int, lane: Lane, device: torch.device
) -> Iterator[WeightBucket]:
    """The same, on a GPU each gathered while the one before is in use, if that is of at most `bucket_bytes`."""
    if device.type != "cuda":
        yield from buckets
        return

    def fetch() -> tuple[WeightBucket | None, torch.cuda.Event | None]:
        lane.wait(mark(device))  # it takes the memory of buckets that the computing stream may still read
        with torch.cuda.stream(lane.stream):
            return next(buckets, None), lane.mark()

    bucket, arrived = fetch()
    while bucket is not None:
        following = fetch() if bucket.num_bytes <= bucket_bytes else None
        wait(device, arrived)
        yield bucket
        bucket, arrived = following or fetch()
