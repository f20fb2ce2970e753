"""The demo's model: a tiny Qwen3-architecture decoder and its tokenizer, made on the spot."""

import json
from pathlib import Path

from .task import make_rows

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 384


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 384 entries, every digit a token of its own, with a ChatML template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    rows = make_rows(2000, seed=1, evaluation=False)
    texts = [r["extra_info"]["question"] for r in rows] + ["user\n", "assistant\n"] * 500
    texts += [r["extra_info"]["answer"] for r in rows]
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def write_config(folder: Path, hidden_size: int = 128, layers: int = 2) -> None:
    """config.json and generation_config.json of a Qwen3 of about 0.45 M parameters."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY,
        "hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden_size // 4, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {"eos_token_id": [2], "pad_token_id": 0, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
