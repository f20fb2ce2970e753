"""Several judgers behind one: each sample goes where its data source says."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, model_validator

from xtuner.v1.config import XTunerConfig
from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.utils import Launcher

from .base import JudgeError, Judger, describe, finite, reward_from
from .config import JudgerConfig

MergeFn = Callable[[RolloutState, dict[str, dict[str, Any]]], RolloutState]


class ComposedJudger(Judger):
    """Asks the branches that `state.data_source` names, all at the same time.

    A string names one branch, with weight 1; a dict maps branches to weights. One branch: its reward, the score
    times its weight. Several: `merge_fn(state, {branch: reward})`, which returns the state with its reward
    (weights are in `state.data_source`); without `merge_fn` the score is the sum of weight * score, and the
    branches' rewards stand under `branches`; `acc` is True if all branches of positive weight that give one find the
    answer right. If a branch cannot judge, the sample has a judge error.

    A branch that is composed itself is one judge like others: it is asked with all of its own branches, weight 1 each.
    """

    def __init__(self, branches: Mapping[str, Judger], merge_fn: MergeFn | None = None):
        for name, branch in branches.items():
            if not isinstance(branch, Judger):
                raise TypeError(f"branch {name!r} must be a Judger, not {type(branch).__name__}")
        self.branches = dict(branches)
        self.merge_fn = merge_fn

    def get_judger_name(self) -> str:
        return f"composed({', '.join(self.branches)})"

    def preprocess(self, state: RolloutState) -> dict[str, Any]:
        return {name: self.branches[name].preprocess(self._seen_by(name, state)) for name in self._weights(state)}

    async def judge_payload(self, payload: dict[str, Any]) -> dict[str, Any]:
        jobs = (self.branches[name].judge_payload(part) for name, part in payload.items())
        outputs = dict(zip(payload, await asyncio.gather(*jobs, return_exceptions=True), strict=True))
        failures = [
            f"branch {name!r}: {describe(output)}" for name, output in outputs.items() if isinstance(output, Exception)
        ]
        if failures:
            raise JudgeError("; ".join(failures))
        return outputs

    def postprocess(self, state: RolloutState, output: dict[str, Any]) -> RolloutState:
        weights = self._weights(state)
        rewards = {name: self._reward(name, state, output[name]) for name in weights}
        if len(rewards) == 1:
            [(name, reward)] = rewards.items()
            state.reward = {**reward, "score": weights[name] * reward["score"]}
            return state
        if self.merge_fn is not None:
            merged = self.merge_fn(state, rewards)
            if not isinstance(merged, RolloutState):
                raise JudgeError(f"merge_fn must return the state, not {type(merged).__name__}")
            return merged
        total = math.fsum(weights[name] * reward["score"] for name, reward in rewards.items())
        state.reward = {"score": total, "branches": rewards}
        accs = [finite(rewards[name].get("acc")) for name, weight in weights.items() if weight > 0]
        if known := [acc for acc in accs if acc is not None]:
            state.reward["acc"] = min(known) > 0
        return state

    def _reward(self, name: str, state: RolloutState, output: Any) -> dict[str, Any]:
        """What branch `name` makes of its output."""
        try:
            return reward_from(self.branches[name].postprocess(self._seen_by(name, state), output).reward)
        except Exception as error:
            raise JudgeError(f"branch {name!r}: {describe(error)}") from error

    def _seen_by(self, name: str, state: RolloutState) -> RolloutState:
        """A copy for branch `name`: branches do not see each other, and a composed one is asked as a whole."""
        branch = self.branches[name]
        if not isinstance(branch, ComposedJudger):
            return state.model_copy()
        return state.model_copy(update={"data_source": dict.fromkeys(branch.branches, 1.0)})

    def _weights(self, state: RolloutState) -> dict[str, float]:
        source = state.data_source
        weights = {source: 1.0} if isinstance(source, str) else source
        there_are = f"branches are {', '.join(map(repr, self.branches))}"
        if not weights:
            raise JudgeError(f"data_source is {source!r}, which names no branch; {there_are}")
        for name, weight in weights.items():
            if name not in self.branches:
                raise JudgeError(f"data_source names {name!r}, but {there_are}")
            if not math.isfinite(weight):
                raise JudgeError(f"data_source gives {name!r} the weight {weight}; it must be finite")
        return weights


class ComposedJudgerConfig(XTunerConfig):
    """Several judgers, chosen for each sample by its `data_source`. Semantics: `ComposedJudger`."""

    branches: dict[str, SerializeAsAny[JudgerConfig] | "ComposedJudgerConfig"] = Field(min_length=1)
    """Judger of each data source. The names must equal those in the data. One that is composed itself judges with all
    of its own branches, weight 1 each; the data do not name these."""
    merge_fn: MergeFn | None = Field(None, exclude=True)
    """`fn(state, {branch: reward})`, returns the state with `reward` set; asked where a sample names several branches.
    None: the sum of weight * score."""

    @model_validator(mode="after")
    def _merge_fn_fits(self) -> "ComposedJudgerConfig":
        if self.merge_fn is None:
            return self
        if inspect.iscoroutinefunction(self.merge_fn):
            raise ValueError("merge_fn must be a plain function: it combines rewards that are there already.")
        try:
            inspect.signature(self.merge_fn).bind(None, {})
        except TypeError as error:
            raise ValueError(f"merge_fn is called as merge_fn(state, {{branch: reward}}): {error}.") from None
        return self

    reads_data_source: ClassVar[bool] = True
    """Whether a sample's `data_source` may change its reward."""

    @property
    def needs_label(self) -> bool:
        """Whether a sample without a label is sure to be a judge error, whatever its data source."""
        return all(map(_needs_label, self.branches.values()))

    def build(self, launcher: Launcher | None = None) -> ComposedJudger:
        """Builds every branch, each in the processes that its own `cpu_resources` asks for."""
        return ComposedJudger({n: c.build(launcher) for n, c in self.branches.items()}, self.merge_fn)


def _needs_label(branch: JudgerConfig | ComposedJudgerConfig) -> bool:
    """The same of a branch; a composed one is asked with all of its own."""
    if isinstance(branch, ComposedJudgerConfig):
        return any(map(_needs_label, branch.branches.values()))
    return branch.needs_label
