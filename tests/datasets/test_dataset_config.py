"""What a config accepts, what it refuses, and that the tutorial's words stand."""

import pytest

from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig


def entry(path="train.jsonl", **fields):
    return {"dataset": DatasetConfig(anno_path=path, **fields), "tokenize_fn": RLTextTokenizeFnConfig()}


def test_tutorial_form():
    tokenize_fn = RLTextTokenizeFnConfig(max_length=512)
    config = DataloaderConfig(
        dataset_config_list=[
            {
                "dataset": DatasetConfig(name="grpo_gsm8k", anno_path="/nowhere/train.jsonl", sample_ratio=1.0),
                "tokenize_fn": tokenize_fn,
            }
        ],
        pack_max_length=32 * 1024,
        collator="fake_collator",
        pack_level="none",
    )
    config.require_rl()
    assert config.group_by_length is False
    reloaded = DataloaderConfig.model_validate_json(config.model_dump_json())
    assert reloaded == config


def test_group_by_length_follows_pack_level_unless_given():
    assert DataloaderConfig().group_by_length is True
    assert DataloaderConfig(pack_level="none", group_by_length=False).group_by_length is False
    with pytest.raises(ValueError, match="group_by_length=True"):
        DataloaderConfig(pack_level="none", group_by_length=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"collator": "my.collator"},
        {"pack_level": "hard"},
        {"pack_to_max_length": False},
        {"pack_chunk_size": 1},
        {"pack_workers": 1},
        {"pack_extra_buffer_size": 1},
        {"global_pack": False},
        {"sampler_type": "preset"},
        {"num_workers": 4},
        {"pad_token_id": 0},
        {"tokenizer_hash": "abc"},
        {"pack_config_path": "x"},
        {"sampler_config_path": "x"},
        {"pack_max_length": 0},
        {"dataset_config_list": []},
        {"unknown": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_rl_cannot_use_is_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        DataloaderConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"class_name": "VLMJsonlDataset"},
        {"cache_tag": "x"},
        {"enable_mmap_shared": True},
        {"media_root": "/m"},
        {"cache_dir": "/c", "use_cache": False},
        {"sample_ratio": 0.0},
        {"sample_ratio": float("nan")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_dataset_refuses_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        DatasetConfig(anno_path="x.jsonl", **fields)


def test_entry_refuses_unknown_keys():
    with pytest.raises(ValueError, match="tokenizer"):
        DataloaderConfig(dataset_config_list=[{**entry(), "tokenizer": 1}])


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"dataset_config_list": [entry()], "pack_level": "none"}, "collator='sft_llm_collator': RL needs"),
        ({"dataset_config_list": [entry()], "collator": "fake_collator"}, "pack_level='soft': RL needs"),
        ({"collator": "fake_collator", "pack_level": "none"}, "dataset_config_list=None"),
    ],
)
def test_defaults_of_fine_tuning_are_refused_at_build(tokenizer, fields, error):
    with pytest.raises(ValueError, match=error):
        DataloaderConfig(**fields).build(tokenizer, seed=0)


def test_subclass_of_tokenize_config_survives(tokenizer, row, write_jsonl):
    class Shouting(RLTextTokenizeFnConfig):
        suffix: str = "!"

        def build(self, tokenizer):
            fn = super().build(tokenizer)
            suffix, render = self.suffix, fn.render
            fn.render = lambda messages: render(messages) + suffix
            return fn

    config = DataloaderConfig(
        dataset_config_list=[
            {"dataset": DatasetConfig(anno_path=write_jsonl([row()])), "tokenize_fn": Shouting(suffix="!!")}
        ],
        collator="fake_collator",
        pack_level="none",
    )
    assert config.model_dump()["dataset_config_list"][0]["tokenize_fn"]["suffix"] == "!!"
    assert config.build(tokenizer, seed=0).next().extra_fields["raw_prompt"].endswith("assistant\n!!")
