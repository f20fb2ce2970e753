"""Facts about the machine, and the few process-wide switches that a worker sets once."""

import ctypes
import gc
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_YOUNG_OBJECTS = 50_000
"""New containers that set off a collection (Python: 700)."""


def keep_freed_memory() -> None:
    """Let the C allocator keep freed blocks instead of giving them back to the kernel.

    A training step on a CPU frees and takes the same large blocks again and again; each return to the kernel
    costs a page fault for every 4 KiB. Only glibc knows these switches; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Inside, the garbage collector hardly ever runs by itself: call `gc.collect` where little is alive.

    The many small objects of imports, or of a step's samples, set it off tens of times for nothing, and over the
    modules of torch and transformers a collection takes a tenth of a second.
    """
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, the garbage collector does not run by itself, in no thread: what it frees may have the driver do things
    that must not happen now."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def old_objects_stay() -> Iterator[None]:
    """Inside, collections pass over all objects that were there before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resolve_device(accelerator: str) -> torch.device:
    """The torch device of a worker, which sees no other GPU than its own. `accelerator` is GPU or CPU.

    Raises:
        RuntimeError: GPU, and there is none.
    """
    if accelerator == "CPU":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"resources.accelerator={accelerator!r} but torch sees no CUDA device on this machine. "
            "Start with --accelerator cpu, or run on a machine with a GPU."
        )
    return torch.device("cuda", 0)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def host_rng() -> str:
    """The states of Python's, NumPy's and torch's generators on the host, which rewards and samplers of the user's own
    may draw from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    of_torch = torch.get_rng_state().numpy().tobytes().hex()
    numpy = [name, np.asarray(keys).tolist(), *rest]
    return json.dumps({"python": random.getstate(), "numpy": numpy, "torch": of_torch})


def set_host_rng(state: str) -> None:
    """Go on from what `host_rng` gave."""
    states = json.loads(state)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    if "torch" in states:  # an older one has it elsewhere, or not at all
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))


def set_deterministic(on: bool) -> None:
    """Ask torch for the same bits in every run with the same inputs."""
    if not on:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Our kernels write all that they allocate: filling it first would cost a kernel each and find nothing.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a timer reads what happened."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_gib(device: torch.device) -> dict[str, float]:
    """Peak allocated and reserved device memory since the start, GiB; zeros on a CPU."""
    if device.type != "cuda":
        return {"max_memory": 0.0, "reserved_memory": 0.0}
    return {
        "max_memory": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_memory": torch.cuda.max_memory_reserved(device) / 2**30,
    }
