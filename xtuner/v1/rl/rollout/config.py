"""Which engine generates, and how it is fed and watched."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import ConfigDict, Field, field_validator, model_validator

from xtuner.v1.config import TorchDtype, XTunerConfig, changed_fields
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.secrets import HIDDEN

from .backends.options import (
    device_problem,
    dtype_problems,
    engine_problem,
    no_effect_in,
    not_in,
    of_this_place,
    option_problems,
    size_problems,
)

if TYPE_CHECKING:
    from xtuner.v1.rl.utils import Launcher

    from .controller import RolloutController

Backend = Literal["native", "sglang", "lmdeploy", "vllm"]
BACKENDS: tuple[Backend, ...] = ("native", "sglang", "lmdeploy", "vllm")
_GIB = 1024**3

_NOT_IN_NATIVE = {
    "data_parallel_size": "an engine has one batch",
    "expert_parallel_size": "every rank holds all experts",
    "enable_float8": "it computes in `dtype`",
    "enable_proxy": "it opens no port",
    "api_key": "it opens no port",
    "router_n_groups": "it serves dense models",
    "fp32_lm_head": "its head computes like the trainer's; logits are float32 always",
    "extra_rollout_config": "these options belong to other engines",
}
"""Options that would change what is generated and that the native engine cannot honour: refused by name."""

_NO_EFFECT_IN_NATIVE = (
    "model_name", "tokenizer_path", "gpus_per_node", "random_seed", "rollout_cross_node_comm", "dist_port_base",
    "weight_update_host", "weight_update_port", "checkpoint_name_prefix", "checkpoint_engine_timeout",
    "checkpoint_engine_sync_after_register", "allow_over_concurrency_ratio", "chunked_prefill_size",
    "launch_server_method", "session_server_timeout", "max_retry_per_worker", "worker_log_dir",
    "routed_proxy_url", "routed_proxy_admin_url",
)  # fmt: skip
"""Details of a server or of a transport: named in a log line when set."""
_OF_A_GPU, _OF_A_CPU = ("dtype", "gpu_memory_utilization"), ("cpu_dtype", "cpu_cache_bytes")
"""Of the other kind of device: the same."""


class RolloutConfig(XTunerConfig):
    """The rollout engine of every rank."""

    model_config = ConfigDict(hide_input_in_errors=True)  # of a rule between fields, that is keys and variables too

    env: str = ""
    """Free label of the experiment; kept in the run's config.json."""
    backend: Backend | None = None
    """Engine. None: XTUNER_USE_NATIVE, _SGLANG, _LMDEPLOY or _VLLM = 1 in the environment, else `native`."""
    device: Literal["GPU", "CPU"] = "GPU"
    """Kept for compatibility: the engine runs where `resources.accelerator` says."""
    model_path: str | Path
    """Hugging Face folder of the model."""
    model_name: str | None = None
    """Name under which a server knows the model. None: the model_type of its config.json."""
    tokenizer_path: str | Path | None = None
    """Tokenizer of a server. None: `model_path`."""
    api_key: list[str] | str | None = Field(None, repr=False)
    """Bearer token of a server. None: one made for the run."""
    gpus_per_node: int = Field(8, ge=1)
    """GPUs of a machine, for engines that span machines."""
    dtype: TorchDtype = torch.bfloat16
    """Type of weights, compute and KV cache on a GPU."""
    cpu_dtype: TorchDtype = torch.float32
    """The same on a CPU, as the trainer's `cpu_param_dtype`. bfloat16 halves the bytes of weights and cache; only dense
    models that our kernels know are not slower in it. float16 does too, and is faster by half where the processor
    multiplies it (AVX512-FP16); see docs/rollout.md."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of the GPU's memory that engine and KV cache may take while the trainer sleeps."""
    cpu_cache_bytes: int = Field(4 * _GIB, gt=0)
    """Largest KV cache on a CPU, in bytes. The native engine's grows on demand."""
    random_seed: int = Field(1024, ge=0, lt=2**32)
    """Seed of a server, to which its rank is added, and 65,537 for each restart (modulo 2**32): what SGLang draws comes
    from it, unless it is deterministic. vLLM and LMDeploy draw from the seeds of requests, the native engine from the
    trainer's seed and the rollout id."""
    rollout_cross_node_comm: bool = False
    """Engine over several machines."""
    dist_port_base: int = Field(25000, ge=1024, le=65535)
    """First port that a server tries, and 8 further on for every rank."""
    weight_transport_type: Literal["ipc", "folder", "nccl", "checkpoint_engine"] | None = None
    """How new weights come to an engine behind a server. `ipc`: through memory that both processes see, of the GPU, or
    of the host without one; a server that dies waits for the next update, and the last one is given one at once.
    `folder`: a folder of safetensors, slower, and a server that dies comes back with it. None: `ipc` on a GPU,
    `folder` on a CPU. The native engine takes them within the process. The others are refused."""
    weight_update_host: str | None = None
    """NCCL rendezvous host. None: that of train rank 0."""
    weight_update_port: int | None = 30000
    """NCCL rendezvous port."""
    checkpoint_name_prefix: str = "xtuner-rl"
    """Checkpoint-engine name prefix."""
    checkpoint_engine_timeout: float = Field(300.0, gt=0)
    """Seconds for a checkpoint-engine update."""
    checkpoint_engine_sync_after_register: bool = True
    """Synchronise the device after registering."""
    rollout_max_batch_size_per_instance: int | None = Field(None, ge=1)
    """Sequences generated at once by an engine. None: by context length, 1024 up to 4096, 512 up to 8192, else
    128."""
    allow_over_concurrency_ratio: float = 1.2
    """Deprecated."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Neighbouring workers that are one engine, each with a part of every layer and of the KV cache. For models that do
    not fit one GPU: otherwise an engine each generates more. Native engine: dense models, one machine; divides query
    and key heads, the MLP's width and the number of workers."""
    data_parallel_size: int = Field(1, ge=1)
    """vLLM only; must divide `tensor_parallel_size`."""
    expert_parallel_size: int = Field(1, ge=1)
    """Takes the place of `tensor_parallel_size` when above 1."""
    enable_chunked_prefill: bool = False
    """Prefill long prompts in pieces beside the decode of others. The native engine always does, in pieces of
    `max_prefill_token_num`."""
    chunked_prefill_size: int = Field(128, ge=1)
    """Tokens of a piece; not for the native engine."""
    skip_load_weights: bool = False
    """Start with empty weights; the trainer pushes its own before the first request."""
    enable_return_routed_experts: bool = False
    """Routing replay (mixtures of experts): return the experts of every token, which training then uses in place of
    its routers' own choice; see docs/experts.md."""
    launch_server_method: Literal["ray", "multiprocessing"] = "ray"
    """How a server process is started."""
    rollout_timeout: float = Field(1200.0, gt=0)
    """Seconds for one attempt at a response, waiting in the engine's queue included."""
    session_server_timeout: float = Field(1200.0, gt=0)
    """Seconds for a call through the session server."""
    context_length: int | None = Field(None, ge=2)
    """Longest sequence, prompt and response, in tokens. None: the model's max_position_embeddings."""
    enable_float8: bool = False
    """Serve in float8."""
    extra_rollout_config: dict[str, Any] = Field({}, repr=False)
    """Options for the engine's server, by prefix: `sglang_*`, `lmdeploy_*`, `vllm_*`; `vllm_max_log_len=9` becomes
    `--max-log-len 9`. `*_python` is the interpreter of its environment, `*_env` a mapping of variables for it,
    `*_start_timeout` the seconds that it may take to start."""
    max_retry_per_worker: int | None = None
    """Kept for compatibility: `health_check_failure_threshold` decides when an engine is left out."""
    max_retry_per_sample: int = Field(1, ge=0)
    """Further attempts after a timeout, an engine's exception or an invalid answer."""
    max_prefill_token_num: int | None = Field(None, ge=1)
    """Tokens of prompts in one step of the engine, over all prompts. None: 8192 in the native engine."""
    router_n_groups: int | None = None
    """Router groups of a MoE model."""
    fp32_lm_head: bool = False
    """Head in float32. LMDeploy only: otherwise it rounds its log-probs to bfloat16."""
    deterministic: bool = False
    """Exact mode (native engine): the log-prob of a token has the same bits in any batch. The trainer's own
    `deterministic` turns it on, and makes the trainer's log-probs the same."""
    enable_prefix_caching: bool = False
    """Keep the keys and values of prompts and answers for later prompts that begin so. The native engine always does,
    until weights change."""
    worker_log_dir: Path | None = None
    """Logs of server processes. None: the run's log folder."""
    health_check_interval_seconds: float = Field(30.0, gt=0)
    """While requests are out, engines are asked every so often whether they can serve."""
    health_check_timeout_seconds: float = Field(15.0, gt=0)
    """Seconds for such an answer."""
    health_check_failure_threshold: int = Field(3, ge=0)
    """After so many missing answers in a row an engine is left out. 0: no such checks; an engine is left out
    only when it says that it cannot serve or its process is gone."""
    enable_proxy: bool = False
    """Register at a routed API proxy."""
    routed_proxy_url: str | None = None
    """Address of that proxy."""
    routed_proxy_admin_url: str | None = None
    """Its address for registrations."""

    @field_validator("device", mode="before")
    @classmethod
    def _no_npu(cls, value: Any) -> Any:
        if isinstance(value, str) and value.upper() == "NPU":
            raise ValueError("device='NPU' is not supported yet; one of 'GPU', 'CPU'.")
        return value.upper() if isinstance(value, str) else value

    @field_validator("extra_rollout_config")
    @classmethod
    def _known_prefix(cls, value: dict[str, Any]) -> dict[str, Any]:
        prefixes = tuple(f"{name}_" for name in BACKENDS if name != "native")
        unknown = [key for key in value if not key.startswith(prefixes)]
        if unknown:
            raise ValueError(f"extra_rollout_config keys {unknown}: each must begin with one of {prefixes}.")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "RolloutConfig":
        if self.tensor_parallel_size > 1 and self.expert_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} and expert_parallel_size="
                f"{self.expert_parallel_size} exclude each other; set one of them to 1."
            )
        if self.tensor_parallel_size % self.data_parallel_size:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size} must divide tensor_parallel_size="
                f"{self.tensor_parallel_size}."
            )
        return self

    def named_backend(self) -> Backend:
        """The engine to use: `backend`, else the environment, else native. Raises if the environment contradicts
        itself."""
        wanted = {name: f"XTUNER_USE_{name.upper()}" for name in BACKENDS}
        said = {name: os.environ.get(wanted[name], "").strip() for name in BACKENDS}
        odd = [f"{wanted[name]}={text!r}" for name, text in said.items() if text not in ("", "0", "1")]
        if self.backend is None and odd:
            raise ValueError(f"{' and '.join(odd)}: 1 chooses this engine, 0 does not; set one of them, or unset it.")
        chosen = [name for name in BACKENDS if said[name] == "1"]
        if self.backend is None and len(chosen) > 1:
            raise ValueError(
                f"{' and '.join(f'{wanted[name]}=1' for name in chosen)} are set; leave one, or set "
                "rollout_config.backend."
            )
        return self.backend or (chosen[0] if chosen else "native")

    def resolve_backend(self) -> Backend:
        """`named_backend`. Raises if it cannot be used."""
        backend = self.named_backend()
        if backend != "native" and (problem := engine_problem(self, backend)):
            raise RuntimeError(problem)
        return backend

    def workers_problem(self, num_workers: int) -> str | None:
        """Why so many workers cannot be cut into engines; None if they can."""
        size = self.tensor_parallel_size
        if num_workers % size == 0:
            return None
        return (
            f"rollout_config.tensor_parallel_size={size} does not divide num_workers={num_workers}; use a multiple of "
            f"{size} workers, or a divisor of {num_workers}."
        )

    def resolve(self, device: str | None = None) -> "RolloutConfig":
        """A copy with engine, context length and batch size filled in, for "cuda" or "cpu" if given. Raises if one
        cannot be had."""
        backend = self.resolve_backend()
        if backend != "native" and device is not None and (problem := device_problem(backend, device)):
            raise RuntimeError(problem)
        self._check_options(backend, device)
        config_file = Path(self.model_path) / "config.json"
        if not config_file.is_file():
            raise ValueError(
                f"rollout_config.model_path={str(self.model_path)!r} holds no config.json; give a Hugging Face folder."
            )
        self._check_experts()
        longest = json.loads(config_file.read_text(encoding="utf-8")).get("max_position_embeddings")
        context = self.context_length or longest
        if context is None:
            raise ValueError(
                f"rollout_config.context_length is not set and {config_file} has no max_position_embeddings; "
                "set context_length to the longest prompt + response in tokens."
            )
        if longest is not None and context > longest:
            raise ValueError(
                f"rollout_config.context_length={context} exceeds max_position_embeddings={longest} of "
                f"{config_file}; lower it."
            )
        self._check_heads()
        batch = self.rollout_max_batch_size_per_instance or (
            1024 if context <= 4096 else 512 if context <= 8192 else 128
        )
        filled = {"backend": backend, "context_length": context, "rollout_max_batch_size_per_instance": batch}
        if backend != "native":
            filled["extra_rollout_config"] = self.extra_rollout_config | of_this_place(self, backend)
        resolved = self.model_copy(update=filled)
        _refuse(backend, size_problems(resolved, backend))
        return resolved

    def _check_heads(self) -> None:
        if self.tensor_parallel_size == 1:
            return
        from xtuner.v1.model.hf_config import get_model_config_from_hf
        from xtuner.v1.model.splits import split_problems

        model = get_model_config_from_hf(self.model_path)
        name = "rollout_config.tensor_parallel_size"
        if problems := split_problems(model, self.tensor_parallel_size, sp_size=1, tp_name=name):
            raise ValueError(" ".join(problems))

    def _check_experts(self) -> None:
        if not self.enable_return_routed_experts:
            return
        from xtuner.v1.model.hf_config import get_model_config_from_hf

        model = get_model_config_from_hf(self.model_path)
        if model.routing_shape is None:
            raise ValueError(
                f"rollout_config.enable_return_routed_experts=True: {self.model_path}/config.json has model_type="
                f"{model.model_type!r}, which has no experts; leave it out."
            )

    def _check_options(self, backend: Backend, device: str | None) -> None:
        reasons = _NOT_IN_NATIVE if backend == "native" else not_in(backend)
        refused = [
            f"{name}={_shown(name, getattr(self, name))} ({reasons[name]})" for name in changed_fields(self, reasons)
        ]
        if backend != "native":
            refused += option_problems(self, backend) + dtype_problems(self, backend, device)
        elif self.weight_transport_type not in (None, "ipc"):
            refused.append(f"weight_transport_type={self.weight_transport_type!r} (weights stay in the process)")
        _refuse(backend, refused)

    def build(self, launcher: "Launcher", tokenizer: Any, seed: int, device: str) -> "RolloutController":
        """One engine every `tensor_parallel_size` ranks, not started yet. `seed` is the run's; `device` is "cuda" or
        "cpu".

        Raises:
            ValueError: workers that cannot be cut into engines, an option that the engine cannot honour, or no usable
                model folder.
            RuntimeError: the engine cannot be used here.
        """
        from .controller import RolloutController
        from .worker import RolloutWorker

        config = self.resolve(device)
        ranks = launcher.world_size
        if problem := config.workers_problem(ranks):
            raise ValueError(problem)
        address = launcher.rendezvous() if config.tensor_parallel_size > 1 else None
        without_effect = _NO_EFFECT_IN_NATIVE if config.backend == "native" else no_effect_in(str(config.backend))
        without_effect += _OF_A_GPU if device == "cpu" else _OF_A_CPU
        if not config.enable_chunked_prefill:
            without_effect += ("chunked_prefill_size",)
        if idle := changed_fields(self, dict.fromkeys(without_effect)):
            where = f"the {config.backend} engine on {device}"
            get_logger().info(f"rollout_config: no effect with {where}: {', '.join(idle)}.")
        names = [f"rollout_{rank}" for rank in range(ranks)]
        handles = [
            launcher.spawn_on(rank, name, RolloutWorker, config, rank, device, ranks, address)
            for rank, name in enumerate(names)
        ]
        return RolloutController(config, handles, names, tokenizer, seed)


def _shown(name: str, value: Any) -> str:
    """For a message: of a mapping its keys alone, as what they stand for may be a secret."""
    return HIDDEN if name == "api_key" else repr(list(value) if isinstance(value, dict) else value)


def _refuse(backend: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"rollout_config: the {backend} engine cannot honour {'; '.join(problems)}. Remove or mend these."
        )
