"""Adapters in the training worker: the reference, several updates, and what is refused."""

import pytest
import torch
from pydantic import ValidationError

from tests.rl.trainer.test_worker import CLIP, PLAIN, loss_cfg, make_samples, make_worker, packs_of, weights
from tests.train.helpers import worker_config, write_model
from xtuner.v1.config import FSDPConfig, LoRAConfig, MuonConfig
from xtuner.v1.rl.loss import GRPOLossConfig, RolloutImportanceSampling
from xtuner.v1.rl.trainer import TrainingWorker

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
LORA = LoRAConfig(rank=4, alpha=8)


@pytest.fixture
def worker_of(model):
    made: list[TrainingWorker] = []

    def make(**changes) -> TrainingWorker:
        made.append(make_worker(model, **({"lora_cfg": LORA} | changes)))
        return made[-1]

    yield make
    for worker in reversed(made):
        worker.stop()


def test_the_reference_without_adapters_equals_a_frozen_model_to_the_bit(model, worker_of):
    worker = worker_of(loss_cfg=loss_cfg(**KL))
    assert worker.reference is None
    alone = worker_of(lora_cfg=None, loss_cfg=loss_cfg(**KL)).reference
    assert not any(p.requires_grad for p in alone.model.parameters())
    for step in range(1, 4):
        packs = packs_of(make_samples(6, seed=step), steps=2)[0]
        ours = worker._reference_logprobs(packs[0])
        assert all(torch.equal(ours[id(pack)], alone.logprobs(pack)) for pack in packs[0])
        updates = worker.fit(packs, step).optimizer_steps
    assert updates[-1]["ref_kl"] > 1e-4 and updates[1]["ratio_abs_dev"] > 0


def test_several_updates_a_step_have_the_old_policy_of_before_them(worker_of):
    worker = worker_of()
    samples = make_samples(8)
    before = worker.engine.logprobs(packs_of(samples, length=999)[0][0][0])
    result = worker.fit(packs_of(samples, steps=3)[0], 1)
    assert result.optimizer_steps[0]["ratio_abs_dev"] < 1e-5 < result.optimizer_steps[2]["ratio_abs_dev"]
    ids = packs_of(samples, length=999)[0][0][0].rollout_ids
    seen = torch.tensor([value for i in ids for value in result.train_logprobs[i]])
    torch.testing.assert_close(seen, before, rtol=0, atol=1e-5)


def test_with_dropout_the_ratio_is_one_all_the_same(worker_of):
    worker = worker_of(lora_cfg=LoRAConfig(rank=4, alpha=8, dropout=0.5))
    for step in range(1, 4):
        update = worker.fit(packs_of(make_samples(6))[0], step).optimizer_steps[0]
        assert update["ratio_abs_dev"] == 0 and update["grad_norm"] > 0
    assert torch.isfinite(torch.tensor(update["loss"]))


def test_another_reference_is_a_model_of_its_own(model, worker_of, tmp_path):
    other = write_model(tmp_path / "other", std=0.1)
    worker = worker_of(loss_cfg=loss_cfg(**KL), ref_load_from=other)
    assert worker.reference is not None
    first = worker.fit(packs_of(make_samples(4))[0], 1).optimizer_steps[0]
    assert first["ref_kl"] > 1e-2
    same = worker_of(loss_cfg=loss_cfg(**KL), ref_load_from=model)
    assert same.reference is None


def test_the_seed_makes_the_adapters(worker_of, model):
    one, two = worker_of(), worker_of()
    packs = packs_of(make_samples(4))[0]
    for worker in (one, two):
        worker.fit(packs, 1)
    after = weights(one)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(two).items())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lora_cfg": LoRAConfig(target_modules=["qkv_proj"])}, "qkv_proj can have no adapter .* q_proj, k_proj"),
        ({"lora_cfg": LoRAConfig(target_modules=["lm_head"])}, "lm_head can have no adapter"),
        ({"fsdp_cfg": FSDPConfig(tp_size=2)}, "tp_size=2"),
        ({"optim_cfg": MuonConfig()}, "optim_cfg is a MuonConfig, which is made for whole matrices"),
        ({"ref_model_fsdp_cfg": FSDPConfig()}, "ref_model_fsdp_cfg: with lora_cfg the reference is the policy"),
        ({"lora_cfg": LoRAConfig(dropout=0.1), "optimizer_steps": 2}, r"dropout=0.1: optimizer_steps > 1 compares"),
        (
            {
                "lora_cfg": LoRAConfig(dropout=0.1),
                "loss_cfg": GRPOLossConfig(
                    policy_loss_cfg=CLIP, rollout_is=RolloutImportanceSampling(rollout_is_threshold=(0.5, 2.0))
                ),
            },
            r"dropout=0.1: loss_cfg.rollout_is compares",
        ),
        (
            {"lora_cfg": LoRAConfig(dropout=0.1), "fsdp_cfg": FSDPConfig(checkpoint_preserve_rng_state=False)},
            "checkpoint_preserve_rng_state=True",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(model, changes, message):
    with pytest.raises(ValidationError, match=message):
        worker_config(model, **(PLAIN | {"lora_cfg": LORA} | changes))
