"""Exact mode: what is refused, when log-probs are compared, and a run in which all are equal to the bit."""

import pytest
import torch

from xtuner.v1.config import FSDPConfig, LoRAConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.exact import exact_problems
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.train.exact import check_exact, gap_excuse, is_exact

from .helpers import STOPS, config, fit, write_model, write_moe_model


def _fsdp(**changes):
    return {"fsdp_cfg": FSDPConfig(torch_compile=False, recompute_ratio=0.0, **changes)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker": _fsdp(tp_size=2)}, "fsdp_cfg.tp_size=2"),
        ({"worker": _fsdp(fp32_lm_head=True)}, "fp32_lm_head=True"),
        ({"worker": {"lora_cfg": LoRAConfig(dropout=0.1)}}, "lora_cfg.dropout=0.1"),
        ({"rollout": {"cpu_dtype": torch.bfloat16}}, "rollout_config.cpu_dtype=torch.bfloat16"),
        ({"rollout": {"tensor_parallel_size": 2}}, "rollout_config.tensor_parallel_size=2"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(model, tmp_path, changes, words):
    cfg = config(model, tmp_path, deterministic=True, **changes)
    (problem,) = check_exact(cfg)
    assert words in problem and "deterministic=False" in problem and problem in cfg.check()
    cfg.deterministic = False
    assert check_exact(cfg) == []


def test_strange_experts_and_heads_are_refused(tmp_path, model):
    moe = get_model_config_from_hf(write_moe_model(tmp_path / "moe"))
    moe.attention.head_dim = 32
    assert exact_problems(moe, "cpu", torch.float32) == exact_problems(moe, "cuda", torch.bfloat16) == []
    moe.router.bias = True
    assert "transposed experts" in exact_problems(moe, "cpu", torch.float32)[0]
    dense = get_model_config_from_hf(model)
    assert exact_problems(dense, "cpu", torch.float32) == []
    dense.attention.head_dim, dense.intermediate_size = 96, 100
    problems = exact_problems(dense, "cuda", torch.float32)
    assert "attention.head_dim=96" in problems[0] and "intermediate_size=100" in problems[1]
    assert "torch.float32" in problems[2]
    dense.attention.sliding_window = 8
    assert "sliding windows" in exact_problems(dense, "cpu", torch.float32)[0]


def test_on_a_gpu_the_types_of_a_gpu_must_be_alike(model, tmp_path):
    changes = {"resources": AcceleratorResourcesConfig(accelerator="GPU", num_workers=1), "deterministic": True}
    cfg = config(model, tmp_path, rollout={"dtype": torch.float16, "cpu_dtype": torch.bfloat16}, **changes)
    assert any("rollout_config.dtype=torch.float16" in problem for problem in check_exact(cfg))
    cfg.rollout_config.dtype = torch.bfloat16
    assert not any("rollout_config" in problem for problem in check_exact(cfg))


@pytest.mark.parametrize(
    ("changes", "excuse"),
    [
        ({}, None),
        ({"sync_weights_interval": 2}, "older weights"),
        ({"task": {"params": SampleParams(max_tokens=8, top_p=0.9, stop_token_ids=STOPS)}}, "top_p=0.9"),
        ({"task": {"params": SampleParams(max_tokens=8, top_k=5, stop_token_ids=STOPS)}}, "top_k=5"),
    ],
)
def test_when_log_probs_may_differ(model, tmp_path, changes, excuse):
    cfg = config(model, tmp_path, deterministic=True, **changes)
    assert is_exact(cfg)
    found = gap_excuse(cfg)
    assert found is None if excuse is None else excuse in str(found)


@pytest.mark.parametrize("share", [True, False])
def test_log_probs_of_engine_and_trainer_are_equal_to_the_bit(model, tmp_path, share):
    """Without exact mode a few in a thousand differ even in this small a model."""
    worker = {"share_prompts": share, "optimizer_steps": 2, "pack_max_length": 100}
    params = SampleParams(max_tokens=8, temperature=0.8, stop_token_ids=STOPS)
    run = fit(config(model, tmp_path, deterministic=True, worker=worker, task={"params": params}))
    assert run.series("mismatch/mismatch_differing_tokens") == [0.0] * 3
    assert run.series("mismatch/mismatch_logprob_abs_diff_max") == [0.0] * 3
    for step in (1, 2, 3):
        for row in run.trajectories(step):
            assert row["train_logprobs"] == row["rollout_logprobs"]
            assert len(row["rollout_logprobs"]) == len(row["response_ids"])


def test_they_are_where_alternatives_are_asked_for(tmp_path):
    """Of a model that the CPU kernels know: torch draws such tokens, from the kernels' logits."""
    folder = write_model(tmp_path / "kernels", hidden_size=128)
    params = SampleParams(max_tokens=8, temperature=0.8, stop_token_ids=STOPS, top_logprobs=5)
    run = fit(config(folder, tmp_path, deterministic=True, task={"params": params}))
    assert run.series("mismatch/mismatch_differing_tokens") == [0.0] * 3


def test_experts_see_one_token_at_a_time(tmp_path):
    folder = write_moe_model(tmp_path / "moe")
    run = fit(config(folder, tmp_path, deterministic=True, total_train_steps=2))
    assert run.series("mismatch/mismatch_differing_tokens") == [0.0] * 2


def test_a_gap_stops_the_run(model, tmp_path, monkeypatch):
    from xtuner.v1.rl.rollout.backends.native import NativeEngine

    generate = NativeEngine.generate

    async def off_by_a_bit(self, request):
        output = await generate(self, request)
        output.logprobs[-1] += 1e-6
        return output

    monkeypatch.setattr(NativeEngine, "generate", off_by_a_bit)
    worker = {"weight_canary": {"enabled": False}}  # which would see it first
    with pytest.raises(RuntimeError, match="log-probs of engine and trainer are not the same: rollout"):
        fit(config(model, tmp_path, deterministic=True, worker=worker))
