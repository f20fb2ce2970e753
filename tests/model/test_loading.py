"""What loading costs: rows read from files, and memory at its peak, measured from outside by the kernel."""

import json
import subprocess
import sys

import pytest
import torch

from xtuner.v1.model.hf import StoredTensor, export_hf_tensors, save_hf_model

from .helpers import tiny_config

_SHAPE = dict(
    vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2,
    attention=dict(num_attention_heads=16, num_key_value_heads=8, head_dim=64, qk_norm=True),
)  # fmt: skip
MIB = 2**20

MEASURE = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from xtuner.v1.config import FSDPConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

folder, world = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
device = torch.device("cpu")
engine = TrainEngine(get_model_config_from_hf(folder), FSDPConfig(cpu_param_dtype="float32"), device=device)
held = sum(p.to_local().numel() * 4 for p in engine.model.parameters())
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = peak()
engine.load_hf(folder)
print(json.dumps({"held": held, "grown": peak() - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of the process")
@pytest.mark.parametrize("world, shard_bytes", [(1, 9 * MIB), (4, 10**9)])
def test_the_peak_is_what_the_rank_holds_and_one_shard(tmp_path, world, shard_bytes):
    """One rank: no more than a file beside its weights. One of four: of the only file, no more than its quarter."""
    config = tiny_config(**_SHAPE)
    with torch.device("meta"):
        size = 2 * sum(p.numel() for p in config.build("meta").parameters())
    model = config.build("cpu", torch.bfloat16)
    for param in model.parameters():
        param.data.zero_()
    save_hf_model(export_hf_tensors(model, torch.bfloat16), config, tmp_path / "m", max_shard_bytes=shard_bytes)
    files = [f.stat().st_size for f in (tmp_path / "m").glob("*.safetensors")]
    assert sum(files) > size and (len(files) > 6) == (world == 1)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "m"), str(world)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert result["held"] == pytest.approx(2 * size / world, rel=0.01)
    read = max(files) if world == 1 else size / world
    largest = 2 * 4096 * 1024
    allowed = result["held"] + read + largest + 6 * MIB
    assert result["grown"] < allowed < result["held"] + size


def test_rows_of_a_file(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    values = {"flat": torch.randn(10, 3), "stack": torch.randn(4, 5, 3)}
    save_file(values, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as shard:
        flat, stack = (StoredTensor(shard, name) for name in values)
        assert flat.shape == (10, 3) and stack.shape == (4, 5, 3) and stack.numel() == 60
        rows = stack.flatten(0, 1)
        assert rows.shape == (20, 3)
        assert torch.equal(flat[2:7], values["flat"][2:7])
        for start, stop in ((0, 20), (3, 5), (4, 6), (7, 18), (5, 10), (6, 6)):
            assert torch.equal(rows[start:stop], values["stack"].flatten(0, 1)[start:stop])
        with pytest.raises(ValueError, match="once"):
            rows.flatten(0, 1)
