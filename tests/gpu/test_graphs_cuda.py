"""Captured graphs."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from xtuner.v1.rl.rollout.backends.native.graphs import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
YOUNG = 10_000


@pytest.fixture
def collections_by_count() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(YOUNG)
    yield
    gc.set_threshold(*threshold)


class Ended:
    """An engine that is garbage: in a circle, so that only the collector finds it."""

    def __init__(self, replay: Callable[[], torch.Tensor]):
        self.itself, self.replay = self, replay


def test_a_capture_outlives_the_graphs_of_an_engine_that_ended(collections_by_count):
    """The collector would end them in the middle of the capture, and the driver would not have that."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(8, device=device)
    ended = [Ended(captured(lambda: x + 2, device, None))]
    gone = weakref.ref(ended[0])

    def run() -> torch.Tensor:
        if ended:
            ended.clear()
        else:
            [[i] for i in range(2 * YOUNG)]
        return x + 1

    replay = captured(run, device, None)
    x.fill_(2)
    assert replay().tolist() == [3.0] * 8
    [[i] for i in range(2 * YOUNG)]
    assert gone() is None, "it was no garbage of the kind that is found by itself"
