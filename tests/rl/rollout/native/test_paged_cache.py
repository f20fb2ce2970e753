"""Pages: shared by what begins alike, never by different sequences, given back by the last, and found again."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native.cache import Prompt
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE, PagedCache, pages_of
from xtuner.v1.rl.rollout.backends.native.requests import RequestLimits, make_sequence


def make_cache(pages: int, slots: int = 8, max_length: int = 6 * PAGE) -> PagedCache:
    cache = PagedCache(2, 1, 4, 3, torch.float32, torch.device("cpu"), slots, max_length)
    cache.set_budget(pages * PAGE * cache.row_bytes)
    cache.hold()
    return cache


def pages(cache: PagedCache, slot: int) -> list[int]:
    return cache.tables[slot, : cache.counts[slot]].tolist()


def ids_of(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def come_in(cache: PagedCache, ids: np.ndarray, siblings: int = 1) -> Prompt | None:
    """A prompt and its members in their slots, or None if there is no room."""
    prompt, batch = Prompt(ids), cache.running + siblings
    if not cache.open(prompt, batch, ids.size):
        return None
    limits = RequestLimits(1000, 10_000, [1], lambda ids: "")
    for i in range(siblings):
        assert i == 0 or cache.join(prompt, batch, ids.size)
        prompt.members.append(make_sequence(GenerateRequest(i, ids.tolist(), SampleParams(), i), limits))
    prompt.end = ids.size
    cache.fill(prompt)
    cache.seat(prompt)
    return prompt


def leave(cache: PagedCache, slots: list[int], ids: list[np.ndarray] | None = None) -> None:
    """With what the slots held; nothing if not given."""
    left = cache.running - len(slots)
    targets = [s for s in sorted(slots) if s < left]
    sources = [s for s in range(left, cache.running) if s not in slots]
    cache.release(slots, sources, targets, ids or [np.zeros(0, np.int32)] * len(slots))


def test_siblings_share_full_pages_and_copy_the_one_that_is_not():
    cache = make_cache(20)
    prompt, other = come_in(cache, ids_of(0, 2 * PAGE + 5), 3), come_in(cache, ids_of(1, PAGE))
    first, second, third, fourth = (pages(cache, slot) for slot in range(4))
    assert first == prompt.tables[0].tolist() and fourth == other.tables[0].tolist()
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2], fourth[0]} | set(first[:2])) == 6
    assert cache.free_pages == 20 - 6


def test_siblings_of_a_prompt_that_ends_with_a_page_share_all_of_it():
    cache = make_cache(10)
    come_in(cache, ids_of(0, 2 * PAGE), 2)
    assert pages(cache, 0) == pages(cache, 1)
    assert cache.grow(np.array([2 * PAGE + 1, 2 * PAGE + 1]))
    assert pages(cache, 0)[2] != pages(cache, 1)[2]


def test_shared_pages_stay_until_the_last_reader_goes():
    cache = make_cache(10)
    come_in(cache, ids_of(0, PAGE + 1), 2)
    kept = pages(cache, 1)
    leave(cache, [0])
    assert pages(cache, 0) == kept and cache.running == 1
    assert cache.free_pages == 10 - 2
    leave(cache, [0])
    assert cache.free_pages == 10


def test_a_prompt_finds_the_full_pages_of_what_was_there():
    cache = make_cache(20)
    turn = ids_of(0, 3 * PAGE + 10)
    first = come_in(cache, turn[: PAGE + 5])
    cache.grow(np.array([turn.size]))
    held = pages(cache, 0)
    leave(cache, [0], [turn])
    again = come_in(cache, turn)
    assert again.begin == 3 * PAGE and pages(cache, 0)[:3] == held[:3] and first.begin == 0
    other = turn.copy()
    other[PAGE + 3] += 1
    assert come_in(cache, other).begin == PAGE, "the third page is the same but follows another"
    assert cache.hits == 4 * PAGE


def test_a_prompt_that_is_there_whole_computes_its_last_row_alone_and_writes_nothing():
    cache = make_cache(20)
    ids = ids_of(0, 2 * PAGE)
    come_in(cache, ids)
    sibling = come_in(cache, ids)
    assert (sibling.begin, sibling.stored) == (2 * PAGE - 1, 2 * PAGE)
    assert pages(cache, 0) == pages(cache, 1)


def test_what_is_coming_in_is_found_only_as_far_as_it_goes_through_the_model():
    cache = make_cache(20)
    ids = ids_of(0, 4 * PAGE)
    prompt = Prompt(ids)
    assert cache.open(prompt, 1, ids.size)
    prompt.end = 2 * PAGE + 7
    cache.fill(prompt)
    assert come_in(cache, np.append(ids, 7).astype(np.int32)).begin == 2 * PAGE


def test_forgotten_pages_are_found_by_nobody_and_are_free():
    cache = make_cache(10)
    ids = ids_of(0, 3 * PAGE)
    come_in(cache, ids)
    leave(cache, [0], [ids])
    come_in(cache, ids)
    cache.forget()
    assert come_in(cache, ids).begin == 0
    assert cache.free_pages == 10 - 6
    leave(cache, [0, 1])
    assert cache.free_pages == 10


def test_room_is_made_from_what_was_not_read_for_longest_and_from_ends_first():
    cache = make_cache(9)
    old, new = ids_of(0, 3 * PAGE), ids_of(1, 3 * PAGE)
    for ids in (old, new):
        come_in(cache, ids)
        leave(cache, [0], [ids])
    come_in(cache, old[: 2 * PAGE + 1])
    leave(cache, [0])
    come_in(cache, ids_of(2, 6 * PAGE))
    assert come_in(cache, new) is None, "5 of the 9 pages were free or read longest ago"
    leave(cache, [0])
    assert come_in(cache, old).begin == 2 * PAGE, "its end was older than all of it that was read again"


def test_copy_copies_all_layers_of_a_page():
    cache = make_cache(3)
    cache.keys(0)[0], cache.values(1)[0] = 1.5, 2.5
    assert cache.keys(0).shape == (3, 1, PAGE, 4) and cache.values(1).shape == (3, 1, PAGE, 3)
    cache.keys(0)[2], cache.values(1)[2] = 0.0, 0.0
    cache.copy(np.array([[0, 2]]))
    assert (cache.keys(0)[2] == 1.5).all() and (cache.values(1)[2] == 2.5).all()


def test_many_pages_are_copied_some_at_a_time():
    """Siblings that come in together want a copy each of the page in which their prompt ends."""
    cache = make_cache(200)
    cache.keys(0)[:100] = torch.arange(100.0)[:, None, None, None]
    cache.copy(np.stack([np.arange(100), np.arange(199, 99, -1)], 1))
    assert (cache.keys(0)[100:, 0, 0, 0] == torch.arange(99.0, -1, -1)).all()


def test_growth_takes_pages_only_at_their_borders_and_says_when_there_are_none():
    cache = make_cache(4)
    come_in(cache, ids_of(0, PAGE - 1)), come_in(cache, ids_of(1, 5))
    assert cache.grow(np.array([PAGE, 6])) and cache.free_pages == 2
    assert cache.grow(np.array([PAGE + 1, 7])) and cache.free_pages == 1
    before = cache.counts.copy()
    assert not cache.grow(np.array([2 * PAGE + 1, PAGE + 1]))
    assert (cache.counts == before).all()


def test_growth_may_pass_several_pages_at_once():
    cache = make_cache(9)
    come_in(cache, ids_of(0, 5))
    assert cache.grow(np.array([3 * PAGE + 1]))
    assert len(set(pages(cache, 0))) == 4


def test_groups_name_those_who_still_share_pages_whenever_they_came():
    cache = make_cache(80, slots=16)
    group = ids_of(0, 2 * PAGE + 1)
    come_in(cache, group, 7), come_in(cache, group, 3)
    come_in(cache, ids_of(1, PAGE - 1), 2), come_in(cache, ids_of(2, PAGE)), come_in(cache, ids_of(3, PAGE))
    members, shared = cache.shared()
    assert members.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, -1, -1, -1, -1, -1, -1]]
    assert shared.tolist() == [2] * 10 + [0] * 4
    leave(cache, [9, 0])
    members, shared = cache.shared()
    assert members.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and shared.tolist() == [0] + [2] * 8 + [0] * 3


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_or_used_twice_whatever_comes_and_goes(seed):
    rng = np.random.default_rng(seed)
    cache, run = make_cache(40), []
    for _ in range(400):
        if rng.random() < 0.4 and cache.running < 8:
            # Of few prompts, so that prefixes are found again.
            ids = ids_of(int(rng.integers(6)), 3 * PAGE)[: int(rng.integers(1, 3 * PAGE + 1))]
            siblings = int(rng.integers(1, 9 - cache.running))
            if pages_of(ids.size) + 2 * siblings + cache.running <= cache.free_pages:
                prompt = come_in(cache, ids, siblings)
                assert len(set(prompt.tables[0].tolist())) == len(prompt.tables[0])
                run += [[ids.size, ids] for _ in range(siblings)]
        elif cache.running and rng.random() < 0.5:
            gone = sorted(rng.choice(cache.running, int(rng.integers(1, cache.running + 1)), replace=False).tolist())
            left = cache.running - len(gone)
            leave(cache, gone, [run[slot][1][: run[slot][0] - 1] for slot in gone])
            sources = [s for s in range(left, len(run)) if s not in gone]
            for source, target in zip(sources, [s for s in gone if s < left], strict=True):
                run[target] = run[source]
            del run[left:]
        elif cache.running and cache.grow(np.array([length + 9 for length, _ in run])):
            run = [[length + 9, np.append(ids, rng.integers(0, 1000, 9)).astype(np.int32)] for length, ids in run]
        elif rng.random() < 0.02:
            cache.forget()
        used = [pages(cache, slot) for slot in range(cache.running)]
        assert len({p for row in used for p in row}) == 40 - cache.free_pages
        members, shared = cache.shared()
        for group in members:
            slots = group[group >= 0]
            common = cache.tables[slots, : shared[slots[0]]]
            assert len(slots) > 1 and common.size and (common[:, -1] == common[0, -1]).all()
        # Who has a page at the same place has the same ids up to its end.
        readers = {}
        for row, (_, ids) in zip(used, run, strict=True):
            for index, page in enumerate(row):
                begin = ids[: (index + 1) * PAGE].tobytes()
                assert readers.setdefault(page, (index, begin)) == (index, begin)
    leave(cache, list(range(cache.running)))
    assert cache.free_pages == 40
