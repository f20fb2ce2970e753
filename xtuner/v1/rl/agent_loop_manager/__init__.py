"""Tasks, and how their batches are produced."""

from xtuner.v1.rl.agent_loop import is_trainable

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
