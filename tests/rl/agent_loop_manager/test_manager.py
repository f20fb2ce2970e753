"""Several tasks share a batch by weight; the manager's state is the position of all samplers."""

import asyncio
import json

import pytest
from scripted import ScriptedController, exact, make_manager, make_task, question, strategy, write_prompts

from xtuner.v1.data_proto import Status
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, TaskSpecConfig
from xtuner.v1.rl.agent_loop_manager.manager import split_batch, timing_summary
from xtuner.v1.rl.judger import ComposedJudgerConfig, JudgerConfig
from xtuner.v1.utils import get_logger


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", range(12))


@pytest.mark.parametrize(
    ("batch", "weights", "shares"),
    [
        (7, [2, 1, 0], [5, 2, 0]),
        (4, [1, 1, 1], [2, 1, 1]),
        (5, [1, 1], [3, 2]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
        (1, [1, 3], [0, 1]),
        (64, [1], [64]),
    ],
)
def test_batch_is_split_by_largest_remainder(batch, weights, shares):
    found, owed = split_batch(batch, weights, [0.0] * len(weights))
    assert found == shares
    assert owed == pytest.approx([batch * w / sum(weights) - n for w, n in zip(weights, shares, strict=True)])


def test_timing_percentiles():
    summary = timing_summary([1.0, 0.5])
    assert summary["task_mean_s"] == 0.75 and summary["task_p50_s"] == summary["task_p99_s"] == 1.0
    assert summary["task_p99_p50_ratio"] == 1.0


def test_tasks_run_together_and_come_back_by_name(prompts, tmp_path):
    other = write_prompts(tmp_path / "other.jsonl", range(100, 106))
    controller = ScriptedController(delay=lambda s: 0.02)
    manager = make_manager(
        controller,
        make_task(prompts, 2, "zebra", weight=2),
        make_task(other, 3, "ant", weight=1),
        make_task(other, 2, "idle", weight=0),
    )
    result = asyncio.run(manager.produce_batch(7, 1, 0))
    assert [(g[0].task_name, len(g)) for g in result.groups] == [("ant", 3)] * 2 + [("zebra", 2)] * 5
    for name in ("ant", "zebra"):
        ids = [g[0].group_id for g in result.groups if g[0].task_name == name]
        assert ids == sorted(ids)
    assert all(
        (number := int(question(g[0])[1:])) >= 100 or g[0].task_name == "zebra" for g in result.groups
    ), number
    assert len(manager) == 12 + 6, "no batch holds a prompt of weight 0"
    assert result.timings["task_n"] == 7


def test_the_warning_of_failed_samples_tells_why(prompts, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "log", lambda level, text: said.append(text))
    statuses = [Status.ABORTED, Status.ABORTED, Status.FAILED, Status.FAILED]

    class Refuses(ScriptedController):
        async def generate(self, state):
            state = await super().generate(state)
            state.error_msg = state.error_msg and f"{state.rollout_id} is refused\nand so on"
            return state

    controller = Refuses(lambda s: statuses[s.rollout_id] if s.rollout_id < 4 else "1")
    asyncio.run(make_manager(controller, make_task(prompts, 2)).produce_batch(3, 1, 0))
    (text,) = said
    assert text.endswith("groups dropped {'aborted': 1, 'failed': 1}; rollout 2 failed: 2 is refused …")


def test_one_tasks_error_ends_the_others(prompts):
    answer = lambda s: RuntimeError("dead") if s.task_name == "a" else "1"
    controller = ScriptedController(answer, delay=lambda s: 0 if s.task_name == "a" else 60)
    manager = make_manager(controller, make_task(prompts, name="a"), make_task(prompts, name="b"))
    with pytest.raises(RuntimeError, match="dead"):
        asyncio.run(manager.produce_batch(4, 1, 0))
    assert controller.events == ["resume", "pause with 0 under way"]


def test_the_first_error_is_raised_even_if_pause_fails_too(prompts):
    class Dead(ScriptedController):
        async def pause(self):
            raise ConnectionError("cannot pause")

    manager = make_manager(Dead(lambda s: RuntimeError("all engines are dead")), make_task(prompts))
    with pytest.raises(RuntimeError, match="all engines are dead"):
        asyncio.run(manager.produce_batch(2, 1, 0))


@pytest.mark.parametrize(
    ("batch", "weights"), [(3, [1.0, 1.0]), (4, [1.0, 0.01]), (1, [3.0, 2.0, 0.0]), (5, [0.2, 0.3, 0.5, 0.11])]
)
def test_over_the_steps_tasks_get_what_their_weights_say(prompts, batch, weights):
    """In whole groups nearly every batch is off; a share that is always rounded the same way would stay so for ever."""
    tasks = [make_task(prompts, 1, f"task{i}", weight=weight) for i, weight in enumerate(weights)]
    manager = make_manager(ScriptedController(), *tasks)
    counts = [0] * len(weights)
    for step in range(1, 61):
        groups = asyncio.run(manager.produce_batch(batch, step, 0)).groups
        assert len(groups) == batch
        for group in groups:
            counts[int(group[0].task_name.removeprefix("task"))] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - step * batch * weight / sum(weights)) < 1.0 + 1e-6
        if step == 30:  # a resumed run goes on with what is owed
            state = json.loads(json.dumps(manager.state_dict()))
            manager = make_manager(ScriptedController(), *tasks)
            manager.load_state_dict(state)
    assert [count == 0 for count in counts] == [weight == 0 for weight in weights]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_resume_gives_the_batches_of_an_unbroken_run(prompts, steps):
    """12 prompts, 4 a step: step 3 ends an epoch. Failing groups make the position differ from steps * batch."""

    def manager():
        answer = lambda s: Status.FAILED if question(s) in ("q3", "q7") else question(s)[1:]
        return make_manager(ScriptedController(answer), make_task(prompts))

    def batches(m, first, last):
        results = [asyncio.run(m.produce_batch(4, step, 0)) for step in range(first, last + 1)]
        return [[(g[0].group_id, g[0].rollout_id, question(g[0])) for g in r.groups] for r in results]

    unbroken = batches(manager(), 1, 6)
    first = manager()
    assert batches(first, 1, steps) == unbroken[:steps]
    resumed = manager()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert batches(resumed, steps + 1, 6) == unbroken[steps:]


def test_state_of_other_tasks_is_refused(prompts):
    a = make_manager(ScriptedController(), make_task(prompts, name="a"))
    b = make_manager(ScriptedController(), make_task(prompts, name="b"))
    with pytest.raises(ValueError, match=r"\['a'\], this run has \['b'\]"):
        b.load_state_dict(a.state_dict())


def test_configs_refuse_contradictions(prompts):
    task = make_task(prompts)
    with pytest.raises(ValueError, match="at least one TaskSpecConfig"):
        AgentLoopManagerConfig(tasks=[])
    with pytest.raises(ValueError, match=r"\['count'\] is given more than once"):
        AgentLoopManagerConfig(tasks=[task, make_task(prompts)])
    with pytest.raises(ValueError, match="all 0"):
        AgentLoopManagerConfig(tasks=make_task(prompts, weight=0))
    with pytest.raises(ValueError, match="weight"):
        make_task(prompts, weight=-1)
    with pytest.raises(ValueError, match="max_groups_factor"):
        make_task(prompts, **strategy(max_groups_factor=0.5))
    with pytest.raises(ValueError, match="enable_batch_judge=True needs a judger_config"):
        make_task(
            prompts,
            judger_config=None,
            agent_loop_config=SingleTurnAgentLoopConfig(hf_checkpoint="m", enable_batch_judge=True),
        )


def test_rows_that_name_no_branch_are_found_before_the_run(prompts):
    """Else each is a judge error when it is drawn, and enough of them end the run in the middle."""
    branch = JudgerConfig(judger_name="exact", reward_handler=exact)
    wrong = make_task(prompts, judger_config=ComposedJudgerConfig(branches={"sum": branch}))
    whole = make_task(prompts, judger_config=ComposedJudgerConfig(branches={"sum": {"branches": {"count": branch}}}))
    for task in (wrong, whole):  # a composed branch is named as a whole
        with pytest.raises(ValueError, match=r"rows name the judgers \['count'\], but .*branches has \['sum'\]"):
            make_manager(ScriptedController(), task)
    for judger in (branch, {"branches": {"a": branch, "b": branch}}):
        right = make_task(prompts, judger_config=ComposedJudgerConfig(branches={"count": judger}))
        group = asyncio.run(make_manager(ScriptedController(), right).produce_batch(1, 1, 0)).groups[0]
        assert [state.reward["score"] for state in group] == [1.0 if judger is branch else 2.0] * 2


def test_build_does_not_change_the_config(prompts):
    config = AgentLoopManagerConfig(tasks=make_task(prompts))
    before = config.model_dump_json()
    make_manager(ScriptedController(), *config.task_list())
    assert config.model_dump_json() == before
    assert isinstance(config.task_list()[0], TaskSpecConfig)
