"""Many calls in few messages: who waits for what gets it, whatever the order, and nobody waits for ever."""

import asyncio
import random

import pytest

from xtuner.v1.rl.utils.courier import Courier, Desk
from xtuner.v1.rl.utils.handles import WorkerLostError
from xtuner.v1.rl.utils.host import Outcome


class Post:
    """A courier and a desk in one process; what is asked for is a number of turns of the loop to wait."""

    def __init__(self):
        self.desk = Desk(self.run)
        self.courier = Courier(self.exchange)
        self.messages, self.at_once, self.cancelled = 0, 0, []
        self.broken: Exception | None = None

    async def exchange(self, orders):
        self.messages += 1
        await asyncio.sleep(0)
        work = asyncio.ensure_future(self.desk.exchange(orders))
        while not work.done():
            if self.broken is not None:
                work.cancel()
                raise self.broken
            await asyncio.sleep(0)
        return work.result()

    async def run(self, what, turns):
        self.at_once += 1
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(what)
            raise
        finally:
            self.at_once -= 1
        if what == "wrong":
            return Outcome.failed(ValueError("it was wrong"))
        return Outcome((what, turns))


def test_every_call_gets_its_own_answer_and_few_messages_are_sent():
    async def main():
        post, rng = Post(), random.Random(1)
        turns = [rng.choice((0, 3, 50, 400)) for _ in range(500)]
        answers = await asyncio.gather(*(post.courier.call(i, n) for i, n in enumerate(turns)))
        assert answers == list(enumerate(turns))
        assert post.messages < 20

    asyncio.run(main())


def test_calls_that_come_while_others_are_under_way_do_not_wait_for_them():
    async def main():
        post = Post()
        slow = [asyncio.ensure_future(post.courier.call("slow", 100_000)) for _ in range(3)]
        for i in range(50):
            assert await post.courier.call(i, 2) == (i, 2)
        assert not any(task.done() for task in slow) and post.at_once == 3
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)

    asyncio.run(main())


def test_an_exception_is_that_of_its_call_alone():
    async def main():
        post = Post()
        good, bad = await asyncio.gather(
            post.courier.call("right", 5), post.courier.call("wrong", 5), return_exceptions=True
        )
        assert good == ("right", 5) and isinstance(bad, ValueError) and str(bad) == "it was wrong"

    asyncio.run(main())


@pytest.mark.parametrize("turns", [1, 20])
def test_a_cancelled_call_is_cancelled_at_the_desk_and_disturbs_no_other(turns):
    async def main():
        post = Post()
        one, other = (asyncio.ensure_future(post.courier.call(what, 200)) for what in ("one", "other"))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert post.at_once == (2 if turns > 1 else 0)
        one.cancel()
        assert await other == ("other", 200)
        assert one.cancelled() and post.at_once == 0 and post.cancelled == ["one"]
        assert await post.courier.call("later", 0) == ("later", 0)

    asyncio.run(main())


def test_who_is_lost_leaves_nobody_waiting():
    async def main():
        post = Post()
        calls = [asyncio.ensure_future(post.courier.call(i, 100_000)) for i in range(5)]
        for _ in range(20):
            await asyncio.sleep(0)
        post.broken = WorkerLostError("it died")
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert [str(result) for result in results] == ["it died"] * 5
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(post.courier.call("later", 3), 20)
        post.broken = None
        assert await post.courier.call("again", 0) == ("again", 0)

    asyncio.run(main())


def test_nothing_is_under_way_when_nobody_waits():
    async def main():
        post = Post()
        await asyncio.gather(*(post.courier.call(i, i) for i in range(20)))
        for _ in range(50):
            await asyncio.sleep(0)
        before = post.messages
        for _ in range(200):
            await asyncio.sleep(0)
        assert post.messages == before and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
