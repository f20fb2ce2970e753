"""The one protocol that every rollout engine keeps, and the two objects that cross it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from xtuner.v1.data_proto import FinishReason, SampleParams, WeightBucket

LogprobStage = Literal["sampled", "scaled", "raw"]
MemoryTag = Literal["weights", "kv_cache"]


@dataclass(slots=True)
class GenerateRequest:
    """One response wanted: token ids in. `seed` makes it independent of what else is in the batch."""

    request_id: int
    """Of one attempt at it."""
    prompt_ids: list[int]
    params: SampleParams
    seed: int


@dataclass(slots=True)
class GenerateOutput:
    """Token ids out, one log-prob and one weight version a token."""

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    """R generated ids, the stop token included; nothing after it."""
    logprobs: list[float] = field(default_factory=list)
    """float32 [R], of the distribution named by `logprob_stage`."""
    weight_versions: list[int] = field(default_factory=list)
    """[R] version of the weights that made each token."""
    finish_reason: FinishReason = "error"
    logprob_stage: LogprobStage = "sampled"
    """`sampled`: after temperature and truncation; `scaled`: after temperature, but before the truncation that there
    was; `raw`: softmax of the logits (greedy requests)."""
    error: str | None = None
    """Why, when finish_reason is `error`."""
    routed_experts: np.ndarray | None = None
    """int16 [P + R - 1, L, K], on request: experts of each token of prompt and response but the last, in each of the L
    layers that have some."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """[R], if `top_logprobs` of the request is above 1: id and log-prob of the most likely tokens of the distribution
    that each token is of, the first best; fewer where fewer have a probability."""


class RolloutEngine(Protocol):
    """One engine replica. Every wait inside has a deadline; a refused request is an output with `error`."""

    async def start(self) -> None:
        """Load weights and allocate the cache. Raises with the reason if it cannot."""

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        """Serve one request. A request that can never fit is refused at once with the numbers."""

    async def abort(self) -> None:
        """End all requests in flight with finish_reason `abort` and what they have so far."""

    async def sleep(self, tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")) -> None:
        """Give back device memory. Without weights it cannot serve until they are pushed again."""

    async def wake(self, tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")) -> None:
        """Take the memory again. Weights come back empty and must be pushed before the next request."""

    async def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Replace all weights. The version moves only when every parameter came exactly once, else it raises."""

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""

    async def health(self) -> bool:
        """Whether the engine can serve."""

    async def stop(self) -> None:
        """Free everything. In-flight requests are aborted."""


@runtime_checkable
class CountsWork(Protocol):
    """An engine that says what it did."""

    def statistics(self) -> dict[str, int]:
        """Totals since the start: `prefill_tokens` of prompts that went through the model, `prefix_hit_tokens` that
        were found in its cache instead, and `preemptions`: how often a sequence had to give its room to others."""


@runtime_checkable
class ComesBack(Protocol):
    """An engine that can die alone. Where its server is dead, what needs one raises EngineLostError while it sleeps,
    since the device may be somebody else's, and EngineDownError if it did not start again."""

    starts: int
    """How often a server was started."""

    async def revive(self) -> None:
        """If it is dead, start it again and put it to sleep, weights and cache. Nobody else may use the device."""


@runtime_checkable
class TakesParameters(Protocol):
    """An engine that may compute with the trainer's own model."""

    takes_parameters: bool
    """Whether updates may come by parameter, see `WeightBucket`."""


@runtime_checkable
class StaysAwake(Protocol):
    """An engine that can keep its memory while others use the device, and take updates so."""

    def memory_to_wake(self) -> int | None:
        """Bytes of device memory that its cache takes when it wakes; None if now it would get less than it can use."""
