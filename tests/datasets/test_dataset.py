"""The pass over the data: bad rows, limits, shares, and a cache that is never believed too long."""

import gzip
import json
import os

import numpy as np
import pytest

from xtuner.v1.datasets.config import DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig

MEASURED = "checking and measuring"


@pytest.fixture
def build(tokenizer):
    def build(path, tokenize=None, seed=0, pack_max_length=None, **fields):
        fn = RLTextTokenizeFnConfig(**(tokenize or {})).build(tokenizer)
        return DatasetConfig(anno_path=path, **fields).build(fn, seed, pack_max_length)

    return build


def texts(dataset):
    return [dataset[i].message[-1]["content"] for i in range(len(dataset))]


def test_missing_label_stops_before_anything_runs(build, row, write_jsonl):
    rows = [row(f"{i}?") for i in range(10)]
    del rows[6]["reward_model"]["ground_truth"]
    path = write_jsonl(rows)
    with pytest.raises(ValueError, match=rf"{path}:7: reward_model\.ground_truth: missing.*\n.*skip_bad_lines=True"):
        build(path)
    assert len(build(path, {"require_ground_truth": False})) == 10


def test_cut_line_is_named_or_skipped_and_counted(build, row, write_jsonl, log):
    rows = [row(f"{i}?") for i in range(6)]
    rows[3] = json.dumps(rows[3])[:40]
    path = write_jsonl(rows)
    with pytest.raises(ValueError, match=rf"{path}:4: line: not valid JSON"):
        build(path)
    dataset = build(path, skip_bad_lines=True)
    assert texts(dataset) == ["0?", "1?", "2?", "4?", "5?"]
    assert dataset.num_dropped == 1
    assert any("1 bad rows of 6 skipped" in message and f"{path}:4:" in message for message in log)
    # The cache now knows the file; it must not make the bad row good.
    with pytest.raises(ValueError, match=rf"{path}:4: line: not valid JSON"):
        build(path)


def test_many_bad_rows_show_the_first_and_the_number(build, row, write_jsonl):
    path = write_jsonl([row(prompt=7) for _ in range(9)])
    with pytest.raises(ValueError, match=r":1: prompt(.|\n)*:5: prompt(.|\n)*and 4 more"):
        build(path)


@pytest.mark.parametrize("rows", [[], ["", " "], ["not json"]], ids=["empty", "blank", "all-bad"])
def test_nothing_usable_is_an_error(build, write_jsonl, rows):
    with pytest.raises(ValueError, match=r"no usable row in 1 file.*data\.jsonl"):
        build(write_jsonl(rows), skip_bad_lines=True)


def test_limit_keeps_prompts_of_exactly_its_length(build, row, write_jsonl, log):
    path = write_jsonl([row("x" * n) for n in (1, 2, 3, 300)])
    lengths = build(path).prompt_lengths
    assert np.diff(lengths).tolist() == [1, 1, 297]
    dataset = build(path, {"max_length": int(lengths[1])})
    assert texts(dataset) == ["x", "xx"]
    assert dataset.num_dropped == 2
    assert [m for m in log if "left out" in m] == [
        f"dataset 'default': 2 of 4 prompts are longer than max_length={lengths[1]} tokens (longest {lengths[3]}) "
        "and are left out"
    ]
    assert len(build(path, pack_max_length=int(lengths[2]))) == 3


def test_lengths_are_those_of_the_prompts_drawn(build, row, write_jsonl):
    dataset = build(write_jsonl([row("two plus two " * n) for n in (3, 1, 2)]))
    assert dataset.prompt_lengths.tolist() == [dataset[i].num_tokens for i in range(3)]


def test_the_largest_id_is_that_of_the_prompts_that_are_left(build, row, write_jsonl, tokenizer):
    path = write_jsonl([row("one"), row("two <|far|> plus two"), row("six")])
    known = build(path).largest_id[0]
    tokenizer.add_tokens(["<|far|>"])
    far = tokenizer.convert_tokens_to_ids("<|far|>")
    for _ in range(2):  # measured, then from the cache
        dataset = build(path)
        assert dataset.largest_id == (far, f"{path}:2") and far > known
    dataset = build(path, {"max_length": int(dataset.prompt_lengths[0])})
    assert len(dataset) == 2 and dataset.largest_id[0] <= known


def test_limit_below_all_is_an_error_with_numbers(build, row, write_jsonl):
    path = write_jsonl([row("x" * n) for n in (1, 5)])
    with pytest.raises(ValueError, match=r"2 of 2 prompts are longer than max_length=3 .*shortest has \d+\. Raise"):
        build(path, {"max_length": 3})
    assert len(build(path, {"max_length": 3}, disable_filter=True)) == 2


def test_share_of_the_data(build, row, write_jsonl):
    path = write_jsonl([row(str(i)) for i in range(10)])
    numbers = [str(i) for i in range(10)]
    part = texts(build(path, sample_ratio=0.3, seed=1))
    assert len(set(part)) == 3 and part == sorted(part)
    assert part == texts(build(path, sample_ratio=0.3, seed=1))
    assert any(part != texts(build(path, sample_ratio=0.3, seed=seed)) for seed in range(2, 6))
    assert texts(build(path, sample_ratio=0.3, enable_sequential_sampler=True)) == numbers[:3]
    repeated = texts(build(path, sample_ratio=2.3, enable_sequential_sampler=True))
    assert repeated == numbers * 2 + numbers[:3]
    with pytest.raises(ValueError, match=r"sample_ratio=0\.01 of 10 prompts is none.*at least 0\.1"):
        build(path, sample_ratio=0.01)


@pytest.mark.parametrize("ratio, told", [(1.0, True), (2.0, True), (0.5, False)])
def test_head_of_the_data_without_a_fraction_to_take_is_told_of(build, row, write_jsonl, log, ratio, told):
    """The field's name promises an order, which it does not give."""
    build(write_jsonl([row("a"), row("b")]), sample_ratio=ratio, enable_sequential_sampler=True)
    assert any("enable_sequential_sampler=True has no effect" in text for text in log) is told


def test_folder_of_files(build, row, write_jsonl, tmp_path):
    write_jsonl([row("b1"), row("b2")], "data/b.jsonl")
    write_jsonl([], "data/a/empty.jsonl")
    plain = write_jsonl([row("c1")], "data/c/c.jsonl")
    plain.with_suffix(".jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert texts(build(tmp_path / "data")) == ["b1", "b2", "c1"]


def test_warnings_are_counted_once(build, row, write_jsonl, log):
    path = write_jsonl(
        [
            row("plain"),
            row("a <|im_end|>"),
            row("<|im_start|> b <|im_start|>"),
            row(prompt=[{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]),
        ]
    )
    for _ in range(2):  # measured, then from the cache
        log.clear()
        build(path, {"system_prompt": "Be brief."})
        assert sum("2 rows spell out a control token" in m and "line 2" in m for m in log) == 1
        assert sum("1 rows keep their own system message" in m for m in log) == 1


class TestCache:
    def test_second_start_does_not_measure(self, build, row, write_jsonl, user_cache, log):
        path = write_jsonl([row(str(i)) for i in range(5)])
        first = build(path)
        assert any(MEASURED in message for message in log)
        log.clear()
        second = build(path)
        assert not any(MEASURED in message for message in log)
        assert texts(first) == texts(second)
        assert first.prompt_lengths.tolist() == second.prompt_lengths.tolist()
        assert len(list(user_cache.rglob("*.npz"))) == 1

    def test_dropped_when_file_limit_template_or_tokenizer_change(self, build, row, write_jsonl, tokenizer):
        path = write_jsonl([row("one"), row("two plus two")])
        before = build(path).prompt_lengths
        assert len(build(path, {"max_length": int(before[0])})) == 1
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "assistant!")
        longer = build(path).prompt_lengths
        assert (longer - before).tolist() == [1, 1]
        tokenizer.add_tokens(["two plus two"])
        assert build(path).prompt_lengths[1] < longer[1]
        stamp = path.stat().st_mtime_ns
        path.write_text(path.read_text().replace("one", "six"))  # same size, same second
        os.utime(path, ns=(stamp, stamp))
        assert texts(build(path)) == ["six", "two plus two"]

    def test_stale_entries_are_removed(self, build, row, write_jsonl, user_cache):
        path = write_jsonl([row()])
        for limit in range(100, 107):
            build(path, {"max_length": limit})
        assert len(list(user_cache.rglob("*.npz"))) == 4
        write_jsonl([row(), row()])
        build(path)
        assert len(list(user_cache.rglob("*.npz"))) == 1

    @pytest.mark.parametrize("content", [b"", b"junk", None], ids=["empty", "junk", "half"])
    def test_damaged_entry_is_made_again(self, build, row, write_jsonl, user_cache, log, content):
        path = write_jsonl([row(str(i)) for i in range(5)])
        build(path)
        (entry,) = user_cache.rglob("*.npz")
        entry.write_bytes(entry.read_bytes()[:300] if content is None else content)
        log.clear()
        assert len(build(path)) == 5
        assert any("damaged cache entry" in message for message in log)
        log.clear()
        build(path)
        assert not any(MEASURED in message for message in log)

    def test_can_be_turned_off_or_elsewhere(self, build, row, write_jsonl, user_cache, tmp_path):
        path = write_jsonl([row()])
        build(path, use_cache=False)
        build(path, cache_dir=tmp_path / "mine")
        assert not user_cache.exists()
        assert len(list((tmp_path / "mine").rglob("*.npz"))) == 1

    def test_unusable_folder_costs_the_cache_not_the_run(self, build, row, write_jsonl, tmp_path, log):
        (tmp_path / "a-file").touch()
        assert len(build(write_jsonl([row()]), cache_dir=tmp_path / "a-file" / "cache")) == 1
        assert any("no data cache" in message for message in log)


def test_row_changed_under_a_run_names_the_file(build, row, write_jsonl):
    path = write_jsonl([row("one"), row("two")])
    dataset = build(path)
    write_jsonl([row("a longer one"), row("two")])
    with pytest.raises(RuntimeError, match=rf"{path} has changed"):
        dataset[1]
