"""Real prompts, judgers, loops and managers over an engine side that answers by a script."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import (
    AgentLoopManager,
    AgentLoopManagerConfig,
    SamplerConfig,
    SyncProduceStrategyConfig,
    TaskSpecConfig,
)
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.replay_buffer import ReplayBuffer
from xtuner.v1.utils import get_logger

Answer = str | Status | Exception


class ScriptedController:
    """The rollout side without an engine: `answer(state)` gives the text, a status, or what to raise."""

    def __init__(
        self,
        answer: Callable[[RolloutState], Answer] = lambda state: right(state),
        delay: Callable[[RolloutState], float] | None = None,
        version: int = 0,
    ):
        self.answer, self.delay, self.version = answer, delay, version
        self.asked: list[tuple[int | None, str]] = []
        self.params: list[SampleParams] = []
        self.events: list[str] = []
        self.under_way = 0

    async def resume(self) -> None:
        self.events.append("resume")

    async def pause(self) -> None:
        self.events.append(f"pause with {self.under_way} under way")

    async def generate(self, state: RolloutState) -> RolloutState:
        self.asked.append((state.rollout_id, question(state)))
        self.params.append(state.sample_params)
        self.under_way += 1
        try:
            await asyncio.sleep(self.delay(state) if self.delay else 0)
        finally:
            self.under_way -= 1
        answer = self.answer(state)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Status):
            state.status, state.error_msg = answer, f"scripted {answer.value}"
            return state
        state.response, state.response_ids = answer, [7] * max(1, len(answer))
        state.logprobs = [-0.5] * len(state.response_ids)
        state.response_model_steps = [self.version] * len(state.response_ids)
        state.finish_reason, state.status = "stop", Status.COMPLETED
        return state


def question(state: RolloutState) -> str:
    return state.message[-1]["content"]


def right(state: RolloutState) -> str:
    """The answer that `exact` pays: the number in the question."""
    return question(state).removeprefix("q")


def copy_index(state: RolloutState, k: int) -> int:
    """Which of its prompt's K samples this is."""
    assert state.rollout_id is not None
    return state.rollout_id % k


async def exact(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": float(response == label)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(WordLevel({"?": 0} | {f"q{i}": i + 1 for i in range(200)}, unk_token="?"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


def write_prompts(path: Path, numbers: range | list[int], source: str = "count") -> Path:
    rows = [
        {"prompt": f"q{n}", "data_source": source, "reward_model": {"ground_truth": str(n)}} for n in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_task(path: Path, k: int = 2, name: str = "count", **changes: Any) -> TaskSpecConfig:
    """A task over the prompts of `path`, judged by `exact` unless `changes` say otherwise."""
    entry = {
        "dataset": DatasetConfig(anno_path=path, use_cache=False),
        "tokenize_fn": RLTextTokenizeFnConfig(),
    }
    dataloader = DataloaderConfig(dataset_config_list=[entry], collator="fake_collator", pack_level="none")
    fields: dict[str, Any] = {
        "task_name": name,
        "agent_loop_config": SingleTurnAgentLoopConfig(hf_checkpoint="none"),
        "judger_config": JudgerConfig(judger_name="exact", reward_handler=exact),
        "sampler_config": SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=k),
    }
    return TaskSpecConfig(**(fields | changes))


def make_manager(
    controller: ScriptedController, *tasks: TaskSpecConfig, seed: int = 5, buffer: ReplayBuffer | None = None
) -> AgentLoopManager:
    config = AgentLoopManagerConfig(tasks=list(tasks))
    return config.build(controller, make_tokenizer(), buffer, launcher=None, seed=seed)  # type: ignore[arg-type]


@contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of the project's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    try:
        yield messages
    finally:
        get_logger().removeHandler(handler)


def strategy(**fields: Any) -> dict[str, Any]:
    """`make_task(..., **strategy(max_groups_factor=2))`"""
    return {"produce_strategy_config": SyncProduceStrategyConfig(**fields)}
