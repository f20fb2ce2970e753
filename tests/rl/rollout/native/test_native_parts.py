"""Cache, scheduler and stop strings by themselves."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model.hf_config import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native.cache import Prompt
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE, PagedCache
from xtuner.v1.rl.rollout.backends.native.requests import RequestLimits, make_sequence
from xtuner.v1.rl.rollout.backends.native.scheduler import Scheduler
from xtuner.v1.rl.rollout.backends.native.stop_strings import StopStrings


def _cache(pages=1000, max_slots=64):
    cache = PagedCache(1, 1, 2, 2, torch.float32, torch.device("cpu"), max_slots, max_length=512)
    cache.set_budget(pages * PAGE * cache.row_bytes)
    return cache


def _sequence(i, length, **params):
    limits = RequestLimits(1000, 1000, [1], lambda ids: "")
    return make_sequence(GenerateRequest(i, list(range(10, 10 + length)), SampleParams(**params), i), limits)


def _record(scheduler, tokens, logprobs):
    """One token for each running sequence."""
    columns = np.array(tokens)[:, None], np.array(logprobs, np.float32)[:, None]
    return scheduler.record(np.arange(len(tokens)), *columns)


def test_finished_slots_are_filled_from_the_end_and_nobodys_tokens_are_mixed_up():
    scheduler, cache = Scheduler(8), _cache()
    sequences = [_sequence(i, 3 + i, max_tokens=2 + i % 3) for i in range(6)]
    for s in sequences:
        scheduler.add(s)
    scheduler.admit(cache, 1000)
    step = 0
    while scheduler.running:
        ids = np.array([s.request.request_id for s in scheduler.running])
        assert scheduler.last_tokens().tolist() == (
            [s.request.prompt_ids[-1] for s in scheduler.running]
            if step == 0
            else (50 + 10 * (step - 1) + ids).tolist()
        )
        done = _record(scheduler, 50 + 10 * step + ids, -ids - step / 10)
        scheduler.release([slot for slot, _ in done], cache)
        step += 1
    for i, s in enumerate(sequences):
        steps = range(2 + i % 3)
        assert s.token_ids == [50 + 10 * k + i for k in steps]
        assert s.logprobs == pytest.approx([-i - k / 10 for k in steps])


def _rows(prompts):
    return [(p.ids.size, p.begin, p.end, len(p.members)) for p in prompts]


def test_prompts_come_in_order_cut_at_the_rows_of_a_step_and_equal_ones_once():
    scheduler, cache = Scheduler(6), _cache()
    for i, length in enumerate((5, 5, 20, 4, 20, 20)):
        scheduler.add(_sequence(i, length))
    assert _rows(scheduler.admit(cache, 8)) == [(5, 0, 5, 2), (20, 0, 3, 1)]
    assert [s.request.request_id for s in scheduler.running] == [0, 1] and scheduler.filling
    assert _rows(scheduler.admit(cache, 8)) == [(20, 3, 11, 1)]
    assert len(scheduler.running) == cache.running == 2
    assert _rows(scheduler.admit(cache, 12)) == [(20, 11, 20, 3), (4, 0, 3, 1)]
    assert [s.request.request_id for s in scheduler.running] == [0, 1, 2, 4, 5]
    assert _rows(scheduler.admit(cache, 100)) == [(4, 3, 4, 1)]
    assert [s.request.request_id for s in scheduler.running] == [0, 1, 2, 4, 5, 3]


def test_a_sibling_that_comes_while_its_prompt_is_on_its_way_joins_it():
    scheduler, cache = Scheduler(6), _cache()
    scheduler.add(_sequence(0, 100))
    scheduler.admit(cache, 60)
    scheduler.add(_sequence(1, 100))
    assert _rows(scheduler.admit(cache, 30)) == [(100, 60, 90, 2)]
    assert _rows(scheduler.admit(cache, 30)) == [(100, 90, 100, 2)]
    assert len(scheduler.running) == 2 and cache.counts[:2].tolist() == [2, 2]


def test_room_is_asked_for_a_sequences_own_need_not_for_the_longest():
    scheduler, cache = Scheduler(8), _cache(pages=14)
    scheduler.add(_sequence(0, 5 * PAGE))
    for i in range(1, 6):
        scheduler.add(_sequence(i, 5 + i))
    assert len(scheduler.admit(cache, 10_000)) == 5, "5 + 4 pages, and one more of growth for each of 5"
    scheduler.release([0], cache)
    assert len(scheduler.admit(cache, 10_000)) == 1


def test_rows_of_storage_keep_their_content_whoever_comes_and_goes(model_path):
    """Each row holds a number that tells whose it is, through growth, moves and a prompt that is there in part."""
    pytest.importorskip("numba")
    from xtuner.v1.rl.rollout.backends.native.kernel_cache import KernelCache

    cache = KernelCache(get_model_config_from_hf(model_path).build("cpu"), 16, 256)
    cache.set_budget(16 * 256 * cache.row_bytes)
    rng, owners, partial, mark = np.random.default_rng(0), [], None, 0
    for step in range(1, 600):
        live, kind = len(owners), rng.random()
        if partial is None and kind < 0.2 and live < 13:
            ids, mark = np.full(rng.integers(2, 250), step, np.int32), step
            partial = Prompt(ids, [None] * int(rng.integers(1, 3)))
            assert cache.open(partial, live + 1, 250)
            for _ in partial.members[1:]:
                assert cache.join(partial, live + 2, 250)
            assert cache.reserve(live + partial.rooms, partial.ids.size)
            cache.hold(partial)
            cache.arrays.values[cache.partial_row] = mark
        elif partial is not None and kind < 0.2:
            cache.seat(partial)
            assert cache.reserve(cache.running, 2)
            cache.take_over()
            for slot in range(live + 1, cache.running):
                cache.arrays.values[cache.place_of[slot]] = mark
            owners += [mark] * len(partial.members)
            partial = None
        elif partial is not None and kind < 0.25:
            for _ in partial.members:
                cache.leave(partial)
            partial = None
        elif kind < 0.5 and live:
            gone = sorted(rng.choice(live, int(rng.integers(1, live + 1)), replace=False).tolist())
            targets = [slot for slot in gone if slot < live - len(gone)]
            sources = [slot for slot in range(live - len(gone), live) if slot not in gone]
            cache.release(gone, sources, targets, [np.zeros(0, np.int32)] * len(gone))
            for source, target in zip(sources, targets, strict=True):
                owners[target] = owners[source]
            del owners[live - len(gone) :]
        elif live:
            assert cache.grow(np.full(live, int(rng.integers(2, 250))))
        held = [cache.arrays.values[cache.place_of[slot], 0, 0, 0, 0] for slot in range(len(owners))]
        assert held == owners and cache.running == len(owners)
        assert partial is None or cache.arrays.values[cache.partial_row, 0, 0, 0, 0] == mark


def test_a_full_batch_is_renewed_in_parts_not_one_by_one():
    scheduler, cache = Scheduler(64), _cache()
    for i in range(80):
        scheduler.add(_sequence(i, 5))
    scheduler.admit(cache, 10_000)
    assert len(scheduler.running) == 64
    scheduler.release([3], cache)
    assert scheduler.admit(cache, 10_000) == []
    scheduler.release([0, 5, 9], cache)
    scheduler.admit(cache, 10_000)
    assert len(scheduler.running) == 64
    scheduler.release(list(range(53)), cache)
    scheduler.admit(cache, 10_000)
    assert not scheduler.waiting, "the last ones do not wait for company"


def test_a_sequence_that_went_back_goes_on_where_it_was():
    scheduler, cache = Scheduler(2), _cache()
    scheduler.add(_sequence(0, 3, max_tokens=4))
    scheduler.admit(cache, 100)
    _record(scheduler, [50], [-0.5])
    (sequence,) = scheduler.release([0], cache)
    scheduler.waiting.appendleft(sequence)
    (prompt,) = scheduler.admit(cache, 100)
    assert prompt.ids.tolist() == [10, 11, 12, 50]
    for k in range(3):
        done = _record(scheduler, [60 + k], [-1.0])
    assert done == [(0, "length")]
    scheduler.release([0], cache)
    assert sequence.token_ids == [50, 60, 61, 62] and sequence.logprobs == [-0.5, -1.0, -1.0, -1.0]


def test_who_leaves_a_prompt_on_its_way_takes_only_its_own_room():
    scheduler, cache = Scheduler(4), _cache(pages=20)
    sequences = [_sequence(i, 100) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit(cache, 70)
    assert cache.free_pages == 20 - 3
    assert scheduler.remove(sequences[0], cache)
    assert cache.free_pages == 20 - 2 and scheduler.filling.members == [sequences[1]]
    scheduler.put_back(cache)
    assert cache.free_pages == 20 and list(scheduler.waiting) == [sequences[1]] and not scheduler.running
    (prompt,) = scheduler.admit(cache, 70)
    assert (prompt.begin, prompt.end) == (PAGE, 100), "what went through the model is still there"


def _utf8(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def _first_stop(stops, text):
    watcher = StopStrings(stops, _utf8)
    return next((i for i, byte in enumerate(text.encode()) if watcher.push(byte)), None)


@pytest.mark.parametrize("text", ["ab</a>cd</answer>ef", "é</answer>", "日本</answer>x", "</answer>", "<</answer>"])
def test_stop_strings_are_found_where_they_end_also_behind_parts_of_characters(text):
    end = len(text[: text.index("</answer>") + len("</answer>")].encode()) - 1
    assert _first_stop(["</answer>", "nothing"], text) == end


def test_stop_strings_may_hold_wide_characters_and_are_not_found_in_other_texts():
    assert _first_stop(["本"], "日本語") == 5
    assert _first_stop(["</answer>"], "<answer></answe r>") is None


def test_bytes_that_are_no_character_do_not_hide_a_later_stop():
    watcher = StopStrings(["end"], _utf8)
    found = [watcher.push(b) for b in b"\xff\xff\xff\xff\xff\xff\xff\xff..end"]
    assert found.index(True) == len(found) - 1


def test_a_stop_string_is_found_in_a_token_that_also_begins_a_character():
    tokens = [b"a", b". \xf0\x9f", b"\x98\x80", b". \xf0", b"x"]
    watcher = StopStrings([". "], lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace"))
    assert [watcher.push(i) for i in range(len(tokens))] == [False, True, False, True, False]


def test_a_stop_string_that_passed_is_not_found_again():
    watcher = StopStrings(["a", "longer one"], _utf8)
    assert [watcher.push(b) for b in b"xabcd"] == [False, True, False, False, False]
