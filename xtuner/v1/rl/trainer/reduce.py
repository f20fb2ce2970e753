"""Metrics of packs and ranks made one: counts are summed before anything is divided."""

import torch
import torch.distributed as dist
from torch import Tensor

_MAX, _MIN = "max", "min"


def reduce_metrics(rows: list[dict[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Reduce the rows of this rank's packs, then over ranks, and finalise."""
    from xtuner.v1.rl.loss import finalize_metrics, merge_metrics, metric_kind

    merged = merge_metrics(rows)
    names = sorted(merged)
    out: dict[str, Tensor] = {}
    for kind, op in (("sum", dist.ReduceOp.SUM), (_MAX, dist.ReduceOp.MAX), (_MIN, dist.ReduceOp.MIN)):
        chosen = [n for n in names if metric_kind(n) == kind]
        if not chosen:
            continue
        values = torch.stack([merged[n].detach().to(device, torch.float64) for n in chosen])
        dist.all_reduce(values, op=op)
        out |= dict(zip(chosen, values, strict=True))
    return finalize_metrics(out)
