"""A training engine's weights on their way out."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import export_hf_batches, weight_views
from xtuner.v1.model.lora import adapted_layers

from .host_memory import Lane, mark, wait


class WeightSource:
    """Buckets of a model's weights, by Hugging Face name.

    Weights that are cut over ranks, or merged with adapters, are gathered bucket by bucket, on a GPU one bucket ahead
    of the one in use. If all of them lie whole on this rank's device, they can be lent as they lie instead.
    """

    def __init__(self, model: DecoderModel, device: torch.device) -> None:
        self._model, self._device = model, device

    def buckets(self, bucket_bytes: int, dtype: torch.dtype, cast: bool = True) -> Iterator[WeightBucket]:
        """See `TrainEngine.weight_buckets`."""
        if cast or self._own is None:
            batches = export_hf_batches(self._model, dtype, bucket_bytes)
            buckets = chain.from_iterable(_group(batch.items(), None, bucket_bytes) for batch in batches)
            yield from _ahead(buckets, self._lane, self._device)
        else:
            for tensors, kept in zip(self._own, (dtype, None), strict=True):
                yield from _group(tensors.items(), kept, bucket_bytes)

    @cached_property
    def _lane(self) -> Lane:
        """One for all updates: memory that was freed on a stream serves that stream alone."""
        return Lane(self._device)

    @cached_property
    def _own(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """The parameters themselves, by name: those to be rounded, and those that stay float32. None if they do not lie
        whole on this rank's device, or are not what is to go out.

        Their memory is exchanged when they are parked, but never they themselves.
        """
        if next(adapted_layers(self._model), None) is not None:
            return None
        for param in self._model.parameters():
            cut = isinstance(param, DTensor) and param.device_mesh.size() > 1
            if cut or param.device.type != self._device.type:
                return None
        exact = {name for name, place in self._model.hf_params.items() if place.param in self._model.float32_names}
        views = weight_views(self._model)
        return {n: t for n, t in views.items() if n not in exact}, {n: t for n, t in views.items() if n in exact}


def _group(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[WeightBucket]:
    """Buckets of at most `bucket_bytes` in `dtype`, or of one tensor that is larger."""
    bucket, size = WeightBucket({}, dtype), 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if bucket.tensors and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = WeightBucket({}, dtype), 0
        bucket.tensors[name] = tensor
        size += num_bytes
    if bucket.tensors:
        yield bucket


def _ahead(buckets: Iterator[WeightBucket], lane: Lane, device: torch.device) -> Iterator[WeightBucket]:
    """The same, on a GPU each gathered while the one before is in use."""
    if device.type != "cuda":
        yield from buckets
        return

    def fetch() -> tuple[WeightBucket | None, torch.cuda.Event | None]:
        lane.wait(mark(device))  # it takes the memory of buckets that the computing stream may still read
        with torch.cuda.stream(lane.stream):
            return next(buckets, None), lane.mark()

    bucket, arrived = fetch()
    while bucket is not None:
        following = fetch()
        wait(device, arrived)
        yield bucket
        bucket, arrived = following
