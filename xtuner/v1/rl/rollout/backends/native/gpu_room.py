"""Memory of a GPU that the engine's cache may take."""

from dataclasses import dataclass

import torch

from xtuner.v1.model.config import TransformerConfig

from .cache import Cache


@dataclass(frozen=True, slots=True)
class GPURoom:
    """What a share of the card's memory leaves beside all that is in use, the weights included, and a step's work."""

    device: torch.device
    utilization: float
    step_bytes: int
    """That the work of a step takes."""

    def beside(self, cache: Cache) -> int:
        """Bytes that the cache may take, those that it has now included; less than 0 if even the rest is too much."""
        in_use, total = self._in_use(cache)
        return int(self.utilization * total) - in_use - self.step_bytes

    def some_beside(self, cache: Cache) -> int:
        """The same. Raises RuntimeError if there is none."""
        if (room := self.beside(cache)) > 0:
            return room
        in_use, total = self._in_use(cache)
        raise RuntimeError(
            f"no memory is left for the cache: gpu_memory_utilization={self.utilization} of {total} bytes, {in_use} in "
            f"use (weights included), {self.step_bytes} for one step. Raise gpu_memory_utilization or free memory."
        )

    def _in_use(self, cache: Cache) -> tuple[int, int]:
        """Bytes of the card in use by anybody but the cache, without those that torch holds in vain; and all."""
        free, total = torch.cuda.mem_get_info(self.device)
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return total - free - idle - cache.num_bytes, total


def step_bytes(config: TransformerConfig, dtype: torch.dtype, batch_size: int, prefill_rows: int) -> int:
    """About what a step of so many sequences and rows of prompts takes."""
    logits = 4 * 4 * batch_size * config.vocab_size
    widest = 8 * config.hidden_size + config.mlp_values
    return logits + widest * prefill_rows * dtype.itemsize
