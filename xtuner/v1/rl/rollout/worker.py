"""One rollout engine, in the process of its rank."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.rl.weight_update import ReadsWeights
from xtuner.v1.utils import get_logger

from .backends.base import (
    ComesBack,
    CountsWork,
    GenerateOutput,
    GenerateRequest,
    MemoryTag,
    RolloutEngine,
    StaysAwake,
    TakesParameters,
)
from .config import RolloutConfig

__all__ = ["RolloutConfig", "RolloutWorker"]

_ALL: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class RolloutWorker:
    """Wraps one engine: the engine's protocol, a pause switch and counters.

    Constructed cheaply; `start` touches the device. The switch and the counters are here and not in the
    controller because controllers are copied into other processes, and all of them must see the same.
    """

    frequent_calls = frozenset({"generate"})

    def __init__(
        self, config: RolloutConfig, rank: int, device: str, num_ranks: int = 1, address: tuple[str, int] | None = None
    ):
        """address: where all `num_ranks` ranks meet if engines have several and no process group is there yet."""
        self.config, self.rank, self.device = config, rank, device
        self._num_ranks, self._address, self._owns_group = num_ranks, address, False
        self._log_dir = Path(tempfile.gettempdir())
        self._engine: RolloutEngine | None = None
        self._paused = False
        self._version = -1
        self._counts: Counter[str] = Counter()
        self._question: GenerateRequest | None = None
        """To be asked together with the next request."""
        self._answer: tuple[asyncio.Task[GenerateOutput], int] | None = None
        """The answer to it, and the number of the engine's server that was asked."""

    def build_engine(self) -> RolloutEngine:
        """The engine that the configuration names."""
        config = self.config
        log_dir = config.worker_log_dir or self._log_dir
        if config.backend == "sglang":
            from .backends.sglang import SGLangEngine

            return SGLangEngine(config, self.rank, self.device, log_dir)
        if config.backend == "vllm":
            from .backends.vllm import VLLMEngine

            return VLLMEngine(config, self.rank, self.device, log_dir)
        if config.backend == "lmdeploy":
            from .backends.lmdeploy import LMDeployEngine

            return LMDeployEngine(config, self.rank, self.device, log_dir)
        from .backends.native import NativeEngine, TensorParallelEngine

        assert config.context_length is not None and config.rollout_max_batch_size_per_instance is not None
        dtype = config.cpu_dtype if self.device == "cpu" else config.dtype
        if self.rank == 0:
            get_logger().info(
                f"rollout engine native: {config.model_path} on {self.device} in {dtype}, context "
                f"{config.context_length}, up to {config.rollout_max_batch_size_per_instance} sequences at once."
            )
        size = config.tensor_parallel_size
        engine = NativeEngine if size == 1 else partial(TensorParallelEngine, num_ranks=size)
        return engine(
            config.model_path,
            device=self.device,
            dtype=dtype,
            max_batch_size=config.rollout_max_batch_size_per_instance,
            context_length=config.context_length,
            gpu_memory_utilization=config.gpu_memory_utilization,
            cpu_cache_bytes=config.cpu_cache_bytes,
            load_weights=not config.skip_load_weights,
            max_prefill_rows=config.max_prefill_token_num or 8192,
            return_routed_experts=config.enable_return_routed_experts,
            deterministic=config.deterministic,
        )

    @property
    def engine(self) -> RolloutEngine:
        if self._engine is None:
            raise RuntimeError(f"rollout worker {self.rank}: the engine is not started")
        return self._engine

    async def start(self, log_dir: Path | None = None) -> None:
        """`log_dir`: for the log of a server, unless the configuration names another folder."""
        self._log_dir = log_dir or self._log_dir
        if self._address is not None and not dist.is_initialized():
            host, port = self._address
            backend = "gloo" if self.device == "cpu" else "nccl"
            dist.init_process_group(
                backend, init_method=f"tcp://{host}:{port}", rank=self.rank, world_size=self._num_ranks
            )
            self._owns_group = True
        self._engine = self.build_engine()
        await self._engine.start()
        self._version = -1 if self.config.skip_load_weights else 0

    async def generate(self, request: GenerateRequest, counts: Mapping[str, int] | None = None) -> GenerateOutput:
        """Serve a request; at once `abort` while paused. `counts` are events that a controller has to report."""
        self._counts["requests"] += 1
        if counts:
            self._counts.update(counts)
        if self._paused:
            return GenerateOutput(request.request_id, finish_reason="abort")
        if self._question is not None:
            answer = asyncio.ensure_future(self.engine.generate(self._question))
            self._answer, self._question = (answer, self._server()), None
        return await self.engine.generate(request)

    async def ask(self, request: GenerateRequest) -> GenerateOutput:
        """Serve a request of the run itself: it is not counted, and a pause does not concern it. If `ask_beside` gave
        it before, this is the answer, unless it went wrong or was cut off, or the engine's server was started again
        since: nobody has asked about that one's weights."""
        beside, self._answer, self._question = self._answer, None, None
        if beside is not None:
            answer, server = beside
            with suppress(Exception):  # that of a new try counts
                output = await answer
                if output.token_ids and output.finish_reason != "abort" and server == self._server():
                    return output
        return await self.engine.generate(request)

    async def ask_beside(self, request: GenerateRequest) -> None:
        """Serve this together with the next request that comes: a prompt alone takes as long as a batch of them."""
        await self._forget_question()
        self._question = request

    async def _forget_question(self) -> None:
        beside, self._answer, self._question = self._answer, None, None
        if beside is not None:
            beside[0].cancel()
            await asyncio.gather(beside[0], return_exceptions=True)

    def _server(self) -> int:
        """Number of the server behind the engine; 0 if it has none."""
        return self.engine.starts if isinstance(self.engine, ComesBack) else 0

    async def abort(self) -> None:
        await self.engine.abort()

    async def pause(self) -> None:
        """End all requests in flight with what they have, and every further one until `resume`."""
        self._paused = True
        await self.engine.abort()

    async def resume(self) -> None:
        self._paused = False

    async def sleep(self, tags: tuple[MemoryTag, ...] = _ALL) -> None:
        await self._forget_question()
        await self.engine.sleep(tags)
        if "weights" in tags:
            self._version = -1

    async def wake(self, tags: tuple[MemoryTag, ...] = _ALL) -> None:
        await self.engine.wake(tags)

    async def revive(self) -> None:
        """Bring back an engine that died asleep, while nobody else uses the device; it is asleep after that."""
        if isinstance(self.engine, ComesBack):
            await self.engine.revive()

    async def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._version = -1
        await self._forget_question()
        await self.engine.update_weights(buckets, version)
        self._version = version

    def memory_to_wake(self) -> int | None:
        """Bytes of device memory that waking the engine's cache takes; None if the engine has to sleep while others use
        the device."""
        return self.engine.memory_to_wake() if isinstance(self.engine, StaysAwake) else None

    @property
    def takes_parameters(self) -> bool:
        """Whether updates may come by parameter, see `WeightBucket`."""
        return isinstance(self._engine, TakesParameters) and self._engine.takes_parameters

    def readable(self) -> ReadsWeights | None:
        """The engine, if it can read back what it computes with."""
        return self.engine if isinstance(self.engine, ReadsWeights) else None

    async def weight_version(self) -> int:
        """Of the weights it serves: 0 initial, else that of the last update; -1 for none."""
        return self._version

    async def reset_prefix_cache(self) -> None:
        await self.engine.reset_prefix_cache()

    async def health(self) -> bool:
        return self._engine is not None and await self._engine.health()

    async def counts(self) -> dict[str, int]:
        return dict(self._counts) | (self._engine.statistics() if isinstance(self._engine, CountsWork) else {})

    async def stop(self) -> None:
        await self._forget_question()
        if self._engine is not None:
            await self._engine.stop()
            self._engine = None
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
