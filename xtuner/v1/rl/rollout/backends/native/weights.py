"""Filling, emptying and replacing the engine's weights."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import parameter_views, weight_views
from xtuner.v1.ops.bit_sums import prepared_bit_sums
from xtuner.v1.ops.copy_all import copy_all
from xtuner.v1.rl.weight_update.canary import SumOf, SumsBy
from xtuner.v1.rl.weight_update.inventory import DeliveryError, Inventory, WeightUpdateError, some

_AT_ONCE = 64
"""Tensors of a launch."""


def lay_out_by_input(model: nn.Module) -> None:
    """Let the matrices of linear layers lie in memory as [in, out], shapes unchanged.

    For a product with few rows, float32 on a CPU, that saves a third of the time.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


class PlainWeights:
    """Gives a model's parameters up and takes memory for them again, wherever that is."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layout = {name: (param.shape, param.stride()) for name, param in model.named_parameters()}

    def drop(self) -> None:
        """Give the parameters' memory back."""
        for param in self._model.parameters():
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)

    def restore(self) -> None:
        """Allocate the parameters again, with any content."""
        for name, param in self._model.named_parameters():
            param.data = torch.empty_strided(*self._layout[name], dtype=param.dtype, device=param.device)


class WeightReceiver:
    """Copies updates into a model's parameters, which stay where they are."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self._targets: dict[bool, dict[str, Tensor]] = {}
        """By parameter, or by Hugging Face name."""
        self._samples: dict[tuple[str, ...], tuple[list[int], Callable[[], Tensor]]] = {}
        """Numbers of elements and what sums their bits, of weights that were asked for: samples come again."""

    def forget(self) -> None:
        """To be said when parameters are in other memory from now on."""
        self._targets.clear()
        self._samples.clear()

    @torch.no_grad()
    def take(self, buckets: Iterable[WeightBucket]) -> None:
        """Copy a full set of weights. Returns when all of it is launched; raises WeightUpdateError if it is not one."""
        inventory: Inventory | None = None
        try:
            for bucket in buckets:
                if inventory is None:
                    inventory = self._expected(bucket.by_parameter)
                self._copy(inventory.take(bucket), bucket)
        except DeliveryError as error:
            missing = (inventory or self._expected()).missing
            raise WeightUpdateError(f"{error} {len(missing)} weights are missing: {some(missing)}.") from error
        (inventory or self._expected()).check()

    @torch.no_grad()
    def sums(self, names: list[str], dtype: torch.dtype) -> dict[str, SumOf]:
        """`bit_sums` in `dtype` and numbers of elements of what the model has now, of parameters or of weights."""
        sample = tuple(names)
        if sample not in self._samples:
            by_parameter = dict(self._model.named_parameters()).keys() >= set(names)
            values = self._expected(by_parameter).values(names)
            self._samples[sample] = [value.numel() for value in values], prepared_bit_sums(values, dtype)
        elements, sums = self._samples[sample]
        return dict(zip(names, zip(sums().tolist(), elements, strict=True), strict=True))

    def _expected(self, by_parameter: bool = False) -> Inventory:
        if by_parameter not in self._targets:
            self._targets[by_parameter] = (parameter_views if by_parameter else weight_views)(self._model)
        return Inventory(self._targets[by_parameter])

    def _copy(self, pairs: list[tuple[Tensor, Tensor]], bucket: WeightBucket) -> None:
        """target = source. In several parts, so that the device begins while the host goes on."""
        for start in range(0, len(pairs), _AT_ONCE):
            targets, sources = zip(*pairs[start : start + _AT_ONCE], strict=True)
            copy_all(targets, [rounded(s, bucket.dtype, t.dtype) for t, s in zip(targets, sources, strict=True)])


class ReadableWeights:
    """What an engine has to say of its weights; see `ReadsWeights`."""

    sums_by: SumsBy = "weight"
    takes_parameters = True
    dtype: torch.dtype
    _receiver: WeightReceiver
    _obstacle: dict[str, str]

    async def weight_sums(self, keys: list[str]) -> dict[str, SumOf]:
        """Of what the model has now, to the element."""
        if why := self._obstacle.get("start") or self._obstacle.get("weights"):
            raise RuntimeError(f"weight_sums: {why}")
        return self._receiver.sums(keys, self.dtype)


def rounded(source: Tensor, dtype: torch.dtype | None, target_dtype: torch.dtype) -> Tensor:
    """`source` rounded to a bucket's `dtype`, if that is not what the copy to `target_dtype` does anyway."""
    return source if dtype in (None, source.dtype, target_dtype) else source.to(dtype)
