"""Seconds of a GRPO update on two processes against one, each with one thread, on a CPU.

    python benchmarks/train_step_cpu.py [--layouts dp sp tp] [--rounds 3] [--steps 3] [--out results.jsonl]

The update is `TrainingWorker.fit` (packs with shared prompts, chunked log-probs, GRPO loss, backward, clipping,
AdamW) of a random model of 10.8 M parameters in float32, the demo's in wider and deeper. Both have the same samples.
One and two processes take turns; a round is the median of its steps. Prints JSON rows. Two idle cores are needed.
"""

import argparse
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from random_model import write_random_model
from rows import Rows

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.rl.trainer import TrainingSample, WorkerConfig, pack_samples

LAYOUTS: dict[str, dict[str, int]] = {"dp": {}, "sp": {"sp_size": 2}, "tp": {"tp_size": 2}}


def make_samples(groups: int, siblings: int, prompt: int, response: int) -> list[TrainingSample]:
    """Groups that share a prompt of `prompt` tokens; responses of `response` tokens and advantages of both signs."""
    rng = torch.Generator().manual_seed(0)
    samples = []
    for group in range(groups):
        head = torch.randint(3, 384, (prompt,), generator=rng).tolist()
        for member in range(siblings):
            answer = torch.randint(3, 384, (response,), generator=rng).tolist()
            labels = [-100] * (prompt - 1) + answer
            advantage = 1.0 if member % 2 else -1.0
            number = group * siblings + member
            samples.append(
                TrainingSample(number, head + answer[:-1], labels, [advantage] * len(labels), None, prompt)
            )  # fmt: skip
    return samples


def run(rank: int, world: int, port: int, folder: str, layout: dict[str, int], args: argparse.Namespace) -> None:
    """One process: seconds of each timed step, written by the first."""
    from xtuner.v1.rl.trainer import TrainingWorker

    torch.set_num_threads(1)
    layout = layout if world > 1 else {}
    config = WorkerConfig(
        model_cfg=get_model_config_from_hf(Path(folder) / "model"),
        load_from=Path(folder) / "model",
        optim_cfg=AdamWConfig(lr=1e-5),
        loss_cfg=GRPOLossConfig(policy_loss_cfg=dict(cliprange_low=0.2, cliprange_high=0.28), mode="chunk"),
        lr_cfg=LRConfig(warmup_ratio=0),
        fsdp_cfg=FSDPConfig(recompute_ratio=0.0, tp_size=layout.get("tp_size", 1)),
        sp_size=layout.get("sp_size", 1),
        pack_max_length=args.pack_length,
    )
    worker = TrainingWorker(
        config, rank=rank, world_size=world, accelerator="CPU", total_optimizer_steps=100, seed=0
    )  # fmt: skip
    worker.setup("127.0.0.1", port)
    packs = pack_samples(
        make_samples(args.groups, 8, 48, 96), ranks=world // config.ranks_per_pack, optimizer_steps=1,
        pack_max_length=args.pack_length, hidden_size=config.model_cfg.hidden_size, share_prompts=True, seed=0,
    )  # fmt: skip
    own = packs[rank // config.ranks_per_pack]
    seconds = [worker.fit(own, step + 1).metrics["training_s"] for step in range(args.steps + 1)][1:]
    worker.stop()
    if rank == 0:
        torch.save(seconds, Path(folder) / "seconds.pt")


def measure(world: int, folder: Path, layout: dict[str, int], args: argparse.Namespace) -> float:
    """Median seconds of a step on `world` processes, which are started for it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    passed: tuple[Any, ...] = (world, port, str(folder), layout, args)
    mp.start_processes(run, passed, nprocs=world, start_method="spawn")
    return statistics.median(torch.load(folder / "seconds.pt", weights_only=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["dp"], choices=list(LAYOUTS))
    parser.add_argument("--groups", type=int, default=8, help="prompts of 8 responses each")
    parser.add_argument("--pack-length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows("train_step_cpu", "cpu", args.out)
    tokens = args.groups * (48 + 8 * 95)
    shape = f"demo-10m, {tokens} tokens in {args.groups} groups of 8"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_model(folder / "model", "demo-10m")
        seconds: dict[str, list[float]] = {case: [] for case in ("one process", *args.layouts)}
        for _ in range(args.rounds):
            seconds["one process"].append(measure(1, folder, {}, args))
            for layout in args.layouts:
                seconds[layout].append(measure(2, folder, LAYOUTS[layout], args))
    more = {"rounds": args.rounds, "steps": args.steps}
    for case, values in seconds.items():
        label = case if case == "one process" else f"two processes, {case}"
        rows.add(shape, label, "step", statistics.median(values), "s", **more)
    for layout in args.layouts:
        pairs = zip(seconds["one process"], seconds[layout], strict=True)
        ratio = statistics.median(one / two for one, two in pairs)
        rows.add(shape, f"one process / two processes, {layout}", "ratio of seconds, median", ratio, "x", **more)


if __name__ == "__main__":
    main()
