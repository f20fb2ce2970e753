"""CUDA graphs."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.moe_config import MoEModelConfig
from xtuner.v1.ops.grouped_mm import waits_for_device
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.device import no_garbage_collection

T = TypeVar("T")


def can_be_captured(model: DecoderModel, capability: tuple[int, int]) -> bool:
    """Whether the model's forward never waits for a device of this compute capability; a warning if it does."""
    config, dtype = model.config, next(model.parameters()).dtype
    if model.exact or not isinstance(config, MoEModelConfig):
        return True
    widths = config.hidden_size, config.moe_intermediate_size
    if not waits_for_device(dtype, widths, capability):
        return True
    get_logger().warning(
        f"native engine: no CUDA graphs, which makes short steps slow: experts of {widths[0]} x {widths[1]} in {dtype} "
        f"have no kernel of their own on a device of compute capability {'.'.join(map(str, capability))}; bfloat16 has "
        "one on 9.x and 10.x, for widths that are multiples of 8."
    )
    return False


def captured(run: Callable[[], T], device: torch.device, pool: Any) -> Callable[[], T]:
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
