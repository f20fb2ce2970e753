"""Groups are generated and judged so that no sample is lost and no judge's fault looks like a reward."""

import asyncio
import gc

import pytest
from scripted import ScriptedController, exact

from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.rl.agent_loop import (
    AgentLoop,
    RouterAgentLoop,
    SingleTurnAgentLoop,
    SingleTurnAgentLoopConfig,
    generate_all,
    is_trainable,
    untrainable_reason,
)
from xtuner.v1.rl.agent_loop.concurrency import cancel_all, run_all
from xtuner.v1.rl.agent_loop.router import AgentLoopWorker
from xtuner.v1.rl.judger import BaseJudger, JudgerConfig
from xtuner.v1.rl.utils import CPUResourcesConfig, LocalHandle


def group_of(k: int, number: int = 3) -> list[RolloutState]:
    return [
        RolloutState(
            message=[{"role": "user", "content": f"q{number}"}],
            prompt_ids=[number],
            reward_model={"ground_truth": str(number)},
            group_id=number,
            rollout_id=number * k + i,
        )
        for i in range(k)
    ]


def loop_of(controller, judger: BaseJudger | None, batch: bool = False) -> AgentLoop:
    return SingleTurnAgentLoop(controller, judger, None, SampleParams(max_tokens=9), batch)


def judger_of(handler) -> BaseJudger:
    return JudgerConfig(judger_name="test", reward_handler=handler).build()


def generate(loop: AgentLoop, k: int = 4) -> list[RolloutState]:
    return asyncio.run(loop.generate_group(group_of(k)))


class BatchOnly(BaseJudger):
    """Counts its calls; `result(states)` is what a batch gives."""

    def __init__(self, result):
        self.result, self.calls = result, []

    async def judge(self, state):
        raise AssertionError("batch judging asks for the group")

    async def batch_judge(self, states):
        self.calls.append([state.rollout_id for state in states])
        return self.result(states)

    def get_judger_name(self):
        return "batch"


def paid(states):
    for state in states:
        state.reward = {"score": 1.0}
    return states


def test_a_batch_judge_that_doubles_a_sample_is_a_judge_error():
    """One sample would be trained on twice, and another one not at all."""
    group = generate(loop_of(ScriptedController(), BatchOnly(lambda s: paid([s[0], *s[:3]])), batch=True))
    assert [state.rollout_id for state in group] == [12, 13, 14, 15]
    assert all("returned rollouts [12, 12, 13, 14] for [12, 13, 14, 15]" in s.judge_error for s in group)
    assert not any(is_trainable(state) for state in group)


class Changes(SingleTurnAgentLoop):
    async def generate_group(self, states):
        return self.change(await super().generate_group(states))


def another(state: RolloutState, rollout_id: int | None) -> RolloutState:
    return state.model_copy(update={"rollout_id": rollout_id})


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda g: g[:3], "15"),
        (lambda g: [g[0], *g], "12"),
        (lambda g: [], "12, 13, 14, 15"),
        (lambda g: [*g, another(g[0], None)], "None"),
        (lambda g: [*g, another(g[0], 16)], "16"),  # of the next group
        (lambda g: [*g[:3], another(g[3], 16)], "15, 16"),
    ],
)
def test_a_loop_that_loses_doubles_or_adds_samples_is_an_error(change, wrong):
    loop = Changes(ScriptedController(), judger_of(exact))
    loop.change = change
    found = rf"for \[12, 13, 14, 15\]; each must be there once and no other \(\[{wrong}\] are not so\)"
    with pytest.raises(RuntimeError, match=found):
        asyncio.run(generate_all(loop, group_of(4)))
    loop.change = lambda group: group[::-1]
    assert len(asyncio.run(generate_all(loop, group_of(4)))) == 4


def test_a_loop_or_judger_that_forgets_to_return_is_told():
    class Forgets(SingleTurnAgentLoop):
        async def generate_sample(self, state):
            await super().generate_sample(state)

    with pytest.raises(TypeError, match="generate_sample must return the sample, not NoneType"):
        generate(Forgets(ScriptedController(), judger_of(exact)))

    class Silent(BatchOnly):
        async def judge(self, state):
            paid([state])

    group = generate(loop_of(ScriptedController(), Silent(paid)))
    assert all("judge must return the sample, not NoneType" in state.judge_error for state in group)


def test_group_is_generated_with_the_tasks_parameters_and_judged():
    controller = ScriptedController(lambda s: "3" if s.rollout_id % 2 else "4")
    group = generate(loop_of(controller, judger_of(exact)))
    assert [state.rollout_id for state in group] == [12, 13, 14, 15]
    assert [state.reward["score"] for state in group] == [0, 1, 0, 1]
    assert {params.max_tokens for params in controller.params} == {9}
    assert all(state.tokens == [3] for state in group)


def test_members_run_at_the_same_time():
    controller = ScriptedController(delay=lambda s: 0.02)
    most = 0

    async def main():
        nonlocal most
        task = asyncio.create_task(loop_of(controller, None).generate_group(group_of(4)))
        await asyncio.sleep(0.01)
        most = controller.under_way
        await task

    asyncio.run(main())
    assert most == 4


def test_failed_and_aborted_members_are_kept_and_not_judged():
    judged = []

    async def handler(response, label, extra_info):
        judged.append(response)
        return 1.0

    script = {12: Status.FAILED, 13: "a", 14: Status.ABORTED, 15: "b"}
    group = generate(loop_of(ScriptedController(lambda s: script[s.rollout_id]), judger_of(handler)))
    assert [untrainable_reason(state) for state in group] == ["failed", None, "aborted", None]
    assert sorted(judged) == ["a", "b"]
    assert group[0].reward is None and group[0].error_msg == "scripted failed"


@pytest.mark.parametrize("outcome", [None, float("nan"), float("inf"), {"acc": 1}, "good"])
def test_what_is_no_finite_score_is_a_judge_error_and_never_a_reward(outcome):
    async def handler(response, label, extra_info):
        return outcome if response == "bad" else 1.0

    script = ScriptedController(lambda s: "bad" if s.rollout_id == 13 else "fine")
    group = generate(loop_of(script, judger_of(handler)))
    assert [is_trainable(state) for state in group] == [True, False, True, True]
    assert group[1].reward is None and group[1].judge_error


def test_a_judger_that_raises_or_sets_nan_itself_loses_no_sample():
    class Careless(BaseJudger):
        async def judge(self, state):
            if state.rollout_id == 12:
                raise RuntimeError("judge is down")
            state.reward = {"score": float("nan") if state.rollout_id == 13 else 0.5}
            return state

        def get_judger_name(self):
            return "careless"

    group = generate(loop_of(ScriptedController(), Careless()))
    assert "judge is down" in group[0].judge_error
    assert "finite number" in group[1].judge_error
    assert [is_trainable(state) for state in group] == [False, False, True, True]


def test_without_a_judger_the_reason_names_the_field():
    [state] = generate(loop_of(ScriptedController(), None), k=1)
    assert "judger_config" in state.judge_error and not is_trainable(state)


def test_a_loop_that_rewards_by_itself_is_not_judged_again():
    class Rewarding(SingleTurnAgentLoop):
        async def generate_sample(self, state):
            state = await super().generate_sample(state)
            state.reward = {"score": 0.25}
            return state

    group = generate(Rewarding(ScriptedController(), judger_of(exact)))
    assert [state.reward for state in group] == [{"score": 0.25}] * 4


def test_batch_judging_sees_the_completed_members_once():
    judger = BatchOnly(paid)
    script = ScriptedController(lambda s: Status.FAILED if s.rollout_id == 13 else "x")
    group = generate(loop_of(script, judger, batch=True))
    assert judger.calls == [[12, 14, 15]]
    assert [is_trainable(state) for state in group] == [True, False, True, True]


def test_batch_result_of_another_length_is_no_reward_for_anybody():
    group = generate(loop_of(ScriptedController(), BatchOnly(lambda states: paid(states)[:-1]), batch=True))
    assert all("3 samples for 4" in state.judge_error and state.reward is None for state in group)


def test_an_exception_of_the_rollout_side_ends_the_group_with_its_place():
    controller = ScriptedController(
        lambda s: RuntimeError("all engines are dead") if s.rollout_id == 12 else "x",
        delay=lambda s: 0 if s.rollout_id == 12 else 60,
    )
    with pytest.raises(RuntimeError, match="all engines are dead") as caught:
        generate(loop_of(controller, None))
    assert "rollout 12" in caught.value.__notes__[0]
    assert controller.under_way == 0, "siblings must not run on"


def test_errors_of_siblings_that_had_ended_are_not_reported_as_lost():
    lost: list[dict] = []

    async def fail():
        raise ValueError("alike")

    async def both():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
        tasks = [asyncio.create_task(fail()) for _ in range(3)]
        await asyncio.wait(tasks)
        await cancel_all(tasks)

    asyncio.run(both())
    gc.collect()
    assert lost == []


def test_run_all_keeps_order_and_cancels_the_rest():
    async def value(x, seconds):
        await asyncio.sleep(seconds)
        return x

    assert asyncio.run(run_all([value(1, 0.01), value(2, 0)])) == [1, 2]


def test_router_takes_the_worker_with_the_fewest_samples():
    """Round robin would give the third group to worker 0, which still has a slow one."""
    slow = ScriptedController(delay=lambda s: 0.05)
    fast = ScriptedController()
    config = SingleTurnAgentLoopConfig(hf_checkpoint="none")
    workers = [LocalHandle(AgentLoopWorker(config, c, judger_of(exact), None)) for c in (slow, fast)]
    router = RouterAgentLoop(workers, config.sample_params)

    async def main():
        first = asyncio.create_task(router.generate_group(group_of(2, 1)))
        await asyncio.sleep(0)
        for number in (2, 3, 4):
            group = await router.generate_group(group_of(2, number))
            assert [state.reward["score"] for state in group] == [1, 1]
        await first
        await router.generate_group(group_of(2, 5))

    asyncio.run(main())
    assert {question for _, question in slow.asked} == {"q1", "q5"}, "ties go round: 5 follows 4's worker"
    assert len(fast.asked) == 6


class SpawningLauncher:
    """Notes what is spawned; workers stay here."""

    world_size = 1

    def __init__(self, kind):
        self.kind, self.spawned = kind, []

    def spawn_cpu(self, name, cls, *args, resources, **kwargs):
        self.spawned.append((name, resources.num_workers))
        return [LocalHandle(cls(*args, **kwargs)) for _ in range(resources.num_workers)]


@pytest.mark.parametrize(("kind", "remote"), [("local", False), ("ray", True)])
def test_loop_workers_exist_only_with_ray_and_cpu_resources(kind, remote):
    config = SingleTurnAgentLoopConfig(hf_checkpoint="none", cpu_resources=CPUResourcesConfig(num_workers=3))
    launcher = SpawningLauncher(kind)
    loop = config.build(ScriptedController(), judger_of(exact), None, launcher, "task")
    assert launcher.spawned == ([("agent_loop:task", 3)] if remote else [])
    assert [state.reward["score"] for state in generate(loop)] == [1] * 4


def test_config_takes_none_for_the_default_parameters_and_refuses_the_proxy():
    assert SingleTurnAgentLoopConfig(hf_checkpoint="m", sample_params=None).sample_params == SampleParams()
    with pytest.raises(ValueError, match="requires_rollout_proxy"):
        SingleTurnAgentLoopConfig(hf_checkpoint="m", requires_rollout_proxy=True)
