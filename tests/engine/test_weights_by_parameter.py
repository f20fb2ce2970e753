"""Whole parameters from two ranks, by their own names, are what a checkpoint's names would have brought."""

from pathlib import Path
from typing import Any

import pytest
import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, LoRAConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.rl.rollout.backends.native.weights import WeightReceiver, lay_out_by_input
from xtuner.v1.rl.weight_update import Line, Witness, send_weights, with_checksums, write_weights

from .helpers import CONFIG, make_engine, on_ranks
from .test_weight_source import DEEPSEEK

GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    max_position_embeddings=256, eos_token_id=1,
)  # fmt: skip
BF16 = {"cpu_param_dtype": "bfloat16"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense": (CONFIG, {}, {}),
    "dense, cut matrices": (CONFIG | {"tie_word_embeddings": False}, {"tp_size": 2} | BF16, {}),
    "adapters": (CONFIG, {}, {"lora_cfg": LoRAConfig(rank=4, alpha=16)}),
    "experts": (DEEPSEEK, {}, {}),
    "experts on two": (DEEPSEEK, {"ep_size": 2} | BF16, {}),
    "stacked experts on two": (GPT_OSS, {"ep_size": 2}, {}),
}


def compare_all(folder: Path) -> dict[str, tuple[bool, bool, bool]]:
    """Whether something was gathered, the models are the same, and the sums those of what left."""
    found = {}
    for name, (values, fsdp, more) in CASES.items():
        config = model_config_from_dict(values)
        engine = TrainEngine(
            config, FSDPConfig(recompute_ratio=0.0, torch_compile=False, **fsdp), device=torch.device("cpu"),
            optim_cfg=AdamWConfig(), lr_cfg=LRConfig(), **more,
        )  # fmt: skip
        engine.model.init_weights(seed=3)
        with torch.no_grad():
            for param in engine.model.parameters():
                if more and param.requires_grad:
                    param.to_local().fill_(0.03)
        by_name, by_parameter = (config.build("cpu", engine.compute_dtype).requires_grad_(False) for _ in range(2))
        lay_out_by_input(by_parameter)
        WeightReceiver(by_name).take(with_checksums(engine.weight_buckets(6_000, cast=False)))
        receiver = WeightReceiver(by_parameter)
        witness = Witness(1, 0, 1, config.num_hidden_layers, engine.compute_dtype, "weight")
        buckets = engine.weight_buckets(6_000, cast=False, by_parameter=True)
        receiver.take(witness.watch(with_checksums(buckets)))
        pairs = zip(by_name.named_parameters(), by_parameter.parameters(), strict=True)
        expected = witness.expected()
        found[name] = (
            not engine.source._lies_here,
            [n for (n, a), b in pairs if not torch.equal(a, b)] == [],
            receiver.sums(list(expected), engine.compute_dtype) == expected
            and expected.keys() == dict(by_name.named_parameters()).keys(),
        )
    return found


def test_two_ranks_bring_the_same_by_parameter_as_by_name(tmp_path):
    assert on_ranks(2, compare_all, tmp_path)[0] == dict.fromkeys(CASES, (True, True, True))


def test_files_and_other_processes_are_not_given_parameters(tmp_path):
    engine = make_engine(tmp_path)
    with pytest.raises(ValueError, match="a bucket by parameter .embed_tokens.weight"):
        write_weights(engine.weight_buckets(6_000, by_parameter=True), tmp_path / "weights", 1)
    assert not list(tmp_path.glob("weights*"))
    mine, its = Line.pair(20.0)
    with pytest.raises(ValueError, match="a bucket by parameter .embed_tokens.weight"):
        send_weights(engine.weight_buckets(6_000, by_parameter=True), mine, 1, "host", torch.device("cpu"))
    its.close()
