"""Counts for penalties on the device: right after every load, and counted anew only where steps have not kept them."""

import numpy as np
import torch

from xtuner.v1.ops.sampling import IN_PROMPT
from xtuner.v1.rl.rollout.backends.native.draw_state import DrawState
from xtuner.v1.rl.rollout.backends.native.sampler import SAMPLING_FIELDS

VOCAB, STOPS = 20, np.array([[2, 3]])
ROW = np.dtype([("arrival", np.int64), ("prompt_length", np.int64), ("length", np.int64), *SAMPLING_FIELDS])


def table(arrivals, prompts, lengths, penalised=True):
    rows = np.zeros(len(arrivals), ROW)
    rows["arrival"], rows["prompt_length"], rows["length"], rows["penalised"] = arrivals, prompts, lengths, penalised
    return rows


def expected(rows, tokens):
    counts = torch.zeros(len(rows), VOCAB, dtype=torch.int32)
    for row, ids, own in zip(rows, tokens.tolist(), counts, strict=True):
        for token in {*ids[: row["prompt_length"]]}:
            own[token] += IN_PROMPT
        for token in ids[row["prompt_length"] : row["length"]]:
            own[token] += 1
    return counts


def test_counts_are_of_prompt_and_response_and_are_made_again_only_where_they_are_wrong():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 40)).astype(np.int32)
    tokens[:, 1] = tokens[:, 0]
    rows = table([0, 1, 2, 3], [3, 5, 1, 9], [3, 30, 8, 10])
    state = DrawState(6, VOCAB, 2, torch.device("cpu"), penalties=True)
    state.load(rows, tokens, STOPS.repeat(4, 0))
    assert (state.counts[:4] == expected(rows, tokens)).all()
    # Two steps, as the kernel does them. A mark shows which rows are left alone.
    for _ in range(2):
        for slot in range(4):
            state.counts[slot, tokens[slot, rows["length"][slot]]] += 1
        rows["length"] += 1
        state.advance(4, 1)
    mark = state.counts.clone()
    state.counts[:4, 0] += 1000
    state.load(rows, tokens, STOPS.repeat(4, 0))
    assert (state.counts[:4, 0] == mark[:4, 0] + 1000).all() and (mark[:4] == expected(rows, tokens)).all()
    # Slot 1 ends, the last moves there, a new sequence comes in behind; one is a token longer than its counts say.
    rows = np.concatenate((rows[[0, 3, 2]], table([4], [2], [6])))
    tokens, rows["length"][2] = tokens[[0, 3, 2, 1]], rows["length"][2] + 1
    state.load(rows, tokens, STOPS.repeat(4, 0))
    assert state.counts[0, 0] == mark[0, 0] + 1000
    assert (state.counts[1:4] == expected(rows, tokens)[1:]).all()


def test_rows_that_move_under_steps_in_flight_keep_the_tokens_that_the_device_knows():
    """Slot 1 ends: the last one moves there. The host's ids are three tokens behind."""
    tokens, stops = np.zeros((4, 40), np.int32), np.array([[2], [3], [4], [5]])
    rows = table([7, 8, 9, 4], [2] * 4, [5, 6, 7, 8], penalised=False)
    rows["seed"] = [70, 80, 90, 40]
    state = DrawState(6, VOCAB, 1, torch.device("cpu"))
    state.load(rows, tokens, stops)
    state.tokens[:4] = torch.tensor([11, 12, 13, 14])
    left = rows[[0, 3, 2]]
    state.load(left, tokens[:3], stops[[0, 3, 2]], ahead=3)
    assert state.tokens[:3].tolist() == [11, 14, 13] and state.lengths.tolist() == [8, 11, 10, 0, 0, 0]
    assert state._columns["seed"][:3].tolist() == [70, 40, 90]
    assert state._columns["stop_ids"][:3, 0].tolist() == [2, 5, 4]
    # Once more, before the host knows any of it.
    state.load(left[[2, 1]], tokens[:2], stops[[2, 3]], ahead=8)
    assert state.tokens[:2].tolist() == [13, 14] and state.lengths.tolist() == [15, 16, 0, 0, 0, 0]


def test_there_is_room_or_there_is_not():
    plain, full = (DrawState(2, VOCAB, 2, torch.device("cpu"), penalties=p) for p in (False, True))
    assert plain.has_room(2, False) and not plain.has_room(3, False) and not plain.has_room(1, True)
    assert full.has_room(2, True) and full.has_room(1, False)


def test_empty_slots_have_length_0_and_end_ids_are_padded_with_one_of_them():
    state = DrawState(3, VOCAB, 4, torch.device("cpu"))
    tokens = np.arange(10, dtype=np.int32)[None].repeat(3, 0)
    state.load(table([0, 1, 2], [2] * 3, [4, 5, 6]), tokens, np.array([[2, 3], [4, 4], [5, 6]]))
    assert state.tokens.tolist() == [3, 4, 5] and state.lengths.tolist() == [4, 5, 6]
    assert state._columns["stop_ids"].tolist() == [[2, 3, 3, 3], [4, 4, 4, 4], [5, 6, 6, 6]]
    state.load(table([1], [2], [5]), tokens[:1], np.array([[4, 4]]))
    assert state.lengths.tolist() == [5, 0, 0]


def test_columns_begin_alike_whatever_the_number_of_slots():
    """Kernels are compiled for how their arguments are aligned."""
    for slots in range(1, 40):
        state = DrawState(slots, VOCAB, 3, torch.device("cpu"))
        begin = state._device_bytes.data_ptr()
        assert all((column.data_ptr() - begin) % 16 == 0 for column in state._columns.values())
