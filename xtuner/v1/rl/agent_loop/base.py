"""The base of agent loops: how the K samples of a group are generated and judged."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BeforeValidator, Field, field_validator

from xtuner.v1.config.base import XTunerConfig
from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.rl.judger import BaseJudger
from xtuner.v1.rl.judger.base import describe
from xtuner.v1.rl.utils import CPUResourcesConfig

from .concurrency import run_all
from .outcome import reward_score

if TYPE_CHECKING:
    from xtuner.v1.rl.utils import Launcher


class RolloutClient(Protocol):
    """What a loop knows of the rollout side."""

    async def generate(self, state: RolloutState) -> RolloutState:
        """Fill response, ids, log-probs, versions and status. A failed request is a status, no exception."""


class AgentLoop(ABC):
    """Turns prompts into judged responses.

    A subclass writes `generate_sample`. It sets `status`: FAILED or ABORTED (with `error_msg`) for a sample
    that went wrong, so that its siblings are kept. What it raises ends the run.
    """

    def __init__(
        self,
        rollout_controller: RolloutClient,
        judger: BaseJudger | None = None,
        tokenizer: Any = None,
        sample_params: SampleParams | None = None,
        enable_batch_judge: bool = False,
    ):
        self.rollout_controller = rollout_controller
        self.judger = judger
        self.tokenizer = tokenizer
        self.sample_params = sample_params or SampleParams()
        self.enable_batch_judge = enable_batch_judge

    @property
    def takes_samples_alone(self) -> bool:
        """Whether a sample is the same without the others of its group."""
        return type(self).generate_group is AgentLoop.generate_group and not self.enable_batch_judge

    @abstractmethod
    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Generate one response in one or more requests. If it sets `reward`, the judger is not asked."""

    async def generate_group(self, states: list[RolloutState]) -> list[RolloutState]:
        """All members at once, in the order of `states`. Completed ones end with a score or `judge_error`. Where a
        subclass writes it anew, each one that it is given must come back, once, and no other."""
        for state in states:
            state.sample_params = self.sample_params
        group = await run_all(self._generate_one(state) for state in states)
        if self.enable_batch_judge:
            group = await self._judge_batch(group)
        for state in group:
            self._check_reward(state)
        return group

    async def _generate_one(self, state: RolloutState) -> RolloutState:
        try:
            done = await self.generate_sample(state)
            if not isinstance(done, RolloutState):
                raise TypeError(f"generate_sample must return the sample, not {type(done).__name__}")
        except Exception as error:
            error.add_note(f"in {type(self).__name__}, task {state.task_name}, rollout {state.rollout_id}")
            raise
        state = done
        if self.judger is None or self.enable_batch_judge or not _is_unjudged(state):
            return state
        try:
            judged = await self.judger.judge(state)
            if not isinstance(judged, RolloutState):
                raise TypeError(f"judge must return the sample, not {type(judged).__name__}")
            return judged
        except Exception as error:
            return _not_judged(state, error)

    async def _judge_batch(self, group: list[RolloutState]) -> list[RolloutState]:
        """Judge the completed ones without a reward in one call. What it raises becomes the `judge_error` of all."""
        waiting = {index: state for index, state in enumerate(group) if _is_unjudged(state)}
        if self.judger is None or not waiting:
            return group
        try:
            judged = await self.judger.batch_judge(list(waiting.values()))
            if len(judged) != len(waiting):
                raise ValueError(f"batch_judge returned {len(judged)} samples for {len(waiting)}")
            if _ids(judged) != _ids(waiting.values()):
                raise ValueError(f"batch_judge returned rollouts {_ids(judged)} for {_ids(waiting.values())}")
        except Exception as error:
            judged = [_not_judged(state, error) for state in waiting.values()]
        by_index = dict(enumerate(group)) | dict(zip(waiting, judged, strict=True))
        return list(by_index.values())

    def _check_reward(self, state: RolloutState) -> None:
        if state.status != Status.COMPLETED or state.judge_error is not None:
            return
        if reward_score(state) is not None:
            return
        if state.reward is None and self.judger is None:
            state.judge_error = (
                "no reward: give the task a judger_config, or set state.reward in the loop's generate_sample"
            )
        else:
            state.judge_error = f"the reward must hold a finite number `score`, got {state.reward!r}"
        state.reward = None


async def generate_all(loop: AgentLoop, states: list[RolloutState]) -> list[RolloutState]:
    """`loop.generate_group`. One that is not the base's may lose samples, which would then count nowhere, or add some,
    whose ids would be those of others.

    Raises:
        RuntimeError: a sample is missing, is there twice, or was not given.
    """
    given, task = _ids(states), states[0].task_name
    group = await loop.generate_group(states)
    expected, found = Counter(given), Counter(_ids(group))
    if wrong := [i for i in expected | found if found[i] != expected[i]]:
        raise RuntimeError(
            f"task {task!r}: generate_group returned the rollouts {_ids(group)} for {given}; each must be there once "
            f"and no other ({wrong} are not so), one that went wrong as FAILED."
        )
    return group


def _ids(states: Iterable[RolloutState]) -> list[int | None]:
    return [state.rollout_id for state in states]


def _is_unjudged(state: RolloutState) -> bool:
    return state.status == Status.COMPLETED and state.reward is None and state.judge_error is None


def _not_judged(state: RolloutState, error: Exception) -> RolloutState:
    state.reward, state.judge_error = None, describe(error)
    return state


def _default_params(value: Any) -> Any:
    return SampleParams() if value is None else value


SampleParamsOrDefault = Annotated[SampleParams, BeforeValidator(_default_params)]


class AgentLoopConfig(XTunerConfig, ABC):
    """How the samples of a task are made. A subclass writes `build_local`."""

    hf_checkpoint: str | Path
    """Hugging Face folder of the model, for loops of your own that need more than the tokenizer. The loops here take
    the run's (`tokenizer_path`)."""
    sample_params: SampleParamsOrDefault = Field(default_factory=SampleParams)
    """How responses are sampled; written onto every sample. None: the defaults."""
    cpu_resources: CPUResourcesConfig | None = None
    """Workers that run the loop. None, or with the local launcher: in the trainer's process."""
    enable_batch_judge: bool = False
    """Judge the completed members of a group in one call after the last of them, not each one when it is
    done."""
    requires_rollout_proxy: bool = False
    """The loop needs an OpenAI-compatible endpoint. This version has none: must be False."""

    @field_validator("requires_rollout_proxy")
    @classmethod
    def _no_proxy(cls, value: bool) -> bool:
        if value:
            raise ValueError("requires_rollout_proxy=True is not supported: leave it False.")
        return value

    @abstractmethod
    def build_local(
        self, rollout_controller: RolloutClient, judger: BaseJudger | None, tokenizer: Any
    ) -> AgentLoop:
        """The loop itself, in this process."""

    def build(
        self,
        rollout_controller: RolloutClient,
        judger: BaseJudger | None = None,
        tokenizer: Any = None,
        launcher: "Launcher | None" = None,
        name: str | None = None,
    ) -> AgentLoop:
        """The loop in this process, or with `cpu_resources` and a Ray launcher a router over workers."""
        if self.cpu_resources is None or launcher is None or launcher.kind == "local":
            return self.build_local(rollout_controller, judger, tokenizer)
        from .router import AgentLoopWorker, RouterAgentLoop

        workers = launcher.spawn_cpu(
            f"agent_loop:{name or type(self).__name__}",
            AgentLoopWorker,
            self,
            rollout_controller,
            judger,
            tokenizer,
            resources=self.cpu_resources,
        )
        return RouterAgentLoop(workers, self.sample_params)
