"""Three ranks of an engine in one process."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from xtuner.v1.rl.rollout.backends.native.tp_channel import Channel


@pytest.fixture
def ranks():
    channels = [Channel(rank, 3) for rank in range(3)]
    address: queue.Queue[bytes] = queue.Queue()
    read, lost = [queue.Queue() for _ in range(3)], [queue.Queue() for _ in range(3)]

    def share(data: bytes) -> bytes:
        for _ in range(2) if data else ():
            address.put(data)
        return data or address.get(timeout=10)

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda channel: channel.connect(share), channels))
    for channel, messages, reasons in zip(channels, read, lost, strict=True):
        channel.watch(messages.put, reasons.put)
    yield channels, read, lost
    for channel in channels:
        channel.close()
    for thread in threading.enumerate():
        if thread.name.startswith("engine-rank"):
            thread.join(10)
            assert not thread.is_alive()


def test_messages_arrive_whole_and_in_order(ranks):
    channels, read, _ = ranks
    messages = [{"events": [["enter", {"prompt_ids": list(range(n))}]]} for n in (0, 3, 100_000, 1)]
    for message in messages:
        channels[0].send(message)
    for messages_read in read[1:]:
        assert [messages_read.get(timeout=10) for _ in messages] == messages


@pytest.mark.parametrize("dies", [True, False])
def test_everybody_learns_who_is_lost(ranks, dies):
    channels, _, lost = ranks
    channels[1].close() if dies else channels[1].fail("out of memory")
    what = "rank 1 of this engine " + ("is gone" if dies else "failed: out of memory")
    for reasons in (lost[0], lost[2]):
        assert what in reasons.get(timeout=10)
    with pytest.raises(RuntimeError, match=what):
        channels[0].send({})


def test_an_end_that_was_announced_is_no_loss(ranks):
    channels, read, lost = ranks
    channels[0].send({"meet": "stop"}, last=True)
    channels[0].close()
    for rank in (1, 2):
        assert read[rank].get(timeout=10) == {"meet": "stop"}
        channels[rank].close()
    assert all(reasons.empty() for reasons in lost)
