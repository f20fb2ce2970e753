"""Every field of RolloutConfig, with every engine: it has an effect, is refused by name, or is said to have none."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.helpers import write_model
from xtuner.v1.model.hf import weight_views
from xtuner.v1.model.hf_config import get_model_config_from_hf
from xtuner.v1.rl.rollout.backends.options import DEVICES
from xtuner.v1.rl.rollout.backends.served import ServedEngine
from xtuner.v1.rl.rollout.config import BACKENDS, RolloutConfig
from xtuner.v1.rl.rollout.controller import RolloutController
from xtuner.v1.rl.rollout.worker import RolloutWorker
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher
from xtuner.v1.utils import get_logger

INSTALLED = {"lmdeploy": "0.18.0", "sglang": "0.5.23", "vllm": "0.32.0"}
OTHER, OF_THE_ENGINE = "another folder", "depends on the engine"
VALUES: dict[str, Any] = {
    "model_path": OTHER, "tokenizer_path": OTHER, "model_name": "somebody", "gpus_per_node": 4, "dtype": "float16",
    "cpu_dtype": "bfloat16", "gpu_memory_utilization": 0.5, "cpu_cache_bytes": 2**19, "random_seed": 5,
    "rollout_cross_node_comm": True, "dist_port_base": 31000, "weight_transport_type": OF_THE_ENGINE,
    "weight_update_host": "host", "weight_update_port": 31001, "checkpoint_name_prefix": "mine",
    "checkpoint_engine_timeout": 9.0, "checkpoint_engine_sync_after_register": False,
    "rollout_max_batch_size_per_instance": 3, "allow_over_concurrency_ratio": 2.0, "tensor_parallel_size": 2,
    "data_parallel_size": 2, "expert_parallel_size": 2, "enable_chunked_prefill": True, "chunked_prefill_size": 16,
    "skip_load_weights": True, "enable_return_routed_experts": True, "launch_server_method": "multiprocessing",
    "rollout_timeout": 77.0, "session_server_timeout": 78.0, "context_length": 31, "enable_float8": True,
    "extra_rollout_config": OF_THE_ENGINE, "max_retry_per_worker": 5, "max_prefill_token_num": 333,
    "router_n_groups": 2, "fp32_lm_head": True, "deterministic": True, "enable_prefix_caching": True,
    "worker_log_dir": Path("/elsewhere"),
    "health_check_interval_seconds": 11.0, "health_check_timeout_seconds": 12.0, "health_check_failure_threshold": 7,
    "enable_proxy": True, "routed_proxy_url": "http://a", "routed_proxy_admin_url": "http://b",
}  # fmt: skip
WITH = {
    "data_parallel_size": {"tensor_parallel_size": 2}, "chunked_prefill_size": {"enable_chunked_prefill": True},
    "max_prefill_token_num": {"rollout_max_batch_size_per_instance": 4},
}  # fmt: skip
"""What a field has no meaning without."""
ALWAYS = {"native": {"enable_chunked_prefill", "enable_prefix_caching"}}
"""What an engine does anyway."""
ELSEWHERE = {
    "env": "a label", "device": "a label", "backend": "the engine itself",
    "max_retry_per_sample": "read at every request: test_controller.py",
    "api_key": "read at every start: test_served_engine.py; refused by the native engine: test_rollout_config.py",
}  # fmt: skip


def test_the_table_has_every_field():
    assert VALUES.keys() | ELSEWHERE.keys() == RolloutConfig.model_fields.keys()
    for name, value in VALUES.items():
        assert value != RolloutConfig.model_fields[name].default, name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fields") / "model")


@pytest.fixture
def folders(model, tmp_path, monkeypatch):
    """The model, a copy of it, and interpreters that say that each engine is there."""
    for name, version in INSTALLED.items():
        python = tmp_path / f"python-{name}"
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        monkeypatch.setenv(f"XTUNER_{name.upper()}_PYTHON", str(python))
        monkeypatch.delenv(f"XTUNER_USE_{name.upper()}", raising=False)
    shutil.copytree(model, tmp_path / "copy")
    return model, tmp_path / "copy"


def value_for(name: str, backend: str, device: str, copy: Path) -> Any:
    if VALUES[name] == OTHER:
        return copy
    if name == "extra_rollout_config":
        return {f"{'vllm' if backend == 'native' else backend}_log_level": "debug"}
    if name == "weight_transport_type":
        return "nccl" if backend == "native" else "ipc" if device == "cpu" else "folder"  # not the one that is used
    return VALUES[name]


def resolves(fields: dict[str, Any], device: str) -> bool:
    try:
        RolloutConfig(**fields).resolve(device)
    except ValueError:
        return False
    return True


def plain(thing: Any) -> dict[str, Any]:
    kinds = int | float | str | Path | torch.dtype | None
    return {name: value for name, value in vars(thing).items() if isinstance(value, kinds)}


def effect(config: RolloutConfig, device: str) -> list[Any]:
    """All that an engine and those who ask it take from a configuration."""
    controller = RolloutController(config, [None, None], ["a", "b"], None, 0)
    pool = controller._pool
    seen = [plain(controller), plain(pool), [(replica.engine, replica.serves) for replica in pool.replicas]]
    engine = RolloutWorker(config, 0, device).build_engine()
    seen += [type(engine), plain(engine)]
    if isinstance(engine, ServedEngine):
        engine._model_config = get_model_config_from_hf(engine.model_path)
        engine._expected = weight_views(engine._model_config.build("meta", engine.dtype))
        engine.device_bytes = lambda: 1 << 34  # of LMDeploy, which would ask the device
        variables = {k: v for k, v in engine.environment("key").items() if k != "RAY_AUTH_TOKEN"}  # a secret
        carrier = engine.new_carrier()
        seen += [engine.command(1), variables, type(carrier), plain(carrier), plain(engine.server)]
    return seen


def without_effect(config: RolloutConfig, device: str, caplog: pytest.LogCaptureFixture) -> str:
    """What is said of fields that do nothing."""
    caplog.clear()
    launcher = build_launcher("local", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
    get_logger().propagate = True
    try:
        with caplog.at_level("INFO"):
            config.build(launcher, None, 0, device)
    finally:
        get_logger().propagate = False
        launcher.shutdown()
    return "".join(r.getMessage() for r in caplog.records if "no effect with the" in r.getMessage())


@pytest.mark.parametrize(("backend", "device"), [(b, d) for b in BACKENDS for d in DEVICES.get(b, ("cpu", "cuda"))])
def test_no_field_is_accepted_and_ignored(folders, backend, device, caplog):
    model, copy = folders
    given = {"model_path": model, "backend": backend, "context_length": 48}
    ignored = []
    for name in VALUES.keys() - ALWAYS.get(backend, set()):
        more = given | WITH.get(name, {})
        fields = more if name == "data_parallel_size" or resolves(more, device) else given
        changed = RolloutConfig(**(fields | {name: value_for(name, backend, device, copy)}))
        try:
            resolved = changed.resolve(device)
        except ValueError as error:
            assert name in str(error), f"{name} is refused as something else: {error}"
            continue
        if effect(resolved, device) == effect(RolloutConfig(**fields).resolve(device), device):
            if name not in without_effect(changed, device, caplog):
                ignored.append(name)
    assert ignored == []
