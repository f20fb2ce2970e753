"""The colocated run: generate, judge, train, push the weights, evaluate, save."""

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xtuner.v1.engine.checkpoint import check_train_state
from xtuner.v1.model.hf import checkpoint_dtype
from xtuner.v1.rl.replay_buffer import Group
from xtuner.v1.rl.rollout.controller import RolloutController
from xtuner.v1.rl.rollout.replicas import NoWorkerLeftError
from xtuner.v1.rl.trainer import FitResult, SampleReport, TrainingWorker, build_samples, pack_samples
from xtuner.v1.rl.trainer.gap_bounds import enforce, gap_metrics, measure_gaps
from xtuner.v1.rl.trainer.probe import Probe
from xtuner.v1.rl.trainer.reward_parts import reward_parts
from xtuner.v1.rl.utils import Handle, build_launcher
from xtuner.v1.rl.weight_update import EngineLostError, push_to_all
from xtuner.v1.utils import first_line, get_logger, log_to_file
from xtuner.v1.utils.device import keep_freed_memory, old_objects_stay, rare_garbage_collection, seed_everything
from xtuner.v1.utils.event_loop import end_loop

from .canary import Canary
from .checkpoints import read_state, refuse_done, refuse_other_batches, restore_rng
from .data_checks import check_named_checkpoint, epoch_steps, measured_problems, warn_of_repeated_prompts
from .debug_replay import replay_steps, rollout_only, train_only
from .exact import gap_excuse, is_exact
from .experiment import Experiment
from .progress import Progress, StepTimer
from .resolved import resolved_config, resolved_worker
from .resume import resume_hint
from .rl_trainer import LoadCheckpointConfig
from .run_log import MetricWriter, open_writer, write_trajectories
from .sample_warnings import SampleWarnings
from .saves import export, lacks_model, save
from .step_metrics import Throughput, training_metrics
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

logger = get_logger()
T = TypeVar("T")


class RLColocateTrainer:
    """A run that is ready to `fit`. Made by `RLColocateTrainerConfig.build()`."""

    def __init__(self, cfg: "RLColocateTrainerConfig"):
        self.cfg = cfg
        self.loop = asyncio.Runner()
        self.closed = False
        self.canary = Canary(cfg)
        self.sample_warnings = SampleWarnings()
        self.together = False
        """Whether engine and trainer keep their memory in each other's phases."""
        self.debug = cfg.debug_rollout or cfg.debug_train
        if cfg.resources.accelerator == "CPU":
            keep_freed_memory()
        seed_everything(cfg.seed)
        self.launcher = build_launcher(cfg.launcher, cfg.resources)
        self.rollout: RolloutController | None = None
        self.workers: list[Handle] = []
        self.experiment: Experiment | None = None
        self.writer: MetricWriter | None = None
        self.progress: Progress | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- the algorithm

    def fit(self) -> dict[str, float]:
        """Run to the last step and return its metrics. Whatever ends it, all that was started is stopped."""
        if self.closed:
            raise RuntimeError("this run has ended; build() another one.")
        try:
            if self.finished:
                logger.info(f"{self.run_dir} is finished: all {self.total_steps} train steps are done.")
                if self.lacks_model:
                    logger.warning(f"there is no model of its last step in {self.run_dir / 'hf'}, and no checkpoint.")
                return {}
            self.progress = Progress(self.total_steps, self.cur_step)
            with old_objects_stay(), rare_garbage_collection():
                if self.debug:
                    metrics = self.loop.run(rollout_only(self) if self.cfg.debug_rollout else train_only(self))
                else:
                    metrics = self.loop.run(self._fit())
            saved = f" Rollouts: {Path(self.cfg.debug_rollout_dir or '').absolute()}." if self.cfg.debug_rollout else ""
            logger.info(f"finished {self.total_steps} steps.{saved} Run folder: {self.run_dir}")
            return metrics
        finally:
            self.close()

    async def _fit(self) -> dict[str, float]:
        if self.lacks_model and self.cur_step >= self.total_steps:
            logger.info(f"the train steps are done; the model of step {self.cur_step} is exported.")
            await self.on_workers("onload")
            await export(self, self.cur_step)
            await self.on_workers("offload")
        if self.trained:
            return {}
        await self._to_training(keep_weights=False)
        await self._to_rollout(self.cur_step)
        restore_rng(self.rng)
        metrics = await self._catch_up()
        for step in range(self.cur_step + 1, self.total_steps + 1):
            metrics = await self._step(step)
            gc.collect(1)  # the step's samples are gone: there is next to nothing to look through
        return metrics

    async def _step(self, step: int) -> dict[str, float]:
        assert self.rollout is not None
        timer = self.timer
        timer.restart()
        last, syncing, evaluating = step == self.total_steps, self._syncs(step), self._evaluates(step)
        with timer("produce_batch"):
            batch = await self._with_engines(
                lambda: self.manager.produce_batch(self.cfg.train_batch_size, step, self.model_step), step - 1
            )
        with timer("verify_weights"):
            compared, probe = await self._verify_weights(), await self.canary.ask(self.rollout, self.model_step)
        with timer("onload"):
            await self._to_training(keep_weights=not syncing)
        with timer("prepare_data"):
            report = self.build_samples(step, batch.groups)
        with timer("training"):
            results = await self.train(report, step, probe)
        metrics = batch.metrics() | await self.engine_metrics() | training_metrics(report, results) | compared
        metrics |= {"rollout/model_step": float(self.model_step)} | self.log_training(step, batch.groups, results)
        with timer("save_ckpt"):
            await save(self, step, last, metrics)
        if evaluating or not last:
            with timer("sync_weight" if syncing else "switch_to_rollout"):
                await self._to_rollout(step if syncing else None)
        if evaluating:
            with timer("evaluation"):
                metrics |= await self._evaluate(step)
        metrics |= self.throughput.metrics(report)
        self.finish_step(step, metrics)
        return metrics

    async def _catch_up(self) -> dict[str, float]:
        """Before the first step: the initial evaluation, or what the broken run did not reach of its last step."""
        step, metrics = self.cur_step, self.unlogged
        if metrics is None:
            return {}
        if self._evaluates(step):
            metrics |= await self._evaluate(step)
        if metrics:
            self.finish_step(step, metrics)
        return metrics

    async def _with_engines(self, work: Callable[[], Awaitable[T]], version: int) -> T:
        """Do this, which generates; if no engine is left, once more after all have got the trainer's weights, which are
        of this version: servers that died may have lost theirs."""
        assert self.rollout is not None
        try:
            return await work()
        except NoWorkerLeftError as error:
            then = f"The engines get the weights of version {version}; what was under way begins again."
            logger.error(f"{first_line(error)}\n{then}")
            await self._to_training(keep_weights=False)
            await self._to_rollout(version)
            return await work()

    def _syncs(self, step: int) -> bool:
        return step % self.cfg.sync_weights_interval == 0

    def _evaluates(self, step: int) -> bool:
        cfg = self.cfg
        initial = step == self.first_step
        return cfg.enable_evaluate and (cfg.enable_initial_evaluate if initial else step % cfg.evaluate_step == 0)

    # ---------------------------------------------------------------- phases of a step

    async def _to_training(self, keep_weights: bool) -> None:
        """The device changes hands: engine asleep, trainer awake; unless both have room at once."""
        assert self.rollout is not None
        if self.together:
            return
        await self.rollout.sleep(("kv_cache",) if keep_weights else ("weights", "kv_cache"))
        await self.on_workers("onload")

    def build_samples(self, step: int, groups: list[Group]) -> SampleReport:
        """Advantages and training samples of a batch, and a warning if they can teach little."""
        worker = self.cfg.train_worker_cfg
        keep = not worker.free_rollout_routed_experts_in_worker
        report = build_samples(groups, self.estimator, worker.pack_max_length, keep)
        report.metrics |= reward_parts(groups, self.cfg.agent_loop_manager_cfg.task_list())
        self.sample_warnings.look(step, report.metrics)
        return report

    async def train(self, report: SampleReport, step: int, probe: Probe | None = None) -> list[FitResult]:
        """One train step on every rank, after `probe` was found in order."""
        cfg, worker, count = self.cfg, self.cfg.train_worker_cfg, len(report.samples)
        if not count:
            raise RuntimeError(f"train step {step}: no sample is left to train on; dropped: {report.dropped}.")
        if longer := report.dropped.get("longer_than_pack"):
            logger.warning(
                f"train step {step}: {longer} samples are longer than train_worker_cfg.pack_max_length="
                f"{worker.pack_max_length} and not trained on, which favours short answers; raise it."
            )
        if count < worker.optimizer_steps:
            logger.warning(f"train step {step}: {count} samples, so {count} of {worker.optimizer_steps} updates.")
        packs = pack_samples(
            report.samples,
            ranks=self.world_size // worker.ranks_per_pack,
            optimizer_steps=min(worker.optimizer_steps, count),
            pack_max_length=worker.pack_max_length,
            hidden_size=worker.model_cfg.hidden_size,
            share_prompts=worker.share_prompts,
            skip_zero_advantage=worker.zero_without_advantage,
            pad_multiple=1 if cfg.resources.device == "cpu" else 64,
            seed=None if cfg.deterministic else cfg.seed + step,
            routing_shape=worker.model_cfg.routing_shape if cfg.rollout_config.enable_return_routed_experts else None,
        )
        ranks = enumerate(self.workers)
        calls = [h.call("fit", packs[rank // worker.ranks_per_pack], step, probe) for rank, h in ranks]
        return list(await asyncio.gather(*calls))

    async def _to_rollout(self, version: int | None) -> None:
        """The device goes back: engine awake, with new weights if `version` is given."""
        assert self.rollout is not None
        if version is not None:
            while lost := await self._push(version):  # an engine that dies often is given up, and not lost any more
                logger.error(f"{lost}\nIt is started again, and the engines get the weights of version {version}.")
                await self.on_workers("offload")  # an engine starts on an empty device
                await self.rollout.revive()
                await self.on_workers("onload")
            self.model_step = version
        self.together = self.together or await self._has_room_for_both()
        if not self.together:
            await self.on_workers("offload")
        await self.rollout.wake(("kv_cache",))
        if version is not None:
            await self.rollout.health()  # an engine that had lost its weights serves again
            await self._verify_weights()
            await self.canary.weights_changed(self.rollout)
        else:
            self.canary.due = False  # no trainer has those weights any more, by which an answer could be judged

    async def _verify_weights(self) -> dict[str, float]:
        """Whether the engines have the weights that they were given last; raises StaleWeightsError. The share of the
        weights that was compared."""
        assert self.rollout is not None
        targets = zip(self.workers, self.rollout.worker_names, strict=True)
        shares = await asyncio.gather(*(h.call("verify_weights", name) for h, name in targets))
        known = [share for share in shares if share is not None]
        return {"canary/weights_compared": min(known)} if known else {}

    async def _push(self, version: int) -> EngineLostError | None:
        """New weights for all engines that are not down. Of one that was lost, asleep or on the way, what became of it:
        all need the update again."""
        assert self.rollout is not None
        try:
            await self.rollout.wake(("weights",))
        except EngineLostError as error:
            return error
        targets = zip(self.workers, self.rollout.worker_names, strict=True)
        return await push_to_all(h.call("push_weights", name, version) for h, name in targets)

    async def _has_room_for_both(self) -> bool:
        """Whether the engine can stay awake from now on, on every device; before an offload, once training has taken
        what it needs."""
        assert self.rollout is not None
        if not self.cfg.keep_on_device:
            return False
        targets = zip(self.workers, self.rollout.worker_names, strict=True)
        room = all(await asyncio.gather(*(h.call("has_room_beside", name) for h, name in targets)))
        if room:
            logger.info("trainer and engine have room beside each other: their memory stays where it is from now on.")
        return room

    async def _evaluate(self, step: int) -> dict[str, float]:
        result = await self._with_engines(lambda: self.evaluator.evaluate(step, self.model_step), step)
        groups = [[state] for state in result.states]
        write_trajectories(self.run_dir / "eval_rollout" / f"eval_rollout_{step}.jsonl", groups, unscored=0.0)
        return {f"eval/{k}": v for k, v in result.metrics.items()}

    # ---------------------------------------------------------------- logging

    async def engine_metrics(self) -> dict[str, float]:
        """Totals of the engines since the start of this process."""
        assert self.rollout is not None
        return {f"rollout/{k}": float(v) for k, v in (await self.rollout.metrics()).items()}

    def log_training(self, step: int, groups: list[Group], results: list[FitResult]) -> dict[str, float]:
        """Trajectories with the trainer's log-probs, one row an update, warnings. Metrics of the gap between engines
        and trainer; raises RolloutGapError if it is too large."""
        assert self.writer is not None
        logprobs = {rid: values for r in results for rid, values in r.train_logprobs.items()}
        for state in (s for group in groups for s in group):
            values = logprobs.get(state.rollout_id if state.rollout_id is not None else -1)
            if values is not None and state.response_mask is not None:
                trained = iter(values)
                values = [next(trained) if m else math.nan for m in state.response_mask]
            state.train_logprobs = values
        trajectories = self.run_dir / "train_rollout" / f"train_rollout_{step}.jsonl"
        write_trajectories(trajectories, groups)
        for update in results[0].optimizer_steps:
            self.updates += 1
            self.writer.update(self.updates, step, update)
        for message in results[0].warnings:
            logger.warning(message)
        gaps = measure_gaps(state for group in groups for state in group)
        backend = self.rollout.config.backend if self.rollout is not None else None
        config = self.cfg.train_worker_cfg.rollout_gap
        enforce(gaps, config, backend or "saved rollouts", step, trajectories)
        return gap_metrics(gaps)

    def finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """The row of the step. It is written last: when it is there, everything else is. `rollout/model_step` is of
        the weights that made its samples."""
        assert self.writer is not None and self.progress is not None and self.experiment is not None
        metrics.setdefault("rollout/model_step", float(self.model_step))
        metrics["step"] = float(step)
        self.writer.step(step, metrics)
        self.progress.step(step, metrics)
        self.cur_step = self.experiment.entry["cur_step"] = step

    # ---------------------------------------------------------------- build and close

    def _build(self) -> None:
        cfg = self.cfg
        self.world_size = self.launcher.world_size
        self.tokenizer = load_tokenizer(cfg.tokenizer_path)
        self.estimator = cfg.advantage_estimator_config.build()
        if not cfg.debug_train:
            self._build_rollout()
        self.total_steps = self._resolve_steps()
        resume = cfg.auto_resume and not self.debug
        named = cfg.load_checkpoint_cfg.checkpoint_path
        check_named_checkpoint(cfg, self.total_steps)
        log_dir = Path(cfg.log_dir) if cfg.log_dir else None
        self.experiment = Experiment(Path(cfg.work_dir or "work_dirs"), self.total_steps, resume, log_dir, self.debug)
        self.run_dir = self.experiment.path
        log_to_file(self.experiment.logs / "rank_0.log")
        self.cur_step = self.model_step = self.updates = 0
        self.rng: str | None = None
        self.schedule_from = 0
        """The step behind which the learning-rate schedule begins."""
        self.warmup_of = self.total_steps
        """The train steps that were to be made when it began: the warm-up is a share of them."""
        self.first_step = 0
        """Whose weights this run began with."""
        self.unlogged: dict[str, float] | None = {}
        own = self.experiment.checkpoint  # all of it is taken: what may be chosen is what a new run begins with
        load = LoadCheckpointConfig(checkpoint_path=own) if own is not None else cfg.load_checkpoint_cfg
        if load.checkpoint_path is not None:
            self._restore_driver(load)
        self.trained = self.cur_step >= self.total_steps and self.unlogged is None
        self.lacks_model = lacks_model(cfg, self.run_dir, self.total_steps)
        done = self.trained or self.experiment.last_step >= self.total_steps
        if done and named is not None and not self.experiment.resumed:
            refuse_done(Path(named), self.total_steps)
        self.finished = done and not (self.lacks_model and own is not None)
        if self.finished:
            return
        if load.checkpoint_path is not None:  # here, for a worker elsewhere could only show its traceback
            worker = cfg.train_worker_cfg
            check_train_state(Path(load.checkpoint_path) / "weights", worker.model_cfg, worker.lora_cfg)
        self.experiment.describe(resolved_config(self))
        self.writer = open_writer(self)
        self.timer = StepTimer()
        self.throughput = Throughput(self.timer, self.world_size)
        self.loop.run(self._start(load))
        self.experiment.make_room(cfg.checkpoint_maxkeep, cfg.hf_max_keep)

    def _build_rollout(self) -> None:
        cfg = self.cfg
        # The trainer pushes weights before the first request; without a trainer the engine reads the initial ones.
        changes = {"model_path": cfg.load_from, "skip_load_weights": False} if cfg.debug_rollout else {}
        exact = is_exact(cfg) or cfg.rollout_config.deterministic
        changes = {"skip_load_weights": True, "deterministic": exact} | changes
        engine = cfg.rollout_config.model_copy(update=changes)
        self.rollout = engine.build(self.launcher, self.tokenizer, cfg.seed, cfg.resources.device)
        self.replay_buffer = cfg.replay_buffer_config.build()
        self.manager = cfg.agent_loop_manager_cfg.build(
            self.rollout, self.tokenizer, self.replay_buffer, self.launcher, cfg.seed
        )
        problems = measured_problems(cfg, cfg.agent_loop_manager_cfg, [task.sampler for task in self.manager.tasks])
        if cfg.enable_evaluate and not cfg.debug_rollout:
            assert cfg.eval_agent_loop_manager_cfg is not None and cfg.evaluator_config is not None
            evaluation = cfg.eval_agent_loop_manager_cfg.build(
                self.rollout, self.tokenizer, cfg.replay_buffer_config.build(), self.launcher, cfg.seed
            )
            self.evaluator = cfg.evaluator_config.build(evaluation)
            samplers = [task.sampler for task in evaluation.tasks]
            problems += measured_problems(cfg, cfg.eval_agent_loop_manager_cfg, samplers)
        if problems:
            raise ValueError("the run cannot start:\n" + "\n".join(f"- {p}" for p in problems))

    def _resolve_steps(self) -> int:
        cfg = self.cfg
        if cfg.total_train_steps is not None:
            if cfg.total_epochs is not None:
                logger.info(f"total_train_steps={cfg.total_train_steps} wins over total_epochs={cfg.total_epochs}.")
            if not cfg.debug_train:
                warn_of_repeated_prompts(cfg, len(self.manager))
            return cfg.total_train_steps
        if cfg.debug_train:
            assert cfg.debug_rollout_dir is not None
            return max(replay_steps(Path(cfg.debug_rollout_dir)))
        return epoch_steps(cfg, len(self.manager))

    def _restore_driver(self, load: LoadCheckpointConfig) -> None:
        assert self.experiment is not None and load.checkpoint_path is not None
        state = read_state(Path(load.checkpoint_path))
        refuse_other_batches(Path(load.checkpoint_path), state, self.cfg)
        self.cur_step = self.model_step = state["cur_step"]
        self.updates, self.rng = state["optimizer_updates"], state.get("rng")
        self.schedule_from = state.get("schedule_from", 0) if load.load_scheduler else self.cur_step
        self.warmup_of = self.total_steps - self.schedule_from
        if load.load_scheduler:  # what was warmed up stays so, however long the run becomes
            self.warmup_of = state.get("warmup_of", self.warmup_of)
        if self.experiment.resumed:
            behind = self.experiment.last_step < self.cur_step
            self.unlogged = {k: v for k, v in state["metrics"].items() if v is not None} if behind else None
        else:
            self.first_step = self.cur_step
            self.unlogged = {} if self._evaluates(self.cur_step) else None
        if load.load_dataset:
            self.manager.load_state_dict(state["manager"])
            if state["replay_buffer"] is not None:
                self.replay_buffer.load_state_dict(state["replay_buffer"])

    async def _start(self, load: LoadCheckpointConfig) -> None:
        """Training workers first, with the weights; then engines, which take what memory is left. Where the final
        model alone is missing, no engine."""
        if not self.cfg.debug_rollout:
            await self._start_workers(load)
        if self.rollout is not None and not self.trained:
            assert self.experiment is not None
            await self.rollout.start(self.experiment.logs)

    async def _start_workers(self, load: LoadCheckpointConfig) -> None:
        assert self.experiment is not None
        cfg, worker = self.cfg, resolved_worker(self.cfg, self.experiment.logs)
        self.export_dtype = checkpoint_dtype(cfg.load_from)
        updates, exact, excuse = worker.optimizer_steps, is_exact(cfg), gap_excuse(cfg)
        if exact and excuse:
            logger.warning(f"exact mode: log-probs of engine and trainer are not compared to the bit, as {excuse}.")
        self.workers = [
            self.launcher.spawn_on(
                rank, f"train_{rank}", TrainingWorker, worker, rank=rank, world_size=self.world_size,
                accelerator=cfg.resources.accelerator, seed=worker.seed, deterministic=cfg.deterministic, exact=exact,
                equal_logprobs=exact and excuse is None, schedule_from=self.schedule_from,
                total_optimizer_steps=(self.total_steps - self.schedule_from) * updates,
                warmup_of=self.warmup_of * updates,
            )
            for rank in range(self.world_size)
        ]  # fmt: skip
        await self.on_workers("setup", *self.launcher.rendezvous())
        if load.checkpoint_path is not None:
            weights = str(Path(load.checkpoint_path) / "weights")
            await self.on_workers("load_checkpoint", weights, load.load_optimizer_states)
        await self.on_workers("offload")

    async def on_workers(self, method: str, *args: Any) -> list[Any]:
        """Results of `method` on every training worker, by rank."""
        return list(await asyncio.gather(*(h.call(method, *args) for h in self.workers)))

    def resume_hint(self) -> str:
        """What to do after this run was stopped before its end."""
        return resume_hint(self.cfg, self.run_dir)

    def close(self) -> None:
        """Stop all that this run started. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        with ExitStack() as last_first:  # each is called whatever the others raise
            last_first.callback(end_loop, self.loop)
            last_first.callback(self.launcher.shutdown)
            if self.launcher.kind == "local":
                last_first.callback(lambda: self.loop.run(self.on_workers("stop")))
            if (rollout := self.rollout) is not None:
                last_first.callback(lambda: self.loop.run(rollout.shutdown()))
            for part in (self.experiment, self.writer, self.progress):
                if part is not None:
                    last_first.callback(part.close)
