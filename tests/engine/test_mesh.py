"""Sizes of a mesh: what they come to, and what is refused."""

import pytest
import torch

from xtuner.v1.config import FSDPConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.engine.mesh import MeshSizes
from xtuner.v1.model import DenseModelConfig, MHAConfig, MLAConfig
from xtuner.v1.model.row_order import RowOrder
from xtuner.v1.model.splits import split_problems


@pytest.mark.parametrize(
    "fields, sp, world, expected",
    [
        ({}, 1, 1, MeshSizes(1, 1, 1, 1)),
        ({"tp_size": 2}, 4, 64, MeshSizes(1, 8, 4, 2)),
        ({"hsdp_sharding_size": 8}, 2, 64, MeshSizes(8, 4, 2, 1)),
        ({"hsdp_sharding_size": 4, "tp_size": 2}, 1, 16, MeshSizes(2, 4, 1, 2)),
        ({"ep_size": 4}, 2, 8, MeshSizes(1, 4, 2, 1, 4)),
    ],
)
def test_sizes(fields, sp, world, expected):
    sizes = MeshSizes.of(FSDPConfig(**fields), sp, world)
    assert sizes == expected and sizes.world == world and sizes.data * sizes.pack == world


@pytest.mark.parametrize(
    "fields, sp, world, message",
    [
        ({"tp_size": 2}, 3, 8, "tp_size=2 x sp_size=3 does not divide num_workers=8; use a multiple of 6 workers"),
        ({"hsdp_sharding_size": 3}, 1, 8, "hsdp_sharding_size=3 does not divide num_workers=8; use a divisor of 8"),
        ({"hsdp_sharding_size": 8, "tp_size": 2}, 1, 8, "divide num_workers=8 / tp_size=2; use a divisor of 4"),
        ({"hsdp_sharding_size": 2}, 4, 8, "hsdp_sharding_size=2 is no multiple of sp_size=4"),
        ({"ep_size": 2, "tp_size": 2}, 1, 8, "ep_size=2 needs tp_size=1, not 2"),
        ({"ep_size": 3}, 1, 8, "ep_size=3 does not divide num_workers=8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(fields, sp, world, message):
    with pytest.raises(ValueError, match=message):
        MeshSizes.of(FSDPConfig(**fields), sp, world)


def model(heads: int, kv_heads: int, inner: int = 96) -> DenseModelConfig:
    attention = MHAConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, qk_norm=True)
    return DenseModelConfig(
        vocab_size=61, max_position_embeddings=64, num_hidden_layers=1, hidden_size=32, intermediate_size=inner,
        attention=attention,
    )  # fmt: skip


@pytest.mark.parametrize(
    "heads, kv_heads, tp, sp, message",
    [
        (8, 2, 4, 1, "tp_size=4 does not divide the model's num_key_value_heads=2; use one of 1, 2."),
        (12, 12, 8, 1, "tp_size=8 does not divide the model's num_attention_heads=12; use one of 1, 2, 3, 4, 6, 12."),
        (6, 6, 1, 4, "sp_size=4 does not divide the model's num_attention_heads=6; use one of 1, 2, 3, 6."),
        (8, 4, 2, 8, "sp_size=8 does not divide the model's num_attention_heads=8 / tp_size=2; use one of 1, 2, 4."),
        (12, 4, 1, 6, "sp_size=6 is neither a divisor nor a multiple of the model's num_key_value_heads=4; use one of "
         "1, 2, 4, 12."),
        (5, 5, 5, 1, "tp_size=5 does not divide the model's intermediate_size=96; use 1."),
        (8, 2, 2, 4, None),
        (8, 2, 1, 8, None),
    ],
)
def test_a_model_says_why_it_cannot_be_cut(heads, kv_heads, tp, sp, message):
    problems = split_problems(model(heads, kv_heads), tp, sp)
    assert not problems if message is None else message in problems


def test_the_engine_refuses_before_it_builds():
    with pytest.raises(ValueError, match="sp_size=3 does not divide the model's num_attention_heads=4"):
        TrainEngine(model(4, 2), FSDPConfig(), device=torch.device("cpu"), sp_size=3)


def test_latent_attention_has_as_many_key_heads_as_query_heads():
    attention = MLAConfig(num_attention_heads=6, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    assert split_problems(model(6, 6).model_copy(update={"attention": attention}), 1, 3) == []


def test_cut_rows_hold_a_part_of_every_section_and_are_put_back():
    order = RowOrder((4, 2, 2), 2)
    whole = torch.tensor([[10], [11], [12], [13], [20], [21], [30], [31]])
    stored = torch.cat([whole[start : start + size] for _, start, size in order.runs()])
    assert stored.flatten().tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert torch.equal(order.restore(stored), whole)
