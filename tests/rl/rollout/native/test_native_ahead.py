"""Steps that begin before the host has taken in the last ones: same answers, and nothing leaks."""

import asyncio
import dataclasses
import itertools

import pytest
from native_models import VOCAB, AheadRunner, prompt, request, run, started

from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE
from xtuner.v1.utils import get_logger

KINDS = (
    {}, {"temperature": 0}, {"top_k": 5}, {"top_logprobs": 3}, {"min_tokens": 20}, {"stop_token_ids": [9, 30]},
    {"temperature": 1.5},
)  # fmt: skip


def engines(path, **options) -> tuple[NativeEngine, NativeEngine, AheadRunner]:
    plain, ahead = (started(path, cpu_kernels=False, **options) for _ in range(2))
    return plain, ahead, AheadRunner.put_into(ahead)


def mixed(count: int, **params) -> list[GenerateRequest]:
    """Prompts and answers of many lengths, some of them siblings."""
    kinds = [KINDS[i % len(KINDS)] | params for i in range(count)]
    return [
        request(i, prompt(i // 2, 1 + i % 70), max_tokens=max(1 + 7 * i % 90, kind.get("min_tokens", 0)), **kind)
        for i, kind in enumerate(kinds)
    ]


def check_same(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids, a.finish_reason, a.error) == (b.token_ids, b.finish_reason, b.error)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        ids = [[[i for i, _ in step] for step in o.top_logprobs or []] for o in (a, b)]
        assert ids[0] == ids[1]


def check_empty(engine: NativeEngine) -> None:
    cache = engine._cache
    assert not engine._scheduler.has_work and not engine._futures and cache.running == 0
    assert cache.free_pages == cache.num_pages and not cache._readers.any()


@pytest.mark.parametrize("slots", [64, 5])
def test_answers_are_those_of_looking_after_every_step(model_path, slots):
    plain, ahead, runner = engines(model_path, max_batch_size=slots)
    requests = mixed(40)
    outputs = run(plain, *requests)
    check_same(run(ahead, *requests), outputs)
    assert runner.calls_ahead > 3
    assert {o.finish_reason for o in outputs} == {"stop", "length"}
    check_empty(ahead)


def test_sequences_that_end_make_room_while_others_are_drawn_ahead(model_path):
    """Slots move up under steps in flight: the device takes last tokens from where the sequences were."""
    plain, ahead, runner = engines(model_path)
    ends = [list(range(first, VOCAB, 5)) for first in (10, 11, 12)]
    requests = [request(i, prompt(i), max_tokens=200, stop_token_ids=ends[i % 3]) for i in range(24)]
    requests += [request(90 + i, max_tokens=200, min_tokens=190) for i in range(4)]
    check_same(run(ahead, *requests), run(plain, *requests))
    assert runner.moves_ahead > 2
    check_empty(ahead)


def test_rows_with_penalties_are_counted_right(model_path):
    plain, ahead, runner = engines(model_path)
    requests = [r for i, r in enumerate(mixed(30, repetition_penalty=1.3)) if KINDS[i % len(KINDS)].get("temperature")]
    requests += [request(50 + i, max_tokens=120, min_tokens=110, repetition_penalty=1.5) for i in range(6)]
    check_same(run(ahead, *requests), run(plain, *requests))
    assert runner.calls_ahead > 3


@pytest.mark.parametrize("pages", [9, 13])
def test_too_little_memory_ends_running_ahead_and_nothing_else(model_path, pages):
    plain, ahead, runner = engines(model_path, max_batch_size=8)
    ahead._cache.set_budget(pages * PAGE * ahead._cache.row_bytes)
    requests = [request(i, prompt(i, 40), max_tokens=180, min_tokens=100 + i) for i in range(8)]
    check_same(run(ahead, *requests), run(plain, *requests))
    assert ahead.statistics()["preemptions"] > 0 and runner.calls_ahead > 0
    check_empty(ahead)


def test_cancelling_and_aborting_between_steps_in_flight(model_path):
    """Whoever leaves keeps what the others draw; answers cut short are beginnings of the whole ones."""
    plain, ahead, runner = engines(model_path)
    requests = [request(i, prompt(i), max_tokens=230, min_tokens=100 + i) for i in range(12)]
    whole = run(plain, *requests)

    async def cut() -> list:
        tasks = [asyncio.ensure_future(ahead.generate(r)) for r in requests]
        for turn in range(9):
            await asyncio.sleep(0)
            assert turn != 5 or ahead._drawings
            if turn in (5, 7):
                tasks[turn].cancel()
        await ahead.abort()
        assert not ahead._drawings
        return await asyncio.gather(*tasks, return_exceptions=True)

    outputs = asyncio.run(cut())
    assert runner.calls_ahead > 0
    for i, (output, other) in enumerate(zip(outputs, whole, strict=True)):
        if i in (5, 7):
            assert isinstance(output, asyncio.CancelledError)
        else:
            assert output.finish_reason == "abort" and output.token_ids == other.token_ids[: len(output.token_ids)]
            assert 10 < len(output.token_ids) < 100
    check_empty(ahead)


def test_the_device_is_waited_for_before_memory_or_weights_change(model_path):
    _, ahead, runner = engines(model_path)

    async def main() -> None:
        # Ends by an end token, so that the device has been told to go on.
        requests = [request(i, prompt(i), max_tokens=240, stop_token_ids=list(range(10, VOCAB, 4))) for i in range(9)]
        outputs = await asyncio.gather(*map(ahead.generate, requests))
        assert {o.finish_reason for o in outputs} == {"stop"} and ahead._drawings
        await ahead.sleep(("kv_cache",))
        assert not ahead._drawings
        await ahead.wake(("kv_cache",))
        assert (await ahead.generate(requests[0])).token_ids == outputs[0].token_ids

    asyncio.run(main())
    assert runner.calls_ahead > 0


def test_logits_that_are_not_finite_end_all_with_the_reason(model_path, caplog, monkeypatch):
    """Which is told without a traceback: no line of the engine is at fault."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    _, ahead, runner = engines(model_path)

    async def main() -> list:
        requests = [request(i, prompt(i), max_tokens=200, min_tokens=200) for i in range(5)]
        tasks = [asyncio.ensure_future(ahead.generate(r)) for r in requests]
        while not runner.calls_ahead:
            await asyncio.sleep(0)
        ahead._model.norm.weight.fill_(float("nan"))
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(main())
    assert {o.finish_reason for o in outputs} == {"error"} and all("not finite" in o.error for o in outputs)
    assert not ahead._drawings and not asyncio.run(ahead.health())
    assert "a step failed" in caplog.text and "Traceback" not in caplog.text
    check_empty(ahead)


def test_nobody_gets_what_was_drawn_behind_a_step_that_failed(model_path):
    """Its tokens would stand in the place of those that are lost."""
    plain, ahead, runner = engines(model_path)
    requests = [request(i, prompt(i), max_tokens=40 + i, min_tokens=40 + i) for i in range(24)]
    whole = run(plain, *requests)

    def fail() -> list:
        raise FloatingPointError("one log-prob is not finite")

    take_in, turns = ahead._take_in, itertools.count(1)

    def taking_in(leave: int = 0) -> None:
        # Two are in flight; the tokens of the second one would end some sequences if they came now.
        if len(ahead._drawings) == 2 and next(turns) == 5:
            ahead._drawings[0] = dataclasses.replace(ahead._drawings[0], take_in=fail)
        take_in(leave)

    ahead._take_in = taking_in
    outputs = run(ahead, *requests)
    assert next(turns) > 5 and runner.calls_ahead > 0
    assert {o.finish_reason for o in outputs} == {"error"}
    for output, other in zip(outputs, whole, strict=True):
        assert 20 < len(output.token_ids) and output.token_ids == other.token_ids[: len(output.token_ids)]
    check_empty(ahead)
