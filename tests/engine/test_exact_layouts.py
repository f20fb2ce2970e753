"""Exact log-probs have the bits of one process where rows, heads or experts lie on several ranks, in any packs."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xtuner.v1.config import FSDPConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import DenseModelConfig, MHAConfig, MoEModelConfig
from xtuner.v1.ops.cpu import cpu_kernels_available
from xtuner.v1.rl.trainer import pack_samples

from .helpers import make_samples, on_ranks

pytestmark = pytest.mark.skipif(not cpu_kernels_available(), reason="exact operations on a CPU are Numba's")

_SHAPE = dict(vocab_size=61, max_position_embeddings=256, hidden_size=32, num_hidden_layers=2)
_HEADS = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True)
DENSE = DenseModelConfig(model_type="qwen3", attention=_HEADS, intermediate_size=48, **_SHAPE)
EXPERTS = MoEModelConfig(
    attention=_HEADS, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, **_SHAPE
)
# Model, ranks a pack, whether experts are cut, type of compute, whether prompts are shared.
CASES = {
    "dense": (DENSE, 1, False, torch.float32, True),
    "dense, rows on all ranks": (DENSE, 2, False, torch.float32, False),
    "dense, rows on all ranks, half precision": (DENSE, 2, False, torch.bfloat16, True),
    "experts": (EXPERTS, 1, False, torch.float32, False),
    "experts on all ranks": (EXPERTS, 1, True, torch.float32, True),
    "experts and rows on all ranks": (EXPERTS, 2, True, torch.bfloat16, False),
}


def logprobs(_: Path) -> dict[str, dict[int, torch.Tensor]]:
    """By case and sample, those that this rank computes."""
    out, world = {}, dist.get_world_size()
    samples = make_samples(9)
    samples += [sample for sample in make_samples(3) if not setattr(sample, "rollout_id", sample.rollout_id + 100)]
    for name, (config, sp_size, cut, dtype, share) in CASES.items():
        sp_size = min(sp_size, world)
        fsdp = FSDPConfig(torch_compile=False, cpu_param_dtype=dtype, ep_size=world if cut else 1)
        engine = TrainEngine(config, fsdp, device=torch.device("cpu"), chunk_size=7, sp_size=sp_size, exact=True)
        engine.model.init_weights(seed=7, std=0.3)
        packs = pack_samples(
            samples, ranks=world // sp_size, optimizer_steps=1, pack_max_length=70 if share else 40, hidden_size=32,
            share_prompts=share != (world > 1), seed=world,
        )[dist.get_rank() // sp_size][0]  # fmt: skip
        out[name] = {}
        for pack in packs:
            values = engine.logprobs(pack)
            for index, rollout_id in enumerate(pack.rollout_ids):
                out[name][rollout_id] = values[pack.sample_index == index].clone()
    return out


def test_any_layout_has_the_bits_of_one_process(tmp_path):
    one = logprobs(tmp_path)
    two = on_ranks(2, logprobs, tmp_path)
    for name, expected in one.items():
        got = two[0][name] | two[1][name]
        assert got.keys() == expected.keys() and len(got) == 12
        for rollout_id, values in expected.items():
            assert torch.equal(got[rollout_id], values), (name, rollout_id)
            if rollout_id >= 100:
                assert torch.equal(values, expected[rollout_id - 100]), "a sample and its double in another pack"
