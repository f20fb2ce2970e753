"""Adapters in the training engine: the base stays, what is kept is small, what leaves is merged."""

import pytest
import torch
from safetensors import safe_open

from xtuner.v1.config import LoRAConfig, LRConfig
from xtuner.v1.engine import load_train_state, save_train_state
from xtuner.v1.model.hf import export_hf_tensors, load_hf_tensor
from xtuner.v1.ops.attention import PackedAttention

from .helpers import gradients, make_engine, make_samples, packs_of, weights

BF16 = {"cpu_param_dtype": "bfloat16"}


def lora_engine(folder, lora=None, **kw):
    return make_engine(folder, lora_cfg=LoRAConfig(**{"rank": 4, "alpha": 8} | (lora or {})), **kw)


def train(engine, first=0, last=3):
    """Optimizer steps; returns the gradient norms."""
    norms = []
    for step in range(first, last):
        samples = make_samples(6, seed=step)
        for pack in packs_of(samples, length=48, share=True)[0][0]:
            backward(engine, pack)
        norms.append(engine.step().grad_norm)
    return norms


def backward(engine, pack):
    logprobs, _ = engine.forward(pack)
    engine.backward(-(pack.advantages * logprobs).sum() / 10)


def frozen(engine):
    return {n: p.full_tensor().clone() for n, p in engine.model.named_parameters() if not p.requires_grad}


def adapters(engine):
    return {n: p.full_tensor().clone() for n, p in engine.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("fsdp", [{}, BF16, BF16 | {"fp32_lm_head": True}, {"reshard_after_forward": False}])
def test_training_changes_every_adapter_and_no_bit_of_the_base(tmp_path, fsdp):
    engine = lora_engine(tmp_path, fsdp=fsdp)
    layers = engine.model.layers[0].mlp.gate_up_proj
    assert layers.weight.dtype == engine.compute_dtype and layers.lora_a.dtype == torch.float32
    base, before = frozen(engine), adapters(engine)
    pack = packs_of(make_samples(4))[0][0][0]
    base_logprobs = engine.logprobs(pack)
    assert all(norm > 0 for norm in train(engine))
    after = frozen(engine)
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in adapters(engine).items())
    assert torch.equal(engine.base_logprobs(pack), base_logprobs)
    assert (engine.logprobs(pack) - base_logprobs).abs().max() > 0.05
    assert {id(p) for p in engine.optimizer.state} == {id(p) for p in engine.model.parameters() if p.requires_grad}


@pytest.mark.parametrize("fsdp", [{}, BF16])
def test_another_model_with_the_pushed_weights_has_the_trainer_s_log_probs_to_the_bit(tmp_path, fsdp):
    engine = lora_engine(tmp_path, fsdp=fsdp)
    train(engine)
    pack = packs_of(make_samples(4))[0][0][0]
    plain = engine.model_cfg.build("cpu", engine.compute_dtype)
    buckets = list(engine.weight_buckets(1 << 12))
    assert len(buckets) > 5 and all(t.dtype == engine.compute_dtype for b in buckets for t in b.tensors.values())
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            load_hf_tensor(plain, name, tensor)
    attention = PackedAttention(pack.layout, "cpu")
    with torch.no_grad():
        expected, _ = plain(
            pack.input_ids, pack.position_ids, attention, pack.target_rows, pack.labels, pack.inv_temperature, 1024
        )
    assert torch.equal(engine.logprobs(pack), expected)


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("share", [False, True])
def test_gradient_does_not_depend_on_the_split_into_packs(tmp_path, share, recompute):
    samples = make_samples(12)
    recomputing = {"recompute_ratio": 1.0, "fsdp": {"recompute": recompute}} if recompute else {}
    whole, split = lora_engine(tmp_path), lora_engine(tmp_path, **recomputing)
    for engine in (whole, split):
        train(engine, last=1)  # B is no longer zero: A has a gradient too
    backward(whole, packs_of(samples, length=4096)[0][0][0])
    packs = packs_of(samples, length=40, share=share)[0][0]
    assert len(packs) > 2
    for pack in packs:
        backward(split, pack)
    expected = trained_gradients(whole)
    for name, grad in trained_gradients(split).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def trained_gradients(engine):
    assert all(p.requires_grad == (p.grad is not None) for p in engine.model.parameters())
    return {n: p.grad.full_tensor().clone() for n, p in engine.model.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_the_definition(tmp_path):
    """From the gradient of the whole weight, which a plain engine has: dB = s dW A^T, dA = s B^T dW."""
    engine, plain = lora_engine(tmp_path), make_engine(tmp_path)
    train(engine)
    for name, tensor in export_hf_tensors(engine.model, torch.float32):
        load_hf_tensor(plain.model, name, tensor)
    pack = packs_of(make_samples(5))[0][0][0]
    for one in (engine, plain):
        backward(one, pack)
    whole = gradients(plain)
    layer = engine.model.layers[1].self_attn.qkv_proj
    weight = whole["layers.1.self_attn.qkv_proj.weight"].double()
    lora_a, lora_b, grad_a, grad_b = (
        t.full_tensor().double() for t in (layer.lora_a, layer.lora_b, layer.lora_a.grad, layer.lora_b.grad)
    )
    for i, (start, end) in enumerate(layer.parts.values()):
        a, rows = slice(4 * i, 4 * i + 4), slice(start, end)
        torch.testing.assert_close(grad_b[rows], 2 * weight[rows] @ lora_a[a].t(), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(grad_a[a], 2 * lora_b[rows].t() @ weight[rows], rtol=1e-3, atol=1e-6)


def test_a_checkpoint_holds_adapters_alone_and_resumes_with_the_same_bits(tmp_path):
    fields = dict(lora={"dropout": 0.1}, lr_cfg=LRConfig(lr_type="cosine", warmup_ratio=0.3, lr_min=0.0))
    torch.manual_seed(5)
    unbroken = lora_engine(tmp_path, **fields)
    norms = train(unbroken, 0, 6)
    torch.manual_seed(5)
    first = lora_engine(tmp_path, **fields)
    assert train(first, 0, 3) == norms[:3]
    save_train_state(first, tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").iterdir()
    with safe_open(file, framework="pt") as saved:
        names = {key.split("@")[0] for key in saved.keys()}
    assert {n.rpartition(".")[2] for n in names if n.startswith(("param/", "exp_avg"))} == {"lora_a", "lora_b"}
    second = lora_engine(tmp_path, **fields, seed=99)
    load_train_state(second, tmp_path / "ckpt")
    assert train(second, 3, 6) == norms[3:]
    for name, tensor in weights(unbroken).items():
        assert torch.equal(weights(second)[name], tensor), name


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    engine = lora_engine(tmp_path)
    save_train_state(engine, tmp_path / "ckpt")
    other = lora_engine(tmp_path)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.to_local()[3, 5].mul_(1.0001)
    with pytest.raises(ValueError, match="trained on other frozen weights than those of load_from"):
        load_train_state(other, tmp_path / "ckpt")
    with pytest.raises(ValueError, match="adapters have alpha=8.0, lora_cfg says 16.0"):
        load_train_state(lora_engine(tmp_path, lora={"alpha": 16}), tmp_path / "ckpt")
    with pytest.raises(ValueError, match="target_modules=q_proj, k_proj, .*, lora_cfg says k_proj;"):
        load_train_state(lora_engine(tmp_path, lora={"target_modules": ["k_proj"]}), tmp_path / "ckpt")
    with pytest.raises(ValueError, match=r"holds adapters \(lora_cfg\), but a whole model would be trained"):
        load_train_state(make_engine(tmp_path), tmp_path / "ckpt")
    save_train_state(make_engine(tmp_path), tmp_path / "whole")
    with pytest.raises(ValueError, match="holds a whole model, but adapters"):
        load_train_state(engine, tmp_path / "whole")
