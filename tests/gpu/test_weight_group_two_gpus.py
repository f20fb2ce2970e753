"""An update from the trainer's GPU to an engine on another one, through NCCL: every weight to the bit."""

import asyncio
import multiprocessing
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors, weight_views
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.weight_update import Line, receive_weights, send_weights, with_checksums

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def joined(store, rank):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.FileStore(str(store), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    return device, dist.group.WORLD


def trainer(line, store, folder):
    device, group = joined(store, 0)
    weights = [(name, tensor.to(device)) for name, tensor in iter_hf_tensors(folder)]
    for version in (1, 2, 3):
        buckets = (WeightBucket(dict(weights[first : first + 40])) for first in range(0, len(weights), 40))
        start = time.perf_counter()
        send_weights(with_checksums(buckets) if version == 1 else buckets, line, version, "group", device, group)
        print(f"version {version}: {time.perf_counter() - start:.4f} s", flush=True)
    dist.destroy_process_group()


def rollout(line, store, folder, results):
    device, group = joined(store, 1)
    engine = NativeEngine(
        folder, device="cuda", max_batch_size=4, context_length=64, load_weights=False, gpu_memory_utilization=0.2
    )
    asyncio.run(engine.start())
    for version in (1, 2, 3):
        asyncio.run(receive_weights(engine, line, device, version, group))
    wanted = dict(iter_hf_tensors(folder))
    views = weight_views(engine._model)
    differ = [name for name, view in views.items() if not torch.equal(view.cpu(), wanted[name].to(view.dtype))]
    results.put((engine.version, len(views), differ))
    asyncio.run(engine.stop())
    dist.destroy_process_group()


def test_every_weight_arrives(tmp_path):
    from random_model import write_random_model

    folder = write_random_model(tmp_path / "model", "qwen3-0.6b", "cuda")
    context, (one, other) = multiprocessing.get_context("spawn"), Line.pair(60.0)
    results = context.Queue()
    processes = [
        context.Process(target=trainer, args=(one, tmp_path / "store", folder)),
        context.Process(target=rollout, args=(other, tmp_path / "store", folder, results)),
    ]
    for process in processes:
        process.start()
    version, count, differ = results.get(timeout=120)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert version == 3 and count > 300 and not differ
