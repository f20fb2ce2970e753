"""How often `torch.compile` had to work."""

import sys


def compiled_programs() -> int:
    """Programs that `torch.compile` has made in this process, compilations for new shapes included."""
    utils = sys.modules.get("torch._dynamo.utils")  # not there: nothing was ever compiled
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])
