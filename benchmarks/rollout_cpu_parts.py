"""Where a decode step of the CPU engine goes: every part alone, beside the operations and bytes that it must take.

    python benchmarks/rollout_cpu_parts.py [--shape smollm2-135m] [--batch 32] [--length 56] [--threads 2] [--rounds 20]
        [--out results.jsonl]

Every part runs over all layers, as in a step, so that weights come from where they come from there. Prints JSON
rows, for every type: the best of the rounds in milliseconds. Bytes are of weights, and of keys and values. The bounds
are from rates of this machine: of products that stay in the cores' own memory, and of one pass over weights.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import write_random_model
from rows import Rows

from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.ops.jit import kernel, part
from xtuner.v1.ops.jit_gemm import multiply_panel
from xtuner.v1.ops.threads import run_blocks
from xtuner.v1.rl.rollout.backends.native import kernels
from xtuner.v1.rl.rollout.backends.native.kernel_runner import KernelRunner, kernel_types
from xtuner.v1.rl.rollout.backends.native.scheduler import Scheduler

_PROMPT = 31
_YES, _FIRST = np.bool_(True), np.int64(0)


@kernel
def _products(count, a, weight, bias, out, rounds, threads):
    for layer in range(weight.shape[0]):
        kernels._multiply(count, a, weight, layer, bias, out, rounds, threads)


# What takes views of arrays is a `part`, which counts no references; its first argument is the block of `run_blocks`.


@kernel
def _norms(count, m, w, rows, threads):
    run_blocks(_norms_of, 1, 1, (count, m, w, rows, threads))


@part
def _norms_of(block, count, m, w, rows, threads):
    r = kernels._of_block(rows, block)
    shares, some = r.scores.shape[0], kernels._worth(count, threads, r)
    for layer in range(w.norm.shape[0]):
        run_blocks(kernels._norm, shares, some, (shares, count, w.norm, layer, m.eps, _YES, w, r))
        run_blocks(kernels._norm, shares, some, (shares, count, w.mlp_norm, layer, m.eps, _YES, w, r))


@kernel
def _attention(count, m, w, cache, rows, threads):
    run_blocks(_attention_of, 1, 1, (count, m, w, cache, rows, threads))


@part
def _attention_of(block, count, m, w, cache, rows, threads):
    r = kernels._of_block(rows, block)
    shares = r.scores.shape[0]
    for layer in range(w.norm.shape[0]):
        run_blocks(kernels._store_and_attend, shares, threads, (shares, count, layer, m, w, cache, r))


@kernel
def _gates(count, m, w, rows, threads):
    run_blocks(_gates_of, 1, 1, (count, m, w, rows, threads))


@part
def _gates_of(block, count, m, w, rows, threads):
    r = kernels._of_block(rows, block)
    shares = r.scores.shape[0]
    for _ in range(w.norm.shape[0]):
        run_blocks(kernels._swiglu, shares, threads, (shares, count, m.inner, w, r))


@kernel
def _draws(count, m, table, tokens, logprobs, stop_ids, ends, outside, rows, threads):
    run_blocks(_draws_of, 1, 1, (count, m, table, tokens, logprobs, stop_ids, ends, outside, rows, threads))


@part
def _draws_of(block, count, m, table, tokens, logprobs, stop_ids, ends, outside, rows, threads):
    r = kernels._of_block(rows, block)
    shares = r.scores.shape[0]
    arguments = (shares, count, m.vocab, table, tokens, logprobs, stop_ids, ends, outside, r)
    run_blocks(kernels._draw, shares, threads, arguments)


@part
def _nothing(block, counts):
    pass


@kernel
def _regions(number, counts, threads):
    for _ in range(number):
        run_blocks(_nothing, 2, threads, (counts,))


@kernel
def _multiply_again(times, a, weight, bias, out, threads):
    run_blocks(_multiply_panel_again, weight.shape[1], threads, (times, a, weight, bias, out))


@part
def _multiply_panel_again(panel, times, a, weight, bias, out):
    for _ in range(times):
        multiply_panel(panel, 0, a.shape[0], a, weight, 0, bias, out, False)


@part
def _sum_block(block, numbers, sums):
    size = numbers.size // sums.size
    total = numbers[0] - numbers[0]
    for i in range(block * size, (block + 1) * size):
        total ^= numbers[i]
    sums[block] = total


@kernel
def _read(numbers, sums, threads):
    run_blocks(_sum_block, sums.size, threads, (numbers, sums))


class Parts:
    """The runner of a random model, and every part of its step as a call."""

    def __init__(self, folder: Path, dtype: torch.dtype, batch: int, length: int, threads: int) -> None:
        config = get_model_config_from_hf(folder)
        self.config, self.batch, self.length, self.threads = config, batch, length, threads
        model = config.build("cpu", dtype).requires_grad_(False)
        model.init_weights(seed=0)
        runner = KernelRunner(model, batch, length + 1024, threads)
        runner.cache.set_budget(2**32)
        runner.cache.reserve(batch, length + 1024)
        self.runner, self.rounds = runner, dtype == torch.bfloat16
        self.rows = runner._rows(1, threads)
        self.table = np.zeros(batch, Scheduler(batch).rows().dtype)
        self.table["length"], self.table["limit"], self.table["inv_temperature"] = length, 2**40, 1
        self.rows.positions[0], self.rows.places[0, :batch] = length - 1, np.arange(batch)
        self.rows.slots[0, :batch] = np.arange(batch)
        wide = length + 1024
        self.tokens, self.logprobs = np.zeros((batch, wide), np.int32), np.zeros((batch, wide), np.float32)
        self.stop_ids, self.ends = np.full((batch, 1), -1), np.zeros(batch, np.int64)
        self.outside = np.empty((0, config.vocab_size), np.float32)

    def calls(self) -> dict[str, tuple[Callable[[], object], float, float]]:
        """Each part with its multiplications and additions, and its bytes of weights, keys and values."""
        b, threads, r, m = self.batch, self.threads, self.rows, self.runner._dimensions
        w, cache = self.runner._weights, self.runner.cache.arrays
        assert w is not None
        inputs = {"qkv": (r.normed, r.qkv), "o": (r.attended, r.normed), "gate_up": (r.normed, r.gate_up),
                  "down": (r.gated, r.normed), "head": (r.normed, r.logits)}  # fmt: skip
        calls: dict[str, tuple[Callable[[], object], float, float]] = {}
        for name, (a, out) in inputs.items():
            weight, bias = getattr(w, name), getattr(w, f"{name}_bias")
            rounds = np.bool_(self.rounds and name != "head")
            arguments = (b, a[0], weight, bias, out[0], rounds, threads)
            calls[name] = (lambda arguments=arguments: _products(*arguments)), 2 * b * weight.size, weight.nbytes
        kv = b * self.length * layer_bytes(cache) * w.norm.shape[0]
        of_attention = 4 * b * self.length * m.q_heads * m.head_dim * w.norm.shape[0]
        calls["attention"] = (lambda: _attention(b, m, w, cache, r, threads)), of_attention, kv
        calls["norms"] = (lambda: _norms(b, m, w, r, threads)), 0, 0
        calls["gate"] = (lambda: _gates(b, m, w, r, threads)), 0, 0
        drawing = (self.tokens, self.logprobs, self.stop_ids, self.ends, self.outside, r, threads)
        calls["draw"] = self._at_length(lambda: _draws(b, m, self.table, *drawing)), 0, 0
        return calls

    def step(self) -> None:
        """A whole one."""
        self.table["length"] = self.length
        arrays = (self.table, self.tokens, self.logprobs, self.stop_ids, np.arange(self.batch), self.ends, self.outside)
        kernels.decode(
            np.array([0, self.batch]), 1, *arrays, self.runner._dimensions, self.runner._weights,
            self.runner.cache.arrays, self.rows, 1, self.threads,
        )  # fmt: skip

    def prefill(self) -> None:
        """Of prompts that are not there."""
        rows = self.batch * _PROMPT
        kernels.prefill(
            np.array([0, rows]), np.zeros(rows, np.int32), np.tile(np.arange(_PROMPT), self.batch),
            np.arange(self.batch).repeat(_PROMPT), np.zeros(2, np.int64), np.zeros((0, 3), np.int64),
            self.runner._dimensions, self.runner._weights, self.runner.cache.arrays, self.rows, 1, self.threads,
        )  # fmt: skip

    def _at_length(self, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            self.table["length"] = self.length
            call()

        return run


def layer_bytes(cache: kernels.Cache) -> int:
    """Of one token in one layer."""
    return 2 * cache.values.shape[2] * cache.values.shape[4] * cache.values.itemsize


def torch_products(parts: Parts) -> Callable[[], None]:
    """The products of a step by torch."""
    layers = [
        [p for name, p in layer.named_parameters() if p.dim() == 2] for layer in parts.runner.model.layers
    ] + [[parts.runner.model.head_weight()]]
    weights = [weight.detach() for layer in layers for weight in layer]
    inputs = {w.shape[1]: torch.randn(parts.batch, w.shape[1], dtype=w.dtype) for w in weights}

    def run() -> None:
        with torch.inference_mode():
            for weight in weights:
                torch.mm(inputs[weight.shape[1]], weight.t())

    return run


def best(call: Callable[[], object], rounds: int) -> float:
    """Seconds."""
    call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def rates(threads: int, weights: np.ndarray, rounds: int) -> tuple[float, float]:
    """Operations of products in the cores' own memory, and bytes of weights that are read, a second."""
    times, depth, width = 500, 64, weights.shape[3]
    weight = np.zeros((1, threads, depth, width), weights.dtype)
    a, out = np.zeros((64, depth), np.float32), np.zeros((64, threads * width), np.float32)
    seconds = best(lambda: _multiply_again(times, a, weight, np.empty((1, 0), np.float32), out, threads), rounds)
    numbers = weights.reshape(-1).view(np.int64)
    reading = best(lambda: _read(numbers, np.zeros(64, np.int64), threads), rounds)
    return 2 * times * a.shape[0] * weight.size / seconds, weights.nbytes / reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=56, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = Rows("rollout_cpu_parts", "cpu", args.out)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "model", args.shape)
        for dtype in kernel_types():
            report(rows, args.shape, Parts(path, dtype, args.batch, args.length, args.threads), args.rounds)


def report(rows: Rows, shape: str, parts: Parts, rounds: int) -> None:
    """A row for each part, with its operations and bytes; for the step, with what it takes at least for either."""
    w = parts.runner._weights
    assert w is not None
    kind = str(parts.runner.model.head_weight().dtype).removeprefix("torch.")
    label = f"{shape}, {parts.batch} sequences of {parts.length} tokens"

    def add(part: str, seconds: float, **more: Any) -> None:
        rows.add(label, f"{kind}, {part}", "best", 1e3 * seconds, "ms", rounds=rounds, **more)

    multiplying, reading = rates(parts.threads, w.gate_up, rounds)
    operations = num_bytes = 0.0
    for name, (call, wanted, size) in parts.calls().items():
        add(name, best(call, rounds), operations=wanted, bytes=size)
        operations, num_bytes = operations + wanted, num_bytes + size
    add(
        "step", best(parts.step, rounds), operations=operations, bytes=num_bytes,
        least_ms_for_operations=1e3 * operations / multiplying, least_ms_for_bytes=1e3 * num_bytes / reading,
    )  # fmt: skip
    add(f"prefill of {parts.batch} prompts of {_PROMPT} tokens", best(parts.prefill, 1))
    add("all products of a step by torch", best(torch_products(parts), rounds))
    regions = 1000
    add("a call of the threads", best(lambda: _regions(regions, parts.ends, parts.threads), rounds) / regions)


if __name__ == "__main__":
    main()
