"""The policy update: groups to samples to packs, and the workers that train on them."""

from xtuner.v1.rl.loss import RolloutImportanceSampling

from .config import WorkerConfig
from .packing import pack_samples
from .samples import SampleReport, TrainingSample, build_samples
from .worker import FitResult, TrainingWorker

__all__ = [
    "FitResult", "RolloutImportanceSampling", "SampleReport", "TrainingSample", "TrainingWorker", "WorkerConfig",
    "build_samples", "pack_samples",
]  # fmt: skip
