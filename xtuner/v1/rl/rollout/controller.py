"""Sends samples to engines and brings back answers that can be trained on."""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.utils import Handle, WorkerLostError
from xtuner.v1.rl.weight_update import EngineDownError
from xtuner.v1.utils import first_line, get_logger

from .answers import abort, fail, fill, fit_to_context, output_problem, sample_seed
from .backends.base import GenerateOutput, GenerateRequest, MemoryTag
from .backends.options import server_start_limit
from .config import RolloutConfig
from .replicas import Replica, ReplicaPool

_ALL: tuple[MemoryTag, ...] = ("weights", "kv_cache")
_START_S = 1800.0
"""Also for what may have to wait until an engine that died is started again."""
_ABORT_S = 60.0
_STOP_S = 30.0
_MAX_WARNINGS = 20
T = TypeVar("T")


class RolloutController:
    """Lives with its user and holds the workers' handles. Copies of it (pickled) serve remote agent loops.

    `config` must be resolved (`RolloutConfig.resolve`): context length and batch size are set.
    """

    def __init__(
        self, config: RolloutConfig, handles: list[Handle], worker_names: list[str], tokenizer: Any, seed: int
    ):
        assert config.context_length is not None
        self.config, self.worker_names, self.tokenizer, self.seed = config, worker_names, tokenizer, seed
        self.context_length: int = config.context_length
        self._pool = ReplicaPool(
            worker_names,
            handles,
            config.tensor_parallel_size,
            request_timeout=config.rollout_timeout,
            check_timeout=config.health_check_timeout_seconds,
            interval=config.health_check_interval_seconds,
            threshold=config.health_check_failure_threshold,
        )
        native = config.backend is None or config.backend == "native"
        self._start_s = _START_S if native else max(_START_S, 2 * server_start_limit(config, str(config.backend)))
        self._paused = self._closed = False
        self._ids = itertools.count()
        self._events: Counter[str] = Counter()
        self._warnings = 0

    def __getstate__(self) -> dict[str, Any]:
        # Request ids of a copy must not meet those of the original inside an engine.
        ids = itertools.count(secrets.randbits(30) << 32)
        return self.__dict__ | {"_ids": ids, "_events": Counter(), "_warnings": 0}

    async def generate(self, state: RolloutState) -> RolloutState:
        """Fill response, ids, log-probs, weight versions, finish reason and status of `state` and return it.

        FAILED with `error_msg` when the engine refuses the request or all attempts go wrong. ABORTED with what
        was generated so far when generation is paused; a later call starts from the prompt again.

        Raises:
            NoWorkerLeftError: none that could serve.
        """
        try:
            request = self._request(state)
        except ValueError as error:
            return fail(state, str(error))
        replica: Replica | None = None
        problem = ""
        for attempt in range(self.config.max_retry_per_sample + 1):
            if self._closed:
                return fail(state, "the rollout workers are shut down")
            if self._paused:
                return abort(state)
            replica = await self._pool.find(state.session_id, avoid=replica)
            if attempt:
                self._events["retries"] += 1
                request = replace(request, request_id=next(self._ids))  # the engine may not be done with the last one
            output, problem = await self._attempt(replica, request)
            if output is not None and output.finish_reason == "error":
                self._events["refused"] += 1
                return fail(state, problem)
            if output is not None:
                state.rollout_worker = replica.name
                return fill(state, output, self.tokenizer)
            self._warn(
                f"rollout {state.rollout_id}: {first_line(problem)} (worker {replica.name}, attempt {attempt + 1} of "
                f"{self.config.max_retry_per_sample + 1})"
            )
        self._events["failures"] += 1
        return fail(state, f"{problem} ({self.config.max_retry_per_sample + 1} attempts)")

    def _request(self, state: RolloutState) -> GenerateRequest:
        ids = state.tokens if state.tokens is not None else state.prompt_ids
        if not ids:
            raise ValueError(f"rollout {state.rollout_id} has no prompt tokens (tokens and prompt_ids are empty)")
        if state.tokens is None:
            state.tokens = ids
        params = fit_to_context(state.sample_params, len(ids), self.context_length)
        if params is not state.sample_params:
            self._events["cut_to_context"] += 1
        number = next(self._ids)
        seed = params.sampling_seed
        if seed is None:
            seed = sample_seed(self.seed, state.rollout_id if state.rollout_id is not None else number, len(ids))
        return GenerateRequest(number, list(ids), params, seed)

    async def _attempt(self, replica: Replica, request: GenerateRequest) -> tuple[GenerateOutput | None, str]:
        """A usable answer or refusal, or None and what went wrong; such a thing may pass."""
        events = dict(self._events)
        self._events.clear()
        try:
            output = await self._pool.call(replica, "generate", request, events)
        except TimeoutError:
            self._events["timeouts"] += 1
            problem = f"no answer within rollout_timeout={self.config.rollout_timeout:g} s"
            await self._pool.probe(replica, problem)
            return None, problem
        except WorkerLostError as error:
            if replica.lost:  # else it has counted them
                self._events.update(events)
            return None, str(error)
        except Exception as error:
            self._events["errors"] += 1
            problem = f"{type(error).__name__}: {error}"
            await self._pool.probe(replica, problem)
            return None, problem
        if output.finish_reason == "error":
            # A refusal stands, whoever is asked; an engine that broke is another matter.
            problem = output.error or "the engine refused the request without a reason"
            if await self._pool.probe(replica, problem):
                return output, problem
            self._events["errors"] += 1
            return None, problem
        flaw = output_problem(output, request.params)
        if flaw is None:
            return output, ""
        self._events["invalid"] += 1
        return None, f"invalid answer: {flaw}"

    def _warn(self, message: str) -> None:
        self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            last = self._warnings == _MAX_WARNINGS
            get_logger().warning(message + (" Further ones are only counted." if last else ""))

    # ---------------------------------------------------------------- life of the engines

    async def start(self, log_dir: Path | None = None) -> None:
        """Load the engines, all at once. `log_dir`: for the logs of servers."""
        await self._broadcast("start", self._start_s, log_dir)

    async def pause(self) -> None:
        """End all requests in flight as ABORTED, those of copies of this controller too, until `resume`."""
        self._paused = True
        await self._broadcast("pause", _ABORT_S)

    async def resume(self) -> None:
        await self._broadcast("resume", _ABORT_S)
        self._paused = False

    async def sleep(self, tags: tuple[MemoryTag, ...] = _ALL) -> None:
        """Give the device memory back."""
        await self._broadcast("sleep", self._start_s, tags)

    async def wake(self, tags: tuple[MemoryTag, ...] = _ALL) -> None:
        """Take the device memory again; weights come back empty."""
        await self._broadcast("wake", self._start_s, tags)

    async def revive(self) -> None:
        """Bring back engines that died asleep, while nobody else uses the devices; they are asleep after that."""
        await self._broadcast("revive", self._start_s)

    async def ask_engines(self, request: GenerateRequest) -> dict[str, GenerateOutput]:
        """What each engine in service answers to the same request, by the name of its (first) worker; also while
        generation is paused. One that fails gives an output with `error`."""
        replicas = self._pool.in_service()
        calls = (asyncio.wait_for(r.handle.call("ask", request), self.config.rollout_timeout) for r in replicas)
        answers: dict[str, GenerateOutput] = {}
        for replica, result in zip(replicas, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, BaseException):
                result = GenerateOutput(request.request_id, error=f"{type(result).__name__}: {result}")
            answers[replica.name] = result
        return answers

    async def ask_beside(self, request: GenerateRequest) -> None:
        """Let each engine in service answer this together with its next request; `ask_engines` brings the answers."""
        replicas = self._pool.in_service()
        calls = (asyncio.wait_for(r.handle.call("ask_beside", request), _ABORT_S) for r in replicas)
        await asyncio.gather(*calls, return_exceptions=True)  # who is not there now is asked then

    async def weight_versions(self) -> list[int]:
        """Of every worker that is not lost: version of the weights it serves, -1 for none."""
        return await self._broadcast("weight_version", _ABORT_S)

    async def health(self) -> list[bool]:
        """Ask every worker. One that answers well is in service again; a lost one stays out."""
        return list(await asyncio.gather(*(self._pool.probe(r) for r in self._pool.replicas)))

    async def metrics(self) -> dict[str, int]:
        """Totals since the start: requests, retries, timeouts, errors, invalid, refused, failures, cut_to_context; and
        those of `CountsWork`, for engines that count.

        Those of copies in other processes are included up to their last request.
        """
        keys = ("requests", "retries", "timeouts", "errors", "invalid", "refused", "failures", "cut_to_context")
        total = Counter(self._events)
        for counts in await self._broadcast("counts", _ABORT_S):
            total.update(counts)
        engine_keys = ("prefill_tokens", "prefix_hit_tokens", "preemptions")
        return {key: total[key] for key in keys} | {key: total[key] for key in engine_keys if key in total}

    async def shutdown(self) -> None:
        """Stop the engines. What cannot be stopped is logged: its process is ended by the launcher."""
        self._closed = True
        self._pool.stop_watch()
        alive = [r for r in self._pool.replicas if not r.lost]
        stops = (asyncio.wait_for(r.handle.call("stop"), _STOP_S) for r in alive)
        for replica, result in zip(alive, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                get_logger().warning(f"{replica.name} did not stop: {type(result).__name__} {result}")

    async def _broadcast(self, method: str, timeout: float, *args: Any) -> list[Any]:
        """Results of all workers that are not lost. One found lost, or its engine down, is left out while others
        remain."""
        alive = [r for r in self._pool.replicas if not r.lost]
        calls = (_within(timeout, f"{r.name}: {method}", r.handle.call(method, *args)) for r in alive)
        results = []
        for replica, result in zip(alive, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, WorkerLostError):
                self._pool.give_up(replica, str(result), lost=True)
            elif isinstance(result, EngineDownError):
                self._pool.give_up(replica, str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                results.append(result)
        if not results:
            raise RuntimeError(f"{method}: all rollout workers are lost; last error: {self._pool.last_error}")
        return results


async def _within(seconds: float, what: str, call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"{what} took longer than {seconds:g} s") from error
        raise
