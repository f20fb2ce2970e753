"""The policy update: groups to samples to packs, and the workers that train on them.

The worker itself is imported on first use: reading a configuration needs neither engine nor distributed torch.
"""

from typing import Any

from xtuner.v1.config import LoRAConfig
from xtuner.v1.rl.loss import RolloutImportanceSampling

from .config import WorkerConfig
from .guards import GapBounds, RolloutGapConfig, WeightCanaryConfig
from .packing import pack_samples
from .samples import SampleReport, TrainingSample, build_samples

__all__ = [
    "FitResult",
    "GapBounds",
    "LoRAConfig",
    "RolloutGapConfig",
    "RolloutImportanceSampling",
    "SampleReport",
    "TrainingSample",
    "TrainingWorker",
    "WeightCanaryConfig",
    "WorkerConfig",
    "build_samples",
    "pack_samples",
]


def __getattr__(name: str) -> Any:
    if name in ("FitResult", "TrainingWorker"):
        from . import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
