"""Prompts without end: each once an epoch, and a checkpoint goes on with the very next one."""

import json

import numpy as np
import pytest

from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.datasets.shuffle import permutation


@pytest.fixture
def loader(tokenizer, row, write_jsonl):
    def make(num_rows=16, seed=7, shuffle=True, num_files=1):
        paths = [
            write_jsonl([row(f"{name} {i}") for i in range(num_rows)], f"{name}.jsonl") for name in "ab"[:num_files]
        ]
        return DataloaderConfig(
            dataset_config_list=[
                {"dataset": DatasetConfig(anno_path=path), "tokenize_fn": RLTextTokenizeFnConfig()} for path in paths
            ],
            collator="fake_collator",
            pack_level="none",
        ).build(tokenizer, seed=seed, shuffle=shuffle)

    return make


def draw(loader, n):
    return [loader.next().message[0]["content"] for _ in range(n)]


def test_each_prompt_once_an_epoch_in_an_order_of_its_own(loader):
    prompts = loader(num_files=2)
    epochs = [draw(prompts, 32) for _ in range(3)]
    assert (prompts.epoch, prompts.position) == (2, 32)
    everything = sorted(prompts[i].message[0]["content"] for i in range(len(prompts)))
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert draw(loader(num_files=2), 32) == epochs[0]
    assert draw(loader(num_files=2, seed=8), 32) != epochs[0]


def test_what_was_handed_out_is_found_by_its_number(loader):
    prompts = loader()
    drawn = draw(prompts, 40)
    assert (prompts.epoch, prompts.position) == (2, 8), "an epoch has 16"
    assert [prompts.again(i).message[0]["content"] for i in range(40)] == drawn
    assert (prompts.epoch, prompts.position) == (2, 8) and draw(prompts, 8) == draw(loader(), 48)[40:]


def test_without_shuffle_in_the_order_of_the_data(loader):
    prompts = loader(num_rows=3, num_files=2, shuffle=False)
    order = ["a 0", "a 1", "a 2", "b 0", "b 1", "b 2"]
    assert draw(prompts, 12) == order * 2
    assert [prompts[i].message[0]["content"] for i in range(6)] == order
    with pytest.raises(IndexError):
        prompts[6]


@pytest.mark.parametrize("consumed", [0, 5, 16, 24, 32], ids=lambda n: f"after-{n}")
def test_resume_goes_on_with_the_next_prompt(loader, consumed):
    unbroken = draw(loader(), 48)
    first = loader()
    draw(first, consumed)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = loader()
    draw(resumed, 3)
    resumed.load_state_dict(state)
    assert draw(resumed, 48 - consumed) == unbroken[consumed:]


@pytest.mark.parametrize(
    "other, error",
    [
        ({"num_rows": 15}, "num_samples=16, this run's have num_samples=15"),
        ({"shuffle": False}, "shuffle=True, this run's have shuffle=False"),
        ({"seed": 8}, "seed=7, this run's have seed=8"),
    ],
)
def test_state_of_other_data_is_refused(loader, other, error):
    state = loader().state_dict()
    with pytest.raises(ValueError, match=error):
        loader(**other).load_state_dict(state)


def test_what_a_run_can_check_before_it_starts(tokenizer, row, write_jsonl):
    path = write_jsonl([row("one"), row("two", data_source={"a": 1.0, "b": 0.5})])
    mapped = RLTextTokenizeFnConfig(data_judger_mapping={"openai/gsm8k": "exact", "a": "exact", "b": "length"})
    for _ in range(2):  # measured, then from the cache
        prompts = DataloaderConfig(
            dataset_config_list=[
                {"dataset": DatasetConfig(anno_path=path), "tokenize_fn": RLTextTokenizeFnConfig()},
                {"dataset": DatasetConfig(anno_path=path, sample_ratio=0.5), "tokenize_fn": mapped},
            ],
            collator="fake_collator",
            pack_level="none",
        ).build(tokenizer, seed=0)
        assert prompts.judger_names == {"openai/gsm8k", "a", "b", "exact", "length"}
        assert prompts.prompt_lengths.tolist() == [prompts[i].num_tokens for i in range(3)]


def test_states_are_fresh(loader):
    prompts = loader(num_rows=1)
    first = prompts.next()
    first.prompt_ids.append(0)
    first.extra_fields["x"] = 1
    first.message.clear()
    second = prompts.next()
    assert second.extra_fields.keys() == {"raw_prompt", "origin_data_source"}
    assert len(second.message) == 1 and second.num_tokens == len(second.prompt_ids)


def test_order_is_fixed_for_all_time():
    # Checkpoints hold positions in this order; another order would repeat and skip prompts after an upgrade.
    assert permutation(8, 1, 0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]
    assert np.array_equal(np.sort(permutation(1000, 3)), np.arange(1000))
    assert permutation(8, -1).tolist() != permutation(8, 1).tolist()
