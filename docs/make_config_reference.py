"""Writes docs/config.md from the field descriptions of all configuration classes.

    python docs/make_config_reference.py [--check]
"""

import functools
import importlib
import operator
import sys
import types
import typing
from pathlib import Path

from pydantic_core import PydanticUndefined

PAGE = Path(__file__).with_name("config.md")
CLASSES = [
    ("xtuner.v1.train.rl_trainer", ["RLColocateTrainerConfig", "LoadCheckpointConfig", "TraceConfig"]),
    ("xtuner.v1.rl.utils", ["AcceleratorResourcesConfig", "CPUResourcesConfig"]),
    ("xtuner.v1.rl.trainer", ["WorkerConfig", "WeightCanaryConfig", "RolloutGapConfig", "GapBounds"]),
    ("xtuner.v1.config", ["AdamWConfig", "MuonConfig", "LRConfig", "FSDPConfig", "LoRAConfig"]),
    ("xtuner.v1.model", ["MoEModelConfig", "RouterConfig", "BalancingLossConfig", "ZLossConfig"]),
    ("xtuner.v1.rl.loss", ["GRPOLossConfig", "RolloutImportanceSampling"]),
    (
        "xtuner.v1.rl.advantage",
        ["GRPOAdvantageConfig", "DrGRPOAdvantageConfig", "RLOOAdvantageConfig", "OPOAdvantageConfig",
         "PassKAdvantageConfig"],
    ),
    ("xtuner.v1.rl.rollout.worker", ["RolloutConfig"]),
    ("xtuner.v1.data_proto.rl_data", ["SampleParams"]),
    (
        "xtuner.v1.rl.agent_loop_manager",
        ["AgentLoopManagerConfig", "TaskSpecConfig", "SyncProduceStrategyConfig", "SamplerConfig"],
    ),
    ("xtuner.v1.rl.agent_loop", ["SingleTurnAgentLoopConfig"]),
    ("xtuner.v1.datasets.config", ["DataloaderConfig", "DatasetConfig"]),
    ("xtuner.v1.datasets.rl_tokenize_fn", ["RLTextTokenizeFnConfig"]),
    ("xtuner.v1.rl.judger", ["JudgerConfig", "GSM8KJudgerConfig", "ComposedJudgerConfig"]),
    ("xtuner.v1.rl.evaluator", ["EvaluatorConfig"]),
    ("xtuner.v1.rl.replay_buffer", ["SyncReplayBufferConfig"]),
]  # fmt: skip


def page() -> str:
    """The whole page as Markdown."""
    parts = [
        "# Configuration reference\n",
        "Written by `python docs/make_config_reference.py` from the descriptions in the sources.\n",
    ]
    for module, names in CLASSES:
        for name in names:
            parts.append(_section(module, getattr(importlib.import_module(module), name)))
    return "\n".join(parts)


def _section(module: str, cls) -> str:
    lines = [f"## {cls.__name__}\n", f"`from {module} import {cls.__name__}`\n", _one_line(cls.__doc__ or ""), ""]
    if not cls.model_fields:
        return "\n".join([*lines, "No fields.\n"])
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in cls.model_fields.items():
        meaning = _one_line(field.description or "")
        lines.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return "\n".join([*lines, ""])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(annotation):
    """Without what validators add: their addresses differ from run to run."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_plain, typing.get_args(annotation)))
    return annotation


def _type(annotation) -> str:
    annotation = _plain(annotation)
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for prefix in ("typing.", "pathlib.", "collections.abc.", "torch."):
        text = text.replace(prefix, "")
    text = text.replace("xtuner.v1.", "")
    return f"`{text}`".replace("|", "\\|")


def _default(field) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "see type" if isinstance(field.default_factory, type) else "computed"
    value = field.default
    if isinstance(value, types.FunctionType):
        return f"`{value.__name__}`"
    return "" if value is PydanticUndefined else f"`{value}`".replace("|", "\\|")


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print("docs/config.md is out of date: run python docs/make_config_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
