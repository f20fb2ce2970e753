"""What comes out of the engine: tokens, log-probs, ends; alone and in any company."""

import asyncio
import json

import numpy as np
import pytest
import torch
from native_models import EOS, ROW_BYTES, VOCAB, prompt, request, run, started, write_model

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.hf import load_hf_model
from xtuner.v1.model.hf_config import get_model_config_from_hf
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.rl.rollout.backends.native import NativeEngine

pytestmark = pytest.mark.usefixtures("kernels")


def _trainer(path):
    model = get_model_config_from_hf(path).build("cpu")
    load_hf_model(model, path)
    return model


def _rows(prompt_ids, token_ids):
    """One sample as the trainer lays it out: ids, positions, attention, rows that predict the response."""
    ids = torch.tensor(prompt_ids + token_ids[:-1])
    attention = PackedAttention(SegmentLayout([len(ids)], [-1]), "cpu")
    return ids, torch.arange(len(ids)), attention, torch.arange(len(prompt_ids) - 1, len(ids))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_greedy_tokens_are_those_of_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    path = write_model(tmp_path / "m", family, seed=3)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [prompt(i, 5 + 7 * i) for i in range(6)]
    ours = run(started(path), *[request(i, p, temperature=0, max_tokens=40) for i, p in enumerate(prompts)])
    ends = set()
    for p, out in zip(prompts, ours, strict=True):
        expected = theirs.generate(
            torch.tensor([p]), do_sample=False, max_new_tokens=40, eos_token_id=EOS, pad_token_id=0
        )
        assert out.token_ids == expected[0, len(p) :].tolist()
        ends.add(out.finish_reason)
    assert "length" in ends


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_logprobs_are_those_of_the_trainer(model_path, engine, temperature):
    model = _trainer(model_path)
    requests = [request(i, prompt(i, 4 + 5 * i), temperature=temperature, max_tokens=25) for i in range(5)]
    for r, out in zip(requests, run(engine, *requests), strict=True):
        ids, positions, attention, rows = _rows(r.prompt_ids, out.token_ids)
        inverse = torch.full((len(rows),), 1 / temperature if temperature else 1.0)
        with torch.no_grad():
            expected, _ = model(ids, positions, attention, rows, torch.tensor(out.token_ids), inverse, 8)
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, rtol=0, atol=1e-5)
        assert out.logprob_stage == ("sampled" if temperature else "raw")


def test_logprobs_are_of_the_truncated_distribution(model_path, engine):
    model = _trainer(model_path)
    wishes = {"temperature": 0.8, "top_k": 7, "top_p": 0.7, "min_p": 0.2, "top_logprobs": 3}
    out, other = run(engine, r := request(1, max_tokens=30, **wishes), request(2, max_tokens=30))
    assert len(out.top_logprobs) == len(out.token_ids) and other.top_logprobs is None
    ids, positions, attention, rows = _rows(r.prompt_ids, out.token_ids)
    with torch.no_grad():
        logits = model.logits(model.hidden_states(ids, positions, attention)[rows]).double() / 0.8
    for row, token, logprob, top in zip(logits, out.token_ids, out.logprobs, out.top_logprobs, strict=True):
        values, order = row.sort(descending=True)
        values, order = values[:7], order[:7]
        probs = values.softmax(0)
        kept = int(((probs.cumsum(0) - probs < 0.7) & (probs >= 0.2 * probs[0])).sum())
        assert token in order[:kept]
        expected = values[:kept].log_softmax(0)[order[:kept] == token]
        assert logprob == pytest.approx(expected.item(), abs=1e-5)
        assert [i for i, _ in top] == order[: min(kept, 3)].tolist()
        assert [value for _, value in top] == pytest.approx(values[:kept].log_softmax(0)[:3].tolist(), abs=1e-5)


def test_alternatives_end_where_the_response_ends(engine):
    """At a stop token, at a stop string's last token, and at the limit; greedy ones are of the model's distribution."""
    free, *_ = run(engine, request(1, max_tokens=20, temperature=0, top_logprobs=20))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    stopped, sampled = run(
        engine, request(1, max_tokens=20, temperature=0, top_logprobs=5, stop_token_ids=[stop]),
        request(2, max_tokens=3, min_tokens=3, top_logprobs=2),
    )  # fmt: skip
    assert stopped.token_ids == free.token_ids[: first + 1] and len(stopped.top_logprobs) == first + 1
    for few, many in zip(stopped.top_logprobs, free.top_logprobs, strict=False):
        assert [i for i, _ in few] == [i for i, _ in many[:5]] and len(many) == 20
        assert [value for _, value in few] == pytest.approx([value for _, value in many[:5]], abs=1e-5)
    assert [top[0][0] for top in free.top_logprobs] == free.token_ids
    assert [top[0][1] for top in free.top_logprobs] == pytest.approx(free.logprobs, abs=1e-6)
    assert len(sampled.top_logprobs) == 3 and all(len(top) == 2 for top in sampled.top_logprobs)


def _mixed():
    kinds = [{}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"temperature": 0}, {"repetition_penalty": 1.3},
             {"min_tokens": 6, "frequency_penalty": 0.4, "min_p": 0.05},
             {"presence_penalty": 0.5, "top_k": 20, "top_logprobs": 4}]  # fmt: skip
    return [request(i, prompt(i // 3, 6 + i), max_tokens=8 + 5 * (i % 4), **kinds[i % 8]) for i in range(16)]


def _tokens(outputs):
    return {
        out.request_id: (out.token_ids, out.finish_reason, [[i for i, _ in top] for top in out.top_logprobs or []])
        for out in outputs
    }


@pytest.fixture(scope="module")
def alone(kernels, model_path):
    engine = started(model_path)
    return _tokens(run(engine, r)[0] for r in _mixed())


def test_a_batch_does_not_change_anyones_tokens(model_path, alone):
    assert _tokens(run(started(model_path), *_mixed())) == alone


def test_staggered_arrival_does_not_change_tokens(model_path, alone):
    engine = started(model_path)

    async def later(delay, r):
        for _ in range(delay):
            await asyncio.sleep(0)
        return await engine.generate(r)

    async def main():
        return await asyncio.gather(*(later(3 * i, r) for i, r in enumerate(_mixed())))

    assert _tokens(asyncio.run(main())) == alone


def test_a_small_batch_and_small_prefills_do_not_change_tokens(model_path, alone):
    assert _tokens(run(started(model_path, max_batch_size=3, max_prefill_rows=20), *_mixed())) == alone


def test_a_small_cache_makes_requests_wait_and_does_not_change_tokens(kernels, model_path, alone):
    engine = started(model_path, cpu_cache_bytes=ROW_BYTES * 384)
    long = [request(i, prompt(i), max_tokens=150 - 5 * (i % 3), min_tokens=130) for i in range(7)]
    peaks, running = [], []
    step = engine.step

    def watched():
        step()
        peaks.append(engine._cache.num_bytes)
        running.append(len(engine._scheduler.running))

    engine.step = watched
    assert _tokens(run(engine, *_mixed())) == alone
    running.clear()
    assert _tokens(run(engine, *long)) == _tokens(run(started(model_path), *long))
    assert max(peaks) <= ROW_BYTES * 384
    assert running[0] == (4 if kernels else 3)
    assert engine.statistics()["preemptions"], "fewer fit at their longest: some had to go back"


def test_what_was_said_before_is_found_again_and_changes_nothing(kernels, model_path):
    """Siblings that come late, the same prompt again, and the next turn of a conversation."""
    engine = started(model_path)
    first = [request(i, prompt(i // 2, 100), max_tokens=40, min_tokens=40) for i in range(4)]
    turns = run(engine, *first)
    assert engine.statistics()["prefill_tokens"] == 2 * (99 if kernels else 100)
    later = [
        *(request(10 + i, prompt(i, 100)) for i in range(2)),
        *(
            request(20 + i, r.prompt_ids + o.token_ids + prompt(9, 30))
            for i, (r, o) in enumerate(zip(first, turns, strict=True))
        ),
    ]
    before = engine.statistics()
    outputs, alone = run(engine, *later), started(model_path)
    for r, out in zip([*first, *later], [*turns, *outputs], strict=True):
        assert _tokens(run(alone, r)) == _tokens([out])
        asyncio.run(alone.reset_prefix_cache())
    counts = {name: n - before[name] for name, n in engine.statistics().items()}
    # Full pages, or all but the last token, which a step feeds.
    assert counts["prefix_hit_tokens"] == (2 * 99 + 4 * 139 if kernels else 2 * 64 + 4 * 128)
    fed = len(later) if kernels else 0
    assert counts["prefill_tokens"] + counts["prefix_hit_tokens"] + fed == sum(len(r.prompt_ids) for r in later)
    assert alone.statistics()["prefix_hit_tokens"] == 0


def test_two_engines_and_two_runs_agree_but_seeds_differ(model_path, engine):
    first = run(engine, *[request(i, seed=7 + i) for i in range(4)])
    again = run(started(model_path), *[request(i, seed=7 + i) for i in range(4)])
    other = run(engine, *[request(i, seed=70 + i) for i in range(4)])
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    assert [o.token_ids for o in first] != [o.token_ids for o in other]


def test_siblings_share_one_prefill(kernels, engine):
    a, b = prompt(1, 11), prompt(2, 5)
    requests = [request(i, a if i % 2 else b, max_tokens=3, min_tokens=3) for i in range(12)]
    outputs = run(engine, *requests)
    assert engine._runner.prefilled_rows == (14 if kernels else 16), "kernels feed a prompt's last token with a step"
    assert len({tuple(o.token_ids) for o in outputs}) > 2, "siblings with own seeds differ"


# ---- ends ----


def _find(engine, wanted, **params):
    """A request whose response ends with one of the ids."""
    for i in range(200):
        r = request(i, max_tokens=60, **params)
        (out,) = run(engine, r)
        if out.token_ids[-1] == wanted:
            return r, out
    raise AssertionError(f"no response ended with {wanted}")


@pytest.mark.parametrize("eos", EOS)
def test_each_eos_ends_a_response_and_is_its_last_token(engine, eos):
    _, out = _find(engine, eos)
    assert out.finish_reason == "stop"
    assert not set(out.token_ids[:-1]) & set(EOS)


def _long(engine, length=40):
    """Number of a request that runs that long by itself, and its response."""
    for i in range(200):
        (out,) = run(engine, request(i, max_tokens=length))
        if len(out.token_ids) == length:
            return i, out
    raise AssertionError("every response is short")


def test_stop_token_ids_end_a_response(engine):
    i, free = _long(engine)
    stop = free.token_ids[10]
    (out,) = run(engine, request(i, max_tokens=40, stop_token_ids=[stop]))
    assert out.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert out.finish_reason == "stop"


def test_min_tokens_keeps_every_end_away(engine):
    r, short = _find(engine, EOS[0])
    n = len(short.token_ids)
    (out,) = run(engine, request(r.request_id, max_tokens=60, min_tokens=n + 3, stop_token_ids=[20]))
    assert len(out.token_ids) >= n + 3
    assert not set(out.token_ids[: n + 3 - 1]) & {*EOS, 20}
    assert np.isfinite(out.logprobs).all()


def test_length(engine):
    (out,) = run(engine, request(0, max_tokens=7, min_tokens=7))
    assert len(out.token_ids) == len(out.logprobs) == len(out.weight_versions) == 7
    assert out.finish_reason == "length"


def test_max_tokens_is_cut_to_the_context(model_path):
    engine = started(model_path, context_length=32)
    outputs = run(engine, request(0, prompt(0, 20), max_tokens=100, min_tokens=100), request(1, prompt(0, 31)))
    assert [len(o.token_ids) for o in outputs] == [12, 1]
    assert outputs[0].finish_reason == "length"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """A model with a byte-level tokenizer of 64 entries: letters, digits and the halves of an é."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    path = write_model(tmp_path_factory.mktemp("text") / "m")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + [str(d) for d in range(10)]
    entries = ["<pad>", "<unk>", "<eos>", "<a>", "<b>", "<eot>", "Ã", "©", *letters]
    entries += [x + y for x, y in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True)]
    tokenizer = Tokenizer(models.WordLevel({e: i for i, e in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>"})
    fast.save_pretrained(path)
    return path, fast


def test_stop_strings_end_a_response_at_the_token_that_completes_them(text_model):
    path, tokenizer = text_model
    engine = started(path)
    i, free = _long(engine)
    pieces = [tokenizer.decode([i]) for i in free.token_ids]
    at = next(k for k in range(8, 39) if pieces[k].isalnum() and pieces[k + 1].isalnum())
    stop = pieces[at][-1] + pieces[at + 1][0]
    first = next(k for k in range(1, 40) if stop in "".join(pieces[: k + 1]))
    # One neighbour with stop strings and one without: they must not disturb each other.
    out, other = run(engine, request(i, max_tokens=40, stops=[stop, "never"]), request(i, max_tokens=40))
    assert out.token_ids == free.token_ids[: first + 1] and out.finish_reason == "stop"
    assert other.token_ids == free.token_ids


def test_stop_strings_without_a_tokenizer_are_refused_not_ignored(model_path):
    out, good = run(started(model_path), request(0, stops=["x"]), request(1))
    assert out.finish_reason == "error" and "tokenizer" in out.error
    assert good.error is None


# ---- refusals ----


@pytest.mark.parametrize(
    "ids, params, words",
    [
        ([], {}, ["empty"]),
        ([7] * 256, {}, ["256", "context_length"]),
        ([7, VOCAB], {}, [str(VOCAB), "vocabulary"]),
        ([7, -1], {}, ["-1", "vocabulary"]),
        ([7], {"top_logprobs": 21}, ["top_logprobs=21", "20"]),
        ([7], {"min_tokens": 2, "stop_token_ids": [*range(VOCAB)]}, ["min_tokens=2", "every token"]),
        ([7], {"return_token_ids": False}, ["return_token_ids"]),
        ([7], {"no_stop_trim": False}, ["no_stop_trim"]),
        ([7], {"stops": [""]}, ["stops", "empty"]),
        ([7], {"stop_token_ids": [9, 99]}, ["stop_token_ids", "99"]),
        ([3], {"frequency_penalty": 1e39}, ["frequency_penalty=1e+39", "0 leaves it out"]),
        ([3], {"repetition_penalty": 1e-46}, ["repetition_penalty=1e-46", "1 leaves it out"]),
        ([3], {"temperature": 1e46}, ["temperature=1e+46", "lower it"]),
    ],
)
def test_what_cannot_be_served_is_refused_at_once_with_the_reason(engine, ids, params, words):
    refused, served = run(engine, request(0, ids, **params), request(1))
    assert refused.finish_reason == "error" and refused.token_ids == []
    assert all(word in refused.error for word in words), refused.error
    assert served.error is None and served.token_ids


def test_eos_comes_from_the_model_folder_or_the_start_says_so(tmp_path):
    path = write_model(tmp_path / "m")
    (path / "generation_config.json").unlink()
    assert started(path)._limits.eos_ids == [EOS[0]]
    config = json.loads((path / "config.json").read_text())
    config["eos_token_id"] = None
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="eos_token_id"):
        started(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB + 6}))
    with pytest.raises(ValueError, match=str(VOCAB + 6)):
        started(path)


def test_a_context_longer_than_the_models_is_refused(model_path):
    with pytest.raises(ValueError, match="context_length=300"):
        started(model_path, context_length=300)


def test_generate_before_start_says_so(model_path):
    (out,) = run(NativeEngine(model_path), request(0))
    assert out.finish_reason == "error" and "not started" in out.error
