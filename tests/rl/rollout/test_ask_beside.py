"""A question of the run itself comes in together with the next request."""

import asyncio

import pytest
from scripted_engine import HANG, NamedHandle, ScriptedEngine, answer, good, setup, state

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout import controller as controllers
from xtuner.v1.rl.rollout.backends.base import GenerateRequest


def test_a_question_is_served_together_with_the_next_request():
    def script(request, n):
        return answer(request, ids=(7, 7) if request.request_id == -1 else (8, 9, 0))

    question = GenerateRequest(-1, [1, 2, 3], SampleParams(max_tokens=2), 0)

    async def main():
        controller, (first, second) = await setup(script, script)
        await controller.ask_beside(question)
        assert not first.requests
        await controller.generate(state(session_id=1))
        busy, idle = (first, second) if first.requests else (second, first)
        assert [r.request_id == -1 for r in busy.requests] == [False, True] and not idle.requests
        answers = await controller.ask_engines(question)
        assert [a.token_ids for a in answers.values()] == [[7, 7]] * 2  # who had no request is asked now
        assert len(busy.requests) == 2 and len(idle.requests) == 1
        await controller.generate(state())
        assert (await controller.ask_engines(question)).keys() == answers.keys()
        assert len(first.requests) + len(second.requests) == 6  # each question once
        assert (await controller.metrics())["requests"] == 2

    asyncio.run(main())


BROKEN = {
    "nothing": lambda r: answer(r, ids=()), "a part": lambda r: answer(r, ids=(4,), finish_reason="abort"),
    "an error": lambda r: RuntimeError("the connection broke"),
}  # fmt: skip


@pytest.mark.parametrize("came", BROKEN)
def test_a_question_that_was_broken_off_is_asked_again(came):
    async def main():
        controller, (engine,) = await setup(lambda r, n: BROKEN[came](r) if n == 2 else good(r, n))
        question = GenerateRequest(-1, [1, 2, 3], SampleParams(max_tokens=3), 0)
        await controller.ask_beside(question)
        await controller.generate(state())
        (found,) = (await controller.ask_engines(question)).values()
        assert found.token_ids == [8, 9, 0] and len(engine.requests) == 3

    asyncio.run(main())


def test_new_weights_make_a_question_void():
    async def main():
        controller, (engine,) = await setup(lambda r, n: HANG if n == 2 else good(r, n))
        (worker,) = (NamedHandle.workers[name] for name in controller.worker_names)
        question = GenerateRequest(-1, [1, 2, 3], SampleParams(max_tokens=3), 0)
        await controller.ask_beside(question)
        await controller.generate(state())
        await asyncio.sleep(0)
        await worker.update_weights([], 4)
        assert (await controller.ask_engines(question)).popitem()[1].token_ids == [8, 9, 0]
        assert (len(engine.requests), engine.cancelled) == (3, 1)

    asyncio.run(main())


def test_the_answer_of_a_server_that_is_gone_does_not_speak_for_the_next_one(monkeypatch):
    async def revive(self):
        self.starts += 1

    monkeypatch.setattr(ScriptedEngine, "starts", 1, raising=False)
    monkeypatch.setattr(ScriptedEngine, "revive", revive, raising=False)

    async def main():
        controller, (engine,) = await setup(lambda r, n: answer(r, ids=(7,) * n))
        question = GenerateRequest(-1, [1, 2, 3], SampleParams(max_tokens=3), 0)
        for revived, tokens in ((False, 2), (True, 5)):
            await controller.ask_beside(question)
            await controller.generate(state())
            if revived:
                await engine.revive()
            (found,) = (await controller.ask_engines(question)).values()
            assert len(found.token_ids) == tokens

    asyncio.run(main())


def test_nobody_waits_long_for_an_engine_that_does_not_take_the_question(monkeypatch):
    async def main():
        controller, (engine,) = await setup(good)
        (worker,) = (NamedHandle.workers[name] for name in controller.worker_names)
        monkeypatch.setattr(controllers, "_ABORT_S", 0.05)
        monkeypatch.setattr(worker, "ask_beside", lambda request: asyncio.sleep(60))
        question = GenerateRequest(-1, [1, 2, 3], SampleParams(max_tokens=3), 0)
        await asyncio.wait_for(controller.ask_beside(question), 5)
        assert (await controller.ask_engines(question)).popitem()[1].token_ids == [8, 9, 0]

    asyncio.run(main())
