"""Where the engine's log-probs are missing, or differ from the trainer's although both are exact."""

from collections.abc import Iterable

import torch
from torch import Tensor

from xtuner.v1.data_proto import PackedBatch


def describe_gap(packs: list[PackedBatch], logprobs: list[Tensor]) -> str | None:
    """The first trained token whose log-prob (float32 [N] a pack) is not the engine's, and how many there are; None
    if all are equal to the bit. One that the engine did not give (NaN) is not."""
    first, differing, tokens, largest = "", 0, 0, 0.0
    for pack, ours in zip(packs, logprobs, strict=True):
        theirs = pack.rollout_logprobs
        assert theirs is not None
        where = (theirs != ours).nonzero().flatten()
        tokens += ours.numel()
        if not where.numel():
            continue
        differing += where.numel()
        largest = max(largest, float((theirs - ours)[where].nan_to_num().abs().max()))
        if not first:
            at = int(where[0])
            sample = int(pack.sample_index[at])
            place = at - int((pack.sample_index == sample).nonzero()[0])
            first = (
                f"rollout {pack.rollout_ids[sample]}, trained token {place} (id {int(pack.labels[at])}): "
                f"{float(theirs[at])!r} by the engine, {float(ours[at])!r} by the trainer"
            )
    return f"{first}; {differing} of {tokens} tokens differ, by up to {largest:.3g}" if first else None


def refuse_gap(packs: list[PackedBatch], logprobs: list[Tensor]) -> None:
    """Raise RuntimeError if a log-prob is not the engine's."""
    gap = describe_gap(packs, [values.to(torch.float32) for values in logprobs])
    if gap is not None:
        raise RuntimeError(
            f"deterministic=True, but log-probs of engine and trainer are not the same: {gap}. The engine computed "
            "with other weights or kernels than the trainer, or an agent loop changed ids or sampling parameters. "
            "deterministic=False goes on and shows the gap in mismatch/*."
        )


def need_logprobs(packs: Iterable[PackedBatch]) -> None:
    """Raise RuntimeError if a sample came without the engine's log-probs."""
    for pack in packs:
        if pack.has_all_logprobs:
            continue
        assert pack.rollout_logprobs is not None
        if (missing := pack.sample_index[pack.rollout_logprobs.isnan()]).numel():
            ids = sorted(pack.rollout_ids[i] for i in set(missing.tolist()))
            raise RuntimeError(
                f"loss_cfg.rollout_is needs the engine's log-probs, but rollout {ids[0]} came without them ({len(ids)} "
                f"of {len(pack.rollout_ids)} samples of its pack). An agent loop of your own must keep them."
            )
