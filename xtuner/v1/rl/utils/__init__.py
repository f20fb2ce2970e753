"""Where workers run and how to speak to them."""

from .handles import Handle, LocalHandle, WorkerLostError
from .host import peer
from .launcher import Launcher, LauncherKind, build_launcher, launch_problem
from .resources import AcceleratorResourcesConfig, CPUResourcesConfig

__all__ = [
    "AcceleratorResourcesConfig",
    "CPUResourcesConfig",
    "Handle",
    "Launcher",
    "LauncherKind",
    "LocalHandle",
    "WorkerLostError",
    "build_launcher",
    "launch_problem",
    "peer",
]
