"""Whole runs from the command line, on one card and on two, and what they leave behind."""

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests.train.helpers
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from random_model import write_random_model

from tests.train.helpers import Run
from xtuner.v1.train.demo.task import make_rows, write_rows

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples/v1/config/rl_grpo_gsm8k_judge.py"
LIMIT_S = float(os.environ.get("TWO_CARDS_LIMIT_S", 100))
"""Of one run."""
GUESSES = {" ####": 1.0, "\n": 1.0, "1": 1.0, "2": 1.0, "<|im_end|>": 0.8}
"""What the model says, and how much of the direction that these tokens share each of them has."""


def write_guessing_model(folder: Path, shape: str, device: str) -> None:
    """Random weights of `shape` that say numbers behind `####`: an answer is right now and then, so that groups differ.

    The tokens of `GUESSES` share a direction of the embedding, which is the head too: each makes all of them likely
    to follow. Layers add little to it, and the rest of an embedding, which would make a token repeat itself, is small.
    """
    from transformers import AutoTokenizer

    write_random_model(folder, shape, device)
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    generator = torch.Generator().manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(0.02)
            elif name.endswith("embed_tokens.weight"):
                direction = torch.randn(tensor.shape[1], generator=generator).sign().to(tensor.dtype)
                for text, share in GUESSES.items():
                    token = vocabulary[text.replace(" ", "Ġ").replace("\n", "Ċ")]
                    tensor[token] = 0.25 * tensor[token] + 1.25 / tensor.shape[1] ** 0.5 * share * direction
        save_file(tensors, path, metadata={"format": "pt"})


def write_questions(path: Path, count: int, seed: int) -> None:
    """Rows like GSM8K's, with labels that `write_guessing_model` hits."""
    rows = make_rows(count, seed, evaluation=False)
    for i, row in enumerate(rows):
        row["reward_model"]["ground_truth"] = str(1 + i % 2)
    write_rows(path, rows)


def write_config(folder: Path) -> Path:
    """A configuration of `folder`'s model and rows.jsonl: the example's; or the file that $TUTORIAL_CONFIG names, with
    its `/path/to/...` values replaced and nothing else."""
    text = Path(os.environ.get("TUTORIAL_CONFIG") or EXAMPLE).read_text(encoding="utf-8")
    for placeholder, name in {"Qwen3-8B": "model", "train.jsonl": "rows.jsonl", "eval.jsonl": "rows.jsonl"}.items():
        text = text.replace(f'"/path/to/{placeholder}"', repr(str(folder / name)))
    config = folder / "my_grpo.py"
    config.write_text(text, encoding="utf-8")
    return config


class CommandLineRun:
    """`xtuner train CONFIG ...` in a process of its own, with a mark that all its descendants carry."""

    def __init__(self, config: Path, folder: Path, *options: str):
        self.folder, self.mark = folder, f"TWO_CARDS_MARK={secrets.token_hex(8)}"
        folder.mkdir(parents=True)
        command = [sys.executable, REPOSITORY / "xtuner/v1/train/cli/rl.py", config, "--work-dir", folder / "runs"]
        rows = str(config.with_name("rows.jsonl"))
        for_the_example = {"MODEL_PATH": str(config.with_name("model")), "DATA_PATH": rows, "EVAL_DATA_PATH": rows}
        inherited = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "SP_SIZE", "WORK_DIR")}
        environment = {"XDG_CACHE_HOME": str(folder / "cache")} | inherited | for_the_example
        environment.update([self.mark.split("=")])
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *options], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        atexit.register(self.kill)  # whatever ends the test

    def finish(self, seconds: float = LIMIT_S) -> Run:
        """What it left, once it has ended well and none of its processes lives any more."""
        try:
            code: int | str = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"still running after {seconds:g} s"
        end = time.monotonic() + 20
        while (left := self.alive()) and code == 0 and time.monotonic() < end:
            time.sleep(0.2)
        if left:
            self.kill()
        assert code == 0, f"{code}\n{self.log()[-6000:]}"
        assert not left, f"left behind: {left}\n{self.log()[-3000:]}"
        (path,) = (self.folder / "runs").glob("2*")
        return Run(SimpleNamespace(run_dir=path), {})  # type: ignore[arg-type]

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def alive(self) -> dict[int, str]:
        """Command lines of all processes with the mark, also of those that were made daemons."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except OSError:  # it ended meanwhile
                continue
        return {pid: line for pid, line in found.items() if line}

    def kill(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class Cards:
    """What `nvidia-smi` says of memory (MiB) and utilisation (%) of every card, once a second while entered."""

    def __init__(self) -> None:
        self.peaks: list[list[int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @staticmethod
    def read() -> list[list[int]]:
        query = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        return [[int(value) for value in line.split(",")] for line in text.strip().splitlines()]

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            now = self.read()
            self.peaks = [list(map(max, *pair)) for pair in zip(self.peaks or now, now, strict=True)]

    def __enter__(self) -> "Cards":
        self.before = self.read()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def assert_free_again(self) -> None:
        """As much memory is in use as before, within a few seconds: the driver takes its time."""
        end = time.monotonic() + 15
        while any(now[0] > old[0] + 64 for now, old in zip(self.read(), self.before, strict=True)):
            assert time.monotonic() < end, f"{self.before} before, {self.read()} after"
            time.sleep(0.5)


def comparison(one: Run, two: Run, step: int) -> dict[str, Any]:
    """How far two runs of the same prompts agree in a step."""
    a, b = one.trajectories(step), two.trajectories(step)
    assert [row["prompt"] for row in a] == [row["prompt"] for row in b]
    alike = [x["response_ids"] == y["response_ids"] for x, y in zip(a, b, strict=True)]
    gaps = []
    for x, y in zip(a, b, strict=True):
        pairs = enumerate(zip(x["response_ids"], y["response_ids"], strict=False))
        shared = next((i for i, (s, t) in pairs if s != t), min(x["response_len"], y["response_len"]))
        logprobs = zip(x["rollout_logprobs"][:shared], y["rollout_logprobs"][:shared], strict=True)
        gaps += [abs(s - t) for s, t in logprobs]
    rewards = [[row["reward"] for row in rows] for rows in (a, b)]
    updates = [next(u for u in run.updates if u["train_step"] == step) for run in (one, two)]
    return {
        "step": step, "responses": len(a), "tokens": sum(row["response_len"] for row in a),
        "same_responses": sum(alike) / len(a), "same_rewards": sum(map(float.__eq__, *rewards)) / len(a),
        "logprob_gap": sum(gaps) / len(gaps), "logprob_gap_max": max(gaps),
        "reward": [sum(values) / len(values) for values in rewards],
        "loss": [u["loss"] for u in updates], "grad_norm": [u["grad_norm"] for u in updates],
    }  # fmt: skip


def show(what: str, result: Any) -> None:
    print(f"\n{what}: {json.dumps(result)}", flush=True)
