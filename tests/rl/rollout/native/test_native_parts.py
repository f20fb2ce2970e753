"""Cache, scheduler and stop strings by themselves."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native.cache import KVCache
from xtuner.v1.rl.rollout.backends.native.requests import RequestLimits, make_sequence
from xtuner.v1.rl.rollout.backends.native.scheduler import Scheduler
from xtuner.v1.rl.rollout.backends.native.stop_strings import StopStrings


def _cache(rows, max_slots=64, max_length=512):
    cache = KVCache(2, 2, 4, 4, torch.float32, torch.device("cpu"), max_slots=max_slots, max_length=max_length)
    cache.set_budget(rows * cache.row_bytes)
    return cache


@torch.inference_mode()
def _fill(cache, slots, length):
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(2, 2, slots, length, 2, 4, generator=generator)
    for layer in range(2):
        k, v = content[layer].transpose(2, 3)
        cache.fill(layer, 0, k[..., :-1, :], v[..., :-1, :])
        last = torch.full((slots,), length - 1)
        cache.append(layer, last, k[..., -1, :], v[..., -1, :])
    return content


def _content(cache, slots, length):
    return torch.stack(
        [torch.stack([t.transpose(1, 2) for t in cache.view(layer, slots, length)]) for layer in range(2)]
    )


def test_cache_keeps_its_content_as_it_grows_and_never_passes_its_budget():
    cache = _cache(2000)
    assert cache.reserve(4, 20, live=0)
    content = _fill(cache, 4, 20)
    for slots, length in ((4, 65), (10, 65), (10, 180), (4, 490)):
        assert cache.reserve(slots, length, live=4)
        assert cache.slots >= slots and cache.length >= length
        assert cache.num_bytes <= 2000 * cache.row_bytes
        assert torch.equal(_content(cache, 4, 20), content)
    assert not cache.reserve(5, 500, live=4)
    assert torch.equal(_content(cache, 4, 20), content)
    assert cache.longest_sequence == 2000


def test_steps_beyond_the_longest_sequence_do_not_move_the_storage():
    cache = _cache(2000, max_length=100)
    assert cache.grow(np.array([20, 100]))
    before = [t.data_ptr() for t in cache.keys]
    assert cache.grow(np.array([35, 115])) and cache.grow(np.array([36, 116]))
    assert [t.data_ptr() for t in cache.keys] == before


def test_cache_moves_whole_slots():
    cache = _cache(2000)
    cache.reserve(5, 16, live=0)
    content = _fill(cache, 5, 16)
    cache.move([4, 3], [0, 2], 16)
    assert torch.equal(_content(cache, 3, 16), content[:, :, [4, 1, 3]])


def _sequence(i, length, **params):
    limits = RequestLimits(100, 1000, [1], lambda ids: "")
    return make_sequence(GenerateRequest(i, list(range(10, 10 + length)), SampleParams(**params), i), limits)


def _record(scheduler, tokens, logprobs):
    """One token for each running sequence."""
    columns = np.array(tokens)[:, None], np.array(logprobs, np.float32)[:, None]
    return scheduler.record(np.arange(len(tokens)), *columns)


def _always(batch, longest):
    return True


def test_finished_slots_are_filled_from_the_end_and_nobodys_tokens_are_mixed_up():
    scheduler = Scheduler(8)
    sequences = [_sequence(i, 3 + i, max_tokens=2 + i % 3) for i in range(6)]
    for s in sequences:
        scheduler.add(s)
    scheduler.admit(_always, 1000)
    step = 0
    while scheduler.running:
        ids = np.array([s.request.request_id for s in scheduler.running])
        assert scheduler.last_tokens().tolist() == (
            [s.request.prompt_ids[-1] for s in scheduler.running]
            if step == 0
            else (50 + 10 * (step - 1) + ids).tolist()
        )
        done = _record(scheduler, 50 + 10 * step + ids, -ids - step / 10)
        scheduler.release([slot for slot, _ in done])
        step += 1
    for i, s in enumerate(sequences):
        steps = range(2 + i % 3)
        assert s.token_ids == [50 + 10 * k + i for k in steps]
        assert s.logprobs == pytest.approx([-i - k / 10 for k in steps])


def test_admission_is_in_order_and_within_slots_rows_and_room():
    scheduler = Scheduler(4)
    for i, length in enumerate((5, 5, 6, 4, 4)):
        scheduler.add(_sequence(i, length))
    assert [p.size for p in scheduler.admit(_always, 8)] == [5, 5], "equal prompts count once, 6 more do not fit"
    assert scheduler.admit(lambda batch, longest: batch * longest <= 12, 1000) == []
    assert [p.size for p in scheduler.admit(_always, 1000)] == [6, 4]
    assert scheduler.admit(_always, 1000) == [], "no slot is free"
    assert [s.request.request_id for s in scheduler.running] == [0, 1, 2, 3]


def test_a_full_batch_is_renewed_in_parts_not_one_by_one():
    scheduler = Scheduler(64)
    for i in range(80):
        scheduler.add(_sequence(i, 5))
    assert len(scheduler.admit(_always, 10_000)) == 64
    scheduler.release([3])
    assert scheduler.admit(_always, 10_000) == []
    scheduler.release([0, 5, 9])
    assert len(scheduler.admit(_always, 10_000)) == 4
    scheduler.release(list(range(53)))
    assert len(scheduler.admit(_always, 10_000)) == 12, "the last ones do not wait for company"


def test_a_sequence_that_went_back_goes_on_where_it_was():
    scheduler = Scheduler(2)
    scheduler.add(_sequence(0, 3, max_tokens=4))
    scheduler.admit(_always, 100)
    _record(scheduler, [50], [-0.5])
    (sequence,), _, _ = scheduler.release([0])
    scheduler.waiting.appendleft(sequence)
    (ids,) = scheduler.admit(_always, 100)
    assert ids.tolist() == [10, 11, 12, 50]
    for k in range(3):
        done = _record(scheduler, [60 + k], [-1.0])
    assert done == [(0, "length")]
    scheduler.release([0])
    assert sequence.token_ids == [50, 60, 61, 62] and sequence.logprobs == [-0.5, -1.0, -1.0, -1.0]


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


def test_a_stop_string_that_passed_is_not_found_again():
    watcher = StopStrings(["a", "longer one"], _utf8)
    assert [watcher.push(b) for b in b"xabcd"] == [False, True, False, False, False]
