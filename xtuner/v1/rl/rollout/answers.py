"""From a sample to a request, and from an engine's answer back to the sample."""

import functools
import hashlib
import math
from typing import Any

from xtuner.v1.data_proto import RolloutState, SampleParams, Status, reset_response, status_of_finish_reason

from .backends.base import GenerateOutput


def sample_seed(run_seed: int, rollout_id: int, prompt_length: int) -> int:
    """63-bit seed of a response: the same whatever else runs, and another one for every turn of a conversation."""
    digest = hashlib.blake2b(f"{run_seed}:{rollout_id}:{prompt_length}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def fit_to_context(params: SampleParams, prompt_length: int, context_length: int) -> SampleParams:
    """`params` with `max_tokens` cut so that prompt and response fit; itself if they fit already.

    Raises:
        ValueError: the prompt leaves no room for a single token.
    """
    room = context_length - prompt_length
    if room < 1:
        raise ValueError(
            f"prompt of {prompt_length} tokens leaves no room in context_length={context_length}; raise "
            "rollout_config.context_length or lower the prompts' max_length."
        )
    if params.max_tokens <= room:
        return params
    return params.model_copy(update={"max_tokens": room, "min_tokens": min(params.min_tokens, room)})


def output_problem(output: GenerateOutput, params: SampleParams) -> str | None:
    """What is wrong with an answer that claims success or abortion; None if it can be used."""
    count = len(output.token_ids)
    if count == 0 and output.finish_reason != "abort":
        return f"no tokens (finish_reason {output.finish_reason!r})"
    if count > params.max_tokens:
        return f"{count} tokens, max_tokens is {params.max_tokens}"
    if len(output.weight_versions) != count:
        return f"{len(output.weight_versions)} weight versions for {count} tokens"
    if not params.return_logprob:
        return None
    if len(output.logprobs) != count:
        return f"{len(output.logprobs)} log-probs for {count} tokens"
    if not all(map(math.isfinite, output.logprobs)):
        return "log-probs that are not finite"
    return None


def fill(state: RolloutState, output: GenerateOutput, tokenizer: Any) -> RolloutState:
    """Write an answer into its sample. The ids are the engine's own; the text is for people and judgers."""
    params = state.sample_params
    ids = list(output.token_ids)
    text = decode(tokenizer, ids, params.skip_special_tokens)
    if output.finish_reason == "stop" and params.stops:
        text = _cut_at_stop(text, decode(tokenizer, ids[:-1], params.skip_special_tokens), params)
    state.response = text
    state.response_ids = ids
    state.logprobs = list(output.logprobs) if params.return_logprob else None
    state.logprob_stage = output.logprob_stage
    state.response_model_steps = list(output.weight_versions)
    state.finish_reason = output.finish_reason
    state.status = status_of_finish_reason(output.finish_reason)
    state.error_msg = output.error
    state.routed_experts = output.routed_experts
    if output.top_logprobs is not None:
        state.extra_fields["top_logprobs"] = output.top_logprobs
    return state


def decode(tokenizer: Any, ids: list[int], skip_special_tokens: bool) -> str:
    """The text of `ids` as the tokenizer's `decode` gives it, nothing cleaned up."""
    if _leaves_decoding_to_backend(tokenizer.__class__):
        # What `decode` does around this, a look at every id first of all, takes longer than the decoding.
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


@functools.cache
def _leaves_decoding_to_backend(tokenizer_class: type) -> bool:
    from transformers import PreTrainedTokenizerFast

    names = ("decode", "_decode")
    return issubclass(tokenizer_class, PreTrainedTokenizerFast) and all(
        getattr(tokenizer_class, name, None) is getattr(PreTrainedTokenizerFast, name, ()) for name in names
    )


def _cut_at_stop(text: str, before: str, params: SampleParams) -> str:
    """End the text with the stop string that the last token completed (or before it): the token may hold more. Nothing
    is cut where it completed none: one that was there `before` came too early to count (min_tokens)."""
    known = len(before.rstrip("\ufffd"))  # of a character that the last token completed too
    found = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in params.stops)
    start, stop = min(((start, stop) for start, stop in found if start >= 0), default=(-1, ""))
    if start < 0:
        return text
    return text[: start + len(stop)] if params.include_stop_str_in_output else text[:start]


def fail(state: RolloutState, message: str) -> RolloutState:
    """No response: `message` says why."""
    reset_response(state)
    state.finish_reason, state.error_msg, state.status = "error", message, Status.FAILED
    return state


def abort(state: RolloutState) -> RolloutState:
    """Not even sent, because generation is paused."""
    reset_response(state)
    state.finish_reason, state.status = "abort", Status.ABORTED
    return state
