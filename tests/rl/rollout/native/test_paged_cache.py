"""Pages: shared by equal prompts, never by different sequences, and given back to the last."""

import numpy as np
import pytest
import torch

from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE, PagedCache, pages_of


def make_cache(pages: int, slots: int = 8, max_length: int = 6 * PAGE) -> PagedCache:
    cache = PagedCache(2, 1, 4, 3, torch.float32, torch.device("cpu"), slots, max_length)
    cache.set_budget(pages * PAGE * cache.row_bytes)
    cache.reserve(0, 0, live=0)
    return cache


def pages(cache: PagedCache, slot: int) -> list[int]:
    return cache.tables[slot, : cache.counts[slot]].tolist()


def test_siblings_share_full_pages_and_copy_the_one_that_is_not():
    cache = make_cache(10)
    own, copies = cache.claim(np.array([0, 0, 0, 1]), np.array([2 * PAGE + 5, PAGE]))
    first, second, third, other = (pages(cache, slot) for slot in range(4))
    assert first == own[0].tolist() and other == own[1].tolist()
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2], other[0]} | set(first[:2])) == 6
    assert copies.tolist() == [[first[2], second[2]], [first[2], third[2]]]
    assert cache.free_pages == 10 - 6


def test_siblings_of_a_prompt_that_ends_with_a_page_share_all_of_it():
    cache = make_cache(10)
    _, copies = cache.claim(np.array([0, 0]), np.array([2 * PAGE]))
    assert pages(cache, 0) == pages(cache, 1) and len(copies) == 0
    assert cache.grow(np.array([2 * PAGE + 1, 2 * PAGE + 1]))
    assert pages(cache, 0)[2] != pages(cache, 1)[2]


def test_shared_pages_stay_until_the_last_reader_goes():
    cache = make_cache(10)
    cache.claim(np.array([0, 0]), np.array([PAGE + 1]))
    kept = pages(cache, 1)
    cache.release([0], [1], [0])
    assert pages(cache, 0) == kept and cache.running == 1
    assert cache.free_pages == 10 - 2
    cache.release([0], [], [])
    assert cache.free_pages == 10


def test_copy_copies_all_layers_of_a_page():
    cache = make_cache(3)
    cache.keys(0)[0], cache.values(1)[0] = 1.5, 2.5
    assert cache.keys(0).shape == (3, 1, PAGE, 4) and cache.values(1).shape == (3, 1, PAGE, 3)
    cache.keys(0)[2], cache.values(1)[2] = 0.0, 0.0
    cache.copy(np.array([[0, 2]]))
    assert (cache.keys(0)[2] == 1.5).all() and (cache.values(1)[2] == 2.5).all()


def test_growth_takes_pages_only_at_their_borders_and_says_when_there_are_none():
    cache = make_cache(3)
    cache.claim(np.array([0, 1]), np.array([PAGE - 1, 5]))
    assert cache.grow(np.array([PAGE, 6])) and cache.free_pages == 1
    assert cache.grow(np.array([PAGE + 1, 7])) and cache.free_pages == 0
    before = cache.counts.copy()
    assert not cache.grow(np.array([PAGE + 2, PAGE + 1]))
    assert (cache.counts == before).all()


def test_growth_may_pass_several_pages_at_once():
    cache = make_cache(9)
    cache.claim(np.array([0]), np.array([5]))
    assert cache.grow(np.array([3 * PAGE + 1]))
    assert len(set(pages(cache, 0))) == 4


def test_groups_name_those_who_still_share_pages():
    cache = make_cache(60, slots=16)
    cache.claim(np.array([0] * 10 + [1, 1, 2, 3]), np.array([2 * PAGE + 1, PAGE - 1, PAGE, PAGE]))
    members, shared = cache.shared()
    assert members.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, -1, -1, -1, -1, -1, -1]]
    assert shared.tolist() == [2] * 10 + [0] * 4
    cache.release([9, 0], [12, 13][1:], [0])
    members, shared = cache.shared()
    assert members.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and shared.tolist() == [0] + [2] * 8 + [0] * 3


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_or_used_twice_whatever_comes_and_goes(seed):
    rng = np.random.default_rng(seed)
    cache = make_cache(40)
    lengths: list[int] = []
    prompts: list[int] = []
    for _ in range(400):
        if rng.random() < 0.4 and cache.running < 8:
            count = int(rng.integers(1, 8 - cache.running + 1))
            which = rng.integers(0, 2, count)
            which = np.unique(which, return_inverse=True)[1]
            new = rng.integers(1, 3 * PAGE, which.max() + 1)
            if sum(pages_of(n) for n in new) + count > cache.free_pages:
                continue
            own, copies = cache.claim(which, new)
            assert all(len(set(p.tolist())) == len(p) for p in own)
            lengths += new[which].tolist()
            prompts += new[which].tolist()
        elif cache.running and rng.random() < 0.5:
            gone = sorted(rng.choice(cache.running, int(rng.integers(1, cache.running + 1)), replace=False).tolist())
            left = cache.running - len(gone)
            targets = [s for s in gone if s < left]
            sources = [s for s in range(left, cache.running) if s not in gone]
            for source, target in zip(sources, targets, strict=True):
                lengths[target], prompts[target] = lengths[source], prompts[source]
            del lengths[left:], prompts[left:]
            cache.release(gone, sources, targets)
        elif cache.running and cache.grow(np.array(lengths) + 1):
            lengths = [n + 1 for n in lengths]
        used = [pages(cache, slot) for slot in range(cache.running)]
        assert len({p for row in used for p in row}) == 40 - cache.free_pages
        members, shared = cache.shared()
        for group in members:
            slots = group[group >= 0]
            common = cache.tables[slots, : shared[slots[0]]]
            assert len(slots) > 1 and common.size and (common == common[0]).all()
        # What comes after the prompt's full pages is nobody else's.
        private = [p for row, prompt in zip(used, prompts, strict=True) for p in row[prompt // PAGE :]]
        assert len(private) == len(set(private))
    cache.release(list(range(cache.running)), [], [])
    assert cache.free_pages == 40
