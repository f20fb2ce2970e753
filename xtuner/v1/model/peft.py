"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from xtuner.v1.config import LoRAConfig
from xtuner.v1.utils.tensor_file import write_tensor_file

from .lora import adapted_layers

ADAPTER_FOLDER = "adapter"
"""In the folder of the merged model. Beside its config.json, readers would take the model for an adapter's base."""


def peft_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, full float32 tensor) of all adapters. Collective for a sharded model."""
    for layer in adapted_layers(model):
        for name, lora_a, lora_b in layer.full_adapters():
            yield f"base_model.model.{name}.lora_A.weight", lora_a
            yield f"base_model.model.{name}.lora_B.weight", lora_b


def save_peft_adapter(tensors: Iterable[tuple[str, Tensor]], cfg: LoRAConfig, base: str | Path, out_dir: Path) -> None:
    """Write what `peft.PeftModel.from_pretrained(model of base, out_dir)` reads."""
    out_dir.mkdir(parents=True, exist_ok=True)
    found = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors}
    write_tensor_file(out_dir / "adapter_model.safetensors", found, {"format": "pt"})
    targets = dict.fromkeys(name.split(".")[-3] for name in found)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": cfg.rank,
        "lora_alpha": int(cfg.alpha) if cfg.alpha.is_integer() else cfg.alpha,
        "lora_dropout": cfg.dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (out_dir / "adapter_config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
