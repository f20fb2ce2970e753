"""Each wrong row is refused with the field that is wrong; usual variants mean the same."""

import pytest

from xtuner.v1.datasets.record import RowError, parse_json, parse_record

GROUND = {"ground_truth": "4"}
GOOD = {"prompt": "2+2?", "data_source": "m", "reward_model": GROUND}


@pytest.mark.parametrize(
    "prompt",
    [
        "2+2?",
        [{"role": "user", "content": "2+2?"}],
        [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}],
    ],
    ids=["string", "messages", "part", "parts"],
)
def test_ways_to_write_a_prompt(prompt):
    record = parse_record({**GOOD, "prompt": prompt}, require_ground_truth=True)
    assert record.messages == [{"role": "user", "content": "2+2?"}]


def test_optional_fields():
    record = parse_record({**GOOD, "extra_info": None, "ability": "math"}, require_ground_truth=True)
    assert record.extra_info == {}
    assert record.data_source == {"m": 1.0} and record.origin_data_source == "m"
    weighted = parse_record({**GOOD, "data_source": {"a": 2, "b": 0.5}}, require_ground_truth=True)
    assert weighted.data_source == {"a": 2.0, "b": 0.5} == weighted.origin_data_source


@pytest.mark.parametrize("reward_model", [None, {}, {"style": "rule"}, {"ground_truth": None}, {"ground_truth": ""}])
def test_label_is_needed_unless_the_config_says_so(reward_model):
    row = {**GOOD, "reward_model": reward_model}
    with pytest.raises(RowError, match=r"reward_model\.ground_truth: missing.*require_ground_truth=False"):
        parse_record(row, require_ground_truth=True)
    assert parse_record(row, require_ground_truth=False).reward_model == (reward_model or {})


def test_label_zero_is_a_label():
    row = {**GOOD, "reward_model": {"ground_truth": 0}}
    assert parse_record(row, require_ground_truth=True).reward_model == {"ground_truth": 0}


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"prompt": None}, r"^prompt: missing"),
        ({"prompt": []}, r"^prompt: .*an empty list"),
        ({"prompt": 7}, r"^prompt: .*a number"),
        ({"prompt": "  "}, r"^prompt\[0\]\.content: .*empty"),
        ({"prompt": {"messages": []}}, r"^prompt: .*an object"),
        ({"prompt": ["hi"]}, r"^prompt\[0\]: .*a string"),
        ({"prompt": [{"role": "human", "content": "hi"}]}, r"^prompt\[0\]\.role: 'human' is none of system"),
        ({"prompt": [{"role": "user"}]}, r"^prompt\[0\]\.content: .*null"),
        (
            {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "image"}]}]},
            r"^prompt\[1\]\.content\[0\]: .*'image'; only text",
        ),
        (
            {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            r"^prompt: the last message is the assistant's",
        ),
        ({"data_source": None}, r"^data_source: missing"),
        ({"data_source": ""}, r"^data_source: "),
        ({"data_source": {}}, r"^data_source: "),
        ({"data_source": {"m": float("nan")}}, r"^data_source\.m: .*nan"),
        ({"data_source": {"m": True}}, r"^data_source\.m: .*True"),
        ({"data_source": {"m": 10**400}}, r"^data_source\.m: expected a finite number"),
        ({"reward_model": "4"}, r"^reward_model: expected an object, got a string"),
        ({"extra_info": [1]}, r"^extra_info: .*a list"),
    ],
)
def test_wrong_rows_name_the_field(fields, error):
    with pytest.raises(RowError, match=error):
        parse_record({**GOOD, **fields}, require_ground_truth=True)


def test_tool_calls_need_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    prompt = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "4"}]
    assert parse_record({**GOOD, "prompt": prompt}, require_ground_truth=True).messages[1] == call


@pytest.mark.parametrize(
    "data, error",
    [
        (b'{"prompt": "cut o', r"not valid JSON .*column"),
        (b'{"prompt": [1\n', r"not valid JSON .*column 14"),
        (b"[1, 2]", r"one JSON object a line, got a list"),
        ('{"prompt": "é"}'.encode("latin-1"), r"not UTF-8"),
        (rb'{"prompt": "\uD83D"}', r"half of a surrogate pair"),
        (b"[" * 200_000, r"nested too deeply"),
        (b'{"prompt": "q", "reward_model": {"ground_truth": ' + b"9" * 5000 + b"}}", r"^line: .*thousands of digits"),
    ],
)
def test_wrong_lines(data, error):
    with pytest.raises(RowError, match=error):
        parse_json(data)


def test_whole_surrogate_pairs_are_characters():
    assert parse_json(rb'{"prompt": "\ud83d\ude00"}') == {"prompt": "\U0001f600"}
