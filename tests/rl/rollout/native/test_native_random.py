"""Whatever else is under way, found in the cache, cut, cancelled or aborted, a request's answer is what it is alone."""

import asyncio
import random

import pytest
from native_models import ROW_BYTES, VOCAB, AheadRunner, request, run, started

from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE

CONTEXT = 256
ANY = [
    {}, {}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.3},
    {"min_tokens": 12}, {"min_tokens": 60, "top_logprobs": 3}, {"stop_token_ids": [9, 30]}, {"stops": ["ab", "e"]},
    {"stops": ["k"], "min_tokens": 6}, {"temperature": 1.5, "min_tokens": 90},
]  # fmt: skip
OF_TORCH = [{"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"temperature": 0.0, "repetition_penalty": 1.2}]
"""What `AheadRunner` does not draw."""


def text(ids: list[int]) -> str:
    """30 begins a character that the next token ends."""
    return "".join("\ufffd" if i == 30 else chr(97 + i % 26) for i in ids)


def build(model_path, kind: str, **fields) -> NativeEngine:
    kernels = kind.startswith("kernels")
    engine = started(model_path, cpu_kernels=kernels, deterministic=kind == "kernels, exact", **fields)
    engine._limits.decode = text
    return engine


def wave(rng: random.Random, kinds: list[dict], past: list[list[int]], number: int) -> list[GenerateRequest]:
    requests: list[GenerateRequest] = []
    texts = [[rng.randrange(6, VOCAB) for _ in range(CONTEXT)] for _ in range(2)]
    for _ in range(rng.choice((1, 3, 12))):
        length = rng.choice((1, 5, 40, 63, 64, 65, 128, 129, 200))
        ids = rng.choice(past) if past and rng.random() < 0.4 else rng.choice(texts)[:length]
        ids = (ids + [rng.randrange(6, VOCAB) for _ in range(rng.choice((0, 0, 7, 90)))])[: CONTEXT - 10]
        params = rng.choice(kinds)
        room = min(CONTEXT - len(ids), max(rng.choice((1, 8, 60, 120)), params.get("min_tokens", 0)))
        params = params | {"max_tokens": room, "min_tokens": min(params.get("min_tokens", 0), room)}
        requests += [request(number + len(requests) + k, ids, **params) for k in range(rng.choice((1, 1, 3)))]
    return requests


async def disturbed(engine: NativeEngine, requests: list[GenerateRequest], rng: random.Random) -> list:
    """Answers, None for those that were cancelled."""

    async def later(request: GenerateRequest, turns: int) -> GenerateOutput:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await engine.generate(request)

    tasks = [asyncio.ensure_future(later(r, rng.choice((0, 0, 1, 10)))) for r in requests]
    event = rng.choice(("cancel", "cancel", "abort", "forget", ""))
    for _ in range(rng.randrange(15)):
        await asyncio.sleep(0)
    if event == "cancel":
        for task in rng.choices(tasks, k=3):
            task.cancel()
    elif event == "abort":
        await engine.abort()
    elif event == "forget":
        await engine.reset_prefix_cache()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, (GenerateOutput, asyncio.CancelledError)) for end in ends), ends
    return [end if isinstance(end, GenerateOutput) else None for end in ends]


@pytest.mark.parametrize("kind", ["kernels", "kernels, exact", "pages", "ahead"])
@pytest.mark.parametrize("seed", (6, 7))
def test_answers_are_those_of_a_request_alone(model_path, kind, seed):
    rng, paged = random.Random(seed), not kind.startswith("kernels")
    kinds = ANY + OF_TORCH * (kind != "ahead")
    alone, past, answers = build(model_path, kind, max_batch_size=4), [], 0
    for budget in (rng.choice((300, 400, 640)), rng.choice((900, 2000))):
        engine = build(
            model_path, kind, max_batch_size=rng.choice((3, 16, 64)), max_prefill_rows=rng.choice((16, 33, 100)),
            cpu_cache_bytes=(-(-budget // PAGE) * PAGE if paged else budget) * ROW_BYTES,
        )  # fmt: skip
        if kind == "ahead":
            AheadRunner.put_into(engine)
        for number in range(0, 400, 100):
            requests = wave(rng, kinds, past, number)
            for asked, output in zip(requests, asyncio.run(disturbed(engine, requests, rng)), strict=True):
                if output is None:
                    continue
                asyncio.run(alone.reset_prefix_cache())
                (expected,) = run(alone, asked)
                count, aborted = len(output.token_ids), output.finish_reason == "abort"
                assert output.error is None and output.token_ids == expected.token_ids[:count], asked
                assert aborted or (output.finish_reason, count) == (expected.finish_reason, len(expected.token_ids))
                exact = not paged and not asked.params.top_k and asked.params.top_p == 1
                assert output.logprobs == pytest.approx(expected.logprobs[:count], abs=0 if exact else 2e-4, rel=0)
                answers += 1
                past = [*past[-40:], asked.prompt_ids + output.token_ids]
            assert not engine._scheduler.has_work and engine._cache.running == 0
    assert answers > 30
