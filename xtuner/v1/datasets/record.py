"""What a JSONL row must hold, and what is wrong with one that does not."""

import json
import math
from dataclasses import dataclass
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool")


class RowError(ValueError):
    """A row that cannot be used: `field` and why. Whoever knows file and line puts them in front."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")


@dataclass(frozen=True, slots=True)
class Record:
    """A row whose fields have been checked."""

    messages: list[dict[str, Any]]
    """Chat messages, each content a string (or None beside tool calls)."""
    data_source: dict[str, float]
    """Weight of each judger."""
    origin_data_source: str | dict[str, float]
    """`data_source` as it stands in the row."""
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object of one line."""
    try:
        row = json.loads(data.decode("utf-8").rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise RowError("line", f"not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise RowError("line", f"not valid JSON ({error.msg}, column {error.colno}).") from error
    except ValueError as error:
        raise RowError("line", "a number in it has thousands of digits. Write it as a string.") from error
    except RecursionError as error:
        raise RowError("line", "nested too deeply.") from error
    if not isinstance(row, dict):
        raise RowError("line", f"expected one JSON object a line, got {_kind(row)}.")
    if b"\\ud" in data.lower():
        _refuse_half_pairs(row)
    return row


def parse_record(row: dict[str, Any], require_ground_truth: bool) -> Record:
    """Check a row. Keys that are not used (`ability` and others) are left alone."""
    source = _required(row, "data_source", "it names the judger")
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise RowError("extra_info", f"expected an object or null, got {_kind(extra_info)}.")
    return Record(
        messages=_messages(_required(row, "prompt", "a string or a list of chat messages")),
        data_source=_weights(source),
        origin_data_source=source,
        reward_model=_reward_model(row.get("reward_model"), require_ground_truth),
        extra_info=extra_info or {},
    )


def _refuse_half_pairs(row: dict[str, Any]) -> None:
    # JSON may spell half of a surrogate pair. It is no character: no tokenizer takes it, no file can hold it.
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RowError("line", f"{half!r} is half of a surrogate pair, not a character. Remove it.") from error


def _required(row: dict[str, Any], key: str, what: str) -> Any:
    if row.get(key) is None:
        raise RowError(key, f"missing; {what}.")
    return row[key]


def _weights(source: Any) -> dict[str, float]:
    if isinstance(source, str) and source:
        return {source: 1.0}
    if isinstance(source, dict) and source:
        for name, weight in source.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not _is_finite(weight):
                raise RowError(f"data_source.{name}", f"expected a finite number, got {weight!r}.")
        return {name: float(weight) for name, weight in source.items()}
    raise RowError("data_source", f"expected a name or an object of name: weight, got {source!r}.")


def _is_finite(weight: float) -> bool:
    try:
        return math.isfinite(weight)
    except OverflowError:  # an integer beyond the largest float
        return False


def _reward_model(reward_model: Any, require_ground_truth: bool) -> dict[str, Any]:
    if reward_model is None and not require_ground_truth:
        return {}
    if reward_model is not None and not isinstance(reward_model, dict):
        raise RowError("reward_model", f"expected an object, got {_kind(reward_model)}.")
    if require_ground_truth and (reward_model or {}).get("ground_truth") in (None, ""):
        raise RowError(
            "reward_model.ground_truth",
            "missing. If no judger needs a label, set RLTextTokenizeFnConfig.require_ground_truth=False.",
        )
    return reward_model or {}


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise RowError("prompt", f"expected a string or a list of chat messages, got {_kind(prompt)}.")
    messages = [_message(f"prompt[{i}]", message) for i, message in enumerate(prompt)]
    if messages[-1]["role"] == "assistant":
        raise RowError("prompt", "the last message is the assistant's, which the model is to write. Leave it out.")
    return messages


def _message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(field, f'expected {{"role": ..., "content": ...}}, got {_kind(message)}.')
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        # Most chat templates leave out a role that they do not know, without a word.
        raise RowError(f"{field}.role", f"{role!r} is none of {', '.join(_ROLES)}.")
    if isinstance(content, list):
        content = "".join(_text_part(f"{field}.content[{i}]", part) for i, part in enumerate(content))
    if content is None and message.get("tool_calls"):
        return dict(message)
    if not isinstance(content, str):
        raise RowError(f"{field}.content", f"expected a string or text parts, got {_kind(content)}.")
    if role == "user" and not content.strip():
        raise RowError(f"{field}.content", "the user's message is empty.")
    return {**message, "content": content}


def _text_part(field: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = repr(part["type"]) if isinstance(part, dict) and "type" in part else _kind(part)
    raise RowError(field, f'expected {{"type": "text", "text": ...}}, got {kind}; only text is supported.')


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return "an empty list" if value == [] else names.get(type(value), "a number")
