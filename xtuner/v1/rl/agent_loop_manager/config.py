"""Configuration of tasks."""

from typing import TYPE_CHECKING, Any

from pydantic import Field, SerializeAsAny, model_validator

from xtuner.v1.config.base import XTunerConfig
from xtuner.v1.rl.agent_loop import AgentLoopConfig
from xtuner.v1.rl.judger import ComposedJudgerConfig, JudgerConfig
from xtuner.v1.rl.replay_buffer import ReplayBuffer

from .manager import AgentLoopManager, Task
from .producer import ProduceStrategyConfig, SyncProduceStrategyConfig
from .sampler import Sampler, SamplerConfig

if TYPE_CHECKING:
    from xtuner.v1.rl.rollout.controller import RolloutController
    from xtuner.v1.rl.utils import Launcher


class TaskSpecConfig(XTunerConfig):
    """One kind of prompt with its loop and its judge."""

    task_name: str = Field(min_length=1)
    """Unique in the manager; names the task in logs, trajectories and checkpoints."""
    weight: float = Field(1.0, ge=0)
    """Share of training batches, relative to the other tasks' weights; what one batch rounds, the next ones make up.
    0: none. Evaluation ignores it."""
    agent_loop_config: SerializeAsAny[AgentLoopConfig]
    """How a sample is generated."""
    judger_config: SerializeAsAny[JudgerConfig] | ComposedJudgerConfig | None = None
    """How a sample is scored. None: the agent loop sets the reward itself."""
    produce_strategy_config: SerializeAsAny[ProduceStrategyConfig] = Field(
        default_factory=SyncProduceStrategyConfig
    )
    """How a batch is filled. Evaluation ignores it."""
    sampler_config: SamplerConfig
    """Prompts and group size."""
    max_judge_error_rate: float = Field(0.2, ge=0, le=1)
    """A step, or an evaluation, ends the run if more than this share of its completed samples, at least 5, are not
    judged."""

    @model_validator(mode="after")
    def _batch_judge_needs_judger(self) -> "TaskSpecConfig":
        if self.agent_loop_config.enable_batch_judge and self.judger_config is None:
            raise ValueError(
                f"task {self.task_name!r}: agent_loop_config.enable_batch_judge=True needs a judger_config."
            )
        return self


class AgentLoopManagerConfig(XTunerConfig):
    """All tasks of training, or all of evaluation."""

    tasks: TaskSpecConfig | list[TaskSpecConfig]
    """One task or several with different names."""

    @model_validator(mode="after")
    def _usable_tasks(self) -> "AgentLoopManagerConfig":
        tasks = self.task_list()
        if not tasks:
            raise ValueError("tasks=[]: give at least one TaskSpecConfig.")
        names = [task.task_name for task in tasks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tasks: task_name {twice} is given more than once; names must differ.")
        if sum(task.weight for task in tasks) <= 0:
            raise ValueError(
                f"tasks: the weights of {names} are all 0; give at least one task a positive weight."
            )
        return self

    def task_list(self) -> list[TaskSpecConfig]:
        """The tasks as a list."""
        return self.tasks if isinstance(self.tasks, list) else [self.tasks]

    def samplers(self, tokenizer: Any, seed: int) -> list[Sampler]:
        """Load the data of all tasks; starts nothing.

        Raises:
            ValueError: rows that cannot be used, or that name a judger which a composed one does not have.
        """
        specs = self.task_list()
        stride = max(spec.sampler_config.prompt_repeat_k for spec in specs)
        samplers = []
        for index, spec in enumerate(specs):
            config, name = spec.sampler_config, spec.task_name
            sampler = config.build(tokenizer, seed + index, name, index, len(specs), stride)
            _check_branches(spec, sampler)
            samplers.append(sampler)
        return samplers

    def build(
        self,
        rollout_controller: "RolloutController",
        tokenizer: Any,
        replay_buffer: ReplayBuffer | None = None,
        launcher: "Launcher | None" = None,
        seed: int = 42,
    ) -> AgentLoopManager:
        """Load the data and start judgers and loops. Without a `replay_buffer` the manager has its own.

        Raises:
            ValueError: as `samplers` does.
        """
        if replay_buffer is None:
            replay_buffer = ReplayBuffer()
        tasks = []
        for spec, sampler in zip(self.task_list(), self.samplers(tokenizer, seed), strict=True):
            name = spec.task_name
            judger = spec.judger_config.build(launcher) if spec.judger_config is not None else None
            loop = spec.agent_loop_config.build(rollout_controller, judger, tokenizer, launcher, name)
            rate = spec.max_judge_error_rate
            strategy = spec.produce_strategy_config.build(sampler, loop, replay_buffer, rate)
            tasks.append(Task(name, spec.weight, sampler, loop, strategy, rate))
        return AgentLoopManager(tasks, rollout_controller, replay_buffer)


def _check_branches(spec: TaskSpecConfig, sampler: Sampler) -> None:
    """Rows whose `data_source` names no branch would be judge errors, found only when they are drawn."""
    if not isinstance(spec.judger_config, ComposedJudgerConfig):
        return
    branches = spec.judger_config.branches.keys()
    if unknown := sorted(sampler.dataloader.judger_names - branches):
        raise ValueError(
            f"task {spec.task_name!r}: rows name the judgers {unknown}, but judger_config.branches has "
            f"{sorted(branches)}; add them, or map them with data_judger_mapping of the tokenize function."
        )
