"""Optimizers and their options in the worker's configuration."""

import pytest
from pydantic import ValidationError

from tests.engine.helpers import make_samples, packs_of
from tests.train.helpers import worker_config
from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig, MuonConfig, OptimConfig
from xtuner.v1.engine.placement import local_part
from xtuner.v1.rl.trainer import TrainingWorker, WorkerConfig


def test_the_configuration_tells_the_optimizers_apart(model):
    for optim in (AdamWConfig(lr=1e-3), MuonConfig(lr=1e-3, momentum=0.9, moment_dtype="bf16")):
        cfg = worker_config(model, optim_cfg=optim)
        again = WorkerConfig.model_validate({**dict(cfg), "optim_cfg": cfg.model_dump(mode="json")["optim_cfg"]})
        assert type(again.optim_cfg) is type(optim) and again.optim_cfg == optim
    assert isinstance(worker_config(model, optim_cfg={"lr": 0.1}).optim_cfg, AdamWConfig)
    with pytest.raises(ValidationError):
        worker_config(model, optim_cfg=OptimConfig())


def test_nothing_is_left_to_swap_where_moments_are_on_the_host(model):
    with pytest.raises(ValidationError, match=r"cpu_offload=True.*swap_optimizer=True.*set one of them"):
        worker_config(model, optim_cfg=AdamWConfig(lr=1e-3, swap_optimizer=True), fsdp_cfg=FSDPConfig(cpu_offload=True))
    with pytest.raises(ValidationError, match=r"cpu_offload=True.*Muon.*use optim_cfg.swap_optimizer=True"):
        worker_config(model, optim_cfg=MuonConfig(lr=1e-3), fsdp_cfg=FSDPConfig(cpu_offload=True))


def test_a_worker_trains_with_muon(model):
    config = worker_config(model, optim_cfg=MuonConfig(lr=1e-2), lr_cfg=LRConfig(warmup_ratio=0))
    worker = TrainingWorker(config, rank=0, world_size=1, accelerator="CPU", total_optimizer_steps=10, seed=3)
    worker.setup("127.0.0.1", 0)
    try:
        before = {name: local_part(p.detach()).clone() for name, p in worker.engine.model.named_parameters()}
        result = worker.fit(packs_of(make_samples(6))[0], train_step=1)
        assert result.optimizer_steps[0]["grad_norm"] > 0 and not result.optimizer_steps[0]["skipped"]
        for name, p in worker.engine.model.named_parameters():
            moved = float((local_part(p.detach()) - before[name]).square().mean().sqrt())
            # The root mean square of both rules' updates: 1 for AdamW's first, about 0.2 for Muon's.
            assert moved == pytest.approx(0.2e-2 if p.dim() == 2 and "layers" in name else 1e-2, rel=0.35), name
    finally:
        worker.stop()
