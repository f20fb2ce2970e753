"""Two gloo processes against one: same gradients, same weights, checkpoints that change ranks."""

from pathlib import Path

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
    return {"trained": full, "from_one": moved, "summed in half precision": seen}


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
    single = weights(one)
    for name, tensor in single.items():
        torch.testing.assert_close(result["trained"][name], tensor, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(result["from_one"][name], tensor), name
    back = make_engine(tmp_path / "m")
    load_train_state(back, tmp_path / "two")
    for name, tensor in weights(back).items():
        assert torch.equal(result["trained"][name], tensor), name
