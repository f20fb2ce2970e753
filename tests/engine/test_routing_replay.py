"""Routing replay: experts that a pack brings are used, weighted and trained as if the router had chosen them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from xtuner.v1.model import MoEModelConfig
from xtuner.v1.model.blocks import gather_whole
from xtuner.v1.model.moe import Router
from xtuner.v1.rl.trainer.packing import pack_samples

from .helpers import make_samples, on_ranks
from .test_expert_parallel import MODELS, make

# Name -> FSDP options and ranks a pack.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp": ({}, 1), "ep": ({"ep_size": 2}, 1), "sp x ep": ({"ep_size": 2, "recompute_ratio": 1.0}, 2),
}  # fmt: skip


def samples_with_experts(config: MoEModelConfig, count: int = 9):
    """Groups of siblings with random experts; one sample knows none, one only those of its first tokens."""
    layers, top_k, experts = config.routing_shape
    rng = np.random.default_rng(0)
    samples = [s for s in make_samples(count) for _ in range(1 + 3 * (s.rollout_id < 2))]
    for sample in samples:
        order = rng.random((len(sample.input_ids), layers, experts)).argsort(-1)
        sample.routed_experts = order[..., :top_k].astype(np.int16)
    samples[-2].routed_experts, samples[-1].routed_experts = samples[-2].routed_experts[:3], None
    return samples


def packs_of(samples, config: MoEModelConfig, ranks: int = 1, share: bool = True):
    return pack_samples(
        samples, ranks=ranks, optimizer_steps=1, pack_max_length=4096, hidden_size=32, share_prompts=share,
        routing_shape=config.routing_shape,
    )  # fmt: skip


def own_choice(engine, pack):
    """int16 [T, L, K], what the routers choose by themselves."""
    chosen: list[torch.Tensor] = []
    gates = [m for m in engine.model.modules() if isinstance(m, Router)]
    hooks = [gate.register_forward_hook(lambda _, args, out: chosen.append(out[1])) for gate in gates]
    engine.logprobs(replace(pack, routed_experts=None))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).to(torch.int16)


def gradients(engine, pack, total: int) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    routers = engine.router_loss([pack])
    logprobs, _ = engine.forward(pack)
    loss = -(pack.advantages * logprobs).sum() / total
    engine.backward(loss + routers.add(engine.model.router_stats))
    grads = {n: gather_whole(p.grad).clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    engine.optimizer.zero_grad()
    return float(loss.detach()), grads, routers.metrics()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", [{}, {"recompute_ratio": 1.0}, {"recompute_ratio": 1.0, "recompute": "selective"}])
def test_the_own_choice_changes_no_bit(one_process_group, model, options) -> None:
    engine = make(model, options, 1)
    (pack,) = packs_of(make_samples(6), MODELS[model])[0][0]
    assert bool((pack.routed_experts == -1).all())
    _, expected, metrics = gradients(engine, replace(pack, routed_experts=None), 50)
    assert not any("replay" in name for name in metrics)
    for experts, missing in ((own_choice(engine, pack), 0.0), (pack.routed_experts, 1.0)):
        _, got, metrics = gradients(engine, replace(pack, routed_experts=experts), 50)
        assert metrics["router/replay_missing_share"] == missing and metrics["router/replay_changed_share"] == 0
        for name, grad in expected.items():
            assert torch.equal(got[name], grad), name


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_given_experts_are_those_of_finite_differences(one_process_group, model) -> None:
    """Routers included: their scores weigh the given experts. The own choice would jump where scores cross."""
    config = MODELS[model].model_copy(update={"balancing_loss_cfg": None, "z_loss_cfg": None})
    engine = make(model, {}, 1)
    engine.model.config.balancing_loss_cfg = engine.model.config.z_loss_cfg = None
    samples = [s for s in samples_with_experts(config) if s.routed_experts is not None][:-1]
    (pack,) = packs_of(samples, config)[0][0]
    assert bool((pack.routed_experts >= 0).all())
    loss, grads, _ = gradients(engine, pack, 50)
    plain, _, _ = gradients(engine, replace(pack, routed_experts=None), 50)
    assert abs(loss - plain) > 1e-3 * abs(plain)  # other experts, other log-probs
    generator = torch.Generator().manual_seed(0)
    for part in ("mlp.gate", "mlp.experts", "self_attn"):
        params = {n: p for n, p in engine.model.named_parameters() if part in n and p.requires_grad}
        steps = {n: torch.randn(p.shape, generator=generator) * 2e-3 for n, p in params.items()}
        slope = sum(float((grads[n] * step).sum()) for n, step in steps.items())
        losses = []
        for sign in (1, -2, 1):
            with torch.no_grad():
                for name, param in params.items():
                    param.to_local().add_(sign * steps[name])
            losses.append(gradients(engine, pack, 50)[0])
        assert (losses[0] - losses[1]) / 2 == pytest.approx(slope, rel=0.02, abs=2e-6), part


def test_weights_are_a_softmax_over_the_given_experts() -> None:
    """Equation of the paper, where the model's own weights are a softmax over what it chose."""
    router = Router(MODELS["qwen3_moe"], torch.float32)
    torch.nn.init.normal_(router.weight, std=0.3)
    x, given = torch.randn(5, 32), torch.tensor([[0, 1, 2], [7, 3, 5], [-1, -1, -1], [6, 0, 4], [2, 1, 7]])
    weights, ids, stats = router(x, torch.ones(5), given.to(torch.int16))
    logits = x @ router.weight.t()
    own = logits.topk(3).indices
    expected = torch.where(given < 0, own, given)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, logits.gather(1, expected).softmax(-1))
    other = sum(len(set(g) - set(o)) for g, o in zip(given.tolist(), own.tolist(), strict=True) if g[0] >= 0)
    assert stats.replayed.tolist() == [12, other] and other > 0
    counts = torch.bincount(expected.flatten(), minlength=8)
    assert torch.equal(stats.assigned, counts.float())


def run_layouts(folder: Path) -> dict[str, Any]:
    results = {}
    for name, (fsdp, sp) in (LAYOUTS if dist.get_world_size() > 1 else {"one": ({}, 1)}).items():
        for model in ("qwen3_moe", "deepseek_v3"):
            engine, samples = make(model, fsdp, sp), samples_with_experts(MODELS[model])
            packs = packs_of(samples, MODELS[model], ranks=dist.get_world_size() // sp)
            (pack,) = packs[dist.get_rank() // sp][0]
            _, grads, metrics = gradients(engine, pack, sum(s.num_trained for s in samples))
            results[f"{name}/{model}"] = {"grads": grads, "metrics": metrics}
    return results


def test_experts_given_to_several_ranks_equal_one_process(one_process_group, tmp_path) -> None:
    """Rows cut over ranks, shared prompts, samples without experts: every row gets its own."""
    torch.set_num_threads(1)
    expected = run_layouts(tmp_path)
    for name, got in on_ranks(2, run_layouts, tmp_path)[0].items():
        one = expected[f"one/{name.split('/')[1]}"]
        assert got["metrics"] == pytest.approx(one["metrics"], rel=1e-5), name
        assert 0 < got["metrics"]["router/replay_missing_share"] < 0.3
        assert got["metrics"]["router/replay_changed_share"] > 0.3
        for param, grad in one["grads"].items():
            assert (got["grads"][param] - grad).norm() <= 2e-5 * grad.norm(), (name, param)


def test_packs_do_not_depend_on_whether_prompts_are_shared(one_process_group) -> None:
    """Siblings whose prompts were given the same experts: prefilled once by the engine."""
    config = MODELS["qwen3_moe"]
    samples = samples_with_experts(config)
    first: dict[tuple[int, ...], np.ndarray] = {}
    for sample in samples[:-2]:
        prompt = first.setdefault(tuple(sample.input_ids[: sample.prompt_len]), sample.routed_experts)
        sample.routed_experts[: sample.prompt_len] = prompt[: sample.prompt_len]
    found = []
    for share in (False, True):
        (pack,) = packs_of(samples, config, share=share)[0][0]
        found.append(gradients(make("qwen3_moe", {}, 1), pack, 50))
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5)
    for name, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], grad, rtol=1e-4, atol=1e-6, msg=name)
