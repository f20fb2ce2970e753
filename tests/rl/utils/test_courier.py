"""Many calls in few messages: who waits for what gets it, whatever the order, and nobody waits for ever."""

import asyncio
import random

import pytest

from xtuner.v1.rl.utils.courier import Courier, Desk
from xtuner.v1.rl.utils.handles import WorkerLostError
from xtuner.v1.rl.utils.outcome import Outcome


class Post:
    """A courier and a desk in one process; what is asked for is a number of turns of the loop to wait."""

    def __init__(self):
        self.desk = Desk(self.run)
        self.courier = Courier(self.exchange)
        self.messages, self.at_once, self.cancelled = 0, 0, []
        self.broken: Exception | None = None
        self.delays: list[int] = []
        """Turns that the next messages take on their way."""

    async def exchange(self, orders):
        self.messages += 1
        for _ in range(self.delays.pop(0) if self.delays else 1):
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
            if what == "gives up":
                raise asyncio.CancelledError
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


def test_a_cancellation_that_overtakes_its_call_still_counts():
    async def main():
        post = Post()
        post.delays = [60]
        calls = [asyncio.ensure_future(post.courier.call(i, 100_000)) for i in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        for call in calls[:2]:
            call.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert post.at_once == 1 and not calls[2].done()
        calls[2].cancel()
        await asyncio.wait(calls)

    asyncio.run(main())


def test_what_is_called_and_cancelled_at_once_is_never_sent():
    async def main():
        post = Post()
        call = post.courier.call("never", 5)
        call.send(None)
        with pytest.raises(asyncio.CancelledError):
            call.throw(asyncio.CancelledError())
        for _ in range(10):
            await asyncio.sleep(0)
        assert post.messages == 0  # an empty one could overtake those that came before, and tell of no call at all
        assert await post.courier.call("later", 0) == ("later", 0) and post.cancelled == []

    asyncio.run(main())


def test_a_call_that_ends_as_cancelled_by_itself_is_an_error_of_its_caller():
    async def main():
        post = Post()
        good, bad = await asyncio.wait_for(
            asyncio.gather(post.courier.call("right", 50), post.courier.call("gives up", 3), return_exceptions=True), 20
        )
        assert good == ("right", 50) and "was cancelled in the process that served it" in str(bad)

    asyncio.run(main())


def test_calls_that_the_other_end_has_forgotten_are_errors():
    async def main():
        async def knows_of_nothing(orders):
            return []

        courier = Courier(knows_of_nothing)
        with pytest.raises(RuntimeError, match="knows nothing of this call any more"):
            await asyncio.wait_for(courier.call("forgotten"), 20)

    asyncio.run(main())


def test_what_cannot_be_sent_harms_no_other_call():
    async def main():
        post = Post()
        good = asyncio.ensure_future(post.courier.call("right", 200))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        send = post.courier._exchange

        def refuses(orders):
            raise TypeError("cannot pickle this")

        post.courier._exchange = refuses
        with pytest.raises(TypeError, match="cannot pickle this"):
            await post.courier.call("odd", 3)
        post.courier._exchange = send
        assert await good == ("right", 200)

    asyncio.run(main())


def test_a_message_that_cannot_be_sent_keeps_nobody_waiting_and_loses_no_cancellation():
    async def main():
        post = Post()
        send = post.courier._exchange

        def picky(orders):
            if any(what == ("odd",) for _, what in orders):
                raise TypeError("cannot pickle this")
            return send(orders)

        post.courier._exchange = picky
        slow, gone = (asyncio.ensure_future(post.courier.call(what, 300)) for what in ("slow", "gone"))
        while post.at_once < 2:
            await asyncio.sleep(0)
        for _ in range(40):
            gone.cancel()
            with pytest.raises(TypeError):
                await post.courier.call("odd")
        assert await asyncio.wait_for(slow, 20) == ("slow", 300)
        assert gone.cancelled() and post.cancelled == ["gone"] and post.at_once == 0

    asyncio.run(main())


def test_a_call_that_ends_its_process_is_an_error_of_its_caller():
    async def main():
        async def leaves():
            raise SystemExit(3)

        desk = Desk(leaves)
        courier = Courier(desk.exchange)
        with pytest.raises(RuntimeError, match="ended with SystemExit: 3"):
            await asyncio.wait_for(courier.call(), 20)

    asyncio.run(main())


def test_however_many_calls_come_one_by_one_a_single_message_waits():
    """Each that waits would wake with every result."""

    async def main():
        post, calls, most = Post(), [], 0
        waiting = lambda: sum("exchange" in repr(task.get_coro()) for task in asyncio.all_tasks())
        for i in range(100):
            calls.append(asyncio.ensure_future(post.courier.call(i, 2000 + i)))
            for _ in range(12):
                await asyncio.sleep(0)
            most = max(most, waiting())
        assert post.at_once == 100 and most <= 4
        assert [what for what, _ in await asyncio.gather(*calls)] == list(range(100))

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
        assert post.desk.idle
        for _ in range(50):
            await asyncio.sleep(0)
        before = post.messages
        for _ in range(200):
            await asyncio.sleep(0)
        assert post.messages == before and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_nothing_is_kept_of_a_call_that_was_given_up():
    async def main():
        post = Post()
        call = asyncio.ensure_future(post.courier.call("one", 100_000))
        while not post.at_once:
            await asyncio.sleep(0)
        call.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert post.cancelled == ["one"] and post.desk.idle

    asyncio.run(main())


def test_a_loop_that_ends_ends_its_calls_on_both_sides():
    async def main():
        post = Post()
        courier = Courier(post.desk.exchange)
        call = asyncio.ensure_future(courier.call("one", 100_000))
        while not post.at_once:
            await asyncio.sleep(0)
        for task in list(courier._under_way):
            task.cancel()
        with pytest.raises(RuntimeError, match="this loop ends"):
            await asyncio.wait_for(call, 20)
        with pytest.raises(RuntimeError, match="this loop ends"):
            await asyncio.wait_for(courier.call("another", 3), 20)
        for _ in range(10):
            await asyncio.sleep(0)
        assert post.cancelled == ["one"] and post.desk.idle

    asyncio.run(main())
