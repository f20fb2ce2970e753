"""Tasks, and how their batches are produced."""

from typing import TYPE_CHECKING

from xtuner.v1.rl.agent_loop import is_trainable
from xtuner.v1.utils.not_here import not_here

from .config import AgentLoopManagerConfig, TaskSpecConfig
from .filters import IsValidSampleFn, ShouldContinueFn, drop_equal_rewards
from .manager import AgentLoopManager, ProduceBatchResult
from .producer import ProduceStrategyConfig, SyncProduceStrategyConfig, check_weight_versions
from .sampler import Sampler, SamplerConfig, make_group

__all__ = [
    "AgentLoopManager",
    "AgentLoopManagerConfig",
    "IsValidSampleFn",
    "ProduceBatchResult",
    "ProduceStrategyConfig",
    "Sampler",
    "SamplerConfig",
    "ShouldContinueFn",
    "SyncProduceStrategyConfig",
    "TaskSpecConfig",
    "check_weight_versions",
    "drop_equal_rewards",
    "is_trainable",
    "make_group",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _INSTEAD = dict.fromkeys(
        ("AsyncProduceStrategyConfig", "DisaggAsyncProduceStrategyConfig"),
        "rollouts and training take turns, use SyncProduceStrategyConfig",
    ) | {
        "DisaggAgentLoopManagerConfig": "use AgentLoopManagerConfig, with RLColocateTrainerConfig",
        "DisaggTaskSpecConfig": "use TaskSpecConfig, with RLColocateTrainerConfig",
    }
    __getattr__ = not_here(__name__, _INSTEAD)
