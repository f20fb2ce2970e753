"""The optimizer: rules of update, each over the local parts of some of the parameters."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from xtuner.v1.config import AdamWConfig, MuonConfig, OptimConfig
from xtuner.v1.model.dense import DecoderModel

from .moments import MomentKeeper, Part
from .muon import MuonRule
from .placement import local_part


class UpdateRule(Protocol):
    """How values change, given gradients and moments."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments, in the order of `Part.moments`."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether a parameter may be updated in runs of elements."""
        ...

    def update(self, parts: list[Part], lr: float, weight_decay: float) -> None:
        """One step, in place."""
        ...


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """Loshchilov & Hutter 2019 (arXiv 1711.05101), by torch's kernels."""

    betas: tuple[float, float]
    eps: float
    foreach: bool | None
    fused: bool | None
    moments = ("exp_avg", "exp_avg_sq")
    elementwise = True

    def update(self, parts: list[Part], lr: float, weight_decay: float) -> None:
        parts = [part for part in parts if part.value.numel()]
        if not parts:
            return
        # Torch counts the steps up itself, in tensors where its kernel can read them.
        device = parts[0].value.device if self.fused else torch.device("cpu")
        done = [part.step - 1.0 for part in parts]
        # Filling is a kernel like others, while copying numbers to the device would wait for all before it.
        alike = len(set(done)) == 1
        steps = torch.full((len(done),), done[0], device=device) if alike else torch.tensor(done, device=device)
        first, second = ([part.moments[i] for part in parts] for i in range(2))
        values, grads = [part.value for part in parts], [part.grad for part in parts]
        adamw(
            values, grads, first, second, [], list(steps.unbind()),
            foreach=self.foreach, fused=self.fused, amsgrad=False, maximize=False,
            beta1=self.betas[0], beta2=self.betas[1], lr=lr, weight_decay=weight_decay, eps=self.eps,
        )  # fmt: skip


class Optimizer(torch.optim.Optimizer):
    """Groups of parameters, each with its rule. Steps and moments of a parameter are made with the first update.

    `state[parameter]` holds `step` and, by the rule's names, the moments: plain tensors of the shape of the
    parameter's local part, in the type and place in which they are kept.
    """

    def __init__(self, groups: list[dict[str, Any]], rules: list[UpdateRule], lr: float, keeper: MomentKeeper) -> None:
        super().__init__(groups, {"lr": lr})
        self.rules, self.keeper = rules, keeper
        self._index = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    @torch.no_grad()
    def make_state(self) -> None:
        """Steps and zero moments of all parameters, if they are not there yet."""
        if self.state:
            return
        for group, rule in zip(self.param_groups, self.rules, strict=True):
            locals_ = [local_part(p) for p in group["params"]]
            by_name = {name: self.keeper.zeros(locals_) for name in rule.moments}
            for i, param in enumerate(group["params"]):
                self.state[param] = {"step": 0, **{name: tensors[i] for name, tensors in by_name.items()}}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective where a rule is."""
        self.make_state()
        for group, rule in zip(self.param_groups, self.rules, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                self.state[param]["step"] += 1
            for bucket in self.keeper.lend(self._buckets([self._whole(p, rule) for p in params], rule)):
                rule.update(bucket, group["lr"], group["weight_decay"])

    def clipped_gradients(self) -> list[Tensor]:
        """Gradients of the groups whose updates grow with them."""
        groups = (group for group in self.param_groups if group["clip"])
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def moments_of(self, param: Tensor) -> dict[str, Tensor]:
        """A parameter's moments by name, as they are kept; empty before the first update."""
        return {name: value for name, value in self.state.get(param, {}).items() if isinstance(value, Tensor)}

    def device_moments(self) -> list[Tensor]:
        """Moments in the device's memory."""
        if self.keeper.in_host:
            return []
        return [value for param in self.state for value in self.moments_of(param).values()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not offered: torch would put all moments on the device in float32."""
        raise RuntimeError("moments are saved and loaded by save_train_state and load_train_state.")

    def _whole(self, param: nn.Parameter, rule: UpdateRule) -> Part:
        assert param.grad is not None
        state = self.state[param]
        kept = [state[name] for name in rule.moments]
        return Part(param, self._index[param], 0, local_part(param), local_part(param.grad), kept, state["step"])

    def _buckets(self, parts: list[Part], rule: UpdateRule) -> list[list[Part]]:
        """The parts in groups of at most `keeper.bucket_numel` elements, or of one parameter that cannot be cut."""
        most = self.keeper.bucket_numel
        if most is None:
            return [parts]
        buckets: list[list[Part]] = [[]]
        size = 0
        for part in parts:
            for run in _runs(part, most) if rule.elementwise else [part]:
                # For a collective rule the ranks must agree on the buckets, so they count what all of them count.
                numel = run.value.numel() if rule.elementwise else part.param.numel()
                if buckets[-1] and size + numel > most:
                    buckets.append([])
                    size = 0
                buckets[-1].append(run)
                size += numel
        return buckets


def _runs(part: Part, most: int) -> Iterator[Part]:
    """The part, cut into runs of at most `most` elements."""
    if part.value.numel() <= most:
        yield part
        return
    for start in range(0, part.value.numel(), most):
        value, grad, *kept = (t.view(-1)[start : start + most] for t in (part.value, part.grad, *part.kept))
        yield Part(part.param, part.index, start, value, grad, kept, part.step)


def build_optimizer(model: DecoderModel, cfg: OptimConfig, device: torch.device) -> Optimizer:
    """The optimizer of all parameters that are trained. `device` is where their values lie."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = {p for name, p in trained if name.startswith("layers.") and p.dim() == 2}
    adamw_rule, muon_rule = _rules(model, cfg)
    groups: list[dict[str, Any]] = []
    rules: list[UpdateRule] = []
    for rule, chosen in (
        (muon_rule, [p for _, p in trained if p in hidden]),
        (adamw_rule, [p for _, p in trained if muon_rule is None or p not in hidden]),
    ):
        if rule is None:
            continue
        matrices = [p for p in chosen if p.dim() > 1 or cfg.decay_norms_and_biases]
        vectors = [p for p in chosen if p.dim() <= 1 and not cfg.decay_norms_and_biases]
        for params, decay in ((matrices, cfg.weight_decay), (vectors, 0.0)):
            if params:
                groups.append({"params": params, "weight_decay": decay, "clip": rule is adamw_rule})
                rules.append(rule)
    keeper = MomentKeeper(device, cfg.moment_dtype, cfg.swap_optimizer and device.type == "cuda")
    return Optimizer(groups, rules, cfg.lr, keeper)


def _rules(model: DecoderModel, cfg: OptimConfig) -> tuple[AdamWRule, MuonRule | None]:
    if isinstance(cfg, AdamWConfig):
        fused = cfg.fused if cfg.fused is not None else cfg.foreach is None
        return AdamWRule(cfg.betas, cfg.eps, cfg.foreach if not fused else None, fused or None), None
    if isinstance(cfg, MuonConfig):
        return AdamWRule(cfg.betas, cfg.eps, None, True), MuonRule(model, cfg)
    raise TypeError(f"optim_cfg is a {type(cfg).__name__}; AdamWConfig and MuonConfig are known.")
