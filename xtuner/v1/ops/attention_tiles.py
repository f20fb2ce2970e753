"""Work lists of the packed attention kernels: which program computes which tiles, and in which order."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout


def prefixes_are_adjacent(layout: SegmentLayout) -> bool:
    """Whether the users of each prefix are the segments right behind it: so its keys are seen by one range of rows."""
    return all(p < 0 or p == s - 1 or layout.prefix[s - 1] == p for s, p in enumerate(layout.prefix))


def query_tiles(layout: SegmentLayout, rows: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of at most `rows` rows of one segment, and how many blocks of `block` keys each of them sees.

    int32 [N, 5]: first row, end of the segment, start of the segment, start and end of its prefix (equal: none).
    """
    starts = [0, *accumulate(layout.lengths)]
    tiles, costs = [], []
    for group in _groups(layout):
        part = []
        for s in group:
            start, end, p = starts[s], starts[s + 1], layout.prefix[s]
            prefix, prefix_end = (starts[p], starts[p + 1]) if p >= 0 else (0, 0)
            before = -(-(prefix_end - prefix) // block)
            for first in range(start, end, rows):
                cost = before - (start - min(first + rows, end)) // block
                part.append((cost, first, end, start, prefix, prefix_end))
        part.sort(key=lambda tile: -tile[0])
        tiles += [tile[1:] for tile in part]
        costs += [tile[0] for tile in part]
    return np.array(tiles, dtype=np.int32), np.array(costs)


def key_tiles(layout: SegmentLayout, keys: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of at most `keys` keys of one segment, and how many blocks of `block` rows see each of them.

    int32 [N, 3]: first key, end of the segment, end of the rows that see the key. Prefixes must be adjacent.
    """
    starts = [0, *accumulate(layout.lengths)]
    tiles = []
    for group in _groups(layout):
        shared = len(group) > 1
        part = []
        for i, s in enumerate(group):
            row_end = starts[group[-1] + 1] if shared and i == 0 else starts[s + 1]
            part += [(first, starts[s + 1], row_end) for first in range(starts[s], starts[s + 1], keys)]
        tiles += sorted(part, key=lambda tile: tile[0] - tile[2])
    array = np.array(tiles, dtype=np.int32)
    return array, -(-(array[:, 2] - array[:, 0]) // block)


@dataclass(frozen=True, slots=True)
class TileLists:
    """A list of tiles for each program."""

    tiles: Tensor
    """int32 [P, slots, fields], the head as the last field."""
    counts: Tensor
    """int32 [P], how many of the slots hold a tile."""

    @classmethod
    def build(cls, tiles: np.ndarray, costs: np.ndarray, heads: int, programs: int) -> "TileLists":
        """Each tile [N, F] once a head. What runs at one time stands close together, for the cache.

        Programs are dealt one tile a round, the dearest of the round to the one with the least to do. A tile costs
        one block more than it counts, to begin and to end.
        """
        total = len(tiles) * heads
        programs = min(programs, total)
        slots = -(-total // programs)
        heads_of = np.tile(np.arange(heads, dtype=np.int32), len(tiles))
        table = np.column_stack((np.repeat(tiles, heads, axis=0), heads_of))
        costs = np.repeat(costs + 1, heads)
        out = np.zeros((programs, slots, table.shape[1]), dtype=np.int32)
        loads, counts = np.zeros(programs), np.zeros(programs, dtype=np.int32)
        for slot in range(slots):
            dealt = np.arange(slot * programs, min(total, (slot + 1) * programs))
            dealt = dealt[np.argsort(-costs[dealt], kind="stable")]
            receivers = np.argsort(loads, kind="stable")[: len(dealt)]
            out[receivers, slot] = table[dealt]
            loads[receivers] += costs[dealt]
            counts[receivers] += 1
        return cls(torch.from_numpy(out), torch.from_numpy(counts))

    def to(self, device: torch.device) -> "TileLists":
        """From pinned memory: the host does not wait for the device."""
        return TileLists(*(t.pin_memory().to(device, non_blocking=True) for t in (self.tiles, self.counts)))


def _groups(layout: SegmentLayout) -> list[list[int]]:
    """Prefixes with their users, other segments alone; the largest first, so that none is left for the end."""
    groups: dict[int, list[int]] = {}
    for s, p in enumerate(layout.prefix):
        groups.setdefault(p if p >= 0 else s, []).append(s)
    return sorted(groups.values(), key=lambda group: -sum(layout.lengths[s] for s in group))
