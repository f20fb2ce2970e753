"""Weights in and out: round trips, folders that others can load, clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from xtuner.v1.model.hf import (
    HFWriter,
    check_hf_weights,
    export_hf_tensors,
    iter_hf_tensors,
    load_hf_model,
    load_hf_tensor,
    save_hf_model,
)

from .helpers import FAMILIES, hidden_of, load, random_ids, tiny_config, tiny_model, write_hf


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_source", [False, True])
def test_export_is_the_same_model_to_us_and_to_transformers(tmp_path, family: str, with_source: bool) -> None:
    from transformers import AutoModelForCausalLM

    source, out = tmp_path / "source", tmp_path / "out"
    theirs = write_hf(source, family)
    ours = load(source)
    save_hf_model(export_hf_tensors(ours, torch.float32), ours.config, out, source if with_source else None, 20_000)
    before, after = dict(iter_hf_tensors(source)), dict(iter_hf_tensors(out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reloaded = load(out)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), reloaded.parameters(), strict=True))
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.tensor([random_ids(0, 20)])
    assert again.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, rtol=0, atol=1e-6)


def test_index_lists_every_shard_and_the_right_size(tmp_path) -> None:
    model = tiny_model()
    save_hf_model(export_hf_tensors(model, torch.bfloat16), model.config, tmp_path, max_shard_bytes=8_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1, "who may read config.json may read the weights"
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    for file in files:
        tensors = load_file(tmp_path / file)
        assert tensors.keys() == {name for name, f in index["weight_map"].items() if f == file}
        assert all(t.dtype == torch.bfloat16 for t in tensors.values())
        assert len(tensors) == 1 or sum(2 * t.numel() for t in tensors.values()) <= 8_000


def test_tied_head_is_written_once(tmp_path) -> None:
    model = tiny_model()
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, tmp_path)
    names = [name for name, _ in iter_hf_tensors(tmp_path)]
    assert "lm_head.weight" not in names and "lm_head.weight" not in model.hf_params
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_config_and_companions_come_from_the_source(tmp_path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_hf(source, "qwen2", torch.bfloat16)
    files = {
        "generation_config.json": '{"eos_token_id": [2, 5]}', "tokenizer.json": "{}", "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}", "merges.txt": "a b", "vocab.json": "{}",
    }  # fmt: skip
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "optimizer.pt").write_text("not a companion")
    model = load(source)
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, out, source)
    assert {name: (out / name).read_text() for name in files} == files
    assert not (out / "optimizer.pt").exists()
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    dtype_keys = {"dtype", "torch_dtype"} & theirs.keys()
    assert dtype_keys and all(ours.pop(key) == "float32" and theirs.pop(key) == "bfloat16" for key in dtype_keys)
    assert ours == theirs


def test_export_of_half_precision_is_rounded_once() -> None:
    model = tiny_model()
    exported = dict(export_hf_tensors(model, torch.bfloat16))
    weight = model.layers[1].self_attn.qkv_proj.weight
    assert torch.equal(exported["model.layers.1.self_attn.v_proj.weight"], weight[48:].detach().bfloat16())


def test_writer_keeps_its_own_copy(tmp_path) -> None:
    writer = HFWriter(tiny_config(), tmp_path)
    tensor = torch.ones(4)
    writer.add("x", tensor)
    tensor.zero_()
    writer.close()
    assert dict(iter_hf_tensors(tmp_path))["x"].sum() == 4


def test_writer_refuses_a_used_folder(tmp_path) -> None:
    (tmp_path / "model-00001-of-00009.safetensors").write_text("old")
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        HFWriter(tiny_config(), tmp_path)


def test_load_hf_tensor_replaces_its_rows_alone() -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name = "model.layers.1.self_attn.k_proj.weight"
    assert load_hf_tensor(model, name, torch.full((16, 32), 7.0)) == 16 * 32
    qkv = "layers.1.self_attn.qkv_proj.weight"
    assert (model.get_parameter(qkv)[32:48] == 7).all()
    before[qkv][32:48] = 7
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    with pytest.raises(KeyError, match="no_such"):
        load_hf_tensor(model, "no_such", torch.zeros(1))
    with pytest.raises(ValueError, match=r"k_proj.weight is \[3, 32\], expected \[16, 32\]"):
        load_hf_tensor(model, name, torch.zeros(3, 32))


def test_hf_params_cover_every_row_exactly_once() -> None:
    model = tiny_model(tie_word_embeddings=False)
    covered = {name: [0] * p.shape[0] for name, p in model.named_parameters()}
    for place in model.hf_params.values():
        for row in range(place.start, place.end):
            covered[place.param][row] += 1
    assert all(set(rows) == {1} for rows in covered.values())


def test_wrong_weights_are_listed(tmp_path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    tensors = {name: t.clone() for name, t in export_hf_tensors(model, torch.float32)}
    del tensors["model.norm.weight"]
    tensors["model.layers.9.extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(3, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_hf_model(model, tmp_path)
    for text in (str(tmp_path), "missing: model.norm.weight", "unexpected: model.layers.9.extra",
                 "lm_head.weight is [3, 32], expected [89, 32]"):  # fmt: skip
        assert text in str(error.value)


def test_second_copy_of_a_tied_head_and_old_buffers_are_no_error(tmp_path) -> None:
    model = tiny_model()
    tensors = {name: t.clone() for name, t in export_hf_tensors(model, torch.float32)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    load_hf_model(tiny_model(seed=5), tmp_path)


def test_missing_files_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="neither model.safetensors.index.json nor model.safetensors"):
        list(iter_hf_tensors(tmp_path))
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(FileNotFoundError, match="convert them to safetensors"):
        list(iter_hf_tensors(tmp_path))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors"):
        list(iter_hf_tensors(tmp_path))


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"half"])
def test_a_file_that_is_not_whole_is_named(tmp_path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, file)
    file.write_bytes(file.read_bytes()[:-8] if content == b"half" else content)
    for read in (check_hf_weights, lambda path: list(iter_hf_tensors(path))):
        with pytest.raises(ValueError, match=r"model.safetensors \(.* bytes\) is not a whole safetensors file"):
            read(tmp_path)


@pytest.mark.parametrize("content", ["{broken", "[]", "{}"])
def test_a_broken_index_is_named(tmp_path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="model.safetensors.index.json: not an index of weight files") as info:
        check_hf_weights(tmp_path)
    assert type(info.value) is ValueError


def test_loading_into_an_unallocated_model_says_so(tmp_path) -> None:
    model = tiny_model()
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, tmp_path)
    with pytest.raises(RuntimeError, match="to_empty"):
        load_hf_model(tiny_config().build("meta"), tmp_path)


def test_meta_build_then_to_empty_is_the_same_model(tmp_path) -> None:
    """Nothing that the model needs may live in a buffer that to_empty leaves unfilled."""
    model = tiny_model()
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, tmp_path)
    other = tiny_config().build("meta").to_empty(device="cpu")
    load_hf_model(other, tmp_path)
    ids = [random_ids(0, 12)]
    assert torch.equal(hidden_of(model, ids, [-1])[0], hidden_of(other, ids, [-1])[0])
