"""A tiny tokenizer, a cache folder of the test's own, and the log."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from xtuner.v1.utils import get_logger

CHATML = (
    "{{ bos_token }}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
BOS = "<|bos|>"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over bytes; like many tokenizers it puts a BOS in front by itself, and so does its template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [BOS, "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["what is two plus two"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    return tmp_path / "user-cache" / "xtuner" / "datasets"


@pytest.fixture
def log() -> Any:
    """Messages logged during the test."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    yield messages
    get_logger().removeHandler(handler)


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    """A good row; keywords replace its fields."""

    def make(text: str = "2+2?", **fields: Any) -> dict[str, Any]:
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": "4"},
            **fields,
        }

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (objects, or strings as they are) to a file."""

    def write(rows: list[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
