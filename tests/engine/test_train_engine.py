"""Steps of the training engine: schedule, splits, guards, memory of the past."""

import math

import pytest
import torch

from xtuner.v1.config import AdamWConfig, LRConfig
from xtuner.v1.engine import learning_rate, load_train_state, save_train_state
from xtuner.v1.ops.attention import PackedAttention

from .helpers import gradients, make_engine, make_samples, packs_of, weights


def test_schedule_values():
    cfg = LRConfig(lr_type="cosine", warmup_ratio=0.2, lr_min=0.1)
    rates = [learning_rate(s, 10, 1.0, cfg) for s in range(10)]
    assert rates[:2] == pytest.approx([1 / 3, 2 / 3])
    assert rates[2] == 1.0 and rates[9] == pytest.approx(0.1)
    assert rates[5] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 3 / 7)))
    linear = LRConfig(lr_type="linear", warmup_ratio=0, lr_min=0)
    assert [learning_rate(s, 5, 1.0, linear) for s in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert learning_rate(99, 10, 0.5, LRConfig(warmup_ratio=0)) == 0.5


def _backward(engine, packs, total):
    for pack in packs:
        logprobs, _ = engine.forward(pack)
        engine.backward(-(pack.advantages * logprobs).sum() / total)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("share", [False, True])
def test_gradient_does_not_depend_on_the_split_into_packs(tmp_path, share, recompute):
    samples = make_samples(12)
    samples += [s for s in make_samples(12, seed=1)]
    total = sum(s.num_trained for s in samples)
    whole = make_engine(tmp_path)
    _backward(whole, packs_of(samples, length=4096)[0][0], total)
    split = make_engine(tmp_path, recompute_ratio=recompute)
    packs = packs_of(samples, length=32, share=share)[0][0]
    assert len(packs) > 4
    _backward(split, packs, total)
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(split)[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_recomputation_changes_no_log_prob(tmp_path):
    pack = packs_of(make_samples(4))[0][0][0]
    plain, _ = make_engine(tmp_path).forward(pack)
    recomputed, _ = make_engine(tmp_path, recompute_ratio=1.0).forward(pack)
    assert torch.equal(plain, recomputed)


def test_the_temperature_keeps_float32_beside_half_precision_weights(tmp_path):
    """1 / 0.7 in bfloat16 is off by 8e-4, and so would be every log-prob: the scale applies to float32 logits."""
    pack = packs_of(make_samples(4))[0][0][0]
    pack.inv_temperature.fill_(1 / 0.7)
    engine = make_engine(tmp_path, fsdp={"cpu_param_dtype": "bfloat16"})
    plain = engine.model_cfg.build("cpu", torch.bfloat16)
    plain.init_weights(seed=7)
    attention = PackedAttention(pack.layout, "cpu")
    with torch.no_grad():
        hidden = plain.hidden_states(pack.input_ids, pack.position_ids, attention)[pack.target_rows]
        expected = (plain.logits(hidden) / 0.7).log_softmax(-1).gather(1, pack.labels[:, None]).squeeze(1)
    torch.testing.assert_close(engine.logprobs(pack), expected, rtol=0, atol=1e-5)


def test_a_float32_head_over_half_precision_layers_trains(tmp_path):
    pack = packs_of(make_samples(4))[0][0][0]
    engine = make_engine(tmp_path, fsdp={"cpu_param_dtype": "bfloat16", "fp32_lm_head": True})
    before = weights(engine)
    _backward(engine, [pack], 1)
    assert engine.step().grad_norm > 0
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


def test_a_forward_without_backward_does_not_hide_the_gradients(tmp_path):
    """With reshard_after_forward=False it leaves gathered weights behind; the step must not take them for its own."""
    first, second = (packs_of(make_samples(4, seed=seed))[0][0][0] for seed in (0, 1))
    plain, kept = make_engine(tmp_path), make_engine(tmp_path, fsdp={"reshard_after_forward": False})
    for engine in (plain, kept):
        _backward(engine, [first], 1)
        engine.logprobs(second)
    assert kept.step().grad_norm == plain.step().grad_norm > 0
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(kept)[name], tensor), name


@pytest.mark.parametrize("foreach, fused", [(None, True), (True, None), (False, None)])
def test_the_optimizer_is_the_one_asked_for(tmp_path, foreach, fused):
    (rule,) = make_engine(tmp_path, optim_cfg=AdamWConfig(foreach=foreach)).optimizer.rules
    assert (rule.foreach, rule.fused) == (foreach, fused)


def test_a_non_finite_gradient_leaves_weights_and_moments_alone(tmp_path):
    engine = make_engine(tmp_path)
    pack = packs_of(make_samples(4))[0][0][0]
    _backward(engine, [pack], 1)
    assert engine.step().skipped is None
    before = weights(engine)
    moments = {id(p): s["exp_avg"].clone() for p, s in engine.optimizer.state.items()}
    _backward(engine, [pack], 1)
    next(engine.model.parameters()).grad.mul_(float("inf"))
    result = engine.step()
    assert "inf" in result.skipped or "nan" in result.skipped
    assert all(torch.equal(t, before[n]) for n, t in weights(engine).items())
    assert all(torch.equal(s["exp_avg"], moments[id(p)]) for p, s in engine.optimizer.state.items())
    _backward(engine, [pack], 1)
    assert engine.step().skipped is None
    assert any(not torch.equal(t, before[n]) for n, t in weights(engine).items())


def test_norm_above_threshold_is_skipped_and_below_is_clipped(tmp_path):
    pack = packs_of(make_samples(4))[0][0][0]
    strict = make_engine(tmp_path, optim_cfg=AdamWConfig(lr=1e-2, skip_grad_norm_threshold=1e-9))
    _backward(strict, [pack], 1)
    assert "skip_grad_norm_threshold" in strict.step().skipped
    clipped = make_engine(tmp_path, optim_cfg=AdamWConfig(lr=1e-2, max_grad_norm=1e-3))
    _backward(clipped, [pack], 1)
    reference = gradients(clipped)
    norm = torch.stack([g.double().square().sum() for g in reference.values()]).sum().sqrt()
    seen = {}
    clipped.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(clipped)))
    assert clipped.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, grad in reference.items():
        torch.testing.assert_close(seen[name], grad * (1e-3 / (float(norm) + 1e-6)))


def test_a_pack_of_padding_changes_no_gradient(tmp_path):
    samples = make_samples(1)
    real, padding = packs_of(samples, ranks=2)[0][0], packs_of(samples, ranks=2)[1][0]
    assert {len(real[0].rollout_ids), len(padding[0].rollout_ids)} == {0, 1}
    with_padding, without = make_engine(tmp_path), make_engine(tmp_path)
    total = samples[0].num_trained
    _backward(with_padding, [*real, *padding], total)
    _backward(without, real if real[0].rollout_ids else padding, total)
    for name, grad in gradients(without).items():
        assert torch.equal(gradients(with_padding)[name], grad), name


def test_resume_equals_an_unbroken_run(tmp_path):
    def train(engine, first, last):
        for step in range(first, last):
            pack = packs_of(make_samples(6, seed=step))[0][0][0]
            _backward(engine, [pack], 10)
            rates.append(engine.step().lr)

    schedule = dict(lr_cfg=LRConfig(lr_type="cosine", warmup_ratio=0.3, lr_min=0.0), total_optimizer_steps=6)
    rates: list[float] = []
    unbroken = make_engine(tmp_path / "m", **schedule)
    train(unbroken, 0, 6)
    straight, rates = rates, []
    first = make_engine(tmp_path / "m", **schedule)
    train(first, 0, 3)
    save_train_state(first, tmp_path / "ckpt")
    second = make_engine(tmp_path / "m", **schedule)
    load_train_state(second, tmp_path / "ckpt")
    train(second, 3, 6)
    assert rates == straight
    for name, tensor in weights(unbroken).items():
        assert torch.equal(weights(second)[name], tensor), name


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    engine = make_engine(tmp_path / "m")
    with pytest.raises(FileNotFoundError, match="not a training checkpoint"):
        load_train_state(engine, tmp_path)
    save_train_state(engine, tmp_path / "ckpt")
