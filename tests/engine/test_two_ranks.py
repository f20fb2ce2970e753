"""Two gloo processes against one: same gradients, same weights, checkpoints that change ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.engine import load_train_state, save_train_state

from .helpers import gradients, make_engine, make_samples, on_ranks, packs_of, weights


def _train(engine, rank, ranks, steps):
    for step in range(steps):
        samples = make_samples(9, seed=step)
        total = sum(s.num_trained for s in samples)
        for pack in packs_of(samples, ranks=ranks, length=40)[rank][0]:
            logprobs, _ = engine.forward(pack)
            engine.backward(-(pack.advantages * logprobs).sum() / total)
        engine.step()


def _two(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(path / f"m{rank}")
    _train(engine, rank, world, 2)
    save_train_state(engine, path / "two")
    full = weights(engine)
    from_one = make_engine(path / f"m{rank}")
    load_train_state(from_one, path / "one")
    moved = weights(from_one)
    selective = make_engine(path / f"m{rank}", recompute_ratio=1.0, fsdp={"recompute": "selective"})
    _train(selective, rank, world, 2)
    for name, tensor in weights(selective).items():
        assert torch.equal(full[name], tensor), name
    halves = make_engine(path / f"m{rank}", fsdp={"cpu_reduce_dtype": "bfloat16"})
    seen = {}
    halves.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(halves)))
    _train(halves, rank, world, 1)
    return {"trained": full, "from_one": moved, "summed in half precision": seen} | _replicas(path)


def _replicas(path: Path) -> dict[str, Any]:
    """Gradients of an update of three packs a rank where both ranks hold the whole model, and exchanges it took."""
    engine, calls, reduce = make_engine(path / "replica", fsdp={"hsdp_sharding_size": 1}), [], dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kw: calls.append(tensor.numel()) or reduce(tensor, *args, **kw)
    packs = packs_of(make_samples(40), ranks=2, length=40)[dist.get_rank()][0]
    for index, pack in enumerate(packs):
        logprobs, _ = engine.forward(pack)
        engine.backward(-(pack.advantages * logprobs).sum() / 100, last=index == len(packs) - 1)
    dist.all_reduce = reduce
    assert len(packs) > 2 and len(calls) == len(engine.model.layers) + 1
    assert sum(calls) == sum(p.numel() for p in engine.model.parameters())
    found = gradients(engine)
    engine.step()
    engine.backward(sum(p.to_local().sum() for p in engine.model.parameters()), last=False)
    with pytest.raises(RuntimeError, match="last=False"):
        engine.step()
    return {"replicas": found}


def test_two_ranks_equal_one(tmp_path):
    one = make_engine(tmp_path / "m")
    exact = {}
    hook = one.optimizer.register_step_pre_hook(lambda *_: exact.update(gradients(one)))
    _train(one, 0, 1, 1)
    hook.remove()
    one = make_engine(tmp_path / "m")
    _train(one, 0, 1, 2)
    save_train_state(one, tmp_path / "one")
    result = on_ranks(2, _two, tmp_path)[0]
    for name, grad in result["summed in half precision"].items():
        # Clipping comes after: what was rounded is no longer a bfloat16, but is off by no more.
        assert 1e-4 < (grad - exact[name]).norm() / exact[name].norm() < 1e-2, name
    replica = make_engine(tmp_path / "m")
    for pack in packs_of(make_samples(40), length=4000)[0][0]:
        logprobs, _ = replica.forward(pack)
        replica.backward(-(pack.advantages * logprobs).sum() / 100)
    for name, grad in gradients(replica).items():
        torch.testing.assert_close(result["replicas"][name], grad, rtol=1e-4, atol=1e-6, msg=name)
    single = weights(one)
    for name, tensor in single.items():
        torch.testing.assert_close(result["trained"][name], tensor, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(result["from_one"][name], tensor), name
    back = make_engine(tmp_path / "m")
    load_train_state(back, tmp_path / "two")
    for name, tensor in weights(back).items():
        assert torch.equal(result["trained"][name], tensor), name
