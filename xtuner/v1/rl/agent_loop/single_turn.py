"""One prompt, one response."""

from typing import Any

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.judger import BaseJudger

from .base import AgentLoop, AgentLoopConfig, RolloutClient


class SingleTurnAgentLoop(AgentLoop):
    """Asks the engine once."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        state.tokens = state.prompt_ids
        return await self.rollout_controller.generate(state)


class SingleTurnAgentLoopConfig(AgentLoopConfig):
    """The engine answers the prompt once, then the judger scores the answer."""

    def build_local(
        self, rollout_controller: RolloutClient, judger: BaseJudger | None = None, tokenizer: Any = None
    ) -> SingleTurnAgentLoop:
        return SingleTurnAgentLoop(
            rollout_controller, judger, tokenizer, self.sample_params, self.enable_batch_judge
        )
