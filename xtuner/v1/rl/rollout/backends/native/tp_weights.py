"""Weights of a model that is cut over ranks: each copies its part of what every rank is given whole."""

from collections.abc import Iterator

import torch
from torch import Tensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.engine.placement import local_part
from xtuner.v1.model.blocks import gather_all
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import places_of_rows
from xtuner.v1.ops.bit_sums import bit_sums
from xtuner.v1.rl.weight_update.canary import SumOf
from xtuner.v1.rl.weight_update.inventory import Inventory, WeightUpdateError

from .weights import PlainWeights, WeightReceiver

_AT_ONCE = 16
"""Weights that are put together from all ranks' parts."""


class CutWeights(PlainWeights):
    """Gives up the memory of a cut model's parameters, and takes it again, in place: they are views of DTensors."""

    def __init__(self, model: DecoderModel) -> None:
        self._storages = [local_part(param.detach()).untyped_storage() for param in model.parameters()]
        self._sizes = [storage.nbytes() for storage in self._storages]

    def drop(self) -> None:
        """Give the memory back."""
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Take it again, with any content."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)


class CutReceiver(WeightReceiver):
    """Copies updates into a cut model; all its ranks get the same ones."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model)
        self._places = {name: list(_places(model, name)) for name in model.hf_params}

    def _expected(self, by_parameter: bool = False) -> Inventory:
        if by_parameter:
            raise WeightUpdateError("an engine that is cut over ranks takes weights by Hugging Face name alone.")
        return _CutInventory(self._model)

    @torch.no_grad()
    def sums(self, names: list[str], dtype: torch.dtype) -> dict[str, SumOf]:
        """Collective. A few weights at a time are put together: the cache has the rest of the memory."""
        found: dict[str, SumOf] = {}
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            values = self._expected().values(some)
            elements = (value.numel() for value in values)
            found |= zip(some, zip(bit_sums(values, dtype).tolist(), elements, strict=True), strict=True)
        return found

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], bucket: WeightBucket) -> None:
        parts = [
            (target, tensor[index])
            for name, tensor in bucket.tensors.items()
            for target, index in self._places.get(name, ())
        ]
        super()._copy(parts, bucket)


def _places(model: DecoderModel, name: str) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Views of what this rank holds of a weight, and which part of it each is."""
    param, start, end, _ = model.hf_params[name]
    return places_of_rows(model.get_parameter(param).detach(), start, end - start, model.row_orders.get(param))


class _CutInventory(Inventory):
    def __init__(self, model: DecoderModel) -> None:
        self._model, shapes = model, {}
        for name, place in model.hf_params.items():
            param = model.get_parameter(place.param)
            shape = (place.end - place.start, *param.shape[1:])
            shapes[name] = torch.empty(shape, dtype=param.dtype, device="meta")
        super().__init__(shapes)

    def values(self, names: list[str]) -> list[Tensor]:
        """Collective: the parts of all ranks, put together."""
        places = [self._model.hf_params[name] for name in names]
        params = {place.param: self._model.get_parameter(place.param).detach() for place in places}
        wanted = [(param, param.dtype, self._model.row_orders.get(name)) for name, param in params.items()]
        wholes = dict(zip(params, gather_all(wanted), strict=True))
        return [wholes[place.param][place.start : place.end] for place in places]
