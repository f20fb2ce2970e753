"""The example config from the command line, with a model of a few thousand parameters."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors, iter_hf_tensors
from xtuner.v1.train.cli.main import app
from xtuner.v1.train.demo.model import write_config, write_tokenizer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/v1/config/rl_grpo_gsm8k_judge.py"
RESPONSE = "agent_loop_config.sample_params.max_tokens=8"
SMALL = [
    "--accelerator=cpu",
    "--num-workers=1",
    "--set=train_batch_size=2",
    "--set=evaluate_step=2",
    f"--set=agent_loop_manager_cfg.tasks.0.{RESPONSE}",
    f"--set=eval_agent_loop_manager_cfg.tasks.0.{RESPONSE}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights."""
    folder = tmp_path_factory.mktemp("model")
    write_config(folder, hidden_size=16, layers=1)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    module = get_model_config_from_hf(folder).build(device="cpu")
    module.init_weights(seed=0)
    tensors = {name: tensor.contiguous() for name, tensor in export_hf_tensors(module, torch.float32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows like GSM8K's, converted by the command line."""
    source, out = tmp_path_factory.mktemp("published"), tmp_path_factory.mktemp("data")
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(12)]
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = invoke("data", "gsm8k", "--input-dir", source, "--out-dir", out)
    assert made.exit_code == 0 and "train.jsonl: 12 rows" in made.stdout, made.stderr
    return out


@pytest.fixture
def place(tmp_path: Path, model: Path, data: Path) -> dict[str, str | None]:
    """The variables that the example reads."""
    return {
        "MODEL_PATH": str(model),
        "DATA_PATH": str(data / "train.jsonl"),
        "EVAL_DATA_PATH": str(data / "test.jsonl"),
        "WORK_DIR": str(tmp_path / "runs"),
        "WORLD_SIZE": None,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


def invoke(*args: str | Path, env: dict[str, str | None] | None = None) -> Any:
    """The command in this process: for what ends before a run begins."""
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def test_example_trains_evaluates_and_leaves_a_model(cli, place: dict[str, str | None], model: Path) -> None:
    result = cli.run(EXAMPLE, *SMALL, "--set", "total_train_steps=2", **place)
    assert result.returncode == 0, result.stderr
    (run,) = (cli.folder / "runs").glob("2*")
    rows = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and "eval/accuracy" in rows[1]
    trained = {name: tensor.shape for name, tensor in iter_hf_tensors(run / "hf/hf-step-2")}
    assert trained == {name: tensor.shape for name, tensor in iter_hf_tensors(model)}


def test_sigterm_ends_a_real_run_with_143_and_says_how_to_go_on(cli, place: dict[str, str | None]) -> None:
    saving = ["--set=total_train_steps=100000", "--set=checkpoint_interval=1", "--set=auto_resume=true"]
    process = subprocess.Popen(
        cli.command(EXAMPLE, *SMALL, *saving),
        env=cli.env(**place),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert any("step 1/100000" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "Traceback" not in err
    (run,) = (cli.folder / "runs").glob("2*")
    newest = max(int(path.name.removeprefix("ckpt-step-")) for path in (run / "checkpoints").glob("ckpt-step-*"))
    told = f"Stopped by SIGTERM; the run is not finished. To go on from its checkpoint of step {newest}: the same"
    assert told in err and told in (run / "logs" / "rank_0.log").read_text()
    plan = invoke("check", EXAMPLE, *SMALL, *saving, env=place | {"COLUMNS": "400"}).stdout
    assert f"goes on with {run} from ckpt-step-{newest} (auto_resume)" in plan


def test_check_shows_the_plan_and_starts_nothing(place: dict[str, str | None], tmp_path: Path) -> None:
    result = invoke("check", EXAMPLE, *SMALL, "--set", "total_train_steps=7", env=place)
    assert result.exit_code == 0, result.stderr
    for part in (
        "7 train steps",
        "1 x CPU",
        "2 prompts x 5 responses",
        place["DATA_PATH"],
        "every 2 steps",
        "at the end only",
        "engine float32 (cpu_dtype)",
        "a new run",
    ):
        assert str(part) in result.stdout
    assert not (tmp_path / "runs").exists()


def test_evaluation_is_left_out_without_its_data(place: dict[str, str | None]) -> None:
    result = invoke("check", EXAMPLE, *SMALL[:2], env=place | {"EVAL_DATA_PATH": None})
    assert result.exit_code == 0, result.stderr
    assert re.search(r"evaluation +off", result.stdout)


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    "text, options, message",
    [
        ('{"prompt": "2+2?"}\n', [], "rows.jsonl:1: data_source: missing"),
        ("", [], "no usable row"),
        (None, ["total_train_steps=null", "total_epochs=1", "train_batch_size=13"], "12 prompts are fewer than"),
    ],
)
def test_mistakes_in_the_data_are_found_by_either(
    place: dict[str, str | None], tmp_path: Path, command: str, text: str | None, options: list[str], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(Path(str(place["DATA_PATH"])).read_text() if text is None else text)
    args = [f"--set={option}" for option in options]
    result = invoke(command, EXAMPLE, *SMALL, *args, env=place | {"DATA_PATH": str(rows)})
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_mistakes_in_files_and_numbers_are_all_listed(place: dict[str, str | None], command: str) -> None:
    wrong = [*SMALL[:2], "--set", "rollout_config.context_length=600"]
    result = invoke(command, EXAMPLE, *wrong, env=place | {"DATA_PATH": "/no/such/train.jsonl"})
    assert result.exit_code == 2
    assert "'/no/such/train.jsonl' does not exist" in result.stderr
    assert "exceeds rollout_config.context_length=600" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_a_message_not_a_traceback(place: dict[str, str | None]) -> None:
    result = invoke("train", EXAMPLE, "--num-workers", "1", env=place)
    assert result.exit_code == 2
    assert "--accelerator cpu" in result.stderr and "Traceback" not in result.stderr


def test_missing_variable_of_the_example_is_named(place: dict[str, str | None]) -> None:
    result = invoke("train", EXAMPLE, "--accelerator", "cpu", env=place | {"MODEL_PATH": None})
    assert result.exit_code == 2
    assert "environment variable MODEL_PATH is not set" in result.stderr


def test_data_that_is_not_there_is_a_message(tmp_path: Path) -> None:
    result = invoke("data", "gsm8k", "--input-dir", tmp_path / "absent", "--out-dir", tmp_path)
    assert result.exit_code == 2
    assert "absent" in result.stderr and "Traceback" not in result.stderr
