"""What only LMDeploy does, and what of it is refused: its own server, over a stand-in for its engine."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import FSDPConfig
from xtuner.v1.data_proto import RolloutState, SampleParams, WeightBucket
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.advantage import GRPOAdvantageConfig
from xtuner.v1.rl.rollout.answers import fill
from xtuner.v1.rl.rollout.backends.served import ServedEngine
from xtuner.v1.rl.trainer.packing import pack_samples
from xtuner.v1.rl.trainer.samples import build_samples
from xtuner.v1.rl.weight_update import WeightUpdateError

from .helpers import Engines, buckets, greedy, prompt, request

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engine(engines: Engines) -> ServedEngine:
    if engines.name != "lmdeploy":
        pytest.skip("of LMDeploy")
    return engines.start()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_serves(engines: Engines, engine: ServedEngine, folder: Path, version: int) -> None:
    (output,) = engines.generate(engine, request(0, temperature=0))
    assert output.token_ids == greedy(folder, prompt(0), 12), output
    assert set(output.weight_versions) == {version}


def test_log_probs_before_temperature_are_compared_with_the_trainer_s_before_temperature(engines, engine, one_rank):
    """Those after it would differ by a tenth and more."""
    from transformers import AutoTokenizer

    params = SampleParams(temperature=0.7, max_tokens=30)
    outputs = engines.generate(engine, *(request(i, ids=prompt(0), seed=i, **params.model_dump()) for i in range(4)))
    tokenizer = AutoTokenizer.from_pretrained(engines.models[0])
    group = [
        fill(RolloutState(message=[], rollout_id=i, prompt_ids=prompt(0), sample_params=params), output, tokenizer)
        for i, output in enumerate(outputs)
    ]
    for i, state in enumerate(group):
        state.reward = {"score": float(i)}
    report = build_samples([group], GRPOAdvantageConfig().build(), 256)
    assert report.metrics["unscaled_logprob_share"] == 1
    (((pack,),),) = pack_samples(
        report.samples, ranks=1, optimizer_steps=1, pack_max_length=256, hidden_size=128, share_prompts=True
    )
    trainer = TrainEngine(
        get_model_config_from_hf(engines.models[0]), FSDPConfig(torch_compile=False), device=torch.device("cpu")
    )
    trainer.load_hf(engines.models[0])
    torch.testing.assert_close(trainer.logprobs(pack), pack.rollout_logprobs, atol=1e-5, rtol=0)


def test_no_stop_before_the_least_number_of_tokens(engines, engine):
    stops = list(range(3, 384, 2))
    (output,) = engines.generate(engine, request(0, min_tokens=15, max_tokens=40, stop_token_ids=stops))
    assert output.finish_reason == "stop" and len(output.token_ids) > 15
    assert not set(output.token_ids[:15]) & {*stops, 2} and output.token_ids[-1] in {*stops, 2}


def test_what_it_would_do_in_another_way_is_refused_by_name(engines, engine):
    cases: list[tuple[dict, str]] = [
        ({"stops": ["a"]}, "sample_params.stops: lmdeploy stops at any token that holds such a string"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: lmdeploy leaves the prompt out"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"temperature": 3.0}, "temperature=3.0: lmdeploy takes up to 2"),
    ]
    for (_, text), output in zip(cases, engines.generate(engine, *(request(**p) for p, _ in cases)), strict=True):
        assert output.finish_reason == "error" and text in (output.error or "")


def test_the_cache_sleeps_alone_and_the_weights_stay(engines, engine):
    engines.run(engine.update_weights(buckets(engines.models[1]), 1))
    engines.run(engine.sleep(("kv_cache",)))
    (output,) = engines.generate(engine, request())
    assert "its cache is asleep" in (output.error or "")
    engines.run(engine.wake(("kv_cache",)))
    assert_serves(engines, engine, engines.models[1], 1)


def test_weights_sleep_alone(engines, engine):
    engines.run(engine.sleep(("weights",)))
    engines.run(engine.wake(("weights",)))
    engines.run(engine.update_weights(buckets(engines.models[2]), 2))
    assert_serves(engines, engine, engines.models[2], 2)


def test_weights_come_while_the_cache_sleeps_and_wake_nothing(engines, engine):
    engines.run(engine.sleep())
    engines.run(engine.wake(("weights",)))
    engines.run(engine.update_weights(buckets(engines.models[0], 5), 3))
    (output,) = engines.generate(engine, request())
    assert "its cache is asleep" in (output.error or "")
    engines.run(engine.wake(("kv_cache",)))
    assert_serves(engines, engine, engines.models[0], 3)


def test_types_of_a_bucket_come_one_after_another(engines, engine):
    bucket = buckets(engines.models[1], 1)[0]
    mixed = {name: t.bfloat16() if i % 2 else t for i, (name, t) in enumerate(bucket.tensors.items())}
    engines.run(engine.update_weights([WeightBucket(mixed)], 4))
    (rounded,) = engines.generate(engine, request(0, max_tokens=30))
    engines.run(engine.update_weights([bucket], 5))
    (whole,) = engines.generate(engine, request(0, max_tokens=30))
    gap = (torch.tensor(rounded.logprobs[:1]) - torch.tensor(whole.logprobs[:1])).abs().max()
    assert 0 < gap < 0.2 and rounded.token_ids[0] == whole.token_ids[0]


def test_what_the_server_refuses_is_told_and_the_next_update_is_served(engines, engine):
    parts = [*buckets(engines.models[1]), WeightBucket({"model.unheard_of": torch.zeros(3)})]
    with pytest.raises(WeightUpdateError, match=r"(?s)did not reach the engine: .*HTTP 500.*KeyError.*unheard_of"):
        engines.run(engine.update_weights(parts, 6))
    (output,) = engines.generate(engine, request())
    assert "the last update of its weights is not complete" in (output.error or "")
    engines.run(engine.update_weights(buckets(engines.models[0]), 7))
    assert_serves(engines, engine, engines.models[0], 7)
