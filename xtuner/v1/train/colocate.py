"""The colocated run: generate, judge, train, push the weights, evaluate, save."""

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtuner.v1.rl.agent_loop_manager import ProduceBatchResult
from xtuner.v1.rl.evaluator import EvalResult
from xtuner.v1.rl.trainer import SampleReport, TrainingWorker, build_samples, pack_samples
from xtuner.v1.rl.trainer.worker import FitResult
from xtuner.v1.rl.utils import build_launcher
from xtuner.v1.utils import get_logger, log_to_file
from xtuner.v1.utils.device import keep_freed_memory, resolve_device, seed_everything

from .checkpoints import newest_checkpoint, part_folder, publish, read_state, write_state
from .experiment import Experiment
from .progress import Progress, StepTimer
from .run_log import MetricWriter, write_trajectories
from .step_metrics import step_metrics

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

logger = get_logger()


class RLColocateTrainer:
    """A run that is ready to `fit`. Made by `RLColocateTrainerConfig.build()`."""

    def __init__(self, cfg: "RLColocateTrainerConfig"):
        self.cfg = cfg
        self.loop = asyncio.Runner()
        self.closed = False
        keep_freed_memory()
        seed_everything(cfg.seed)
        self.launcher = build_launcher(cfg.launcher, cfg.resources)
        self.writer: MetricWriter | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- the algorithm

    def fit(self) -> dict[str, float]:
        """Run to the last step and return its metrics. Whatever ends it, all that was started is stopped."""
        try:
            return self.loop.run(self._fit())
        finally:
            self.close()

    async def _fit(self) -> dict[str, float]:
        cfg, metrics = self.cfg, {}
        if self.cur_step >= self.total_steps:
            logger.info(f"step {self.cur_step} of {self.total_steps} is done already: nothing to do.")
            return metrics
        await self._to_training(keep_weights=False)
        await self._to_rollout(self.cur_step)
        if cfg.enable_evaluate and cfg.enable_initial_evaluate and self.cur_step == 0:
            self._log_evaluation(await self._evaluate(0))
        self.progress = Progress(self.total_steps, self.cur_step)
        for step in range(self.cur_step + 1, self.total_steps + 1):
            self.timer.restart()
            last, syncing = step == self.total_steps, step % cfg.sync_weights_interval == 0
            evaluating = cfg.enable_evaluate and syncing and step % cfg.evaluate_step == 0
            with self.timer("produce_batch"):
                batch = await self.manager.produce_batch(cfg.train_batch_size, step, self.model_step)
            with self.timer("onload"):
                await self._to_training(keep_weights=not syncing)
            with self.timer("prepare_data"):
                report = build_samples(batch.groups, self.estimator, cfg.train_worker_cfg.pack_max_length)
            with self.timer("training"):
                results = await self._train(report, step)
            self._write_train_rollouts(step, batch, results)
            with self.timer("save_ckpt"):
                await self._save(step, last)
            if evaluating or not last:
                with self.timer("sync_weight" if syncing else "switch_to_rollout"):
                    await self._to_rollout(step if syncing else None)
            evaluation = None
            if evaluating:
                with self.timer("evaluation"):
                    evaluation = await self._evaluate(step)
            self.cur_step = step
            metrics = await step_metrics(self, step, batch, report, results, evaluation)
            self._log(step, metrics, results)
        logger.info(f"finished {self.total_steps} steps. Run folder: {self.run_dir}")
        return metrics

    # ---------------------------------------------------------------- phases of a step

    async def _to_training(self, keep_weights: bool) -> None:
        """The device changes hands: engine asleep, trainer awake."""
        await self.rollout.sleep(("kv_cache",) if keep_weights else ("weights", "kv_cache"))
        await self._all("onload")

    async def _train(self, report: SampleReport, step: int) -> list[FitResult]:
        """One train step on every rank."""
        cfg, worker = self.cfg, self.cfg.train_worker_cfg
        if not report.samples:
            raise RuntimeError(f"train step {step}: no sample is left to train on; dropped: {report.dropped}.")
        packs = pack_samples(
            report.samples,
            ranks=self.world_size,
            optimizer_steps=min(worker.optimizer_steps, len(report.samples)),
            pack_max_length=worker.pack_max_length,
            hidden_size=worker.model_cfg.hidden_size,
            share_prompts=worker.shares_prompts(self.device),
            pad_multiple=1 if self.device.type == "cpu" else 64,
            seed=None if cfg.deterministic else cfg.seed + step,
        )
        calls = [h.call("fit", packs[rank], step) for rank, h in enumerate(self.workers)]
        return list(await asyncio.gather(*calls))

    async def _to_rollout(self, version: int | None) -> None:
        """The device goes back: engine awake, with new weights if `version` is given."""
        if version is not None:
            await self._push_weights(version)
        await self._all("offload")
        await self.rollout.wake(("kv_cache",))

    async def _push_weights(self, version: int) -> None:
        await self.rollout.wake(("weights",))
        names = self.rollout.worker_names
        await asyncio.gather(*(h.call("push_weights", n, version) for h, n in zip(self.workers, names, strict=True)))
        self.model_step = version

    async def _evaluate(self, step: int) -> EvalResult:
        result = await self.evaluator.evaluate(step, self.model_step)
        groups = [[state] for state in result.states]
        write_trajectories(self.run_dir / "eval_rollout" / f"eval_rollout_{step}.jsonl", groups)
        return result

    async def _save(self, step: int, last: bool) -> None:
        """Checkpoint and export, each complete or not there."""
        cfg = self.cfg
        every = cfg.checkpoint_interval
        if every and every > 0 and (step % every == 0):
            final = self.run_dir / "checkpoints" / f"ckpt-step-{step}"
            part = part_folder(final)
            await self._all("save_checkpoint", str(part / "weights"), not cfg.checkpoint_no_save_optimizer)
            keep_buffer = not cfg.checkpoint_no_save_replay_buffer
            state = {
                "cur_step": step, "optimizer_updates": self.updates + cfg.train_worker_cfg.optimizer_steps,
                "manager": self.manager.state_dict(),
                "replay_buffer": self.replay_buffer.state_dict() if keep_buffer else None,
            }  # fmt: skip
            write_state(part, state)
            publish(part, final)
            self.experiment.add("checkpoint_list", final, cfg.checkpoint_maxkeep)
        every = cfg.hf_interval
        if (every and every > 0 and step % every == 0) or (last and (cfg.save_final_hf or (every or -1) > 0)):
            final = self.run_dir / "hf" / f"hf-step-{step}"
            part = part_folder(final)
            await self._all("save_hf", str(part), str(self.export_dtype))
            publish(part, final)
            self.experiment.add("hf_checkpoint_list", final, cfg.hf_max_keep)
        self.experiment.entry["cur_step"] = step
        self.experiment.save()

    def _write_train_rollouts(self, step: int, batch: ProduceBatchResult, results: list[FitResult]) -> None:
        by_id = {rid: values for r in results for rid, values in r.train_logprobs.items()}
        for state in (s for group in batch.groups for s in group):
            values = by_id.get(state.rollout_id if state.rollout_id is not None else -1)
            if values is not None:
                left = iter(values)
                mask = state.response_mask or [1] * len(state.response_ids or [])
                state.train_logprobs = [next(left) if m else math.nan for m in mask]
        write_trajectories(self.run_dir / "train_rollout" / f"train_rollout_{step}.jsonl", batch.groups)

    # ---------------------------------------------------------------- logging

    def _log(self, step: int, metrics: dict[str, float], results: list[FitResult]) -> None:
        assert self.writer is not None
        for update in results[0].optimizer_steps:
            self.updates += 1
            self.writer.update(self.updates, step, update)
        for message in results[0].warnings:
            logger.warning(message)
        self.writer.step(step, metrics)
        self.progress.step(step, metrics)

    def _log_evaluation(self, result: EvalResult) -> None:
        assert self.writer is not None
        self.writer.step(0, {f"eval/{k}": v for k, v in result.metrics.items()})
        logger.info("initial evaluation: " + ", ".join(f"{k} {v:.4g}" for k, v in result.metrics.items()))

    # ---------------------------------------------------------------- build and close

    def _build(self) -> None:
        from transformers import AutoTokenizer

        cfg = self.cfg
        self.device = resolve_device(cfg.resources.accelerator)
        self.world_size = self.launcher.world_size
        self.tokenizer = AutoTokenizer.from_pretrained(str(cfg.tokenizer_path))
        self.rollout = cfg.rollout_config.build(self.launcher, self.tokenizer, cfg.seed, self.device.type)
        self.replay_buffer = cfg.replay_buffer_config.build()
        self.estimator = cfg.advantage_estimator_config.build()
        self.manager = cfg.agent_loop_manager_cfg.build(
            self.rollout, self.tokenizer, self.replay_buffer, self.launcher, cfg.seed
        )
        if cfg.enable_evaluate:
            assert cfg.eval_agent_loop_manager_cfg is not None and cfg.evaluator_config is not None
            evaluation = cfg.eval_agent_loop_manager_cfg.build(
                self.rollout, self.tokenizer, cfg.replay_buffer_config.build(), self.launcher, cfg.seed
            )
            self.evaluator = cfg.evaluator_config.build(evaluation)
        self.total_steps = self._resolve_steps(len(self.manager))
        self.cur_step = self.model_step = self.updates = 0
        self.consumed = [0.0, 0.0]
        self.experiment = Experiment(Path(cfg.work_dir or Path.cwd() / "work_dirs"), cfg.auto_resume)
        self.run_dir = self.experiment.path
        logs = Path(cfg.log_dir) if cfg.log_dir else self.run_dir / "logs"
        log_to_file(logs / "rank_0.log")
        self.experiment.describe(cfg.model_dump(mode="json"))
        checkpoint = self._checkpoint_to_load()
        state = read_state(checkpoint) if checkpoint else None
        if state:
            self._restore_driver(state)
        self.writer = MetricWriter(logs, cfg.exp_tracker == "tensorboard", self.cur_step, self.updates)
        self.timer = StepTimer()
        self.loop.run(self._start_workers(checkpoint, logs))

    def _resolve_steps(self, prompts: int) -> int:
        cfg = self.cfg
        if cfg.total_train_steps is not None:
            if cfg.total_epochs is not None:
                logger.info(f"total_train_steps={cfg.total_train_steps} wins over total_epochs={cfg.total_epochs}.")
            return cfg.total_train_steps
        assert cfg.total_epochs is not None
        steps = prompts // cfg.train_batch_size * cfg.total_epochs
        if steps == 0:
            raise ValueError(
                f"{prompts} prompts are fewer than train_batch_size={cfg.train_batch_size}: total_epochs="
                f"{cfg.total_epochs} gives 0 train steps. Lower train_batch_size or give more prompts."
            )
        return steps

    def _checkpoint_to_load(self) -> Path | None:
        named = self.cfg.load_checkpoint_cfg.checkpoint_path
        if named is not None:
            return Path(named)
        if not self.cfg.auto_resume:
            return None
        found = newest_checkpoint(self.run_dir)
        logger.info(f"auto_resume: {found or 'no complete checkpoint, starting afresh'}")
        return found

    def _restore_driver(self, state: dict[str, Any]) -> None:
        self.cur_step = self.model_step = state["cur_step"]
        self.updates = state["optimizer_updates"]
        if self.cfg.load_checkpoint_cfg.load_dataset:
            self.manager.load_state_dict(state["manager"])
            if state["replay_buffer"] is not None:
                self.replay_buffer.load_state_dict(state["replay_buffer"])

    async def _start_workers(self, checkpoint: Path | None, logs: Path) -> None:
        """Training workers first, with the weights; then engines, which take what memory is left."""
        cfg = self.cfg
        worker_cfg = cfg.train_worker_cfg.model_copy(
            update={
                "load_from": cfg.load_from, "log_dir": logs,
                "seed": cfg.seed if cfg.train_worker_cfg.seed is None else cfg.train_worker_cfg.seed,
                "loss_cfg": cfg.train_worker_cfg.loss_cfg.normalized_by(cfg.advantage_estimator_config.loss_max_length),
            }
        )  # fmt: skip
        self.export_dtype = _checkpoint_dtype(Path(cfg.load_from))
        self.workers = [
            self.launcher.spawn_on(
                rank, f"train_{rank}", TrainingWorker, worker_cfg, rank=rank, world_size=self.world_size,
                accelerator=cfg.resources.accelerator, seed=worker_cfg.seed, deterministic=cfg.deterministic,
                total_optimizer_steps=self.total_steps * worker_cfg.optimizer_steps,
            )
            for rank in range(self.world_size)
        ]  # fmt: skip
        await self._all("setup", *self.launcher.rendezvous())
        load = cfg.load_checkpoint_cfg
        if checkpoint is not None:
            await self._all(
                "load_checkpoint", str(checkpoint / "weights"), load.load_optimizer_states, load.load_scheduler
            )
        await self._all("offload")
        await self.rollout.start()

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(h.call(method, *args) for h in self.workers)))

    def close(self) -> None:
        """Stop all that this run started. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        if progress := getattr(self, "progress", None):
            progress.close()
        if self.writer is not None:
            self.writer.close()
        try:
            if hasattr(self, "rollout"):
                self.loop.run(self.rollout.shutdown())
            if self.launcher.kind == "local" and hasattr(self, "workers"):
                self.loop.run(self._all("stop"))
        finally:
            self.launcher.shutdown()
            self.loop.close()


def _checkpoint_dtype(folder: Path) -> str:
    """Type of the exported weights: that of the initial ones."""
    import json

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
