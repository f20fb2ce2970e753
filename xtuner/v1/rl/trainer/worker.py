"""One rank of the policy update."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from xtuner.v1.config import FSDPConfig
from xtuner.v1.data_proto import PackedBatch
from xtuner.v1.engine import TrainEngine, load_train_state, save_train_state
from xtuner.v1.rl.loss import (
    BaseRLLossConfig,
    Metrics,
    finalize_metrics,
    merge_metrics,
    mismatch_metrics,
    reduce_metrics,
    rollout_is_weights,
)
from xtuner.v1.rl.loss.metrics import mean_of, sum_of
from xtuner.v1.rl.rollout.backends.server import ServerError
from xtuner.v1.rl.utils import peer
from xtuner.v1.rl.weight_update import EngineDownError, Witness, push_in_process
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.compiled import as_written, compiled_programs
from xtuner.v1.utils.device import (
    keep_freed_memory,
    memory_gib,
    resolve_device,
    seed_everything,
    set_deterministic,
    synchronize,
)

from .config import WorkerConfig
from .gap import need_logprobs, refuse_gap
from .probe import Probe, with_rider
from .room import has_room


@dataclass(slots=True)
class FitResult:
    """What one rank's part of a train step gave."""

    optimizer_steps: list[dict[str, float]]
    """Metrics of each optimizer step, reduced over ranks; `step_consumed_tokens` and memory are this rank's."""
    metrics: dict[str, float]
    """Metrics of the train step, reduced over ranks."""
    train_logprobs: dict[int, list[float]]
    """By rollout id: log-probs of this rank's trained tokens before the update. Of the ranks of a pack the first one
    gives them."""
    warnings: list[str] = field(default_factory=list)


class TrainingWorker:
    """Holds this rank's shard of the policy (and of the reference model), and updates it.

    Constructed cheaply anywhere; `setup` touches the device.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        rank: int,
        world_size: int,
        accelerator: str,
        total_optimizer_steps: int,
        seed: int,
        schedule_from: int = 0,
        warmup_of: int | None = None,
        deterministic: bool = False,
        exact: bool = False,
        equal_logprobs: bool = False,
    ):
        """schedule_from: the train step behind which the learning-rate schedule begins. warmup_of: see `learning_rate`.
        deterministic: the same bits in every run. exact: a token's log-prob has the same bits in any pack.
        equal_logprobs: those of the engine must be the trainer's to the bit, else a step raises RuntimeError."""
        self.config, self.rank, self.world_size = config, rank, world_size
        self.accelerator, self.total_optimizer_steps = accelerator, total_optimizer_steps
        self.schedule_from, self.warmup_of = schedule_from, warmup_of
        self.seed, self.deterministic = seed, deterministic
        self.exact, self.equal_logprobs = exact, equal_logprobs
        self.consecutive_skips = self.total_skips = 0
        self.largest_pack = 0
        """Rows of the largest pack so far."""
        self.programs: int | None = None
        """Compiled programs after the first train step."""
        self.owns_group = False
        self.riding: tuple[PackedBatch, Probe] | None = None
        """A probe, and the pack that it rides in."""
        self.arrived: tuple[Probe, Tensor] | None = None
        """A probe, and its log-probs on the device."""
        self.judged: dict[str, float] = {}
        """Metrics of the last probe."""
        self.witness: Witness | None = None
        """Of the last weights that were pushed."""
        self.pushes = 0

    # ---------------------------------------------------------------- set-up

    def setup(self, host: str, port: int) -> None:
        """Join the other ranks at `host:port`, build the model and load the initial weights."""
        if self.accelerator == "CPU":
            keep_freed_memory()
        seed_everything(self.seed)
        set_deterministic(self.deterministic)
        self.device = resolve_device(self.accelerator)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._join(host, port)
        cfg = self.config
        self.engine = TrainEngine(
            cfg.model_cfg,
            cfg.fsdp_cfg,
            device=self.device,
            optim_cfg=cfg.optim_cfg,
            lr_cfg=cfg.lr_cfg,
            lora_cfg=cfg.lora_cfg,
            seed=self.seed,
            total_optimizer_steps=self.total_optimizer_steps,
            warmup_of=self.warmup_of,
            chunk_size=cfg.loss_cfg.logprob_chunk_size,
            sp_size=cfg.sp_size,
            exact=self.exact,
        )
        self.engine.load_hf(cfg.load_from)
        if cfg.lora_cfg is not None and self.rank == 0:
            get_logger().info(self.engine.describe_adapters())
        self.reference = self._build_reference() if cfg.loss_cfg.use_kl_loss else None

    def _join(self, host: str, port: int) -> None:
        """The process group of all ranks; one that is there already is used and left to who made it."""
        if dist.is_initialized():
            if dist.get_world_size() != self.world_size:
                raise RuntimeError(
                    f"a process group of {dist.get_world_size()} ranks exists already, {self.world_size} are needed; "
                    "end it with torch.distributed.destroy_process_group()."
                )
            return
        # Shards in host memory are gathered, and their norms summed, by gloo.
        offloaded = "cpu:gloo,cuda:nccl" if self.config.fsdp_cfg.cpu_offload else "nccl"
        backend = "gloo" if self.device.type == "cpu" else offloaded
        alone: dict[str, Any] = {"store": dist.HashStore()}
        where = alone if self.world_size == 1 else {"init_method": f"tcp://{host}:{port}"}
        dist.init_process_group(
            backend, rank=self.rank, world_size=self.world_size, timeout=timedelta(minutes=30), **where
        )
        self.owns_group = True

    def _build_reference(self) -> TrainEngine | None:
        """None where it is the policy without its adapters."""
        cfg = self.config
        if cfg.base_is_reference:
            return None
        frozen = {"recompute_ratio": 0.0, "requires_grad": False, "cpu_offload": False}
        fsdp_cfg = cfg.ref_model_fsdp_cfg or FSDPConfig(**(cfg.fsdp_cfg.model_dump() | frozen))
        reference = TrainEngine(
            cfg.model_cfg,
            fsdp_cfg,
            device=self.device,
            chunk_size=cfg.loss_cfg.logprob_chunk_size,
            sp_size=cfg.sp_size,
            mesh=self.engine.mesh if cfg.ref_model_fsdp_cfg is None else None,
        )
        reference.load_hf(cfg.ref_load_from or cfg.load_from)
        reference.offload()
        return reference

    # ---------------------------------------------------------------- the update

    def fit(self, slices: list[list[PackedBatch]], train_step: int, probe: Probe | None = None) -> FitResult:
        """One train step: every slice is one optimizer step over its packs.

        Old log-probs are those of the weights before the first update. With one slice (and no rollout
        correction) they are the ones of the training forward itself; else one forward without gradients gives
        them. All ranks hold equally many packs a slice, and the `ranks_per_pack` neighbours of a pack the same ones.
        All hold the same `probe`, which is judged before the first update.
        """
        try:
            with self._profiled(train_step):
                if self.config.loss_cfg.rollout_is.enabled:
                    need_logprobs(pack for packs in slices for pack in packs)
                on_device = [[self._to_device(pack) for pack in packs] for packs in slices]
                self.judged = {}
                if probe is not None:
                    self._take_along(probe, on_device[0])
                # By train steps, which keep their place when updates a step are changed, or a step has fewer.
                self.engine.optimizer_step = (train_step - 1 - self.schedule_from) * self.config.optimizer_steps
                result = self._fit(on_device)
                result.metrics |= self.judged
                return result
        except torch.OutOfMemoryError as error:
            cfg = self.config
            raise RuntimeError(
                f"train step {train_step} does not fit into the device's memory. Lower train_worker_cfg."
                f"pack_max_length={cfg.pack_max_length}, raise fsdp_cfg.recompute_ratio="
                f"{cfg.fsdp_cfg.recompute_ratio:g}, or, if the engine stayed on the device, set "
                f"keep_on_device=False. ({error})"
            ) from error

    def _take_along(self, probe: Probe, packs: list[PackedBatch]) -> None:
        """Let the probe ride in the shortest of these packs, of the first update: a forward of its own would take as
        long as a pack's. It has one where adapters add noise."""
        lora = self.config.lora_cfg
        if lora is not None and lora.dropout:
            with as_written(self.config.fsdp_cfg.torch_compile):
                self.arrived = probe, self.engine.logprobs(probe.pack.to(self.device))
            return
        self.riding = min(packs, key=lambda pack: pack.input_ids.numel()), probe

    def _judge(self) -> None:
        """The probe that has arrived. Waits for the device. Raises StaleWeightsError."""
        if self.arrived is None:
            return
        (probe, logprobs), self.arrived = self.arrived, None
        by_place: dict[int, list[float]] = {}
        _by_rollout(probe.pack, logprobs.cpu(), by_place)
        self.judged = probe.judge(by_place)

    def _forward(self, pack: PackedBatch) -> Tensor:
        """Log-probs of the pack's trained tokens, float32 [N]. A probe that rides along arrives."""
        if self.riding is None or self.riding[0] is not pack:
            return self.engine.forward(pack)[0]
        probe, self.riding = self.riding[1], None
        rider = probe.pack.to(self.device)
        together = with_rider(pack, rider, 1 if self.device.type == "cpu" else 64)
        logprobs, of_probe = self.engine.forward(together)[0].split([pack.num_targets, rider.num_targets])
        self.arrived = probe, of_probe.detach()
        return logprobs

    def _to_device(self, pack: PackedBatch) -> PackedBatch:
        if self.config.offload_rollout_routed_experts:  # each forward fetches them
            return replace(replace(pack, routed_experts=None).to(self.device), routed_experts=pack.routed_experts)
        return pack.to(self.device)

    def _fit(self, slices: list[list[PackedBatch]]) -> FitResult:
        start = time.perf_counter()
        loss_cfg = self.config.loss_cfg
        packs = [pack for part in slices for pack in part]
        self.largest_pack = max([self.largest_pack, *(pack.input_ids.numel() for pack in packs)])
        old: dict[int, Tensor] = {}
        if len(slices) > 1 or loss_cfg.rollout_is.enabled:
            with torch.no_grad():
                old = {id(pack): self._forward(pack) for pack in packs}
        references = self._reference_logprobs(packs)
        result = FitResult([], {}, {})
        seen: dict[int, Tensor] = dict(old)
        for part in slices:
            metrics = self._update(part, old, references, seen, result)
            result.optimizer_steps.append(metrics)
        result.metrics |= self._mismatch(packs, seen)
        if self.equal_logprobs:
            refuse_gap(packs, [seen[id(pack)] for pack in packs])
        if self.engine.mesh.pack_rank == 0:
            for pack in packs:
                _by_rollout(pack, seen[id(pack)], result.train_logprobs)
        synchronize(self.device)
        result.metrics["training_s"] = time.perf_counter() - start
        self._count_programs(result)
        result.metrics["skipped_updates"] = float(self.total_skips)
        result.metrics |= {f"offload/{way}_gb_per_s": rate for way, rate in self.engine.parking.rates().items()}
        return result

    def _count_programs(self, result: FitResult) -> None:
        """Compilation belongs to the first step; later ones cost minutes that nobody would see."""
        programs = compiled_programs()
        if programs:
            result.metrics["compiled_programs"] = float(programs)
        if self.programs is not None and programs > self.programs:
            result.warnings.append(
                f"torch.compile made {programs - self.programs} programs after the first step: a shape or a flag is "
                "new. TORCH_LOGS=recompiles tells which."
            )
        self.programs = programs

    def _update(
        self,
        packs: list[PackedBatch],
        old: dict[int, Tensor],
        references: dict[int, Tensor],
        seen: dict[int, Tensor],
        result: FitResult,
    ) -> dict[str, float]:
        """Forward and backward of every pack, one optimizer step. Fills `seen` with log-probs before it."""
        loss_cfg = self.config.loss_cfg
        corrections = [self._rollout_correction(pack, old) for pack in packs]
        weighting = [_loss_weights(loss_cfg, pack, keep) for pack, (_, keep, _) in zip(packs, corrections, strict=True)]
        divisor = torch.stack([part for _, part in weighting]).sum()
        self._all_reduce(divisor, "sum")
        divisor = divisor.clamp_min(torch.finfo(torch.float32).tiny)
        routers = self.engine.router_loss(packs)
        rows: list[Metrics] = []
        tokens = 0.0
        trained = [pack for pack in packs if pack.needs_gradient]
        for pack, (is_weights, keep, is_metrics), (numerators, _) in zip(packs, corrections, weighting, strict=True):
            with torch.set_grad_enabled(pack.needs_gradient):
                logprobs = self._forward(pack)
            before = seen.setdefault(id(pack), logprobs.detach())
            loss, metrics = loss_cfg.policy_loss(
                logprobs, old.get(id(pack), before), pack.advantages, (numerators / divisor).float(),
                ref_logprobs=references.get(id(pack)), is_weights=is_weights,
            )  # fmt: skip
            router_loss = routers.add(self.engine.model.router_stats) if routers is not None else 0.0
            if pack.needs_gradient:
                self.engine.backward(loss + router_loss, last=pack is trained[-1])
            kept = torch.ones_like(pack.labels) if keep is None else keep
            totals = {"loss": sum_of(loss), "trained_tokens": sum_of(kept)}
            rows.append(metrics | is_metrics | totals)
            tokens += (pack.input_ids.numel() - pack.num_padding) / self.config.ranks_per_pack
        self._judge()
        step = self.engine.step()
        if step.skipped:
            self.consecutive_skips += 1
            self.total_skips += 1
            result.warnings.append(f"optimizer step {self.engine.optimizer_step} skipped: {step.skipped}")
            if self.consecutive_skips >= self.config.max_consecutive_skips:
                raise RuntimeError(
                    f"{self.consecutive_skips} updates in a row were skipped (last: {step.skipped}). "
                    "Lower the learning rate, or look at the rewards and log-probs of the last trajectories."
                )
        else:
            self.consecutive_skips = 0
        of_routers = routers.metrics() if routers is not None else {}
        return self._reduced(rows) | {
            **of_routers,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            "skipped": float(step.skipped is not None),
            "step_consumed_tokens": tokens,
            **memory_gib(self.device),
        }

    def _rollout_correction(
        self, pack: PackedBatch, old: dict[int, Tensor]
    ) -> tuple[Tensor | None, Tensor | None, Metrics]:
        """Importance weights, the tokens to keep, and their metrics; nothing where no correction is configured."""
        config = self.config.loss_cfg.rollout_is
        if not config.enabled:
            return None, None, {}
        assert pack.rollout_logprobs is not None
        return rollout_is_weights(
            old[id(pack)], pack.rollout_logprobs, pack.sample_index, len(pack.rollout_ids), config
        )

    def _reduced(self, rows: list[Metrics]) -> dict[str, float]:
        """Metrics of all packs of all ranks."""
        return finalize_metrics(reduce_metrics(merge_metrics(rows), self._all_reduce))

    def _all_reduce(self, values: Tensor, kind: Literal["sum", "max"]) -> Tensor:
        """`values` over all data ranks, in place. One rank alone would wait for gloo's thread for nothing."""
        group = self.engine.mesh.data_group
        if dist.get_world_size(group) > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX, group=group)
        return values

    def _reference_logprobs(self, packs: list[PackedBatch]) -> dict[int, Tensor]:
        if not self.config.loss_cfg.use_kl_loss:
            return {}
        # The reference's own choice of experts is part of what it is.
        own = not self.config.replay_routing_in_reference
        given = [replace(pack, routed_experts=None) if own else pack for pack in packs]
        if self.reference is None:
            found = [self.engine.base_logprobs(pack) for pack in given]
        else:
            self.reference.onload(optimizer=False)
            found = [self.reference.logprobs(pack) for pack in given]
            self.reference.offload()
        return {id(pack): logprobs for pack, logprobs in zip(packs, found, strict=True)}

    def _mismatch(self, packs: list[PackedBatch], seen: dict[int, Tensor]) -> dict[str, float]:
        """How far the engine's log-probs are from the trainer's, and sampled-token entropy on both sides."""
        rows: list[Metrics] = []
        for pack in packs:
            train = seen[id(pack)]
            assert pack.rollout_logprobs is not None
            known = slice(None) if pack.has_all_logprobs else ~pack.rollout_logprobs.isnan()
            engine = pack.rollout_logprobs[known]
            gap = mismatch_metrics(train[known], engine, pack.sample_index[known], len(pack.rollout_ids))
            row = {"entropy/train": mean_of(-train), "entropy/rollout": mean_of(-engine)}
            rows.append(row | {f"mismatch/{name}": value for name, value in gap.items()})
        return self._reduced(rows)

    def _profiled(self, train_step: int) -> AbstractContextManager[Any]:
        """A profile of this step if one is wanted."""
        wanted = self.config.profile_step
        steps = [wanted] if isinstance(wanted, int) else (wanted or [])
        if train_step not in steps or not (self.config.profile_time or self.config.profile_memory):
            return nullcontext()
        from torch.profiler import profile

        folder = Path(self.config.log_dir or ".") / "profiling"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"train-step-{train_step}-rank-{self.rank}.json"
        return profile(
            profile_memory=self.config.profile_memory,
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
        )

    # ---------------------------------------------------------------- weights, memory, disk

    async def push_weights(self, target: str, version: int) -> None:
        """Give the rollout worker `target` of this process the current weights."""
        cfg, self.witness = self.config, None
        if cfg.weight_canary.enabled and (engine := peer(target).readable()) is not None:
            layers, every = cfg.model_cfg.num_hidden_layers, cfg.weight_canary.every
            self.witness = Witness(version, self.pushes, every, layers, engine.dtype, engine.sums_by)
        self.pushes += 1
        size, checksum = cfg.bucket_bytes(), cfg.update_weight_checksum
        await push_in_process(self.engine, target, version, size, checksum, self.witness)

    async def verify_weights(self, target: str) -> float | None:
        """Whether the rollout worker `target` has the weights that it was given last: the share of them that was
        compared. None if nothing could be, as by an engine that is dead or does not answer.

        Raises:
            StaleWeightsError: it does not.
        """
        try:
            if self.witness is None or not await peer(target).health():
                return None
            return await self.witness.compare(peer(target).readable(), target)
        except (ServerError, EngineDownError) as error:
            get_logger().warning(f"the weights of {target} were not compared: {error}")
            return None

    def has_room_beside(self, target: str) -> bool:
        """Whether the engine of the rollout worker `target` can stay awake while this one trains; asked when training
        has taken the memory that it needs, and the engine's cache is asleep."""
        wanted = peer(target).memory_to_wake()
        if wanted is None or self.device.type != "cuda" or not self.largest_pack:
            return False
        free, total = torch.cuda.mem_get_info(self.device)
        working = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return has_room(free, total, wanted, working, self.config.pack_max_length / self.largest_pack)

    def offload(self) -> None:
        self.engine.offload()

    def onload(self) -> None:
        self.engine.onload()

    def save_checkpoint(self, folder: str, with_optimizer: bool = True) -> None:
        counters = {"consecutive_skips": self.consecutive_skips, "total_skips": self.total_skips}
        save_train_state(self.engine, Path(folder), with_optimizer, counters)

    def load_checkpoint(self, folder: str, with_optimizer: bool = True) -> None:
        counters = load_train_state(self.engine, Path(folder), with_optimizer)
        self.consecutive_skips, self.total_skips = counters["consecutive_skips"], counters["total_skips"]

    def save_hf(self, folder: str, dtype: str) -> None:
        from xtuner.v1.config import parse_dtype

        self.engine.save_hf(Path(folder), self.config.load_from, parse_dtype(dtype))

    def stop(self) -> None:
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self.owns_group = False


def _loss_weights(loss_cfg: BaseRLLossConfig, pack: PackedBatch, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numerators [N] and divisor of a pack; dropped tokens weigh 0 and leave the divisor."""
    if keep is None:
        return loss_cfg.loss_weights(pack.sample_index, len(pack.rollout_ids))
    kept, divisor = loss_cfg.loss_weights(pack.sample_index[keep], len(pack.rollout_ids))
    numerators = torch.zeros_like(pack.advantages)
    numerators[keep] = kept
    return numerators, divisor


def _by_rollout(pack: PackedBatch, logprobs: Tensor, out: dict[int, list[float]]) -> None:
    counts = torch.bincount(pack.sample_index, minlength=len(pack.rollout_ids)).tolist()
    values = iter(logprobs.tolist())
    for rollout_id, count in zip(pack.rollout_ids, counts, strict=True):
        out[rollout_id] = list(islice(values, count))
