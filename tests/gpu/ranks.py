"""Groups of processes, one a card, that end in time whatever happens in them."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_S = 60
"""A rank that waits longer for the others raises."""


def start(device_type: str, world: int, work: Callable[..., None], *args: Any) -> mp.ProcessContext:
    """`work(device, *args)` in `world` processes that are one group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = device_type, world, port, work, args
    return mp.start_processes(_rank, arguments, nprocs=world, start_method="spawn", join=False)


def finish(groups: list[mp.ProcessContext], seconds: float) -> None:
    """Wait for all of them; on an error in one, or when time is up, none is left running."""
    end = time.monotonic() + seconds
    try:
        for group in groups:
            while not group.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(f"processes still run after {seconds:g} s")
    finally:
        for process in (p for group in groups for p in group.processes if p.is_alive()):
            process.kill()


def _rank(rank: int, device_type: str, world: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
        world_size=world, timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    work(device, *args)
    dist.destroy_process_group()
