"""20,000 random requests with everything that may happen to them: nothing is lost, leaks, or is answered twice."""

import asyncio
import json
import random
from collections import Counter

import pytest
import torch
from native_models import AheadRunner, buckets

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.paged_cache import PAGE, PagedCache

VOCAB, CONTEXT = 40, 320
_KINDS = ({}, {}, {}, {"temperature": 0}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"min_tokens": 1})


def _config(head_dim: int) -> DenseModelConfig:
    attention = MHAConfig(num_attention_heads=2, num_key_value_heads=1, head_dim=head_dim)
    return DenseModelConfig(
        model_type="llama", vocab_size=VOCAB, max_position_embeddings=CONTEXT, num_hidden_layers=1, hidden_size=16,
        intermediate_size=16, eos_token_id=2, attention=attention,
    )  # fmt: skip


def _weights(config: DenseModelConfig, seed: int) -> dict[str, torch.Tensor]:
    model = config.build("cpu")
    model.init_weights(seed, 0.3)
    return dict(export_hf_tensors(model, torch.float32))


class Soak:
    """Sends waves of requests and counts how they end."""

    def __init__(self, engine: NativeEngine, config: DenseModelConfig, ahead: bool) -> None:
        """ahead: several tokens a step, so answers are longer, and interrupted more often."""
        self.engine, self.config, self.rng = engine, config, random.Random(0)
        self.times, self.abort_share = (2, 0.5) if ahead else (1, 0.2)
        self.sent, self.ends = 0, Counter()
        self.texts = [[self.rng.randrange(4, VOCAB) for _ in range(CONTEXT)] for _ in range(6)]

    def request(self) -> GenerateRequest:
        rng = self.rng
        ids = rng.choice(self.texts)[: min(rng.choice((1, 5, 20, 64, 65, 100, 128, 200)) + rng.randrange(3), CONTEXT)]
        if rng.random() < 0.3:
            ids = ids + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(60))]
        if rng.random() < 0.02:
            ids = rng.choice(([], [VOCAB], [5] * CONTEXT))
        kind = rng.choice(_KINDS)
        params = SampleParams(max_tokens=rng.choice((1, 1, 2, 4, 4, 6, 8)) * self.times, **kind)
        if rng.random() < (0.01 if self.large else 0.15):
            params = SampleParams(max_tokens=150, min_tokens=140)
        self.sent += 1
        return GenerateRequest(self.sent, ids, params, self.sent)

    async def one(self, request: GenerateRequest, delay: int) -> None:
        for _ in range(delay):
            await asyncio.sleep(0)
        try:
            output = await self.engine.generate(request)
        except asyncio.CancelledError:
            self.ends["cancelled"] += 1
            raise
        self.check(request, output)
        self.ends[output.finish_reason] += 1

    def check(self, request: GenerateRequest, output: GenerateOutput) -> None:
        n, limit = len(output.token_ids), min(request.params.max_tokens, CONTEXT - len(request.prompt_ids))
        assert output.request_id == request.request_id and len(output.logprobs) == len(output.weight_versions) == n
        assert set(output.weight_versions) <= {self.engine.version}
        assert all(logprob <= 0 for logprob in output.logprobs)
        bad = not request.prompt_ids or VOCAB in request.prompt_ids or len(request.prompt_ids) >= CONTEXT
        assert (output.finish_reason == "error") == bad == (output.error is not None), output.error
        if output.finish_reason == "stop":
            assert output.token_ids[-1] in (2, 3) and n <= limit
        elif output.finish_reason == "length":
            assert n == limit
        assert not set(output.token_ids[:-1]) & {2, 3}

    async def wave(self, count: int) -> None:
        rng = self.rng
        tasks = []
        while len(tasks) < count:
            request, siblings = self.request(), rng.choice((1, 1, 4))
            for i in range(min(siblings, count - len(tasks))):
                if i:
                    self.sent += 1
                one = GenerateRequest(self.sent, request.prompt_ids, request.params, self.sent)
                tasks.append(asyncio.ensure_future(self.one(one, rng.choice((0, 0, 1, 5, 30, 100)))))
        for _ in range(rng.choice((0, 3, 40))):
            await asyncio.sleep(0)
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            if rng.random() < 0.02:
                await self.engine.reset_prefix_cache()
        if rng.random() < self.abort_share:
            await self.engine.abort()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        # A task that was cancelled before it began has sent nothing.
        self.ends["never sent"] = self.sent - sum(n for end, n in self.ends.items() if end != "never sent")

    @property
    def large(self) -> bool:
        """Whether the cache has room for many."""
        return self.engine._cpu_cache_bytes > 20 * PAGE * self.engine._cache.row_bytes

    async def between(self) -> None:
        """Weights, memory and its size change."""
        engine, rng = self.engine, self.rng
        if rng.random() < 0.5:
            await engine.update_weights(buckets(_weights(self.config, rng.randrange(9))), engine.version + 1)
        if rng.random() < 0.5:
            await engine.sleep(("kv_cache",))
            engine._cpu_cache_bytes = rng.choice((7, 20, 60, 300)) * PAGE * engine._cache.row_bytes
            await engine.wake(("kv_cache",))


@pytest.mark.parametrize(
    "head_dim, requests, ahead", [(8, 20_000, False), (8, 1_500, True), (32, 10_000, False)],
    ids=["pages", "pages ahead", "kernels"],
)  # fmt: skip
def test_nothing_is_lost_leaks_or_is_answered_twice(tmp_path, head_dim, requests, ahead):
    config = _config(head_dim)
    save_hf_model(iter(_weights(config, 0).items()), config, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))

    async def main() -> None:
        engine = NativeEngine(tmp_path, max_batch_size=64, max_prefill_rows=400)
        await engine.start()
        runner = AheadRunner.put_into(engine) if ahead else None
        cache, scheduler, soak = engine._cache, engine._scheduler, Soak(engine, config, ahead)
        paged = isinstance(cache, PagedCache)
        if head_dim == 32 and paged:
            pytest.skip("there are no CPU kernels here")
        while soak.sent < requests:
            await soak.wave(min(1500 if soak.large and not ahead else 60, requests - soak.sent))
            assert not engine._futures and not scheduler.has_work and scheduler.filling is None
            assert cache.running == 0
            if paged:
                assert cache.free_pages == cache.num_pages and not cache._readers.any()
                assert len({*cache._free, *cache._kept}) == cache.num_pages
                assert set(cache._kept) == set(cache._key_of) and len(cache._page_of) == len(cache._key_of)
            else:
                assert sorted(cache.place_of) == list(range(64)) and cache._partial is None
            await soak.between()
        assert sum(soak.ends.values()) == soak.sent == requests
        least = 5 if ahead else 50 if paged else 20
        assert min(soak.ends[end] for end in ("stop", "length", "abort", "cancelled", "error")) > least, soak.ends
        counts = engine.statistics()
        assert ahead or counts["preemptions"] > (5 if paged else 0), counts
        assert counts["prefill_tokens"] > 10 * requests, counts
        assert counts["prefix_hit_tokens"] > 0.1 * counts["prefill_tokens"], counts
        assert runner is None or runner.calls_ahead > 50
        await engine.stop()

    asyncio.run(main())
