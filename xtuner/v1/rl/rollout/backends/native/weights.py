"""Filling, emptying and replacing the engine's weights."""

from collections.abc import Iterable

import torch
from torch import nn

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import load_hf_tensor


class WeightUpdateError(RuntimeError):
    """An update did not bring every weight exactly once. The model holds a mixture and must not serve."""


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


def replace_weights(model: DecoderModel, buckets: Iterable[WeightBucket]) -> None:
    """Copy a full set of weights into the model's memory. Raises WeightUpdateError if it is not one."""
    seen: set[str] = set()
    double: list[str] = []
    unknown: list[str] = []
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            if name in seen:
                double.append(name)
            seen.add(name)
            try:
                load_hf_tensor(model, name, tensor)
            except KeyError:
                unknown.append(name)
            except ValueError as error:
                raise WeightUpdateError(f"the weights do not fit the engine's model: {error}") from error
    problems = {
        "missing": sorted(set(model.hf_params) - seen),
        "sent twice": double,
        "unknown": unknown,
    }
    if any(problems.values()):
        text = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise WeightUpdateError(f"the engine did not get every weight exactly once. {text}")


def _some(names: list[str], show: int = 5) -> str:
    return ", ".join(names[:show]) + (", …" if len(names) > show else "")
