"""Whether kernels for CPUs are at hand."""

from functools import cache

from xtuner.v1.utils import get_logger


@cache
def cpu_kernels_available() -> bool:
    """Whether Numba can compile ours here. Without it torch's operations serve, slower; a line in the log says so."""
    try:
        from . import jit  # noqa: F401
    except ImportError as error:
        get_logger().warning(f"CPU kernels are off ({error}); `pip install numba` makes small models on a CPU faster.")
        return False
    return True
