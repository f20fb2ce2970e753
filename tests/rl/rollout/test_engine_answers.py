"""Servers that say what no engine should, in the middle of their work: it is an error that says so, and never a sample
or an update. A small program in the place of vLLM and SGLang answers by a list of rules."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import write_model
from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.rollout.backends import answer_checks
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.server import ServerError, ServerRefused
from xtuner.v1.rl.rollout.config import RolloutConfig
from xtuner.v1.rl.rollout.worker import RolloutWorker
from xtuner.v1.utils import get_logger

PROGRAM = r"""
import http.server, json, sys
rules = sys.argv[1]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        said = json.load(open(rules)).get(self.path, "")
        if said == "the folder":
            said = {"results": [{"folder": json.loads(body)["kwargs"]["folder"]}]}
        with open(rules + ".asked", "ab") as file:
            file.write(body.replace(b"\n", b" ") + b"\n")
        self.send_response(said.pop("status", 200) if isinstance(said, dict) else 200)
        self.end_headers()
        self.wfile.write(said.encode() if isinstance(said, str) else json.dumps(said).encode())
    do_POST = do_GET
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
VERSIONS = {"sglang": "0.5.23", "vllm": "0.32.0"}
GENERATE = {"sglang": "/generate", "vllm": "/v1/completions"}
UPDATE = {"sglang": "/update_weights_from_disk", "vllm": "/collective_rpc"}


def vllm(ids=(7, 8), logprobs=(-0.5, -0.1), reason: Any = "stop") -> dict:
    choice = {"token_ids": list(ids), "logprobs": {"token_logprobs": list(logprobs)}, "finish_reason": reason}
    return {"choices": [choice]}


def sglang(ids=(7, 8), logprobs=(-0.5, -0.1), version="0", **reason: Any) -> dict:
    drawn = [[value, token, None] for token, value in zip(ids, logprobs, strict=True)]
    reason = reason or {"type": "stop"}
    return {"meta_info": {"finish_reason": reason, "output_token_logprobs": drawn, "weight_version": version}}


GOOD = {
    "vllm": {"/v1/completions": vllm(), "/collective_rpc": "the folder", "/reset_prefix_cache": {"success": True}},
    "sglang": {"/generate": sglang(), "/update_weights_from_disk": {"success": True, "message": ""}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("answers") / "model")


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """`run(name, scenario)`: with a started engine, and `rule(path, answer)` for what its server says from then on."""

    def run_it(name, scenario):
        rules, python = tmp_path / "rules.json", tmp_path / "python"
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        python.write_text(
            f'#!/bin/sh\n[ "$1" = -c ] && echo {VERSIONS[name]} && exit\nexec {sys.executable} {program} {rules} "$@"\n'
        )
        python.chmod(0o755)
        monkeypatch.setenv(f"XTUNER_{name.upper()}_PYTHON", str(python))
        config = RolloutConfig(
            model_path=model, backend=name, context_length=16, rollout_max_batch_size_per_instance=4,
            dist_port_base=27700,
        ).resolve("cpu")  # fmt: skip
        rules.write_text(json.dumps(GOOD[name]))
        engine = RolloutWorker(config, 0, "cpu").build_engine()
        engine.server.log_file = tmp_path / "log"

        def rule(path, answer):
            rules.write_text(json.dumps(GOOD[name] | {path: answer}))

        async def life():
            await engine.start()
            try:
                await scenario(engine, rule)
            finally:
                await engine.stop()

        asyncio.run(asyncio.wait_for(life(), 60))
        return [json.loads(line) for line in (tmp_path / "rules.json.asked").read_text().splitlines() if line.strip()]

    return run_it


def request(**params) -> GenerateRequest:
    return GenerateRequest(0, [5, 6], SampleParams(**{"max_tokens": 4} | params), seed=2**62 + 7)


UNREADABLE = ("", "busy", [1, 2], {"choices": []}, {"meta_info": {}}, {"error": "no"})


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_answer_that_cannot_be_read_is_an_error_and_the_next_one_counts(run, name):
    async def scenario(engine, rule):
        answer = {"sglang": sglang, "vllm": vllm}[name]
        for bad in (*UNREADABLE, answer(logprobs=(-0.5, None))):
            rule(GENERATE[name], bad)
            with pytest.raises(ServerError, match=f"{name} server of rollout worker 0 gave an answer that cannot be"):
                await engine.generate(request())
        rule(GENERATE[name], answer())
        output = await engine.generate(request())
        assert (output.token_ids, output.logprobs, output.finish_reason) == ([7, 8], [-0.5, -0.1], "stop")

    run(name, scenario)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_what_is_no_token_and_what_is_no_log_prob_never_becomes_a_sample(run, name):
    """A sampler makes such ids of logits that are NaN; servers put numbers in the place of minus infinity."""

    async def scenario(engine, rule):
        answer = {"sglang": sglang, "vllm": vllm}[name]
        for ids in ((7, 384), (7, -1)):
            rule(GENERATE[name], answer(ids))
            with pytest.raises(ServerError, match=f"{ids[1]} is no token of the vocabulary of 384"):
                await engine.generate(request())
        for value in (0.5, -9999.0, -3.4e38, float("nan")):
            rule(GENERATE[name], answer(logprobs=(-0.5, value)))
            with pytest.raises(ServerError, match="is no log-prob of a token that was drawn"):
                await engine.generate(request())
        rule(GENERATE[name], answer(logprobs=(0.0, 1e-6)))
        assert (await engine.generate(request())).finish_reason == "stop"

    run(name, scenario)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_update_that_the_server_does_not_own_up_to_is_none(run, model, name):
    async def update(engine, version):
        await engine.update_weights([WeightBucket(dict(iter_hf_tensors(model)))], version)

    async def scenario(engine, rule):
        another = {"results": [{"folder": "/another"}]}
        for bad in ("", "ok", [], {"success": "yes"}, {"results": [None]}, another, {"status": 307}):
            rule(UPDATE[name], bad)
            with pytest.raises(ServerError, match="an answer without|did not take|does not say that it took|HTTP 307"):
                await update(engine, 9)
            output = await engine.generate(request())
            assert engine.version == 0 and "update of its weights is not complete" in output.error
        rule(GENERATE[name], sglang(version="10") if name == "sglang" else vllm())
        await update(engine, 10)
        assert (await engine.generate(request())).weight_versions == [10, 10]

    run(name, scenario)


def test_responses_that_end_before_their_length_are_told_of_once(run, caplog, monkeypatch):
    """By a server whose cache holds less than the context: it lowers what was asked for, and does not say so."""
    monkeypatch.setattr(answer_checks, "_TOLD", set())
    monkeypatch.setattr(get_logger(), "propagate", True)

    async def scenario(engine, rule):
        rule("/generate", sglang((7, 8, 9, 9), (-1.0,) * 4, type="length"))
        await engine.generate(request())
        assert "cuts responses short" not in caplog.text
        rule("/generate", sglang(type="length"))
        assert (await engine.generate(request())).finish_reason == "length"
        await engine.generate(request())
        said = {id(record): record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
        (text,) = said.values()
        assert "cuts responses short: one ended after 2 tokens of 4. Its cache does not hold" in text

    run("sglang", scenario)


def test_only_what_is_wrong_with_a_request_is_held_against_it(run):
    """One that is busy, or knows us no more, says nothing of the sample: it is asked again, or somebody else is."""

    async def scenario(engine, rule):
        for status in (400, 422):
            rule("/v1/completions", {"status": status, "detail": "x" * 10_000})
            output = await engine.generate(request())
            assert output.finish_reason == "error" and f"vllm: HTTP {status}: " in output.error
            assert len(output.error) < 2100 and output.error.endswith("x…")
        for status in (307, 401, 404, 408, 429, 503):
            rule("/v1/completions", {"status": status})
            with pytest.raises(ServerRefused, match=f"HTTP {status}"):
                await engine.generate(request())
        rule("/v1/completions", vllm())
        assert (await engine.generate(request())).finish_reason == "stop"

    run("vllm", scenario)


@pytest.mark.parametrize("name", ["vllm"])
def test_a_cache_that_nobody_says_is_empty_is_not(run, model, name):
    async def scenario(engine, rule):
        for bad in ("", {"ok": True}):
            rule("/reset_prefix_cache", bad)
            with pytest.raises(ServerError, match="gave an answer without 'success'"):
                await engine.update_weights([WeightBucket(dict(iter_hf_tensors(model)))], 9)

    run(name, scenario)


def test_sglang_gets_the_seed_of_every_request(run):
    """Something may make it deterministic that we do not know of. Without seeds it gives all requests the same one, and
    the answers to a prompt are equal."""

    async def scenario(engine, rule):
        await engine.generate(request())

    (body,) = [asked for asked in run("sglang", scenario) if "sampling_params" in asked]
    assert body["sampling_params"]["sampling_seed"] == 2**62 + 7


def test_sglang_s_word_for_nan_is_no_stop(run):
    async def scenario(engine, rule):
        rule("/generate", sglang(type="stop", matched="NaN happened"))
        output = await engine.generate(request())
        assert output.finish_reason == "error" and "NaN happened" in output.error
        rule("/generate", sglang(type="stop", matched=7))
        assert (await engine.generate(request())).finish_reason == "stop"

    run("sglang", scenario)


def test_a_temperature_that_vllm_would_raise_is_refused(run):
    async def scenario(engine, rule):
        for temperature in (0.009, 2e-5):
            output = await engine.generate(request(temperature=temperature))
            assert output.finish_reason == "error" and "vllm draws at 0.01 at least" in output.error
        for params in ({"temperature": 0}, {"temperature": 0.01}, {"temperature": 0.005, "top_k": 1}):
            assert (await engine.generate(request(**params))).finish_reason == "stop"

    run("vllm", scenario)


def test_what_sglang_does_in_another_way_is_refused_by_name(run):
    async def scenario(engine, rule):
        for params, words in (
            ({"repetition_penalty": 1.2}, "repetition_penalty=1.2: sglang leaves the prompt out"),
            ({"min_tokens": 2, "stops": ["a"]}, "min_tokens=2: sglang stops at stop strings before that"),
        ):
            output = await engine.generate(request(**params))
            assert output.finish_reason == "error" and words in output.error
        for params in ({"min_tokens": 2}, {"stops": ["a"]}):
            assert (await engine.generate(request(**params))).finish_reason == "stop"

    run("sglang", scenario)
