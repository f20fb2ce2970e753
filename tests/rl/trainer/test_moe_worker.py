"""A model with experts in the training worker: the routers' losses reach weights and metrics; what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.rl.trainer.test_worker import loss_cfg, make_samples, make_worker, packs_of, weights
from tests.train.helpers import worker_config, write_moe_model
from xtuner.v1.config import FSDPConfig
from xtuner.v1.model import BalancingLossConfig, ZLossConfig, get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.base import GenerateOutput
from xtuner.v1.rl.trainer import TrainingWorker, pack_samples
from xtuner.v1.rl.trainer.probe import make_probe, probe_request
from xtuner.v1.rl.trainer.worker import _by_rollout


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_moe_model(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture
def worker_of(moe):
    made: list[TrainingWorker] = []

    def make(balancing=None, z=None, **changes) -> TrainingWorker:
        config = get_model_config_from_hf(moe)
        config.balancing_loss_cfg = balancing and BalancingLossConfig(balancing_loss_alpha=balancing)
        config.z_loss_cfg = z and ZLossConfig(z_loss_alpha=z)
        made.append(make_worker(moe, model_cfg=config, **changes))
        return made[-1]

    yield make
    for worker in reversed(made):
        worker.stop()


def test_the_losses_are_told_and_felt(worker_of) -> None:
    samples = make_samples(8)
    plain, balanced, small_logits = worker_of(), worker_of(balancing=3.0), worker_of(z=0.1)
    names = {"router/max_violation", "router/mean_violation"}
    for worker, more in ((plain, []), (balanced, ["router/balancing_loss"]), (small_logits, ["router/z_loss"])):
        history = []
        for step in range(1, 9):
            metrics = worker.fit(packs_of(samples)[0], step).optimizer_steps[0]
            assert {name for name in metrics if name.startswith("router/")} == names | set(more)
            history.append(metrics)
        worker.history = history
    # The first step is the same policy loss for all, and what is asked for shrinks.
    assert plain.history[0]["loss"] == balanced.history[0]["loss"] == small_logits.history[0]["loss"]
    assert balanced.history[0]["router/balancing_loss"] > 3.0  # 3.0 is that of equal load
    assert balanced.history[-1]["router/balancing_loss"] < balanced.history[0]["router/balancing_loss"]
    assert balanced.history[-1]["router/max_violation"] < plain.history[-1]["router/max_violation"]
    assert small_logits.history[-1]["router/z_loss"] < 0.9 * small_logits.history[0]["router/z_loss"]


def test_frozen_routers_stay(moe) -> None:
    config = get_model_config_from_hf(moe)
    config.freeze_routers = True
    worker = make_worker(moe, model_cfg=config)
    before = weights(worker)
    worker.fit(packs_of(make_samples(4))[0], 1)
    for name, tensor in weights(worker).items():
        assert torch.equal(tensor, before[name]) == name.endswith("gate.weight"), name
    worker.stop()


def test_samples_without_advantage_still_balance_the_experts(moe, worker_of) -> None:
    """Their policy gradient is zero, that of the routers' losses is not: they may not be left out of the backward."""
    config = get_model_config_from_hf(moe)
    assert not worker_config(moe, model_cfg=config).zero_without_advantage
    config.balancing_loss_cfg = None
    assert worker_config(moe, model_cfg=config).zero_without_advantage
    # Without the losses they are left out, and are told of in the load all the same.
    samples = [replace(s, advantages=[0.0] * len(s.advantages)) if i % 2 else s for i, s in enumerate(make_samples(8))]
    options = dict(ranks=1, optimizer_steps=1, pack_max_length=256, hidden_size=32, share_prompts=True)
    rows = []
    for skip in (False, True):
        packs = pack_samples(samples, skip_zero_advantage=skip, **options)[0]
        assert [pack.needs_gradient for pack in packs[0]] == [True, False][: 1 + skip]
        rows.append(worker_of().fit(packs, 1).optimizer_steps[0])
    assert rows[0]["router/max_violation"] == rows[1]["router/max_violation"]
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-5)


def test_several_updates_have_losses_of_their_own_tokens(worker_of) -> None:
    worker = worker_of(balancing=0.5, z=0.1)
    first, second = worker.fit(packs_of(make_samples(8), steps=2)[0], 1).optimizer_steps
    assert first["router/z_loss"] != second["router/z_loss"]
    assert first["router/balancing_loss"] >= 0.5 * (1 - 1e-6) and second["ratio_abs_dev"] > 0


def replayed_packs(steps=1):
    """Packs of 8 samples with random experts, the model having one layer of four, of which a token uses two."""
    samples, rng = make_samples(8), np.random.default_rng(0)
    for sample in samples:
        sample.routed_experts = rng.random((len(sample.input_ids), 1, 4)).argsort(-1)[..., :2].astype(np.int16)
    options = dict(ranks=1, optimizer_steps=steps, pack_max_length=64, hidden_size=32, share_prompts=True, seed=1)
    return pack_samples(samples, routing_shape=(1, 2, 4), **options)[0]


def test_given_experts_are_used_before_and_in_the_update(worker_of) -> None:
    """Old log-probs and those of the update go by the same experts: nothing else would leave the ratio at 1."""
    found = {}
    for name, offload in (("device", False), ("host", True)):
        worker = worker_of(offload_rollout_routed_experts=offload, optimizer_steps=2)
        result = worker.fit(replayed_packs(steps=2), 1)
        first = result.optimizer_steps[0]
        assert first["router/replay_missing_share"] == 0 and first["router/replay_changed_share"] > 0.2
        assert first["ratio_abs_dev"] < 1e-6
        found[name] = result.train_logprobs, weights(worker)
    assert found["device"][0] == found["host"][0]
    for name, tensor in found["device"][1].items():
        assert torch.equal(tensor, found["host"][1][name]), name
    plain = worker_of().fit([[replace(p, routed_experts=None) for p in part] for part in replayed_packs()], 1)
    assert plain.train_logprobs != found["device"][0] and "router/replay_missing_share" not in plain.optimizer_steps[0]


def test_the_reference_chooses_by_itself_unless_told(worker_of) -> None:
    kl = loss_cfg(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
    own, given = (
        worker_of(loss_cfg=kl, replay_routing_in_reference=replay).fit(replayed_packs(), 1).optimizer_steps[0]
        for replay in (False, True)
    )
    kl_names = [name for name in own if "kl" in name and own[name] != given[name]]
    assert kl_names and given["grad_norm"] != own["grad_norm"]
    # The policy is still the reference: by the same experts there is no distance.
    assert all(abs(given[name]) < 1e-6 < abs(own[name]) for name in kl_names), (own, given)


def test_replay_of_what_is_not_there_is_refused(moe, model) -> None:
    for name in ("offload_rollout_routed_experts", "replay_routing_in_reference"):
        with pytest.raises(ValidationError, match=f"train_worker_cfg.{name}=True: model_type='qwen3' has no experts"):
            worker_config(model, **{name: True})
    with pytest.raises(ValidationError, match="replay_routing_in_reference=True: there is no reference"):
        worker_config(moe, replay_routing_in_reference=True)


def test_sizes_that_do_not_fit_the_experts_are_refused(moe, model) -> None:
    with pytest.raises(ValidationError, match="fsdp_cfg.ep_size=3 does not divide the model's 4 experts"):
        worker_config(moe, fsdp_cfg=FSDPConfig(ep_size=3))
    with pytest.raises(ValidationError, match="ref_model_fsdp_cfg.ep_size=8 does not divide the model's 4 experts"):
        worker_config(moe, ref_model_fsdp_cfg=FSDPConfig(ep_size=8))
    with pytest.raises(ValidationError, match="fsdp_cfg.ep_size=2: model_type='qwen3' has no experts"):
        worker_config(model, fsdp_cfg=FSDPConfig(ep_size=2))
    with pytest.raises(ValidationError, match="fsdp_cfg.tp_size=2"):
        worker_config(moe, fsdp_cfg=FSDPConfig(tp_size=2))
    worker_config(moe, fsdp_cfg=FSDPConfig(ep_size=4))


@pytest.mark.parametrize("replayed", [False, True])
def test_the_canary_rides_and_changes_nothing(worker_of, replayed) -> None:
    """Its rows choose experts of their own and count in no loss of the routers."""
    samples = make_samples(4)
    fields = {"balancing": 3.0, "z": 0.1}
    plain, along = worker_of(**fields), worker_of(**fields)
    (((pack,),),) = packs_of(samples, length=4096)
    if replayed:
        layers, chosen, experts = plain.config.model_cfg.routing_shape
        rows = torch.arange(pack.input_ids.numel())[:, None, None]
        ids = (rows + torch.arange(layers)[None, :, None] + torch.arange(chosen)) % experts
        pack = replace(pack, routed_experts=ids.to(torch.int16))
    tokens = [7, 8, 9]
    outputs = {"rollout_0": GenerateOutput(-1, tokens, [0.0] * 3, [4] * 3, "length")}
    request = probe_request(384, 144, 64)
    probe = make_probe(outputs, request, version=4, limit=1e-4, hidden_size=32, pad_multiple=1)
    truth: dict[int, list[float]] = {}
    _by_rollout(probe.pack, plain.engine.logprobs(probe.pack), truth)
    probe.answers[0]["rollout_0"] = truth[0]
    results = [worker.fit([[pack]], 1, given) for worker, given in ((plain, None), (along, probe))]
    assert results[1].metrics["canary/logprob_gap"] < 1e-5
    assert results[1].optimizer_steps[0] == pytest.approx(results[0].optimizer_steps[0], abs=1e-5)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(along)[name], tensor, atol=2e-4, rtol=0, msg=name)
