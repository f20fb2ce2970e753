"""An agent loop that lives in other processes."""

from typing import Any

from xtuner.v1.data_proto import RolloutState, SampleParams
from xtuner.v1.rl.judger import BaseJudger
from xtuner.v1.rl.utils.handles import Handle

from .base import AgentLoop, AgentLoopConfig, RolloutClient


class AgentLoopWorker:
    """Holds the loop in its process."""

    def __init__(
        self,
        config: AgentLoopConfig,
        rollout_controller: RolloutClient,
        judger: BaseJudger | None,
        tokenizer: Any,
    ):
        self._loop = config.build_local(rollout_controller, judger, tokenizer)

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        return await self._loop.generate_sample(state)

    async def generate_group(self, states: list[RolloutState]) -> list[RolloutState]:
        return await self._loop.generate_group(states)


class RouterAgentLoop(AgentLoop):
    """Sends each group to the worker with the fewest samples under way; ties go round."""

    def __init__(self, workers: list[Handle], sample_params: SampleParams):
        self.sample_params = sample_params
        self._workers = workers
        self._load = [0] * len(workers)
        self._next = 0

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        return await self._send("generate_sample", state, 1)

    async def generate_group(self, states: list[RolloutState]) -> list[RolloutState]:
        return await self._send("generate_group", states, len(states))

    async def _send(self, method: str, argument: Any, num_samples: int) -> Any:
        count = len(self._workers)
        chosen = min(range(count), key=lambda i: (self._load[i], (i - self._next) % count))
        self._next = chosen + 1
        self._load[chosen] += num_samples
        try:
            return await self._workers[chosen].call(method, argument)
        finally:
            self._load[chosen] -= num_samples
