"""A tiny model and packs for engine tests, and processes that train together."""

import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.trainer.packing import pack_samples
from xtuner.v1.rl.trainer.samples import IGNORE, TrainingSample

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": True,
    "eos_token_id": 1, "architectures": ["Qwen3ForCausalLM"], "dtype": "float32",
}  # fmt: skip


def config_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"config-{os.getpid()}"
    mine.write_text(json.dumps(CONFIG))
    mine.replace(folder / "config.json")  # whole at any time: every rank writes and reads it
    return folder


def make_engine(folder: Path, **kw) -> TrainEngine:
    """An engine with the same random weights every time."""
    fsdp = FSDPConfig(recompute_ratio=kw.pop("recompute_ratio", 0.0), torch_compile=False, **kw.pop("fsdp", {}))
    settings = dict(optim_cfg=AdamWConfig(lr=1e-2), lr_cfg=LRConfig(warmup_ratio=0), total_optimizer_steps=10)
    engine = TrainEngine(
        get_model_config_from_hf(config_folder(folder)), fsdp, device=torch.device("cpu"), **(settings | kw)
    )
    engine.model.init_weights(seed=7)
    return engine


def make_samples(count: int, seed: int = 0) -> list[TrainingSample]:
    gen = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        p, r = (int(torch.randint(2, 9, (), generator=gen)) for _ in range(2))
        ids = torch.randint(2, 60, (p + r,), generator=gen).tolist()
        labels = [IGNORE] * (p - 1) + ids[p:]
        advantage = float(torch.randn((), generator=gen))
        out.append(TrainingSample(i, ids[:-1], labels, [advantage] * len(labels), None, p))
    return out


def packs_of(samples, ranks=1, steps=1, length=64, share=False):
    return pack_samples(
        samples, ranks=ranks, optimizer_steps=steps, pack_max_length=length, hidden_size=32, share_prompts=share
    )


def gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for n, p in engine.model.named_parameters()
    }


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {n: t.clone() for b in engine.weight_buckets(1 << 30, torch.float32) for n, t in b.tensors.items()}


def on_ranks(world: int, run: Callable[[Path], Any], folder: Path) -> list[Any]:
    """What `run(folder)` gives in each of `world` processes of one gloo group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Forked by a server that has imported everything once: importing torch takes longer than the tests.
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_rank, (world, port, run, folder), nprocs=world, start_method="forkserver")
    return [torch.load(_result(folder, world, rank), weights_only=True) for rank in range(world)]


def _rank(rank: int, world: int, port: int, run: Callable[[Path], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.save(run(folder), _result(folder, world, rank))
    dist.destroy_process_group()


def _result(folder: Path, world: int, rank: int) -> Path:
    return folder / f"rank-{rank}-of-{world}.pt"


def same_on_all(results: list[dict[Any, dict[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """The results of rank 0, whose numbers and weights those of the other ranks must equal."""
    first, *others = results
    for other in others:
        for key, result in first.items():
            for name in result.keys() & {"norms", "metrics"}:
                assert other[key][name] == result[name], (key, name)
            for name, tensor in result["weights"].items():
                assert torch.equal(other[key]["weights"][name], tensor), (key, name)
    return first
