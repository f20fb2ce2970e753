"""LMDeploy's PyTorch engine behind its own server."""

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xtuner.v1.data_proto import FinishReason
from xtuner.v1.utils import get_logger

from .answer_checks import checked
from .base import GenerateOutput, GenerateRequest, MemoryTag
from .carriers import Carrier
from .lmdeploy_weights import BucketCarrier
from .sampling_checks import is_greedy
from .served import CALL_S, ServedEngine
from .server import OutOfFilesError, ServerError, ServerRefused

if TYPE_CHECKING:
    from ..config import RolloutConfig

_LAUNCH = Path(__file__).parent / "engine_side" / "xtuner_lmdeploy.py"
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_OBJECT_STORE_BYTES = 1 << 30
"""Of its Ray, through which a step's inputs and outputs go."""


class LMDeployEngine(ServedEngine):
    """Log-probs are of the softmax of the logits, before temperature and truncation; draws follow a request's seed."""

    name = "lmdeploy"
    own_path = "/v1/models"
    socket_bytes = 67  # those of its Ray
    _said = False
    """Whether what becomes of a temperature has been said."""

    def __init__(self, config: "RolloutConfig", rank: int, device: str, log_dir: Path):
        super().__init__(config, rank, device, log_dir)
        # The server has a Ray of its own: variables of the run's would lead it there.
        self.inherited = {name: value for name, value in self.inherited.items() if not name.startswith("RAY_")}

    def command(self, port: int) -> list[str]:
        c = self.config
        prefill = () if c.max_prefill_token_num is None else ("--max-prefill-token-num", str(c.max_prefill_token_num))
        empty = ("--empty-init",) if c.skip_load_weights else ()
        # It would put zeros in the place of the padding token's weights, which nobody else does.
        changed = {"pad_token_id": None} | ({"fp32_lm_head": True} if c.fp32_lm_head else {})
        return [
            str(_LAUNCH), "serve", "api_server", str(self.model_path), "--backend", "pytorch",
            "--server-name", "127.0.0.1", "--server-port", str(port), "--model-name", self.model_name,
            "--dtype", self.dtype_name, "--session-len", str(self.context_length),
            "--max-batch-size", str(self.max_batch_size), "--cache-max-entry-count", f"{self._cache_share():.4f}",
            "--logprobs-mode", "raw_logprobs", "--enable-abort-handling", "--generation-config", "lmdeploy",
            "--distributed-executor-backend", "ray",  # the only one that takes weights
            "--hf-overrides", json.dumps(changed), "--disable-fastapi-docs", "--disable-metrics",
            *empty, *prefill, *self.options.argv(),
        ]  # fmt: skip

    def environment(self, key: str) -> dict[str, str]:
        return {
            "XTUNER_ENGINE_KEY": key, "HF_HUB_OFFLINE": "1", "UVICORN_LOG_LEVEL": "warning",
            "LMDEPLOY_DIST_MASTER_ADDR": "127.0.0.1", "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(_OBJECT_STORE_BYTES),
            "RAY_memory_monitor_refresh_ms": "0",  # it would end the engine where the trainer fills the host's memory
        }  # fmt: skip

    def device_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def _cache_share(self) -> float:
        """LMDeploy's share is of what is free beside the weights; ours is of the whole device."""
        total = self.device_bytes()
        weights = sum(tensor.numel() * tensor.itemsize for tensor in self._expected.values())
        share = (self.config.gpu_memory_utilization * total - weights) / (total - weights)
        if share <= 0:
            raise ValueError(
                f"rollout_config.gpu_memory_utilization={self.config.gpu_memory_utilization} of {total:,} bytes does "
                f"not hold the {weights:,} bytes of the weights; raise it."
            )
        return min(share, 0.99)

    # ---- requests ----

    async def ask(self, request: GenerateRequest) -> GenerateOutput:
        p = request.params
        alternatives = p.top_logprobs if p.top_logprobs > 1 else 0
        with_logprobs = p.return_logprob or alternatives > 0
        greedy = is_greedy(p)
        if self.rank == 0 and not greedy and p.temperature != 1 and not self._said:
            self._said = True
            get_logger().warning(
                f"lmdeploy draws at temperature {p.temperature} and reports log-probs of before it: they are compared "
                "and trained at temperature 1 (response/unscaled_logprob_share)."
            )
        body: dict[str, Any] = {
            "input_ids": request.prompt_ids, "max_tokens": self.max_tokens(request), "min_new_tokens": p.min_tokens,
            "temperature": 1.0 if greedy else p.temperature, "top_k": 1 if greedy else max(p.top_k, 0),
            "top_p": p.top_p, "min_p": p.min_p, "random_seed": request.seed,
            "stop_token_ids": self.eos_ids + p.stop_token_ids, "include_stop_str_in_output": True,
            "return_logprob": with_logprobs, "top_logprobs_num": alternatives, "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }  # fmt: skip
        answer = await self.server.post("/generate", body, timeout=self.config.rollout_timeout)
        meta = answer["meta_info"]
        ids = answer["output_ids"]
        drawn = meta["output_token_logprobs"] or []
        said = str((meta["finish_reason"] or {}).get("type"))
        reason: FinishReason = _REASONS.get(said, "error")
        error = f"lmdeploy: finish_reason {said!r}" if reason == "error" else None
        logprobs = [float(value) for value, _ in drawn] if p.return_logprob else []
        output = GenerateOutput(request.request_id, ids, logprobs, [], reason, "raw", error)
        if alternatives:
            rows = meta["output_top_logprobs"] or []
            output.top_logprobs = [[(int(token), float(value)) for value, token in row] for row in rows]
        return checked(output, self.server.name) if p.return_logprob else output

    async def abort_all(self) -> None:
        await self.server.manage("/abort_request", {"abort_all": True}, timeout=CALL_S)

    async def flush(self) -> bool:
        """No prefix outlives its request, and aborted requests are gone when `abort_all` returns."""
        return True

    # ---- memory ----

    async def change(self, path: str, body: Any, timeout: float = CALL_S) -> None:
        """A call that puts it to sleep, wakes it or brings it weights. Asleep its /health does not ask its engine: one
        that fails such a call is ended."""
        try:
            await self.server.manage(path, body, timeout)
        except ServerError as error:
            if not isinstance(error, OutOfFilesError) and not (isinstance(error, ServerRefused) and error.status < 500):
                await self.server.end()
            raise

    async def release(self, tags: set[MemoryTag]) -> None:
        """It only ever sleeps as a whole: weights that shall stay go to host memory and come back."""
        keep = "weights" not in tags
        await self.change(f"/sleep?level={1 if keep else 2}", {})
        if keep:
            await self.change("/wakeup?tags=weights", {})

    async def resume(self, tags: set[MemoryTag]) -> None:
        """Those of the tags, or all that sleeps if nothing else is known to."""
        named = "" if tags == self._asleep else "?" + "&".join(f"tags={tag}" for tag in sorted(tags))
        await self.change(f"/wakeup{named}", {})

    # ---- weights ----

    def new_carrier(self) -> Carrier:
        return BucketCarrier(self)

    async def ready_for_weights(self) -> None:
        """Its graphs could go on with the weights that they were captured with, if it was awake; and a server that was
        started without weights wakes up only if it was put to sleep."""
        if "kv_cache" not in self._asleep:
            await self.release({"weights", "kv_cache"})
            self._asleep |= {"weights", "kv_cache"}
        if "weights" in self._asleep:
            await self.resume({"weights"})
            self._asleep.discard("weights")

    async def has_weights(self) -> None:
        if "kv_cache" in self._asleep and "kv_cache" not in self._obstacle:
            await self.resume({"kv_cache"})
            self._asleep.discard("kv_cache")
