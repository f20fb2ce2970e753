"""The GSM8K rule, form by form. A row is (response, label, pays); each names in its group what it guards against."""

import asyncio
import gc
import random
from fractions import Fraction

import pytest

from xtuner.v1.rl.judger import GSM8KJudgerConfig
from xtuner.v1.rl.judger.gsm8k import extract_answer, score_gsm8k

WORK = "Each of 4 shelves holds 9 jars: 4*9=<<4*9=36>>36 jars.\n"
CHATTER = " This is the same as what the first count gave." * 12
R, W = True, False  # right, wrong

ROWS = {
    "basic": [
        (WORK + "#### 36", "36", R),
        (WORK + "#### 35", "36", W),
        (WORK + "There are 36 jars.", "36", W),  # no final answer is stated
        ("", "36", W),
        (" \n", "36", W),
        (WORK + "####", "36", W),
        (WORK + "#### \n", "36", W),
        ("#### 36", "36", R),
        (WORK + "#### 36<|im_end|>", "36", R),
        (WORK + "#### 36<|eot_id|>\n", "36", R),
        (WORK + "#### 36</s>", "36", R),
        (WORK + "#### 36<｜end▁of▁sentence｜>", "36", R),
        (WORK + "#### 36<|im_end|>9", "36", R),  # what follows an end token is not the answer
        (WORK.replace("\n", "\r\n") + "#### 36\r\n", "36", R),
        (WORK + "#### 36 \n \n", "36", R),
        (WORK + "#### <<4*9=36>>36", "36", R),
    ],
    "comma": [
        ("#### 3,600", "3600", R),
        ("#### 3600", "3,600", R),
        ("#### 3600", 3600, R),
        ("#### 7,500,000", "7500000", R),
        ("#### 7,50,000", "750000", R),
        ("#### 36, as counted above", "36", R),
        ("#### ,", "36", W),
        ("#### ,", "", W),
        ("#### 3,6", "36", W),  # not a way to group thousands
        ("#### 3,60000", "360000", W),
        ("#### 36,50", "36", W),
        ("#### 36, 50", "36", W),
        ("#### 3 600", "3600", R),
        ("#### 3'600", "3600", R),
        ("#### 3{,}600", "3600", R),
        ("#### 3\\,600", "3600", R),
    ],
    "currency": [
        ("#### $36", "36", R),
        ("#### $ 36", "36", R),
        ("#### 36$", "36", R),
        ("#### €36", "36", R),
        ("#### US$36", "36", R),
        ("#### Rs.36", "36", R),
        ("#### $2,340.50", "2340.5", R),
        ("#### \\$36", "36", R),
        ("#### $36$", "36", R),
        ("#### -$36", "-36", R),
        ("#### $-36", "-36", R),
        ("#### -$36", "36", W),
        ("#### a loss of -$36", "36", W),
    ],
    "units": [
        ("#### 36 minutes", "36", R),
        ("#### 36kg", "36", R),
        ("#### 36 m^2", "36", R),
        ("#### 36 km/h", "36", R),
        ("#### $36/day", "36", R),
        ("#### 36 cents", "36", R),
        ("#### 36 cents", "0.36", W),
        ("#### 36 jars (4 shelves of 9)", "36", R),
        ("#### 36 jars for 4 shelves", "36", R),
        ("#### 36 hours 20 minutes", "36", W),
        ("#### 2 million", "2000000", R),
        ("#### 2 million", "2", W),
        ("#### 36k", "36", W),
    ],
    "percent": [
        ("#### 40%", "40", R),
        ("#### 40 percent", "40", R),
        ("#### 40\\%", "40", R),
        ("#### 0.4", "40", W),
        ("#### 40%", "0.4", W),
    ],
    "sign": [
        ("#### -8", "-8", R),
        ("#### 8", "-8", W),
        ("#### -8", "8", W),
        ("#### - 8", "-8", R),
        ("#### −8", "-8", R),
        ("#### –8", "-8", R),
        ("#### +36", "36", R),
        ("#### -0", "0", R),
        ("#### --8", "8", W),
        ("#### x-8", "8", W),
        ("#### Answer - 8", "8", R),
        ("#### Answer: -8", "-8", R),
    ],
    "marker": [
        (WORK + "####36", "36", R),
        (WORK + "####   36", "36", R),
        (WORK + "####\t36", "36", R),
        (WORK + "##### 36", "36", R),
        (WORK + "####\n36", "36", R),
        (WORK + "#### Answer\n\n**36**", "36", R),
        (WORK + "####\n36 was the count", "36", W),
        (WORK + "#### **36**", "36", R),
        (WORK + "**#### 36**", "36", R),
        (WORK + "#### `36`", "36", R),
        (WORK + "#### Answer: 36", "36", R),
        (WORK + "#### The answer is 36.", "36", R),
        (WORK + "So it is #### 36", "36", R),
        (WORK + "### 36", "36", W),
        (WORK + "#### \\boxed{36}", "36", R),
        (WORK + "#### $\\boxed{36}$ jars", "36", R),
        (WORK + "#### <answer>36</answer>", "36", R),
    ],
    "decimal": [
        ("#### 36.", "36", R),
        ("#### 36.0", "36", R),
        ("#### 36.00", "36", R),
        ("#### 36", "36.0", R),
        ("#### 0.25", "0.25", R),
        ("#### .25", "0.25", R),
        ("#### 0.250", "0.25", R),
        ("#### 0.1", 0.1, R),
        ("#### 36.5", "36", W),
        ("#### 35.9999999999999999", "36", W),  # equal as floats
        ("#### 3.6.1", "3.6", W),
        ("#### 3.6.1", "3", W),
        ("#### 036", "36", R),
    ],
    "substring": [
        ("#### 136", "36", W),
        ("#### 360", "36", W),
        ("There were 36, a third is left.\n#### 12", "36", W),
    ],
    "multi": [
        ("#### 30\nNo, 6 are missing.\n#### 36", "36", R),
        ("#### 36\nNo, that is double.\n#### 18", "36", W),
        ("#### 1. Shelves\n4.\n#### 2. Jars\n4*9=36.\n#### 36", "36", R),
        ("#### 36\n\n#### 36", "36", R),
        ("#### 36 #### 18", "18", R),
        ("#### 36\n####", "36", R),  # a marker that states nothing is no statement
        ("#### 36\n\n#### Check\nfour shelves", "36", R),
        ("#### 36\n\n#### Step 2: check", "36", R),
        ("#### 36 or 37", "36", W),
        ("#### 36 and 37", "37", W),
        ("#### 36; 37", "36", W),
        ("#### 36 37", "36", W),
        ("#### between 30 and 36", "30", W),
        ("#### the 4 shelves hold 36", "4", W),
    ],
    "window": [
        (WORK + "#### 36\n" + CHATTER, "36", R),
        ("#### 9\n" + CHATTER + "\n#### 36", "36", R),
        ("#### 36\n" + CHATTER + "\nI cannot tell.", "9", W),
        ("#### " * 5000, "36", W),
        ("#### 36 jars" + CHATTER, "36", R),
    ],
    "boxed": [
        ("It is \\boxed{36}.", "36", R),
        ("It is \\boxed{35}.", "36", W),
        ("\\boxed{30} and six more: \\boxed{36}", "36", R),
        ("\\boxed{36} and six less: \\boxed{30}", "36", W),
        ("\\boxed{\\frac{1}{4}}", "0.25", R),
        ("\\boxed{\\frac{1}{3}}", "0.25", W),
        ("\\boxed{\\dfrac{1}{\\dfrac{1}{4}}}", "1", W),
        ("\\boxed{\\text{36}}", "36", R),
        ("\\boxed{36\\text{ jars}}", "36", R),
        ("\\boxed{36 \\text{ cm}^2}", "36", R),
        ("\\boxed{\\$36}", "36", R),
        ("\\boxed{40\\%}", "40", R),
        ("\\boxed{x = 36}", "36", R),
        ("\\boxed{-8}", "-8", R),
        ("\\boxed{-8}", "8", W),
        ("\\boxed{}", "36", W),
        ("\\boxed{30 + 6", "30", W),
        ("\\boxed{36", "36", W),
        ("#### \\boxed{36", "36", W),
        ("\\[\\boxed{36}\\]", "36", R),
        ("$$\\boxed{36}$$", "36", R),
        ("\\boxed{36}, so it is \\boxed{36}", "36", R),
        ("\\boxed{36}, so it is \\boxed{36}", "3636", W),
        ("\\boxed{3, 6}", "36", W),
        ("It is \\boxed{36}.\n#### 36", "36", R),
        ("At first \\boxed{36}.\n#### 30", "36", W),
        ("#### 1. Count\n4*9\n#### 2. Result\n\\boxed{36}", "36", R),
        ("\\boxed{\\sqrt{36}}", "36", W),
    ],
    "fraction": [
        ("#### 1/4", "0.25", R),
        ("#### \\frac{1}{4}", "0.25", R),
        ("#### \\frac14", "1/4", R),
        ("#### -\\frac{1}{4}", "-0.25", R),
        ("#### 2 1/4", "2.25", R),
        ("#### 2\\frac{1}{4}", "2.25", R),
        ("#### ¼", "0.25", R),
        ("#### 36/5", "36", W),
        ("#### 1/3", "0.333", W),
        ("#### 36/0", "36", W),
        ("#### 1/2/3", "1", W),
    ],
    "expression": [
        ("#### 3^2", "3", W),
        ("#### 3**2", "3", W),
        ("#### 3²", "3", W),
        ("#### 3²", "32", W),
        ("#### 4*9", "4", W),
        ("#### 4*9=36", "4", W),
        ("#### 4*9=36", "36", R),
        ("#### 36 = 4*9", "36", R),
        ("#### 4 \\times 9 = 36", "36", R),
        ("#### 36, since 4*9=36", "36", R),
        ("#### 36 (20 + 16)", "36", R),
        ("#### 36 (4*9)", "36", R),
        ("#### 36 (35 - 37)", "36", W),
        ("#### 30 + 6", "30", W),
        ("#### 30-36", "30", W),
        ("#### 30 to 36", "30", W),
        ("#### 30–36", "36", W),
        ("#### >36", "36", W),
        ("#### 4:30", "4", W),
        ("#### sqrt(36)", "36", W),
        ("#### 36\\pi", "36", W),
    ],
    "scientific": [
        ("#### 3.6e2", "3.6", W),
        ("#### 3.6e2", "360", R),
        ("#### 3.6 \\times 10^2", "360", R),
        ("#### 3.6×10²", "360", R),
        ("#### 1e999999999", "1", W),
        ("#### 1e-999999999", "0", W),
        ("#### " + "9" * 50_000, "9", W),
    ],
    "unicode": [
        ("#### ３６", "36", R),
        ("####\u00a036", "36", R),
        ("#### 3\u202f600", "3600", R),
        ("#### 36\u200b", "36", R),
        ("一共三十六罐。\n#### 36", "36", R),
        ("#### 一共36罐。", "36", R),
        ("#### ٣٦", "36", R),
    ],
    "no number": [
        ("#### inf", "36", W),
        ("#### NaN", "36", W),
        ("#### none", "36", W),
        ("#### 36\n\\boxed{\\text{unknown}}", "36", W),
        ("#### .", "36", W),
    ],
    "thinking": [
        ("<think>is it #### 30?</think>\nThere are 36.\n#### 36", "36", R),
        ("<think>is it #### 30?</think>\nThere are 36.\n#### 36", "30", W),
        ("is it #### 30?</think>\n#### 36", "36", R),  # the prompt may have opened the section
        ("<think>#### 36</think>\nDone.", "36", W),
        ("<think>so #### 36", "36", W),
    ],
    "cut off": [("Each of 4 shelves holds 9 jars: 4*9=3", "36", W), (WORK + "####", "4", W)],
    "label": [
        (WORK + "#### 36", 36, R),
        (WORK + "#### 36", 36.0, R),
        (WORK + "#### 36", " 36 ", R),
        (WORK + "#### 36", "$36", R),
        (WORK + "#### 36", WORK + "#### 36", R),
        (WORK + "#### 36", "\\boxed{36}", R),
        (WORK + "#### 36", "", W),
        ("no number at all", "", W),
    ],
}


@pytest.mark.parametrize("group", ROWS)
def test_pays_exactly_the_right_value(group):
    wrong = [
        f"{response[-60:]!r} with label {label!r}: pays {not pays}"
        for response, label, pays in ROWS[group]
        if score_gsm8k(response, label, {"score": 1, "format_score": 0})["score"] != float(pays)
    ]
    assert not wrong, "\n".join(wrong)


def test_scores_of_right_wrong_and_no_answer():
    info = {"score": 2, "format_score": 0.5}
    assert score_gsm8k("#### 36", "36", info) == {"score": 2.0, "acc": True, "answer": "36"}
    assert score_gsm8k("#### 35.5", "36", info) == {"score": 0.5, "acc": False, "answer": "35.5"}
    assert score_gsm8k("36", "36", info) == {"score": 0.0, "acc": False, "answer": None}
    assert score_gsm8k("36", "", info)["acc"] is score_gsm8k("#### 36", "", info)["acc"] is False


def test_extraction_is_exact():
    assert extract_answer("#### 0.1") == Fraction(1, 10)
    assert extract_answer("#### 12345678901234567890.5") == Fraction(24691357802469135781, 2)


@pytest.mark.parametrize("label", ["abc", "4 or 5", True, float("nan"), ["36"]])
def test_a_label_without_a_number_is_an_error_not_a_wrong_answer(label):
    with pytest.raises(ValueError, match="holds no number"):
        score_gsm8k("#### 36", label, {})


@pytest.mark.timeout(10)
def test_no_text_is_slow():
    # Each of these takes minutes or hours with a pattern that backtracks or a scan that starts over.
    n = 20_000
    for text in (
        "\\boxed{" * n, "####" * n, "#### \n" * n, "\\boxed{}" * n, "\\boxed" * n, "<think>" * n, "{" * n + "\\boxed{",
        "#### " + "1," * n, "#### " + "(" * n, "#### " + "<" * n, "#### " + " " * n, "#### " + "a " * n + "5",
        "#### 5" + "a" * 190, "#### 5" + " a" * 95, "#### " + "1 222" * 38, "#### " + "\\frac" * 38 + "1",
        "#### 5" + "a." * 95, "#### " + "-" * 190 + "1", "#### 1" + " " * 190 + "x",
    ):  # fmt: skip
        extract_answer(text)


def test_no_text_raises():
    pieces = ["#### ", "\\boxed{", "\\frac", "{", "}", "1", "7", "9" * 99, ",", ".", "-", "+", "/", "*", "^", " ", "(",
              ")", "½", "²", "\u202f", "\\", "e", "x", "=", "$", "%", "<", "|", ">", "or", "k",
              "\n", "</think>"]  # fmt: skip
    draw = random.Random(0)
    for _ in range(5000):
        extract_answer("#### " + "".join(draw.choices(pieces, k=draw.randint(1, 25))))


def test_judger_scores_a_batch_without_leaving_the_loop(sample):
    # The rule is inline: it must not pay for a thread a sample, and stays quick for a whole step of 256.
    judger = GSM8KJudgerConfig().build()
    states = [sample(f"#### {i % 2}", "1") for i in range(256)]
    gc.collect()
    judged = asyncio.run(judger.batch_judge(states))
    assert [state.reward["score"] for state in judged] == [float(i % 2) for i in range(256)]
    assert judger.inline and judger.get_judger_name() == "openai/gsm8k"


@pytest.mark.parametrize(
    ("extra_info", "message"),
    [
        ({"score": 1, "formatscore": 0.1}, "formatscore"),
        ({"score": 0.1, "format_score": 0.1}, "must exceed"),
        ({"score": float("nan")}, "finite"),
        ({"score": "1"}, "finite"),
    ],
)
def test_config_refuses_rewards_that_teach_nothing(extra_info, message):
    with pytest.raises(ValueError, match=message):
        GSM8KJudgerConfig(extra_info=extra_info)


def test_config_refuses_a_foreign_rule():
    with pytest.raises(ValueError, match="use JudgerConfig"):
        GSM8KJudgerConfig(reward_handler=lambda response, label, extra_info: 1)
