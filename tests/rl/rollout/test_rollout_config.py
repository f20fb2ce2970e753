import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout import worker
from xtuner.v1.rl.rollout.backends import sampling_checks
from xtuner.v1.rl.rollout.backends.options import engine_options, no_effect_in, not_in
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher

VARIABLES = ("XTUNER_USE_NATIVE", "XTUNER_USE_SGLANG", "XTUNER_USE_LMDEPLOY", "XTUNER_USE_VLLM")


@pytest.fixture(autouse=True)
def no_engine_chosen(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 6000}))
    return tmp_path


def test_the_tutorial_s_config_needs_no_variable_makes_no_folder_and_resolves(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(Path.cwd().iterdir())
    config = RolloutConfig(
        env="grpo_gsm8k", device="GPU", model_path=model, dtype="bfloat16", tensor_parallel_size=1,
        expert_parallel_size=1, gpu_memory_utilization=0.8, context_length=1536,
    )  # fmt: skip
    assert sorted(Path.cwd().iterdir()) == before
    resolved = config.resolve()
    assert (resolved.backend, resolved.context_length, resolved.rollout_max_batch_size_per_instance) == (
        "native", 1536, 1024,
    )  # fmt: skip
    assert (config.backend, config.rollout_max_batch_size_per_instance) == (None, None)
    assert (config.dtype, config.cpu_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("context", "batch"), [(None, 512), (4096, 1024), (4097, 512), (8192, 512), (8193, 128), (32768, 128)]
)
def test_batch_size_follows_the_context_length(tmp_path, context, batch):
    longest = 6000 if context is None else 32768
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": longest}))
    resolved = RolloutConfig(model_path=tmp_path, context_length=context).resolve()
    assert resolved.context_length == (context or 6000)
    assert resolved.rollout_max_batch_size_per_instance == batch
    kept = RolloutConfig(model_path=tmp_path, rollout_max_batch_size_per_instance=7).resolve()
    assert kept.rollout_max_batch_size_per_instance == 7


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"device": "NPU"}, "device='NPU' is not supported yet; one of 'GPU', 'CPU'"),
        ({"extra_rollout_config": {"sglang_x": 1, "trt_y": 2}}, r"keys \['trt_y'\]: each must begin with one of"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2}, "tensor_parallel_size=2 and expert_parallel_size=2"),
        ({"tensor_parallel_size": 3, "data_parallel_size": 2}, "data_parallel_size=2 must divide tensor_parallel"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"max_tokens": 5}, "Extra inputs"),
    ],
)
def test_contradictions_are_refused_at_construction(values, text):
    with pytest.raises(ValidationError, match=text):
        RolloutConfig(model_path="m", **values)


def test_what_the_native_engine_cannot_honour_is_refused_by_name(model):
    config = RolloutConfig(
        model_path=model, expert_parallel_size=2, enable_float8=True, enable_proxy=True,
        weight_transport_type="nccl", extra_rollout_config={"vllm_swap_space": 4},
    )  # fmt: skip
    with pytest.raises(ValueError) as info:
        config.resolve()
    for part in (
        "expert_parallel_size=2", "enable_float8=True", "enable_proxy=True", "vllm_swap_space",
        "weight_transport_type='nccl'", "Remove or mend these",
    ):  # fmt: skip
        assert part in str(info.value)


QWEN3 = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 6000,
}  # fmt: skip


def test_ranks_of_an_engine_divide_heads_and_workers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    config = RolloutConfig(model_path=tmp_path, tensor_parallel_size=2)
    assert config.resolve().tensor_parallel_size == 2
    assert config.workers_problem(4) is None
    assert "tensor_parallel_size=2 does not divide num_workers=3; use a multiple of 2" in config.workers_problem(3)
    launcher = build_launcher("local", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide num_workers=1"):
        config.build(launcher, None, 0, "cpu")
    launcher.shutdown()
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide .* num_key_value_heads=4; use one of"):
        RolloutConfig(model_path=tmp_path, tensor_parallel_size=3).resolve()
    moe = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | moe))
    with pytest.raises(ValueError, match="tensor_parallel_size=2: only dense models are cut .* not qwen3_moe; set 1"):
        config.resolve()


def test_defaults_that_are_written_out_are_no_reason_to_refuse(model):
    RolloutConfig(model_path=model, enable_float8=False, api_key=None, extra_rollout_config={}).resolve()


def test_a_refused_key_is_not_shown(model):
    with pytest.raises(ValueError, match=r"api_key=\(hidden\)") as info:
        RolloutConfig(model_path=model, api_key="sk-123").resolve()
    assert "sk-123" not in str(info.value)


def test_no_message_about_a_configuration_shows_its_secrets(model):
    """Neither ours, nor pydantic's, nor what stands in a message of a configuration around it."""
    secrets = {"api_key": "sk-123", "extra_rollout_config": {"vllm_env": {"DATABASE": "sk-123"}}}
    config = RolloutConfig(model_path=model, **secrets)
    with pytest.raises(ValueError, match=r"extra_rollout_config=\['vllm_env'\]") as ours:
        config.resolve()
    with pytest.raises(ValueError, match="tensor_parallel_size=2") as of_a_rule:
        RolloutConfig(tensor_parallel_size=2, expert_parallel_size=2, **secrets, model_path=model)
    with pytest.raises(ValueError, match="extra_rollout_config") as of_a_field:
        RolloutConfig(model_path=model, extra_rollout_config=["sk-123"])
    assert "sk-123" not in "".join(map(str, (ours.value, of_a_rule.value, of_a_field.value, repr(config))))


def test_options_without_effect_are_named(model, caplog):
    from xtuner.v1.utils import get_logger

    get_logger().propagate = True
    try:
        with caplog.at_level("INFO"):
            launcher = build_launcher("local", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
            config = RolloutConfig(model_path=model, dist_port_base=30000, random_seed=1, tokenizer_path=model)
            config.build(launcher, None, 0, "cpu")
            launcher.shutdown()
    finally:
        get_logger().propagate = False
    assert "no effect with the native engine on cpu: tokenizer_path, random_seed, dist_port_base" in caplog.text


def test_the_model_folder_is_looked_at_before_an_engine_starts(tmp_path):
    with pytest.raises(ValueError, match="model_path='.*missing' holds no config.json"):
        RolloutConfig(model_path=tmp_path / "missing").resolve()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="context_length is not set and .* no max_position_embeddings"):
        RolloutConfig(model_path=tmp_path).resolve()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    with pytest.raises(ValueError, match="context_length=128 exceeds max_position_embeddings=100"):
        RolloutConfig(model_path=tmp_path, context_length=128).resolve()


def test_backend_by_field_by_environment_and_by_default(monkeypatch, tmp_path):
    config = RolloutConfig(model_path="m")
    assert config.resolve_backend() == "native"
    monkeypatch.setenv("XTUNER_USE_NATIVE", "1")
    assert config.resolve_backend() == "native"
    monkeypatch.setenv("XTUNER_USE_LMDEPLOY", "1")
    with pytest.raises(ValueError, match="XTUNER_USE_NATIVE=1 and XTUNER_USE_LMDEPLOY=1 are set; leave one"):
        config.resolve_backend()
    assert RolloutConfig(model_path="m", backend="native").resolve_backend() == "native"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """`engine(name, version)` has that version be installed in an environment of its own; '' for none."""

    def install(name, version):
        python = tmp_path / f"python-{name}-{version or 'none'}"
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
        monkeypatch.setenv(f"XTUNER_{name.upper()}_PYTHON", str(python))
        return str(python)

    return install


def test_a_foreign_engine_is_refused_with_the_reason_before_anything_of_it_is_imported(engine, monkeypatch):
    def refusal(name):
        with pytest.raises(RuntimeError) as info:
            RolloutConfig(model_path="m", backend=name).resolve_backend()
        return str(info.value)

    python = engine("vllm", "")
    assert f"'vllm' is not installed for {python}: pip install 'xtuner[vllm]', name the interpreter" in refusal("vllm")
    python = engine("vllm", "0.9.1")
    assert f"{python} has version 0.9.1, and versions from 0.26 up to but without 0.33 are driven" in refusal("vllm")
    monkeypatch.setenv("XTUNER_SGLANG_PYTHON", "/nowhere/python")
    assert "'sglang': there is no interpreter /nowhere/python; name the interpreter" in refusal("sglang")
    for wrong in ("soon", "0", "-5", "nan", "inf"):
        monkeypatch.setenv("XTUNER_ENGINE_START_TIMEOUT", wrong)
        assert f"XTUNER_ENGINE_START_TIMEOUT='{wrong}' is no number of seconds" in refusal("vllm")


def test_an_engine_that_is_there_is_taken_on_a_cpu(engine, model, monkeypatch):
    engine("vllm", "0.32.5")
    monkeypatch.setenv("XTUNER_USE_VLLM", "1")
    assert RolloutConfig(model_path=model).resolve("cpu").backend == "vllm"
    assert RolloutConfig(model_path=model).resolve("cuda").backend == "vllm"
    monkeypatch.delenv("XTUNER_USE_VLLM")
    python = engine("sglang", "0.5.23")
    monkeypatch.delenv("XTUNER_SGLANG_PYTHON")
    options = {"sglang_python": python}
    config = RolloutConfig(model_path=model, backend="sglang", extra_rollout_config=options)
    assert config.resolve("cpu") and config.resolve("cuda")


def test_what_a_served_engine_cannot_honour_is_refused_by_name(engine, model):
    engine("sglang", "0.5.23")
    config = RolloutConfig(
        model_path=model, backend="sglang", tensor_parallel_size=2, enable_float8=True, weight_transport_type="nccl",
        api_key=["key-1", "key-2"],
        extra_rollout_config={"vllm_swap_space": 4, "sglang_port": 1, "sglang_env": "A=1", "sglang_log_level": "debug"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="rollout_config: the sglang engine cannot honour") as info:
        config.resolve("cpu")
    text = str(info.value)
    for part in (
        "tensor_parallel_size=2", "enable_float8=True", "weight_transport_type='nccl'", "api_key has 2 entries",
        "extra_rollout_config['vllm_swap_space'] is for another engine than sglang",
        "extra_rollout_config['sglang_port']: set dist_port_base", "['sglang_env'] must be a mapping",
    ):  # fmt: skip
        assert part in text
    assert "log_level" not in text and "key-1" not in text


def test_what_lmdeploy_cannot_honour_is_refused_by_name(engine, model):
    engine("lmdeploy", "0.18.0")
    config = RolloutConfig(model_path=model, backend="lmdeploy", fp32_lm_head=True, random_seed=7)
    assert config.resolve("cuda").backend == "lmdeploy"
    with pytest.raises(RuntimeError, match="'lmdeploy' is driven on CUDA only yet, and the run is on 'cpu'"):
        config.resolve("cpu")
    wrong = {
        "enable_prefix_caching": True, "enable_chunked_prefill": True, "tokenizer_path": "there",
        "weight_transport_type": "folder", "dtype": "float32", "deterministic": True,
        "extra_rollout_config": {"lmdeploy_session_len": 9, "lmdeploy_eager_mode": True},
    }  # fmt: skip
    with pytest.raises(ValueError, match="rollout_config: the lmdeploy engine cannot honour") as info:
        RolloutConfig(model_path=model, backend="lmdeploy", **wrong).resolve("cuda")
    for name in wrong.keys() - {"extra_rollout_config"}:
        assert f"{name}=" in str(info.value)
    assert "['lmdeploy_session_len']: set context_length" in str(info.value) and "eager" not in str(info.value)


def test_float32_on_a_gpu_is_vllm_s_and_ours(engine, model):
    """SGLang's kernels there have no float32; on a CPU it computes in `cpu_dtype`."""
    fields = {"model_path": model, "dtype": "float32"}
    engine("sglang", "0.5.17")
    RolloutConfig(**fields, backend="sglang").resolve("cpu")
    with pytest.raises(ValueError, match="sglang engine cannot honour dtype=torch.float32 .on a GPU it computes in bf"):
        RolloutConfig(**fields, backend="sglang").resolve("cuda")
    engine("vllm", "0.26.0")
    for backend in ("native", "vllm"):
        RolloutConfig(**fields, backend=backend).resolve("cuda")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("vllm_tensor_parallel_size", "set tensor_parallel_size"),
        ("vllm_gpu_memory_utilization", "set gpu_memory_utilization"),
        ("vllm_max-model-len", "set context_length"),
        ("vllm_no_enable_prefix_caching", "set enable_prefix_caching"),
        ("vllm_max_model", "it is short for max_model_len: set context_length"),
        ("vllm_seed=5", "'seed=5' is not the name of an argument"),
        ("vllm_", "'' is not the name of an argument"),
        ("sglang_mem_fraction_static", "is for another engine than vllm"),
    ],
)
def test_an_argument_that_a_field_stands_for_is_refused_however_it_is_spelled(engine, model, key, text):
    engine("vllm", "0.32.0")
    options = {key: 3, "vllm_distributed_executor_backend": "mp", "vllm_compilation-config.level": 0}
    with pytest.raises(ValueError) as info:
        RolloutConfig(model_path=model, backend="vllm", extra_rollout_config=options).resolve("cpu")
    assert f"extra_rollout_config[{key!r}]" in str(info.value) and text in str(info.value)
    assert "executor" not in str(info.value) and "compilation" not in str(info.value)


@pytest.mark.parametrize("chosen", ["XTUNER_USE_VLLM", "XTUNER_USE_SGLANG", "XTUNER_USE_LMDEPLOY", "XTUNER_USE_NATIVE"])
def test_a_variable_chooses_unless_the_field_does(engine, monkeypatch, chosen):
    name = chosen.removeprefix("XTUNER_USE_").lower()
    for other, version in (("vllm", "0.32.0"), ("sglang", "0.5.23"), ("lmdeploy", "0.18.0")):
        engine(other, version)
    monkeypatch.setenv(chosen, "1")
    assert RolloutConfig(model_path="m").resolve_backend() == name
    for field in ("native", "vllm"):
        assert RolloutConfig(model_path="m", backend=field).resolve_backend() == field
    other = next(v for v in VARIABLES if v != chosen)
    monkeypatch.setenv(other, "0")
    assert RolloutConfig(model_path="m").resolve_backend() == name
    monkeypatch.setenv(other, "1")
    with pytest.raises(ValueError, match=f"(?=.*{chosen}=1)(?=.*{other}=1).* are set; leave one, or set"):
        RolloutConfig(model_path="m").resolve_backend()
    assert RolloutConfig(model_path="m", backend="native").resolve_backend() == "native"


def test_options_become_arguments():
    given = {
        "vllm_python": "/p", "vllm_env": {"A": 1}, "vllm_some_flag": True, "vllm_off": False, "vllm_none": None,
        "vllm_size": 4, "vllm_names": ["a", "b"], "vllm_more": {"x": 1},
    }  # fmt: skip
    options = engine_options(RolloutConfig(model_path="m", extra_rollout_config=given), "vllm")
    assert options.argv() == ["--some-flag", "--no-off", "--size", "4", "--names", "a", "b", "--more", '{"x": 1}']
    assert options.env == {"A": "1"}


@pytest.mark.parametrize("backend", ["lmdeploy", "sglang", "vllm"])
def test_every_field_does_something_is_refused_or_is_said_to_do_nothing(backend):
    """A new field must not be accepted and ignored."""
    sources = "".join(
        (Path(worker.__file__).parent / name).read_text()
        for name in (
            "worker.py", "controller.py", "backends/served.py", f"backends/{backend}.py", "backends/options.py",
        )
    )  # fmt: skip
    known = set(not_in(backend)) | set(no_effect_in(backend))
    used = {name for name in RolloutConfig.model_fields if re.search(rf"\b(config|c)\.{name}\b", sources)}
    elsewhere = {"env", "device", "gpu_memory_utilization"}  # labels, and what is of a GPU
    assert set(RolloutConfig.model_fields) - known - used - elsewhere == set()
    assert not known & {"model_path", "context_length"}


@pytest.mark.parametrize("backend", ["lmdeploy", "sglang", "vllm"])
def test_every_sampling_parameter_reaches_the_engine_or_is_refused(backend):
    """What is left out of a request would silently be the server's default."""
    folder = Path(worker.__file__).parent
    names = (f"backends/{backend}.py", "backends/served.py", "answers.py", "controller.py")
    checks = (sampling_checks.refusal, sampling_checks.OWN_REFUSALS[backend])
    sources = "".join([*((folder / name).read_text() for name in names), *map(inspect.getsource, checks)])
    used = {name for name in SampleParams.model_fields if re.search(rf"\b(p|params)\.{name}\b", sources)}
    one_value = {"n", "stream", "spaces_between_special_tokens"}  # the class refuses others
    of_the_config = {"return_routed_experts"}  # enable_return_routed_experts is refused
    assert set(SampleParams.model_fields) - used - one_value - of_the_config == set()
