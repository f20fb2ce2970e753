"""Sampling parameters that an engine does not honour: known from the configuration, before any engine starts."""

from collections.abc import Callable, Mapping
from typing import Any

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.ops.sampling import MAX_ALTERNATIVES

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: 1/T would leave nothing but the largest logit, or overflow."""
_MOST_ALTERNATIVES = 20
"""Of served engines."""
_VLLM_LEAST_TEMPERATURE = 0.01
_EXTREME = 1e4
"""Of a factor, its inverse or a penalty: far beyond, float32 logits become infinite, which would end every request."""
_SGLANG_DETERMINISTIC = "enable_deterministic_inference"


def is_greedy(params: SampleParams) -> bool:
    """Whether the most likely token is taken."""
    return params.temperature < _GREEDY_BELOW or params.top_k == 1


def refusal(p: SampleParams, engine: str, arguments: Mapping[str, Any], vocabulary: int) -> str | None:
    """Why `engine` serves no request with these parameters; None if it does. arguments: its own, of
    `extra_rollout_config`."""
    most = MAX_ALTERNATIVES if engine == "native" else _MOST_ALTERNATIVES
    if stops := [i for i in p.stop_token_ids if not 0 <= i < vocabulary]:
        return f"sample_params.stop_token_ids={stops} are outside the model's vocabulary of {vocabulary}."
    if any(not stop for stop in p.stops):
        return "sample_params.stops holds an empty string: it would end every response."
    if p.top_logprobs > most:
        return f"sample_params.top_logprobs={p.top_logprobs}: the {engine} engine reports up to {most}; lower it."
    if not p.return_token_ids:
        return f"sample_params.return_token_ids=False: the {engine} engine is asked for ids; set True."
    if not p.no_stop_trim:
        return "sample_params.no_stop_trim=False: the stop token is kept, and trained; set True."
    own = OWN_REFUSALS.get(engine)
    return own(p, arguments) if own is not None else None


def _of_native(p: SampleParams, arguments: Mapping[str, Any]) -> str | None:
    if p.temperature > _EXTREME:
        return f"sample_params.temperature={p.temperature}: above {_EXTREME:g} all tokens are alike; lower it."
    if not 1 / _EXTREME <= p.repetition_penalty <= _EXTREME:
        return (
            f"sample_params.repetition_penalty={p.repetition_penalty} is not within {1 / _EXTREME:g} and {_EXTREME:g}; "
            "1 leaves it out."
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if abs(value := getattr(p, name)) > _EXTREME:
            return f"sample_params.{name}={value} is not within -{_EXTREME:g} and {_EXTREME:g}; 0 leaves it out."
    return None


def _of_sglang(p: SampleParams, arguments: Mapping[str, Any]) -> str | None:
    if p.sampling_seed is not None and not arguments.get(_SGLANG_DETERMINISTIC):
        return (
            f"sample_params.sampling_seed={p.sampling_seed}: sglang draws by a request's seed only with "
            f"extra_rollout_config['sglang_{_SGLANG_DETERMINISTIC}']=True (which needs a GPU); leave it None."
        )
    if p.repetition_penalty != 1:
        return f"sample_params.repetition_penalty={p.repetition_penalty}: sglang leaves the prompt out; set 1."
    if p.min_tokens and p.stops:
        return f"sample_params.min_tokens={p.min_tokens}: sglang stops at stop strings before that; set 0."
    return None


def _of_lmdeploy(p: SampleParams, arguments: Mapping[str, Any]) -> str | None:
    if p.stops:
        return "sample_params.stops: lmdeploy stops at any token that holds such a string; use stop_token_ids."
    if p.repetition_penalty != 1:
        return f"sample_params.repetition_penalty={p.repetition_penalty}: lmdeploy leaves the prompt out; set 1."
    if p.presence_penalty or p.frequency_penalty:
        return (
            f"sample_params.presence_penalty={p.presence_penalty}, frequency_penalty={p.frequency_penalty}: "
            "lmdeploy has no such penalties; set 0."
        )
    if p.temperature > 2:
        return f"sample_params.temperature={p.temperature}: lmdeploy takes up to 2; lower it."
    return None


def _of_vllm(p: SampleParams, arguments: Mapping[str, Any]) -> str | None:
    if not is_greedy(p) and p.temperature < _VLLM_LEAST_TEMPERATURE:
        return (
            f"sample_params.temperature={p.temperature}: vllm draws at {_VLLM_LEAST_TEMPERATURE} at least, and would "
            "not say so; raise it, or set 0."
        )
    return None


OWN_REFUSALS: dict[str, Callable[[SampleParams, Mapping[str, Any]], str | None]] = {
    "native": _of_native, "sglang": _of_sglang, "lmdeploy": _of_lmdeploy, "vllm": _of_vllm,
}  # fmt: skip
"""What this engine does in another way than others, or cannot do."""
