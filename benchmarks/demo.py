"""Seconds and accuracies of the whole demo (`xtuner demo`) in a fresh folder.

    python benchmarks/demo.py [--steps 120] [--accelerator cpu] [--threads 2] [--out results.jsonl]

Prints JSON rows: seconds of the warm start, of GRPO with its evaluations, and of all; held-out accuracy (one sample
a prompt at temperature 1) at the end of the warm start, before GRPO and after it.
"""

import argparse
import tempfile

import torch
from rows import Rows

from xtuner.v1.train.demo import run_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--threads", type=int, help="of torch; default: what torch chooses")
    parser.add_argument("--out", help="append the rows to this file")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows = Rows("demo", "cpu" if args.accelerator == "cpu" else "cuda", args.out)
    with tempfile.TemporaryDirectory() as folder:
        summary = run_demo(folder, steps=args.steps, accelerator=args.accelerator)
    shape = f"0.44 M parameters, {args.steps} GRPO steps of 32 x 8 samples"
    for metric in ("warm_start_s", "grpo_s", "total_s"):
        rows.add(shape, "xtuner demo", metric, summary[metric], "s")
    for metric in ("warm_start_accuracy", "first_accuracy", "last_accuracy"):
        rows.add(shape, "xtuner demo", metric, summary[metric], "share of right answers")


if __name__ == "__main__":
    main()
