"""Adapters in the model: where, with which rows and values, and that they are the model's own business."""

import pytest
import torch
from pydantic import ValidationError

from xtuner.v1.config import LoRAConfig
from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.model import MHAConfig
from xtuner.v1.model.hf import export_hf_tensors, load_hf_tensor
from xtuner.v1.model.lora import adapted_layers, adapters_off, add_adapters, init_adapters, resolve_targets
from xtuner.v1.model.moe_config import MoEModelConfig
from xtuner.v1.ops.attention import PackedAttention

from .helpers import random_ids, tiny_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(seed: int = 0, **fields):
    model = tiny_model()
    add_adapters(model, LoRAConfig(**{"rank": 4, "alpha": 8} | fields))
    init_adapters(model, seed)
    return model


def fill(model, seed: int = 1, std: float = 0.1):
    """B is zero at first, and nothing would show."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted_layers(model):
        layer.lora_b.data.normal_(0, std, generator=generator)
    return model


def logprobs(model):
    ids = torch.tensor(random_ids(0, 20))
    context = PackedAttention(SegmentLayout([8, 12], [-1, 0]), "cpu")
    rows = torch.arange(7, 19)
    return model(ids, torch.arange(20), context, rows, ids[rows + 1], torch.ones(12), 5)[0]


def test_the_new_model_is_the_old_one_and_only_adapters_train():
    model, plain = adapted(), tiny_model()
    assert torch.equal(logprobs(model), logprobs(plain))
    trained, frozen = ({n for n, p in model.named_parameters() if p.requires_grad == on} for on in (True, False))
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    assert frozen == dict(plain.named_parameters()).keys()


def test_switched_off_it_is_the_old_one_to_the_bit():
    model, plain = fill(adapted()), tiny_model()
    assert (logprobs(model) - logprobs(plain)).abs().max() > 0.01
    with adapters_off(model):
        assert torch.equal(logprobs(model), logprobs(plain))
    assert not torch.equal(logprobs(model), logprobs(plain))


@pytest.mark.parametrize("targets", [["k_proj"], ["v_proj", "q_proj"], ["up_proj", "o_proj"], ALL])
def test_an_adapter_acts_on_its_part_of_a_fused_projection_alone(targets):
    base = dict(export_hf_tensors(tiny_model(), torch.float32))
    merged = dict(export_hf_tensors(fill(adapted(target_modules=targets)), torch.float32))
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        changed = not torch.equal(merged[name], tensor)
        assert changed == any(f".{target}." in name for target in targets), name


def test_the_exported_weights_give_the_same_model():
    model = fill(adapted(target_modules=["q_proj", "v_proj", "down_proj"]))
    plain = tiny_model()
    for name, tensor in export_hf_tensors(model, torch.float32):
        load_hf_tensor(plain, name, tensor)
    assert torch.equal(logprobs(plain), logprobs(model))


def test_adapters_are_those_of_peft_in_distribution_and_depend_on_seed_and_name_alone():
    def values(seed=0, **fields):
        return {
            name: (a, b) for layer in adapted_layers(adapted(seed, **fields)) for name, a, b in layer.full_adapters()
        }

    every, few, other = values(), values(target_modules=["v_proj", "o_proj"]), values(seed=1)
    for name, (a, b) in few.items():
        assert torch.equal(every[name][0], a) and not torch.equal(other[name][0], a) and not b.any()
    assert len({a.sum().item() for a, _ in every.values()}) == len(every), "no two alike"
    for name, (a, _) in every.items():
        bound = a.shape[1] ** -0.5
        assert 0.9 * bound < a.abs().max() <= bound, name
        assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)


def test_random_weights_leave_the_adapters_alone():
    model = fill(adapted())
    before = [layer.lora_b.clone() for layer in adapted_layers(model)]
    model.init_weights(0, std=0.2)
    assert all(torch.equal(layer.lora_b, b) for layer, b in zip(adapted_layers(model), before, strict=True))
    with adapters_off(model):
        assert torch.equal(logprobs(model), logprobs(tiny_model()))


def test_dropout_acts_in_training_alone_and_averages_out():
    model = fill(adapted(dropout=0.3), std=0.02)
    without = logprobs(fill(adapted(), std=0.02)).detach()
    with torch.no_grad():
        assert torch.equal(logprobs(model), without)
    torch.manual_seed(0)
    noisy = torch.stack([logprobs(model).detach() for _ in range(200)])
    assert not torch.equal(noisy[0], noisy[1])
    error = noisy.std(0) / 200**0.5
    assert ((noisy.mean(0) - without).abs() < 5 * error + 1e-3).all()


def test_dropout_has_the_gradients_of_what_it_computes():
    model = fill(adapted(dropout=0.5))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss():
        torch.manual_seed(3)
        return logprobs(model).sum()

    grads = torch.autograd.grad(loss(), parameters)
    for parameter, grad in list(zip(parameters, grads, strict=True))[:4]:
        place = divmod(int(grad.abs().argmax()), grad.shape[1])
        step, old = 1e-2, parameter.data[place].item()
        values = []
        for sign in (1, -1):
            parameter.data[place] = old + sign * step
            values.append(loss().item())
        parameter.data[place] = old
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(grad[place].item(), rel=0.05)


def test_compiled_layers_are_one_program_with_adapters_and_one_without():
    """In bfloat16, as on a GPU. A program per layer would pass the compiler's limit and fall back to eager."""
    from torch._dynamo.utils import counters

    model, plain = (tiny_model(num_hidden_layers=10).to(torch.bfloat16) for _ in range(2))
    add_adapters(model, LoRAConfig(rank=4, target_modules=["k_proj", "down_proj"]))
    init_adapters(model, 0)
    fill(model)
    with torch.no_grad():
        expected, without = logprobs(model), logprobs(plain)
        model.compile_layers(backend="eager")
        counters.clear()
        # On a CPU the compiler is given torch's operations, which round otherwise than the kernels.
        torch.testing.assert_close(logprobs(model), expected, rtol=0, atol=0.1)
        with_adapters = counters["stats"]["unique_graphs"]
        with adapters_off(model):
            torch.testing.assert_close(logprobs(model), without, rtol=0, atol=0.1)
    assert 1 <= with_adapters <= 5 and counters["stats"]["unique_graphs"] <= 2 * with_adapters


def test_a_compiler_takes_the_layer_whole_and_its_backward_too():
    layer = next(adapted_layers(fill(adapted())))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(5, layer.weight.shape[1], generator=torch.Generator().manual_seed(0)).requires_grad_()
    inputs = (x, layer.lora_a, layer.lora_b)
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x).square().sum(), inputs),
        torch.autograd.grad(layer(x).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_names_of_targets():
    model = tiny_model()
    assert resolve_targets(model, ["all-linear"]) == ALL
    assert resolve_targets(model, ["up_proj", "q_proj"]) == ["q_proj", "up_proj"]
    with pytest.raises(ValueError, match="qkv_proj, lm_head can have no adapter in this qwen3 .*q_proj, k_proj, v"):
        resolve_targets(model, ["qkv_proj", "q_proj", "lm_head"])
    attention = MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True)
    experts = MoEModelConfig(
        vocab_size=9, max_position_embeddings=9, num_hidden_layers=1, hidden_size=32, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=8, attention=attention,
    ).build()  # fmt: skip
    assert resolve_targets(experts, ["all-linear"]) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    with pytest.raises(ValueError, match="gate_proj, gate can have no adapter .*no routed expert"):
        resolve_targets(experts, ["gate_proj", "gate", "q_proj"])
    assert LoRAConfig(target_modules="q_proj").target_modules == ["q_proj"]
    with pytest.raises(ValidationError, match="stands alone"):
        LoRAConfig(target_modules=["all-linear", "q_proj"])
    with pytest.raises(ValidationError, match="target_modules"):
        LoRAConfig(target_modules=[])
    assert LoRAConfig(rank=8, alpha=4).scaling == 0.5
