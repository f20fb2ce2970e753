"""A whole run with a real engine: generate, train, update, generate; and the engine dies on the way."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import RESPONSE, config, fit, spread, with_evaluation
from xtuner.v1.rl.rollout.backends import carriers

from .helpers import descendants, greedy, running, server_processes

STEPS = 3


class KillsTheServer:
    """A reward that kills the server of the run that it is used in, whenever it has been asked so often."""

    def __init__(self, *when: int):
        self.when, self.calls, self.others = when, 0, set(server_processes(os.getpid()))

    def __call__(self, response: str, label: Any, extra_info: dict[str, Any]) -> float:
        self.calls += 1
        if self.calls in self.when:
            (server,) = set(server_processes(os.getpid())) - self.others
            os.kill(server, signal.SIGKILL)
        return spread(response, label, extra_info)


def prompt_ids(folder: Path, row: dict[str, Any]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)


def killing(send_weights: Callable[..., None], others: set[int]) -> Callable[..., None]:
    """The same, and the server that takes version 2 is killed when it has asked for it; once."""
    left = [2]

    def send(buckets: Any, line: Any, version: int, *rest: Any) -> None:
        if version in left:
            left.remove(version)
            (server,) = set(server_processes(os.getpid())) - others
            os.kill(server, signal.SIGKILL)
        send_weights(buckets, line, version, *rest)

    return send


@pytest.mark.parametrize(("transport", "kills"), [("folder", (13, 36)), ("ipc", (13,))])
def test_a_run_whose_engine_dies_twice_trains_on_and_generates_with_every_step_s_weights(
    engine_name, transport, kills, models, tmp_path, monkeypatch
):
    """After the first of 12 samples of step 2, when the others may have come too, and after the last of step 3, before
    it sleeps and gets new weights. With weights through memory, which it gets again from the trainer in the middle of
    the step: the second time in the update."""
    if engine_name == "lmdeploy":
        pytest.skip("a run with it needs a GPU: tests/gpu/test_engines_cuda.py")
    if transport == "ipc":
        with_death = killing(carriers.send_weights, set(server_processes(os.getpid())))
        monkeypatch.setattr(carriers, "send_weights", with_death)
    cfg = config(
        models[0], tmp_path, total_train_steps=STEPS,
        rollout={"backend": engine_name, "dist_port_base": 26000, "weight_transport_type": transport},
        worker={"pack_max_length": 512}, task={"reward": KillsTheServer(*kills)}, hf_interval=1,
        **with_evaluation(models[0], tmp_path),
    )  # fmt: skip
    before = descendants(os.getpid())
    run = fit(cfg)
    for step in range(1, STEPS + 1):
        rows = run.trajectories(step)
        assert len(rows) == 12
        for row in rows:
            assert row["status"] == "completed" and row["model_steps"] == [step - 1]
            assert row["train_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=2e-5)
    assert max(run.series("mismatch/mismatch_logprob_abs_diff_max")) < 2e-5
    assert run.series("rollout/failures") == [0] * STEPS and min(run.series("response/rewards/mean")) >= 0
    taught = [any(row["advantage"] for row in run.trajectories(step)) for step in range(1, STEPS + 1)]
    assert [update["grad_norm"] > 0 for update in run.updates] == taught and taught[0]  # it may learn to say one thing

    answers = {}
    for step in range(1, STEPS + 1):
        exported = run.path / "hf" / f"hf-step-{step}"
        for row in run.trajectories(step, "eval"):
            expected = greedy(exported, prompt_ids(models[0], row), RESPONSE)
            assert row["response_ids"] == expected, f"step {step}"
            answers.setdefault(str(row["prompt"]), []).append(expected)
    assert len(answers) == 4 and any(a[0] != a[1] for a in answers.values()), "the weights hardly changed"

    log = run.path / "logs" / f"rollout_0_{engine_name}.log"
    assert log.stat().st_size > 1000 and log.stat().st_mode & 0o077 == 0
    assert log.read_text().count("supervisor: the server ended, by itself") == 2
    assert running(descendants(os.getpid())) <= before | {os.getpid()}
