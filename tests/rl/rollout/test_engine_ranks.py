"""Several workers that are one engine, as the controller sees them."""

import asyncio

import pytest
from scripted_engine import HANG, NamedHandle, good, setup, state

from xtuner.v1.data_proto import Status


def test_only_the_first_rank_of_an_engine_is_asked_and_all_are_led():
    async def main():
        controller, engines = await setup(good, good, good, good, tensor_parallel_size=2)
        samples = await asyncio.gather(*(controller.generate(state(i, session_id=i)) for i in range(12)))
        assert all(s.status == Status.COMPLETED for s in samples)
        assert [len(e.requests) for e in engines] == [6, 0, 6, 0]
        await controller.pause()
        assert await controller.health() == [True] * 4
        assert len(await controller.weight_versions()) == 4

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_lost_a_rank_gets_no_requests(rank):
    async def main():
        controller, engines = await setup(good, good, good, good, tensor_parallel_size=2)
        NamedHandle.dead.add(controller.worker_names[rank])
        await controller.health()
        for i in range(4):
            assert (await controller.generate(state(i, session_id=7))).status == Status.COMPLETED
        assert [len(e.requests) for e in engines] == [0, 0, 4, 0]
        NamedHandle.dead.add(controller.worker_names[3])
        await controller.health()
        with pytest.raises(RuntimeError, match="out of service; last error: worker .* died"):
            await controller.generate(state(9))

    asyncio.run(main())


def test_requests_at_an_engine_end_when_another_rank_of_it_is_lost():
    async def main():
        controller, engines = await setup(
            lambda request, n: HANG, good, tensor_parallel_size=2, max_retry_per_sample=0, rollout_timeout=50.0
        )
        waiting = asyncio.create_task(controller.generate(state(1)))
        while not engines[0].waiting:
            await asyncio.sleep(0.01)
        NamedHandle.dead.add(controller.worker_names[1])
        await controller.health()
        sample = await asyncio.wait_for(waiting, 5)
        assert sample.status == Status.FAILED and "was left out" in sample.error_msg

    asyncio.run(main())
