"""What a request must be like before a server gets it."""

from xtuner.v1.data_proto import SampleParams

from .base import GenerateRequest

_GREEDY_BELOW = 1e-5
_MOST_ALTERNATIVES = 20


def is_greedy(params: SampleParams) -> bool:
    """Whether the most likely token is taken."""
    return params.temperature < _GREEDY_BELOW or params.top_k == 1


def objection(request: GenerateRequest, vocabulary: int, context_length: int, engine: str) -> str | None:
    """Why the request cannot be served; None if it can. Ids that are out of range would be the end of some servers."""
    ids, p = request.prompt_ids, request.params
    if not ids:
        return "the prompt is empty: there is nothing to continue."
    if len(ids) + 1 > context_length:
        return (
            f"a prompt of {len(ids)} tokens and one token of response do not fit into the context of {context_length} "
            "tokens: raise context_length, or filter the prompts."
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        bad = next(i for i in ids if not 0 <= i < vocabulary)
        return (
            f"prompt id {bad} is outside the model's vocabulary of {vocabulary}: tokenizer and model do not belong "
            "together."
        )
    if stops := [i for i in p.stop_token_ids if not 0 <= i < vocabulary]:
        return f"sample_params.stop_token_ids={stops} are outside the model's vocabulary of {vocabulary}."
    if any(not stop for stop in p.stops):
        return "sample_params.stops holds an empty string: it would end every response."
    if p.top_logprobs > _MOST_ALTERNATIVES:
        return f"sample_params.top_logprobs={p.top_logprobs}: {engine} reports up to {_MOST_ALTERNATIVES}; lower it."
    if not p.return_token_ids:
        return f"sample_params.return_token_ids=False: {engine} is asked for ids; set True."
    if not p.no_stop_trim:
        return "sample_params.no_stop_trim=False: the stop token is trained; set True."
    return None
