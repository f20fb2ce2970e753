"""vLLM behind its own OpenAI server, with the development routes that change weights."""

import os
from pathlib import Path
from typing import Any

from xtuner.v1.data_proto import FinishReason
from xtuner.v1.rl.weight_update.canary import SumOf, SumsBy, by_module

from .answer_checks import checked, readable, said
from .base import GenerateOutput, GenerateRequest, LogprobStage, MemoryTag
from .carriers import Carrier, carrier_for
from .cpu_cache import cache_tokens, row_bytes
from .sampling_checks import is_greedy
from .served import CALL_S, ServedEngine
from .server import ServerError

_ENGINE_SIDE = Path(__file__).with_name("engine_side")
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLMEngine(ServedEngine):
    """Log-probs are of the distribution that was drawn from; draws follow a request's seed."""

    name = "vllm"
    own_path = "/v1/models"
    health_path = "/is_sleeping"  # /health does not ask the engine
    sums_by: SumsBy = "module"
    _weights_wait = False
    """Whether they are in host memory."""

    def command(self, port: int) -> list[str]:
        c = self.config
        least = self.max_batch_size if c.enable_chunked_prefill else max(self.context_length, self.max_batch_size)
        step = c.max_prefill_token_num or max(8192, least)
        piece = min(c.chunked_prefill_size, self.context_length) if c.enable_chunked_prefill else 0
        yes_no = ("--", "--no-")
        if self.device == "cpu":
            row = row_bytes(self._model_config, self.dtype)
            memory = ["--enforce-eager", "--kv-cache-memory-bytes", str(cache_tokens(c, row) * row)]
        else:
            memory = ["--enable-sleep-mode", "--gpu-memory-utilization", str(c.gpu_memory_utilization)]
        return [
            "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
            "--middleware", "xtuner_vllm.RequireKey", "--worker-extension-cls", "xtuner_vllm.TakeWeights",
            "--model", str(self.model_path), "--tokenizer", str(self.tokenizer_path),
            "--served-model-name", self.model_name, "--load-format", "dummy" if c.skip_load_weights else "auto",
            "--dtype", self.dtype_name, "--max-model-len", str(self.context_length),
            "--max-num-seqs", str(self.max_batch_size), "--seed", str(self.draw_seed),
            "--logprobs-mode", "processed_logprobs", "--max-num-batched-tokens", str(step),
            "--long-prefill-token-threshold", str(piece),
            f"{yes_no[not c.enable_chunked_prefill]}enable-chunked-prefill",
            f"{yes_no[not c.enable_prefix_caching]}enable-prefix-caching",
            *memory, *self.options.argv(),
        ]  # fmt: skip

    def environment(self, key: str) -> dict[str, str]:
        path = os.pathsep.join([str(_ENGINE_SIDE), *filter(None, [self.inherited.get("PYTHONPATH")])])
        return {
            "VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path, "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOOPBACK_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip

    async def ask(self, request: GenerateRequest) -> GenerateOutput:
        p = request.params
        body: dict[str, Any] = {
            "model": self.model_name, "prompt": request.prompt_ids, "return_token_ids": True,
            "return_tokens_as_token_ids": True, "max_tokens": self.max_tokens(request), "min_tokens": p.min_tokens,
            # All of them: what is left out is taken from the model's generation_config.json.
            "temperature": 0.0 if is_greedy(p) else p.temperature, "top_p": p.top_p, "top_k": max(p.top_k, 0),
            "min_p": p.min_p, "repetition_penalty": p.repetition_penalty, "presence_penalty": p.presence_penalty,
            "frequency_penalty": p.frequency_penalty, "seed": request.seed, "stop": p.stops,
            "stop_token_ids": self.eos_ids + p.stop_token_ids, "include_stop_str_in_output": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False,
        }  # fmt: skip
        alternatives = p.top_logprobs if p.top_logprobs > 1 else 0
        if p.return_logprob or alternatives:
            body["logprobs"] = alternatives
        answer = await self.server.post("/v1/completions", body, timeout=self.config.rollout_timeout)
        choice = answer["choices"][0]
        ids = choice["token_ids"] or []
        logprobs = choice["logprobs"]["token_logprobs"] if p.return_logprob and ids else []
        reason = _REASONS.get(choice["finish_reason"], "error")
        error = f"vllm: finish_reason {choice['finish_reason']!r}" if reason == "error" else None
        stage: LogprobStage = "raw" if is_greedy(p) else "sampled"
        output = GenerateOutput(request.request_id, ids, logprobs, [], reason, stage, error)
        if alternatives:
            output.top_logprobs = (
                [_best(row, alternatives) for row in choice["logprobs"]["top_logprobs"]] if ids else []
            )
        return checked(output, self.server.name) if p.return_logprob else output

    async def abort_all(self) -> None:
        await self.server.manage("/abort_requests", {}, timeout=CALL_S)

    def new_carrier(self) -> Carrier:
        return carrier_for(self, self.config.weight_transport_type, self.device)

    async def load(self, folder: Path, version: int) -> None:
        if self.config.skip_load_weights:  # its loader of dummy weights cannot read any
            await self._on_workers("update_config", overrides={"load_config": {"load_format": "auto"}})
        await self._take("take_weights_of", folder=str(folder))

    async def take(self, address: str, version: int) -> None:
        await self._take("take_weights_from", address=address)

    async def _take(self, method: str, **where: str) -> None:
        answer = await self._on_workers(method, **where)
        if said(answer, "results", self.server.name) != [where]:  # our code answers with what it has taken
            raise ServerError(f"{self.server.name} does not say that it took the weights: {answer!r:.200}")
        await self.until_idle()

    async def weight_sums(self, keys: list[str]) -> dict[str, SumOf]:
        """See `ReadsWeights`."""
        if not await self.serves():
            return {}
        answer = await self._on_workers("sum_weights", modules=keys)
        with readable(self.server.name):
            (found,) = answer["results"]
            return by_module(found, keys, self.dtype)

    async def _on_workers(self, method: str, **kwargs: Any) -> Any:
        return await self.server.manage("/collective_rpc", {"method": method, "kwargs": kwargs}, timeout=CALL_S)

    async def release(self, tags: set[MemoryTag]) -> None:
        """It cannot give back the cache alone: weights that shall stay wait in host memory."""
        self._weights_wait = "weights" not in tags and "weights" not in self._asleep
        await self.server.manage(f"/sleep?level={1 if self._weights_wait else 2}", timeout=CALL_S)

    async def resume(self, tags: set[MemoryTag]) -> None:
        if self._weights_wait:
            tags, self._weights_wait = tags | {"weights"}, False
        await self.server.manage(f"/wake_up?{'&'.join(f'tags={tag}' for tag in sorted(tags))}", timeout=CALL_S)

    async def flush(self) -> bool:
        answer = await self.server.manage("/reset_prefix_cache", timeout=CALL_S)
        return bool(said(answer, "success", self.server.name))


def _best(row: dict[str, float], count: int) -> list[tuple[int, float]]:
    """Ids and log-probs, the first best. The token that was drawn comes along even where it is not among them; what a
    truncation excludes has -9999."""
    pairs = [(int(name.removeprefix("token_id:")), value) for name, value in row.items() if value > -9999]
    return sorted(pairs, key=lambda pair: -pair[1])[:count]
