"""Judges and weights that the data name, where nobody would read them."""

import json

import pytest

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.judger import ComposedJudgerConfig, GSM8KJudgerConfig, Judger, JudgerConfig
from xtuner.v1.utils import get_logger

from .helpers import RESPONSE, config, read_rows, spread, with_evaluation, write_prompts

FUNCTION = JudgerConfig(judger_name="spread", reward_handler=spread)


class Named(JudgerConfig):
    """A function of the user's own under a name of the user's own."""

    judger_name: str = "named"


class BySource(Judger):
    def get_judger_name(self):
        return "by source"

    async def judge_payload(self, payload):
        return sum(payload["data_source"].values())


class BySourceConfig(JudgerConfig):
    judger_name: str = "by source"

    def build_local(self):
        return BySource()


class OwnLoop(SingleTurnAgentLoopConfig):
    """May read what it likes."""


def loop(model, kind=SingleTurnAgentLoopConfig):
    return {"agent_loop_config": kind(hf_checkpoint=model, sample_params=SampleParams(max_tokens=RESPONSE))}


def mapped(model, folder, mapping, **of_task):
    cfg = config(model, folder, task=loop(model) | of_task)
    (entry,) = cfg.agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg.dataset_config_list
    entry["tokenize_fn"].data_judger_mapping = mapping
    return cfg


@pytest.mark.parametrize("judger", [FUNCTION, Named(reward_handler=spread), GSM8KJudgerConfig()])
def test_a_mapping_to_judgers_needs_one_that_reads_it(model, tmp_path, judger):
    cfg = mapped(model, tmp_path, {"a": {"b": 0.5}}, judger_config=judger)
    (problem,) = cfg.check()
    assert problem == (
        f"agent_loop_manager_cfg.train: the tokenize function's data_judger_mapping has no effect: "
        f"{type(judger).__name__} reads no data_source. Leave it out, or give a ComposedJudgerConfig with these "
        "judgers as branches."
    )
    with pytest.raises(ValueError, match="the run cannot start"):
        cfg.build()


def test_who_may_read_the_mapping_keeps_it(model, tmp_path):
    composed = ComposedJudgerConfig(branches={"b": FUNCTION})
    for of_task in ({"judger_config": composed}, {"judger_config": BySourceConfig()}, loop(model, OwnLoop)):
        assert mapped(model, tmp_path, {"a": {"b": 0.5}}, **of_task).check() == []


@pytest.mark.parametrize("source, told", [({"a": 0.25}, True), ({"a": 1, "b": 1}, True), ({"a": 1}, False)])
def test_weights_in_rows_that_nobody_reads_are_a_doubt(model, tmp_path, source, told, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    path = write_prompts(tmp_path)
    rows = read_rows(path)
    for row in rows[4:]:
        row["data_source"] = source
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def doubts(**of_task):
        said.clear()
        cfg = config(model, tmp_path, rows=path, task=loop(model) | of_task)
        assert cfg.check() == cfg.check_data() == []
        cfg.build().close()
        return [text for text in said if "data_source" in text]

    place = f"{path}:5: data_source names several judgers or a weight other than 1, which judger_config of task"
    texts = doubts()
    assert len(texts) == 2 * told, "check says what the run says"
    assert all(text.startswith(f"{place} 'train' does not read: JudgerConfig judges all") for text in texts)
    branches = {name: FUNCTION for name in (*source, rows[0]["data_source"])}
    assert doubts(judger_config=ComposedJudgerConfig(branches=branches)) == []
    assert doubts(judger_config=BySourceConfig()) == doubts(**loop(model, OwnLoop)) == []


def test_an_evaluation_s_mapping_is_checked_too(model, tmp_path):
    cfg = config(model, tmp_path, **with_evaluation(model, tmp_path))
    (entry,) = cfg.eval_agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg.dataset_config_list
    entry["tokenize_fn"].data_judger_mapping = {"a": "b"}
    (problem,) = cfg.check()
    assert problem.startswith("eval_agent_loop_manager_cfg.eval: the tokenize function's data_judger_mapping")
