"""What a user says about judging with a function or a service."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from xtuner.v1.config import XTunerConfig
from xtuner.v1.rl.utils import CPUResourcesConfig, Launcher
from xtuner.v1.utils.secrets import without_secrets
from xtuner.v1.utils.signatures import check_call

from .base import Judger
from .native import NativeJudger
from .remote import JudgerPool, JudgerWorker, RemoteJudger

if TYPE_CHECKING:
    from .composed import ComposedJudgerConfig

RewardHandler = Callable[..., Any] | str


class JudgerConfig(XTunerConfig):
    """Scores each response with a function of yours or with an HTTP service.

    For a judger with other inputs, subclass `Judger` and override `build_local` in a subclass of this.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # `extra_info` and the URL may hold secrets

    needs_label: ClassVar[bool] = False
    """Whether a sample without a label is sure to be a judge error. Not known of a function."""

    judger_name: str = Field(min_length=1)
    """Name in logs and of the worker pool."""
    reward_handler: RewardHandler | None = Field(None, exclude=True, repr=False)
    """`fn(response: str, label, extra_info: dict)`, plain or async, giving a number or a dict with `score`; `label` is
    the row's `reward_model["ground_truth"]`, None if the data may lack it (`require_ground_truth=False`). Or the
    http(s) URL of a service that takes these three as JSON and replies with the dict. None only in subclasses that
    override `build_local`. A plain function must be thread-safe, and picklable if `cpu_resources` is set."""
    request_timeout: float = Field(30.0, gt=0)
    """Longest time for one sample in seconds, retries included, waiting for a free slot (here or in a process) not.
    Past it the sample has a judge error."""
    extra_info: dict[str, Any] = Field({}, exclude=True, repr=False)
    """Handed to the reward function with every sample (a shallow copy). JSON values only for a URL."""
    cpu_resources: CPUResourcesConfig | None = None
    """Processes to judge in. None: in the process of the caller. The local launcher has no other processes."""
    max_retries: int = Field(3, ge=0)
    """URL only: further tries after a connection error or a status of 408, 429 or 5xx."""
    retry_delay: float = Field(0.5, ge=0)
    """URL only: seconds before the first further try; doubled for each one after it, at most 8."""
    max_concurrency: int | None = Field(None, ge=1)
    """Samples judged at the same time in one process. None: 16 for a plain function, whose threads share one
    interpreter, 256 for a coroutine function or a URL."""

    @model_validator(mode="after")
    def _consistent(self) -> "JudgerConfig":
        handler, where = self.reward_handler, f"judger {self.judger_name!r}: reward_handler"
        if handler is None:
            if type(self).build_local is JudgerConfig.build_local:
                raise ValueError(f"{where} is None: give a function, a URL, or use a preset (GSM8KJudgerConfig).")
        elif isinstance(handler, str):
            if not handler.startswith(("http://", "https://")):
                raise ValueError(f"{where}={without_secrets(handler)!r} is no URL: it must begin with http:// or https://.")
            try:
                json.dumps(self.extra_info, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where} is a URL, so extra_info must be JSON: {error}.") from None
        else:
            how = "with the keywords response, label and extra_info"
            check_call(handler, where, how, response="", label="", extra_info={})
        for name in ("max_retries", "retry_delay"):
            if name in self.model_fields_set and not isinstance(handler, str):
                raise ValueError(f"{where} is no URL, so {name} has no effect: remove it.")
        return self

    @property
    def reads_data_source(self) -> bool:
        """Whether a sample's `data_source` may change its reward. Functions and services are not told of it."""
        return type(self).build_local is not JudgerConfig.build_local

    def build_local(self) -> Judger:
        """The judger in this process. Override it for a `Judger` of your own."""
        assert self.reward_handler is not None
        return NativeJudger(
            self.judger_name,
            self.reward_handler,
            self.extra_info,
            self.request_timeout,
            self.max_retries,
            self.retry_delay,
            self.max_concurrency,
        )

    def build(self, launcher: Launcher | None = None) -> Judger:
        """The judger: in this process, or in `cpu_resources.num_workers` others if the launcher starts processes."""
        if self.cpu_resources is None or launcher is None or launcher.kind == "local":
            return self.build_local()
        handles = launcher.spawn_cpu(f"judger:{self.judger_name}", JudgerWorker, self, resources=self.cpu_resources)
        replicas = [RemoteJudger(self.build_local(), handle, self.request_timeout) for handle in handles]
        return replicas[0] if len(replicas) == 1 else JudgerPool(replicas)


def build_judger(config: "JudgerConfig | ComposedJudgerConfig", launcher: Launcher | None = None) -> Judger:
    """`config.build(launcher)`."""
    return config.build(launcher)
