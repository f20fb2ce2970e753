"""What the routers add to the policy loss, and how equally they load the experts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from xtuner.v1.data_proto import PackedBatch
from xtuner.v1.model import MoEModelConfig
from xtuner.v1.model.moe import RouterStats


def segment_counts(pack: PackedBatch) -> list[int]:
    """How many samples hold each segment: padding none, a shared prompt as many as it has responses."""
    counts = [0] * len(pack.layout.lengths)
    for prefix in pack.layout.prefix:
        if prefix >= 0:
            counts[prefix] += 1
    counts = [max(1, count) for count in counts]
    padding = pack.num_padding
    for segment in reversed(range(len(counts))):
        if padding <= 0:
            break
        padding -= pack.layout.lengths[segment]
        counts[segment] = 0
    return counts


def row_counts(pack: PackedBatch) -> Tensor:
    """int32 [T]: how many samples hold each row, so that sums over rows do not depend on how samples are packed."""
    counts, lengths = torch.tensor([segment_counts(pack), pack.layout.lengths], dtype=torch.int32)
    return counts.repeat_interleave(lengths).to(pack.input_ids.device)


def num_rows(packs: Sequence[PackedBatch]) -> int:
    """Sum of `row_counts`."""
    return sum(
        count * length
        for pack in packs
        for count, length in zip(segment_counts(pack), pack.layout.lengths, strict=True)
    )


class RouterLoss:
    """The auxiliary losses of the packs of one optimizer step.

    Every token of the step has the same weight, whichever rank and pack it is in. The z-loss therefore does not
    depend on the split. The balancing loss needs each expert's share f of all assignments, which is known in full
    only with the last pack: a pack is given f of what all ranks have seen so far. So with one pack a rank, it is the
    loss of the whole step however many ranks share it out.
    """

    def __init__(self, config: MoEModelConfig, rows: float) -> None:
        """rows: `num_rows` of all packs of all ranks."""
        self._config, self._rows = config, rows
        self._assigned: Tensor | None = None
        self._losses: dict[str, Tensor] = {}

    def add(self, stats: Sequence[RouterStats]) -> Tensor:
        """This rank's part of the loss, from the stats of a pack's layers; differentiable. Collective."""
        balancing, z = self._config.balancing_loss_cfg, self._config.z_loss_cfg
        own = torch.stack([layer.assigned for layer in stats])
        everywhere = own.detach().clone()
        dist.all_reduce(everywhere)
        self._assigned = everywhere if self._assigned is None else self._assigned + everywhere
        parts: dict[str, Tensor] = {}
        if balancing is not None:
            assigned = self._assigned if balancing.balancing_loss_global_average else own
            share = assigned / assigned.sum(-1, keepdim=True).clamp_min(1)
            prob_sum = torch.stack([layer.prob_sum for layer in stats])
            scale = balancing.balancing_loss_alpha * self._config.n_routed_experts / self._rows
            parts["balancing_loss"] = scale * (share * prob_sum).sum()
        if z is not None:
            z_sum = torch.stack([layer.z_sum for layer in stats])
            parts["z_loss"] = z.z_loss_alpha / self._rows * z_sum.sum()
        for name, value in parts.items():
            self._losses[name] = self._losses.get(name, 0) + value.detach().double()
        return sum(parts.values(), start=own.new_zeros(()))

    def metrics(self) -> dict[str, float]:
        """The losses, and the maximal violation (Wang et al. 2024, arXiv 2408.15664): by how much the busiest expert
        exceeds the mean load, as a share of that mean; of the worst layer and on average. Collective."""
        assert self._assigned is not None
        names = sorted(self._losses)
        losses = torch.stack([self._losses[name] for name in names]) if names else torch.zeros(0)
        if names:
            dist.all_reduce(losses)
        violation = self._assigned.amax(-1) / self._assigned.mean(-1).clamp_min(1e-20) - 1
        values = dict(zip(names, losses.tolist(), strict=True))
        values |= {"max_violation": float(violation.max()), "mean_violation": float(violation.mean())}
        return {f"router/{name}": value for name, value in values.items()}
