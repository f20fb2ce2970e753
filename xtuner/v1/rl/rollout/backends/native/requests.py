"""From a request to a sequence, or to the reason why it cannot be served."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xtuner.v1.data_proto import SampleParams

from ..base import GenerateRequest
from ..request_checks import objection
from ..sampling_checks import is_greedy
from .sampler import scatter_seed
from .scheduler import Sequence
from .stop_strings import StopStrings


class RequestRefused(ValueError):
    """The request can never be served; the message says why."""


@dataclass(slots=True)
class RequestLimits:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    """Longest prompt + response in tokens."""
    eos_ids: list[int]
    decode: Callable[[list[int]], str]
    """Ids to text, for requests with stop strings. Raises RequestRefused if there is no tokenizer."""


def make_sequence(request: GenerateRequest, limits: RequestLimits) -> Sequence:
    """Raises RequestRefused. A response longer than the context allows is cut to what fits."""
    p, prompt = request.params, len(request.prompt_ids)
    if problem := objection(request, "native", {}, limits.vocab_size, limits.context_length):
        raise RequestRefused(problem)
    _check_params(p, limits)
    greedy = is_greedy(p)
    top_k = min(p.top_k, limits.vocab_size) if p.top_k > 0 else limits.vocab_size
    top_p = p.top_p if p.top_p < 1 else 2.0
    log_min_p = math.log(p.min_p) if p.min_p > 0 else -math.inf
    truncated = not greedy and (top_k < limits.vocab_size or top_p < 1 or p.min_p > 0)
    penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    alternatives = p.top_logprobs if p.top_logprobs > 1 else 0
    shaped = truncated or penalised or alternatives > 0
    parameters = (
        scatter_seed(request.seed), prompt + p.min_tokens, top_k, top_p, log_min_p,
        1.0 if greedy else 1.0 / p.temperature, p.repetition_penalty, p.presence_penalty, p.frequency_penalty,
        alternatives, greedy, truncated, penalised, shaped,
        greedy or shaped or p.temperature != 1 or p.min_tokens > 0,
    )  # fmt: skip
    limit = min(prompt + p.max_tokens, limits.context_length)
    stops = StopStrings(p.stops, limits.decode) if p.stops else None
    return Sequence(request, limit, parameters, limits.eos_ids + p.stop_token_ids, stops)


def _check_params(p: SampleParams, limits: RequestLimits) -> None:
    if p.min_tokens and len({*limits.eos_ids, *p.stop_token_ids}) >= limits.vocab_size:
        raise RequestRefused(
            f"sample_params.min_tokens={p.min_tokens} forbids every token of the vocabulary of {limits.vocab_size}: "
            "set it to 0, or name fewer stop_token_ids."
        )
    if p.stops:
        limits.decode([])


def read_eos_ids(model_path: str | Path, vocab_size: int) -> list[int]:
    """EOS ids of a model folder: generation_config.json's, else config.json's.

    Raises:
        ValueError: neither has any, or they are no token ids.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None and value != []:
                ids = value if isinstance(value, list) else [value]
                if all(type(i) is int and 0 <= i < vocab_size for i in ids):
                    return ids
                raise ValueError(f"{file}: eos_token_id={value!r}: give one id or a list, each below {vocab_size}.")
    raise ValueError(
        f"{model_path}: neither generation_config.json nor config.json has eos_token_id, so no response "
        "would ever end by itself. Add the id of the token that ends a turn to generation_config.json."
    )
