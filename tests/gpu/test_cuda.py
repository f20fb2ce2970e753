"""What only a GPU can show: kernels against references, memory given back, the run itself."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from random_model import write_random_model

    return write_random_model(tmp_path_factory.mktemp("m") / "model", "tiny", "cuda")


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("prefix", [False, True])
def test_packed_attention_equals_the_reference(dtype, tolerance, prefix):
    from xtuner.v1.data_proto import SegmentLayout
    from xtuner.v1.ops.attention import PackedAttention, reference_attention

    layout = SegmentLayout([33, 70, 5, 128, 1], [-1, 0, 0, -1, 3] if prefix else [-1] * 5)
    rows = sum(layout.lengths)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(rows, h, 64, device="cuda", generator=generator) for h in (8, 2, 2))
    weight = torch.randn(rows, 8, 64, device="cuda", generator=generator)
    inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out = PackedAttention(layout, torch.device("cuda")).attend(0, *inputs, 64**-0.5)
    expected = reference_attention(layout, *exact, 64**-0.5)
    (out * weight.to(dtype)).sum().backward()
    (expected * weight.double()).sum().backward()
    assert _error(out, expected) < tolerance
    for got, want in zip(inputs, exact, strict=True):
        assert _error(got.grad, want.grad) < tolerance


def _error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_engine_log_probs_equal_the_models(model_folder, dtype, tolerance):
    from xtuner.v1.data_proto import SampleParams, SegmentLayout
    from xtuner.v1.model import get_model_config_from_hf
    from xtuner.v1.model.hf import load_hf_model
    from xtuner.v1.ops.attention import PackedAttention
    from xtuner.v1.rl.rollout.backends.base import GenerateRequest
    from xtuner.v1.rl.rollout.backends.native import NativeEngine

    model = get_model_config_from_hf(model_folder).build("cuda", dtype)
    load_hf_model(model, model_folder)

    async def generate():
        engine = NativeEngine(model_folder, device="cuda", dtype=dtype, max_batch_size=64, context_length=128)
        await engine.start()
        params = SampleParams(max_tokens=40)
        prompts = [[3 + (i * j) % 300 for j in range(5 + i % 9)] for i in range(48)]
        requests = [GenerateRequest(i, p, params, 1000 + i) for i, p in enumerate(prompts)]
        outputs = await asyncio.gather(*(engine.generate(r) for r in requests))
        cache, awake = engine._cache.num_bytes, torch.cuda.mem_get_info()[0]
        await engine.sleep()
        given_back = torch.cuda.mem_get_info()[0] - awake
        await engine.stop()
        return prompts, outputs, cache, given_back

    prompts, outputs, cache, given_back = asyncio.run(generate())
    assert given_back >= cache > 0
    worst = 0.0
    with torch.no_grad():
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor(prompt + output.token_ids, device="cuda")
            attention = PackedAttention(SegmentLayout([len(ids)], [-1]), torch.device("cuda"))
            hidden = model.hidden_states(ids, torch.arange(len(ids), device="cuda"), attention)
            logprobs = model.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
            chosen = logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1).cpu()
            worst = max(worst, float((chosen - torch.tensor(output.logprobs)).abs().max()))
    assert worst < tolerance


def test_three_steps_on_the_gpu(tmp_path):
    import grpo_step

    trainer = grpo_step.tiny_run(tmp_path).build()
    run_dir = trainer.run_dir
    trainer.fit()
    rows = [json.loads(line) for line in (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/mismatch_logprob_abs_diff"] < 0.05 for row in rows)
    assert all(row["train_metrics/worker_0/step_avg_grad_norm"] > 0 for row in rows)


def test_a_run_resumes_on_the_gpu(tmp_path):
    import grpo_step

    def losses(config):
        trainer = config.build()
        run_dir = trainer.run_dir
        trainer.fit()
        rows = [json.loads(line) for line in (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["train_metrics/worker_0/step_avg_grad_norm"]) for row in rows], run_dir

    config = grpo_step.tiny_run(tmp_path, steps=4)
    unbroken, _ = losses(config.model_copy(update={"work_dir": str(tmp_path / "a"), "deterministic": True}))
    part = {"work_dir": str(tmp_path / "b"), "checkpoint_interval": 1, "auto_resume": True, "save_final_hf": True}
    part["deterministic"] = True
    losses(config.model_copy(update=part | {"total_train_steps": 2}))
    resumed, run_dir = losses(config.model_copy(update=part))
    assert [step for step, _ in resumed] == [1, 2, 3, 4]
    for (_, a), (_, b) in zip(unbroken, resumed, strict=True):
        assert a == b
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run_dir / "hf" / "hf-step-4")


@pytest.mark.parametrize("option", ["swap_optimizer", "cpu_offload", "fp32_lm_head"])
def test_memory_options_change_no_update(tmp_path, option):
    import grpo_step

    norms = []
    for on in (False, True):
        config = grpo_step.tiny_run(tmp_path / str(on), new_tokens=16, steps=2, recompute=0.0)
        part = config.train_worker_cfg.optim_cfg if option == "swap_optimizer" else config.train_worker_cfg.fsdp_cfg
        setattr(part, option, on)
        config.deterministic = option != "fp32_lm_head"  # exact mode refuses it
        trainer = config.build()
        run_dir = trainer.run_dir
        trainer.fit()
        rows = [json.loads(line) for line in (run_dir / "logs" / "metrics.jsonl").read_text().splitlines()]
        norms.append([row["train_metrics/worker_0/step_avg_grad_norm"] for row in rows])
    assert norms[1][0] == pytest.approx(norms[0][0], rel=0.02)
