"""Samples that the context or a pack cannot hold are told of: the shorter ones alone would be trained on."""

import pytest

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from xtuner.v1.utils import get_logger

from .helpers import RESPONSE, STOPS, config, fit, with_evaluation


def unbounded(model, folder, **changes):
    """Prompts without a `max_length`, of which the longest has 28 tokens."""
    cfg = config(model, folder, **changes)
    entry_of(cfg)["tokenize_fn"].max_length = None
    return cfg


def unfiltered(model, folder, **changes):
    """The same prompts, with a `max_length` that leaves none of them out."""
    cfg = config(model, folder, **changes)
    entry = entry_of(cfg)
    entry["tokenize_fn"].max_length, entry["dataset"].disable_filter = 20, True
    return cfg


def entry_of(cfg):
    (entry,) = cfg.agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg.dataset_config_list
    return entry


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "prompt of 1 + sample_params.max_tokens=57 = 58 exceeds rollout_config.context_length=56; raise it"),
        ({"rollout": {"context_length": 58}, "worker": {"pack_max_length": 56}}, "can have 57 tokens (prompt of 1, "),
    ],
)
def test_without_a_limit_of_prompts_the_responses_alone_must_fit(model, tmp_path, changes, message):
    task = {"params": SampleParams(max_tokens=57)}
    (problem,) = unbounded(model, tmp_path, task=task, **changes).check()
    assert message in problem


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout": {"context_length": 35}}, "longest prompt=28 + sample_params.max_tokens=8 = 36 exceeds rollout_"),
        ({"worker": {"pack_max_length": 34}}, "can have 35 tokens (longest prompt=28, sample_params.max_tokens=8,"),
    ],
)
@pytest.mark.parametrize("kind", [unbounded, unfiltered])
def test_without_a_limit_of_prompts_they_are_measured(model, tmp_path, kind, changes, message):
    cfg = kind(model, tmp_path, **changes)
    assert cfg.check() == []
    (problem,) = cfg.check_data()
    assert message in problem and problem.endswith(
        "or lower max_tokens, or leave longer prompts out (the tokenize function's max_length, disable_filter=False)."
    )
    with pytest.raises(ValueError, match="the run cannot start:\n- agent_loop_manager_cfg.train: "):
        cfg.build()
    assert not (tmp_path / "runs").exists()


def test_prompts_that_are_not_trained_on_are_not_measured(model, tmp_path):
    """An evaluation may use a few of them, and cuts what the context cannot hold."""
    cfg = config(model, tmp_path, worker={"pack_max_length": 60}, **with_evaluation(model, tmp_path))
    evaluation = cfg.eval_agent_loop_manager_cfg.tasks
    evaluation.sampler_config.dataloader_cfg.dataset_config_list[0]["tokenize_fn"].max_length = None
    evaluation.agent_loop_config.sample_params = SampleParams(max_tokens=50)
    assert cfg.check() == cfg.check_data() == []


class TalksOn(SingleTurnAgentLoop):
    async def generate_sample(self, state):
        state.sample_params = state.sample_params.model_copy(update={"max_tokens": 60})
        return await super().generate_sample(state)


class TalksOnConfig(SingleTurnAgentLoopConfig):
    """A loop of the user's own, whose samples are longer than its configuration tells."""

    def build_local(self, rollout_controller, judger, tokenizer):
        return TalksOn(rollout_controller, judger, tokenizer, self.sample_params)


def test_samples_that_no_pack_holds_are_told_of(model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    params = SampleParams(max_tokens=RESPONSE, stop_token_ids=STOPS[::4])
    loop = TalksOnConfig(hf_checkpoint=model, sample_params=params)
    run = fit(
        config(
            model, tmp_path, total_train_steps=1, task={"agent_loop_config": loop},
            worker={"pack_max_length": 55}, rollout={"context_length": 108},
        )
    )  # fmt: skip
    (longer,) = run.series("response/dropped/longer_than_pack")
    assert 0 < longer < 12
    assert f"{longer:.0f} samples are longer than train_worker_cfg.pack_max_length=55" in caplog.text
