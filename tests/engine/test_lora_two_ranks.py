"""Adapters on two gloo processes: the gradients of one, and files that do not tell how many wrote them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import LoRAConfig
from xtuner.v1.engine import load_train_state, save_train_state
from xtuner.v1.engine.frozen import fingerprint
from xtuner.v1.model.hf import iter_hf_tensors

from .helpers import make_engine, make_samples, on_ranks, packs_of

# Changes of the engine; the last but one shards nothing, the last gathers bfloat16 beside float32.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "sp": {"sp_size": 2},
    "replicas": {"fsdp": {"hsdp_sharding_size": 1}},
    "bf16": {"fsdp": {"cpu_param_dtype": "bfloat16"}, "recompute_ratio": 1.0},
}


def engine_of(name: str, folder: Path, one_rank: bool):
    changes = LAYOUTS[name]
    if one_rank:
        changes = {"fsdp": {k: v for k, v in changes.get("fsdp", {}).items() if k != "hsdp_sharding_size"}}
    lora = LoRAConfig(rank=3, alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    return make_engine(folder / f"model-{dist.get_rank()}", lora_cfg=lora, **changes)


def train(engine, steps: range) -> list[dict[str, torch.Tensor]]:
    """Gradients of every step."""
    gradients = []
    for step in steps:
        samples = make_samples(9, seed=step)
        total = sum(s.num_trained for s in samples)
        packs = packs_of(samples, ranks=engine.mesh.sizes.data, length=40, share=True)
        for pack in packs[engine.mesh.data_rank][0]:
            logprobs, _ = engine.forward(pack)
            engine.backward(-(pack.advantages * logprobs).sum() / total)
        trained = ((n, p) for n, p in engine.model.named_parameters() if p.requires_grad)
        gradients.append({name: p.grad.full_tensor().clone() for name, p in trained})
        engine.step()
    return gradients


def outcome(name: str, folder: Path, mine: str, theirs: str, one_rank: bool) -> dict[str, Any]:
    """Train, save as `mine`; then, if it is there, continue from `theirs`."""
    engine = engine_of(name, folder, one_rank)
    before = fingerprint(engine.model)
    result: dict[str, Any] = {"gradients": train(engine, range(2))}
    result["fingerprints"] = [before, fingerprint(engine.model)]
    engine.save_hf(folder / f"{mine}-hf", folder / "model-0", torch.float32)
    save_train_state(engine, folder / mine)
    if (folder / theirs).exists():
        resumed = engine_of(name, folder, one_rank)
        load_train_state(resumed, folder / theirs)
        result["resumed"] = train(resumed, range(2, 3))
    else:
        result["further"] = train(engine, range(2, 3))
    return result


def outcomes(folder: Path) -> dict[str, Any]:
    return {name: outcome(name, folder, f"two-{name}", f"one-{name}", False) for name in LAYOUTS}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """(folder, one process, two processes)"""
    folder = tmp_path_factory.mktemp("lora")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = {name: outcome(name, folder, f"one-{name}", "nothing", True) for name in LAYOUTS}
    dist.destroy_process_group()
    return folder, one, on_ranks(2, outcomes, folder)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_equal_one(results, name):
    folder, one, two = results
    tolerance = {"rtol": 5e-2, "atol": 2e-3} if name == "bf16" else {"rtol": 1e-3, "atol": 1e-5}
    pairs = zip(
        one[name]["gradients"] + one[name]["further"], two[name]["gradients"] + two[name]["resumed"], strict=True
    )
    for step, (single, double) in enumerate(pairs):
        assert single.keys() == double.keys()
        for key, grad in single.items():
            torch.testing.assert_close(double[key], grad, msg=f"step {step}, {key}", **tolerance)
    assert len({*one[name]["fingerprints"], *two[name]["fingerprints"]}) == 1, "the base is untouched and recognised"
    for file in ("adapter", "."):
        single, double = (_tensors(folder / f"{who}-{name}-hf" / file) for who in ("one", "two"))
        assert single.keys() == double.keys() and len(single) > 10
        for key, tensor in single.items():
            torch.testing.assert_close(double[key], tensor, **tolerance)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if folder.name != "adapter":
        return dict(iter_hf_tensors(folder))
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_a_checkpoint_of_two_goes_on_alone(results):
    folder, one, _ = results
    engine = engine_of("dp", folder, True)
    load_train_state(engine, folder / "two-dp")
    (gradients,) = train(engine, range(2, 3))
    for key, grad in one["dp"]["further"][0].items():
        torch.testing.assert_close(gradients[key], grad, rtol=1e-3, atol=1e-5)
