"""Which engine, which interpreter and which of its options: what is said is done, or refused before anything starts."""

import os
from pathlib import Path

import pytest

from tests.train.helpers import write_model
from xtuner.v1.rl.rollout.backends.options import engine_options, engine_python, server_start_limit
from xtuner.v1.rl.rollout.config import RolloutConfig
from xtuner.v1.rl.rollout.worker import RolloutWorker
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher
from xtuner.v1.utils import get_logger

VERSIONS = {"lmdeploy": "0.18.0", "sglang": "0.5.23", "vllm": "0.32.0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("options") / "model")


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def engines(tmp_path, monkeypatch):
    for name, version in VERSIONS.items():
        monkeypatch.delenv(f"XTUNER_USE_{name.upper()}", raising=False)
        python = program(tmp_path / f"python-{name}", f"#!/bin/sh\necho {version}\n")
        monkeypatch.setenv(f"XTUNER_{name.upper()}_PYTHON", str(python))


@pytest.fixture
def resolved(model):
    def resolve(backend="vllm", device=None, **fields):
        device = device or ("cuda" if backend == "lmdeploy" else "cpu")
        return RolloutConfig(model_path=model, backend=backend, **{"context_length": 48} | fields).resolve(device)

    return resolve


def command(config: RolloutConfig, rank: int = 0) -> list[str]:
    engine = RolloutWorker(config, rank, "cpu").build_engine()
    from xtuner.v1.model.hf_config import get_model_config_from_hf

    engine._model_config = get_model_config_from_hf(engine.model_path)
    return engine.command(1)


# ---------------------------------------------------------------- which engine


@pytest.mark.parametrize("said", ["true", "yes", "2", "vllm"])
def test_a_variable_that_says_neither_yes_nor_no_is_no_reason_for_the_native_engine(monkeypatch, said):
    monkeypatch.setenv("XTUNER_USE_VLLM", said)
    with pytest.raises(ValueError, match=f"XTUNER_USE_VLLM='{said}': 1 chooses this engine, 0 does not"):
        RolloutConfig(model_path="m").resolve_backend()
    assert RolloutConfig(model_path="m", backend="native").resolve_backend() == "native"


# ---------------------------------------------------------------- which interpreter


def test_an_interpreter_is_known_by_its_whole_path_wherever_its_user_is(resolved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolved(extra_rollout_config={"vllm_python": "./python-vllm"})
    monkeypatch.chdir("/")  # a worker's folder may be another one
    assert engine_python(config, "vllm") == str(tmp_path / "python-vllm")


def test_variables_of_the_driver_hold_for_workers_that_do_not_have_them(resolved, tmp_path, monkeypatch):
    """Those of a Ray cluster that was there before."""
    monkeypatch.setenv("XTUNER_ENGINE_START_TIMEOUT", "77")
    config = resolved()
    monkeypatch.delenv("XTUNER_VLLM_PYTHON")
    monkeypatch.delenv("XTUNER_ENGINE_START_TIMEOUT")
    assert engine_python(config, "vllm") == str(tmp_path / "python-vllm")
    assert server_start_limit(config, "vllm") == 77 and engine_options(config, "vllm").arguments == {}


def test_a_start_limit_that_is_none_is_refused(resolved):
    with pytest.raises(RuntimeError, match=r"extra_rollout_config\['vllm_start_timeout'\]='soon' is no number of sec"):
        resolved(extra_rollout_config={"vllm_start_timeout": "soon"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a folder", "there is no interpreter"),
        ("\x7fELF", "cannot be run .*Exec format error"),
        ("#!/bin/sh\necho no such thing >&2\nexit 3\n", "cannot be run .no such thing."),
        ("#!/bin/sh\necho unknown\n", "has version unknown, and versions from 0.26"),
        ("#!/bin/sh\necho 0.33.0rc1\n", "has version 0.33.0rc1, and versions from 0.26"),
        ("#!/bin/sh\necho 0.33.0.dev7+g1\n", "has version 0.33.0.dev7"),
        ("#!/bin/sh\necho 0.26.0rc1\n", "has version 0.26.0rc1"),
    ],
)
def test_an_interpreter_of_no_use_is_refused_with_the_way_out(resolved, tmp_path, monkeypatch, text, words):
    python = tmp_path if text == "a folder" else program(tmp_path / "odd", text)
    monkeypatch.setenv("XTUNER_VLLM_PYTHON", str(python))
    with pytest.raises(RuntimeError, match=f"(?s)rollout engine 'vllm': .*{words}.*name the interpreter"):
        resolved()


def test_what_an_interpreter_says_beside_the_version_does_not_matter(resolved, tmp_path, monkeypatch):
    noisy = program(tmp_path / "noisy", "#!/bin/sh\necho welcome\necho 0.26.0+cu130\n")
    monkeypatch.setenv("XTUNER_VLLM_PYTHON", str(noisy))
    assert resolved().backend == "vllm"


# ---------------------------------------------------------------- its arguments


def argv(engine: str, **given) -> list[str]:
    options = {f"{engine}_{name}": value for name, value in given.items()}
    return engine_options(RolloutConfig(model_path="m", extra_rollout_config=options), engine).argv()


def test_a_flag_that_is_switched_off_is_said_where_the_engine_has_a_word_for_it():
    """vLLM has flags that are on by default: leaving them out would ignore the user."""
    assert argv("vllm", async_scheduling=False) == ["--no-async-scheduling"]
    assert argv("vllm", disable_log_stats=False) == argv("vllm", no_async_scheduling=False) == []
    assert argv("sglang", dllm_fdfo=False) == ["--no-dllm-fdfo"]
    assert argv("sglang", enable_torch_compile=False) == argv("lmdeploy", eager_mode=False) == []


def test_a_part_of_a_mapping_is_one_word_with_its_value():
    """vLLM takes the next word for the value, also if that is another flag."""
    given = {"compilation-config.fuse": True, "compilation-config.sizes": [1, 2], "enforce_eager": True}
    assert argv("vllm", **given) == [
        "--compilation-config.fuse=true", "--compilation-config.sizes=[1, 2]", "--enforce-eager",
    ]  # fmt: skip
    assert argv("vllm", **{"compilation-config.mode": "NONE"}) == ["--compilation-config.mode=NONE"]


def test_values_arrive_as_they_are():
    assert argv("vllm", x=-0.5) == ["--x=-0.5"]
    assert argv("vllm", modules=[{"name": "a"}, "b"]) == ["--modules", '{"name": "a"}', "b"]
    assert argv("vllm", **{"some-name": 1}) == ["--some-name", "1"]


@pytest.mark.parametrize(
    ("backend", "key", "value", "words"),
    [
        ("vllm", "ssl_keyfile", "/k", "it is on loopback"),
        ("vllm", "pipeline_parallel_size", 2, "an engine has one GPU"),
        ("vllm", "device_memory_utilization", 0.3, "set gpu_memory_utilization"),
        ("vllm", "long_prefill_token_threshold", 9, "set enable_chunked_prefill and chunked_prefill_size"),
        ("vllm", "override_generation_config", {"temperature": 0.5}, "requests say all of it"),
        ("sglang", "preferred_sampling_params", '{"top_p": 0.5}', "requests say all of it"),
        ("sglang", "custom_weight_loader", "a.b", "ours takes the weights"),
        ("sglang", "admin_api_key", "k", "set api_key"),
        ("sglang", "pp", 2, "it is short for pp_size"),
        ("lmdeploy", "ssl", True, "it is on loopback"),
        ("vllm", "x", {1, 2}, "a set with such contents cannot be said"),
        ("vllm", "x", [["a"]], "a list with such contents cannot be said"),
        ("vllm", "x", "a\0b", "a str with such contents cannot be said"),
        ("vllm", "env", {"TMPDIR": "/x"}, "TMPDIR: a server has a temporary folder of its own"),
        ("vllm", "env", {"VLLM_API_KEY": "x"}, "VLLM_API_KEY: set api_key"),
        ("sglang", "env", {"SGLANG_RETURN_ORIGINAL_LOGPROB": 1}, "SGLANG_RETURN_ORIGINAL_LOGPROB: log-probs"),
        ("vllm", "env", {"A=B": "1"}, "'A=B' is not the name of a variable"),
        ("vllm", "env", {"A": None}, "A must be a text or a number, not a NoneType"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(resolved, backend, key, value, words):
    with pytest.raises(ValueError) as info:
        resolved(backend, extra_rollout_config={f"{backend}_{key}": value})
    assert f"extra_rollout_config['{backend}_{key}']: {words}" in str(info.value)


def test_an_argument_in_two_spellings_is_given_twice(resolved):
    with pytest.raises(ValueError, match="extra_rollout_config has vllm_max_log_len twice"):
        resolved(extra_rollout_config={"vllm_max_log_len": 1, "vllm_max-log-len": 2})


def test_a_search_path_of_the_user_does_not_hide_ours(resolved):
    config = resolved(extra_rollout_config={"vllm_env": {"PYTHONPATH": "/theirs", "A": 1}})
    variables = RolloutWorker(config, 0, "cpu").build_engine()._variables("key")
    ours, theirs = variables["PYTHONPATH"].split(os.pathsep)
    assert ours.endswith("engine_side") and theirs == "/theirs" and variables["A"] == "1"


def test_log_probs_of_sglang_do_not_depend_on_the_user_s_shell(resolved, monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    engine = RolloutWorker(resolved("sglang"), 0, "cpu").build_engine()
    assert engine._variables("key")["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize("key", ["", "a b", "key\n", "ключ", [""]])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(resolved, key):
    """With it every call to the server would fail, and the start end after its 15 minutes."""
    with pytest.raises(ValueError, match="api_key is empty or has blanks, line ends or letters") as info:
        resolved(api_key=key)
    assert "ключ" not in str(info.value) and "key\n" not in str(info.value)
    assert resolved(api_key="sk-1_2.3").api_key == "sk-1_2.3"


def test_a_tokenizer_that_is_not_there_is_refused(resolved):
    with pytest.raises(ValueError, match="tokenizer_path='nowhere' .it is no folder."):
        resolved(tokenizer_path="nowhere")


@pytest.mark.parametrize(("engine", "argument"), [("sglang", "--random-seed"), ("vllm", "--seed")])
def test_servers_draw_other_numbers_each(resolved, engine, argument):
    """Answers to a prompt come from several; SGLang's draws are of its server's seed."""
    config = resolved(engine, random_seed=2**32 - 2)
    lines = [command(config, rank) for rank in range(3)]
    assert [words[words.index(argument) + 1] for words in lines] == [str(2**32 - 2), str(2**32 - 1), "0"]


def test_vllm_s_step_is_as_large_as_was_asked_or_refused(resolved):
    slots = {"rollout_max_batch_size_per_instance": 8}
    with pytest.raises(ValueError, match="max_prefill_token_num=7 .a step has at least a token for each of 8"):
        resolved(max_prefill_token_num=7, enable_chunked_prefill=True, **slots)
    with pytest.raises(ValueError, match="max_prefill_token_num=40 .a prompt of up to context_length=48 comes in at"):
        resolved(max_prefill_token_num=40, **slots)
    words = command(resolved(max_prefill_token_num=40, enable_chunked_prefill=True, chunked_prefill_size=16, **slots))
    for name, value in {"max-num-batched-tokens": "40", "long-prefill-token-threshold": "16"}.items():
        assert words[words.index(f"--{name}") + 1] == value
    whole = command(resolved(max_prefill_token_num=50, **slots))
    assert whole[whole.index("--max-num-batched-tokens") + 1] == "50" and "--no-enable-chunked-prefill" in whole
    assert resolved("sglang", max_prefill_token_num=7, **slots).backend == "sglang"


def test_a_size_of_pieces_without_pieces_is_said_to_have_no_effect(resolved, caplog):
    config = resolved(chunked_prefill_size=16)
    launcher = build_launcher("local", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
    get_logger().propagate = True
    try:
        with caplog.at_level("INFO"):
            config.build(launcher, None, 0, "cpu")
    finally:
        get_logger().propagate = False
        launcher.shutdown()
    assert "no effect with the vllm engine on cpu: chunked_prefill_size." in caplog.text
