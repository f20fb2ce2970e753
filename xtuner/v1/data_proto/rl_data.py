"""The rollout side's one object: a sample on its way from prompt to reward."""

import base64
from contextlib import suppress
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import TypedDict

from xtuner.v1.config.base import Seed, XTunerConfig


class Status(StrEnum):
    """Where a sample stands."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]

_STATUS_OF_REASON = {
    "stop": Status.COMPLETED,
    "length": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "abort": Status.ABORTED,
}


def status_of_finish_reason(reason: str | None) -> Status:
    """COMPLETED for stop, length and tool_calls; ABORTED for abort; FAILED for anything else."""
    return _STATUS_OF_REASON.get(reason or "", Status.FAILED)


class SampleParams(XTunerConfig):
    """How one response is sampled."""

    n: int = Field(1, ge=1, le=1)
    """Responses a request; 1 always, `SamplerConfig.prompt_repeat_k` makes groups."""
    top_k: int = Field(0, ge=-1)
    """Keep the k most likely tokens. 0 or -1: off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the most likely one. 0: off."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by this. 0: greedy (evaluation only)."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Logits of tokens seen in prompt or response are divided (positive) or multiplied (negative) by this."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token was generated."""
    min_tokens: int = Field(0, ge=0)
    """No EOS and no stop before this many tokens."""
    max_tokens: int = Field(2048, ge=1)
    """Longest response in tokens, EOS included."""
    stops: list[str] = []
    """Strings that end a response; the text up to and including the stop string is kept."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, beside the model's EOS ids."""
    stream: bool = False
    """Streaming is not used by training; must be False."""
    return_logprob: bool = True
    """Return the log-prob of every generated token; training needs it."""
    top_logprobs: int = Field(1, ge=0)
    """How many of the most likely tokens an engine reports beside each sampled one: their ids and log-probs are kept in
    the sample's `extra_fields["top_logprobs"]` and in the trajectories. 0 and 1: only the sampled token."""
    return_token_ids: bool = True
    """Token ids in and out. False (text only) cannot be trained on."""
    include_stop_str_in_output: bool = True
    """Keep the stop string in the text."""
    no_stop_trim: bool = True
    """Keep the stop token in the ids: it is trained."""
    spaces_between_special_tokens: bool = False
    """Decoding option of some servers; must be False."""
    return_routed_experts: bool = True
    """Return expert ids where `RolloutConfig.enable_return_routed_experts` asks for them (MoE)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the decoded text."""
    sampling_seed: Seed | None = None
    """Seed of every response of the task: for evaluation; refused in training, where siblings would be alike. None:
    derived from the run's seed and the rollout id."""

    @model_validator(mode="after")
    def _consistent(self) -> "SampleParams":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"sample_params: min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}.")
        for name in ("stream", "spaces_between_special_tokens"):
            if getattr(self, name):
                raise ValueError(f"sample_params.{name}=True is not supported: leave it False.")
        return self


class MultimodalInfo(TypedDict, total=False):
    """Vision inputs of a sample."""

    pixel_values: Any
    image_grid_thw: Any
    num_img_tokens: list[int]


class RolloutFunctionCall(BaseModel):
    """Name and arguments of a tool call."""

    name: str
    arguments: dict[str, Any] | None = None
    raw_arguments_text: str | None = None


class RolloutToolCall(BaseModel):
    """A tool call found in a response."""

    id: str
    type: Literal["function"] = "function"
    function: RolloutFunctionCall


class RolloutState(BaseModel):
    """One sample: prompt, response, reward, and what happened on the way.

    `response_ids`, `logprobs`, `response_mask`, `response_model_steps` and `train_logprobs` have one entry a
    generated token (R in all).
    """

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, ser_json_bytes="base64", ser_json_inf_nan="constants"
    )

    group_id: int | None = None
    """Same for the K siblings of a prompt."""
    message: list[dict[str, Any]]
    """Chat messages of the prompt."""
    prompt_ids: list[int] | None = None
    """Prompt tokens (P)."""
    num_tokens: int | None = None
    """Prompt length P."""
    proxy_attn_flops: float | None = None
    """Cost proxy."""
    data_source: dict[str, float] | str | None = None
    """Judger routing key(s)."""
    mm_info: MultimodalInfo | None = None
    reward_model: dict[str, Any] | None = None
    """What the judger compares with, usually {"style", "ground_truth"}."""
    session_id: int | None = None
    """Sticky routing key."""
    tokens: list[int] | None = None
    """Ids sent to the engine in this call."""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    sample_params: SampleParams = Field(default_factory=SampleParams)
    response: str | None = None
    """Decoded text, for people and judgers; never encoded again."""
    tool_calls: list[RolloutToolCall] | None = None
    response_ids: list[int] | None = None
    """Generated ids (R), the stop token included."""
    logprobs: list[float] | None = None
    """Engine's log-prob of each generated id."""
    logprob_stage: str | None = None
    """Which distribution `logprobs` stand for: `sampled` (after temperature and truncation) or `raw`."""
    rollout_worker: str | None = None
    """Name of the worker whose engine answered (last)."""
    routed_experts: Any = None
    """int16 array [P + R - 1, L, K]: the experts that the engine chose for each token of prompt and response in each of
    the L layers that have some. The last generated token has none: it has not been through the model."""
    finish_reason: str | None = None
    response_mask: list[int] | None = None
    """1 = train on this token."""
    response_model_steps: list[int] | None = None
    """Weight version (train step) that made each token."""
    seq_staleness: int = 0
    input_ids: list[int] | None = None
    labels: list[int] | None = None
    """Full sequence and per-token labels (-100: no loss). Not trained on by this version: such a sample is refused."""
    reward: dict[str, Any] | None = None
    """Judger's output; must hold `score`."""
    judge_error: str | None = None
    """Why the judger could not judge this sample. Such a sample has no reward and is not trained on."""
    advantage: float | None = None
    """Group-relative advantage, set before training."""
    train_logprobs: list[float] | None = None
    """Trainer's log-prob of each generated id before the update (NaN where masked)."""
    rollout_id: int | None = None
    """Unique per response."""
    uid: int | None = None
    """Alias of `rollout_id`."""
    task_name: str | None = None
    status: Status = Status.INIT
    error_msg: str | None = None
    position_ids: Any = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    @field_validator("routed_experts", mode="before")
    @classmethod
    def _experts_from_json(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        flat = np.frombuffer(base64.b64decode(value["int16"]), "<i2")
        return flat.astype(np.int16).reshape(value["shape"])

    @model_validator(mode="after")
    def _mirror_uid(self) -> "RolloutState":
        if self.uid is None:
            self.uid = self.rollout_id
        elif self.rollout_id is None:
            self.rollout_id = self.uid
        return self

    def to_json(self) -> dict[str, Any]:
        """Every field that is not at its default, as JSON values; `model_validate` is the way back. Arrays and tensors
        become lists, bytes base64, and what JSON has no form for its text."""
        out = self.model_dump(mode="json", exclude_defaults=True, exclude={"routed_experts"}, fallback=_plain)
        if (experts := self.routed_experts) is not None:
            data = base64.b64encode(experts.astype("<i2").tobytes()).decode()
            out["routed_experts"] = {"shape": list(experts.shape), "int16": data}
        return out


def _plain(value: Any) -> Any:
    """What a judge may have put into its payload: NumPy's and torch's values as Python's, others as text."""
    if not isinstance(value, type):
        with suppress(Exception):
            return value.tolist()
    try:
        return str(value)
    except Exception:
        return object.__repr__(value)


_FAILURE_ORDER = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED)


def group_status(group: list[RolloutState]) -> Status:
    """COMPLETED when all members are; else the first of FAILED, ABORTED, EXPIRED, FILTERED that any member has."""
    statuses = {state.status for state in group}
    if statuses == {Status.COMPLETED}:
        return Status.COMPLETED
    return next((status for status in _FAILURE_ORDER if status in statuses), Status.COMPLETED)


def reset_response(state: RolloutState) -> None:
    """Back to the prompt: everything that a generation or a judge wrote is cleared."""
    state.tokens = state.prompt_ids
    state.response = ""
    state.response_ids, state.logprobs, state.response_model_steps = [], [], []
    state.response_mask = state.reward = state.finish_reason = state.error_msg = state.judge_error = None
    state.tool_calls = state.routed_experts = state.advantage = state.train_logprobs = state.logprob_stage = None
    state.rollout_worker = None
    state.extra_fields.pop("top_logprobs", None)
    state.status = Status.INIT
