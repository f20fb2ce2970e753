"""Adapters on a GPU: types, memory, compiled layers, and the engine's log-probs in bfloat16."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


def lora_run(folder, fsdp=None, **worker):
    """Three steps with a KL to the reference: the run's folder, its rows and its training worker."""
    import grpo_step

    from xtuner.v1.config import AdamWConfig, LoRAConfig

    config = grpo_step.tiny_run(folder)
    cfg = config.train_worker_cfg
    loss = cfg.loss_cfg.model_copy(update={"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 1e-3})
    fields = {"lora_cfg": LoRAConfig(rank=8), "optim_cfg": AdamWConfig(lr=1e-3), "loss_cfg": loss} | worker
    fields["fsdp_cfg"] = cfg.fsdp_cfg.model_copy(update=fsdp or {})
    exact = not fields["fsdp_cfg"].fp32_lm_head  # exact mode refuses it
    changes = {"train_worker_cfg": cfg.model_copy(update=fields), "deterministic": exact, "save_final_hf": True}
    config = config.model_copy(update=changes)
    trainer = config.build()
    (handle,) = trainer.workers
    run_dir = trainer.run_dir
    trainer.fit()
    rows = [json.loads(line) for line in (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
    return run_dir, rows, handle.worker


@pytest.mark.parametrize("fsdp", [{}, {"torch_compile": True}, {"cpu_offload": True}, {"fp32_lm_head": True}])
def test_a_run_of_adapters_over_a_bf16_base(tmp_path, fsdp):
    run_dir, rows, worker = lora_run(tmp_path, fsdp)
    assert worker.reference is None
    for name, param in worker.engine.model.named_parameters():
        wide = param.requires_grad or ("fp32_lm_head" in fsdp and not name.startswith("layers."))
        assert param.dtype == (torch.float32 if wide else torch.bfloat16), name
    assert all(row["mismatch/mismatch_logprob_abs_diff"] < 0.05 for row in rows)
    assert all(row["train_metrics/worker_0/step_avg_grad_norm"] > 0 for row in rows)
    kl = [row["train_metrics/worker_0/step_avg_ref_kl"] for row in rows]
    assert kl[0] == 0 < kl[-1]
    assert (run_dir / "hf" / "hf-step-3" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_mismatch_is_that_of_a_whole_model(tmp_path):
    """The trainer computes with the rounded sum that the engine has: adapters beside the product would not."""
    from xtuner.v1.config import AdamWConfig

    lora = lora_run(tmp_path / "lora")[1][-1]["mismatch/mismatch_logprob_abs_diff"]
    dense = lora_run(tmp_path / "dense", lora_cfg=None, optim_cfg=AdamWConfig(lr=1e-5))[1][-1]
    assert lora < 2 * dense["mismatch/mismatch_logprob_abs_diff"] + 1e-4


def test_a_reference_of_its_own_waits_on_the_host_in_bf16(tmp_path):
    worker = lora_run(tmp_path, lora_cfg=None)[2]
    assert worker.reference.parking.weights_away
    for name, param in worker.reference.model.named_parameters():
        assert param.dtype == torch.bfloat16 and param.to_local().untyped_storage().nbytes() == 0, name


def test_merged_weights_are_the_same_bits_in_layer_and_export():
    from xtuner.v1.ops.lora_linear import lora_linear, merge_lora

    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, 512, device="cuda", generator=generator).bfloat16() for n in (300, 1024))
    lora_a, lora_b = (torch.randn(*shape, device="cuda", generator=generator) for shape in ((32, 512), (768, 16)))
    lora_a.requires_grad_()
    args = (lora_a, lora_b.requires_grad_(), 0.01, [0, 512, 768, 1024])
    merged = merge_lora(weight, *args, torch.bfloat16).detach()
    out = lora_linear(x.requires_grad_(), weight, None, *args)
    assert torch.equal(out, torch.nn.functional.linear(x, merged))
    grads = torch.autograd.grad(out.float().square().sum(), (x, lora_a, lora_b))
    exact = [t.detach().double().requires_grad_() for t in (x, lora_a, lora_b)]
    a, b = exact[1:]
    delta = torch.zeros(1024, 512, dtype=torch.float64, device="cuda")
    delta[:512], delta[768:] = b[:512] @ a[:16], b[512:] @ a[16:]
    expected = torch.autograd.grad((exact[0] @ (weight.double() + 0.01 * delta).t()).square().sum(), exact)
    for got, want in zip(grads, expected, strict=True):
        assert (got.double() - want).norm() / want.norm() < 2e-2


def test_adapters_take_little_memory():
    """No float32 master, gradient or moments of the base: about 2 bytes a weight; none while it is parked."""
    import torch.distributed as dist

    from xtuner.v1.config import AdamWConfig, FSDPConfig, LoRAConfig
    from xtuner.v1.engine import TrainEngine
    from xtuner.v1.model import DenseModelConfig, MHAConfig

    attention = MHAConfig(num_attention_heads=16, num_key_value_heads=8, head_dim=64, qk_norm=True)
    config = DenseModelConfig(
        vocab_size=32000, max_position_embeddings=4096, num_hidden_layers=8, hidden_size=1024, intermediate_size=4096,
        attention=attention, tie_word_embeddings=True,
    )  # fmt: skip
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = torch.cuda.memory_allocated()
        engine = TrainEngine(
            config, FSDPConfig(torch_compile=False), device=torch.device("cuda", 0), optim_cfg=AdamWConfig(),
            lora_cfg=LoRAConfig(rank=8),
        )  # fmt: skip
        weights = sum(p.numel() for p in engine.model.parameters())
        assert torch.cuda.memory_allocated() - before < 2.3 * weights
        engine.offload()
        assert torch.cuda.memory_allocated() - before < 0.05 * weights
        engine.onload()
        assert torch.cuda.memory_allocated() - before < 2.3 * weights
    finally:
        dist.destroy_process_group()
