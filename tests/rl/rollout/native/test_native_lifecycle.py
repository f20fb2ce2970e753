"""Weights in and out, sleep, abort, faults, event loops."""

import asyncio
import gc
import weakref

import pytest
import torch
from native_models import ROW_BYTES, buckets, prompt, request, run, started, weights, write_model

from xtuner.v1.rl.rollout.backends.native import NativeEngine

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("other") / "m", seed=9)


def _update(engine, tensors, version=3):
    asyncio.run(engine.update_weights(iter(buckets(tensors)), version))


def _outcome(outputs):
    return [(o.token_ids, o.logprobs) for o in outputs]


def test_a_stopped_engine_keeps_nothing_alive(model_path):
    """On a GPU its graphs and their memory would wait for the garbage collector."""
    engine = started(model_path)
    run(engine, request(1))
    runner = weakref.ref(engine._runner)
    gc.collect()
    gc.disable()
    try:
        asyncio.run(engine.stop())
        assert runner() is None
    finally:
        gc.enable()
    asyncio.run(engine.stop())
    assert engine.statistics() == {} and not asyncio.run(engine.health())
    asyncio.run(engine.start())
    assert run(engine, request(1))[0].error is None


def test_an_update_makes_the_engine_the_other_model(model_path, other_path, engine):
    requests = [request(i) for i in range(4)]
    old = run(engine, *requests)
    _update(engine, weights(other_path), version=3)
    new = run(engine, *requests)
    assert _outcome(new) == _outcome(run(started(other_path), *requests)) != _outcome(old)
    assert {v for o in old for v in o.weight_versions} == {0}
    assert {v for o in new for v in o.weight_versions} == {3}
    assert all(len(o.weight_versions) == len(o.token_ids) for o in old + new)


def test_a_start_draws_nothing_from_the_generator_of_who_trains_in_this_process(model_path):
    before = torch.get_rng_state()
    started(model_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", ["update", "reset", "sleep"])
def test_nothing_of_the_old_weights_is_found_after_a_change(kernels, model_path, other_path, engine, change):
    r = request(0, prompt(0, 150), max_tokens=20, min_tokens=20)
    run(engine, r)
    if change == "update":
        _update(engine, weights(other_path))
    elif change == "reset":
        asyncio.run(engine.reset_prefix_cache())
    else:
        asyncio.run(engine.sleep(("kv_cache",)))
        asyncio.run(engine.wake(("kv_cache",)))
    (out,) = run(engine, r)
    assert out.token_ids == run(started(other_path if change == "update" else model_path), r)[0].token_ids
    assert engine.statistics()["prefix_hit_tokens"] == 0
    run(engine, r)
    assert engine.statistics()["prefix_hit_tokens"] == (149 if kernels else 128)


@pytest.mark.parametrize("fault", ["missing", "sent twice", "unknown", "shape"])
def test_half_an_update_is_refused_and_the_engine_does_not_serve_the_mixture(model_path, other_path, engine, fault):
    tensors = weights(other_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    parts = buckets(tensors)
    if fault == "missing":
        for bucket in parts:
            bucket.tensors.pop(name, None)
    elif fault == "sent twice":
        parts.append(type(parts[0])({name: tensors[name]}))
    elif fault == "unknown":
        name = "model.layers.7.mlp.down_proj.weight"
        parts[1].tensors[name] = torch.zeros(3)
    else:
        parts = [type(parts[0])(tensors | {name: tensors[name][:-1]})]
    with pytest.raises(RuntimeError, match=name) as error:
        asyncio.run(engine.update_weights(parts, 8))
    assert fault == "shape" or fault in str(error.value)
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "not complete" in out.error
    assert engine.version == 0
    _update(engine, tensors, version=9)
    (out,) = run(engine, request(0))
    assert out.error is None and set(out.weight_versions) == {9}


def test_an_update_between_requests_in_flight_is_refused_and_harms_nothing(model_path, other_path, engine):
    expected = _outcome(run(started(model_path), request(0, min_tokens=12)))

    async def main():
        task = asyncio.create_task(engine.generate(request(0, min_tokens=12)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="1 requests are in flight"):
            await engine.update_weights(buckets(weights(other_path)), 5)
        with pytest.raises(RuntimeError, match="in flight"):
            await engine.sleep()
        return await task

    assert _outcome([asyncio.run(main())]) == expected


def test_without_weights_it_does_not_serve_until_they_are_pushed(model_path):
    expected = _outcome(run(started(model_path), request(0)))
    engine = started(model_path, load_weights=False)
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "update_weights" in out.error
    _update(engine, weights(model_path))
    assert _outcome(run(engine, request(0))) == expected


def test_sleep_gives_memory_back_and_weights_must_come_again(model_path, engine):
    expected = _outcome(run(engine, request(0)))
    assert engine._cache.num_bytes > 0
    asyncio.run(engine.sleep())
    assert engine._cache.num_bytes == 0 and sum(p.numel() for p in engine._model.parameters()) == 0
    assert asyncio.run(engine.health())
    with pytest.raises(RuntimeError, match="asleep"):
        _update(engine, weights(model_path))
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "asleep" in out.error
    asyncio.run(engine.wake(("weights",)))
    _update(engine, weights(model_path))
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "cache" in out.error
    asyncio.run(engine.wake(("kv_cache",)))
    assert _outcome(run(engine, request(0))) == expected


def test_woken_weights_are_empty_and_do_not_serve(model_path, engine):
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "update_weights" in out.error


def test_sleep_of_the_cache_alone_keeps_the_weights(engine):
    expected = _outcome(run(engine, request(0)))
    asyncio.run(engine.sleep(("kv_cache",)))
    asyncio.run(engine.wake())
    assert _outcome(run(engine, request(0))) == expected


def test_abort_returns_what_is_there(model_path):
    engine = started(model_path, max_batch_size=3)
    requests = [request(i, max_tokens=200, min_tokens=200) for i in range(5)]
    whole = [o.token_ids for o in run(started(model_path), *requests)]

    async def main():
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for _ in range(8):
            await asyncio.sleep(0)
        await engine.abort()
        aborted = await asyncio.gather(*tasks)
        return aborted, await engine.generate(request(7))

    aborted, after = asyncio.run(main())
    assert [o.finish_reason for o in aborted] == ["abort"] * 5
    assert all(0 < len(o.token_ids) < 200 for o in aborted[:3])
    assert all(o.token_ids == whole[i][: len(o.token_ids)] for i, o in enumerate(aborted))
    assert all(len(o.logprobs) == len(o.weight_versions) == len(o.token_ids) for o in aborted)
    assert aborted[4].token_ids == []
    assert after.error is None and after.token_ids


def test_broken_weights_fail_every_request_with_the_reason_and_a_restart_heals(model_path, engine):
    broken = weights(model_path)
    broken["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    _update(engine, broken, version=4)
    outputs = run(engine, *[request(i) for i in range(3)])
    assert {o.finish_reason for o in outputs} == {"error"}
    assert all("not finite" in o.error and "version 4" in o.error for o in outputs)
    assert not asyncio.run(engine.health())
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "not finite" in out.error
    asyncio.run(engine.start())
    assert asyncio.run(engine.health()) and engine.version == 0, "the weights are those of the folder again"
    assert _outcome(run(engine, request(0))) == _outcome(run(started(model_path), request(0)))


def test_a_loop_left_in_mid_generation_does_not_haunt_the_next(model_path, engine):
    async def leave():
        asyncio.create_task(engine.generate(request(0, max_tokens=200, min_tokens=200)))
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(leave())
    loop = asyncio.new_event_loop()
    loop.create_task(engine.generate(request(1, max_tokens=200, min_tokens=200)))
    loop.run_until_complete(asyncio.sleep(0))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.close()
    assert _outcome(run(engine, request(2))) == _outcome(run(started(model_path), request(2)))
    assert not engine._scheduler.has_work


def test_a_cancelled_request_leaves_and_its_neighbours_do_not_notice(model_path, engine):
    requests = [request(i, min_tokens=12) for i in range(4)]
    expected = run(started(model_path), *requests)

    async def main():
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        for _ in range(5):
            await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*(t for i, t in enumerate(tasks) if i != 1))

    for out, i in zip(asyncio.run(main()), (0, 2, 3), strict=True):
        assert out.token_ids == expected[i].token_ids
        assert out.logprobs == pytest.approx(expected[i].logprobs, abs=1e-5)  # a batch of 3 may be summed otherwise
    assert not engine._futures


def test_requests_of_one_turn_form_one_batch_however_deep_their_callers(kernels, engine):
    async def group(seed):
        return await asyncio.gather(*(engine.generate(request(i, prompt(seed), max_tokens=2)) for i in range(3)))

    async def main():
        await asyncio.gather(engine.generate(request(0)), group(1), asyncio.gather(group(2), group(3)))

    batches = []
    step = engine.step

    def watched():
        step()
        batches.append(engine._runner.prefilled_rows)

    engine.step = watched
    asyncio.run(main())
    assert batches[0] == batches[-1] == 4 * (8 if kernels else 9)


def test_a_cache_without_room_for_the_context_cuts_it_or_refuses_to_start(kernels, model_path, caplog):
    engine = started(model_path, cpu_cache_bytes=128 * ROW_BYTES)
    room = 128 if kernels else 128 - 16  # what steps write in vain has room in the pages
    out, refused = run(engine, request(0, min_tokens=200, max_tokens=200), request(1, prompt(1, room)))
    assert len(out.token_ids) == room - 9 and out.finish_reason == "length"
    assert f"context of {room}" in refused.error
    with pytest.raises(ValueError, match="cpu_cache_bytes"):
        started(model_path, cpu_cache_bytes=15 * ROW_BYTES)


def test_stop_ends_everything(engine):
    async def main():
        task = asyncio.create_task(engine.generate(request(0, max_tokens=200, min_tokens=200)))
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.stop()
        return await task

    assert asyncio.run(main()).finish_reason == "abort"
    assert not asyncio.run(engine.health())
    (out,) = run(engine, request(0))
    assert out.finish_reason == "error" and "stopped" in out.error


def test_an_engine_that_did_not_start_can_be_stopped(tmp_path):
    engine = NativeEngine(tmp_path, device="cpu")
    with pytest.raises(FileNotFoundError):
        asyncio.run(engine.start())
    asyncio.run(engine.stop())


def test_a_runner_goes_with_its_last_mention(engine):
    """And its captured steps with it: ranks of an engine cannot part while somebody holds their exchanges."""
    gc.disable()
    try:
        run(engine, request(0), request(1))
        runner = weakref.ref(engine._runner)
        del engine._runner
        assert runner() is None
    finally:
        gc.enable()
