"""Packed causal attention for training: the Hopper kernels beside the flash kernels of torch, forward and backward.

    python benchmarks/packed_attention.py [--out results.jsonl]

About 32,768 rows in bfloat16: sequences of about 1,024 rows, the same with a shared prompt to eight responses, and one
long sequence. The two take turns; medians. TFLOP/s count the products that causality leaves, 4 a pair of row and key
and number of a head forward, 10 backward, whatever a kernel computes besides. Prints JSON rows.
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from rows import Rows
from torch import Tensor

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.flash_attention import FlashAttention
from xtuner.v1.ops.hopper_attention import HopperAttention

DEVICE = torch.device("cuda", 0)
SHAPES = [(16, 8, 128), (32, 8, 128), (16, 16, 128), (32, 8, 64)]


def layouts() -> dict[str, SegmentLayout]:
    lengths = [int(1024 * (0.75 + 0.5 * (i * 7 % 32 + 0.5) / 32)) for i in range(32)]
    group = [1000, *(600 + 50 * i for i in range(8))]
    users = [[-1, *([9 * g] * 8)] for g in range(4)]
    return {
        "32 sequences of about 1024": SegmentLayout(lengths, [-1] * 32),
        "4 prompts of 1000, each with 8 responses of about 775": SegmentLayout(group * 4, sum(users, [])),
        "1 sequence of 32768": SegmentLayout([32768], [-1]),
    }


def pairs(layout: SegmentLayout) -> int:
    """Pairs of a row and a key that it sees."""
    seen = (n * (n + 1) // 2 + (layout.lengths[p] * n if p >= 0 else 0)
            for n, p in zip(layout.lengths, layout.prefix, strict=True))  # fmt: skip
    return sum(seen)


def medians(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds on the device."""
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for i in range(rounds + 2):
        for name, run in work.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            if i >= 2:
                events.append((name, begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for n, b, e in events if n == name) for name in work}


def steps(attention: Any, inputs: list[Tensor], grad: Tensor, scale: float) -> dict[str, Callable[[], Any]]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention.attend(*leaves, scale)

    def forward() -> None:
        with torch.no_grad():
            attention.attend(*inputs, scale)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("packed_attention", "cuda", args.out)
    for name, layout in layouts().items():
        for num_q, num_kv, dim in SHAPES:
            count = list(accumulate(layout.lengths))[-1]
            wide = torch.randn(count, 2 * num_q + 2 * num_kv, dim, device=DEVICE, dtype=torch.bfloat16)
            q, k, v, grad = wide.split((num_q, num_kv, num_kv, num_q), 1)
            inputs = [q.contiguous(), k.contiguous(), v]
            work = {}
            for case, kind in (("hopper", HopperAttention), ("flash", FlashAttention)):
                attention = kind(layout, DEVICE)
                for step, run in steps(attention, inputs, grad.contiguous(), dim**-0.5).items():
                    work[f"{case} {step}"] = run
            flops = 4 * pairs(layout) * num_q * dim
            for case, ms in medians(work, args.rounds).items():
                rate = flops * (2.5 if "backward" in case else 1) / ms / 1e9
                rows.add(f"{name}, {num_q}/{num_kv} heads of {dim}", case, "rate", rate, "TFLOP/s", ms=ms)


if __name__ == "__main__":
    main()
