"""Auxiliary losses of routers: formulas, independence of the split, load, and routers that stay frozen."""

import pytest
import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.engine.router_loss import RouterLoss, num_rows, row_counts
from xtuner.v1.model import BalancingLossConfig, MHAConfig, MoEModelConfig, ZLossConfig
from xtuner.v1.model.moe import RouterStats
from xtuner.v1.rl.trainer.packing import make_pack, make_units
from xtuner.v1.rl.trainer.probe import with_rider
from xtuner.v1.rl.trainer.samples import IGNORE, TrainingSample

from .helpers import gradients, make_samples, packs_of, weights


def moe_config(**changes) -> MoEModelConfig:
    values = dict(
        vocab_size=61, max_position_embeddings=256, num_hidden_layers=2, hidden_size=32, n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=20, balancing_loss_cfg=None,
        attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True),
    )  # fmt: skip
    return MoEModelConfig(**values | changes)


def make_engine(recompute_ratio: float = 0.0, **changes) -> TrainEngine:
    engine = TrainEngine(
        moe_config(**changes), FSDPConfig(recompute_ratio=recompute_ratio, torch_compile=False),
        device=torch.device("cpu"), optim_cfg=AdamWConfig(lr=1e-2), lr_cfg=LRConfig(warmup_ratio=0),
    )  # fmt: skip
    engine.model.init_weights(seed=7, std=0.2)
    return engine


def router_backward(engine: TrainEngine, packs) -> RouterLoss:
    routers = engine.router_loss(packs)
    for pack in packs:
        engine.forward(pack)
        engine.backward(routers.add(engine.model.router_stats))
    return routers


def sibling_samples() -> list[TrainingSample]:
    """Groups of four behind one prompt; the second response of each, and all of the last group, have one token."""
    out: list[TrainingSample] = []
    for seed in range(4):
        group = make_samples(4, seed=seed)
        prompt = group[0].input_ids[: group[0].prompt_len]
        for i, sample in enumerate(group):
            response = [label for label in sample.labels if label != IGNORE]
            response = response[:1] if i == 1 or seed == 3 else response
            own, labels = response[:-1], [IGNORE] * (len(prompt) - 1) + response
            out.append(TrainingSample(len(out), prompt + own, labels, [1.0] * len(labels), None, len(prompt)))
    return out


SPLITS = {
    "one pack": dict(length=4096, share=False),
    "shared prompts": dict(length=4096, share=True),
    "small packs of shared prompts": dict(length=30, share=True),
    "small packs": dict(length=30, share=False),
}


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_z_loss_does_not_depend_on_the_split(recompute) -> None:
    results = {}
    for name, split in SPLITS.items():
        engine = make_engine(recompute, z_loss_cfg=ZLossConfig(z_loss_alpha=0.5))
        packs = packs_of(sibling_samples(), **split)[0][0]
        assert (len(packs) > 1) == name.startswith("small")
        assert num_rows(packs) == sum(len(s.input_ids) for s in sibling_samples())
        routers = router_backward(engine, packs)
        results[name] = routers.metrics()["router/z_loss"], _present(gradients, engine)
    value, expected = results.pop("one pack")
    assert value > 0 and any(grad.any() for grad in expected.values())
    for name, (other, grads) in results.items():
        assert other == pytest.approx(value, rel=1e-5), name
        for param, grad in expected.items():
            torch.testing.assert_close(grads[param], grad, rtol=1e-4, atol=1e-6, msg=f"{name} {param}")


def _present(read, engine):
    """Gradients of the parameters that have one: behind the last router nothing does."""
    for param in engine.model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return read(engine)


def test_balancing_loss_does_not_depend_on_whether_prompts_are_shared() -> None:
    found = []
    for name in ("one pack", "shared prompts"):
        engine = make_engine(balancing_loss_cfg=BalancingLossConfig(balancing_loss_alpha=0.5))
        router_backward(engine, packs_of(sibling_samples(), **SPLITS[name])[0][0])
        found.append(_present(gradients, engine))
    assert found[0]["layers.0.mlp.gate.weight"].any()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def _stats(assigned: list[float], probs: list[float]) -> list[RouterStats]:
    return [RouterStats(torch.tensor(assigned).float(), torch.tensor(probs).float(), torch.tensor(0.0), torch.zeros(2))]


def test_balancing_loss_is_the_formula_with_the_load_seen_so_far() -> None:
    config = moe_config(
        n_routed_experts=2, num_experts_per_tok=1, balancing_loss_cfg=BalancingLossConfig(balancing_loss_alpha=0.1)
    )
    routers = RouterLoss(config, rows=8)
    # alpha * E * sum f * P: with f = (3, 1) / 4 and P = (2, 2) / 8.
    first = routers.add(_stats([3, 1], [2, 2]))
    assert float(first) == pytest.approx(0.1 * 2 * (0.75 * 0.25 + 0.25 * 0.25))
    # Both packs together: f = (3, 5) / 8, P of the second pack (1, 3) / 8.
    second = routers.add(_stats([0, 4], [1, 3]))
    assert float(second) == pytest.approx(0.1 * 2 * (3 / 8 * 1 / 8 + 5 / 8 * 3 / 8))
    metrics = routers.metrics()
    assert metrics["router/balancing_loss"] == pytest.approx(float(first + second))
    assert metrics["router/max_violation"] == pytest.approx(5 / 4 - 1)
    alone = config.model_copy(
        update={
            "balancing_loss_cfg": BalancingLossConfig(balancing_loss_alpha=0.1, balancing_loss_global_average=False)
        }
    )
    routers = RouterLoss(alone, rows=8)
    routers.add(_stats([3, 1], [2, 2]))
    assert float(routers.add(_stats([0, 4], [1, 3]))) == pytest.approx(0.1 * 2 * 3 / 8)


def test_equal_load_is_the_minimum_of_one_times_alpha() -> None:
    config = moe_config(balancing_loss_cfg=BalancingLossConfig(balancing_loss_alpha=1.0))
    assert float(RouterLoss(config, rows=12).add(_stats([4] * 6, [2] * 6))) == pytest.approx(1.0)
    assert float(RouterLoss(config, rows=12).add(_stats([24, 0, 0, 0, 0, 0], [12, 0, 0, 0, 0, 0]))) == pytest.approx(6)


def test_load_is_told_without_any_loss() -> None:
    routers = RouterLoss(moe_config(n_routed_experts=4), rows=8)
    loss = routers.add(_stats([8, 4, 4, 0], [2, 2, 2, 2]))
    assert float(loss) == 0 and not loss.requires_grad
    assert routers.metrics() == {"router/max_violation": 1.0, "router/mean_violation": 1.0}


def test_padding_counts_for_nothing_and_a_shared_prompt_for_all_its_samples() -> None:
    samples = sibling_samples()[:4]
    pack = make_pack(make_units(samples, True, 4096, 32, 4), share_prompts=True, pad_multiple=64)
    assert pack.layout.prefix == [-1, 0, 0, 0, -1] and pack.num_padding > 0
    expected = [c for c, n in zip((4, 1, 1, 1, 0), pack.layout.lengths, strict=True) for _ in range(n)]
    assert row_counts(pack).tolist() == expected
    rider = make_pack(make_units(sibling_samples()[4:7], True, 4096, 32, 4), share_prompts=True, pad_multiple=64)
    own = pack.input_ids.numel() - pack.num_padding
    together = row_counts(with_rider(pack, rider, 64))
    assert together[:own].tolist() == expected[:own] and not together[own:].any()
    assert num_rows([pack, pack]) == 2 * sum(len(s.input_ids) for s in samples)
    nothing = make_pack([], share_prompts=True, pad_multiple=64)
    assert row_counts(nothing).tolist() == [0] * 64


def test_frozen_routers_keep_their_bits_and_the_rest_moves() -> None:
    engine = make_engine(freeze_routers=True, z_loss_cfg=ZLossConfig(), balancing_loss_cfg=BalancingLossConfig())
    before = weights(engine)
    packs = packs_of(make_samples(4), length=4096)[0][0]
    routers = engine.router_loss(packs)
    loss = engine.forward(packs[0])[0].sum() + routers.add(engine.model.router_stats)
    engine.backward(loss)
    assert engine.step().skipped is None
    for name, tensor in weights(engine).items():
        assert torch.equal(tensor, before[name]) == name.endswith("mlp.gate.weight"), name
