"""GSM8K as published (`question`, `answer`) to JSONL rows for RL.

    python xtuner/v1/utils/convert_gsm8k.py --input-dir DIR --out-dir OUT

DIR is a folder with train and test as .jsonl or .parquet, or a dataset name on the Hugging Face hub.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_HUB_NAME = "openai/gsm8k"
_HUB_CONFIG = "main"
_SPLITS = ("train", "test")
_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL_ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")

Row = tuple[str, Any]
"""Where a row stands ("file:line") and the row."""


def convert(input_dir: str | Path = _HUB_NAME, out_dir: str | Path = ".") -> dict[str, int]:
    """Write `train.jsonl` and `test.jsonl` (those that the input has) to `out_dir`; returns rows by split.

    Raises FileNotFoundError if there is nothing to convert and ValueError with file and line for a row that is not
    GSM8K's. Nothing is written unless every row is good.
    """
    from xtuner.v1.utils import write_atomic

    out_dir = Path(out_dir).expanduser()
    texts = {
        split: "".join(
            json.dumps(_record(where, row, split, index), ensure_ascii=False) + "\n"
            for index, (where, row) in enumerate(rows)
        )
        for split, rows in _open_splits(input_dir, out_dir).items()
    }
    if empty := [split for split, text in texts.items() if not text]:
        raise ValueError(f"{input_dir}: no rows in {' and '.join(empty)}.")
    for split, text in texts.items():
        write_atomic(out_dir / f"{split}.jsonl", _writer(text))
    return {split: text.count("\n") for split, text in texts.items()}


def _record(where: str, row: Any, split: str, index: int) -> dict[str, Any]:
    for key in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key].strip():
            found = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where}: {key} must be a text that is not empty (the row has {found}).")
    final = _FINAL_ANSWER.search(row["answer"])
    if final is None:
        raise ValueError(f"{where}: answer has no final number behind '####': {row['answer'][-60:]!r}.")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']} {_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": row["answer"], "question": row["question"]},
    }


def _open_splits(source: str | Path, out_dir: Path) -> dict[str, Iterator[Row]]:
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or len(folder.parts) > 2 or str(source).startswith((".", "/", "~")):
            raise FileNotFoundError(f"--input-dir {source}: not a folder. Give the folder that holds train and test.")
        return _from_hub(str(source))
    readers: dict[str, Iterator[Row]] = {}
    for split in _SPLITS:
        files = _split_files(folder, split)
        if any(file.resolve() == (out_dir / f"{split}.jsonl").resolve() for file in files):
            raise ValueError(f"--out-dir {out_dir}: {files[0]} would be overwritten. Choose another folder.")
        if files:
            readers[split] = (row for file in files for row in _read(file))
    if not readers:
        raise FileNotFoundError(
            f"--input-dir {source}: neither train nor test is there as .jsonl, .parquet or -*.parquet, "
            f"nor in its folder {_HUB_CONFIG!r}."
        )
    return readers


def _split_files(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / _HUB_CONFIG):
        for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"):
            if files := sorted(place.glob(pattern)):
                return files
    return []


def _read(file: Path) -> Iterator[Row]:
    return _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file)


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"{file}:{number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}:{number}: not valid JSON ({error.msg}).") from error


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{file} needs pyarrow: pip install 'xtuner[data]', or give .jsonl files.") from error
    number = 0
    for batch in parquet.ParquetFile(file).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{file}:{number}", row


def _from_hub(name: str) -> dict[str, Iterator[Row]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"--input-dir {name} is no folder here, and fetching it from the hub needs the datasets package: "
            "pip install 'xtuner[data]', or give a folder with train.jsonl and test.jsonl."
        ) from error
    try:
        fetched = load_dataset(name, _HUB_CONFIG)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"--input-dir {name}: no such folder here, and the hub gave no dataset of that name ({error})."
        ) from error
    return {split: _rows(f"{name}/{split}", fetched[split]) for split in _SPLITS if split in fetched}


def _rows(where: str, rows: Any) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield f"{where}:{number}", row


def _writer(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return write


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Convert GSM8K to JSONL rows for RL.")
    parser.add_argument(
        "--input-dir",
        default=_HUB_NAME,
        help="folder with train and test (.jsonl or .parquet), or a dataset name on the hub (default: %(default)s)",
    )
    parser.add_argument("--out-dir", required=True, help="folder for train.jsonl and test.jsonl")
    args = parser.parse_args()
    try:
        counts = convert(args.input_dir, args.out_dir)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    for split in _SPLITS:
        count = f"{counts[split]:,} rows" if split in counts else "not in the input"
        print(f"{Path(args.out_dir) / f'{split}.jsonl'}: {count}")


if __name__ == "__main__":
    # Run as a file, this folder comes first on the path, and its logging.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    main()
