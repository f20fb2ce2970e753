"""Our own rollout engine: lives in the process that uses it, on any device that torch has."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xtuner.v1.data_proto import FinishReason, WeightBucket
from xtuner.v1.model.config import TransformerConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.exact import check_exact_device, exact_problems, make_exact
from xtuner.v1.model.hf import load_hf_model
from xtuner.v1.model.hf_config import get_model_config_from_hf
from xtuner.v1.ops.cpu import cpu_kernels_available
from xtuner.v1.utils import get_logger

from ..base import GenerateOutput, GenerateRequest, LogprobStage, MemoryTag
from ..sampling_checks import is_greedy
from .gpu_room import GPURoom, step_bytes
from .paged_cache import PAGE, PagedCache
from .paged_runner import MAX_STEPS, PagedRunner
from .requests import RequestLimits, RequestRefused, make_sequence, read_eos_ids
from .runner import Runner
from .scheduler import Done, Scheduler, Sequence
from .stable_weights import StableWeights
from .weights import PlainWeights, ReadableWeights, WeightReceiver, lay_out_by_input

_CPU_OPERATIONS, _LEAST_ROWS = 1e11, 256
"""Multiplications and additions of one step with prompts on a CPU, about a second of a core, so that nobody waits long
for it; and the least rows all the same."""


class NativeEngine(ReadableWeights):
    """One replica. Everything happens on the caller's event loop; a step is not interrupted.

    Requests that arrive before the loop has come round form one batch. The cache grows as responses do; when
    it reaches its budget, the youngest sequence waits and goes on later, with the same random numbers.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_batch_size: int = 256,
        context_length: int | None = None,
        gpu_memory_utilization: float = 0.8,
        cpu_cache_bytes: int = 2 * 2**30,
        load_weights: bool = True,
        max_prefill_rows: int = 8192,
        cpu_kernels: bool = True,
        deterministic: bool = False,
        return_routed_experts: bool = False,
    ) -> None:
        """Nothing is read or allocated before `start`.

        dtype None: bfloat16 on CUDA, float32 elsewhere. context_length None: the model's. The cache takes
        what `gpu_memory_utilization` of the card's memory leaves, on other devices at most `cpu_cache_bytes`.
        load_weights False: the weights come by `update_weights`. max_prefill_rows: prompt tokens a step, fewer on
        a CPU if they take long.
        cpu_kernels False: torch's operations also where kernels of our own are faster. deterministic: exact mode, see
        docs/exact.md. return_routed_experts: keep the experts of every token, for requests that want them.
        """
        if max_batch_size < 1 or max_prefill_rows < 1:
            raise ValueError(
                f"max_batch_size={max_batch_size} and max_prefill_rows={max_prefill_rows} must be at least 1."
            )
        self.model_path, self.device = Path(model_path), torch.device(device)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.version = 0
        self.num_ranks = 1
        """Ranks that have a part of every layer and of the cache each."""
        self._max_batch_size, self._context_length = max_batch_size, context_length
        self._gpu_memory_utilization, self._cpu_cache_bytes = gpu_memory_utilization, cpu_cache_bytes
        self._load_weights, self._max_prefill_rows = load_weights, max_prefill_rows
        self._cpu_kernels, self._deterministic = cpu_kernels, deterministic
        self._return_routed_experts = return_routed_experts
        self._preemptions = 0
        self._scheduler = Scheduler(max_batch_size)
        self._futures: dict[Sequence, asyncio.Future[GenerateOutput]] = {}
        self._drawings: deque[_Drawing] = deque()
        """What the device was told to draw and was not taken in yet, the oldest first; two at most."""
        self._driver: asyncio.Task[None] | None = None
        self._tokenizer: Any = None
        self._obstacle: dict[str, str] = {"start": "the engine was not started."}
        """Why it cannot serve, by what must happen first."""

    # ---- life ----

    async def start(self) -> None:
        self._refuse_in_flight("start")
        self.version = 0
        config = get_model_config_from_hf(self.model_path)
        context = self._context_length or config.max_position_embeddings
        if context > config.max_position_embeddings:
            raise ValueError(
                f"context_length={context} exceeds the model's max_position_embeddings="
                f"{config.max_position_embeddings} ({self.model_path}/config.json)."
            )
        eos_ids = read_eos_ids(self.model_path, config.vocab_size)
        if self._return_routed_experts and config.routing_shape is None:
            raise ValueError(
                f"return_routed_experts=True: {self.model_path} holds a model_type={config.model_type!r}, which has no "
                "experts; leave it out."
            )
        on_cuda = self.device.type == "cuda"
        self._model = self._build_model(config).requires_grad_(False).eval()
        if self._deterministic:
            self._make_exact()
        self._runner = self._build_runner(context)
        self._cache = self._runner.cache
        self._weights = StableWeights(self._model, self.device) if on_cuda else PlainWeights(self._model)
        self._receiver = WeightReceiver(self._model)
        self._obstacle = {}
        if self._load_weights:
            load_hf_model(self._model, self.model_path)
            self._runner.weights_changed()
        else:
            self._obstacle["update"] = "it has no weights yet: update_weights must come first."
        self._prefill_rows = self._max_prefill_rows
        if self.device.type == "cpu":
            parameters = sum(p.numel() for p in self._model.parameters())
            self._prefill_rows = min(self._prefill_rows, max(_LEAST_ROWS, int(_CPU_OPERATIONS / 2 / parameters)))
        self._limits = RequestLimits(config.vocab_size, context, eos_ids, self._decode_text)
        work = step_bytes(config, self.dtype, self._max_batch_size, self._max_prefill_rows)
        self._gpu_room = GPURoom(self.device, self._gpu_memory_utilization, work)
        self._set_cache_budget()

    def _build_model(self, config: TransformerConfig) -> DecoderModel:
        """Without content; on CUDA without memory too."""
        model = config.build("meta", self.dtype)  # initial values would be drawn from the generator of who trains here
        return model if self.device.type == "cuda" else model.to_empty(device=self.device)

    def _make_exact(self) -> None:
        if problems := exact_problems(self._model.config, self.device.type, self.dtype):
            raise ValueError(f"deterministic=True: {'; '.join(problems)}; set deterministic=False.")
        check_exact_device(self.device)
        make_exact(self._model)

    def _build_runner(self, context: int) -> Runner:
        model, config, slots = self._model, self._model.config, self._max_batch_size
        one_cpu = self.device.type == "cpu" and self.num_ranks == 1
        if one_cpu and self._cpu_kernels and cpu_kernels_available():
            from .kernel_runner import KernelRunner, kernels_know

            if kernels_know(model):
                runner = KernelRunner(model, slots, context)
                runner.compile()
                return runner
        if one_cpu and self.dtype == torch.float32 and not model.exact:
            lay_out_by_input(model)
        heads, key_dim, value_dim = config.attention.cache_shape
        sizes = (config.num_hidden_layers, heads // self.num_ranks, key_dim, value_dim, self.dtype, self.device)
        experts = config.routing_shape[:2] if self._return_routed_experts and config.routing_shape else None
        return PagedRunner(model, PagedCache(*sizes, slots, context, 2 * MAX_STEPS, experts))

    async def stop(self) -> None:
        if "start" in self._obstacle:  # not started, or stopped already
            return
        await self.abort()
        self._cache.free()
        self._drop_weights()
        self._receiver.forget()
        self._obstacle = {"start": "the engine was stopped."}
        del self._runner  # with its graphs and their memory: now, not when garbage is collected

    def statistics(self) -> dict[str, int]:
        """See `CountsWork`."""
        if "start" in self._obstacle:
            return {}
        return {
            "prefill_tokens": self._runner.prefilled_rows,
            "prefix_hit_tokens": self._cache.hits,
            "preemptions": self._preemptions,
        }

    async def health(self) -> bool:
        """False before `start`, after `stop` and after a failed step. An engine asleep is healthy."""
        return not self._obstacle.keys() & {"start", "failure"}

    async def sleep(self, tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")) -> None:
        self._refuse_in_flight("sleep")
        if "start" in self._obstacle:
            raise RuntimeError(f"sleep: {self._obstacle['start']}")
        if "kv_cache" in tags:
            self._cache.free()
            self._obstacle["kv_cache"] = "its cache is asleep: wake it first."
        if "weights" in tags:
            self._drop_weights()
            self._obstacle["weights"] = "its weights are asleep: wake it and push weights first."
            self._obstacle["update"] = "its weights were dropped by sleep: update_weights must come first."
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, tags: tuple[MemoryTag, ...] = ("weights", "kv_cache")) -> None:
        woke = [tag for tag in tags if tag in self._obstacle]
        if "weights" in woke:
            self._weights.restore()
        self._obstacle = {what: why for what, why in self._obstacle.items() if what not in woke}
        if woke and not self._obstacle.keys() & {"start", "kv_cache"}:
            self._set_cache_budget()  # of the weights too, if they woke behind the cache

    async def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._refuse_in_flight("update_weights")
        if why := self._obstacle.get("start") or self._obstacle.get("weights"):
            raise RuntimeError(f"update_weights: {why}")
        self._obstacle["update"] = "the last update of its weights is not complete: push them again."
        self._cache.forget()
        self._receiver.take(buckets)
        self._runner.weights_changed()
        del self._obstacle["update"]
        self.version = version

    async def reset_prefix_cache(self) -> None:
        """Prompts from now on find nothing of those before, but for what answers under way leave behind."""
        if "start" not in self._obstacle:
            self._cache.forget()

    # ---- requests ----

    async def generate(self, request: GenerateRequest) -> GenerateOutput:
        if self._obstacle:
            return self._refusal(request, f"the engine cannot serve: {' '.join(self._obstacle.values())}")
        try:
            sequence = make_sequence(request, self._limits)
        except RequestRefused as error:
            return self._refusal(request, str(error))
        self._ensure_driver()
        future = asyncio.get_running_loop().create_future()
        self._enter(sequence, future)
        try:
            return await future
        except asyncio.CancelledError:
            self._forget(sequence)
            raise

    async def abort(self) -> None:
        self._end_all("abort")

    def _enter(self, sequence: Sequence, future: asyncio.Future[GenerateOutput]) -> None:
        self._futures[sequence] = future
        self._scheduler.add(sequence)

    def _ensure_driver(self) -> None:
        loop = asyncio.get_running_loop()
        if self._driver is not None and not self._driver.done() and self._driver.get_loop() is not loop:
            if self._driver.get_loop().is_running():
                raise RuntimeError("the engine serves requests of another event loop that is still running.")
            # That loop was left in mid-generation: nobody waits for its requests any more.
            self._end_all("abort")
            self._driver = None
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())

    async def _drive(self) -> None:
        """Step while there is work, letting the callers in between."""
        known = 0
        while known < len(self._futures):
            known = len(self._futures)
            await asyncio.sleep(0)
        while self._scheduler.has_work:
            try:
                self.step()
            except Exception as error:
                self._fail(error)
            await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        """All requests in flight end with a failed step."""
        fault = None if isinstance(error, FloatingPointError) else error  # those are the weights'
        get_logger().error("native engine: a step failed; all requests in flight end with it", exc_info=fault)
        self._drawings.clear()  # they follow on what was not taken in: nobody gets them
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # of the device itself, which is known by now
                torch.cuda.current_stream(self.device).synchronize()
        self._obstacle["failure"] = (
            f"a step with the weights of version {self.version} failed with {type(error).__name__}: {error}"
        )
        self._end_all("error", self._obstacle["failure"])
        self._cache.forget()

    @torch.inference_mode()
    def step(self) -> None:
        """One or more tokens for every running sequence, and up to `max_prefill_rows` tokens of prompts. The device
        draws while prompts are prepared and the callers work. The next step takes in what it drew; where nobody waits
        to come in, it first tells the device to go on."""
        scheduler = self._scheduler
        steps, ahead = self._reserve_ahead()
        if not steps:
            self._take_in()
            steps = self._reserve_for_decode() if scheduler.running else 0
        if steps:
            take_in = self._runner.begin_decode(scheduler, steps, ahead)
            self._drawings.append(_Drawing(steps, scheduler.admitted, take_in))
            self._take_in(leave=1)
        first = len(scheduler.running)
        if prompts := scheduler.admit(self._cache, self._prefill_rows):
            # Who ends with its first token leaves a slot behind those that are drawn for.
            self._end(self._runner.prefill(scheduler, prompts, first))
        if self.num_ranks > 1:  # whose waits have deadlines inside a step only
            self._take_in()

    @torch.inference_mode()
    def _take_in(self, leave: int = 0) -> None:
        """What was drawn, but for the last `leave` times."""
        while len(self._drawings) > leave:
            self._end(self._drawings.popleft().take_in())

    def _settle(self) -> None:
        """Nothing is drawn any more."""
        try:
            self._take_in()
        except Exception as error:
            self._fail(error)

    def _end(self, done: list[Done]) -> None:
        if done:
            for sequence, (_, reason) in zip(self._release([slot for slot, _ in done]), done, strict=True):
                self._finish(sequence, reason)

    def _reserve_ahead(self) -> tuple[int, int]:
        """Room for tokens beyond those that are being drawn: how many each, and how many those are. 0 of them where
        the host must look first: others come in or wait for slots, all are known to end, or there is no room."""
        scheduler = self._scheduler
        if len(self._drawings) != 1 or not scheduler.running or scheduler.waiting or scheduler.filling is not None:
            return 0, 0
        (drawing,) = self._drawings
        rows, ahead = scheduler.rows(), drawing.steps
        if scheduler.admitted != drawing.admitted or (rows["length"] + ahead >= rows["limit"]).all():
            return 0, 0
        if not self._runner.may_run_ahead(scheduler):
            return 0, 0
        steps = self._runner.steps(scheduler, ahead)
        return (steps, ahead) if self._cache.grow(rows["length"] + ahead + steps - 1) else (0, 0)

    def _reserve_for_decode(self) -> int:
        """Room for as many tokens each as the runner would draw at once, or for one, which then is all it may draw;
        what came last goes back to the queue until that fits."""
        scheduler = self._scheduler
        more_prompts = scheduler.filling is not None or scheduler.starved
        steps = 1 if more_prompts else self._runner.steps(scheduler)
        while not self._cache.grow(scheduler.rows()["length"] + steps - 1):
            if steps == 1:
                self._preemptions += 1
                if scheduler.filling is not None:
                    scheduler.put_back(self._cache)
                else:
                    scheduler.waiting.extendleft(self._release([scheduler.youngest()]))
            steps = 1
        return steps

    def _release(self, slots: list[int], readable: bool = True) -> list[Sequence]:
        """Take sequences out of their slots; `readable`: the cache can still be read."""
        if self._return_routed_experts and readable:
            self._keep_experts(slots)
        return self._scheduler.release(slots, self._cache)

    def _keep_experts(self, slots: list[int]) -> None:
        assert isinstance(self._cache, PagedCache)
        running = self._scheduler.running
        # The last token has not been through the model.
        lengths = (self._scheduler.rows()["length"][slots] - 1).tolist()
        for slot, found in zip(slots, self._cache.experts_of(slots, lengths), strict=True):
            # A sequence that came back after it had to make room went through the model again, maybe through others:
            # those that its tokens were drawn with count.
            known = running[slot].routed_experts
            running[slot].routed_experts = found if known is None else np.concatenate((known, found[len(known) :]))

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        future = self._futures.pop(sequence, None)
        if future is None or future.done() or future.get_loop().is_closed():
            return
        request = sequence.request
        output = GenerateOutput(
            request.request_id, sequence.token_ids, sequence.logprobs,
            [self.version] * len(sequence.token_ids), reason, _stage(request), error,
            routed_experts=sequence.routed_experts if request.params.return_routed_experts else None,
            top_logprobs=sequence.top_logprobs if request.params.top_logprobs > 1 else None,
        )  # fmt: skip
        future.set_result(output)

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        self._settle()
        scheduler = self._scheduler
        if scheduler.filling is not None:
            scheduler.put_back(self._cache)
        sequences = self._release(list(range(len(scheduler.running))), readable=reason != "error")
        sequences += scheduler.waiting
        scheduler.waiting.clear()
        for sequence in sequences:
            self._finish(sequence, reason, error)

    def _forget(self, sequence: Sequence) -> None:
        """Its caller is gone."""
        self._futures.pop(sequence, None)
        if not self._scheduler.remove(sequence, self._cache):
            self._settle()
            if sequence in self._scheduler.running:
                self._release([self._scheduler.running.index(sequence)])

    # ---- parts ----

    def _drop_weights(self) -> None:
        self._weights.drop()
        if self.device.type != "cuda":
            self._receiver.forget()  # they come back elsewhere
        self._runner.forget_weights()

    def _refusal(self, request: GenerateRequest, error: str) -> GenerateOutput:
        return GenerateOutput(request.request_id, finish_reason="error", logprob_stage=_stage(request), error=error)

    def _refuse_in_flight(self, what: str) -> None:
        if self._futures:
            raise RuntimeError(f"{what}: {len(self._futures)} requests are in flight; abort them first.")
        self._settle()

    def _set_cache_budget(self) -> None:
        on_cuda = self.device.type == "cuda"
        budget = self._gpu_cache_bytes() if on_cuda else self._cpu_cache_bytes
        self._cache.set_budget(budget)
        wanted, possible = self._cache.max_length, self._cache.longest_sequence
        if possible < min(wanted, PAGE // 2):
            raise ValueError(
                f"the cache budget of {budget} bytes holds {possible} tokens of {self._cache.row_bytes} bytes: "
                "raise cpu_cache_bytes or gpu_memory_utilization."
            )
        if possible < wanted:
            get_logger().warning(
                f"native engine: the cache budget of {budget} bytes holds {possible} tokens; context_length is cut "
                f"from {wanted} to that."
            )
        self._limits.context_length = min(wanted, possible)

    def memory_to_wake(self) -> int | None:
        """See `StaysAwake`."""
        if self.device.type != "cuda" or self.num_ranks > 1 or self._obstacle.keys() & {"start", "failure"}:
            return None
        assert isinstance(self._cache, PagedCache)
        most = self._cache.most_bytes
        return most if most <= self._gpu_room.beside(self._cache) else None

    def _gpu_cache_bytes(self) -> int:
        assert isinstance(self._cache, PagedCache)
        return min(self._gpu_room.some_beside(self._cache), self._cache.most_bytes)

    def _decode_text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            # transformers makes an empty tokenizer of a folder that has none.
            if not any(self.model_path.glob("tokenizer*")) and not (self.model_path / "vocab.json").is_file():
                raise RequestRefused(
                    f"sample_params.stops needs the model's tokenizer, and {self.model_path} holds none."
                )
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@dataclass(slots=True)
class _Drawing:
    """Tokens that the device draws."""

    steps: int
    """Tokens for each sequence."""
    admitted: int
    """Sequences that had come in when it began."""
    take_in: Callable[[], list[Done]]
    """Waits for them."""


def _stage(request: GenerateRequest) -> LogprobStage:
    return "raw" if is_greedy(request.params) else "sampled"
