"""The typed objects that the floors hand to each other."""

from .packed import PackedBatch, SegmentLayout
from .rl_data import (
    FinishReason,
    MultimodalInfo,
    RolloutFunctionCall,
    RolloutState,
    RolloutToolCall,
    SampleParams,
    Status,
    group_status,
    reset_response,
    status_of_finish_reason,
)
from .weights import WeightBucket

__all__ = [
    "FinishReason",
    "MultimodalInfo",
    "PackedBatch",
    "RolloutFunctionCall",
    "RolloutState",
    "RolloutToolCall",
    "SampleParams",
    "SegmentLayout",
    "Status",
    "WeightBucket",
    "group_status",
    "reset_response",
    "status_of_finish_reason",
]
