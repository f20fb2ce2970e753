"""One prompt, one response."""

from typing import TYPE_CHECKING, Any

from xtuner.v1.data_proto import RolloutState

from .base import AgentLoop, AgentLoopConfig, RolloutClient

if TYPE_CHECKING:
    from xtuner.v1.rl.judger import Judger


class SingleTurnAgentLoop(AgentLoop):
    """Asks the engine once."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        state.tokens = state.prompt_ids
        return await self.rollout_controller.generate(state)


class SingleTurnAgentLoopConfig(AgentLoopConfig):
    """The engine answers the prompt once, then the judger scores the answer."""

    def build_local(
        self, rollout_controller: RolloutClient, judger: "Judger | None" = None, tokenizer: Any = None
    ) -> SingleTurnAgentLoop:
        return SingleTurnAgentLoop(
            rollout_controller, judger, tokenizer, self.sample_params, self.enable_batch_judge
        )
