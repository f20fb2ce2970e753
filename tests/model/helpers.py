"""Tiny random models of every family, written by transformers, and packs."""

from pathlib import Path

import torch

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.model import DenseModelConfig, MHAConfig, get_model_config_from_hf
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.hf import load_hf_model
from xtuner.v1.ops.attention import PackedAttention

VOCAB = 89
_BASE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64)
_MOE = dict(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
FAMILIES = {
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen2-untied": ("Qwen2Config", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "qwen3": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-bias": ("Qwen3Config", dict(head_dim=8, attention_bias=True, rope_parameters=dict(rope_theta=1e6))),
    "llama": ("LlamaConfig", dict(rope_parameters=LLAMA3, rms_norm_eps=1e-5)),
    "llama-bias": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "mistral": ("MistralConfig", dict(head_dim=16, sliding_window=None)),
    "mistral-window": ("MistralConfig", dict(head_dim=16, sliding_window=13)),
    "qwen3-window": ("Qwen3Config", dict(head_dim=16, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3-yarn": ("Qwen3Config", dict(head_dim=16, rope_parameters=YARN)),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE | dict(norm_topk_prob=True)),
    "qwen3_moe-mixed": (
        "Qwen3MoeConfig",
        _MOE | dict(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=True),
    ),
    "qwen3_moe-window": ("Qwen3MoeConfig", _MOE | dict(attention_bias=True, use_sliding_window=True, sliding_window=7)),
}


def write_hf(folder: Path, family: str, dtype: torch.dtype = torch.float32):
    """A random transformers model with weights large enough to make every part matter; saved into `folder`."""
    import transformers

    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**_BASE | extra))
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(1.0 if param.dim() == 1 else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder)
    return model.eval()


def load(folder: Path) -> DecoderModel:
    model = get_model_config_from_hf(folder).build("cpu")
    load_hf_model(model, folder)
    return model


def tiny_config(**changes) -> DenseModelConfig:
    values = dict(
        model_type="qwen3", vocab_size=VOCAB, max_position_embeddings=256, num_hidden_layers=2, hidden_size=32,
        intermediate_size=48, tie_word_embeddings=True,
        attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True),
    )  # fmt: skip
    return DenseModelConfig(**values | changes)


def tiny_model(seed: int = 0, **changes) -> DecoderModel:
    model = tiny_config(**changes).build("cpu")
    model.init_weights(seed, std=0.2)
    return model


def hidden_of(model: DecoderModel, ids: list[list[int]], prefix: list[int]) -> list[torch.Tensor]:
    """Hidden states of each segment of a pack; positions go on from the prefix."""
    lengths = [len(segment) for segment in ids]
    positions = [
        range(lengths[p], lengths[p] + n) if p >= 0 else range(n) for n, p in zip(lengths, prefix, strict=True)
    ]
    flat_ids = torch.tensor([token for segment in ids for token in segment])
    flat_positions = torch.tensor([p for segment in positions for p in segment])
    context = PackedAttention(SegmentLayout(lengths, prefix), "cpu")
    return list(model.hidden_states(flat_ids, flat_positions, context).split(lengths))


def random_ids(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
