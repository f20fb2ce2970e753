"""Families with windows, sinks, experts and latent attention: tokens of transformers, log-probs of the trainer."""

import json

import pytest
import torch
from native_models import EOS, VOCAB, prompt, request, run, started

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.hf import load_hf_model
from xtuner.v1.model.hf_config import get_model_config_from_hf
from xtuner.v1.ops.attention import PackedAttention

_BASE = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
    intermediate_size=24, eos_token_id=EOS[0],
)  # fmt: skip
FAMILIES = {
    "mistral": ("MistralConfig", dict(num_key_value_heads=2, head_dim=8, sliding_window=9)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
             norm_topk_prob=True, mlp_only_layers=[0]),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(num_key_value_heads=4, moe_intermediate_size=12, n_routed_experts=4, n_group=2, topk_group=1,
             num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=12, qk_rope_head_dim=8,
             qk_nope_head_dim=10, v_head_dim=6),
    ),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def path_and_theirs(request, tmp_path):
    import transformers

    name, extra = FAMILIES[request.param]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**_BASE, **extra))
    with torch.no_grad():
        for key, param in theirs.state_dict().items():
            param.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.3)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return tmp_path, theirs.eval()


def _logprobs(model, ids, token_ids):
    """Of the response, by the trainer's forward over the whole sequence."""
    whole = torch.tensor(ids + token_ids[:-1])
    attention = PackedAttention(SegmentLayout([len(whole)], [-1]), "cpu")
    rows, labels = torch.arange(len(ids) - 1, len(whole)), torch.tensor(token_ids)
    with torch.no_grad():
        return model(whole, torch.arange(len(whole)), attention, rows, labels, torch.ones(len(rows)), 16)[0]


def _trainer(path, dtype=torch.float32):
    model = get_model_config_from_hf(path).build("cpu", dtype)
    load_hf_model(model, path)
    return model


def test_greedy_tokens_and_logprobs(path_and_theirs) -> None:
    path, theirs = path_and_theirs
    model = _trainer(path)
    # Of unlike length, shorter and longer than the windows, and two siblings.
    prompts = [prompt(i, n) for i, n in enumerate((3, 8, 17, 40))]
    prompts.append(prompts[2])
    outputs = run(started(path), *[request(i, p, temperature=0, max_tokens=30) for i, p in enumerate(prompts)])
    for ids, out in zip(prompts, outputs, strict=True):
        expected = theirs.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=30, eos_token_id=EOS, pad_token_id=0
        )
        assert out.token_ids == expected[0, len(ids) :].tolist()
        expected = _logprobs(model, ids, out.token_ids)
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, rtol=0, atol=2e-5)
    assert max(len(out.token_ids) for out in outputs) == 30


def test_logprobs_in_half_precision(path_and_theirs) -> None:
    path, _ = path_and_theirs
    ids = prompt(1, 20)
    engine = started(path, dtype=torch.bfloat16)
    (out,) = run(engine, request(0, ids, temperature=0, max_tokens=6, min_tokens=6))
    expected = _logprobs(_trainer(path, torch.bfloat16), ids, out.token_ids)
    torch.testing.assert_close(torch.tensor(out.logprobs), expected, rtol=0, atol=0.1)
