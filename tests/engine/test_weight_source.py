"""Weights on their way out of a training engine, and into an engine of the same process."""

import asyncio
import json

import pytest
import torch

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.engine.placement import local_part
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.rollout.backends.native.weights import PlainWeights, WeightReceiver
from xtuner.v1.rl.weight_update import WeightUpdateError, push_in_process, with_checksums

from .helpers import CONFIG, make_engine, make_samples, packs_of

DEEPSEEK = dict(
    model_type="deepseek_v3", vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, intermediate_size=40, moe_intermediate_size=12, n_routed_experts=8, n_group=4, topk_group=2,
    n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=20, kv_lora_rank=12, qk_rope_head_dim=8,
    qk_nope_head_dim=10, v_head_dim=6, num_experts_per_tok=3, max_position_embeddings=256, eos_token_id=1,
)  # fmt: skip
BF16 = {"cpu_param_dtype": "bfloat16"}


def names_and_dtypes(buckets):
    return {name: bucket.dtype or t.dtype for bucket in buckets for name, t in bucket.tensors.items()}


def engine_of(kind, tmp_path, **fsdp):
    if kind == "dense":
        return make_engine(tmp_path, fsdp=fsdp)
    engine = TrainEngine(
        model_config_from_dict(DEEPSEEK), FSDPConfig(recompute_ratio=0.0, torch_compile=False, **fsdp),
        device=torch.device("cpu"), optim_cfg=AdamWConfig(), lr_cfg=LRConfig(),
    )  # fmt: skip
    engine.model.init_weights(seed=3)
    return engine


@pytest.mark.parametrize("by_parameter", [False, True])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("fsdp", [{}, BF16])
def test_lent_weights_are_the_parameters_and_arrive_like_cast_ones(tmp_path, kind, fsdp, by_parameter):
    engine = engine_of(kind, tmp_path, **fsdp)
    lent, cast = (list(engine.weight_buckets(6_000, cast=c, by_parameter=by_parameter)) for c in (False, True))
    assert names_and_dtypes(lent) == names_and_dtypes(cast) and {b.by_parameter for b in lent + cast} == {by_parameter}
    names = engine.model.named_parameters() if by_parameter else engine.model.hf_params.items()
    assert names_and_dtypes(lent).keys() == dict(names).keys()
    assert len(lent) > 2 and all(len(b.tensors) == 1 or b.num_bytes <= 6_000 for b in lent)
    storages = {local_part(p.detach()).untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert all(t.untyped_storage().data_ptr() in storages for b in lent for t in b.tensors.values())
    dtype = engine.compute_dtype
    for kept in (torch.float32, dtype):
        expected, found = (engine.model_cfg.build("cpu", kept).requires_grad_(False) for _ in range(2))
        WeightReceiver(expected).take(with_checksums(engine.weight_buckets(6_000)))
        for buckets in (cast, engine.weight_buckets(6_000, cast=False, by_parameter=by_parameter)):
            WeightReceiver(found).take(with_checksums(buckets))
            for (name, a), b in zip(expected.named_parameters(), found.parameters(), strict=True):
                assert torch.equal(a, b), name
                b.zero_()


def test_lent_weights_follow_training_and_parking(tmp_path):
    engine = make_engine(tmp_path)
    model = engine.model_cfg.build("cpu").requires_grad_(False)
    receiver = WeightReceiver(model)
    receiver.take(engine.weight_buckets(6_000, cast=False))
    before = {name: p.clone() for name, p in model.named_parameters()}
    logprobs, _ = engine.forward(packs_of(make_samples(4))[0][0][0])
    engine.backward(-logprobs.sum())
    engine.step()
    engine.parking.park()
    engine.parking.restore()
    receiver.take(engine.weight_buckets(6_000, cast=False))
    for name, param in model.named_parameters():
        assert torch.equal(param, local_part(engine.model.get_parameter(name).detach())), name
        assert not torch.equal(param, before[name]), name


@pytest.mark.parametrize("by_parameter", [False, True])
def test_weights_that_were_dropped_and_taken_again_are_written_and_read_where_they_are_now(tmp_path, by_parameter):
    engine = make_engine(tmp_path)
    model = engine.model_cfg.build("cpu").requires_grad_(False)
    weights, receiver = PlainWeights(model), WeightReceiver(model)
    receiver.take(engine.weight_buckets(6_000, by_parameter=by_parameter))
    names = [name for bucket in engine.weight_buckets(6_000, by_parameter=by_parameter) for name in bucket.tensors]
    sums = receiver.sums(names, torch.float32)
    weights.drop()
    receiver.forget()
    weights.restore()
    for param in model.parameters():
        param.zero_()
    assert receiver.sums(names, torch.float32) == {name: (0, elements) for name, (_, elements) in sums.items()}
    receiver.take(engine.weight_buckets(6_000, by_parameter=by_parameter))
    assert all(param.abs().max() > 0 for param in model.parameters())
    assert receiver.sums(names, torch.float32) == sums


@pytest.mark.parametrize("checksum", [False, True])
def test_a_push_in_process_changes_version_and_weights(tmp_path, monkeypatch, checksum):
    folder = tmp_path / "model"
    engine = make_engine(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rollout = NativeEngine(folder, load_weights=False, cpu_kernels=False)
    asyncio.run(rollout.start())
    monkeypatch.setattr("xtuner.v1.rl.weight_update.in_process.peer", {"rollout_0": rollout}.__getitem__)
    asyncio.run(push_in_process(engine, "rollout_0", 5, 6_000, checksum))
    assert rollout.version == 5
    for name, param in rollout._model.named_parameters():
        assert torch.equal(param, local_part(engine.model.get_parameter(name).detach())), name


def test_an_update_that_fails_lets_the_other_ranks_end_their_gathering(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    engine, drained = make_engine(folder), []
    rollout = NativeEngine(folder, load_weights=False, cpu_kernels=False, dtype=torch.bfloat16)
    asyncio.run(rollout.start())
    monkeypatch.setattr("xtuner.v1.rl.weight_update.in_process.peer", {"rollout_0": rollout}.__getitem__)

    class Float16:
        def weight_buckets(self, bucket_bytes, cast, by_parameter):
            yield from engine.weight_buckets(bucket_bytes, torch.float16)
            drained.append(True)

    with pytest.raises(WeightUpdateError, match="float16"):
        asyncio.run(push_in_process(Float16(), "rollout_0", 5, 6_000))
    assert drained and rollout.version == 0
    with pytest.raises(KeyError, match="rollout_1"):
        asyncio.run(push_in_process(Float16(), "rollout_1", 5, 6_000))
    assert len(drained) == 2
