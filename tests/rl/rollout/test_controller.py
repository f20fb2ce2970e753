"""The controller over real workers whose engines answer by a script."""

import asyncio
import math
import pickle

import pytest
from scripted_engine import HANG, NamedHandle, answer, good, setup, state

from xtuner.v1.data_proto import RolloutState, SampleParams, Status
from xtuner.v1.rl.rollout.answers import decode, fit_to_context, sample_seed
from xtuner.v1.rl.rollout.backends.base import GenerateOutput
from xtuner.v1.rl.rollout.replicas import NoWorkerLeftError
from xtuner.v1.rl.weight_update import EngineDownError


def test_an_answer_fills_the_sample_with_the_engine_s_own_ids():
    async def main():
        controller, engines = await setup(good)
        sample = state(sample_params=SampleParams(max_tokens=4))
        assert await controller.generate(sample) is sample
        assert engines[0].requests[0].prompt_ids == [5, 6, 7] == sample.tokens
        assert (sample.response_ids, sample.response) == ([8, 9, 0], "hi")
        assert (sample.logprobs, sample.logprob_stage) == ([-0.5] * 3, "sampled")
        assert sample.response_model_steps == [3, 3, 3]
        assert (sample.finish_reason, sample.status, sample.error_msg) == ("stop", Status.COMPLETED, None)
        shown = await controller.generate(state(sample_params=SampleParams(skip_special_tokens=False)))
        assert shown.response == "hi<end>"

    asyncio.run(main())


@pytest.mark.parametrize(("keep", "text"), [(True, "abxy"), (False, "ab")])
def test_the_text_ends_with_its_stop_string_though_the_last_token_goes_on(keep, text):
    async def main():
        controller, _ = await setup(lambda request, n: answer(request, ids=(1, 2, 30)))
        params = SampleParams(stops=["xy"], include_stop_str_in_output=keep)
        sample = await controller.generate(state(sample_params=params))
        assert (sample.response, sample.response_ids) == (text, [1, 2, 30])

    asyncio.run(main())


def test_a_stop_string_that_did_not_end_the_answer_stays_in_its_text():
    """It came before min_tokens."""

    async def main():
        controller, _ = await setup(lambda request, n: answer(request, ids=(24, 25, 1, 2, 0)))
        sample = await controller.generate(state(sample_params=SampleParams(stops=["xy"], min_tokens=4)))
        assert sample.response == "xyab"

    asyncio.run(main())


def test_text_is_what_the_tokenizer_s_own_decode_says():
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"a": 0, "b": 1, ",": 2, "Ġ": 3}, []))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<end>")])
    plain = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)
    ids = [0, 3, 2, 1, 4]
    for skip in (True, False):
        said = plain.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert decode(plain, ids, skip) == said == "a ,b" + ("" if skip else "<end>")

    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    assert decode(Shouting(tokenizer_object=core), ids, True) == "A ,B"


def test_turns_go_on_from_the_tokens_of_the_call():
    async def main():
        controller, engines = await setup(good)
        await controller.generate(state(tokens=[5, 6, 7, 8, 9]))
        assert engines[0].requests[0].prompt_ids == [5, 6, 7, 8, 9]
        empty = await controller.generate(RolloutState(message=[], rollout_id=4))
        assert empty.status == Status.FAILED and "rollout 4 has no prompt tokens" in empty.error_msg

    asyncio.run(main())


# ---------------------------------------------------------------- attempts


def test_a_lost_request_ends_at_the_timeout_and_is_tried_again():
    async def main():
        controller, engines = await setup(lambda request, n: HANG if n == 5 else answer(request))
        samples = await asyncio.gather(*(controller.generate(state(i)) for i in range(16)))
        assert all(s.status == Status.COMPLETED for s in samples)
        assert engines[0].cancelled == 1  # the engine does not go on with what nobody waits for
        asked = engines[0].requests  # SGLang refuses a number that it knows, with the same draws in the next attempt
        assert len({r.request_id for r in asked}) == 17 and len({r.seed for r in asked}) == 16
        metrics = await controller.metrics()
        assert (metrics["requests"], metrics["timeouts"], metrics["retries"], metrics["failures"]) == (17, 1, 1, 0)

    asyncio.run(main())


def test_a_request_that_is_never_answered_fails_and_names_itself(caplog):
    from xtuner.v1.utils import get_logger

    async def main():
        hang_on_7 = lambda request, n: HANG if request.prompt_ids == [7] else answer(request)
        controller, _ = await setup(hang_on_7)
        lost = state(11)
        lost.tokens = [7]
        _, lost = await asyncio.gather(controller.generate(state(1)), controller.generate(lost))
        assert (lost.status, lost.finish_reason, lost.response_ids) == (Status.FAILED, "error", [])
        assert lost.error_msg == "no answer within rollout_timeout=1 s (2 attempts)"
        metrics = await controller.metrics()
        assert (metrics["timeouts"], metrics["retries"], metrics["failures"]) == (2, 1, 1)

    get_logger().propagate = True
    try:
        asyncio.run(main())
    finally:
        get_logger().propagate = False
    assert "rollout 11: no answer within" in caplog.text and "attempt 1 of 2" in caplog.text


FLAWS = {
    "0 log-probs for 3 tokens": {"logprobs": []},
    "log-probs that are not finite": {"logprobs": [-0.5, math.nan, -0.5]},
    "2 weight versions for 3 tokens": {"weight_versions": [3, 3]},
    "no tokens (finish_reason 'stop')": {"token_ids": [], "logprobs": [], "weight_versions": []},
    "3 tokens, max_tokens is 2": {},
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_an_incomplete_answer_is_a_failed_attempt(flaw):
    params = SampleParams(max_tokens=2 if "max_tokens" in flaw else 3)

    async def main():
        bad = lambda request: answer(request, **FLAWS[flaw])
        fine = lambda request: answer(request, ids=(8, 0))
        controller, _ = await setup(lambda request, n: bad(request) if n == 1 else fine(request))
        assert (await controller.generate(state(sample_params=params))).status == Status.COMPLETED
        assert (await controller.metrics())["invalid"] == 1
        controller, _ = await setup(lambda request, n: bad(request))
        sample = await controller.generate(state(sample_params=params))
        assert sample.status == Status.FAILED
        assert sample.error_msg == f"invalid answer: {flaw} (2 attempts)"

    asyncio.run(main())


def test_log_probs_are_asked_for_only_where_the_sample_wants_them():
    async def main():
        controller, _ = await setup(lambda request, n: answer(request, logprobs=[]))
        sample = await controller.generate(state(sample_params=SampleParams(return_logprob=False)))
        assert sample.status == Status.COMPLETED and sample.logprobs is None

    asyncio.run(main())


def test_an_exception_of_the_engine_is_tried_again_elsewhere():
    async def main():
        broken = lambda request, n: ConnectionError("500")
        controller, engines = await setup(broken, good)
        sample = await controller.generate(state())
        assert sample.status == Status.COMPLETED
        assert [len(e.requests) for e in engines] == [1, 1]
        controller, _ = await setup(broken, max_retry_per_sample=2)
        sample = await controller.generate(state())
        assert (sample.status, sample.error_msg) == (Status.FAILED, "ConnectionError: 500 (3 attempts)")

    asyncio.run(main())


def test_an_error_of_many_lines_is_one_in_the_log_and_whole_in_the_sample(monkeypatch):
    from xtuner.v1.utils import get_logger

    async def main():
        controller, _ = await setup(lambda request, n: ConnectionError("gone\nlast line of its log"))
        return (await controller.generate(state(11))).error_msg

    said = []
    monkeypatch.setattr(get_logger(), "warning", said.append)
    assert asyncio.run(main()) == "ConnectionError: gone\nlast line of its log (2 attempts)"
    assert said[0] == "rollout 11: ConnectionError: gone … (worker " + said[0].split("(worker ")[1]


def test_a_refusal_stands():
    async def main():
        refuse = lambda request, n: GenerateOutput(request.request_id, error="prompt id 99 is outside")
        controller, engines = await setup(refuse, good)
        sample = await controller.generate(state())
        assert (sample.status, sample.error_msg) == (Status.FAILED, "prompt id 99 is outside")
        assert [len(e.requests) for e in engines] == [1, 0]
        metrics = await controller.metrics()
        assert (metrics["refused"], metrics["retries"]) == (1, 0)

    asyncio.run(main())


def test_a_caller_that_gives_up_is_no_failed_attempt():
    async def main():
        controller, engines = await setup(lambda request, n: HANG, rollout_timeout=60)
        task = asyncio.create_task(controller.generate(state()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(engines[0].requests), engines[0].cancelled) == (1, 1)

    asyncio.run(main())


def test_time_limits_of_request_and_caller_do_not_take_each_other_s_cancellation():
    """A request ends by cancelling the task that waits for it: that must not end what the caller does next, and the
    caller's own limit must not pass for the request's."""

    async def main():
        controller, _ = await setup(lambda request, n: HANG, rollout_timeout=0.05, max_retry_per_sample=0)
        sample = await controller.generate(state())
        task = asyncio.current_task()
        assert (sample.status, task.cancelling()) == (Status.FAILED, 0)
        async with asyncio.timeout(5):
            await asyncio.sleep(0)

        controller, engines = await setup(lambda request, n: HANG, rollout_timeout=60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await controller.generate(state())
        assert (engines[0].cancelled, task.cancelling()) == (1, 0)
        assert (await controller.metrics())["timeouts"] == 0

    asyncio.run(main())


def test_every_request_has_the_whole_time_limit_whenever_it_came():
    """One watch serves all requests: it must wake for the later ones too, with nothing of an earlier one's time."""

    async def main():
        controller, engines = await setup(lambda request, n: HANG, rollout_timeout=0.2, max_retry_per_sample=0)
        loop = asyncio.get_running_loop()

        async def spent(number):
            start = loop.time()
            sample = await controller.generate(state(number))
            assert "no answer within" in sample.error_msg
            return loop.time() - start

        first = asyncio.create_task(spent(1))
        await asyncio.sleep(0.1)
        assert await spent(2) >= 0.2 and await first >= 0.2
        assert await asyncio.wait_for(spent(3), 10) >= 0.2  # after a time without requests

    asyncio.run(main())


# ---------------------------------------------------------------- pause


def test_pause_ends_what_is_in_flight_as_aborted_and_resume_starts_it_from_the_prompt():
    async def main():
        slow = {3, 6}
        script = lambda request, n: HANG if n <= 8 and n in slow else answer(request)
        controller, engines = await setup(script, rollout_timeout=60)
        params = SampleParams(max_tokens=64)
        tasks = [asyncio.create_task(controller.generate(state(i, sample_params=params))) for i in range(8)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(controller.pause(), 5)
        samples = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        aborted = [s for s in samples if s.status == Status.ABORTED]
        assert len(aborted) == 2 and sum(s.status == Status.COMPLETED for s in samples) == 6
        assert all((s.response_ids, s.finish_reason, s.reward) == ([1, 2], "abort", None) for s in aborted)

        late = await controller.generate(state(20))
        assert (late.status, late.finish_reason, late.response_ids) == (Status.ABORTED, "abort", [])
        assert len(engines[0].requests) == 8  # not even asked
        await controller.resume()
        again = await controller.generate(aborted[0])
        assert (again.status, again.response_ids) == (Status.COMPLETED, [8, 9, 0])
        request = engines[0].requests[-1]
        assert request.prompt_ids == [5, 6, 7] and request.params.max_tokens == 64

    asyncio.run(main())


def test_a_pickled_copy_reaches_the_same_engines_and_is_paused_with_the_original():
    async def main():
        controller, engines = await setup(good)
        await controller.generate(state())
        copy = pickle.loads(pickle.dumps(controller))
        assert (await copy.generate(state(2))).status == Status.COMPLETED
        assert len({r.request_id for r in engines[0].requests}) == 2
        await controller.pause()
        assert (await copy.generate(state(3))).status == Status.ABORTED
        await controller.resume()
        assert (await copy.generate(state(3))).status == Status.COMPLETED
        assert (await controller.metrics())["requests"] == 4

    asyncio.run(main())


# ---------------------------------------------------------------- engines that fail


def test_requests_go_to_the_least_busy_engine_and_a_session_stays_where_it_was():
    async def main():
        hang = lambda request, n: HANG
        controller, engines = await setup(hang, hang, rollout_timeout=60)
        tasks = [asyncio.create_task(controller.generate(state(i))) for i in range(5)]
        await asyncio.sleep(0.05)
        assert [len(e.requests) for e in engines] == [3, 2]
        tasks += [asyncio.create_task(controller.generate(state(9, session_id=4)))]
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(controller.generate(state(10 + i, session_id=4))) for i in range(3)]
        await asyncio.sleep(0.05)
        assert [len(e.requests) for e in engines] == [3, 6]
        await controller.pause()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_an_engine_that_broke_gets_no_more_requests_and_without_any_the_run_stops():
    async def main():
        def break_down(request, n):
            engines[0].healthy = False
            return GenerateOutput(request.request_id, error="a step failed with CUDA error")

        controller, engines = await setup(break_down, good)
        samples = await asyncio.gather(*(controller.generate(state(i)) for i in range(6)))
        assert all(s.status == Status.COMPLETED for s in samples)
        assert len(engines[0].requests) == 3
        await controller.generate(state(7))
        assert len(engines[0].requests) == 3
        assert await controller.health() == [False, True]

        engines[1].healthy = False
        assert await controller.health() == [False, False]
        with pytest.raises(RuntimeError, match="all 2 rollout workers are out of service; last error: its engine says"):
            await controller.generate(state(8))
        engines[0].healthy = engines[1].healthy = True
        assert await controller.health() == [True, True]
        assert (await controller.generate(state(9))).status == Status.COMPLETED

    asyncio.run(main())


def test_a_copy_finds_engines_that_are_back():
    """Nobody tells it."""

    async def main():
        controller, engines = await setup(good, good)
        copy = pickle.loads(pickle.dumps(controller))
        for engine in engines:
            engine.healthy = False
        assert await copy.health() == [False, False]
        with pytest.raises(NoWorkerLeftError):
            await copy.generate(state(1))
        engines[1].healthy = True
        sample = await copy.generate(state(2))
        assert sample.status == Status.COMPLETED and sample.rollout_worker == copy.worker_names[1]

    asyncio.run(main())


def test_an_engine_that_is_down_is_left_out_of_sleep_and_wake_and_without_any_the_run_stops():
    async def main():
        controller, engines = await setup(good, good)
        asleep = []

        def down(problem):
            async def sleep(tags):
                raise problem

            return sleep

        async def sleeps(tags):
            asleep.append(tags)

        engines[0].sleep, engines[1].sleep = down(EngineDownError("its folder is gone")), sleeps
        await controller.sleep()
        assert asleep == [("weights", "kv_cache")]
        sample = await controller.generate(state(1))
        assert sample.rollout_worker == controller.worker_names[1] and not engines[0].requests
        engines[1].sleep = down(TimeoutError("was not ready within 60 s. CUDA out of memory"))
        with pytest.raises(TimeoutError, match="^was not ready within 60 s. CUDA out of memory$"):
            await controller.sleep()
        engines[1].sleep = down(EngineDownError("so is its folder"))
        with pytest.raises(RuntimeError, match="all rollout workers are lost; last error: so is its folder"):
            await controller.sleep()

    asyncio.run(main())


def test_a_request_of_a_worker_that_was_left_out_is_counted_once():
    async def main():
        controller, engines = await setup(lambda request, n: HANG, good, rollout_timeout=60)
        first = controller._pool.replicas[0]
        task = asyncio.create_task(controller.generate(state(2)))
        await asyncio.sleep(0.05)
        controller._pool.give_up(first, "it hangs")
        assert (await task).status == Status.COMPLETED
        assert (await controller.metrics())["requests"] == 2 and (await controller.metrics())["retries"] == 1

    asyncio.run(main())


def test_a_dead_process_is_left_out_and_its_requests_are_served_elsewhere():
    async def main():
        controller, engines = await setup(lambda request, n: HANG, good, rollout_timeout=60)
        task = asyncio.create_task(controller.generate(state(1)))
        await asyncio.sleep(0.05)
        NamedHandle.dead.add(controller.worker_names[0])
        sample = await controller.generate(state(2))  # the idle one serves it
        assert sample.status == Status.COMPLETED
        assert await controller.health() == [False, True]
        assert (await asyncio.wait_for(task, 5)).status == Status.COMPLETED
        await controller.pause()  # lifecycle goes on with those that are left
        NamedHandle.dead.add(controller.worker_names[1])
        with pytest.raises(RuntimeError, match="resume: all rollout workers are lost; last error: worker"):
            await controller.resume()

    asyncio.run(main())


def test_a_hung_engine_costs_health_checks_and_not_a_whole_request_timeout():
    async def main():
        changes = {"health_check_interval_seconds": 0.02, "health_check_timeout_seconds": 0.2}
        controller, engines = await setup(lambda request, n: HANG, good, rollout_timeout=600, **changes)
        engines[0].healthy = HANG
        sample = await asyncio.wait_for(controller.generate(state()), 10)
        assert sample.status == Status.COMPLETED
        assert [len(e.requests) for e in engines] == [1, 1]

    asyncio.run(main())


def test_a_start_that_fails_raises_the_engine_s_reason_and_shut_down_workers_serve_nothing():
    async def main():
        controller, engines = await setup(good)
        await controller.shutdown()
        sample = await controller.generate(state())
        assert (sample.status, sample.error_msg) == (Status.FAILED, "the rollout workers are shut down")

        def no_memory():
            raise MemoryError("no memory is left for the cache")

        NamedHandle.workers[controller.worker_names[0]].build_engine = no_memory
        with pytest.raises(MemoryError, match="no memory is left for the cache"):
            await controller.start()

    asyncio.run(main())


# ---------------------------------------------------------------- seeds and limits


def test_a_sample_draws_the_same_numbers_wherever_it_runs():
    async def seeds(count, order):
        controller, engines = await setup(*[good] * count)
        await asyncio.gather(*(controller.generate(state(i)) for i in order))
        by_engine = [r for e in engines for r in e.requests]
        return sorted(r.seed for r in by_engine)

    alone = asyncio.run(seeds(1, range(6)))
    assert alone == asyncio.run(seeds(3, reversed(range(6))))
    assert len(set(alone)) == 6 and all(0 <= s < 2**63 for s in alone)
    assert sample_seed(42, 7, 3) == 8628931282797512168  # must not change between versions and processes
    assert len({sample_seed(42, 7, 3), sample_seed(43, 7, 3), sample_seed(42, 8, 3), sample_seed(42, 7, 4)}) == 4


def test_a_seed_of_the_sample_s_own_wins():
    async def main():
        controller, engines = await setup(good)
        await controller.generate(state(sample_params=SampleParams(sampling_seed=5)))
        assert engines[0].requests[0].seed == 5

    asyncio.run(main())


def test_a_response_is_cut_to_the_context_and_a_prompt_without_room_is_refused():
    params = SampleParams(max_tokens=64, min_tokens=40)
    cut = fit_to_context(params, 100, 128)
    assert (cut.max_tokens, cut.min_tokens, params.max_tokens) == (28, 28, 64)
    assert fit_to_context(params, 64, 128) is params

    async def main():
        controller, engines = await setup(good)
        long = RolloutState(message=[], prompt_ids=[1] * 100, rollout_id=1)
        sample = await controller.generate(long)
        assert sample.status == Status.FAILED and "prompt of 100 tokens leaves no room" in sample.error_msg
        assert not engines[0].requests
        await controller.generate(RolloutState(message=[], prompt_ids=[1] * 90, rollout_id=2))
        assert engines[0].requests[0].params.max_tokens == 10
        assert (await controller.metrics())["cut_to_context"] == 1

    asyncio.run(main())
