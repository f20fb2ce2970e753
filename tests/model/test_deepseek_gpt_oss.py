"""deepseek_v3 and gpt_oss against transformers: values, gradients, names, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors, iter_hf_tensors, load_hf_model, load_hf_tensor, save_hf_model
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.utils import get_logger

from .helpers import VOCAB, hidden_of, load, random_ids

_BASE = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, num_experts_per_tok=3,
)  # fmt: skip
_DEEPSEEK = dict(
    num_key_value_heads=4, intermediate_size=40, moe_intermediate_size=12, n_routed_experts=8, n_group=4,
    topk_group=2, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=20, kv_lora_rank=12, qk_rope_head_dim=8,
    qk_nope_head_dim=10, v_head_dim=6,
)  # fmt: skip
_DEEPSEEK_YARN = dict(
    rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8, beta_slow=1,
    mscale=1.0, mscale_all_dim=0.7,
)  # fmt: skip
# A limit that acts on the values of so small a model.
_GPT_OSS = dict(
    num_key_value_heads=2, head_dim=8, intermediate_size=12, num_local_experts=6, sliding_window=7, swiglu_limit=0.6,
)  # fmt: skip
FAMILIES = {
    "deepseek": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek-plain-q": ("DeepseekV3Config", _DEEPSEEK | dict(q_lora_rank=None, norm_topk_prob=False)),
    "deepseek-yarn": ("DeepseekV3Config", _DEEPSEEK | dict(rope_parameters=_DEEPSEEK_YARN, attention_bias=True)),
    "deepseek-halves": ("DeepseekV3Config", _DEEPSEEK | dict(rope_interleave=False, n_group=1, topk_group=1)),
    "deepseek-tied": ("DeepseekV3Config", _DEEPSEEK | dict(tie_word_embeddings=True, first_k_dense_replace=0)),
    "gpt-oss": ("GptOssConfig", _GPT_OSS),
    "gpt-oss-plain": ("GptOssConfig", _GPT_OSS | dict(attention_bias=False, rope_parameters=dict(rope_theta=1e3))),
    "gpt-oss-tied": ("GptOssConfig", _GPT_OSS | dict(layer_types=["full_attention"] * 3, tie_word_embeddings=True)),
}


def write_hf(folder: Path, family: str, dtype: torch.dtype = torch.float32):
    """A random transformers model with weights large enough to make every part matter; saved into `folder`."""
    import transformers

    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**_BASE, **extra))
    with torch.no_grad():
        for key, param in model.state_dict().items():
            param.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.3)
    model.to(dtype).save_pretrained(folder)
    return model.eval()


@pytest.fixture(params=FAMILIES)
def folder_and_theirs(request, tmp_path):
    return tmp_path, write_hf(tmp_path, request.param)


def _logprobs(model, ids):
    labels = torch.tensor(ids[1:])
    context = PackedAttention(SegmentLayout([len(ids)], [-1]), "cpu")
    rows = torch.arange(len(labels))
    return model(
        torch.tensor(ids), torch.arange(len(ids)), context, rows, labels, torch.ones(len(labels)), 16
    )[0]  # fmt: skip


def test_logits_and_gradients_equal_transformers(folder_and_theirs) -> None:
    folder, theirs = folder_and_theirs
    ours, ids = load(folder), random_ids(0, 40)
    expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3  # weights that matter
    torch.testing.assert_close(ours.logits(hidden_of(ours, [ids], [-1])[0]), expected, rtol=0, atol=1e-4)

    expected.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum().backward()
    _logprobs(ours, ids).sum().backward()
    # Under the names of the files, which a copy of the model with its gradients for weights has.
    with torch.no_grad():
        for model in (theirs, ours):
            for param in model.parameters():
                param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        for name, buffer in theirs.named_buffers():
            if name.endswith("correction_bias"):
                buffer.zero_()
    theirs.save_pretrained(folder / "grads")
    grads, seen = dict(export_hf_tensors(ours, torch.float32)), 0
    for name, grad in iter_hf_tensors(folder / "grads"):
        scale = grad.abs().max().clamp_min(1e-3)
        torch.testing.assert_close(grads[name] / scale, grad / scale, rtol=0, atol=1e-4, msg=name)
        seen += 1
    assert seen == len(grads)


_WITHOUT_MTP = {"deepseek_v3": {"num_nextn_predict_layers": 0}}


def test_export_is_the_same_model_to_us_and_to_transformers(folder_and_theirs) -> None:
    from transformers import AutoModelForCausalLM

    folder, theirs = folder_and_theirs
    before, ours = dict(iter_hf_tensors(folder)), load(folder)
    for source in (None, folder):
        out = folder / f"out-{source is None}"
        save_hf_model(export_hf_tensors(ours, torch.float32), ours.config, out, source, 20_000)
        after = dict(iter_hf_tensors(out))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        reloaded = load(out)
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), reloaded.parameters(), strict=True))
        assert reloaded.config == ours.config.model_copy(update=_WITHOUT_MTP.get(ours.config.model_type))
        again = AutoModelForCausalLM.from_pretrained(out).eval()
        assert again.config.tie_word_embeddings == theirs.config.tie_word_embeddings
        ids = torch.tensor([random_ids(0, 20)])
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["deepseek", "gpt-oss"])
def test_shared_prompt_equals_prompt_in_every_sample(tmp_path, family: str) -> None:
    write_hf(tmp_path, family)
    model, prompt = load(tmp_path), random_ids(50, 11)
    responses = [random_ids(k, n) for k, n in enumerate((5, 17, 1, 9))]
    shared = hidden_of(model, [prompt, *responses], [-1, 0, 0, 0, 0])[1:]
    for response, hidden in zip(responses, shared, strict=True):
        alone = hidden_of(model, [prompt + response], [-1])[0][-len(response) :]
        torch.testing.assert_close(hidden, alone, rtol=0, atol=1e-5)


def test_the_correction_bias_chooses_and_stays_float32(tmp_path) -> None:
    write_hf(tmp_path, "deepseek", torch.bfloat16)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors[name] = torch.linspace(-1e-3, 1e-3, 8)  # steps that bfloat16 would keep, beside 5 that it would not
    tensors[name] += 5
    save_file(tensors, file, metadata={"format": "pt"})
    model = get_model_config_from_hf(tmp_path).build("cpu", torch.bfloat16)
    load_hf_model(model, tmp_path)
    exported = dict(export_hf_tensors(model, torch.bfloat16))
    assert torch.equal(exported[name], tensors[name]) and exported[name].dtype == torch.float32
    assert exported["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16
    assert not model.get_parameter("layers.2.mlp.gate.e_score_correction_bias").requires_grad
    ids = random_ids(0, 12)
    before = hidden_of(model, [ids], [-1])[0]
    other = torch.tensor([10.0, 0, 0, 0, 0, 0, 0, 10.0])
    load_hf_tensor(model, name, other)
    assert not torch.equal(before, hidden_of(model, [ids], [-1])[0])


def test_layers_of_multi_token_prediction_are_left_out_and_told_of(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    write_hf(tmp_path, "deepseek")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.input_layernorm.weight": torch.ones(2)}
    save_file(tensors, file, metadata={"format": "pt"})
    model = load(tmp_path)
    assert model.config.num_nextn_predict_layers == 1
    assert "its 2 tensors of layers for multi-token prediction are not trained" in caplog.text
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, tmp_path / "out", tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    tensors["model.layers.4.input_layernorm.weight"] = torch.ones(2)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="unexpected: model.layers.4.input_layernorm.weight"):
        load(tmp_path)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "rope_theta": 10000,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "attention_bias": True,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "swiglu_limit": 7.0, "rope_theta": 150000,
    "rms_norm_eps": 1e-5, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_published_configs_have_the_published_sizes() -> None:
    def billions(config) -> float:
        return sum(p.numel() for p in config.build("meta").parameters()) / 1e9

    deepseek, gpt_oss = model_config_from_dict(DEEPSEEK_V3), model_config_from_dict(GPT_OSS)
    assert billions(deepseek) == pytest.approx(671.0, abs=0.1)
    assert billions(gpt_oss) == pytest.approx(20.9, abs=0.05)
    assert [gpt_oss.window_of(i) for i in range(4)] == [128, None, 128, None]
    # The alternation and the stretch are the family's own where the file says nothing.
    bare = {k: v for k, v in GPT_OSS.items() if k not in ("layer_types", "rope_scaling", "rope_theta")}
    assert model_config_from_dict(bare) == gpt_oss
    assert model_config_from_dict(DEEPSEEK_V3 | {"q_lora_rank": None}).attention.q_lora_rank is None


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, r"mxfp4 weights.*Mxfp4Config\(dequantize=True\)"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, r"fp8 weights.*FineGrainedFP8Config"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax'.*only 'sigmoid'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK_V3, {"n_group": 7}, "router.n_group=7 does not divide n_routed_experts=256"),
        (GPT_OSS, {"sliding_window": None}, "'sliding_attention', but attention.sliding_window is None"),
    ],
)
def test_what_would_compute_wrongly_is_refused(base: dict, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config_from_dict(base | change)
