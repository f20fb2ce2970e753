"""Prompts become groups whose ids never repeat, and a resumed run goes on with the next prompt."""

import json

import pytest
from scripted import ScriptedController, make_manager, make_task, question, write_prompts

from xtuner.v1.rl.agent_loop_manager import Sampler, SamplerConfig


def sampler_of(tmp_path, n=8, k=3, seed=5) -> Sampler:
    task = make_task(write_prompts(tmp_path / "p.jsonl", range(n)), k)
    return make_manager(ScriptedController(), task, seed=seed).tasks[0].sampler


def draw(sampler: Sampler, n: int) -> list[tuple[int, list[int], str]]:
    groups = [sampler.sample() for _ in range(n)]
    return [(g[0].group_id, [s.rollout_id for s in g], question(g[0])) for g in groups]


def test_a_group_is_one_prompt_k_times(tmp_path):
    group = sampler_of(tmp_path).sample()
    assert [s.rollout_id for s in group] == [0, 1, 2] == [s.uid for s in group]
    assert {s.group_id for s in group} == {0} and {s.task_name for s in group} == {"count"}
    assert len({question(s) for s in group}) == 1
    assert all(s.prompt_ids is group[0].prompt_ids for s in group), "prompts are shared, not copied"
    group[0].extra_fields["turns"] = 1
    assert "turns" not in group[1].extra_fields


def test_ids_go_on_counting_over_epochs(tmp_path):
    drawn = draw(sampler_of(tmp_path, n=4, k=2), 9)
    assert [group_id for group_id, _, _ in drawn] == list(range(9))
    assert [i for _, rollout_ids, _ in drawn for i in rollout_ids] == list(range(18))
    assert {q for _, _, q in drawn[:4]} == {q for _, _, q in drawn[4:8]} == {"q0", "q1", "q2", "q3"}


def test_seed_decides_the_order(tmp_path):
    a, b = (draw(sampler_of(tmp_path, n=16), 16) for _ in range(2))
    assert a == b
    assert a != draw(sampler_of(tmp_path, n=16, seed=6), 16)


@pytest.mark.parametrize("stop", [3, 8, 11])
def test_resume_continues_with_the_next_group(tmp_path, stop):
    """8 is an epoch's end: a resume there must not repeat the epoch."""
    unbroken = draw(sampler_of(tmp_path), 20)
    first = sampler_of(tmp_path)
    assert draw(first, stop) == unbroken[:stop]
    resumed = sampler_of(tmp_path)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert draw(resumed, 20 - stop) == unbroken[stop:]


@pytest.mark.parametrize("again", [False, True], ids=["same-process", "resumed"])
def test_what_was_given_back_comes_before_anything_new(tmp_path, again):
    """Of two tasks, over the end of an epoch: the same groups under the same ids, as if nothing had happened."""

    def sampler():
        task = make_task(write_prompts(tmp_path / "p.jsonl", range(4)))
        other = make_task(write_prompts(tmp_path / "q.jsonl", range(4)), 3, "other")
        return make_manager(ScriptedController(), other, task).tasks[1].sampler

    unbroken = draw(sampler(), 9)
    broken = sampler()
    groups = [broken.sample() for _ in range(6)]
    for i in (5, 2, 3):
        groups[i][0].message = [{"role": "user", "content": "written over by a loop"}]
        broken.give_back(groups[i])
    if again:
        state = json.loads(json.dumps(broken.state_dict()))
        broken = sampler()
        broken.load_state_dict(state)
    assert draw(broken, 6) == [unbroken[i] for i in (2, 3, 5, 6, 7, 8)]


def test_ids_of_several_tasks_never_meet(tmp_path):
    """Engines know a request by its rollout id; two tasks generate at the same time."""
    path = write_prompts(tmp_path / "p.jsonl", range(4))
    manager = make_manager(ScriptedController(), make_task(path, 2, "a"), make_task(path, 3, "b"))
    drawn = [draw(task.sampler, 7) for task in manager.tasks]
    groups = [group_id for d in drawn for group_id, _, _ in d]
    rollouts = [i for d in drawn for _, ids, _ in d for i in ids]
    assert len(set(groups)) == len(groups) and len(set(rollouts)) == len(rollouts)


def test_with_another_k_a_resumed_run_s_ids_lie_above_all_that_were_used(tmp_path):
    """Of both tasks, though one drew little; a group that was given back gets new ones too."""
    path, state, last = write_prompts(tmp_path / "p.jsonl", range(4)), None, -1
    for sizes in ((4, 3), (2, 2), (5, 1)):
        tasks = (make_task(path, k, name) for k, name in zip(sizes, "ab", strict=True))
        manager = make_manager(ScriptedController(), *tasks)
        if state is not None:
            manager.load_state_dict(state)
        much, little = (task.sampler for task in manager.tasks)
        groups = [much.sample() for _ in range(6)] + [little.sample()]
        ids = [sample.rollout_id for group in groups for sample in group]
        assert min(ids) > last and len(set(ids)) == len(ids)
        last = max(ids)
        much.give_back(groups[1])
        state = json.loads(json.dumps(manager.state_dict()))


def test_a_state_without_ids_is_one_of_the_same_k(tmp_path):
    sampler = sampler_of(tmp_path)
    draw(sampler, 5)
    state = sampler.state_dict()
    del state["id_offset"], state["id_stride"]
    resumed = sampler_of(tmp_path)
    resumed.load_state_dict(state)
    assert draw(resumed, 1)[0][:2] == (5, [15, 16, 17])


def test_a_group_needs_a_member(tmp_path):
    dataloader_cfg = make_task(write_prompts(tmp_path / "p.jsonl", range(1))).sampler_config.dataloader_cfg
    with pytest.raises(ValueError, match="prompt_repeat_k"):
        SamplerConfig(dataloader_cfg=dataloader_cfg, prompt_repeat_k=0)
