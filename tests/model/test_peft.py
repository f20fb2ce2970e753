"""What `peft` makes of our adapters: the same logits, the same gradients."""

import json

import pytest
import torch

from xtuner.v1.config import LoRAConfig
from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.model.lora import adapted_layers, add_adapters, init_adapters
from xtuner.v1.model.peft import ADAPTER_FOLDER, peft_tensors, save_peft_adapter
from xtuner.v1.ops.attention import PackedAttention

from .helpers import load, random_ids, write_hf

peft = pytest.importorskip("peft")
IDS = torch.tensor(random_ids(0, 17))


def adapted(folder, cfg: LoRAConfig):
    model = load(folder)
    add_adapters(model, cfg)
    init_adapters(model, 0)
    generator = torch.Generator().manual_seed(1)
    for layer in adapted_layers(model):
        layer.lora_b.data.normal_(0, 0.1, generator=generator)
    return model


def logits(model):
    context = PackedAttention(SegmentLayout([len(IDS)], [-1]), "cpu")
    return model.logits(model.hidden_states(IDS, torch.arange(len(IDS)), context))


def peft_model(folder, adapter, **kw):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, adapter, **kw)


@pytest.mark.parametrize(
    "family, targets",
    [
        ("qwen3", ["all-linear"]),
        ("qwen2", ["q_proj", "v_proj"]),
        ("llama-bias", ["k_proj", "gate_proj", "down_proj"]),
        ("mistral", ["o_proj", "up_proj"]),
    ],
)
def test_peft_reads_the_adapter_and_transformers_the_merged_model(tmp_path, family, targets):
    write_hf(tmp_path / "base", family)
    cfg = LoRAConfig(rank=3, alpha=7.5, target_modules=targets)
    model = adapted(tmp_path / "base", cfg)
    merged = tmp_path / "merged"
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, merged, source_dir=tmp_path / "base")
    save_peft_adapter(peft_tensors(model), cfg, tmp_path / "base", merged / ADAPTER_FOLDER)
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        ours = logits(model)
        whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")
        assert type(whole).__name__.endswith("ForCausalLM") and not hasattr(whole, "peft_config")
        torch.testing.assert_close(whole(IDS[None]).logits[0], ours, rtol=0, atol=2e-5)
        theirs = peft_model(tmp_path / "base", merged / ADAPTER_FOLDER)
        torch.testing.assert_close(theirs(IDS[None]).logits[0], ours, rtol=0, atol=2e-5)
        with theirs.disable_adapter():
            assert (theirs(IDS[None]).logits[0] - ours).abs().max() > 0.1
    config = json.loads((merged / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base") and config["lora_alpha"] == 7.5


def test_gradients_are_those_of_peft(tmp_path):
    write_hf(tmp_path / "base", "qwen3")
    cfg = LoRAConfig(rank=3, alpha=6, target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"])
    model = adapted(tmp_path / "base", cfg)
    save_peft_adapter(peft_tensors(model), cfg, tmp_path / "base", tmp_path / "adapter")
    weight = torch.randn(len(IDS), model.config.vocab_size, generator=torch.Generator().manual_seed(2))
    (logits(model) * weight).sum().backward()
    theirs = peft_model(tmp_path / "base", tmp_path / "adapter", is_trainable=True)
    (theirs(IDS[None]).logits[0] * weight).sum().backward()
    expected = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    for layer in adapted_layers(model):
        layer.lora_a.data, layer.lora_b.data = layer.lora_a.grad, layer.lora_b.grad
    found = dict(peft_tensors(model))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4, msg=name)
