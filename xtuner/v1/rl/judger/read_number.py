"""The one number that a short statement such as "$1,234.50", "72 hours" or "x = \\frac{1}{2}" stands for.

Exact (`Fraction`), deterministic, and quick for any input: statements are short and exponents bounded. What is not
clearly one number is None, never a part of itself.
"""

import re
import unicodedata
from fractions import Fraction

MAX_CHARS = 200
"""Longest statement."""
_MAX_EXPONENT = 100

_PLAIN = re.compile(r"[+-]?[0-9]{1,18}")
_WHOLE = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d{1,3}(?:[ \xa0'_]\d{3})+|\d+)(?!\d)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<mixed>\d+)[ \xa0]+(?P<top>\d+)/(?P<bottom>\d+)
       | (?P<number>{_DECIMAL})
         (?: \s*/\s*(?P<denominator>{_DECIMAL})
           | [eE](?P<exponent>[+-]?\d+)
           | \s*[*x]\s*10\s*\^\s*\(?(?P<power>[+-]?\d+)\)? )?""",
    re.VERBOSE,
)
_SCALES = {"k": 3, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(r"(k)(?![a-z])|\s*(hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)

_NO_NUMBER_AFTER = re.compile(r"\w\($|[A-Za-z_^/]$|[<>≤≥≠±√]\s*$|\S\s*[*^/]\s*$")
"""Before the number: a name, function, comparison or operator that it belongs to."""
_JOINED = re.compile(r"[.,:/^']?\d|\s*\^|\(\s*[-+.]?\d")
"""Right after the number: more of it, as in 1.2.3, 10:30, 2^3 or 2(3)."""
_SMALL_WORDS = (
    r"(?:of|for|per|in|from|at|with|by|on|over|than|since|because|after|before|as|is|are|each|every|when|if)\b"
)
_SECOND = re.compile(
    rf"""\s*(?:(?!{_SMALL_WORDS})[A-Za-z°%]+\.?\s+)?\(?[-+]?\.?\d
       | \s*(?:[A-Za-z°%]++\.?\s*){{0,3}}?
         (?:[,;&|/*+~±—-]|\b(?:or|and|to|through|plus|minus|times)\b)\s*[-+(]?\.?\d""",
    re.VERBOSE | re.IGNORECASE,
)
"""Another number that takes part in the statement: a list, a range, a sum, hours and minutes."""
_STATES = re.compile(r"(?::|\b(?:is|are|be|was|equals?))\W*$", re.IGNORECASE)
_COMMENT = re.compile(r"\s\((?:[^()]*[A-Za-z=]|\s*\d[\d\s.,]*[+*×÷])[^()]*\)")
"""Words, an equation, or how the number came about: `72 (3 + 69)`."""
_SIGN = re.compile(r"([+-])(\s*)$")
_CURRENCY = "$€£¥₹₽₩"
_DROPPED = str.maketrans("", "", _CURRENCY + "`")
_BEFORE_CURRENCY = re.compile(rf"(?<=[A-Za-z])(?=[{_CURRENCY}])|(?<=[A-Za-z]\.)(?=\d)")


def read_number(text: str) -> Fraction | None:
    """The value of `text`, or None if it holds none, or several, or an expression that is not worked out.

    Of an equation the last side that is a number counts: `6*12 = 72` is 72. Units, currency and percent signs
    do not change the value: `25%` is 25.
    """
    if _PLAIN.fullmatch(text := text.strip()):
        return Fraction(int(text))
    if len(text) > MAX_CHARS:
        return None
    text = fold(text)
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    text = re.sub(r"(?<=\d)\*\*(?=\d)", "^", text).replace("**", "").replace("__", "")
    text = _BEFORE_CURRENCY.sub(" ", re.sub(r"(?<=[A-Za-z]\.)(?=\d)", " ", text)).translate(_DROPPED)
    text = _COMMENT.sub("", re.sub(r"[-=]>", ":", text))
    if re.search(r"[<>!]=", text):
        return None
    values = (_read_side(side.strip(" \t\n*_")) for side in reversed(text.split("=")))
    return next((value for value in values if value is not None), None)


def _read_side(text: str) -> Fraction | None:
    match = _NUMBER.search(text)
    if match is None or _NO_NUMBER_AFTER.search(before := text[: match.start()]):
        return None
    sign, after = _sign(before), text[match.end() :]
    value = _value(match)
    if sign is None or value is None:
        return None
    if scale := _SCALE.match(after):
        value *= 10 ** _SCALES[(scale[1] or scale[2]).lower()]
        after = after[scale.end() :]
    if _JOINED.match(after) or _SECOND.match(after):
        return None
    if re.search(r"[A-Za-z]", before) and not _STATES.search(before) and re.search(r"\d", after):
        return None  # "the 3 trays hold 72": which one is the answer?
    return sign * value


def _sign(before: str) -> int | None:
    """1 or -1 from what stands before the number; None if the sign belongs to an expression."""
    match = _SIGN.search(before)
    if match is None:
        return 1
    rest = before[: match.start()]
    if match[2] and rest.rstrip()[-1:].isalpha():
        return 1 if match[1] == "-" else None  # "answer - 72": a dash; "x + 72": a sum
    if rest[-1:].isalnum() or rest.rstrip()[-1:] in ("+", "-", ")"):
        return None
    return -1 if match[1] == "-" else 1


def _value(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    if groups["mixed"]:
        top, bottom = int(groups["top"]), int(groups["bottom"])
        return int(groups["mixed"]) + Fraction(top, bottom) if top < bottom else None
    value = _decimal(groups["number"])
    if groups["denominator"]:
        denominator = _decimal(groups["denominator"])
        return value / denominator if denominator else None
    exponent = int(groups["exponent"] or groups["power"] or 0)
    return value * Fraction(10) ** exponent if abs(exponent) <= _MAX_EXPONENT else None


def _decimal(digits: str) -> Fraction:
    return Fraction(re.sub(r"[, \xa0'_]", "", digits).rstrip("."))


_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}|(\d)\s*(\d))")
_LATEX = [
    (_FRACTION, r" \1\3/\2\4 "),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b"), "°"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\,"), "\xa0"),
    (re.compile(r"\\(?:times|cdot|ast)\b"), "*"),
    (re.compile(r"\\div\b"), "/"),
    (re.compile(r"\\approx\b"), "="),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (
        re.compile(
            r"\\(?:(?:text|mathrm|mathbf|mathit|mathsf|mathbb|textbf|textit|emph|underline|mbox|hbox|bm|boldsymbol"
            r"|operatorname|displaystyle|left|right|quad|qquad|checkmark|therefore|pounds|euro)(?![A-Za-z])|[()\[\];:\s\\])"
        ),
        " ",
    ),
    (re.compile(r"\^\s*\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\\[A-Za-z]*[\s{]*"), "^"),
    (re.compile(r"[{}]"), " "),
]
"""In order. A command that is left, such as \\sqrt, becomes an operator: what it is applied to is no plain number."""


def _without_latex(text: str) -> str:
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


class _Folded(dict[int, str]):
    """Code points to plain text, filled as they come."""

    _FIXED = {
        **dict.fromkeys("−‐‑‒–﹣", "-"),
        **dict.fromkeys("\xa0\u2007\u2009\u202f", "\xa0"),
        **dict.fromkeys("×·⋅∙", "*"),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("’‘", "'"),
        "≈": "=",
    }

    def __missing__(self, code: int) -> str:
        self[code] = folded = self._fold(chr(code))
        return folded

    def _fold(self, char: str) -> str:
        if char in self._FIXED:
            return self._FIXED[char]
        category = unicodedata.category(char)
        if category == "Nd":
            return str(unicodedata.decimal(char))
        if category in ("Zs", "Cf"):
            return " " if category == "Zs" else ""
        if "！" <= char <= "～":
            return chr(ord(char) - 0xFEE0)
        kind, *codes = unicodedata.decomposition(char).split() or [""]
        plain = "".join(chr(int(code, 16)) for code in codes) if kind in ("<super>", "<fraction>") else ""
        return {"<super>": f"^{plain}", "<fraction>": f" {plain}".replace("⁄", "/")}.get(kind, char)


_FOLDED = _Folded((code, chr(code)) for code in range(128))


def fold(text: str) -> str:
    """Digits of all scripts, full-width signs, minus signs and blanks as ASCII; 1/2 for ½; ^2 for ²; nothing for
    zero-width characters. A blank that can group digits becomes U+00A0."""
    return text if text.isascii() else text.translate(_FOLDED)
