"""The names that the tutorial imports, and that importing them does nothing else."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TUTORIAL = {
    "xtuner.v1.rl.rollout.worker": "RolloutConfig",
    "xtuner.v1.datasets.config": "DataloaderConfig DatasetConfig",
    "xtuner.v1.datasets.rl_tokenize_fn": "RLTextTokenizeFnConfig",
    "xtuner.v1.rl.agent_loop_manager": (
        "SamplerConfig AgentLoopManagerConfig SyncProduceStrategyConfig TaskSpecConfig ProduceBatchResult"
    ),
    "xtuner.v1.rl.judger": "GSM8KJudgerConfig ComposedJudgerConfig JudgerConfig Judger",
    "xtuner.v1.rl.utils": "CPUResourcesConfig AcceleratorResourcesConfig",
    "xtuner.v1.data_proto.rl_data": "SampleParams RolloutState Status",
    "xtuner.v1.rl.agent_loop": "SingleTurnAgentLoopConfig AgentLoopConfig AgentLoop",
    "xtuner.v1.rl.evaluator": "EvaluatorConfig",
    "xtuner.v1.rl.replay_buffer": "SyncReplayBufferConfig",
    "xtuner.v1.config": "AdamWConfig FSDPConfig LRConfig LoRAConfig OptimConfig",
    "xtuner.v1.model": "get_model_config_from_hf",
    "xtuner.v1.rl.loss": "GRPOLossConfig",
    "xtuner.v1.rl.trainer": "WorkerConfig TrainingWorker",
    "xtuner.v1.rl.advantage": (
        "GRPOAdvantageConfig DrGRPOAdvantageConfig RLOOAdvantageConfig OPOAdvantageConfig PassKAdvantageConfig "
        "BaseAdvantageConfig AdvantageEstimator"
    ),
    "xtuner.v1.train.rl_trainer": "RLColocateTrainerConfig",
}

# Runs in an empty folder with an empty environment; anything that touches a device or writes is an error.
HARMLESS_IMPORT = """
import builtins, sys
import torch
HEAVY = {"ray", "transformers", "datasets", "matplotlib", "vllm", "sglang", "lmdeploy", "tensorboard", "math_verify"}

def audit(event, args):
    writing = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writing or event in ("os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"):
        raise AssertionError(f"an import does {event}{args}")

def touched(*args, **kwargs):
    raise AssertionError("an import touches the GPU")

for name in ("is_available", "device_count", "current_device", "init", "_lazy_init", "get_device_properties"):
    setattr(torch.cuda, name, touched)
sys.addaudithook(audit)
for name in sys.argv[1:]:
    __import__(name)
print(*sorted(HEAVY & set(sys.modules)))
"""


@pytest.mark.parametrize("module, names", TUTORIAL.items())
def test_names_of_the_tutorial_are_where_it_looks_for_them(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


NOT_HERE = {
    "xtuner.v1.rl.loss": "OrealLossConfig",
    "xtuner.v1.rl.judger": "DapoMathJudgerConfig GEO3KJudgerConfig CompassVerifierV2Config RayJudger",
    "xtuner.v1.rl.agent_loop_manager": (
        "AsyncProduceStrategyConfig DisaggAsyncProduceStrategyConfig DisaggAgentLoopManagerConfig DisaggTaskSpecConfig"
    ),
    "xtuner.v1.rl.replay_buffer": "AsyncReplayBufferConfig",
    "xtuner.v1.datasets.rl_tokenize_fn": "RLQwen3VLTokenizeFnConfig",
    "xtuner.v1.train.rl_trainer": "RLDisaggregatedTrainerConfig",
}


@pytest.mark.parametrize("module, names", NOT_HERE.items())
def test_what_is_not_implemented_says_so_and_names_what_is(module: str, names: str) -> None:
    there = {name for found in NOT_HERE for name in dir(importlib.import_module(found))}
    for name in names.split():
        with pytest.raises(ImportError, match=f"{module}.{name} is not implemented: ") as caught:
            exec(f"from {module} import {name}")
        (line,) = str(caught.value).splitlines()
        assert there & set(re.findall(r"\w+", line.partition(": ")[2])), "it names something that can be imported"
    assert not hasattr(importlib.import_module(module), "NoSuchName")
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {module} import NoSuchName")


def python(code: str, *args: str, cwd: Path) -> str:
    command = [sys.executable, "-B", "-c", code, *args]
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_configs_touches_nothing(tmp_path: Path) -> None:
    """No GPU, no Ray, no folder, no variable of the environment, and none of the libraries that take seconds."""
    assert python(HARMLESS_IMPORT, *TUTORIAL, cwd=tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_help_is_quick(tmp_path: Path) -> None:
    """The command line answers before anything heavy is loaded."""
    code = """
import sys
from xtuner.v1.train.cli.main import app
try:
    app([*sys.argv[1:]])
except SystemExit as end:
    assert end.code in (0, None), end.code
print({"torch", "numpy", "ray", "transformers"} & set(sys.modules) or "light")
"""
    for args in (["--help"], ["train", "--help"], ["check", "--help"], ["data", "gsm8k", "--help"], ["--version"]):
        assert python(code, *args, cwd=tmp_path).endswith("light")
