"""What a graph of prompts reads: rows of prompts, and rows of padding that see and reach nothing."""

import numpy as np
import pytest
import torch

from xtuner.v1.ops.paged_attention import TILE
from xtuner.v1.rl.rollout.backends.native.cache import Prompt
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE, PagedCache
from xtuner.v1.rl.rollout.backends.native.prefill_graphs import PrefillGraph

SIZE = 256
PROMPTS = {
    "parts of prompts": [(0, 100, 0), (64, 90, 64), (127, 128, 128), (3, 70, 0)],
    "as many rows as there are": [(0, 200, 0), (10, 66, 0)],
    "as many prompts as there are": [(i, i + 2, 0) for i in range(128)],
    "one row": [(64, 65, 0)],
}


def make(begin: int, end: int, stored: int, first_page: int) -> Prompt:
    ids = np.arange(end + 5, dtype=np.int32) + 1000 * first_page
    pages = np.arange(first_page, first_page + -(-len(ids) // PAGE), dtype=np.int32)
    return Prompt(ids, [object()], begin, end, stored, [pages])


@pytest.mark.parametrize("name", PROMPTS)
def test_each_row_has_its_tile_and_padding_sees_nothing(name):
    cache = PagedCache(1, 1, 16, 16, torch.float32, torch.device("cpu"), max_slots=4, max_length=1000)
    prompts = [make(*numbers, first_page=1 + 10 * i) for i, numbers in enumerate(PROMPTS[name])]
    seen = []

    def hidden_states(ids, positions, context):
        seen.append((ids.clone(), positions.clone(), context.places.clone(), context._rows))
        return ids[:, None].float()

    graph = PrefillGraph(cache, False, SIZE, None)
    graph([make(0, 256, 0, 7)], hidden_states)  # whose numbers must be gone
    out = graph(prompts, hidden_states)
    ids, positions, places, (tables, starts, before, tiles, _) = seen[-1]
    wanted = [(p, position) for p in prompts for position in range(p.begin, p.end)]
    assert out[: len(wanted), 0].tolist() == [p.ids[position] for p, position in wanted]
    assert positions[: len(wanted)].tolist() == [position for _, position in wanted]
    pages = [int(p.tables[0][position // PAGE]) * PAGE + position % PAGE for p, position in wanted]
    stored = [position < p.stored for p, position in wanted]
    assert places[: len(wanted)].tolist() == [-1 if s else page for s, page in zip(stored, pages, strict=True)]
    assert (places[len(wanted) :] == -1).all() and len(places) == SIZE

    # As the kernels read it: a tile is up to TILE rows of one sequence.
    worked, last = [], len(tables) - 1
    for sequence, first in tiles.tolist():
        start, end, ahead = int(starts[sequence]), int(starts[sequence + 1]), int(before[sequence])
        for row in range(start + first, min(start + first + TILE, end)):
            worked.append(row)
            if sequence == last:
                assert ahead + min(first + TILE, end - start) <= 0  # no key
            else:
                prompt, position = wanted[row]
                assert prompt is prompts[sequence] and ahead + row - start == position
                assert tables[sequence, position // PAGE] == prompt.tables[0][position // PAGE]
    assert sorted(worked) == list(range(SIZE))
