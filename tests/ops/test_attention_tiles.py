"""Work lists of the packed attention kernels: what they visit is what the layout lets rows see."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.attention_tiles import TileLists, key_tiles, prefixes_are_adjacent, query_tiles

LAYOUTS = {
    "one row": SegmentLayout([1], [-1]),
    "plain": SegmentLayout([5, 1, 9, 40, 3, 16], [-1] * 6),
    "shared": SegmentLayout([17, 4, 9, 1, 3, 8, 20], [-1, 0, 0, 0, -1, 4, -1]),
}


def _visible(layout: SegmentLayout) -> np.ndarray:
    """bool [T, T], row by key."""
    segment = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
    own = segment[:, None] == segment
    prefix = np.array(layout.prefix)[segment][:, None] == segment
    return (own & np.tri(len(segment), dtype=bool)) | prefix


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block", [4, 8])
def test_query_tiles_cover_what_rows_see(name: str, block: int) -> None:
    layout = LAYOUTS[name]
    seen = np.zeros_like(_visible(layout), dtype=int)
    tiles, costs = query_tiles(layout, 8, block)
    for (first, end, start, prefix, prefix_end), cost in zip(tiles, costs, strict=True):
        rows = range(first, min(first + 8, end))
        for row in rows:
            seen[row, start : row + 1] += 1
            seen[row, prefix:prefix_end] += 1
        assert cost == -(-(rows[-1] + 1 - start) // block) + -(-(prefix_end - prefix) // block)
    assert np.array_equal(seen, _visible(layout).astype(int))


@pytest.mark.parametrize("name", LAYOUTS)
def test_key_tiles_cover_who_sees_keys(name: str) -> None:
    layout = LAYOUTS[name]
    seen = np.zeros_like(_visible(layout), dtype=int)
    tiles, costs = key_tiles(layout, 8, 4)
    for (first, end, row_end), cost in zip(tiles, costs, strict=True):
        for key in range(first, min(first + 8, end)):
            seen[key:row_end, key] += 1
        assert cost == -(-(row_end - first) // 4)
    assert np.array_equal(seen, _visible(layout).astype(int))


def test_prefixes_with_users_elsewhere_are_noticed() -> None:
    assert all(prefixes_are_adjacent(layout) for layout in LAYOUTS.values())
    assert not prefixes_are_adjacent(SegmentLayout([3, 4, 2], [-1, -1, 0]))
    assert not prefixes_are_adjacent(SegmentLayout([3, 4, 2, 5], [-1, -1, 1, 0]))
    assert not prefixes_are_adjacent(SegmentLayout([3, 4, 2, 5], [-1, 0, -1, 0]))


@pytest.mark.parametrize(("heads", "programs"), [(1, 7), (6, 4), (3, 1000)])
def test_every_tile_is_dealt_once_a_head_and_evenly(heads: int, programs: int) -> None:
    tiles, costs = query_tiles(SegmentLayout([300, 200, 900, 10, 450] * 4, [-1] * 20), 8, 8)
    lists = TileLists.build(tiles, costs, heads, programs)
    dealt, loads = [], []
    cost_of = dict(zip(map(tuple, tiles.tolist()), (costs + 1).tolist(), strict=True))
    for own, count in zip(lists.tiles.tolist(), lists.counts.tolist(), strict=True):
        assert count > 0
        dealt += [tuple(tile) for tile in own[:count]]
        loads.append(sum(cost_of[tuple(tile[:-1])] for tile in own[:count]))
    assert sorted(dealt) == sorted((*tile, head) for tile in map(tuple, tiles.tolist()) for head in range(heads))
    assert max(loads) - min(loads) <= max(cost_of.values())
    assert lists.tiles.dtype == lists.counts.dtype == torch.int32
