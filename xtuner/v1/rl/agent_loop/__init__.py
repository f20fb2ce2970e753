"""Agent loops: from prompt to judged response."""

from .base import AgentLoop, AgentLoopConfig, RolloutClient, generate_all
from .outcome import is_trainable, reward_score, untrainable_reason
from .router import RouterAgentLoop
from .single_turn import SingleTurnAgentLoop, SingleTurnAgentLoopConfig

__all__ = [
    "AgentLoop",
    "AgentLoopConfig",
    "RolloutClient",
    "RouterAgentLoop",
    "SingleTurnAgentLoop",
    "SingleTurnAgentLoopConfig",
    "generate_all",
    "is_trainable",
    "reward_score",
    "untrainable_reason",
]
