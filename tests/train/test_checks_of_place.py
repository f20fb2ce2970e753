"""What `check` says of the machine and of folders is what `build` would say."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher
from xtuner.v1.utils import get_logger

from .helpers import config, with_evaluation, write_prompts


def problems_of(model: Path, folder: Path, **changes) -> str:
    return "\n".join(config(model, folder, **changes).check())


def test_an_engine_that_cannot_be_had_is_a_problem(model, tmp_path):
    assert "'sglang' is" in problems_of(model, tmp_path, rollout={"backend": "sglang"})
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    there = {"backend": "vllm", "extra_rollout_config": {"vllm_python": str(python)}}
    assert problems_of(model, tmp_path, rollout=there) == ""
    problem = problems_of(model, tmp_path, rollout=there, worker={"update_weight_checksum": True})
    assert "update_weight_checksum=True: the weights of vllm cannot be read back; leave it False" in problem
    assert "context_length=513 exceeds max_position_embeddings=512" in problems_of(
        model, tmp_path, rollout={"context_length": 513}
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_missing_gpu_is_a_problem(model, tmp_path, monkeypatch, workers):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    resources = AcceleratorResourcesConfig(accelerator="GPU", num_workers=workers)
    with pytest.raises(RuntimeError) as refused:
        build_launcher("auto", resources)
    assert problems_of(model, tmp_path, resources=resources) == str(refused.value)


def test_what_a_ray_cluster_has_is_not_asked_of_this_machine(model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    resources = AcceleratorResourcesConfig(accelerator="GPU", num_workers=2)
    assert problems_of(model, tmp_path, resources=resources) == ""


@pytest.mark.parametrize("field", ["work_dir", "log_dir", "rollout_config.worker_log_dir", "debug_rollout_dir"])
def test_a_folder_that_cannot_be_is_a_problem(model, tmp_path, field):
    def problems(folder):
        name = field.removeprefix("rollout_config.")
        given = {"rollout": {name: folder}} if name != field else {name: folder}
        return problems_of(model, tmp_path, debug_rollout=name == "debug_rollout_dir", **given)

    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        assert problems(folder) == f"{field}={str(folder)!r}: {tmp_path / 'file'} is a file; give a folder."
    assert problems(tmp_path / "new" / "runs") == ""
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_of_the_model_is_a_problem(model, tmp_path, name):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / name).write_text(json.dumps({"a": 1})[:-1])
    assert f"{name} is not JSON" in problems_of(broken, tmp_path)
    (broken / name).write_text("[]")
    assert f"{name} holds no JSON object" in problems_of(broken, tmp_path)


@pytest.mark.parametrize("value", ["x", ["x"], [2, 384], -1, True])
def test_an_eos_that_is_no_token_is_a_problem(model, tmp_path, value):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    said = f"generation_config.json: eos_token_id={value!r}: give one id or a list, each below 384"
    assert said in problems_of(broken, tmp_path)


@pytest.mark.parametrize(
    "content, message", [('{"a": 1}', "]: transformers cannot read"), (None, "]: tokenizer.json is not there, and")]
)
def test_a_tokenizer_that_cannot_be_read_is_a_problem(model, tmp_path, content, message):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    if content is not None:
        (broken / "tokenizer.json").write_text(content)
    cfg = config(broken, tmp_path)
    (problem,) = cfg.check_data()
    assert problem.replace(f"tokenizer_path={str(broken)!r}", "]").startswith(message)
    with pytest.raises(ValueError) as info:
        cfg.build()
    assert str(info.value) == problem


@pytest.mark.parametrize("of_evaluation", [False, True])
def test_a_token_that_the_model_does_not_have_is_a_problem(model, tmp_path, of_evaluation):
    strange = shutil.copytree(model, tmp_path / "strange")
    content = json.loads((strange / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 100_000, "content": "<|far|>"})
    (strange / "tokenizer.json").write_text(json.dumps(content))
    cfg = config(strange, tmp_path, **with_evaluation(strange, tmp_path))
    assert cfg.check() == cfg.check_data() == []
    rows = tmp_path / ("prompts-4.jsonl" if of_evaluation else "prompts-12.jsonl")
    lines = rows.read_text().splitlines()
    lines[2] = lines[2].replace('"content": "', '"content": "<|far|>', 1)
    rows.write_text("\n".join(lines))
    (problem,) = cfg.check_data()
    assert problem.startswith(f"{rows}:3: the prompt has token id ") and "vocab_size=384: give" in problem
    with pytest.raises(ValueError, match="the run cannot start:") as info:
        cfg.build()
    assert problem in str(info.value) and not (tmp_path / "runs").exists()


def test_weights_that_are_not_whole_are_a_problem(model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file.name} (" in problems_of(broken, tmp_path)
    file.unlink()
    (broken / "other.safetensors").write_bytes(b"")
    assert f"the index names {file.name}: not there" in problems_of(broken, tmp_path)


@pytest.mark.parametrize("batch, told", [(5, True), (4, False)])
def test_prompts_that_a_step_repeats_are_told_of(model, tmp_path, caplog, monkeypatch, batch, told):
    monkeypatch.setattr(get_logger(), "propagate", True)
    cfg = config(model, tmp_path, rows=write_prompts(tmp_path, 4), train_batch_size=batch, total_train_steps=1)
    cfg.build().close()
    assert (f"4 prompts are fewer than train_batch_size={batch}" in caplog.text) == told
