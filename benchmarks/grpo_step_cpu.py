"""Seconds of a GRPO step on the CPU: this trainer beside TRL's GRPOTrainer on the same model, prompts and reward.

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 && trl/bin/pip install trl==1.16.0 pydantic
    python benchmarks/grpo_step_cpu.py --trl-python trl/bin/python [--model FOLDER] [--out results.jsonl]

The model is the demo's after its warm start (`--model`: such a folder; without it, one is made first). A step is
32 prompts x 8 samples of at most 36 tokens, the GSM8K judger's reward, one AdamW update, no KL term. A block is
a new process that trains from this model on; the cases take turns, so that whatever else the machine does falls on
all. A block's figure is the median wall time from the end of one step to the end of the next, after the warm-up;
a ratio compares blocks of one round. `other_load` is how many processors other work kept busy in the meantime; from
0.1 on the figures are not to be trusted (threads that wait for each other suffer most), and a line on stderr says so.
TRL runs as it comes, with glibc's allocator set as this trainer sets it, and with compiled layers too (needs a C++
compiler; it compiles in steps 1 and 5). Prints JSON rows.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import Rows, versions

PROMPTS, GROUP, NEW_TOKENS = 32, 8, 36
OURS = "xtuner native"
TRL_CASES: dict[str, dict[str, Any]] = {
    "trl": {"keep_memory": False, "settings": {}},
    "trl, freed memory kept": {"keep_memory": True, "settings": {}},
    "trl, freed memory kept, torch_compile": {"keep_memory": True, "settings": {"torch_compile": True}},
}
CASES = [OURS, *TRL_CASES]
MAX_OTHER_LOAD = 0.1


def stamp() -> tuple[float, float, float]:
    """Seconds so far: of wall time, of this process's processor time, of busy processors of the machine."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.process_time(), busy


def run_ours(folder: Path, steps: int) -> dict[str, Any]:
    """The demo's own configuration, without evaluation and export."""
    import runpy

    from xtuner.v1.train.demo.run import CONFIG

    file = folder / "grpo_demo.py"
    file.write_text(CONFIG.format(config=file, accelerator="CPU", steps=steps, evaluate_step=steps))
    off = dict.fromkeys(("enable_evaluate", "enable_initial_evaluate", "save_final_hf"), False)
    off |= dict.fromkeys(("eval_agent_loop_manager_cfg", "evaluator_config"))
    trainer = runpy.run_path(str(file))["trainer"].model_copy(update=off).build()
    ends: list[tuple[float, float, float]] = []
    write = trainer.writer.step

    def write_and_stamp(*args: Any) -> None:
        write(*args)
        ends.append(stamp())

    trainer.writer.step = write_and_stamp
    trainer.fit()
    metrics = [json.loads(line) for line in (trainer.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {
        "ends": ends,
        "rewards": [m["response/rewards/mean"] for m in metrics],
        "prompt_len": [m["response/prompt_len/mean"] for m in metrics],
        "response_len": [m["response/response_len/mean"] for m in metrics],
        "versions": versions("torch", "transformers"),
    }


def run_trl(folder: Path, steps: int, keep_memory: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer without all that only costs it time here: checkpointing, bfloat16, logging, saving."""
    import datasets
    import transformers
    import trl

    from xtuner.v1.rl.judger.gsm8k import score_gsm8k
    from xtuner.v1.utils.device import keep_freed_memory

    if keep_memory:
        keep_freed_memory()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    data = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in data]
    truths = [r["reward_model"]["ground_truth"] for r in data]
    report: dict[str, Any] = {name: [] for name in ("ends", "rewards", "prompt_len", "response_len")}

    def reward(completions: list[str], completion_ids: list[list[int]], truth: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, truth, strict=True)
        scores = [score_gsm8k(text, label, {"score": 1, "format_score": 0})["score"] for text, label in pairs]
        report["rewards"].append(statistics.fmean(scores))
        report["response_len"].append(statistics.fmean(map(len, completion_ids)))
        return scores

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            report["ends"].append(stamp())

    common = {
        "per_device_train_batch_size": PROMPTS * GROUP, "gradient_accumulation_steps": 1, "max_steps": steps,
        "num_generations": GROUP, "max_completion_length": NEW_TOKENS, "temperature": 1.0, "use_vllm": False,
        "learning_rate": 3e-4, "lr_scheduler_type": "constant", "weight_decay": 0.0, "adam_beta2": 0.95,
        "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "disable_dropout": True,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False,
        "save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 123,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    trl.GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(folder / "trl"), **{**common, **settings}),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts, "truth": truths}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    report["prompt_len"] = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    return report | {"versions": versions("torch", "transformers", "trl", "accelerate")}


def run_block(folder: Path, case: str, steps: int, settings: dict[str, Any]) -> None:
    """In the child: train and leave report.json."""
    if case == OURS:
        report = run_ours(folder, steps)
    else:
        chosen = TRL_CASES[case]
        report = run_trl(folder, steps, chosen["keep_memory"], chosen["settings"] | settings)
    (folder / "report.json").write_text(json.dumps(report))


def start_block(args: argparse.Namespace, model: Path, case: str) -> dict[str, Any]:
    """In the parent: a block in a process and a folder of its own; every prompt is used once."""
    from xtuner.v1.train.demo.task import make_rows, write_rows

    steps = args.warmup + args.steps + 1  # the last one is not timed: this trainer then pushes no weights
    python = sys.executable if case == OURS else args.trl_python
    threads = str(args.threads)
    path = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(model, folder / "model")
        write_rows(folder / "data" / "train.jsonl", make_rows(PROMPTS * steps, seed=21, evaluation=False))
        block = {"folder": name, "case": case, "steps": steps, "settings": args.trl_settings}
        command = [python, __file__, "--block", json.dumps(block)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{case}: the block ended with {done.returncode}:\n{done.stderr[-4000:]}")
        report = json.loads((folder / "report.json").read_text())
    ends = report["ends"]
    if len(ends) != steps:
        raise SystemExit(f"{case}: {len(ends)} steps were timed, {steps} expected.")
    timed = ends[args.warmup - 1 : -1]
    report["step_s"] = [later[0] - earlier[0] for earlier, later in itertools.pairwise(timed)]
    wall, own, machine = (last - first for first, last in zip(timed[0], timed[-1], strict=True))
    report["other_load"] = max(0.0, machine - own) / wall
    if report["other_load"] > MAX_OTHER_LOAD:
        print(f"{case}: other work kept {report['other_load']:.1f} processors busy; run again", file=sys.stderr)
    return report


def make_model(folder: Path) -> Path:
    """The demo's model after its warm start."""
    import torch

    from xtuner.v1.train.demo.model import write_config, write_tokenizer
    from xtuner.v1.train.demo.run import warm_start_of

    write_config(folder)
    write_tokenizer(folder)
    asyncio.run(warm_start_of(folder, torch.device("cpu")))
    return folder


def measure(args: argparse.Namespace, model: Path) -> None:
    rows = Rows("grpo_step_cpu", "cpu", args.out)
    shape = f"demo model of 0.44 M parameters, {PROMPTS} x {GROUP} samples, at most {NEW_TOKENS} new tokens"
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    other_load = 0.0
    for turn in range(args.rounds):
        prompt_len = {}
        for case in CASES[turn % len(CASES) :] + CASES[: turn % len(CASES)]:
            report = start_block(args, model, case)
            step_s, prompt_len[case] = report["step_s"], statistics.fmean(report["prompt_len"])
            seconds[case].append(statistics.median(step_s))
            other_load = max(other_load, report["other_load"])
            rows.add(
                shape, case, "step_s", seconds[case][-1], "s", round=turn + 1, steps=len(step_s), fastest=min(step_s),
                first_reward=report["rewards"][0], last_reward=report["rewards"][-1],
                response_len=statistics.fmean(report["response_len"]), other_load=report["other_load"],
                versions=report["versions"],
                **({} if case == OURS else {"settings": TRL_CASES[case]["settings"] | args.trl_settings}),
            )  # fmt: skip
        if max(prompt_len.values()) - min(prompt_len.values()) > 1e-6:
            raise SystemExit(f"the cases did not see the same prompts; mean lengths in tokens: {prompt_len}")
    more = {"rounds": args.rounds, "other_load": other_load}
    for case in CASES:
        rows.add(shape, case, "step_s, median of rounds", statistics.median(seconds[case]), "s", **more)
    for case in TRL_CASES:
        ratios = [theirs / ours for theirs, ours in zip(seconds[case], seconds[OURS], strict=True)]
        median = statistics.median(ratios)
        rows.add(shape, f"{case} / {OURS}", "ratio of step_s, median", median, "x", ratios=ratios, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=os.environ.get("TRL_PYTHON"), help="default: $TRL_PYTHON")
    parser.add_argument("--model", type=Path, help="the demo's model/ folder after its warm start")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=6, help="steps before the timed ones; 6 hold what is compiled")
    parser.add_argument("--trl-settings", type=json.loads, default={}, help="GRPOConfig fields to try, as JSON")
    parser.add_argument("--out", help="append the rows to this file")
    parser.add_argument("--block", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.block is not None:
        run_block(Path(args.block.pop("folder")), **args.block)
        return
    if args.trl_python is None or shutil.which(args.trl_python) is None:
        parser.error(f"--trl-python {args.trl_python}: name the Python of an environment with torch, trl and pydantic")
    if min(args.warmup, args.steps, args.rounds) < 1:
        parser.error("--warmup, --steps and --rounds must be at least 1")
    if args.model is not None and not (args.model / "model.safetensors").is_file():
        parser.error(f"--model {args.model}: there is no model.safetensors")
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        measure(args, args.model or make_model(Path(folder) / "model"))


if __name__ == "__main__":
    main()
