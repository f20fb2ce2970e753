"""The training engine: mesh, FSDP2, optimizer, schedule, checkpoint."""

from .checkpoint import load_train_state, save_train_state
from .lr_schedule import learning_rate
from .train_engine import StepResult, TrainEngine

__all__ = ["StepResult", "TrainEngine", "learning_rate", "load_train_state", "save_train_state"]
