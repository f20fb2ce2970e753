"""Updates by way of files."""

import asyncio
import json
import resource

import pytest
import torch
from update_helpers import grouped, held, serves, started, write_model

from xtuner.v1.model.hf import INDEX_NAME, iter_hf_tensors
from xtuner.v1.rl.weight_update import DeliveryError, WeightUpdateError, read_weights, with_checksums, write_weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"old": write_model(root / "old", seed=0), "new": write_model(root / "new", seed=1)}


@pytest.fixture(scope="module")
def new(folders):
    return dict(iter_hf_tensors(folders["new"]))


def take(engine, folder, version):
    asyncio.run(engine.update_weights(read_weights(folder, version), version))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_update_comes_back_to_the_bit_and_other_readers_know_the_format(tmp_path, folders, new, dtype):
    engine = started(folders["old"])
    write_weights(with_checksums(grouped(new, dtype)), tmp_path / "update", 6)
    take(engine, tmp_path / "update", 6)
    expected = {name: tensor.to(dtype or tensor.dtype) for name, tensor in new.items()}
    assert all(torch.equal(t, expected[n].float()) for n, t in held(engine).items())
    assert engine.version == 6 and serves(engine) is None
    assert all(torch.equal(t, expected[n]) for n, t in iter_hf_tensors(tmp_path / "update"))
    assert [p.name for p in tmp_path.iterdir()] == ["update"]


def cut(folder):
    file = sorted(folder.glob("bucket-*"))[2]
    file.write_bytes(file.read_bytes()[:-100])


def remove(folder):
    sorted(folder.glob("bucket-*"))[2].unlink()


def flip(folder):
    file = sorted(folder.glob("bucket-*"))[2]
    content = bytearray(file.read_bytes())
    content[-3] ^= 64
    file.write_bytes(content)


def forget(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"].popitem()
    (folder / INDEX_NAME).write_text(json.dumps(index))


def forget_a_sum(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    index["metadata"]["checksums"].popitem()
    (folder / INDEX_NAME).write_text(json.dumps(index))


def odd(folder):
    (folder / INDEX_NAME).write_text("[1]")


def unfinished(folder):
    (folder / INDEX_NAME).unlink()


@pytest.mark.parametrize(
    "damage, words",
    [(cut, r"bucket-00002.* with model.* is not whole .*weights are missing"), (remove, "bucket-00002.*not whole"),
     (flip, "do not have the checksums"), (forget, "1 missing"), (unfinished, "no complete update"),
     (forget_a_sum, "no complete update .no checksums of"), (odd, "no complete update")],
)  # fmt: skip
def test_damaged_files_are_named_and_the_engine_does_not_serve(tmp_path, folders, new, damage, words):
    engine = started(folders["old"])
    write_weights(with_checksums(grouped(new)), tmp_path / "update", 6)
    damage(tmp_path / "update")
    with pytest.raises(WeightUpdateError, match=words):
        take(engine, tmp_path / "update", 6)
    assert engine.version == 0 and "not complete" in serves(engine)


def test_a_full_disk_is_named_and_left_as_it_was(tmp_path, new):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(DeliveryError, match=f"version 6 of .* cannot be written to {tmp_path}/update .*File too"):
            write_weights(grouped(new), tmp_path / "update", 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_an_old_folder_is_not_taken_for_a_new_one(tmp_path, new):
    write_weights(grouped(new), tmp_path / "update", 6)
    with pytest.raises(DeliveryError, match="version 6 of the weights where version 7 was due"):
        next(read_weights(tmp_path / "update", 7))
