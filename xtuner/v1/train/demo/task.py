"""The demo's task: word problems of two-digit addition and subtraction, in GSM8K's format."""

import json
import random
import zlib
from pathlib import Path

_NAMES = ["Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max"]
_THINGS = ["apples", "coins", "books", "cards", "pens", "shells", "stamps", "eggs"]
_PLUS = [
    "{n} has {a} {t} and gets {b} more. How many {t} now?",
    "{n} finds {a} {t}, then {b} {t}. How many in all?",
    "There are {a} {t} in a box. {n} adds {b}. How many {t}?",
]
_MINUS = [
    "{n} has {a} {t} and gives away {b}. How many {t} are left?",
    "There are {a} {t} in a box. {n} takes {b}. How many {t}?",
    "{n} had {a} {t} and lost {b}. How many {t} now?",
]
HELD_OUT_SHARE = 10


def held_out(a: int, op: str, b: int) -> bool:
    """Whether the triple belongs to evaluation: a hash of all of it, so that no arithmetic structure is split."""
    return zlib.crc32(f"{a} {op} {b}".encode()) % HELD_OUT_SHARE == 0


def working(a: int, op: str, b: int) -> str:
    """The response: ones, tens, the carry or borrow as a step of its own, then the answer behind `####`."""
    tens_a, ones_a, tens_b, ones_b = a // 10, a % 10, b // 10, b % 10
    if op == "+":
        steps = [f"{ones_a}+{ones_b}={ones_a + ones_b}", f"{tens_a}+{tens_b}={tens_a + tens_b}"]
        if ones_a + ones_b > 9:
            steps.append(f"{tens_a + tens_b}+1={tens_a + tens_b + 1}")
        return f"{a}+{b}: {' '.join(steps)} #### {a + b}"
    if ones_a >= ones_b:
        steps = [f"{ones_a}-{ones_b}={ones_a - ones_b}", f"{tens_a}-{tens_b}={tens_a - tens_b}"]
    else:
        steps = [f"{ones_a + 10}-{ones_b}={ones_a + 10 - ones_b}", f"{tens_a}-1={tens_a - 1}"]
        steps.append(f"{tens_a - 1}-{tens_b}={tens_a - 1 - tens_b}")
    return f"{a}-{b}: {' '.join(steps)} #### {a - b}"


def make_rows(count: int, seed: int, evaluation: bool) -> list[dict]:
    """Rows in the format of the training data, with the worked solution in `extra_info.answer`.

    Operands and results have two digits or more. Rows of training and of evaluation never share a triple
    (a, operator, b).
    """
    rng = random.Random(seed)
    rows: list[dict] = []
    while len(rows) < count:
        op = rng.choice("+-")
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if op == "-" and a < b:
            a, b = b, a
        if held_out(a, op, b) != evaluation or (op == "-" and a - b < 10):
            continue
        text = rng.choice(_PLUS if op == "+" else _MINUS)
        question = text.format(n=rng.choice(_NAMES), t=rng.choice(_THINGS), a=a, b=b)
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b if op == "+" else a - b)},
                "extra_info": {"index": len(rows), "question": question, "answer": working(a, op, b)},
            }
        )
    return rows


def write_rows(path: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
