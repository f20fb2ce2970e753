"""CUDA graphs."""

from collections.abc import Callable
from typing import TypeVar

import torch

from xtuner.v1.utils.device import no_garbage_collection

T = TypeVar("T")


def captured(run: Callable[[], T], device: torch.device, pool: tuple[int, int] | None) -> Callable[[], T]:
    """What does the same by one launch, and gives what `run` gave while it was captured, with other content.

    `run` is called twice: the first time compiles kernels, and does its work.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may call the driver in the meantime. This one may not, as the end of another engine's
    # graphs and memory would, should the garbage collector come upon them.
    with no_garbage_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()

    def replay() -> T:
        graph.replay()
        return result

    return replay
