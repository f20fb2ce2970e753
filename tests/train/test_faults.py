"""A run that cannot go on says why, stops all it started, and keeps what it had."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from xtuner.v1.config import AdamWConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoop, SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import SyncProduceStrategyConfig
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.rollout.replicas import NoWorkerLeftError
from xtuner.v1.rl.utils import peer
from xtuner.v1.utils import lock_file

from .helpers import config, fit, hear_ctrl_c, read_rows, write_model

REPOSITORY = Path(__file__).resolve().parents[2]


def fails(cfg, message: str) -> Path:
    """`fit` raises, and nothing that the run started is left. Returns the run's folder."""
    threads = set(threading.enumerate())
    trainer = cfg.build()
    with pytest.raises(RuntimeError, match=message):
        trainer.fit()
    assert trainer.closed and not dist.is_initialized()
    for name in ("train_0", "rollout_0"):
        with pytest.raises(KeyError):
            peer(name)
    lock_file(trainer.run_dir / ".lock").close()
    pools = {t for t in set(threading.enumerate()) - threads if "ThreadPool" in t.name or "asyncio" in t.name}
    assert not pools
    return trainer.run_dir


def judge_is_gone(response, label, extra_info):
    raise ConnectionError("judge.example.org is gone")


def test_a_judge_that_always_raises_ends_the_run_with_samples_shown(model, tmp_path):
    run = fails(
        config(model, tmp_path, task={"reward": judge_is_gone}),
        r"(?s)12 of 12 completed samples could not be judged.*prompt: .*response: .*judge.example.org is gone",
    )
    assert read_rows(run / "logs" / "metrics.jsonl") == [] and not (run / "hf").exists()


async def never_ends(response, label, extra_info):
    while True:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            pass


def test_a_judge_that_ignores_its_cancellation_cannot_keep_the_run_from_ending(model, tmp_path):
    judger = JudgerConfig(judger_name="judge", reward_handler=never_ends, request_timeout=0.2)
    cfg = config(model, tmp_path, task={"judger_config": judger})
    fails(cfg, r"(?s)12 of 12 completed samples.*no result within 0\.2 s")


def not_a_number(response, label, extra_info):
    return float("nan")


def test_a_reward_that_is_no_number_is_a_judge_error_and_no_zero(model, tmp_path):
    fails(config(model, tmp_path, task={"reward": not_a_number}), "(?s)could not be judged.*nan")


def test_an_engine_that_breaks_ends_the_run_with_its_reason(model, tmp_path):
    folder = write_model(tmp_path / "nan")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    fails(config(folder, tmp_path), "(?s)rollout workers are out of service.*not finite")


class DiesOnce(SingleTurnAgentLoop):
    """All engines are gone when it has its 18th answer, in the middle of the second step."""

    answers = 0

    async def generate_sample(self, state):
        state = await super().generate_sample(state)
        self.answers += 1
        if self.answers == 18:
            raise NoWorkerLeftError("all engines are gone")
        return state


class DiesOnceConfig(SingleTurnAgentLoopConfig):
    def build_local(self, rollout_controller, judger=None, tokenizer=None):
        return DiesOnce(rollout_controller, judger, tokenizer, self.sample_params)


def test_no_prompt_is_lost_when_all_engines_die(model, tmp_path):
    whole, cfg = fit(config(model, tmp_path)), config(model, tmp_path)
    loop = cfg.agent_loop_manager_cfg.tasks.agent_loop_config
    cfg.agent_loop_manager_cfg.tasks.agent_loop_config = DiesOnceConfig(**loop.model_dump())
    run = fit(cfg)
    assert "what was under way begins again" in (run.path / "logs" / "rank_0.log").read_text()
    for step in (1, 2, 3):
        assert run.trajectories(step) == whole.trajectories(step)


class Repeats(SingleTurnAgentLoop):
    async def generate_sample(self, state):
        state.tokens = state.prompt_ids * 4
        return await self.rollout_controller.generate(state)


class RepeatsConfig(SingleTurnAgentLoopConfig):
    """A loop of the user's own, whose requests are longer than the context."""

    def build_local(self, rollout_controller, judger, tokenizer):
        return Repeats(rollout_controller, judger, tokenizer, self.sample_params)


def test_a_batch_that_no_group_can_fill_ends_with_the_reason(model, tmp_path):
    task = {
        "agent_loop_config": RepeatsConfig(hf_checkpoint=model, sample_params=SampleParams(max_tokens=8)),
        "produce_strategy_config": SyncProduceStrategyConfig(max_groups_factor=2),
    }
    fails(
        config(model, tmp_path, task=task),
        "(?s)only 0 of 3 groups are usable .6 groups tried.*leaves no room in context_length=56",
    )


def keeps_nothing(group) -> bool:
    return False


def test_a_filter_that_keeps_nothing_ends_the_run(model, tmp_path):
    strategy = SyncProduceStrategyConfig(is_valid_sample_fn=keeps_nothing, max_groups_factor=2)
    cfg = config(model, tmp_path, task={"produce_strategy_config": strategy})
    fails(cfg, "is_valid_sample_fn keeps too few groups")


def test_updates_that_are_skipped_again_and_again_end_the_run(model, tmp_path):
    worker = {"optim_cfg": AdamWConfig(lr=1e-2, skip_grad_norm_threshold=1e-9), "max_consecutive_skips": 2}
    run = fails(config(model, tmp_path, worker=worker), "2 updates in a row were skipped")
    assert "optimizer step 1 skipped: gradient norm" in (run / "logs" / "rank_0.log").read_text()


def always_one(response, label, extra_info):
    return 1.0


def test_groups_without_signal_train_nothing_and_are_counted(model, tmp_path):
    run = fit(config(model, tmp_path, task={"reward": always_one}, save_final_hf=False))
    assert run.series("response/no_signal_group_share") == [1.0] * 3
    assert run.losses() == [0.0] * 3 and [r["grad_norm"] for r in run.updates] == [0.0] * 3


def test_a_run_that_cannot_be_built_leaves_nothing_running(model, tmp_path):
    cfg = config(model, tmp_path)
    (file,) = write_model(tmp_path / "broken").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    cfg.load_from = tmp_path / "broken"
    with pytest.raises(ValueError, match="no tensor 'model.norm.weight'"):
        cfg.build()
    assert not dist.is_initialized()
    with pytest.raises(KeyError):
        peer("train_0")
    assert len(fit(config(model, tmp_path)).rows) == 3


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
import torch
torch.set_num_threads(1)
from tests.train.helpers import config, spread

class Slow:
    calls = 0
    def __call__(self, response, label, extra_info):
        self.calls += 1
        if self.calls > 12:
            Path({marker!r}).touch()
            time.sleep(20)
        return spread(response, label, extra_info)

config(Path({model!r}), Path({folder!r}), task={{"reward": Slow()}}).build().fit()
"""


def test_ctrl_c_in_step_2_ends_the_process_and_keeps_step_1(model, tmp_path):
    marker = tmp_path / "step-2"
    code = CHILD.format(repository=str(REPOSITORY), marker=str(marker), model=str(model), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)
    end = time.monotonic() + 60
    while not marker.exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.send_signal(signal.SIGINT)
    stderr = child.communicate(timeout=60)[1]
    assert child.returncode != 0 and "KeyboardInterrupt" in stderr
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    (run,) = (tmp_path / "runs").glob("2*")
    assert [row["step"] for row in read_rows(run / "logs" / "metrics.jsonl")] == [1]
