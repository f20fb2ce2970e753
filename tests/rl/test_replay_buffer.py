"""First in, first out, and a saved buffer is the same buffer."""

import json

import numpy as np
import pytest

from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.rl.replay_buffer import SyncReplayBufferConfig


def group_of(group_id: int, k: int = 2, **fields) -> list[RolloutState]:
    message = [{"role": "user", "content": f"q{group_id}"}]
    return [
        RolloutState(message=message, group_id=group_id, rollout_id=group_id * k + i, **fields)
        for i in range(k)
    ]


def ids(groups) -> list[int]:
    return [group[0].group_id for group in groups]


def filled(*entries):
    buffer = SyncReplayBufferConfig().build()
    for group_id, task, status in entries:
        buffer.put(group_of(group_id), task, status)
    return buffer


def test_oldest_first_within_task_and_status():
    done, aborted = Status.COMPLETED, Status.ABORTED
    buffer = filled((3, "a", done), (1, "b", done), (2, "a", done), (4, "a", aborted), (0, "a", done))
    assert ids(buffer.take(2, "a")) == [3, 2]
    assert ids(buffer.take(9, "a")) == [0]
    assert buffer.take(1, "a") == [] and buffer.take(1, "unknown") == []
    assert buffer.count("a", aborted) == 1 and buffer.count("b") == 1 and len(buffer) == 2


def test_remove_keeps_the_order_of_the_rest():
    buffer = filled(*((i, "a", Status.COMPLETED) for i in range(5)))
    assert ids(buffer.remove(lambda group: group[0].group_id % 2 == 1, "a")) == [1, 3]
    assert ids(buffer.take(9, "a")) == [0, 2, 4]


def test_an_empty_group_is_refused():
    with pytest.raises(ValueError, match="empty group of task 'a'"):
        SyncReplayBufferConfig().build().put([], "a")


def test_state_goes_through_json_and_comes_back_equal():
    buffer = filled((5, "a", Status.COMPLETED), (6, "b", Status.ABORTED))
    rich = group_of(
        7,
        status=Status.COMPLETED,
        prompt_ids=[1, 2],
        response="ab",
        response_ids=[3, 4],
        logprobs=[-0.1234567890123, -2.5],
        response_model_steps=[4, 4],
        reward={"score": 1.0, "acc": True},
        sample_params=SampleParams(max_tokens=9, temperature=0.7),
        data_source={"x": 1.0},
        extra_fields={"raw_prompt": "q7"},
    )
    buffer.put(rich, "a")
    saved = json.loads(json.dumps(buffer.state_dict()))
    loaded = SyncReplayBufferConfig().build()
    loaded.load_state_dict(saved)
    assert loaded.state_dict() == buffer.state_dict()
    assert ids(loaded.take(1, "a")) == [5]
    assert loaded.take(1, "a") == [rich]
    assert loaded.count("b", Status.ABORTED) == 1


def test_experts_of_rollouts_come_back_too():
    """A step after a resume replays them like one before."""
    buffer, experts = SyncReplayBufferConfig().build(), np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    buffer.put(group_of(0, routed_experts=experts), "a")
    back = SyncReplayBufferConfig().build()
    back.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    for state in back.take(1, "a")[0]:
        assert state.routed_experts.dtype == np.int16 and np.array_equal(state.routed_experts, experts)


def test_loading_refuses_what_does_not_fit_and_then_holds_nothing():
    saved = filled((1, "a", Status.COMPLETED), (2, "a", Status.COMPLETED)).state_dict()
    with pytest.raises(RuntimeError, match="1 groups are here already"):
        filled((3, "a", Status.COMPLETED)).load_state_dict(saved)
    fresh = SyncReplayBufferConfig().build()
    with pytest.raises(ValueError, match="policy 'staleness'"):
        fresh.load_state_dict(saved | {"policy": "staleness"})
    del saved["groups"][1]["samples"][0]["message"]
    with pytest.raises(ValueError, match="saved group 1 is damaged"):
        fresh.load_state_dict(saved)
    assert len(fresh) == 0


def test_what_json_cannot_hold_is_an_error_that_names_the_group():
    buffer = SyncReplayBufferConfig().build()
    buffer.put(group_of(8, routed_experts=object()), "a")
    with pytest.raises(ValueError, match="group 8 of task 'a'.*checkpoint_no_save_replay_buffer"):
        buffer.state_dict()
