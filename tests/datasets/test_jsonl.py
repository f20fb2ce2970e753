"""Reading rows by position: every file form gives the same rows, and line numbers are an editor's."""

import gzip
import os

import pytest

from xtuner.v1.datasets.jsonl import JsonlFile, find_jsonl_files

ROWS = [b'{"a": 1}', '{"a": "é 数"}'.encode(), b'{"a": 3}']


@pytest.mark.parametrize(
    "content, numbers",
    [
        (b"\n".join(ROWS) + b"\n", [1, 2, 3]),
        (b"\n".join(ROWS), [1, 2, 3]),
        (b"\xef\xbb\xbf" + b"\n".join(ROWS), [1, 2, 3]),
        (b"\xef\xbb\xbf" + b"\r\n".join(ROWS) + b"\r\n", [1, 2, 3]),
        (b"\n \r\n" + b"\n\n".join(ROWS) + b"\n\n", [3, 5, 7]),
    ],
    ids=["lf", "no-last-newline", "bom", "bom-crlf", "blank-lines"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_every_form_gives_the_same_rows(tmp_path, content, numbers, packed):
    path = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    file = JsonlFile(path, "id", tmp_path / "cache")
    lines = list(file.lines())
    assert [line.data.strip() for line in lines] == ROWS
    assert [line.number for line in lines] == numbers
    # Drawn in another order than they stand: a wrong offset would give half a row.
    assert [file.read(line.offset).strip() for line in reversed(lines)] == ROWS[::-1]


def test_file_changed_under_a_run_is_an_error_not_other_rows(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(ROWS))
    file = JsonlFile(path, "id")
    offset = list(file.lines())[1].offset
    path.write_bytes(b"\n".join(ROWS[::-1]))
    os.utime(path, ns=(1, 1))
    with pytest.raises(RuntimeError, match=r"x\.jsonl has changed"):
        file.read(offset)


def test_broken_gzip_names_the_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(ROWS) * 50)[:-12])
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz: not a whole gzip file"):
        JsonlFile(path, "id", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_gzip_is_unpacked_once(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(ROWS)))
    first = JsonlFile(path, "id", tmp_path / "cache").data_path.stat().st_mtime_ns
    assert JsonlFile(path, "id", tmp_path / "cache").data_path.stat().st_mtime_ns == first


def test_gzip_without_a_cache_goes_with_its_reader(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(ROWS)))
    file = JsonlFile(path, "id")
    unpacked = file.data_path
    assert unpacked.exists() and unpacked.parent != tmp_path
    del file
    assert not unpacked.exists()


def test_folder_is_searched_sorted_without_hidden_copies(tmp_path):
    for name in ("b.jsonl", "a/z.jsonl.gz", "a/c.jsonl", ".ipynb_checkpoints/b.jsonl", "a/.c.jsonl", "n.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_jsonl_files(tmp_path)]
    assert found == ["a/c.jsonl", "a/z.jsonl.gz", "b.jsonl"]


def test_packed_beside_plain_would_count_twice(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz stands beside its unpacked copy"):
        find_jsonl_files(tmp_path)


def test_wrong_path_names_field_and_value(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"anno_path='.*nowhere\.jsonl'"):
        find_jsonl_files(tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no \*\.jsonl"):
        find_jsonl_files(tmp_path)
