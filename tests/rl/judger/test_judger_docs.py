"""docs/judgers.md says what the code does."""

import re
from fractions import Fraction
from pathlib import Path

from xtuner.v1.rl.judger import ComposedJudgerConfig
from xtuner.v1.rl.judger.gsm8k import extract_answer

PAGE = (Path(__file__).parents[3] / "docs" / "judgers.md").read_text(encoding="utf-8")


def test_the_table_of_forms():
    rows = re.findall(r"^\| `(.+)` \| (\S+) \|$", PAGE, re.MULTILINE)
    rows = [(stated, value) for stated, value in rows if "#" in stated or "boxed" in stated]
    assert len(rows) > 20
    wrong = [
        (stated, value, extract_answer(stated))
        for stated, value in rows
        if extract_answer(stated) != (None if value == "none" else Fraction(value))
    ]
    assert not wrong


def test_the_examples_run():
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert isinstance(names["judger_config"], ComposedJudgerConfig)
