"""Microseconds that drawing one token for every row takes on a GPU: plain requests and those with more wishes.

    python benchmarks/sampling.py [--batch 256] [--vocab 151936] [--out results.jsonl]

Logits are random: `flat`, normal with deviation 1, as of a model with random weights; `peaked`, with deviation 4, where
a few hundred tokens hold nearly all probability. A case is captured as a CUDA graph; a figure is the median of 50
replays, in which the logits come from memory. Prints JSON rows.
"""

import argparse
import statistics

import torch
from rows import Rows

from xtuner.v1.ops.sampling import MAX_ALTERNATIVES, Shaping
from xtuner.v1.ops.sampling_kernels import draw_tokens

CASES: dict[str, dict[str, float] | None] = {
    "plain": None,
    "plain beside others": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "penalties": {"penalty": 1.1},
    "20 alternatives": {"alternatives": MAX_ALTERNATIVES},
    "everything": {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "penalty": 1.1, "alternatives": MAX_ALTERNATIVES},
}


def shaping(batch: int, vocab: int, wishes: dict[str, float] | None) -> Shaping | None:
    if wishes is None:
        return None

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    penalty, counts = wishes.get("penalty", 1.0), None
    if penalty != 1:
        counts = (torch.rand(batch, vocab, device="cuda") < 0.01).int()
    return Shaping(
        truncated=column(bool(wishes.keys() & {"top_k", "top_p", "min_p"}), torch.bool),
        top_k=column(wishes.get("top_k", vocab), torch.int32), top_p=column(wishes.get("top_p", 2.0)),
        log_min_p=column(wishes.get("min_p", 0.0)).log(), penalised=column(penalty != 1, torch.bool),
        repetition=column(penalty), presence=column(penalty - 1), frequency=column(penalty - 1), counts=counts,
        living=column(True, torch.bool), alternatives=column(wishes.get("alternatives", 0), torch.int32),
    )  # fmt: skip


def microseconds(logits: torch.Tensor, wishes: dict[str, float] | None) -> float:
    batch, vocab = logits.shape
    uniform, ones = torch.rand(batch, device="cuda"), torch.ones(batch, device="cuda")
    nobody = torch.zeros(batch, dtype=torch.bool, device="cuda")
    stop_ids, wanted = torch.zeros(batch, 2, dtype=torch.int64, device="cuda"), shaping(batch, vocab, wishes)
    source, logits = logits, logits.clone()

    def draw() -> None:
        draw_tokens(logits, uniform, ones, nobody, stop_ids, nobody, wanted)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()
    times = []
    for _ in range(50):
        logits.copy_(source)
        if logits.numel() < 2**26:  # a small batch would still be in the cache
            torch.empty(2**26, device="cuda").zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--out", help="file that rows are appended to")
    args = parser.parse_args()
    rows = Rows("sampling", "cuda", args.out, "triton")
    for name, deviation in (("flat", 1.0), ("peaked", 4.0)):
        logits = torch.randn(args.batch, args.vocab, device="cuda") * deviation
        for case, wishes in CASES.items():
            value = round(microseconds(logits, wishes), 1)
            rows.add(f"{args.batch}x{args.vocab} {name}", case, "draw_time", value, "us")


if __name__ == "__main__":
    main()
