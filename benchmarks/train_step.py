"""Tokens per second and MFU of a whole GRPO update on one GPU, beside the same update in plain `transformers`.

    python benchmarks/train_step.py --shapes qwen3-0.6b qwen3-1.7b [--rival] [--park] [--profile] [--out results.jsonl]

An update is the forward of a pack of about `--tokens` tokens (sequences of about `--length`, each with a prompt of
`--prompt` tokens that is not trained and not shared), chunked log-probs, GRPO loss, backward, gradient norm and
clipping, AdamW. Weights are random, made on the device. MFU counts 6 x parameters for every token (the head's for
trained tokens only) and the causal attention's 12 x layers x heads x head size x mean keys seen, without what is
computed twice, over the rate of a bfloat16 product of 8192^3 measured in the same run. The rival is Qwen3 of
`transformers` in bfloat16 with gradient checkpointing and torch's fused AdamW, micro-batches of `--micro` padded
sequences. The two take turns. Prints JSON rows.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_model import write_random_config
from rows import Rows
from torch import Tensor

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto import PackedBatch, SegmentLayout
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.loss import GRPOLossConfig

DEVICE = torch.device("cuda")


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(timed(lambda: torch.mm(a, b)) for _ in range(10))
    return 2 * 8192**3 / seconds


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def sequence_lengths(total: int, mean: int) -> list[int]:
    """Lengths spread evenly between 3/4 and 5/4 of `mean`, in a fixed mixed order."""
    count = max(1, total // mean)
    spread = [int(mean * (0.75 + 0.5 * (i + 0.5) / count)) for i in range(count)]
    return [spread[i * 7 % count] for i in range(count)] if count % 7 else spread


def make_pack(lengths: list[int], prompt: int, vocab: int, rng: torch.Generator) -> PackedBatch:
    rows = sum(lengths)
    ids = torch.randint(3, vocab, (rows,), generator=rng)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    targets = [torch.arange(s + prompt - 1, s + n - 1) for s, n in zip(starts, lengths, strict=True)]
    target_rows = torch.cat(targets)
    count = target_rows.numel()
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor([t.numel() for t in targets]))
    return PackedBatch(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        layout=SegmentLayout(lengths, [-1] * len(lengths)),
        target_rows=target_rows,
        labels=ids[target_rows + 1],
        advantages=torch.randn(len(lengths), generator=rng)[samples],
        inv_temperature=torch.ones(count),
        sample_index=samples,
        rollout_ids=list(range(len(lengths))),
    ).to(DEVICE)


class Ours:
    def __init__(self, folder: Path, pack: PackedBatch, args: argparse.Namespace, sp_size: int = 1) -> None:
        fsdp = FSDPConfig(
            torch_compile=args.compile, recompute_ratio=args.recompute, **dict(pair.split("=") for pair in args.fsdp)
        )
        config = get_model_config_from_hf(folder)
        device = torch.device("cuda", torch.cuda.current_device())
        optimizer = AdamWConfig(lr=1e-6, **dict(pair.split("=") for pair in args.optim))
        self.engine = TrainEngine(
            config, fsdp, device=device, optim_cfg=optimizer, lr_cfg=LRConfig(), chunk_size=args.chunk, sp_size=sp_size
        )
        randomise(self.engine.model)
        self.loss = GRPOLossConfig(policy_loss_cfg=dict(cliprange_low=0.2, cliprange_high=0.28), mode="chunk")
        self.pack = pack

    def __call__(self) -> None:
        logprobs, _ = self.engine.forward(self.pack)
        weights = torch.full_like(self.pack.advantages, 1 / self.pack.num_targets)
        loss, _ = self.loss.policy_loss(logprobs, logprobs.detach(), self.pack.advantages, weights)
        self.engine.backward(loss)
        self.engine.step()


class Rival:
    def __init__(self, folder: Path, pack: PackedBatch, prompt: int, micro: int) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        with DEVICE:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model = model.train()
        randomise(self.model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        ids = pack.input_ids.split(pack.layout.lengths)
        order = sorted(range(len(ids)), key=lambda i: ids[i].numel())
        self.prompt, self.count = prompt, pack.num_targets
        groups = [order[i : i + micro] for i in range(0, len(order), micro)]
        self.batches = [self._pad([ids[i] for i in group]) for group in groups]

    def _pad(self, ids: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and mask [B, L], and which targets count."""
        longest = max(t.numel() for t in ids)
        padded = torch.zeros(len(ids), longest, dtype=torch.int64, device=DEVICE)
        mask = torch.zeros_like(padded)
        for row, t in enumerate(ids):
            padded[row, : t.numel()], mask[row, : t.numel()] = t, 1
        wanted = mask.clone()
        wanted[:, : self.prompt] = 0
        return padded, mask, wanted[:, 1:].bool()

    def __call__(self) -> None:
        for ids, mask, wanted in self.batches:
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][wanted]
            labels = ids[:, 1:][wanted]
            logprobs = -torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio.sum() / self.count)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02)


def update_flops(model: torch.nn.Module, config: Any, pack: PackedBatch) -> float:
    head = config.vocab_size * config.hidden_size
    sizes = {n: p.numel() for n, p in model.named_parameters() if not n.startswith(("embed_tokens", "lm_head"))}
    experts = sum(size for n, size in sizes.items() if ".experts." in n)
    # A token meets a few of the experts.
    unused = experts * (1 - config.num_experts_per_tok / config.n_routed_experts) if experts else 0
    body = sum(sizes.values()) - unused
    a = config.attention
    seen = sum(n * (n + 1) / 2 for n in pack.layout.lengths)
    attention = 12 * config.num_hidden_layers * a.num_attention_heads * a.head_dim * seen
    return 6 * body * pack.input_ids.numel() + 6 * head * pack.num_targets + attention


def measure(rows: Rows, shape: str, args: argparse.Namespace) -> None:
    rng = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_config(Path(name) / "model", shape)
        config = get_model_config_from_hf(folder)
        pack = make_pack(sequence_lengths(args.tokens, args.length), args.prompt, config.vocab_size, rng)
        tokens = pack.input_ids.numel()
        ours = Ours(folder, pack, args)
        work: dict[str, Callable[[], None]] = {"xtuner": ours}
        if args.rival:
            work["transformers"] = Rival(folder, pack, args.prompt, args.micro)
        flops = update_flops(ours.engine.model, config, pack)
        peak: dict[str, float] = {}
        for case, update in work.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if case != "xtuner" else 0
            first = timed(update)
            update()
            peak[case] = (torch.cuda.max_memory_allocated() - before) / 2**30
            print(f"# {shape} {case}: first update {first:.1f} s", flush=True)
        seconds: dict[str, list[float]] = {case: [] for case in work}
        for _ in range(args.rounds):
            for case, update in work.items():
                seconds[case].append(timed(update))
        rate = matmul_rate()
        label = f"{shape}, {tokens} tokens in {len(pack.layout.lengths)} sequences, {pack.num_targets} trained"
        medians = {case: statistics.median(s) for case, s in seconds.items()}
        for case, median in medians.items():
            more = {"rounds": args.rounds, "step_s": median, "matmul_tflops": rate / 1e12}
            more |= {"recompute": args.recompute, "compile": args.compile} if case == "xtuner" else {}
            rows.add(label, case, "throughput", tokens / median, "tokens/s", **more)
            rows.add(label, case, "MFU", 100 * flops / median / rate, "% of the matmul rate", **more)
            rows.add(label, case, "peak memory", peak[case], "GiB", **more)
        if args.rival:
            ratios = [b / a for a, b in zip(seconds["xtuner"], seconds["transformers"], strict=True)]
            rows.add(label, "xtuner / transformers", "ratio of tokens/s, median", statistics.median(ratios), "x")
        if args.park:
            park(rows, label, ours.engine)
        if args.profile:
            profile(ours)


def park(rows: Rows, label: str, engine: TrainEngine) -> None:
    """GB/s of weights and moments to the host and back; the first time allocates the pinned memory."""
    for turn in ("first", "second", "third"):
        away, back = timed(engine.offload), timed(engine.onload)
        rates = engine.parking.rates()
        for direction, rate in rates.items():
            seconds = {"offload_s": away, "onload_s": back}
            rows.add(label, f"xtuner, {turn} time", f"parking, {direction}", rate, "GB/s", **seconds)


def profile(update: Callable[[], None]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as Profile

    with Profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        timed(update)
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--recompute", type=float, default=0.0)
    parser.add_argument("--fsdp", nargs="*", default=[], help="more FSDPConfig fields, field=value")
    parser.add_argument("--optim", nargs="*", default=[], help="more AdamWConfig fields, field=value")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--park", action="store_true", help="also weights and moments to the host and back")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("train_step", "cuda", args.out)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    for shape in args.shapes:
        measure(rows, shape, args)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
