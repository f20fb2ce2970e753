"""SGLang behind its own server (`sglang.launch_server`)."""

import base64
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from xtuner.v1.data_proto import FinishReason, SampleParams
from xtuner.v1.rl.weight_update.canary import SumOf, SumsBy, by_module

from .answer_checks import checked, readable, said
from .base import GenerateOutput, GenerateRequest, LogprobStage, MemoryTag
from .carriers import Carrier, carrier_for
from .cpu_cache import cache_tokens, row_bytes
from .sampling_checks import is_greedy
from .served import CALL_S, ServedEngine
from .server import ServerError, ServerRefused

_LAUNCH = Path(__file__).parent / "engine_side" / "xtuner_sglang.py"
_ON_CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
)  # fmt: skip
_LOADER = "xtuner_sglang.take_weights"
_NAN = "NaN happened"
"""What it says to have stopped at where it found no token to draw."""
_SLACK = 8
"""Tokens of the context that SGLang keeps for itself: it would cut responses that reach the end by as many."""
_STATE, _HEALTH = "/server_info", "/health"
"""Both ask the engine, between two of its steps."""


class SGLangEngine(ServedEngine):
    """Log-probs are after temperature and before top-k and top-p. It draws by a request's seed only with
    `sglang_enable_deterministic_inference=True`; without that its draws depend on what else is in the batch."""

    name = "sglang"
    own_path = "/model_info"
    sums_by: SumsBy = "module"

    def command(self, port: int) -> list[str]:
        c = self.config
        chunk = c.chunked_prefill_size if c.enable_chunked_prefill else -1
        prefill = () if c.max_prefill_token_num is None else ("--max-prefill-tokens", str(c.max_prefill_token_num))
        if self.device == "cpu":
            row = row_bytes(self._model_config, self.dtype)
            room = cache_tokens(c, row) + self.max_batch_size * _SLACK
            memory = [*_ON_CPU, "--max-total-tokens", str(room)]
        else:
            memory = ["--enable-memory-saver", "--mem-fraction-static", str(c.gpu_memory_utilization)]
        return [
            str(_LAUNCH), "--host", "127.0.0.1", "--port", str(port),
            "--model-path", str(self.model_path), "--tokenizer-path", str(self.tokenizer_path),
            "--served-model-name", self.model_name, "--load-format", "dummy" if c.skip_load_weights else "auto",
            "--weight-version", "0", "--dtype", self.dtype_name, "--context-length", str(self.context_length + _SLACK),
            "--max-running-requests", str(self.max_batch_size), "--random-seed", str(self.draw_seed),
            "--chunked-prefill-size", str(chunk), *prefill,
            *(() if c.enable_prefix_caching else ("--disable-radix-cache",)),
            "--custom-weight-loader", _LOADER, "--skip-server-warmup", "--log-level", "info",
            *memory, *self.options.argv(),
        ]  # fmt: skip

    def environment(self, key: str) -> dict[str, str]:
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.device == "cpu" else {}
        return on_cpu | {
            "XTUNER_ENGINE_KEY": key, "HF_HUB_OFFLINE": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs of what was drawn from, whatever the run's shell says
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the slack, which is never used
        }  # fmt: skip

    async def _start_server(self) -> None:
        await super()._start_server()
        # /health draws a token and sleeps for a second before it looks for it: too long for every step.
        told = await self.server.answers(_STATE, timeout=CALL_S)
        self.health_path = _STATE if told else _HEALTH

    async def _works(self) -> bool:
        """After an error /health is asked, which sees all processes of the server, unless there is nothing to draw a
        token with."""
        path = self.health_path if self._asleep or self._obstacle else _HEALTH
        return await self.server.answers(path, self.config.health_check_timeout_seconds)

    async def ask(self, request: GenerateRequest) -> GenerateOutput:
        alternatives = request.params.top_logprobs if request.params.top_logprobs > 1 else 0
        body = {
            "rid": f"xtuner-{request.request_id}",
            "input_ids": request.prompt_ids,
            "sampling_params": self._sampling(request),
            "return_logprob": True,  # they also tell the ids that were drawn, the last one included
            "top_logprobs_num": alternatives,
        }
        answer = await self.server.post("/generate", body, timeout=self.config.rollout_timeout)
        meta = answer["meta_info"]
        drawn = meta["output_token_logprobs"] or []
        reason, error = _reason(meta["finish_reason"])
        stage: LogprobStage = "raw" if is_greedy(request.params) else "scaled" if _cuts(request.params) else "sampled"
        self._check_version(meta)
        ids, logprobs = [int(entry[1]) for entry in drawn], [float(entry[0]) for entry in drawn]
        output = GenerateOutput(request.request_id, ids, logprobs, [], reason, stage, error)
        if alternatives:
            rows = meta["output_top_logprobs"] or []
            output.top_logprobs = [[(int(entry[1]), float(entry[0])) for entry in row] for row in rows]
        return checked(output, self.server.name)

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        p = request.params
        return {
            "max_new_tokens": self.max_tokens(request), "min_new_tokens": p.min_tokens,
            "temperature": 0.0 if is_greedy(p) else p.temperature, "top_p": p.top_p,
            "top_k": p.top_k if p.top_k > 0 else -1, "min_p": p.min_p, "repetition_penalty": p.repetition_penalty,
            "presence_penalty": p.presence_penalty, "frequency_penalty": p.frequency_penalty, "stop": p.stops,
            "stop_token_ids": self.eos_ids + p.stop_token_ids, "no_stop_trim": True, "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            # It counts where something makes SGLang deterministic, be it another argument or a variable. There all
            # requests without a seed have the same one, and the answers to a prompt would be equal.
            "sampling_seed": request.seed,
        }  # fmt: skip

    def _check_version(self, meta: dict[str, Any]) -> None:
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        if wrong := {span["version"] for span in spans} - {str(self.version)}:
            raise ServerError(
                f"{self.server.name} answers with weights of version {', '.join(sorted(wrong))}, and it was given "
                f"version {self.version}."
            )

    async def abort_all(self) -> None:
        await self.server.manage("/abort_request", {"abort_all": True}, timeout=CALL_S)

    def new_carrier(self) -> Carrier:
        return carrier_for(self, self.config.weight_transport_type, self.device)

    async def load(self, folder: Path, version: int) -> None:
        await self.until_idle()  # of a request that still runs it would keep the cache, and say that it failed
        # Without the format it would take the one it was started with, which may be dummy weights.
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        answer = await self.server.manage("/update_weights_from_disk", body, timeout=CALL_S)
        if said(answer, "success", self.server.name) is not True:
            raise ServerError(
                f"{self.server.name} did not take version {version} of the weights: {answer.get('message')}"
            )

    async def take(self, address: str, version: int) -> None:
        await self.until_idle()
        in_session = await self._call_if_there("/begin_weight_update")
        try:
            body = {
                "serialized_named_tensors": [_named(address)], "load_format": _LOADER, "flush_cache": True,
                "weight_version": str(version),
            }  # fmt: skip
            await self.server.manage("/update_weights_from_tensor", body, timeout=CALL_S)
        finally:
            if in_session:
                await self.server.manage("/end_weight_update", {}, timeout=CALL_S)

    async def _call_if_there(self, path: str) -> bool:
        """Older versions lack it."""
        try:
            await self.server.manage(path, {}, timeout=CALL_S)
        except ServerRefused as refusal:
            if refusal.status != 404:
                raise
            return False
        return True

    async def weight_sums(self, keys: list[str]) -> dict[str, SumOf]:
        """See `ReadsWeights`."""
        if not await self.serves():
            return {}
        try:
            answer = await self.server.manage("/weights_checker", {"action": "checksum"}, timeout=CALL_S)
        except ServerRefused as refusal:
            if refusal.status != 404:
                raise
            return {}  # older versions lack it
        with readable(self.server.name):
            sums = answer["ranks"][0]["checksums"].items()
            # Before the first update over a socket they are SGLang's own hashes.
            found = {name: text.split() for name, text in sums if " " in text}
            return by_module(found, keys, self.dtype)

    async def release(self, tags: set[MemoryTag]) -> None:
        await self.until_idle()  # the token of /health may be on its way: it would not survive that
        await self.server.manage("/release_memory_occupation", {"tags": _regions(tags)}, timeout=CALL_S)

    async def resume(self, tags: set[MemoryTag]) -> None:
        await self.server.manage("/resume_memory_occupation", {"tags": _regions(tags)}, timeout=CALL_S)

    async def flush(self) -> bool:
        try:
            await self.server.manage("/flush_cache", timeout=CALL_S)
        except ServerRefused:
            return False
        return True


def _named(name: str) -> str:
    """A list of one empty tensor with this name, as SGLang's servers unpickle it."""
    return base64.b64encode(ForkingPickler.dumps([(name, torch.empty(0))])).decode()


def _regions(tags: set[MemoryTag]) -> list[str]:
    """SGLang's names; its graphs go with the cache."""
    return [*sorted(tags), *(["cuda_graph"] if "kv_cache" in tags else [])]


def _cuts(params: SampleParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _reason(finish: dict[str, Any]) -> tuple[FinishReason, str | None]:
    """It also calls `abort` what it could not serve; then there is a status."""
    kind = finish["type"]
    if kind == "abort" and finish.get("status_code") is None:
        return "abort", None
    if kind in ("stop", "length") and finish.get("matched") != _NAN:
        return kind, None
    return "error", f"sglang: {finish.get('message') or finish}"
