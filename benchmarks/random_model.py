"""Random-weight models of published shapes, with the demo's tokenizer: speed and memory need no trained weights."""

import json
from pathlib import Path

import torch

from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.train.demo.model import write_tokenizer

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                         "num_attention_heads": 32},
    "qwen3-8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                         "num_attention_heads": 32, "tie_word_embeddings": False},
    "qwen3-30b-a3b": _QWEN3_MOE | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                                   "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
                                   "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "num_hidden_layers": 30,
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "bfloat16",
    },
    # Layers half as wide as those of 30B-A3B, and a third of them: 2.8 B parameters, 0.56 B of them used by a token.
    "moe-small": _QWEN3_MOE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16,
                               "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 384},
    "moe-tiny": _QWEN3_MOE
    | {
        "vocab_size": 384, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 192, "dtype": "float32",
    },
    # The demo's model three times as wide and with three times the layers: 10.8 M parameters.
    "demo-10m": _QWEN3
    | {
        "vocab_size": 384, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96, "dtype": "float32",
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 384, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "dtype": "float32",
    },
}  # fmt: skip


def write_random_config(folder: Path, shape: str) -> Path:
    """A folder with the config.json of `shape`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    return folder


def write_random_model(folder: Path, shape: str, device: str = "cpu", seed: int = 0) -> Path:
    """A complete Hugging Face folder of `shape` with normal(0, 0.02) weights."""
    folder.mkdir(parents=True, exist_ok=True)
    source = write_random_config(folder.with_name(folder.name + "-config"), shape)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "pad_token_id": 0}))
    write_tokenizer(source)
    dtype = getattr(torch, SHAPES[shape]["dtype"])
    model = get_model_config_from_hf(source).build(device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    save_hf_model(export_hf_tensors(model, dtype), model.config, folder, source_dir=source)
    return folder
