"""What a request must be like before an engine gets it."""

from collections.abc import Mapping
from typing import Any

from .base import GenerateRequest
from .sampling_checks import refusal


def objection(
    request: GenerateRequest, engine: str, arguments: Mapping[str, Any], vocabulary: int, context_length: int
) -> str | None:
    """Why the request cannot be served; None if it can. Ids that are out of range would be the end of some engines.
    arguments: see `refusal`."""
    ids = request.prompt_ids
    if not ids:
        return "the prompt is empty: there is nothing to continue."
    if len(ids) + 1 > context_length:
        return (
            f"a prompt of {len(ids)} tokens and one token of response do not fit into the context of {context_length} "
            "tokens: raise context_length or the memory of the cache, or filter the prompts."
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        bad = next(i for i in ids if not 0 <= i < vocabulary)
        return (
            f"prompt id {bad} is outside the model's vocabulary of {vocabulary}: tokenizer and model do not belong "
            "together."
        )
    return refusal(request.params, engine, arguments, vocabulary)
