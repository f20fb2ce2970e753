"""Trainer and engine in one process: tensors are handed over, nothing is serialised."""

import torch

from xtuner.v1.engine import TrainEngine
from xtuner.v1.rl.utils import peer


async def push_in_process(engine: TrainEngine, target: str, version: int, bucket_bytes: int) -> None:
    """Copy all weights into the rollout worker named `target` of this process.

    Every rank calls it, since gathering the shards is collective. The worker takes `version` only when every
    parameter has come exactly once; otherwise it raises and cannot serve.
    """
    with torch.no_grad():
        await peer(target).update_weights(engine.weight_buckets(bucket_bytes), version)
