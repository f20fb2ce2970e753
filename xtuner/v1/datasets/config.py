"""Which prompts a run draws from."""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, SerializeAsAny, model_validator
from typing_extensions import TypedDict

from xtuner.v1.config import XTunerConfig
from xtuner.v1.utils import get_logger

from .cache import cache_root
from .dataloader import PromptDataloader
from .dataset import JsonlDataset, open_indexed
from .jsonl import find_jsonl_files
from .rl_tokenize_fn import RLTextTokenizeFn, RLTextTokenizeFnConfig


class DatasetConfig(XTunerConfig):
    """JSONL rows for RL: `prompt`, `data_source`, `reward_model`, optionally `extra_info`."""

    anno_path: str | Path
    """A JSONL file (plain or .gz), or a folder that is searched with its subfolders for *.jsonl and
    *.jsonl.gz, in sorted order."""
    name: str = "default"
    """Name in log lines."""
    class_name: str = "JsonlDataset"
    """Kind of dataset; JsonlDataset is the one there is."""
    cache_dir: Path | None = None
    """Where row positions, prompt lengths and unpacked .gz files are kept between runs. None: the user's
    cache folder, $XDG_CACHE_HOME/xtuner/datasets or ~/.cache/xtuner/datasets."""
    use_cache: bool = True
    """False: keep nothing between runs; every start reads and measures the files anew."""
    cache_tag: str | None = None
    """Not used: the cache finds out by itself what still fits."""
    sample_ratio: float = Field(1.0, gt=0)
    """Share of the prompts in an epoch. 0.25: a quarter of them, the same quarter in every epoch; 2.5: each
    twice, and half of them once more."""
    enable_sequential_sampler: bool = False
    """Take the fractional part of `sample_ratio` from the head of the data instead of at random."""
    enable_mmap_shared: bool = False
    """Not used: one process reads the prompts."""
    media_root: str | None = ""
    """Not used: rows are text only."""
    disable_filter: bool = False
    """Keep prompts over the length limit instead of leaving them out. They are counted in a warning."""
    skip_bad_lines: bool = False
    """Leave out rows that cannot be used, with their count and the first reasons in the log. False: they are
    an error before the run starts."""

    @model_validator(mode="after")
    def _text_only(self) -> "DatasetConfig":
        _refuse_changed(
            self,
            {
                "class_name": "only JsonlDataset (text rows) exists; leave it out",
                "cache_tag": "the cache finds out by itself what still fits; leave it out",
                "enable_mmap_shared": "one process reads the prompts; leave it out",
                "media_root": "rows are text only; leave it out",
            },
            allowed={"media_root": None},
        )
        if not self.use_cache and self.cache_dir is not None:
            raise ValueError(f"cache_dir={str(self.cache_dir)!r} has no effect with use_cache=False; set one of them.")
        return self

    def build(self, tokenize_fn: RLTextTokenizeFn, seed: int = 0, pack_max_length: int | None = None) -> JsonlDataset:
        """Read, check and measure all rows. Prompts over the tokenize function's `max_length` or over
        `pack_max_length` are left out; `seed` is for `sample_ratio`.

        Raises FileNotFoundError for a wrong path, ValueError (with file and line) for rows that cannot be
        used and if no prompt is left.
        """
        if self.enable_sequential_sampler and self.sample_ratio % 1 == 0:
            get_logger().warning(
                f"dataset {self.name!r}: enable_sequential_sampler=True has no effect with sample_ratio="
                f"{self.sample_ratio:g}, which has no fraction to take from the head; training shuffles the prompts."
            )
        root = cache_root(self.cache_dir) if self.use_cache else None
        paths = find_jsonl_files(Path(self.anno_path))
        indexed = [open_indexed(path, tokenize_fn, root, self.skip_bad_lines) for path in paths]
        dataset = JsonlDataset(self.name, indexed, tokenize_fn)
        limits = {"max_length": tokenize_fn.config.max_length, "pack_max_length": pack_max_length}
        for field, limit in limits.items():
            if limit is not None:
                dataset.drop_longer(limit, field, keep=self.disable_filter)
        dataset.resample(self.sample_ratio, self.enable_sequential_sampler, seed)
        lengths = dataset.prompt_lengths
        get_logger().info(
            f"dataset {self.name!r}: {len(dataset):,} prompts from {len(paths)} file(s), "
            f"{lengths.mean():.0f} tokens on average, longest {lengths.max():,}"
        )
        return dataset


class DatasetEntry(TypedDict):
    """A dataset and how its rows are tokenised."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    dataset: DatasetConfig
    tokenize_fn: SerializeAsAny[RLTextTokenizeFnConfig]


class DataloaderConfig(XTunerConfig):
    """The prompts of a task: one or several datasets, drawn one prompt at a time.

    Collating, packing and torch workers belong to supervised fine-tuning. Their fields keep the names and
    defaults that configs are written with; what would have no effect here is refused.
    """

    dataset_config_list: list[DatasetEntry] | None = Field(None, min_length=1)
    """Datasets, each `{"dataset": DatasetConfig, "tokenize_fn": RLTextTokenizeFnConfig}`; their prompts are
    shuffled together. `build` needs at least one."""
    collator: str = "sft_llm_collator"
    """RL needs "fake_collator": prompts are handed on as they are."""
    pack_to_max_length: bool = True
    """Supervised fine-tuning only."""
    pack_level: str = "soft"
    """RL needs "none": prompts are not packed."""
    pack_max_length: int = Field(32768, ge=1)
    """Tokens in a training pack. A longer prompt could not be trained on and is left out like one over
    `max_length`."""
    pack_chunk_size: int = 10000
    """Supervised fine-tuning only."""
    pack_workers: int = 8
    """Supervised fine-tuning only."""
    pack_extra_buffer_size: int = 100
    """Supervised fine-tuning only."""
    global_pack: bool = True
    """Supervised fine-tuning only."""
    sampler_type: str = "none"
    """Supervised fine-tuning only."""
    group_by_length: bool = Field(default_factory=lambda fields: fields.get("pack_level") != "none")
    """Supervised fine-tuning only: False with pack_level="none", where True is refused."""
    num_workers: int = 0
    """Torch loader processes; 0, because prompts are tokenised when they are drawn."""
    pad_token_id: int | None = None
    """Supervised fine-tuning only."""
    tokenizer_hash: str | None = None
    """Not used: the cache looks at the tokenizer itself."""
    pack_config_path: str | Path | None = None
    """Supervised fine-tuning only."""
    sampler_config_path: str | Path | None = None
    """Supervised fine-tuning only."""
    round_up: bool = True
    """Fill an epoch up to a multiple of the loader's batch. That batch is one prompt, so there is nothing to
    fill."""

    @model_validator(mode="after")
    def _rl_only(self) -> "DataloaderConfig":
        if self.pack_level == "none" and self.group_by_length:
            raise ValueError(
                'group_by_length=True has nothing to group with pack_level="none"; leave group_by_length out.'
            )
        sft_only = "it belongs to supervised fine-tuning and has no effect in RL; leave it out"
        _refuse_changed(
            self,
            {
                "collator": "RL needs collator='fake_collator'",
                "pack_level": "RL needs pack_level='none'",
                "pack_to_max_length": sft_only,
                "pack_chunk_size": sft_only,
                "pack_workers": sft_only,
                "pack_extra_buffer_size": sft_only,
                "global_pack": sft_only,
                "sampler_type": sft_only,
                "num_workers": "prompts are tokenised when they are drawn, in this process; leave it 0",
                "pad_token_id": sft_only,
                "tokenizer_hash": "the cache looks at the tokenizer itself; leave it out",
                "pack_config_path": sft_only,
                "sampler_config_path": sft_only,
            },
            allowed={"collator": "fake_collator", "pack_level": "none"},
        )
        return self

    def require_rl(self) -> None:
        """ValueError if this is the configuration of a supervised loader or names no data."""
        for field, needed in (("collator", "fake_collator"), ("pack_level", "none")):
            if (value := getattr(self, field)) != needed:
                raise ValueError(f"DataloaderConfig.{field}={value!r}: RL needs {field}={needed!r}.")
        if self.dataset_config_list is None:
            raise ValueError(
                "DataloaderConfig.dataset_config_list=None: give at least one "
                '{"dataset": DatasetConfig(...), "tokenize_fn": RLTextTokenizeFnConfig(...)}.'
            )

    def build(self, tokenizer: Any, seed: int, shuffle: bool = True) -> PromptDataloader:
        """Read, check and measure all data (see `DatasetConfig.build`)."""
        self.require_rl()
        assert self.dataset_config_list is not None
        datasets = [
            entry["dataset"].build(
                entry["tokenize_fn"].build(tokenizer), seed=seed + i, pack_max_length=self.pack_max_length
            )
            for i, entry in enumerate(self.dataset_config_list)
        ]
        return PromptDataloader(datasets, seed=seed, shuffle=shuffle)


def _refuse_changed(config: XTunerConfig, fixes: dict[str, str], allowed: dict[str, Any]) -> None:
    """ValueError naming the first of these fields that is not at its default (or the other value allowed)."""
    for name, fix in fixes.items():
        value, default = getattr(config, name), type(config).model_fields[name].default
        if value != default and not (name in allowed and value == allowed[name]):
            raise ValueError(f"{name}={value!r}: {fix}.")
