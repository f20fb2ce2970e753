"""Model configs from config.json: what is read, what is refused and how."""

import json

import pytest
from pydantic import ValidationError

from xtuner.v1.model import DenseModelConfig, MHAConfig, get_model_config_from_hf
from xtuner.v1.model.hf_config import model_config_from_dict

from .helpers import FAMILIES, tiny_config, write_hf

QWEN2 = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 32768, "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
LLAMA31 = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_bias": False,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "eos_token_id": [128001, 128008, 128009], "tie_word_embeddings": False,
}  # fmt: skip


def test_published_qwen2() -> None:
    config = model_config_from_dict(QWEN2)
    assert config.attention == MHAConfig(num_attention_heads=14, num_key_value_heads=2, head_dim=64, qkv_bias=True)
    assert config.rope.theta == 1e6 and config.rope.rope_type == "default"
    assert config.tie_word_embeddings and config.eos_token_id == 151645 and config.pad_token_id is None


def test_published_llama() -> None:
    config = model_config_from_dict(LLAMA31)
    assert config.rope.rope_type == "llama3" and config.rope.factor == 8.0
    assert config.rope.original_max_position_embeddings == 8192
    assert config.eos_token_id == [128001, 128008, 128009]
    assert not config.attention.qkv_bias and not config.attention.qk_norm and config.attention.head_dim == 128


def test_old_and_new_spelling_of_rope_are_the_same() -> None:
    scaling = LLAMA31["rope_scaling"]
    new = {k: v for k, v in LLAMA31.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    assert model_config_from_dict(new) == model_config_from_dict(LLAMA31)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_written_by_transformers(tmp_path, family: str) -> None:
    theirs = write_hf(tmp_path, family).config
    config = get_model_config_from_hf(tmp_path)
    assert config.model_type == theirs.model_type == family.split("-")[0]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]


def test_dense_configs_have_no_moe_losses() -> None:
    config = model_config_from_dict(QWEN2)
    assert not hasattr(config, "balancing_loss_cfg") and not hasattr(config, "z_loss_cfg")


def test_missing_folder_file_and_broken_json_name_the_path(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen3-8B.*no such folder.*download"):
        get_model_config_from_hf("Qwen/Qwen3-8B")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/config.json"):
        get_model_config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type":\n oops}')
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: line 2"):
        get_model_config_from_hf(tmp_path)


def test_unsupported_model_type_lists_the_supported(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"config.json: Unsupported model type 'gpt2'; supported: qwen2, qwen3, llama"):
        get_model_config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA31, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'.*default, linear, llama3, yarn"),
        (LLAMA31, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1}}, "beta_slow=1.0 must be below"),
        (LLAMA31, {"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        (LLAMA31, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA31, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA31, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (LLAMA31, {"hidden_size": None}, "missing hidden_size"),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["sliding_attention"]}, "layer_types names 1 layers"),
    ],
)
def test_what_would_compute_wrongly_is_refused(base: dict, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config_from_dict({**base, **change})


def _windows(base: dict, **change) -> list[int | None]:
    config = model_config_from_dict({**base, **change})
    return [config.window_of(layer) for layer in range(config.num_hidden_layers)]


def test_windows_act_in_the_layers_that_transformers_gives_them() -> None:
    mistral, none = {**LLAMA31, "model_type": "mistral"}, [None] * 32
    # The family's default window acts where the file says nothing; null switches it off.
    assert _windows(mistral) == [4096] * 32 == _windows(mistral, sliding_window=4096)
    assert _windows(mistral, sliding_window=None) == none == _windows(mistral, sliding_window=131072)
    windowed = {**QWEN2, "use_sliding_window": True, "sliding_window": 4096}
    assert _windows(windowed) == [None] * 21 + [4096] * 3
    assert _windows(windowed, max_window_layers=24) == [None] * 24 == _windows(windowed, sliding_window=None)
    kinds = ["sliding_attention", "full_attention"] * 12
    assert _windows(windowed, layer_types=kinds) == [4096, None] * 12
    assert _windows(windowed, use_sliding_window=False) == [None] * 24


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValidationError, match="num_attention_heads=3 is not a multiple"):
        MHAConfig(num_attention_heads=3, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ValidationError, match="model_type='llama' has other parts"):
        tiny_config(model_type="llama")
    with pytest.raises(ValidationError, match="sliding_window is None: set it"):
        tiny_config(layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ValidationError, match="attention.sinks=True: model_type='qwen3'"):
        tiny_config(attention=MHAConfig(**{**tiny_config().attention.model_dump(), "sinks": True}))
    with pytest.raises(ValidationError):
        DenseModelConfig(**{**tiny_config().model_dump(), "balancing_loss_cfg": None})


def test_building_does_not_change_the_config() -> None:
    config = tiny_config()
    before = config.model_dump()
    model = config.build("meta")
    assert config.model_dump() == before and model.config is not config
    assert all(p.is_meta for p in model.parameters())
