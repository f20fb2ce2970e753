"""A GRPO run of adapters: what it learns, what it leaves, and that it goes on where it was cut short."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from xtuner.v1.config import AdamWConfig, FSDPConfig, LoRAConfig
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.train.rl_trainer import LoadCheckpointConfig

from .helpers import close, config, fit, write_model

DOCS = Path(__file__).resolve().parents[2] / "docs" / "lora.md"


def lora_config(model, folder, lora=None, **changes):
    """2 updates a step, all layers recomputed, and a KL to the reference."""
    loss = GRPOLossConfig(
        policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28}, use_kl_loss=True, kl_loss_type="k3",
        kl_loss_coef=1e-3,
    )  # fmt: skip
    worker = {
        "lora_cfg": LoRAConfig(**{"rank": 4, "alpha": 16} | (lora or {})), "optim_cfg": AdamWConfig(lr=3e-2),
        "loss_cfg": loss, "optimizer_steps": 2, "fsdp_cfg": FSDPConfig(torch_compile=False, recompute_ratio=1.0),
    }  # fmt: skip
    return config(model, folder, worker=worker | changes.pop("worker", {}), **changes)


def likes_nines(response, label, extra_info):
    """What a random model gives now and then, and can soon be taught."""
    return response.count("9") / max(1, len(response))


def test_a_run_learns_with_its_adapters_and_exports_them_and_the_merged_model(model, tmp_path):
    cfg = lora_config(
        model, tmp_path, {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}, total_train_steps=12,
        task={"reward": likes_nines}, checkpoint_interval=12,
    )  # fmt: skip
    run = fit(cfg)
    rewards = run.series("response/rewards/mean")
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards
    assert max(run.series("mismatch/mismatch_logprob_abs_diff")) < 1e-5, "the engine has what the trainer computes with"
    kl = [row["ref_kl"] for row in run.updates]
    assert kl[0] == 0 and kl[-1] > 1e-3
    folder = run.path / "hf" / "hf-step-12"
    base, merged = dict(iter_hf_tensors(model)), dict(iter_hf_tensors(folder))
    changed = {name.split(".")[-2] for name, tensor in base.items() if not torch.equal(merged[name], tensor)}
    assert changed == {"q_proj", "v_proj", "up_proj", "down_proj"} and merged.keys() == base.keys()
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name in base:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            delta = 4.0 * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
            torch.testing.assert_close(merged[name], base[name] + delta, rtol=1e-5, atol=1e-6)
    (shard,) = (run.path / "checkpoints" / "ckpt-step-12" / "weights").iterdir()
    with safe_open(shard, framework="pt") as saved:
        assert {k.split("@")[0].rpartition(".")[2] for k in saved.keys() if k.startswith("param/")} == {
            "lora_a",
            "lora_b",
        }


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_resumes_with_the_same_bits(model, tmp_path, dropout):
    """The noise of dropout, which no exact run has, goes on too."""
    updates = 1 if dropout else 2
    changes = {"checkpoint_interval": 1, "deterministic": not dropout, "lora": {"dropout": dropout}}
    changes["worker"] = {"optimizer_steps": updates}
    straight = fit(lora_config(model, tmp_path, **changes))
    named = LoadCheckpointConfig(checkpoint_path=straight.path / "checkpoints" / "ckpt-step-1")
    resumed = fit(lora_config(model, tmp_path, load_checkpoint_cfg=named, **changes))
    assert [row["step"] for row in resumed.rows] == [2, 3]
    assert resumed.losses() == straight.losses()[updates:]
    assert resumed.trajectories(3) == straight.trajectories(3)
    close(straight.weights(3), resumed.weights(3))
    other = write_model(tmp_path / "other", std=0.1)
    foreign = lora_config(other, tmp_path, load_checkpoint_cfg=named, **changes)
    with pytest.raises(ValueError, match="other frozen weights than those of load_from"):
        foreign.build()


def test_the_adapter_alone_where_that_is_asked_for(model, tmp_path):
    run = fit(lora_config(model, tmp_path, {"export_merged": False}, total_train_steps=1))
    folder = run.path / "hf" / "hf-step-1"
    assert [p.name for p in folder.iterdir()] == ["adapter"]
    assert {p.name for p in (folder / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert len({p.stat().st_mode for p in (folder / "adapter").iterdir()}) == 1


def test_the_page_s_examples_run(model, tmp_path):
    configuration, loading = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names = {"model_path": str(model)}
    exec(configuration, names)
    run = fit(config(model, tmp_path).model_copy(update={"train_worker_cfg": names["train_worker_cfg"]}))
    pytest.importorskip("peft")
    names["run_dir"] = str(run.path)
    exec(loading, names)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged, adapted = (names[name](ids).logits for name in ("merged", "adapted"))
        base = AutoModelForCausalLM.from_pretrained(model)(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    assert (merged - base).abs().max() > 1e-4
