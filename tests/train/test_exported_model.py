"""The folder that a run is made for: another program must read from it what was trained."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtuner.v1.model.hf import checkpoint_dtype, iter_hf_tensors

from .helpers import config, fit, write_model


def logprobs(folder, prompt_ids, response_ids):
    """Of every response token, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(response_ids)[:, None])[:, 0]


def prompt_ids(folder, row):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)


def test_transformers_computes_from_the_export_what_the_trainer_computed(model, tmp_path):
    run = fit(config(model, tmp_path, hf_interval=1))
    folders = {1: model, 2: run.path / "hf" / "hf-step-1", 3: run.path / "hf" / "hf-step-2"}
    for step, folder in folders.items():  # a step's log-probs are those of the weights before it
        for row in run.trajectories(step)[::5]:
            got = logprobs(folder, prompt_ids(folder, row), row["response_ids"])
            torch.testing.assert_close(got, torch.tensor(row["train_logprobs"]), rtol=0, atol=2e-5)
            torch.testing.assert_close(got, torch.tensor(row["rollout_logprobs"]), rtol=0, atol=2e-5)
    row = run.trajectories(1)[0]
    base = logprobs(model, prompt_ids(model, row), row["response_ids"])
    last = logprobs(run.path / "hf" / "hf-step-3", prompt_ids(model, row), row["response_ids"])
    assert (base - last).abs().max() > 1e-2


def test_a_tied_bf16_base_stays_tied_and_bf16(tmp_path):
    base = write_model(tmp_path / "bf16", torch.bfloat16)
    out = fit(config(base, tmp_path, total_train_steps=1)).path / "hf" / "hf-step-1"
    before, after = dict(iter_hf_tensors(base)), dict(iter_hf_tensors(out))
    assert after.keys() == before.keys() and "lm_head.weight" not in after
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(t, before[n]) for n, t in after.items())
    sizes = [sum(p.stat().st_size for p in folder.glob("*.safetensors")) for folder in (base, out)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    raw = json.loads((out / "config.json").read_text())
    assert raw == json.loads((base / "config.json").read_text()) and raw["tie_word_embeddings"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {p.name for p in out.glob("*.safetensors")}
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_companions_come_from_the_base_and_the_tokenizer_from_the_run(model, tmp_path):
    out = fit(config(model, tmp_path, total_train_steps=1)).path / "hf" / "hf-step-1"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (model / name).read_bytes(), name

    other = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "Q: {{ messages[0]['content'] }} A:"
    tokenizer.save_pretrained(other)
    out = fit(config(model, tmp_path, total_train_steps=1, tokenizer_path=other)).path / "hf" / "hf-step-1"
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert (out / "generation_config.json").is_file()


@pytest.mark.parametrize("named", ["dtype", "torch_dtype", None])
def test_type_of_the_export_whatever_the_base_calls_it(model, tmp_path, named):
    base = write_model(tmp_path / "half", torch.float16)
    raw = json.loads((base / "config.json").read_text())
    raw.pop("dtype", None)
    raw.pop("torch_dtype", None)
    if named:
        raw[named] = "float16"
    (base / "config.json").write_text(json.dumps(raw))
    assert checkpoint_dtype(base) == torch.float16


def test_nothing_is_exported_when_nothing_is_asked_for(model, tmp_path):
    run = fit(config(model, tmp_path, save_final_hf=False, total_train_steps=1))
    assert not (run.path / "hf").exists() and not (run.path / "checkpoints").exists()
