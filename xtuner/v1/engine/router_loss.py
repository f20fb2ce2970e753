"""What the routers add to the policy loss, and how equally they load the experts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from xtuner.v1.data_proto import PackedBatch
from xtuner.v1.model import MoEModelConfig
from xtuner.v1.model.moe import RouterStats


def row_counts(pack: PackedBatch) -> Tensor:
    """int64 [T]: how many samples hold each row, a shared prompt's as many as it has responses, padding none.

    So sums over rows do not depend on how samples are packed.
    """
    lengths, prefix = torch.tensor([pack.layout.lengths, pack.layout.prefix], device=pack.input_ids.device)
    segments = len(pack.layout.lengths)
    # A response of one token has no rows: only the row that predicts it tells which prompt it follows.
    own_targets = pack.target_rows[: pack.sample_index.numel()]
    segment = torch.searchsorted(lengths.cumsum(0), own_targets, right=True)
    prompt = torch.where(prefix[segment] < 0, segment, prefix[segment])
    holders = (pack.sample_index * segments + prompt).unique() % segments
    counts = torch.bincount(holders, minlength=segments) + (prefix >= 0)
    rows = counts.repeat_interleave(lengths, output_size=pack.input_ids.numel())
    rows[len(rows) - pack.num_padding :] = 0
    return rows


def num_rows(packs: Sequence[PackedBatch]) -> int:
    """Sum of `row_counts`."""
    return sum(int(row_counts(pack).sum()) for pack in packs)


class RouterLoss:
    """The auxiliary losses of the packs of one optimizer step.

    Every token of the step has the same weight, whichever rank and pack it is in. The z-loss therefore does not
    depend on the split. The balancing loss needs each expert's share f of all assignments, which is known in full
    only with the last pack: a pack is given f of what all ranks have seen so far. So with one pack a rank, it is the
    loss of the whole step however many ranks share it out.
    """

    def __init__(
        self, config: MoEModelConfig, rows: float, pack_group: dist.ProcessGroup | None = None, replayed: bool = False
    ) -> None:
        """rows: `num_rows` of all packs of all ranks. pack_group: the ranks that share out the rows of a pack.
        replayed: whether packs bring experts to use, on every rank alike."""
        self._config, self._rows, self._pack_group = config, rows, pack_group
        self._assigned: Tensor | None = None
        self._replayed = replayed
        self._sums: dict[str, Tensor] = {}

    def add(self, stats: Sequence[RouterStats]) -> Tensor:
        """This rank's part of the loss, from the stats of a pack's layers; differentiable. Collective."""
        balancing, z = self._config.balancing_loss_cfg, self._config.z_loss_cfg
        own = torch.stack([layer.assigned for layer in stats])
        everywhere = own.detach().clone()
        dist.all_reduce(everywhere)
        self._assigned = everywhere if self._assigned is None else self._assigned + everywhere
        parts: dict[str, Tensor] = {}
        if balancing is not None:
            assigned = self._assigned if balancing.balancing_loss_global_average else self._of_pack(own)
            share = assigned / assigned.sum(-1, keepdim=True).clamp_min(1)
            prob_sum = torch.stack([layer.prob_sum for layer in stats])
            scale = balancing.balancing_loss_alpha * self._config.n_routed_experts / self._rows
            parts["balancing_loss"] = scale * (share * prob_sum).sum()
        if z is not None:
            z_sum = torch.stack([layer.z_sum for layer in stats])
            parts["z_loss"] = z.z_loss_alpha / self._rows * z_sum.sum()
        counts: dict[str, Tensor] = {}
        if self._replayed:
            counts["given"], counts["changed"] = torch.stack([layer.replayed for layer in stats]).sum(0)
        for name, value in (parts | counts).items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().double()
        return sum(parts.values(), start=own.new_zeros(()))

    def _of_pack(self, own: Tensor) -> Tensor:
        if self._pack_group is not None:
            dist.all_reduce(own, group=self._pack_group)
        return own

    def metrics(self) -> dict[str, float]:
        """The losses, and the maximal violation (Wang et al. 2024, arXiv 2408.15664): by how much the busiest expert
        exceeds the mean load, as a share of that mean; of the worst layer and on average. Collective.

        Where experts were given: the share of choices that were not, and of the given ones that the router would not
        have made.
        """
        assert self._assigned is not None
        names = sorted(self._sums)
        sums = torch.stack([self._sums[name] for name in names]) if names else torch.zeros(0)
        if names:
            dist.all_reduce(sums)
        violation = self._assigned.amax(-1) / self._assigned.mean(-1).clamp_min(1e-20) - 1
        values = dict(zip(names, sums.tolist(), strict=True))
        values |= {"max_violation": float(violation.max()), "mean_violation": float(violation.mean())}
        if self._replayed:
            given, changed = values.pop("given"), values.pop("changed")
            layers, top_k, _ = self._config.routing_shape
            values["replay_missing_share"] = 1 - given / max(1.0, self._rows * layers * top_k)
            values["replay_changed_share"] = changed / max(1.0, given)
        return {f"router/{name}": value for name, value in values.items()}
