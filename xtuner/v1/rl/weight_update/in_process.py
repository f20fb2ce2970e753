"""Trainer and engine in one process: tensors are handed over, nothing is serialised."""

from collections.abc import Iterator
from contextlib import suppress

import torch

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.engine import TrainEngine
from xtuner.v1.rl.utils import peer

from .buckets import exhaust, with_checksums
from .canary import Witness


async def push_in_process(
    engine: TrainEngine,
    target: str,
    version: int,
    bucket_bytes: int,
    checksum: bool = False,
    witness: Witness | None = None,
) -> None:
    """Copy all weights into the rollout worker named `target` of this process.

    Every rank calls it, since gathering the shards is collective. The worker takes `version` only when every
    parameter has come exactly once, and with `checksum` when its bits are the trainer's; otherwise it raises and cannot
    serve. Parameters that lie whole on this rank are read where they are, in one pass that also rounds them. `witness`
    sees what leaves.
    """
    with torch.no_grad():
        lent = engine.weight_buckets(bucket_bytes, cast=False, by_parameter=_takes_parameters(target))
        buckets: Iterator[WeightBucket] = iter(lent)
        if checksum:
            buckets = with_checksums(buckets)
        if witness is not None:
            buckets = witness.watch(buckets)
        try:
            await peer(target).update_weights(buckets, version)
        finally:
            exhaust(buckets)


def _takes_parameters(target: str) -> bool:
    """No, if it is not there: that is said once the others can end their gathering."""
    with suppress(KeyError):
        return bool(peer(target).takes_parameters)
    return False
