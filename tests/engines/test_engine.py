"""One engine of each kind at work: generate, update, abort, sleep."""

import asyncio
from pathlib import Path

import pytest
import torch

from xtuner.v1.rl.rollout.backends.server import ServerDied
from xtuner.v1.rl.weight_update import WeightUpdateError

from .helpers import (
    CONTEXT,
    SLOTS,
    buckets,
    greedy,
    logits,
    logprobs_of,
    many_long_requests,
    prompt,
    request,
    update,
)


def test_it_refuses_before_its_first_weights(engines, engine):
    (output,) = engines.generate(engine, request())
    assert output.finish_reason == "error" and "it has no weights yet" in (output.error or "")


def test_greedy_tokens_after_every_update_are_those_of_the_new_weights(engines, engine):
    """The head is tied to the embedding: an engine that keeps a packed copy of it answers with the old one."""
    for version, which in enumerate((1, 2, 0, 1)):
        folder = update(engines, engine, which, version)
        outputs = engines.generate(engine, *(request(i, temperature=0) for i in range(4)))
        for i, output in enumerate(outputs):
            assert output.token_ids == greedy(folder, prompt(i), 12)
            assert output.weight_versions == [version] * len(output.token_ids)
            assert output.logprob_stage == "raw"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_of_what_was_drawn_from(engines, engine, temperature):
    folder = update(engines, engine, 1, 5)
    outputs = engines.generate(engine, *(request(i, temperature=temperature, max_tokens=40) for i in range(SLOTS + 4)))
    for i, output in enumerate(outputs):
        raw = engines.name == "lmdeploy"
        assert output.finish_reason in ("stop", "length") and output.logprob_stage == ("raw" if raw else "sampled")
        expected = logprobs_of(folder, prompt(i), output, 1.0 if raw else temperature)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=0)
    assert len({tuple(o.token_ids) for o in outputs}) == len(outputs)


def test_truncation_changes_the_stage_or_the_log_probs(engines, engine):
    folder = update(engines, engine, 1, 6)
    (output,) = engines.generate(engine, request(0, temperature=1.0, top_k=2, max_tokens=30))
    whole = logprobs_of(folder, prompt(0), output)
    logprobs = torch.tensor(output.logprobs)
    if engines.name == "vllm":
        assert output.logprob_stage == "sampled" and bool((logprobs > whole + 1e-3).all())
    else:
        assert output.logprob_stage == ("raw" if engines.name == "lmdeploy" else "scaled")
        torch.testing.assert_close(logprobs, whole, atol=1e-5, rtol=0)


def test_alternatives_are_the_most_likely_tokens(engines, engine):
    folder = update(engines, engine, 1, 6)
    (output,) = engines.generate(engine, request(0, temperature=0.7, top_logprobs=3, max_tokens=8))
    rows = logits(folder, prompt(0) + output.token_ids)[len(prompt(0)) - 1 : -1]
    best, ids = torch.log_softmax(rows / (1.0 if engines.name == "lmdeploy" else 0.7), -1).topk(3)
    assert [[token for token, _ in row] for row in output.top_logprobs] == ids.tolist()
    reported = torch.tensor([[value for _, value in row] for row in output.top_logprobs])
    torch.testing.assert_close(reported, best, atol=1e-5, rtol=0)


def test_stop_tokens_end_a_response_and_belong_to_it(engines, engine):
    folder = update(engines, engine, 2, 7)
    tokens = greedy(folder, prompt(0), 12)
    stop = tokens[5]
    end = tokens.index(stop) + 1
    (output,) = engines.generate(engine, request(0, temperature=0, stop_token_ids=[stop]))
    assert (output.token_ids, output.finish_reason) == (tokens[:end], "stop")
    (output,) = engines.generate(engine, request(0, temperature=0, max_tokens=4))
    assert (output.token_ids, output.finish_reason) == (tokens[:4], "length")


def test_a_seed_decides_a_response_or_is_refused(engines, engine):
    update(engines, engine, 1, 8)
    if engines.name == "sglang":
        (output,) = engines.generate(engine, request(0, sampling_seed=3))
        assert "sampling_seed=3: sglang draws by a request's seed only" in (output.error or "")
        return
    alone = engines.generate(engine, request(0, seed=2**62 + 1))[0]
    among = engines.generate(engine, *(request(i, ids=prompt(0), seed=2**62 + 2 - i) for i in range(5)))
    assert among[1].token_ids == alone.token_ids != among[0].token_ids


def test_prompts_reach_to_the_end_of_the_context_and_no_further(engines, engine):
    update(engines, engine, 0, 9)
    room = 3
    fits, full = prompt(1, CONTEXT - room), prompt(1, CONTEXT)
    output, refused = engines.generate(engine, request(0, ids=fits, max_tokens=50), request(1, ids=full))
    assert len(output.token_ids) == room or output.token_ids[-1] == 2
    assert f"a prompt of {CONTEXT} tokens and one token of response do not fit" in (refused.error or "")


def test_what_would_hurt_the_server_is_refused_with_the_reason(engines, engine):
    cases = [
        (request(0, ids=[1, 384]), "prompt id 384 is outside the model's vocabulary of 384"),
        (request(0, ids=[]), "the prompt is empty"),
        (request(0, stop_token_ids=[999]), r"stop_token_ids=[999] are outside"),
        (request(0, stops=[""]), "holds an empty string"),
        (request(0, top_logprobs=50), "top_logprobs=50"),
        (request(0, return_token_ids=False), "return_token_ids=False"),
    ]
    for (wrong, text), output in zip(cases, engines.generate(engine, *(wrong for wrong, _ in cases)), strict=True):
        assert output.finish_reason == "error" and text in (output.error or ""), wrong
    assert engines.run(engine.health())


def test_abort_ends_all_requests_with_what_they_have(engines, engine):
    folder = update(engines, engine, 1, 10)

    async def abort_after(seconds):
        tasks = many_long_requests(engine)
        await asyncio.sleep(seconds)
        await engine.abort()
        return [await task for task in tasks]

    for seconds in (0.3, 0.6, 1.2, 2.4, 4.8):  # on a busy machine none may have begun
        outputs = engines.run(abort_after(seconds))
        assert {o.finish_reason for o in outputs} <= {"abort", "length"}
        aborted = [o for o in outputs if o.finish_reason == "abort"]
        if any(o.token_ids for o in aborted):
            break
    assert len(aborted) >= SLOTS
    partial = next(o for o in aborted if o.token_ids)
    assert len(partial.logprobs) == len(partial.weight_versions) == len(partial.token_ids)
    (after,) = engines.generate(engine, request(0, temperature=0))
    assert after.token_ids == greedy(folder, prompt(0), 12)


def test_a_cancelled_request_does_not_stay_in_the_engine(engines, engine):
    async def give_up():
        task = asyncio.ensure_future(engine.generate(request(0, max_tokens=200, min_tokens=200)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        await engine.abort()
        return task.cancelled()

    assert engines.run(give_up())
    update(engines, engine, 0, 11)  # which an engine that still generates would refuse


def test_asleep_it_refuses_and_awake_it_wants_new_weights(engines, engine):
    engines.run(engine.sleep())
    (output,) = engines.generate(engine, request())
    assert "its weights are asleep" in (output.error or "")
    engines.run(engine.wake(("weights",)))
    engines.run(engine.wake(("kv_cache",)))
    (output,) = engines.generate(engine, request())
    assert "its weights were dropped by sleep: update_weights must come first" in (output.error or "")
    assert engines.run(engine.health())
    folder = update(engines, engine, 2, 12)
    (output,) = engines.generate(engine, request(3, temperature=0))
    assert output.token_ids == greedy(folder, prompt(3), 12)


def test_an_update_that_is_not_whole_is_refused_and_nothing_is_served_until_one_is(engines, engine):
    parts = buckets(engines.models[0])
    with pytest.raises(WeightUpdateError, match=r"did not get every weight exactly once\. \d+ missing"):
        engines.run(engine.update_weights([parts[0], parts[2]], 13))
    (output,) = engines.generate(engine, request())
    assert "the last update of its weights is not complete" in (output.error or "")
    folder = update(engines, engine, 0, 14)
    (output,) = engines.generate(engine, request(0, temperature=0))
    assert output.token_ids == greedy(folder, prompt(0), 12) and set(output.weight_versions) == {14}


def test_nobody_without_the_key_is_served(engines, engine):
    import httpx

    paths = {
        "lmdeploy": ["/generate", "/update_weights"], "sglang": ["/generate", "/update_weights_from_disk"],
        "vllm": ["/v1/completions", "/collective_rpc"],
    }  # fmt: skip
    for path in paths[engines.name]:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = httpx.post(
                f"http://127.0.0.1:{engine.server.port}{path}", json={}, headers=headers, trust_env=False
            )
            assert answer.status_code == 401, path
    # As docs/engines.md says.
    without = {
        "lmdeploy": ("/health", "/docs", "/redoc", "/nodes"), "sglang": ("/health", "/ready", "/metrics"), "vllm": (),
    }[engines.name]  # fmt: skip
    for path in ("/health", "/ready", "/metrics", "/docs", "/redoc", "/nodes/status", "/v1/models", "/"):
        answer = httpx.get(f"http://127.0.0.1:{engine.server.port}{path}", trust_env=False, timeout=30)
        assert (answer.status_code != 401) == path.startswith(without), path
    (command,) = [
        Path(f"/proc/{pid}/cmdline").read_text()
        for pid in [engine.server._process.pid]  # noqa: SLF001
    ]
    assert engine.server.key not in command and engine.server.key not in engine.server.log_file.read_text()


def test_a_server_that_does_not_start_says_why(engines):
    with pytest.raises(ServerDied, match="(?s)did not start.*Last lines of .*no.such.option"):
        engines.start(extra_rollout_config={f"{engines.name}_no_such_option": 1})
