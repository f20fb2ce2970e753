"""The same configuration twice, and thirty steps in a row."""

import hashlib
import os
from pathlib import Path

import torch

from .helpers import config, fit


def digest(weights: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def test_the_same_bits_for_a_seed_and_others_for_another(model, tmp_path):
    def run(seed):
        return fit(config(model, tmp_path, deterministic=True, seed=seed, worker={"optimizer_steps": 2}))

    one, two, other = run(7), run(7), run(8)
    assert digest(one.weights(3)) == digest(two.weights(3)) != digest(other.weights(3))
    assert one.losses() == two.losses() and all(abs(loss) > 1e-4 for loss in one.losses())
    for step in (1, 2, 3):
        assert one.trajectories(step) == two.trajectories(step)
    assert other.prompts(1) != one.prompts(1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_the_steps(model, tmp_path):
    seen: list[int] = []

    def watched(response, label, extra_info):
        seen.append(resident_bytes())
        return float(len(response) % 3)

    fit(config(model, tmp_path, total_train_steps=40, task={"reward": watched}))
    after_10, after_40 = seen[10 * 12], seen[-1]
    assert after_40 - after_10 < 0.03 * after_10, (after_10, after_40)
