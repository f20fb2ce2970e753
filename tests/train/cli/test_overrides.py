"""`--set` changes just what it says, checks it as the config does, and names what it cannot find."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, XTunerConfig
from xtuner.v1.train.cli.config_file import load_trainer
from xtuner.v1.train.cli.errors import UserError
from xtuner.v1.train.cli.overrides import Override, apply_overrides, parse_value

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/v1/config/rl_grpo_gsm8k_judge.py"
MODEL = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048, "rope_theta": 1e4, "attention_bias": False, "tie_word_embeddings": True,
    "eos_token_id": 1, "architectures": ["Qwen3ForCausalLM"], "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The example's config."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    variables = {"MODEL_PATH": model, "DATA_PATH": "train.jsonl", "EVAL_DATA_PATH": "test.jsonl", "WORK_DIR": "runs"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.delenv("WORLD_SIZE", raising=False)
        return load_trainer(EXAMPLE)


def changed(config: Any, *texts: str) -> Any:
    return apply_overrides(config, [Override.parse(text) for text in texts])


def refusal(config: Any, *texts: str) -> str:
    with pytest.raises(UserError) as caught:
        changed(config, *texts)
    return str(caught.value)


TASK = "agent_loop_manager_cfg.tasks"


def test_values_arrive_with_the_type_of_their_field(trainer: Any) -> None:
    new = changed(
        trainer,
        "train_worker_cfg.optim_cfg.lr=3e-4",
        "train_worker_cfg.optim_cfg.betas=[0.9, 0.99]",
        "train_worker_cfg.fsdp_cfg.param_dtype=float32",
        "train_worker_cfg.loss_cfg.policy_loss_cfg.clip_ratio_c=4",
        "auto_resume=true",
        "total_train_steps=none",
        "total_epochs=2",
        f"{TASK}.agent_loop_config.sample_params.stops=[\"\\n\\n\"]",
        "eval_agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg.dataset_config_list.0.dataset.sample_ratio=0.5",
    )  # fmt: skip
    worker = new.train_worker_cfg
    assert worker.optim_cfg.lr == 3e-4 and worker.optim_cfg.betas == (0.9, 0.99)
    assert worker.fsdp_cfg.param_dtype is torch.float32
    assert dict(worker.loss_cfg.policy_loss_cfg)["clip_ratio_c"] == 4
    assert dict(worker.loss_cfg.policy_loss_cfg)["cliprange_low"] == 0.2
    assert (new.auto_resume, new.total_train_steps, new.total_epochs) == (True, None, 2)
    assert new.agent_loop_manager_cfg.tasks.agent_loop_config.sample_params.stops == ["\n\n"]
    loader = new.eval_agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg
    assert loader.dataset_config_list[0]["dataset"].sample_ratio == 0.5


@pytest.mark.parametrize("path", [f"{TASK}.0.sampler_config", f"{TASK}.sampler_config"])
@pytest.mark.parametrize("as_list", [False, True])
def test_one_task_is_found_with_and_without_its_index(trainer: Any, path: str, as_list: bool) -> None:
    if as_list:
        manager = trainer.agent_loop_manager_cfg.model_copy(update={"tasks": [trainer.agent_loop_manager_cfg.tasks]})
        trainer = trainer.model_copy(update={"agent_loop_manager_cfg": manager})
    new = changed(trainer, f"{path}.prompt_repeat_k=8")
    assert [task.sampler_config.prompt_repeat_k for task in new.agent_loop_manager_cfg.task_list()] == [8]


def test_the_config_itself_and_what_it_shares_stay_as_they_are() -> None:
    """The tutorial hands one tokenize function to training and evaluation; only one of them is to change."""

    class Shared(XTunerConfig):
        length: int = 1

    class Pair(XTunerConfig):
        a: Shared
        b: Shared
        rest: list[Shared]

    shared = Shared()
    pair = Pair(a=shared, b=shared, rest=[shared, shared])
    new = changed(pair, "a.length=2", "rest.1.length=3")
    assert (new.a.length, new.b.length, [item.length for item in new.rest]) == (2, 1, [1, 3])
    assert new.b is shared and pair.a.length == 1 and pair.rest[1].length == 1


def test_fields_that_only_fit_together_may_be_set_together(trainer: Any) -> None:
    """One by one the first would be refused: the file's evaluate_step=45 is no multiple of 2."""
    new = changed(trainer, "sync_weights_interval=2", "evaluate_step=4", "checkpoint_interval=6")
    assert (new.sync_weights_interval, new.evaluate_step) == (2, 4)
    shown = refusal(trainer, "sync_weights_interval=2", "train_batch_size=8")
    assert "--set sync_weights_interval=2: not valid" in shown  # and not the other one
    assert "evaluate_step=45 must be a multiple of sync_weights_interval=2" in shown


def test_an_assignment_that_was_replaced_is_not_blamed() -> None:
    shown = refusal(FSDPConfig(), "ep_size=1", "ep_size=x")
    assert "--set ep_size=x: not valid" in shown and "ep_size=1" not in shown


def test_rules_of_the_parents_are_checked_again() -> None:
    shown = refusal(FSDPConfig(hsdp_sharding_size=2), "ep_size=2")
    assert "--set ep_size=2" in shown and "hsdp_sharding_size=2 needs ep_size=1" in shown


def test_last_assignment_of_a_path_wins_and_parts_can_follow_a_whole(trainer: Any) -> None:
    new = changed(
        trainer,
        "seed=1",
        'train_worker_cfg.optim_cfg={"lr": 0.5, "eps": 0.1}',
        "train_worker_cfg.optim_cfg.lr=0.25",
        "seed=2",
    )
    assert new.seed == 2
    assert new.train_worker_cfg.optim_cfg == AdamWConfig(lr=0.25, eps=0.1)


def test_defaults_stay_unset_and_changes_in_place_are_kept() -> None:
    class Inner(XTunerConfig):
        extra: dict[str, int] = {}
        n: int = 0
        other: int = 1

    class Outer(XTunerConfig):
        inner: Inner = Inner()

    config = Outer()
    config.inner = Inner(n=1)
    config.inner.extra["added"] = 5  # pydantic does not see this
    new = changed(config, "inner.other=2")
    assert new.inner.extra == {"added": 5} and new.inner.n == 1
    assert changed(Outer(), "inner.other=2").inner.model_fields_set == {"other"}


@pytest.mark.parametrize(
    "text, parts",
    [
        ("train_worker_cfg.optim_cfg.learning_rate=1", ["has no field 'learning_rate'. Did you mean 'lr'?", "betas"]),
        ("train_wroker_cfg.seed=1", ["Did you mean 'train_worker_cfg'?"]),
        ("train_worker_cfg.optim_cfg.lr=-1", ["optim_cfg.lr=-1", "lr = '-1': Input should be greater than 0"]),
        ("train_worker_cfg.optim_cfg.lr=fast", ["lr = 'fast': Input should be a valid number"]),
        ("total_train_steps=true", ["total_train_steps = 'true'"]),
        ("resources.accelerator=TPU", ["resources.accelerator = 'TPU'", "'GPU' or 'CPU'"]),
        (f"{TASK}.1.weight=2", ["has no field '1'"]),
        (f"{TASK}.sampler_config.dataloader_cfg.dataset_config_list.3.dataset.name=x", ["list of 1", "'3'", "0..0"]),
        (f"{TASK}.0=x", ["replace the fields of agent_loop_manager_cfg.tasks"]),
        ("seed.value=1", ["seed is 123 and has no 'value'"]),
        ("load_checkpoint_cfg.checkpoint_path.name=x", ["is None", "as JSON"]),
        ("train_worker_cfg.lora_cfg.rank=8", ["is None", """--set 'train_worker_cfg.lora_cfg={"rank": 8}'"""]),
        ("train_worker_cfg.lora_cfg.ranks=8", ["is None and has no 'ranks'. Give it as a whole, as JSON."]),
        ("train_worker_cfg.loss_cfg.policy_loss_cfg.nested.x=1", ["has no key 'nested'"]),
        ("seed", ["write path.to.field=value"]),
        ("=3", ["write path.to.field=value"]),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_named_with_what_can(trainer: Any, text: str, parts: list[str]) -> None:
    shown = refusal(trainer, text)
    assert f"--set {text}" in shown
    assert [part for part in parts if part not in shown] == []


@pytest.mark.parametrize(
    "text, annotation, value",
    [
        ("none", str, "none"),  # pack_level="none" is a word there
        ("none", str | None, None),
        ("null", int | None, None),
        ("None", Path | None, None),
        ('"none"', str | None, "none"),
        ("8", str, "8"),
        ("8", int | str, 8),
        ("8", Any, 8),
        ("1e-6", float, 1e-6),
        ("1", float, 1.0),
        ("off", bool, False),
        ("a=b", str, "a=b"),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ('{"a": 1}', dict[str, float], {"a": 1.0}),
        ("a.jsonl", str | Path, "a.jsonl"),
        ("text", Any, "text"),
    ],
)
def test_text_is_read_as_the_field_type(text: str, annotation: Any, value: Any) -> None:
    found = parse_value(text, annotation)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "rollout_config.hf_token=sk-123",
        "rollout_config.api_key.x=sk-123",
        "rollout_config.extra_rollout_config={\"env\": {\"DATABASE\": \"sk-123\"}}",
        f"{TASK}.judger_config.reward_handler=ftp://me:sk-123@host",
    ],
)  # fmt: skip
def test_a_secret_of_the_command_line_is_not_shown(trainer: Any, text: str) -> None:
    rollout = trainer.rollout_config.model_copy(update={"api_key": "sk-123"})
    shown = refusal(trainer.model_copy(update={"rollout_config": rollout}), text)
    assert "sk-123" not in shown and f"--set {text.split('=')[0]}=" in shown
