"""The optimizer against torch's own, its moments in other types and places, and Muon on fused parameters."""

import pytest
import torch

from xtuner.v1.config import AdamWConfig, LRConfig, MuonConfig
from xtuner.v1.engine import load_train_state, save_train_state
from xtuner.v1.engine.moments import MomentKeeper
from xtuner.v1.engine.optimizer import build_optimizer
from xtuner.v1.model import DenseModelConfig
from xtuner.v1.ops.orthogonalize import orthogonalize
from xtuner.v1.ops.rounding import round_stochastically_

from . import test_expert_parallel as experts
from .helpers import make_engine, make_samples, packs_of, weights

SHAPE = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64,
    attention=dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True),
)  # fmt: skip


def make_model():
    model = DenseModelConfig(**SHAPE).build("cpu")
    model.init_weights(3)
    return model


def give_gradients(model, step):
    """The same at the same step, of sizes far apart."""
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(model.parameters()):
        param.grad = torch.randn(param.shape, generator=generator) * 10.0 ** (i % 5 - 4)


def train(model, optimizer, steps=6):
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def keep(optimizer, dtype=torch.float32, in_host=False, bucket_numel=512):
    optimizer.keeper = MomentKeeper(torch.device("cpu"), dtype, in_host, bucket_numel)
    return optimizer


CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", [dict(fused=True), dict(foreach=True), dict(foreach=False)])
def test_adamw_is_torchs(kernel):
    cfg = AdamWConfig(lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, **kernel)
    ours, theirs = make_model(), make_model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, **kernel)
    got, want = train(ours, build_optimizer(ours, cfg, CPU)), train(theirs, reference)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("cfg", [AdamWConfig(lr=1e-2), MuonConfig(lr=1e-2)])
@pytest.mark.parametrize("bucket_numel", [512, 10**9])
def test_moments_that_pass_through_in_buckets_change_no_bit(cfg, bucket_numel):
    """512 elements: parameters are cut, and several share a bucket; there are many more buckets than slots."""
    plain, swapped = make_model(), make_model()
    optimizer = keep(build_optimizer(swapped, cfg, CPU), in_host=True, bucket_numel=bucket_numel)
    want, got = train(plain, build_optimizer(plain, cfg, CPU)), train(swapped, optimizer)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert optimizer.device_moments() == []
    memory = {t.untyped_storage().data_ptr() for p in swapped.parameters() for t in optimizer.moments_of(p).values()}
    assert len(memory) <= 3  # one piece of host memory for each kind of moment and group


@pytest.mark.parametrize("cfg", [AdamWConfig(lr=1e-2, weight_decay=0), MuonConfig(lr=1e-2, weight_decay=0)])
@pytest.mark.parametrize("in_host", [False, True])
def test_bfloat16_moments_follow_float32_ones(cfg, in_host):
    cfg = cfg.model_copy(update={"moment_dtype": torch.bfloat16})
    start, plain, small = make_model(), make_model(), make_model()
    optimizer = build_optimizer(small, cfg, CPU)
    if in_host:
        optimizer = keep(optimizer, torch.bfloat16, in_host=True)
    want = train(plain, keep(build_optimizer(plain, cfg, CPU)), steps=30)
    got = train(small, optimizer, steps=30)
    moments = [t for p in small.parameters() for t in optimizer.moments_of(p).values()]
    assert {t.dtype for t in moments} == {torch.bfloat16}
    for name, tensor in start.named_parameters():
        moved, apart = (want[name] - tensor).norm(), (want[name] - got[name]).norm()
        assert 0 < apart < 0.02 * moved, name


def test_rounding_keeps_the_mean_where_rounding_to_nearest_stands_still():
    """A moving average whose changes are a twentieth of bfloat16's step."""
    exact, nearest = 1.0, torch.ones(4096, dtype=torch.bfloat16)
    rounded = nearest.clone()
    for step in range(200):
        exact = exact + 2e-4 * (0.5 - exact)
        nearest = (nearest.float() + 2e-4 * (0.5 - nearest.float())).bfloat16()
        round_stochastically_(rounded, rounded.float() + 2e-4 * (0.5 - rounded.float()), seed=step)
    assert nearest.float().mean() == 1
    assert rounded.float().mean() == pytest.approx(exact, abs=3e-4)


def test_rounding_goes_to_a_neighbour_and_repeats_itself():
    x = torch.cat((torch.randn(4096) * 10.0 ** torch.randint(-20, 20, (4096,)), torch.tensor([0.0, -0.0, 1.0, -3.5])))
    out, again, other = (torch.empty(x.shape, dtype=torch.bfloat16) for _ in range(3))
    round_stochastically_(out, x, 5)
    round_stochastically_(again, x, 5)
    round_stochastically_(other, x, 6)
    assert torch.equal(out, again) and not torch.equal(out, other)
    assert ((out.float() - x).abs() < x.abs() * 2**-7).logical_or(out.float() == x).all()
    assert torch.equal(out[-4:].float(), x[-4:])


def test_norms_and_biases_without_decay():
    def still(decay_all):
        """Parameters that a step without gradients leaves alone."""
        model = make_model()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = build_optimizer(model, AdamWConfig(lr=0.1, weight_decay=0.5, decay_norms_and_biases=decay_all), CPU)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return {name for name, p in model.named_parameters() if torch.equal(p, before[name])}

    assert still(True) == set()
    assert still(False) == {name for name, p in make_model().named_parameters() if p.dim() == 1}


def hidden(name):
    return name.startswith("layers.") and "norm" not in name


def matrices_of(model, name, tensor):
    """The matrices of a parameter, from its Hugging Face names."""
    places = sorted((p.start, p.end) for p in model.hf_params.values() if p.param == name)
    return [tensor[start:end] for start, end in places]


@pytest.mark.parametrize("adjust, theirs", [("rms_norm", "match_rms_adamw"), ("spectral_norm", "original")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_on_every_matrix_and_adamw_on_the_rest(adjust, theirs, nesterov):
    cfg = MuonConfig(lr=1e-2, weight_decay=0.2, momentum=0.9, nesterov=nesterov, adjust_lr=adjust)
    model, plain = make_model(), make_model()
    got = train(model, build_optimizer(model, cfg, CPU))
    split = {
        name: [torch.nn.Parameter(m.detach().clone()) for m in matrices_of(plain, name, p)]
        for name, p in plain.named_parameters()
        if hidden(name)
    }
    rest = [p for name, p in plain.named_parameters() if not hidden(name)]
    muon = torch.optim.Muon(
        [m for matrices in split.values() for m in matrices], lr=1e-2, weight_decay=0.2, momentum=0.9,
        nesterov=nesterov, adjust_lr_fn=theirs,
    )  # fmt: skip
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.2, betas=cfg.betas, eps=cfg.eps, fused=True)
    for step in range(6):
        give_gradients(plain, step)
        for name, matrices in split.items():
            for matrix, grad in zip(matrices, matrices_of(plain, name, plain.get_parameter(name).grad), strict=True):
                matrix.grad = grad.clone()
        muon.step()
        adamw.step()
    assert [len(split[f"layers.0.{m}.weight"]) for m in ("self_attn.qkv_proj", "mlp.gate_up_proj")] == [3, 2]
    for name, p in plain.named_parameters():
        if not hidden(name):
            assert torch.equal(got[name], p), name
            continue
        for mine, matrix in zip(matrices_of(plain, name, got[name]), split[name], strict=True):
            if adjust == "rms_norm" or len(matrix) >= matrix.shape[1]:  # torch's "original" spares wide matrices
                torch.testing.assert_close(mine, matrix.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_rates_of_muon():
    """One step from the same gradients moves a matrix by its rate times the same direction."""
    moved = {}
    for adjust in ("rms_norm", "spectral_norm", "none"):
        model = make_model()
        before = model.layers[0].mlp.down_proj.weight.detach().clone()
        train(model, build_optimizer(model, MuonConfig(lr=1e-2, weight_decay=0, adjust_lr=adjust), CPU), steps=1)
        moved[adjust] = model.layers[0].mlp.down_proj.weight.detach() - before
    assert before.shape == (32, 48)
    torch.testing.assert_close(moved["rms_norm"], moved["none"] * 0.2 * 48**0.5, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moved["spectral_norm"], moved["none"] * (32 / 48) ** 0.5, rtol=1e-4, atol=1e-6)
    singular = torch.linalg.svdvals(moved["none"] / 1e-2)
    assert 0.5 < singular.min() and singular.max() < 1.3


def test_a_rate_knows_where_the_columns_are_the_outputs():
    """gpt_oss stores the matrices of its experts as [in, out]."""
    moved = {}
    for adjust in ("spectral_norm", "none"):
        model = experts.MODELS["gpt_oss"].build("cpu")
        model.init_weights(3)
        weight = model.layers[0].mlp.experts.down_proj.weight
        before = weight.detach().clone()
        train(model, build_optimizer(model, MuonConfig(lr=1e-2, weight_decay=0, adjust_lr=adjust), CPU), steps=1)
        moved[adjust] = weight.detach() - before
    assert before.shape == (8 * 12, 32)  # from 12 to 32
    torch.testing.assert_close(moved["spectral_norm"], moved["none"] * (32 / 12) ** 0.5, rtol=1e-4, atol=1e-6)


def test_gates_and_ups_are_matrices_of_their_own_where_their_columns_alternate():
    model = experts.MODELS["gpt_oss"].build("cpu")
    model.init_weights(3)
    weight = model.layers[0].mlp.experts.gate_up_proj.weight
    before = weight.detach().clone()
    cfg = MuonConfig(lr=1e-2, weight_decay=0, adjust_lr="spectral_norm")
    train(model, build_optimizer(model, cfg, CPU), steps=1)
    moved = (before - weight.detach()).view(8, 32, 12, 2)
    directions = weight.grad.view(8, 32, 12, 2)
    for expert in range(8):
        for part in range(2):
            expected = orthogonalize(directions[expert, ..., part]).float() * 1e-2 * (12 / 32) ** 0.5
            error = (moved[expert, ..., part] - expected).norm() / expected.norm()
            assert error < 0.05, (expert, part)
    together = orthogonalize(weight.grad.view(8, 32, 24)).view(8, 32, 12, 2).float() * 1e-2 * (12 / 32) ** 0.5
    assert (moved - together).norm() > 0.2 * moved.norm()


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (8, 8)])
def test_matrices_in_a_batch_are_made_orthogonal_one_by_one(shape):
    batch = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    batch[1] *= 1e-3
    together = orthogonalize(batch)
    for matrix, out in zip(batch, together, strict=True):
        torch.testing.assert_close(out, orthogonalize(matrix), rtol=0.02, atol=0.02)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(out.float().flatten(), (left @ right).flatten(), dim=0) > 0.95


def _step(engine, seed=0):
    pack = packs_of(make_samples(6, seed=seed))[0][0][0]
    logprobs, _ = engine.forward(pack)
    engine.backward(-(pack.advantages * logprobs).sum())
    return engine.step()


def test_clipping_is_adamws_and_the_schedule_everyones(tmp_path):
    schedule = dict(lr_cfg=LRConfig(lr_type="linear", warmup_ratio=0, lr_min=0), total_optimizer_steps=5)
    cfg = MuonConfig(lr=1e-2, max_grad_norm=1e-6, decay_norms_and_biases=False)
    engine = make_engine(tmp_path, optim_cfg=cfg, **schedule)
    seen = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: float(p.grad.full_tensor().norm()) for n, p in engine.model.named_parameters()})
    )
    result = _step(engine)
    assert result.grad_norm > 1e-3
    for name, norm in seen.items():
        assert (norm > 1e-5) if hidden(name) else (norm < 1.1e-6), name
    assert len(engine.optimizer.param_groups) == 3
    for expected in (0.75e-2, 0.5e-2):
        assert _step(engine).lr == pytest.approx(expected)
        assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([expected] * 3)


@pytest.mark.parametrize("cfg", [MuonConfig(lr=1e-2), AdamWConfig(lr=1e-2, moment_dtype="bfloat16")])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path, cfg):
    unbroken = make_engine(tmp_path / "m", optim_cfg=cfg)
    for step in range(4):
        if step == 2:
            save_train_state(unbroken, tmp_path / "ckpt")
        _step(unbroken, step)
    resumed = make_engine(tmp_path / "m", optim_cfg=cfg)
    load_train_state(resumed, tmp_path / "ckpt")
    for step in range(2, 4):
        _step(resumed, step)
    for name, tensor in weights(unbroken).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_a_checkpoint_fits_moments_of_another_type_and_place_but_no_other_optimizer(tmp_path):
    engine = make_engine(tmp_path / "m", optim_cfg=AdamWConfig(moment_dtype="bfloat16"))
    _step(engine)
    save_train_state(engine, tmp_path / "ckpt")
    other = make_engine(tmp_path / "m", optim_cfg=AdamWConfig())
    keep(other.optimizer, in_host=True)
    load_train_state(other, tmp_path / "ckpt")
    for p, q in zip(engine.model.parameters(), other.model.parameters(), strict=True):
        assert other.optimizer.state[q]["step"] == 1
        kept = other.optimizer.moments_of(q)
        assert kept and all(t.dtype == torch.float32 for t in kept.values())
        for name, tensor in engine.optimizer.moments_of(p).items():
            assert torch.equal(kept[name], tensor.float())
    save_train_state(other, tmp_path / "again")  # moments that share one piece of memory
    load_train_state(engine, tmp_path / "again")
    with pytest.raises(ValueError, match="another optimizer.*load_optimizer_states=False"):
        load_train_state(make_engine(tmp_path / "m", optim_cfg=MuonConfig()), tmp_path / "ckpt")


def test_moment_types_are_checked():
    with pytest.raises(ValueError, match="moment_dtype.*use float32 or bfloat16"):
        AdamWConfig(moment_dtype="float16")


def test_every_parameter_counts_its_own_steps():
    """As torch's: one that had no gradient for a while is corrected for the updates it really had."""
    ours, theirs = make_model(), make_model()
    optimizer = build_optimizer(ours, AdamWConfig(lr=1e-2, weight_decay=0), CPU)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0, betas=(0.9, 0.95), fused=True)
    for model, stepping in ((ours, optimizer), (theirs, reference)):
        for step in range(4):
            give_gradients(model, step)
            if step < 2:
                model.embed_tokens.weight.grad = None
            stepping.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
