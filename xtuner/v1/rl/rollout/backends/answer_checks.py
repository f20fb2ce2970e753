"""What a server's answer must be like before it is believed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xtuner.v1.utils import get_logger

from .base import GenerateOutput
from .server import ServerError

OF_THE_REQUEST = (400, 413, 422)
"""HTTP errors that another try would get too."""
_NO_LOGPROB, _ROUNDING = -9999.0, 1e-3
"""What vLLM says for minus infinity, SGLang something lower; and how far above 0 a log-prob may be."""
_TOLD: set[str] = set()
"""Servers of which something was said that is said once."""


@contextmanager
def readable(server: str) -> Iterator[None]:
    """What goes wrong within, where an answer is read, is that it is not what this server is known to say."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{server} gave an answer that cannot be read ({type(error).__name__}: {error})."
        raise ServerError(problem) from error


def checked(output: GenerateOutput, engine: str) -> GenerateOutput:
    """`output`, or an error if its log-probs are not those of its tokens."""
    if len(output.logprobs) != len(output.token_ids):
        raise ServerError(f"{engine}: {len(output.logprobs)} log-probs for {len(output.token_ids)} tokens.")
    if odd := [value for value in output.logprobs if not _NO_LOGPROB < value <= _ROUNDING]:
        raise ServerError(f"{engine}: {odd[0]} is no log-prob of a token that was drawn.")
    return output


def check_ids(output: GenerateOutput, vocabulary: int, engine: str) -> None:
    """An error if they cannot be tokens of the model: servers hand on what a sampler makes of logits that are NaN."""
    if odd := [i for i in output.token_ids if type(i) is not int or not 0 <= i < vocabulary]:
        raise ServerError(f"{engine}: {odd[0]!r} is no token of the vocabulary of {vocabulary}.")


def tell_if_short(output: GenerateOutput, wanted: int, server: str) -> None:
    """SGLang and LMDeploy cut responses without a word where no sequence of the whole context fits their cache."""
    if output.finish_reason == "length" and len(output.token_ids) < wanted and server not in _TOLD:
        _TOLD.add(server)
        get_logger().warning(
            f"{server} cuts responses short: one ended after {len(output.token_ids)} tokens of {wanted}. Its cache "
            "does not hold a sequence of rollout_config.context_length; lower that, or raise gpu_memory_utilization."
        )


def said(answer: Any, name: str, server: str) -> Any:
    """What an answer says of this."""
    if not isinstance(answer, dict) or name not in answer:
        raise ServerError(f"{server} gave an answer without {name!r}: {answer!r:.200}")
    return answer[name]
