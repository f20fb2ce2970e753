"""Sums of a sample of weights on both sides of an update."""

import asyncio

import pytest
import torch
from update_helpers import grouped, write_model

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.rollout.backends.engine_side.xtuner_sums import describe, inside
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.weight_update import ReadsWeights, StaleWeightsError, Witness
from xtuner.v1.rl.weight_update.canary import by_module, module_of

LAYERS, EVERY = 6, 4


def names_of(layers: int = LAYERS) -> list[str]:
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    inside = [f"model.layers.{i}.{part}.weight" for i in range(layers) for part in (*parts, "input_layernorm")]
    return ["model.embed_tokens.weight", *inside, "model.norm.weight", "lm_head.weight"]


def tensors_of(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 4, generator=generator).to(dtype) for name in names_of()}


def witness_of(tensors, turn=0, every=EVERY, dtype=torch.float32, by="weight", sent=None) -> Witness:
    witness = Witness(1, turn, every, LAYERS, dtype, by)
    for _ in witness.watch(grouped(tensors, sent)):
        pass
    return witness


class Fused:
    """An engine that keeps a layer's projections in one piece, its rows in another order, and its head padded."""

    sums_by = "module"

    def __init__(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.parameters = dtype, {}
        for i in range(LAYERS):
            layer = f"model.layers.{i}"
            for part, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
                module = part.split(".")[0]
                pieces = [tensors[f"{layer}.{module}.{name}_proj.weight"] for name in names]
                self.parameters[f"{layer}.{part}.weight"] = torch.cat(pieces).flip(0).T.to(dtype)
            self.parameters[f"{layer}.input_layernorm.weight"] = tensors[f"{layer}.input_layernorm.weight"].to(dtype)
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            self.parameters[name] = tensors[name].to(dtype)
        self.parameters["lm_head.weight"] = torch.nn.functional.pad(tensors["lm_head.weight"], (0, 0, 0, 2)).to(dtype)

    async def weight_sums(self, keys):
        return by_module(describe(inside(self.parameters.items(), keys)), keys, self.dtype)


def test_every_weight_is_in_the_sample_once_in_so_many_updates_and_the_ends_always():
    tensors = tensors_of(0)
    samples = [set(witness_of(tensors, turn).expected()) for turn in range(EVERY)]
    always = set.intersection(*samples)
    ends = {n for n in tensors if n.startswith(("model.layers.0.", f"model.layers.{LAYERS - 1}."))}
    assert always == ends | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert set.union(*samples) == set(tensors)
    assert sum(len(sample - always) for sample in samples) == len(set(tensors) - always)


def test_what_is_in_one_piece_is_compared_whatever_its_layout():
    tensors = tensors_of(0)
    engine = Fused(tensors)
    assert isinstance(engine, ReadsWeights)
    share = asyncio.run(witness_of(tensors, every=1, by="module").compare(engine, "it"))
    assert share == pytest.approx(1 - 1 / len(tensors)), "all but the padded head"
    engine.parameters["model.layers.3.mlp.gate_up_proj.weight"][1, 2] += 1e-6
    with pytest.raises(StaleWeightsError, match="2 have other bits: model.layers.3.mlp.gate_proj.weight, .*up_proj"):
        asyncio.run(witness_of(tensors, every=1, by="module").compare(engine, "it"))


@pytest.mark.parametrize("by", ["weight", "module"])
@pytest.mark.parametrize(
    "kept, sent, held",
    [
        (torch.float32, torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, None, torch.bfloat16), (torch.bfloat16, None, torch.float32),
    ],
)  # fmt: skip
def test_types_of_both_sides_may_differ(by, kept, sent, held):
    """kept by the trainer, sent rounded, held by the engine."""
    tensors = tensors_of(0, kept)
    rounded = {n: t.to(sent or kept).to(held) for n, t in tensors.items()}
    got = witness_of(tensors, every=1, dtype=held, by=by, sent=sent).expected()
    assert got == witness_of(rounded, every=1, dtype=held, by=by).expected()
    rounded["model.norm.weight"] = rounded["model.norm.weight"] * 1.01
    assert got != witness_of(rounded, every=1, dtype=held, by=by).expected()


def test_a_module_with_something_in_another_type_is_not_compared():
    found = {"model.layers.0.mlp.a": [1, 2, "float32"], "model.layers.0.mlp.b": [3, 4, "bfloat16"]}
    for order in (found, dict(reversed(found.items()))):
        assert by_module(order, ["model.layers.0.mlp", "model.norm"], torch.bfloat16)["model.layers.0.mlp"][1] == -1


def test_modules_of_names():
    assert module_of("model.layers.12.mlp.experts.3.up_proj.weight") == "model.layers.12.mlp"
    assert module_of("model.layers.1.input_layernorm.weight") == "model.layers.1.input_layernorm"
    assert module_of("lm_head.weight") == "lm_head"


def test_an_engine_sums_what_is_inside_of_the_modules_that_it_is_asked_for():
    inside_of = {
        "model.layers.1.mlp": ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.w13.weight"],
        "model.layers.1.scale": ["model.layers.1.scale"],
        "lm_head": ["lm_head.bias"],
        "": ["scale"],
        "model.layers.11.mlp": ["model.layers.11.mlp.gate.weight"],
        "model.layers.1.norm": ["model.layers.1.norm.weight"],
    }
    assert all(module_of(name) == module for module, names in inside_of.items() for name in names)
    tensors = {name: torch.zeros(1) for names in inside_of.values() for name in names}
    for asked in (list(inside_of), list(inside_of)[:4], ["lm_head", "model.embed_tokens"], []):
        found = [name for name, _ in inside(tensors.items(), asked)]
        assert found == [name for module in inside_of if module in asked for name in inside_of[module]]


def test_the_native_engine_reads_what_it_has(tmp_path):
    folder = write_model(tmp_path / "model")
    tensors = dict(iter_hf_tensors(folder))

    async def lives() -> float:
        engine = NativeEngine(folder, load_weights=False)
        await engine.start()
        assert isinstance(engine, ReadsWeights)
        witness = Witness(1, 0, 1, 2, engine.dtype, engine.sums_by)
        await engine.update_weights(witness.watch(grouped(tensors)), 1)
        share = await witness.compare(engine, "rollout_3")
        other = tensors | {"model.norm.weight": tensors["model.norm.weight"].flip(0) + torch.arange(32.0)}
        await engine.update_weights([WeightBucket(other)], 2)
        with pytest.raises(StaleWeightsError, match="rollout_3 does not have .* version 1 .*1 have .* model.norm.wei"):
            await witness.compare(engine, "rollout_3")
        await engine.sleep(("weights",))
        with pytest.raises(RuntimeError, match="its weights are asleep"):
            await engine.weight_sums(["model.norm.weight"])
        return share

    assert asyncio.run(lives()) == 1.0
