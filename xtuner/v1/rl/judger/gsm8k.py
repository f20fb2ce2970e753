"""GSM8K: the final number of a response, compared by value with the label. docs/judgers.md has the rule in words."""

import functools
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from numbers import Real
from typing import Any, ClassVar

from pydantic import Field, model_validator

from xtuner.v1.utils import get_logger

from .base import JudgeError
from .config import JudgerConfig, RewardHandler
from .native import NativeJudger
from .read_number import MAX_CHARS, fold, read_number

_MARKER = "####"
_BOX = "\\boxed"
_BOX_OPENS = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_LINE_END = re.compile(r"[\r\n]")
_TAG = re.compile(r"<<[^<>]*>>|<[|｜][^<>]{0,60}[|｜]>|</?[A-Za-z][\w-]{0,30}>|\[/?INST\]")
"""Calculator notes, special tokens, HTML: each ends a statement."""
_HEADING = re.compile(r"[\s*_]*(?:step|part|case|method|question|problem)\b", re.IGNORECASE)
_NUMBER_ALONE = re.compile(r"[\s*$`(+-]*[\d.,]*\d[\s*$`).%]*")


def extract_answer(text: str) -> Fraction | None:
    r"""The final answer: what the last `####` marker or `\boxed{}` states, if that is one number.

    Thinking (`<think>`) does not count. Markers that state nothing (nothing behind them, or a heading) and boxes
    that are empty or cut off are passed over.
    """
    statement = next(_statements(_without_thinking(text)), None)
    return None if statement is None else read_number(statement)


def score_gsm8k(response: str, label: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """`score` where response and label have equal value, `format_score` where the answer is another number, else 0.

    The reward's `answer` is the number that was read, None if there was none; `acc` tells whether it is the right one,
    whatever the scores. An empty label matches nothing; none at all raises JudgeError, one without a number
    ValueError.
    """
    answer, gold = extract_answer(response), _read_label(label)
    if answer is None:
        return {"score": 0.0, "acc": False, "answer": None}
    right = answer == gold
    score = extra_info.get("score", 1) if right else extra_info.get("format_score", 0)
    return {"score": float(score), "acc": right, "answer": _shown(answer)}


def _read_label(label: Any) -> Fraction | None:
    if label is None:
        raise JudgeError("label is missing: the sample has no reward_model['ground_truth']")
    if isinstance(label, Real) and not isinstance(label, bool) and math.isfinite(label):
        return Fraction(str(label))
    if isinstance(label, str):
        if not label.strip():
            _warn_of_empty_label()
            return None
        solution = _MARKER in label or _BOX in label
        if (value := extract_answer(label) if solution else read_number(label)) is not None:
            return value
    raise ValueError(f"label {label!r:.200} holds no number")


@functools.cache
def _warn_of_empty_label() -> None:
    """Once: a data set may have many."""
    get_logger().warning("GSM8K judger: there is an empty label; it matches no answer.")


def _shown(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else repr(float(value))


def _without_thinking(text: str) -> str:
    text = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
    return text.partition("<think>")[0]


def _statements(text: str) -> Iterator[str]:
    """Stated answers from the last to the first."""
    closing: dict[int, int] | None = None
    stop = len(text)
    marker, box = text.rfind(_MARKER), text.rfind(_BOX)
    while marker >= 0 or box >= 0:
        if box > marker:
            if opening := _BOX_OPENS.match(text, box):
                closing = _closing_braces(text) if closing is None else closing
                content = text[opening.end() : closing.get(opening.end() - 1, opening.end())]
                if content.strip():
                    yield content
            box = text.rfind(_BOX, 0, box)
        else:
            if statement := _stated_by_marker(text, marker + len(_MARKER), stop):
                yield statement
            stop, marker = marker, text.rfind(_MARKER, 0, marker)


def _stated_by_marker(text: str, start: int, stop: int) -> str | None:
    """The first part of the marker's line that holds a digit; or the next line, if a number is all there is."""
    end = match.start() if (match := _LINE_END.search(text, start, stop)) else stop
    line = fold(text[start:end].strip()[: MAX_CHARS + 1])
    if len(line) > MAX_CHARS:
        line = line.rpartition(" ")[0]
    for part in _TAG.sub("\n", line).split("\n"):
        if re.search(r"\d", part):
            return None if _HEADING.match(part) else part
    following = text[end:stop].lstrip().partition("\n")[0]
    return following if len(following) <= MAX_CHARS and _NUMBER_ALONE.fullmatch(following) else None


def _closing_braces(text: str) -> dict[int, int]:
    """Position of the closing brace of each opening one."""
    closing, opened = {}, []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


class GSM8KJudgerConfig(JudgerConfig):
    """Grade-school maths: the final number after `####` (or in a box) against `reward_model["ground_truth"]`.

    The rule takes microseconds, so it runs inline and needs no time limit.
    """

    needs_label: ClassVar[bool] = True

    judger_name: str = Field("openai/gsm8k", min_length=1)
    """Name in logs and of its worker pool."""
    reward_handler: RewardHandler | None = Field(score_gsm8k, exclude=True)
    """The GSM8K rule. For another one use JudgerConfig."""
    extra_info: dict[str, Any] = Field({"score": 1, "format_score": 0}, exclude=True)
    """`score`: reward of the right number (1 if left out). `format_score`: of another number (0 if left out)."""

    @model_validator(mode="after")
    def _our_rule(self) -> "GSM8KJudgerConfig":
        where = f"judger {self.judger_name!r}:"
        if self.reward_handler is not score_gsm8k:
            raise ValueError(f"{where} GSM8KJudgerConfig has its own reward_handler: use JudgerConfig for yours.")
        if unknown := set(self.extra_info) - {"score", "format_score"}:
            raise ValueError(
                f"{where} extra_info has unknown keys {sorted(unknown)}; it takes 'score', 'format_score'."
            )
        values = {"score": 1, "format_score": 0, **self.extra_info}
        for name, value in values.items():
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"{where} extra_info[{name!r}]={value!r} must be a finite number.")
        if values["score"] <= values["format_score"]:
            raise ValueError(
                f"{where} extra_info score={values['score']} must exceed format_score={values['format_score']}, "
                "else right answers earn no more than wrong ones."
            )
        return self

    @property
    def reads_data_source(self) -> bool:
        return type(self).build_local is not GSM8KJudgerConfig.build_local

    def build_local(self) -> NativeJudger:
        return NativeJudger(self.judger_name, score_gsm8k, self.extra_info, inline=True)
