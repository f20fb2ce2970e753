"""The update against a plain one written down here, and two ranks against one."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.train.helpers import close, worker_config
from xtuner.v1.config import AdamWConfig, LRConfig
from xtuner.v1.rl.loss import GRPOLossConfig, RolloutImportanceSampling
from xtuner.v1.rl.trainer import TrainingSample, TrainingWorker, pack_samples

LR, CLIP = 1e-2, {"cliprange_low": 0.1, "cliprange_high": 0.1, "clip_ratio_c": 1.2}
PLAIN = {"optim_cfg": AdamWConfig(lr=LR, weight_decay=0.0), "lr_cfg": LRConfig(warmup_ratio=0)}


def loss_cfg(**fields) -> GRPOLossConfig:
    return GRPOLossConfig(policy_loss_cfg=CLIP, **fields)


LOSSES = {
    "two clipped updates": (2, {}),
    "mean of sample means": (1, {"loss_reduction": "sample"}),
    "truncated importance": (2, {"rollout_is": RolloutImportanceSampling(rollout_is_threshold=(0.5, 1.2))}),
    "kl": (2, {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}),
}


def make_samples(count: int, seed: int = 0) -> list[TrainingSample]:
    """Random prompts and responses; log-probs of an engine that is a little off."""
    gen = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        p, r = (int(torch.randint(3, 12, (), generator=gen)) for _ in range(2))
        ids = torch.randint(3, 380, (p + r,), generator=gen).tolist()
        labels = [-100] * (p - 1) + ids[p:]
        advantage = float(torch.randn((), generator=gen))
        engine = (-5.5 + 0.5 * torch.randn(len(labels), generator=gen)).tolist()
        temperature = (1.0, 0.7)[i % 2]
        out.append(TrainingSample(i, ids[:-1], labels, [advantage] * len(labels), engine, p, temperature))
    return out


def packs_of(samples, ranks=1, steps=1, length=64):
    return pack_samples(
        samples, ranks=ranks, optimizer_steps=steps, pack_max_length=length, hidden_size=32, share_prompts=True, seed=1
    )


def make_worker(model: Path, rank=0, world=1, port=0, **changes) -> TrainingWorker:
    worker = TrainingWorker(
        worker_config(model, **(PLAIN | changes)), rank=rank, world_size=world, accelerator="CPU",
        total_optimizer_steps=10, seed=3,
    )  # fmt: skip
    worker.setup("127.0.0.1", port)
    return worker


def weights(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    return {n: t.clone() for b in worker.engine.weight_buckets(1 << 30, torch.float32) for n, t in b.tensors.items()}


@pytest.fixture
def worker_of(model):
    made: list[TrainingWorker] = []

    def make(**changes) -> TrainingWorker:
        made.append(make_worker(model, **changes))
        return made[-1]

    yield make
    for worker in reversed(made):
        worker.stop()
    assert not dist.is_initialized()


# ---------------------------------------------------------------- against a plain loop


class Plain:
    """One sample at a time through transformers, textbook losses, torch's AdamW."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

    def logprobs(self, sample: TrainingSample) -> torch.Tensor:
        labels = torch.tensor(sample.labels)
        logits = self.model(torch.tensor([sample.input_ids])).logits[0, labels != -100] / sample.temperature
        return logits.log_softmax(-1).gather(1, labels[labels != -100][:, None])[:, 0]

    def update(self, samples, old, ref, cfg: GRPOLossConfig) -> float:
        count = sum(s.num_trained for s in samples)
        loss = torch.zeros(())
        for sample in samples:
            new, before, advantage = self.logprobs(sample), old[sample.rollout_id], sample.advantages[-1]
            ratio = (new - before).exp()
            clipped = ratio.clamp(1 - CLIP["cliprange_low"], 1 + CLIP["cliprange_high"])
            per_token = -torch.minimum(ratio * advantage, clipped * advantage)
            if advantage < 0:
                per_token = per_token.clamp(max=-CLIP["clip_ratio_c"] * advantage)
            if cfg.rollout_is.enabled:
                engine = torch.tensor(sample.rollout_logprobs)[torch.tensor(sample.labels) != -100]
                per_token = per_token * (before - engine).exp().clamp(max=1.2)
            if cfg.use_kl_loss:
                d = ref[sample.rollout_id] - new
                per_token = per_token + cfg.kl_loss_coef * (d.exp() - d - 1).clamp(max=10)
            if cfg.loss_reduction == "sample":
                loss = loss + per_token.mean() / len(samples)
            else:
                loss = loss + per_token.sum() / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("name", LOSSES)
def test_updates_equal_a_plain_loop(model, worker_of, name):
    steps, fields = LOSSES[name]
    cfg = loss_cfg(**fields)
    worker, plain, reference = worker_of(loss_cfg=cfg), Plain(model), Plain(model)
    samples = make_samples(8)
    by_id = {s.rollout_id: s for s in samples}
    with torch.no_grad():
        ref = {s.rollout_id: reference.logprobs(s) for s in samples}
    for train_step in range(2):
        slices = packs_of(samples, steps=steps)[0]
        with torch.no_grad():
            old = {s.rollout_id: plain.logprobs(s) for s in samples}  # once, before the first update
        expected = [
            plain.update([by_id[i] for pack in part for i in pack.rollout_ids], old, ref, cfg) for part in slices
        ]
        result = worker.fit(slices, train_step + 1)
        assert [m["loss"] for m in result.optimizer_steps] == pytest.approx(expected, abs=2e-5)
        for rollout_id, values in result.train_logprobs.items():
            torch.testing.assert_close(torch.tensor(values), old[rollout_id], rtol=0, atol=1e-4)
    if steps == 2:
        moved = result.optimizer_steps[1]
        assert moved["ratio_abs_dev"] > 0 and moved["clip_frac_low"] + moved["clip_frac_high"] > 0
    ours = weights(worker)
    for parameter, tensor in plain.model.state_dict().items():
        if parameter in ours:
            torch.testing.assert_close(ours[parameter], tensor, rtol=0, atol=2e-4, msg=parameter)


def test_the_reference_is_no_penalty_at_the_start_and_pulls_back_later(worker_of):
    cfg = loss_cfg(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k2")
    worker, samples = worker_of(loss_cfg=cfg), make_samples(6)
    first = worker.fit(packs_of(samples)[0], 1).optimizer_steps[0]
    assert first["ref_kl"] == pytest.approx(0, abs=1e-9) and first["kl_loss"] == pytest.approx(0, abs=1e-9)
    for sample in samples:
        sample.advantages = [0.0] * len(sample.labels)
    kl = [worker.fit(packs_of(samples)[0], step).optimizer_steps[0]["ref_kl"] for step in range(2, 10)]
    assert kl[0] > 1e-3 and kl[-1] < kl[0] / 3


def test_without_signal_nothing_moves(worker_of):
    worker, samples = worker_of(), make_samples(4)
    before = weights(worker)
    for sample in samples:
        sample.advantages = [0.0] * len(sample.labels)
    metrics = worker.fit(packs_of(samples)[0], 1).optimizer_steps[0]
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    close(before, weights(worker))


def test_a_poisoned_update_is_skipped_counted_and_ends_the_run_when_it_goes_on(worker_of):
    worker = worker_of(max_consecutive_skips=2)
    good, bad = make_samples(4), make_samples(4)
    bad[0].advantages = [float("inf")] * len(bad[0].labels)
    worker.fit(packs_of(good)[0], 1)
    before = weights(worker)
    result = worker.fit(packs_of(bad)[0], 2)
    assert result.optimizer_steps[0]["skipped"] == 1 and result.metrics["skipped_updates"] == 1
    assert "optimizer step 2 skipped: gradient norm is" in result.warnings[0]
    close(before, weights(worker))
    assert worker.fit(packs_of(good)[0], 3).optimizer_steps[0]["skipped"] == 0
    assert all(t.isfinite().all() for t in weights(worker).values())
    worker.fit(packs_of(bad)[0], 4)
    with pytest.raises(RuntimeError, match="2 updates in a row were skipped"):
        worker.fit(packs_of(bad)[0], 5)


def test_a_step_of_fewer_updates_leaves_the_schedule_where_it_is(worker_of):
    worker = worker_of(optimizer_steps=2, lr_cfg=LRConfig(lr_type="linear", warmup_ratio=0, lr_min=0.0))
    rates = [
        [row["lr"] for row in worker.fit(packs_of(make_samples(2), steps=updates)[0], step).optimizer_steps]
        for step, updates in ((1, 2), (2, 1), (3, 2))
    ]
    line = [LR * (1 - i / 9) for i in range(10)]
    assert rates == [pytest.approx(part) for part in (line[0:2], line[2:3], line[4:6])]


def test_a_correction_needs_the_engine_s_log_probs(worker_of):
    worker = worker_of(loss_cfg=loss_cfg(rollout_is=RolloutImportanceSampling(rollout_is_threshold=(0.5, 2.0))))
    samples = make_samples(2)
    samples[0].rollout_logprobs = None
    message = "rollout_is needs the engine's log-probs, but rollout 0 came without them \\(1 of 2"
    with pytest.raises(RuntimeError, match=message):
        worker.fit(packs_of(samples)[0], 1)


def test_a_sample_without_log_probs_hides_no_other_s_gap(worker_of):
    found = []
    for missing in (False, True):
        worker, samples = worker_of(), make_samples(3)
        for i in (1, 2):
            samples[i].rollout_logprobs = [value + i for value in samples[i].rollout_logprobs]
        if missing:
            samples[0].rollout_logprobs = None
        else:
            samples = samples[1:]
        found.append(worker.fit(packs_of(samples)[0], 1).metrics)
        worker.stop()
    for key, value in found[0].items():
        if key.startswith(("mismatch/", "entropy/rollout")):
            assert found[1][key] == pytest.approx(value, abs=1e-6), key
    assert found[1]["mismatch/mismatch_logprob_abs_diff"] > 0.5


def test_a_step_can_be_profiled(worker_of, tmp_path):
    worker = worker_of(profile_step=[2], log_dir=tmp_path)
    for step in (1, 2):
        worker.fit(packs_of(make_samples(2))[0], step)
    assert [p.name for p in (tmp_path / "profiling").iterdir()] == ["train-step-2-rank-0.json"]


def test_a_group_of_other_size_is_refused_and_a_foreign_one_is_left(model):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        worker = make_worker(model)
        worker.stop()
        assert dist.is_initialized(), "who made the group ends it"
        with pytest.raises(RuntimeError, match="a process group of 1 ranks exists already, 2 are needed"):
            make_worker(model, world=2)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- two ranks against one

# samples, optimizer steps, tokens a pack, changes of the configuration, poisoned samples
SCENARIOS = {
    "many": (9, 1, 40, {}, ()),
    "three packs on two ranks": (3, 1, 23, {}, ()),
    "one sample": (1, 1, 64, {}, ()),
    "everything": (
        8, 2, 40,
        {"loss_cfg": loss_cfg(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", loss_reduction="sample",
                              rollout_is=RolloutImportanceSampling(rollout_is_threshold=(0.8, 1.2),
                                                                   rollout_is_mode="both"))}, (),
    ),
    "poison on one rank": (4, 1, 23, {}, (2,)),
    "no engine's log-probs on one rank": (2, 1, 64, {}, ()),
}  # fmt: skip


def train(model: Path, name: str, rank: int = 0, world: int = 1, port: int = 0):
    """Two train steps of a scenario: metrics of each update, of each step, log-probs, warnings, final weights."""
    count, steps, length, changes, poisoned = SCENARIOS[name]
    worker = make_worker(model, rank, world, port, **changes)
    updates, metrics, logprobs, warnings = [], [], {}, []
    for step in range(2):
        samples = make_samples(count, seed=step)
        for i in poisoned if step == 1 else ():
            samples[i].advantages = [float("nan")] * len(samples[i].labels)
        if name == "no engine's log-probs on one rank":
            samples[0].rollout_logprobs = None
        result = worker.fit(packs_of(samples, world, steps, length)[rank], step + 1)
        updates += result.optimizer_steps
        metrics.append(result.metrics)
        logprobs |= {f"{step}/{i}": v for i, v in result.train_logprobs.items()}
        warnings += result.warnings
    return worker, {
        "updates": updates, "metrics": metrics, "logprobs": logprobs, "warnings": warnings, "weights": weights(worker),
    }  # fmt: skip


def _rank(rank: int, port: int, model: str, out: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name in SCENARIOS:
        worker, results[name] = train(Path(model), name, rank, 2, port)
    worker.stop()
    torch.save(results, Path(out) / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(_rank, (port, str(model), str(out)), nprocs=2, start_method="spawn")
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(model, two_ranks, name):
    worker, one = train(model, name)
    worker.stop()
    first, second = (results[name] for results in two_ranks)
    for a, b in zip(one["updates"], first["updates"], strict=True):
        local = {"step_consumed_tokens"}  # of a rank
        assert a.keys() == b.keys()
        for key in a.keys() - local:
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5, nan_ok=True), key
    local = {"training_s", "compiled_programs"}  # of the process
    for a, b, c in zip(one["metrics"], first["metrics"], second["metrics"], strict=True):
        assert b.keys() == c.keys()
        for key in a.keys() - local:
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=2e-5) and b[key] == c[key], key
    assert not first["logprobs"].keys() & second["logprobs"].keys()
    both = first["logprobs"] | second["logprobs"]
    assert both.keys() == one["logprobs"].keys()
    for key, values in one["logprobs"].items():
        torch.testing.assert_close(torch.tensor(both[key]), torch.tensor(values), rtol=0, atol=2e-4)
    close(one["weights"], first["weights"], atol=2e-4)
    assert len(one["warnings"]) == len(first["warnings"]) == len(second["warnings"])
    if name == "poison on one rank":
        assert first["updates"][1]["skipped"] == second["updates"][1]["skipped"] == 1


def test_leaving_out_backwards_of_zero_advantage_changes_no_weight(worker_of):
    samples = make_samples(8)
    for s in samples[3:6]:
        s.advantages = [0.0] * len(s.advantages)
    trained = []
    for skip in (False, True):
        worker = worker_of()
        packs = pack_samples(
            samples, ranks=1, optimizer_steps=1, pack_max_length=999, hidden_size=32, share_prompts=True,
            skip_zero_advantage=skip,
        )[0]  # fmt: skip
        result = worker.fit(packs, 1)
        trained.append((weights(worker), result))
    (full, with_all), (part, without) = trained
    for name, tensor in full.items():
        torch.testing.assert_close(part[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
    assert with_all.train_logprobs.keys() == without.train_logprobs.keys()
    assert with_all.metrics["entropy/train"] == pytest.approx(without.metrics["entropy/train"], rel=1e-6)


def test_a_compilation_after_the_first_step_is_a_warning(worker_of):
    worker = worker_of()
    slices = packs_of(make_samples(3))[0]
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    first = worker.fit(slices, 1)
    assert not first.warnings and first.metrics["compiled_programs"] >= 1
    compiled(torch.ones(2, dtype=torch.float64))
    second = worker.fit(slices, 2)
    assert "TORCH_LOGS=recompiles" in second.warnings[0]
    assert not worker.fit(slices, 3).warnings


def test_a_step_without_room_names_the_ways_out(worker_of, monkeypatch):
    worker = worker_of()

    def no_room(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(worker.engine.model, "forward", no_room)
    message = r"train step 4 .*pack_max_length=\d+.*recompute_ratio.*keep_on_device=False.*2\.00 GiB"
    with pytest.raises(RuntimeError, match=message):
        worker.fit(packs_of(make_samples(3))[0], 4)
