"""Updates between two ranks of a process group: whole ones arrive to the bit, one that breaks off leaves no engine that
serves."""

import asyncio
import datetime
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from update_helpers import CPU, grouped, held, serves, started, write_model

from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.ops.bit_sums import bit_sums
from xtuner.v1.rl.weight_update import Line, WeightUpdateError, receive_weights, send_weights, with_checksums


def joined(store, rank):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timeout)
    return dist.group.WORLD


def trainer(line, store, folder, results):
    group, tensors = joined(store, 0), dict(iter_hf_tensors(folder))
    send_weights(with_checksums(grouped(tensors)), line, 5, "group", CPU, group)
    try:
        lacking = dict(list(tensors.items())[:-1])
        send_weights(grouped(lacking), line, 6, "group", CPU, group)
    except WeightUpdateError as error:
        results.put(("trainer", str(error)))
    send_weights(grouped({n: 2 * t for n, t in tensors.items()}, parts=1), line, 7, "group", CPU, group)
    dist.destroy_process_group()


def rollout(line, store, folder, results):
    group, engine = joined(store, 1), started(folder, load_weights=False)
    asyncio.run(receive_weights(engine, line, CPU, 5, group))
    results.put((engine.version, bit_sums(list(held(engine).values())).tolist()))
    with pytest.raises(WeightUpdateError):
        asyncio.run(receive_weights(engine, line, CPU, 6, group))
    results.put((engine.version, serves(engine)))
    asyncio.run(receive_weights(engine, line, CPU, 7, group))
    results.put((engine.version, bit_sums(list(held(engine).values())).tolist()))
    dist.destroy_process_group()


def test_updates_go_to_the_other_rank(tmp_path):
    old, new = (write_model(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    tensors, order = dict(iter_hf_tensors(new)), list(held(started(old)))
    context, (one, other) = multiprocessing.get_context("spawn"), Line.pair(60.0)
    results = context.Queue()
    processes = [
        context.Process(target=trainer, args=(one, tmp_path / "store", new, results)),
        context.Process(target=rollout, args=(other, tmp_path / "store", old, results)),
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=100) for _ in range(4)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    (complaint,) = (text for who, text in found if who == "trainer")
    assert "version 6" in complaint and "1 missing" in complaint
    whole, broken, again = (entry for entry in found if entry[0] != "trainer")
    assert whole == (5, bit_sums([tensors[n] for n in order]).tolist())
    assert broken[0] == 5 and "not complete" in broken[1]
    assert again == (7, bit_sums([2 * tensors[n] for n in order]).tolist())
