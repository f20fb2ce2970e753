"""The device memory of a training engine, lent to the rollout engine beside it between its phases."""

from collections import defaultdict

import torch
from torch import nn

from .host_memory import HostCopy
from .optimizer import Optimizer
from .placement import local_part


class Parking:
    """Moves weights and moments to the host and back. Frozen weights are copied to the host once."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
        self.device, self._optimizer = device, optimizer
        params = list(model.parameters())
        self._frozen = HostCopy((local_part(p.detach()) for p in params if not p.requires_grad), device)
        self._trained = HostCopy((local_part(p.detach()) for p in params if p.requires_grad), device)
        self._moments: HostCopy | None = None
        self._frozen_changed = True

    @property
    def weights_away(self) -> bool:
        return self._trained.parked or self._frozen.parked

    @property
    def moments_away(self) -> bool:
        return self._moments is not None and self._moments.parked

    def frozen_changed(self) -> None:
        """To be said when frozen weights were written."""
        self._frozen_changed = True

    def park(self) -> None:
        """Everything to the host."""
        if self._moments is None and self._optimizer is not None and (tensors := self._optimizer.device_moments()):
            self._moments = HostCopy(tensors, self.device)
        self._frozen.park(self._frozen_changed)
        self._frozen_changed = False
        self._trained.park()
        if self._moments is not None:
            self._moments.park()

    def restore(self, moments: bool = True) -> None:
        """Weights back, and the moments, which go on arriving until `moments_ready`."""
        for copy in (self._frozen, self._trained):
            copy.restore()
            copy.ready()
        if moments and self._moments is not None:
            self._moments.restore()

    def moments_ready(self) -> None:
        """Let the computation wait for the moments."""
        if self.moments_away:
            raise RuntimeError("the moments are parked on the host: call onload() first.")
        if self._moments is not None:
            self._moments.ready()

    def rates(self) -> dict[str, float]:
        """GB/s to the host and back since the last call; empty where nothing was copied between two memories."""
        num_bytes: defaultdict[str, int] = defaultdict(int)
        seconds: defaultdict[str, float] = defaultdict(float)
        for copy in filter(None, (self._frozen, self._trained, self._moments)):
            for direction, spent in copy.seconds().items():
                num_bytes[direction] += copy.num_bytes
                seconds[direction] += spent
        return {direction: num_bytes[direction] / 1e9 / spent for direction, spent in seconds.items()}
