"""How often `torch.compile` had to work."""

import sys
from contextlib import AbstractContextManager, nullcontext


def as_written(compiled: bool = True) -> AbstractContextManager[object]:
    """Run what is compiled as it is written, where a program of its own would not pay. compiled False: nothing is, and
    nothing is done."""
    if not compiled:
        return nullcontext()
    import torch

    return torch.compiler.set_stance("force_eager")


def compiled_programs() -> int:
    """Programs that `torch.compile` has made in this process, compilations for new shapes included."""
    utils = sys.modules.get("torch._dynamo.utils")  # not there: nothing was ever compiled
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
