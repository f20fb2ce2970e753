"""The loss of a pack, its weights, and the checks of its configuration."""

import math
import sys
import types

import pytest
import torch

from xtuner.v1.rl.advantage import DrGRPOAdvantageConfig, GRPOAdvantageConfig
from xtuner.v1.rl.loss import (
    BaseRLLossConfig,
    GRPOLossConfig,
    RolloutImportanceSampling,
    finalize_metrics,
    kl_penalty,
    merge_metrics,
    pg_loss_fn,
    register_policy_loss,
    rollout_is_weights,
)

CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}
REDUCTIONS = [
    {"loss_reduction": "token"},
    {"loss_reduction": "sample"},
    {"loss_reduction": "square"},
    {"loss_reduction": "constant", "loss_max_length": 8},
]


def loss_config(**fields):
    return GRPOLossConfig(**{"policy_loss_cfg": CLIP} | fields)


# --- configuration


def test_the_tutorials_config():
    config = GRPOLossConfig(
        policy_loss_cfg=dict(
            cliprange_high=0.28,
            cliprange_low=0.2,
            loss_type="vanilla",
            clip_ratio_c=10.0,
            log_prob_diff_min=-20.0,
            log_prob_diff_max=20.0,
        ),
        ignore_idx=-100,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="low_var_kl",
        mode="chunk",
        chunk_size=512,
    )
    assert config.logprob_chunk_size == 512 and config.loss_reduction == "token"


def test_defaults_are_filled_in_and_the_users_dict_is_left_alone():
    given = dict(CLIP)
    config = GRPOLossConfig(policy_loss_cfg=given)
    assert given == CLIP
    assert config.policy_loss_cfg == CLIP | {
        "loss_type": "vanilla",
        "clip_ratio_c": 3.0,
        "log_prob_diff_min": -20.0,
        "log_prob_diff_max": 20.0,
    }
    assert loss_config(mode="eager").logprob_chunk_size is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy_loss_cfg": {}}, r"missing \['cliprange_high', 'cliprange_low'\]; loss_type 'vanilla' needs"),
        ({"policy_loss_cfg": {"cliprange_low": 0.2}}, r"missing \['cliprange_high'\]"),
        ({"policy_loss_cfg": CLIP | {"clip_range": 1}}, r"unknown keys \['clip_range'\].*knows \['clip_ratio_c'"),
        ({"policy_loss_cfg": CLIP | {"cliprange_low": -0.2}}, r"cliprange_low=-0.2: .*greater than 0"),
        ({"policy_loss_cfg": CLIP | {"clip_ratio_c": 0.5}}, r"clip_ratio_c=0.5: .*greater than 1"),
        ({"policy_loss_cfg": CLIP | {"log_prob_diff_max": -1}}, r"log_prob_diff_max=-1: .*greater than 0"),
        ({"policy_loss_cfg": CLIP | {"loss_type": "ppo"}}, r"'ppo' is not known.*'vanilla'"),
        ({"policy_loss_cfg": CLIP | {"loss_type": "no_such.module"}}, "'no_such.module' cannot be imported"),
        ({"policy_loss_cfg": CLIP | {"loss_type": pg_loss_fn}}, "a registered name or a dotted path is needed"),
        ({"use_kl_loss": True}, "use_kl_loss=True needs kl_loss_type"),
        ({"kl_loss_coef": 0.01}, "kl_loss_coef=0.01 has no effect without use_kl_loss"),
        ({"chunk_size": 256}, "chunk_size=256 has no effect in mode='eager', the default: set mode='chunk'"),
        ({"kl_loss_coef": -1, "use_kl_loss": False}, "greater than or equal to 0"),
        ({"kl_loss_type": "k4"}, "kl_loss_type"),
        ({"mode": "liger"}, "mode='liger' knows plain cross-entropy only; use mode='chunk'"),
        ({"mode": "chunk", "chunk_size": None}, "mode='chunk' needs chunk_size"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"ignore_idx": -1}, "ignore_idx"),
        ({"loss_reduction": "mean"}, "loss_reduction"),
        ({"loss_reduction": "constant"}, "'constant' needs a length"),
        ({"loss_max_length": 5}, "the others take none"),
        ({"kl_coef": 0.1}, "kl_coef"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        loss_config(**fields)


def test_what_stands_beside_an_explicit_switch_is_fine():
    assert loss_config(kl_loss_coef=0.01, kl_loss_type="k3", use_kl_loss=False).kl_loss_coef == 0.01
    assert loss_config(chunk_size=256, mode="eager").logprob_chunk_size is None
    assert loss_config(chunk_size=1024).logprob_chunk_size is None  # the default, said


def test_a_penalty_is_switched_on_by_assignment():
    config = loss_config(kl_loss_coef=0.01, use_kl_loss=False)
    config.kl_loss_type = "k3"
    config.use_kl_loss = True
    other = loss_config()
    other.kl_loss_type = "k3"
    other.use_kl_loss = True
    assert config.use_kl_loss and other.use_kl_loss


def test_a_penalty_that_does_not_pull_is_warned_of():
    with pytest.warns(UserWarning, match="'k1': the reference model does not occur in the gradient"):
        loss_config(use_kl_loss=True, kl_loss_type="k1")


@pytest.mark.parametrize("fields", [{}, {"use_kl_loss": True, "kl_loss_type": "k3"}, *REDUCTIONS])
def test_survives_storage(fields):
    """A resolved config that is read back on resume must not be refused for having every field set."""
    stored = loss_config(**fields)
    assert GRPOLossConfig.model_validate_json(stored.model_dump_json()) == stored


def test_dr_grpo_takes_over_the_normaliser():
    config = loss_config().normalized_by(DrGRPOAdvantageConfig(max_length=512).loss_max_length)
    assert (config.loss_reduction, config.loss_max_length) == ("constant", 512)
    plain = loss_config()
    assert plain.normalized_by(GRPOAdvantageConfig().loss_max_length) is plain
    with pytest.raises(ValueError, match="loss_reduction='sample'.*max_length=512: leave them out"):
        loss_config(loss_reduction="sample").normalized_by(512)
    with pytest.raises(ValueError, match="loss_max_length=8 contradict"):
        loss_config(loss_reduction="constant", loss_max_length=8).normalized_by(512)


# --- weights

LENGTHS = [3, 1, 4, 2, 6]
INDEX = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))


def pack_weights(config, packs):
    """Weights of packs given as lists of samples, as the caller computes them."""
    index = [
        torch.repeat_interleave(
            torch.arange(len(samples)), torch.tensor([LENGTHS[s] for s in samples], dtype=torch.long)
        )
        for samples in packs
    ]
    pairs = [config.loss_weights(i, len(samples)) for i, samples in zip(index, packs, strict=True)]
    total = sum(pair[1] for pair in pairs)
    return [(u / total).float() for u, _ in pairs]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (REDUCTIONS[0], lambda n: 1 / 16),
        (REDUCTIONS[1], lambda n: 1 / (5 * n)),
        (REDUCTIONS[2], lambda n: n**-0.5 / sum(m**0.5 for m in LENGTHS)),
        (REDUCTIONS[3], lambda n: 1 / (5 * 8)),
    ],
)
def test_reductions_do_what_they_say(fields, expected):
    (weights,) = pack_weights(loss_config(**fields), [[0, 1, 2, 3, 4]])
    torch.testing.assert_close(weights, torch.tensor([expected(n) for n in LENGTHS for _ in range(n)]))


def test_a_sample_without_trained_tokens_does_not_count():
    for fields in REDUCTIONS:
        config = loss_config(**fields)
        weights, total = config.loss_weights(torch.tensor([0, 0, 2]), 3)
        again, total_again = config.loss_weights(torch.tensor([0, 0, 1]), 2)
        assert torch.equal(weights, again) and total == total_again


def test_token_mean_over_microbatches():
    """One token of loss 4 and three of loss 0 make 1.0: neither the mean of means (2.0) nor the sum (4.0)."""
    config = loss_config()
    pairs = [config.loss_weights(torch.zeros(n, dtype=torch.long), 1) for n in (1, 3)]
    total = sum(total for _, total in pairs)
    losses = [torch.tensor([4.0]), torch.zeros(3)]
    assert sum((u / total * x).sum() for (u, _), x in zip(pairs, losses, strict=True)) == 1.0


def test_token_mean_over_ranks():
    """5 tokens of gradient 1 and 1 token of gradient 7: 12 / 6, not (1 + 7) / 2."""
    config = loss_config()
    pairs = [config.loss_weights(torch.zeros(n, dtype=torch.long), 1) for n in (5, 1)]
    total = sum(total for _, total in pairs)
    assert sum((u / total * g).sum() for (u, _), g in zip(pairs, (1.0, 7.0), strict=True)) == pytest.approx(2.0)


def test_a_dropped_pack_leaves_the_divisor():
    """Of two packs of 4 tokens one is skipped: the other's tokens weigh 1/4, not 1/8."""
    config = loss_config()
    u, total = config.loss_weights(torch.zeros(4, dtype=torch.long), 1)
    assert (u / total).tolist() == [0.25] * 4


# --- the loss of packs


def problem(seed=0):
    """Log-probs of a small linear policy, so that gradients by shared weights can be compared."""
    generator = torch.Generator().manual_seed(seed)
    n = len(INDEX)
    features = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    return {
        "features": features,
        "old": old,
        "ref": old + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64),
        "rollout": old + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(5, generator=generator, dtype=torch.float64)[INDEX],
    }


def run(config, packs):
    """Gradient, loss and metrics of the optimizer step over `packs`, lists of samples."""
    data = problem()
    theta = (0.1 * torch.ones(6, dtype=torch.float64)).requires_grad_()
    rows = [torch.cat([torch.where(INDEX == s)[0] for s in p] or [INDEX[:0]]) for p in packs]
    index = [torch.unique(INDEX[r], return_inverse=True)[1] for r in rows]
    prepared = []
    for r, i, p in zip(rows, index, packs, strict=True):
        is_weights, keep, _ = rollout_is_weights(data["old"][r], data["rollout"][r], i, len(p), config.rollout_is)
        prepared.append((r[keep], is_weights[keep], *config.loss_weights(i[keep], len(p))))
    total = sum(p[-1] for p in prepared)
    loss, metrics = 0.0, []
    for r, is_weights, u, _ in prepared:
        logprobs = data["old"][r] + data["features"][r] @ theta
        part, part_metrics = config.policy_loss(
            logprobs,
            data["old"][r],
            data["advantages"][r],
            (u / total).double(),
            ref_logprobs=data["ref"][r],
            is_weights=is_weights,
        )
        part.backward()
        loss += part.item()
        metrics.append(part_metrics)
    return theta.grad, loss, finalize_metrics(merge_metrics(metrics))


SPLITS = [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[4, 2], [], [3, 0, 1]], [[0, 1, 2, 3, 4], []]]


@pytest.mark.parametrize("packs", SPLITS)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=[r["loss_reduction"] for r in REDUCTIONS])
def test_any_split_into_packs_gives_the_same_step(packs, reduction):
    """With KL, importance weights and dropped tokens; packs may be empty and in any order."""
    config = loss_config(
        **reduction,
        use_kl_loss=True,
        kl_loss_type="low_var_kl",
        kl_loss_coef=0.1,
        rollout_is=RolloutImportanceSampling(
            rollout_is_mode="both", rollout_is_threshold=(0, 1.5), rollout_is_mask_threshold=(0.6, 2.0)
        ),
    )
    grad, loss, metrics = run(config, [[0, 1, 2, 3, 4]])
    split_grad, split_loss, split_metrics = run(config, packs)
    torch.testing.assert_close(split_grad, grad, rtol=1e-6, atol=1e-9)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    assert split_metrics == pytest.approx(metrics, rel=1e-6)
    assert metrics["policy_loss"] + metrics["kl_loss"] == pytest.approx(loss)


def test_the_loss_by_hand():
    """The KL term takes the plain weights, the policy term those times the importance weights."""
    config = loss_config(use_kl_loss=True, kl_loss_type="k3", kl_loss_coef=0.1)
    old = torch.tensor([-1.0, -2.0, -1.0])
    ratio = torch.tensor([1.1, 1.5, 0.5])
    advantages = torch.tensor([1.0, 2.0, -1.0])
    weights, is_weights = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0.5, 2.0])
    logprobs, ref = old + ratio.log(), torch.tensor([-1.5, -2.0, -0.5])
    loss, metrics = config.policy_loss(logprobs, old, advantages, weights, ref, is_weights)
    policy = 0.5 * -1.1 + 0.25 * 0.5 * -1.28 * 2 + 0.25 * 2 * 0.8
    penalty = kl_penalty(logprobs, ref, "k3")
    kl = 0.1 * (weights * penalty).sum().item()
    final = finalize_metrics(metrics)
    assert loss.item() == pytest.approx(policy + kl)
    assert final["policy_loss"] == pytest.approx(policy) and final["kl_loss"] == pytest.approx(kl)
    assert final["ref_kl"] == pytest.approx(penalty.mean().item())
    assert final["clip_frac_high"] == pytest.approx(1 / 3)


def test_junk_outside_of_the_trained_tokens_has_no_part():
    """One trained token among masked ones with broken values: mean KL 0.5, everything finite."""
    junk = torch.full((10,), float("inf"))
    junk[3] = -1.0
    ref = torch.full((10,), float("nan"))
    ref[3] = -1.5
    rows = torch.tensor([3])
    config = loss_config(use_kl_loss=True, kl_loss_type="abs")
    logprobs = junk[rows].requires_grad_()
    loss, metrics = config.policy_loss(logprobs, junk[rows], torch.ones(1), torch.ones(1), ref[rows])
    loss.backward()
    assert finalize_metrics(metrics)["ref_kl"] == 0.5
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


def test_equal_rewards_leave_the_model_alone():
    advantages = torch.zeros(3)
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss, _ = loss_config().policy_loss(logprobs, logprobs.detach() - 0.5, advantages, torch.full((3,), 1 / 3))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logprobs.grad, torch.zeros(3))


def test_an_empty_pack_runs_backward():
    empty = torch.zeros(0)
    config = loss_config(use_kl_loss=True, kl_loss_type="k3")
    logprobs = torch.zeros(0, requires_grad=True)
    weights, total = config.loss_weights(torch.zeros(0, dtype=torch.long), 0)
    loss, metrics = config.policy_loss(logprobs * 1, empty, empty, weights / total, empty)
    loss.backward()
    assert loss.item() == 0 and finalize_metrics(metrics) == {"policy_loss": 0.0, "kl_loss": 0.0}


def test_shapes_are_not_broadcast():
    """(1, N) against (N,) or one entry too many make a loss of another batch, in silence."""
    n3, n1 = torch.zeros(3), torch.zeros(1)
    for advantages in (n1, torch.zeros(4), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match=r"same shape \[N\], got .*'advantages'"):
            loss_config().policy_loss(n3, n3, advantages, n3)


def test_a_missing_reference_is_said():
    n3 = torch.zeros(3)
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        loss_config(use_kl_loss=True, kl_loss_type="k3").policy_loss(n3, n3, n3, n3)


# --- losses of one's own


def test_a_registered_loss_is_used():
    @register_policy_loss("test_reinforce")
    def reinforce(log_prob, old_log_prob, advantages, loss_weights, policy_loss_cfg):
        return -policy_loss_cfg["scale"] * (loss_weights * advantages * log_prob).sum()

    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "test_reinforce", "scale": 3})
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = config.policy_loss(x, x.detach(), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]))
    assert loss.item() == pytest.approx(-1.5)
    assert math.isfinite(finalize_metrics(metrics)["ratio_max"])


def test_a_loss_at_a_dotted_path_is_used():
    module = types.ModuleType("losses_of_a_user")
    module.per_token = lambda log_prob, old, advantages, weights, cfg: -weights * advantages * log_prob
    module.summed = lambda *tensors: module.per_token(*tensors).sum()
    sys.modules["losses_of_a_user"] = module
    x = torch.tensor([-1.0, -2.0])
    args = (x, x, torch.ones(2), torch.full((2,), 0.5))
    config = GRPOLossConfig(policy_loss_cfg={"loss_type": "losses_of_a_user.summed"})
    assert config.policy_loss(*args)[0].item() == 1.5
    with pytest.raises(ValueError, match=r"per_token' returned shape \[2\]; a scalar is needed"):
        GRPOLossConfig(policy_loss_cfg={"loss_type": "losses_of_a_user.per_token"}).policy_loss(*args)


def test_another_kind_of_loss():
    class PlainConfig(BaseRLLossConfig):
        def policy_loss(self, logprobs, old_logprobs, advantages, weights, ref_logprobs=None, is_weights=None):
            return -(weights * advantages * logprobs).sum(), {}

    loss, _ = PlainConfig(policy_loss_cfg=CLIP).policy_loss(-torch.ones(2), -torch.ones(2), *[torch.ones(2)] * 2)
    assert loss.item() == 2
    with pytest.raises(TypeError):
        BaseRLLossConfig(policy_loss_cfg=CLIP)
