"""GSM8K rows to RL rows, from every form in which they are published."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import xtuner.v1.utils.convert_gsm8k as module
from xtuner.v1.datasets.config import DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.utils.convert_gsm8k import convert

TRAIN = [
    {"question": "How many clips – in all?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "How much?", "answer": "Much.\n#### 1,234,567"},
    {"question": "Debt?", "answer": "#### -7"},
    {"question": "Price?", "answer": "#### $3.50"},
]
TEST = [{"question": "Two?", "answer": "#### 2"}]


def write(folder: Path, **splits) -> Path:
    folder.mkdir(exist_ok=True)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_record(tmp_path):
    assert convert(write(tmp_path / "in", train=TRAIN, test=TEST), tmp_path / "out") == {"train": 4, "test": 1}
    records = read(tmp_path / "out" / "train.jsonl")
    question, answer = TRAIN[0]["question"], TRAIN[0]["answer"]
    assert records[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": f'{question} Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": answer, "question": question},
    }
    assert [record["reward_model"]["ground_truth"] for record in records] == ["72", "1234567", "-7", "3.50"]
    assert read(tmp_path / "out" / "test.jsonl")[0]["extra_info"]["split"] == "test"


def test_what_it_writes_can_be_read(tmp_path, tokenizer):
    convert(write(tmp_path / "in", train=TRAIN), tmp_path / "out")
    fn = RLTextTokenizeFnConfig().build(tokenizer)
    assert len(DatasetConfig(anno_path=tmp_path / "out").build(fn)) == 4


def test_parquet_as_on_the_hub(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "in" / "main").mkdir(parents=True)
    for part, rows in (("train-00000-of-00002", TRAIN[:3]), ("train-00001-of-00002", TRAIN[3:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in" / "main" / f"{part}.parquet")
    assert convert(tmp_path / "in", tmp_path / "parquet") == {"train": 4}
    convert(write(tmp_path / "plain", train=TRAIN), tmp_path / "jsonl")
    assert read(tmp_path / "parquet" / "train.jsonl") == read(tmp_path / "jsonl" / "train.jsonl")


@pytest.mark.parametrize(
    "bad, error",
    [
        ({"question": "q", "answer": "no mark 5"}, r"train\.jsonl:5: answer has no final number behind '####'"),
        ({"question": "q", "answer": "#### none"}, r"train\.jsonl:5: answer has no final number"),
        ({"prompt": "q", "answer": "#### 5"}, r"train\.jsonl:5: question must be .*\['answer', 'prompt'\]"),
        ([1], r"train\.jsonl:5: question must be .*list"),
    ],
)
def test_bad_row_is_named_and_nothing_is_written(tmp_path, bad, error):
    with pytest.raises(ValueError, match=error):
        convert(write(tmp_path / "in", test=TEST, train=[*TRAIN, bad]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_input_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither train nor test"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="not a folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="no rows in train"):
        convert(write(tmp_path / "in", train=[]), tmp_path / "out")
    with pytest.raises(ValueError, match="would be overwritten"):
        convert(write(tmp_path / "in", train=TRAIN), tmp_path / "in")
    assert read(tmp_path / "in" / "train.jsonl") == TRAIN


def test_runs_as_a_file_from_anywhere(tmp_path):
    # As a file, its folder comes first on the path, where logging.py would hide the standard library's.
    source = write(tmp_path / "in", train=TRAIN)
    command = [sys.executable, module.__file__, "--input-dir", str(source), "--out-dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 rows" in done.stdout and "test.jsonl: not in the input" in done.stdout
    command[3] = str(tmp_path / "nowhere")
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: --input-dir") and "Traceback" not in failed.stderr
