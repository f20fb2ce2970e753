"""Captured graphs."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from xtuner.v1.rl.rollout.backends.native.graphs import captured
from xtuner.v1.utils.stable_memory import StableMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
YOUNG = 10_000


@pytest.fixture
def collections_by_count() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(YOUNG)
    yield
    gc.set_threshold(*threshold)


@pytest.mark.parametrize("what", ["graph", "memory"])
def test_a_capture_outlives_the_garbage_of_an_engine_that_ended(what, collections_by_count):
    """The collector would free it in the middle of the capture, and the driver would not have that."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(8, device=device)
    ended = [SimpleNamespace(memory=StableMemory(device, 1 << 21))]
    ended[0].itself = ended[0]
    ended[0].uses = captured(lambda: x + 2, device, None) if what == "graph" else ended[0].memory.map(1 << 21)
    gone = weakref.ref(ended[0].memory)

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
