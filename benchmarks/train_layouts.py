"""A training update on several GPUs of one host, beside the same update on one of them.

    python benchmarks/train_layouts.py [--shape qwen3-1.7b] [--gpus 2] [--layouts dp sp tp] [--out results.jsonl]

Every layout and the one card are runs of their own, one after the other. The update is that of `train_step.py`: a pack
of `--tokens` tokens for every data rank, so `dp` trains `--gpus` packs and `sp`, `tp` one that all cards share. A
figure is tokens a second and card, and its share of the one card's. Prints JSON rows.
"""

import argparse
import json
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_model import write_random_config
from rows import Rows
from train_step import Ours, make_pack, sequence_lengths, timed

from xtuner.v1.model import get_model_config_from_hf

LAYOUTS: dict[str, tuple[list[str], bool]] = {
    "one": ([], False), "dp": ([], False), "hsdp": (["hsdp_sharding_size=1"], False), "sp": ([], True),
    "tp": (["tp_size={gpus}"], False), "ep": (["ep_size={gpus}"], False),
}  # fmt: skip
"""FSDPConfig fields, and whether all cards share a sequence."""


def work(rank: int, world: int, port: int, layout: str, args: argparse.Namespace, answer: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    fields, shares = LAYOUTS[layout]
    args.fsdp = [*args.fsdp, *(field.format(gpus=world) for field in fields)]
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_config(Path(name) / "model", args.shape)
        vocab = get_model_config_from_hf(folder).vocab_size
        one_pack = shares or "tp_size" in " ".join(fields)
        rng = torch.Generator().manual_seed(0 if one_pack else rank)
        pack = make_pack(sequence_lengths(args.tokens, args.length), args.prompt, vocab, rng)
        update = Ours(folder, pack, args, sp_size=world if shares else 1)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            update()
        seconds = []
        for _ in range(args.rounds):
            dist.barrier()
            seconds.append(timed(update))
    packs = 1 if one_pack else world
    result = {
        "tokens": packs * pack.input_ids.numel(), "seconds": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip
    if rank == 0:
        Path(answer).write_text(json.dumps(result))
    dist.destroy_process_group()


def run(layout: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        mp.start_processes(work, (world, port, layout, args, str(answer)), nprocs=world, start_method="spawn")
        return json.loads(answer.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--layouts", nargs="+", default=["dp", "sp", "tp"], choices=[*LAYOUTS][1:])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--recompute", type=float, default=0.0)
    parser.add_argument("--fsdp", nargs="*", default=[], help="more FSDPConfig fields, field=value")
    parser.add_argument("--optim", nargs="*", default=[], help="more AdamWConfig fields, field=value")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = Rows("train_layouts", "cuda", args.out)
    one = None
    for layout in ("one", *args.layouts):
        world = 1 if layout == "one" else args.gpus
        try:
            result = run(layout, world, args)
        except Exception as error:
            print(f"# {layout}: {error}", flush=True)
            continue
        rate = result["tokens"] / statistics.median(result["seconds"]) / world
        one = one or rate
        label = f"{args.shape}, {args.tokens} tokens a pack, sequences of about {args.length}"
        more = {"gpus": world, "seconds": result["seconds"], "peak_gib": result["peak_gib"]}
        rows.add(label, layout, "throughput of a card", rate, "tokens/s", **more)
        rows.add(label, f"{layout} / one", "throughput of a card", 100 * rate / one, "%")


if __name__ == "__main__":
    main()
