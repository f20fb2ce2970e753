"""A question of the run itself comes in together with the next request."""

import asyncio

from scripted_engine import HANG, NamedHandle, answer, good, setup, state

from xtuner.v1.data_proto import SampleParams
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


def test_a_question_that_was_broken_off_is_asked_again():
    async def main():
        controller, (engine,) = await setup(lambda r, n: answer(r, ids=()) if n == 2 else good(r, n))
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
