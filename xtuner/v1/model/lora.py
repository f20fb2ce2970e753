"""Low-rank adapters in a model's linear layers, addressed by Hugging Face names."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtuner.v1.config import LoRAConfig
from xtuner.v1.config.lora import ALL_LINEAR
from xtuner.v1.ops.exact import exact_linear
from xtuner.v1.ops.lora_linear import lora_linear, lora_parts, merge_lora

if TYPE_CHECKING:
    from .dense import DecoderModel


class LoRALinear(nn.Module):
    """A frozen linear layer, and an adapter for each of some of the parts that are fused in it.

    `lora_a` [P * rank, in] and `lora_b` [rows, rank] hold the P adapters one below the other. Without dropout the
    layer computes with the merged weight, bit for bit the engine's; see `ops/lora_linear.py`.
    """

    def __init__(self, linear: nn.Linear, parts: dict[str, tuple[int, int]], cfg: LoRAConfig) -> None:
        """`parts`: Hugging Face module name -> the rows of the weight that it names, in ascending order."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.parts, self.rank, self.scaling, self.dropout = parts, cfg.rank, cfg.scaling, cfg.dropout
        self.bounds = [row for rows in parts.values() for row in rows]
        self.enabled = True
        self.exact = False
        rows = sum(end - start for start, end in parts.values())
        empty = partial(torch.empty, dtype=torch.float32, device=self.weight.device)
        self.lora_a = nn.Parameter(empty(len(parts) * cfg.rank, linear.in_features))
        self.lora_b = nn.Parameter(empty(rows, cfg.rank))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if not self.enabled:
            return exact_linear(x, self.weight, self.bias) if self.exact else F.linear(x, self.weight, self.bias)
        if self.dropout and torch.is_grad_enabled():
            return self._with_dropout(x)
        return lora_linear(x, self.weight, self.bias, self.lora_a, self.lora_b, self.scaling, self.bounds, self.exact)

    def _with_dropout(self, x: Tensor) -> Tensor:
        """Fused parts see the same mask. There is no merged weight that would give this."""
        out = F.linear(x, self.weight, self.bias)
        low = F.linear(F.dropout(x, self.dropout), self.lora_a.to(x.dtype))
        for part in lora_parts(self.bounds, self.rank):
            out[:, part.out] += self.scaling * F.linear(low[:, part.a], self.lora_b[part.b].to(x.dtype))
        return out

    def merged_weight(self, dtype: torch.dtype) -> Tensor:
        """The full weight with the adapters in it, [out, in]. Collective if the parameters are sharded."""
        weight, lora_a, lora_b = (_full(p) for p in (self.weight, self.lora_a, self.lora_b))
        return merge_lora(weight, lora_a, lora_b, self.scaling, self.bounds, dtype)

    def full_adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(module name, A [rank, in], B [rows, rank]) of each part, float32. Collective if sharded."""
        lora_a, lora_b = _full(self.lora_a), _full(self.lora_b)
        for name, part in zip(self.parts, lora_parts(self.bounds, self.rank), strict=True):
            yield name, lora_a[part.a], lora_b[part.b]


def lora_targets(model: "DecoderModel") -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    """Where adapters can be: by the last part of the Hugging Face name, then by our layer, name and rows.

    A name that also stands for something else than a linear layer (a routed expert) is none.
    """
    targets: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
    excluded = set()
    for name, place in model.hf_params.items():
        layer, _, leaf = place.param.rpartition(".")
        name = name.removesuffix(".weight")
        target = name.rpartition(".")[2]
        if leaf != "weight" or not place.param.startswith("layers."):
            continue
        if type(model.get_submodule(layer)) is nn.Linear:
            targets.setdefault(target, {}).setdefault(layer, {})[name] = (place.start, place.end)
        else:
            excluded.add(target)
    return {target: layers for target, layers in targets.items() if target not in excluded}


def resolve_targets(model: "DecoderModel", names: Sequence[str]) -> list[str]:
    """The targets that `names` stand for, in the model's order.

    Raises:
        ValueError: names that match nothing; lists those that do.
    """
    known = list(lora_targets(model))
    if list(names) == [ALL_LINEAR]:
        return known
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"lora_cfg.target_modules: {', '.join(unknown)} can have no adapter in this {model.config.model_type} "
            "model (only linear layers can: no router, no routed expert, nothing outside of the layers); use "
            f'"{ALL_LINEAR}" or some of {", ".join(known)}.'
        )
    return [name for name in known if name in names]


def add_adapters(model: "DecoderModel", cfg: LoRAConfig) -> None:
    """Freeze the model and give the targets their adapters, in place, not yet filled (`init_adapters`)."""
    model.requires_grad_(False)
    targets = lora_targets(model)
    parts: dict[str, dict[str, tuple[int, int]]] = {}
    for target in resolve_targets(model, cfg.target_modules):
        for layer, names in targets[target].items():
            parts.setdefault(layer, {}).update(names)
    for layer, names in parts.items():
        parent, _, leaf = layer.rpartition(".")
        rows = dict(sorted(names.items(), key=lambda item: item[1]))
        linear = model.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(parent), leaf, LoRALinear(linear, rows, cfg))


def adapted_layers(model: nn.Module) -> Iterator[LoRALinear]:
    """The layers with adapters, in the model's order."""
    return (module for module in model.modules() if isinstance(module, LoRALinear))


def adapted_targets(model: nn.Module) -> list[str]:
    """Last names of the parts that have adapters."""
    return list(dict.fromkeys(name.rpartition(".")[2] for layer in adapted_layers(model) for name in layer.parts))


def init_adapters(model: nn.Module, seed: int) -> None:
    """A uniform in ±1 / sqrt(in), as `nn.Linear` and peft have it, B zero.

    What an adapter gets depends on the seed and its name alone, not on sharding or other targets.
    """
    from .hf import copy_rows

    for layer in adapted_layers(model):
        fan_in = layer.lora_a.shape[1]
        bound = fan_in**-0.5
        for number, name in enumerate(layer.parts):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
            values = torch.empty(layer.rank, fan_in, device="cpu").uniform_(-bound, bound, generator=generator)
            copy_rows(layer.lora_a, values, number * layer.rank)
        copy_rows(layer.lora_b, torch.zeros(layer.lora_b.shape, device="cpu"), 0)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model is the frozen one."""
    layers = list(adapted_layers(model))
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def _full(param: Tensor) -> Tensor:
    from .blocks import gather_whole

    return gather_whole(param.detach())
