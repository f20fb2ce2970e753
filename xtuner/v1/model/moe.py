"""Mixture of experts: the router, the experts, and the block that takes an MLP's place."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtuner.v1.ops.clamped_swiglu import clamped_swiglu
from xtuner.v1.ops.exact_experts import (
    exact_combine_tokens,
    exact_grouped_mm,
    exact_router_logits,
    exact_shares,
)
from xtuner.v1.ops.expert_exchange import compute_on_owners
from xtuner.v1.ops.expert_order import ExpertOrder, combine_tokens, spread_tokens
from xtuner.v1.ops.grouped_mm import grouped_mm
from xtuner.v1.ops.swiglu import swiglu

from .dense import GatedMLP
from .moe_config import MoEModelConfig, RouterConfig


class RouterStats(NamedTuple):
    """Sums over the rows of a pack, each taken as often as its samples hold it: load and auxiliary losses."""

    assigned: Tensor
    """float32 [E]: rows that chose each expert. No gradient."""
    prob_sum: Tensor
    """float32 [E]: sum of each expert's probability (the scores divided by their sum)."""
    z_sum: Tensor
    """float32 []: sum of logsumexp(logits)²."""
    replayed: Tensor
    """float32 [2]: choices that were given, and those among them that the router would not have made. No gradient."""


class Router(nn.Module):
    """Chooses K experts for every token."""

    def __init__(self, config: MoEModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.top_k, self.compute_dtype = config.router, config.num_experts_per_tok, config.router_dtype
        experts, trained = config.n_routed_experts, not config.freeze_routers
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=dtype), trained)
        self.bias = nn.Parameter(torch.empty(experts, dtype=dtype), trained) if config.router.bias else None
        # Differences of this bias decide between experts: half precision would change the choice.
        correction = torch.empty(experts, dtype=torch.float32) if config.router.correction_bias else None
        self.e_score_correction_bias = nn.Parameter(correction, False) if correction is not None else None
        self.exact = False

    def forward(
        self, x: Tensor, row_weights: Tensor | None = None, routed_experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, RouterStats | None]:
        """x [T, H] -> weights float32 [T, K], experts int64 [T, K], and the stats if there are row weights int [T].

        routed_experts int [T, K]: experts to use, a row of -1 for those of the router's own choice. Their weights are
        made of this router's scores in either case, and the gradient with them (Ma et al. 2025, arXiv 2510.11370).
        """
        logits = exact_router_logits(x, self.weight) if self.exact else self._logits(x)
        scores = logits.softmax(-1) if self.config.scoring_func == "softmax" else logits.sigmoid()
        own = choose_experts(scores, self.top_k, self.config, self.e_score_correction_bias)
        ids = own
        if routed_experts is not None:
            ids = torch.where(routed_experts[:, :1] >= 0, routed_experts.long(), own)
        weights = expert_weights(scores, ids, self.config, self.exact)
        if row_weights is None:
            return weights, ids, None
        row_weights = row_weights.float()
        return weights, ids, _stats(logits, scores, ids, row_weights, _replayed(own, routed_experts, row_weights))

    def _logits(self, x: Tensor) -> Tensor:
        bias = self.bias.to(self.compute_dtype) if self.bias is not None else None
        return F.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype), bias).float()


@torch.no_grad()
def choose_experts(scores: Tensor, top_k: int, config: RouterConfig, correction: Tensor | None) -> Tensor:
    """scores float32 [T, E], correction float32 [E] -> experts int64 [T, K].

    With groups: the best `topk_group` of them by the sum of their two best scores (DeepSeek-V3, arXiv 2412.19437).
    """
    wanted = scores if correction is None else scores + correction
    if config.topk_group < config.n_group:
        by_group = wanted.unflatten(-1, (config.n_group, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        out = torch.ones_like(best, dtype=torch.bool)
        out.scatter_(-1, best.topk(config.topk_group, dim=-1).indices, False)
        wanted = by_group.masked_fill(out[..., None], -torch.inf).flatten(-2)
    return wanted.topk(top_k, dim=-1).indices


def expert_weights(scores: Tensor, ids: Tensor, config: RouterConfig, exact: bool = False) -> Tensor:
    """scores float32 [T, E], experts int64 [T, K] -> their weights float32 [T, K]."""
    weights = scores.gather(-1, ids)
    if config.norm_topk_prob:
        # Sigmoids may all be 0.
        weights = exact_shares(weights) if exact else weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights * config.router_scaling_factor


def _stats(logits: Tensor, scores: Tensor, ids: Tensor, row_weights: Tensor, replayed: Tensor) -> RouterStats:
    probs = scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)
    chosen = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
    z_sum = row_weights @ logits.logsumexp(-1).square()
    return RouterStats(row_weights @ chosen, row_weights @ probs, z_sum, replayed)


@torch.no_grad()
def _replayed(own: Tensor, given: Tensor | None, row_weights: Tensor) -> Tensor:
    """See `RouterStats.replayed`."""
    if given is None:
        return row_weights.new_zeros(2)
    known = (given >= 0).sum(1)
    other = ((given >= 0) & (given[:, :, None] != own[:, None]).all(2)).sum(1)
    return torch.stack((row_weights @ known.float(), row_weights @ other.float()))


class StackedLinear(nn.Module):
    """A projection for each expert.

    The matrices lie one below the other, weight [E * out, in], so that one matrix of one expert is a range of rows
    as in every other parameter; they are used as [E, out, in]. `transposed` ones are [E * in, out]. An expert's output
    columns may be those of `woven` matrices in turn, which only an optimizer must know.
    """

    def __init__(
        self, experts: int, fan_in: int, fan_out: int, bias: bool, dtype: torch.dtype, transposed: bool = False,
        woven: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fan_in, self.fan_out, self.transposed, self.woven = fan_in, fan_out, transposed, woven
        rows, columns = (fan_in, fan_out) if transposed else (fan_out, fan_in)
        self.weight = nn.Parameter(torch.empty(experts * rows, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts * fan_out, dtype=dtype)) if bias else None
        self.exact = False

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [M, in] sorted by expert, ends int32 [E] (see `grouped_mm`) -> [M, out]; E are the experts held here."""
        weight = _held(self.weight)
        if self.transposed:
            weight = weight.view(-1, self.fan_in, self.fan_out).transpose(1, 2)
        else:
            weight = weight.view(-1, self.fan_out, self.fan_in)
        out = (exact_grouped_mm if self.exact else grouped_mm)(x, weight, ends)
        if self.bias is None:
            return out
        sizes = ends.diff(prepend=ends.new_zeros(1))
        bias = _held(self.bias).view(-1, self.fan_out)
        return out + bias.repeat_interleave(sizes, dim=0, output_size=x.shape[0])


def _held(param: Tensor) -> Tensor:
    """The part of a parameter that is cut over expert-parallel ranks."""
    return param.to_local() if isinstance(param, DTensor) else param


class Experts(nn.Module):
    """All experts of a layer. No token is dropped, whatever the load."""

    def __init__(self, config: MoEModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = experts
        self.group: dist.ProcessGroup | None = None
        """The ranks over which the experts are cut, in order; None: all are here."""
        self.activation = _activation(config)
        self.exact = False
        bias, stacked = config.expert_bias, config.experts_are_stacked
        woven = 2 if config.expert_act == "clamped_swiglu" else 1  # gates in the even columns, ups in the odd ones
        self.gate_up_proj = StackedLinear(experts, hidden, 2 * inner, bias, dtype, stacked, woven)
        self.down_proj = StackedLinear(experts, inner, hidden, bias, dtype, stacked)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts int64 [T, K] and their weights float32 [T, K] -> [T, H]."""
        order = ExpertOrder.build(ids, self.num_experts)
        rows = spread_tokens(x, order)
        if self.group is None:
            out = self.compute(rows, order.ends)
        else:
            out = compute_on_owners(rows, order.ends, self.group, self.compute)
        return (exact_combine_tokens if self.exact else combine_tokens)(out, order, weights)

    def compute(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [M, H] sorted by expert -> [M, H]."""
        return self.down_proj(self.activation(self.gate_up_proj(x, ends)), ends)


def _activation(config: MoEModelConfig) -> Callable[[Tensor], Tensor]:
    """What stands between an expert's two projections: [M, 2 * I] -> [M, I]."""
    if config.expert_act == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    return swiglu


class MoEBlock(nn.Module):
    """Routed experts, and beside them the shared ones if the model has any."""

    def __init__(self, config: MoEModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(config, dtype)
        self.experts = Experts(config, dtype)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config.hidden_size, shared, False, dtype) if shared else None

    def forward(
        self, x: Tensor, row_weights: Tensor | None = None, routed_experts: Tensor | None = None,
        chosen: list[Tensor] | None = None,
    ) -> tuple[Tensor, RouterStats | None]:  # fmt: skip
        """x [T, H] -> [T, H], and the router's stats if there are row weights int [T].

        routed_experts: see `Router`. The experts that are used, int64 [T, K], are appended to `chosen`.
        """
        weights, ids, stats = self.gate(x, row_weights, routed_experts)
        if chosen is not None:
            chosen.append(ids)
        out = self.experts(x, ids, weights)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, stats
