"""Runs a program of LMDeploy's environment with another engine in it: LMDeploy's own wants a GPU.

Command line, server, routers, requests, sessions, tokenizer and what reads an update are LMDeploy's; what is in the
place of its engine computes with `transformers` and draws by itself.
"""

import asyncio
import contextlib
import mmap
import os
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def main() -> None:
    own, sys.argv = sys.argv[0], sys.argv[1:]
    if sys.argv[0] == "-c":
        exec(sys.argv[1], {})
        return
    assert os.environ["RAY_ADDRESS"] == "local" and "RAY_JOB_ID" not in os.environ, "the run's Ray would be used"
    sys.path[0] = str(Path(own).resolve().parents[2])
    import lmdeploy.pytorch.engine

    lmdeploy.pytorch.engine.Engine = Engine
    runpy.run_path(sys.argv[0], run_name="__main__")


class Engine:
    """What LMDeploy's server asks of its engine."""

    def __init__(self, path: str, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        assert config.distributed_executor_backend == "ray", "no other executor takes weights"
        assert config.logprobs_mode == "raw_logprobs" and not config.enable_prefix_caching
        self.engine_config = config
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.load_weights = self._load_weights
        self.asleep: dict[str, int] = {}
        """What sleeps, and how deeply."""
        if config.empty_init:
            self._forget()
            self.asleep = {"weights": 0, "kv_cache": 0}
        self.cancelled: dict[int, bool] = {}
        """Of the sessions that run."""
        self.ticks = 0
        # Like its Ray: a process that has left the group, and shared memory that outlives who made it.
        self.daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        with open(f"/dev/shm/stand-in-{os.getpid()}", "w+b") as file:
            file.truncate(4096)
            self.store = mmap.mmap(file.fileno(), 4096)

    @classmethod
    def from_pretrained(cls, path: str, engine_config: Any, **_: Any) -> "Engine":
        return cls(path, engine_config)

    def create_instance(self) -> "Instance":
        return Instance(self)

    def start_loop(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def get_schedule_metrics(self) -> SimpleNamespace:
        return SimpleNamespace(active_seqs=len(self.cancelled), waiting_seqs=0, scheduler_tick=self.ticks)

    async def get_health_status(self) -> dict[str, Any]:
        return {"alive": True, "message": "", "schedule_metrics": self.get_schedule_metrics()}

    async def sleep(self, level: int) -> None:
        self.asleep = {"weights": level, "kv_cache": level}
        if level == 2:
            self._forget()

    def _forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)

    def wakeup(self, tags: list[str]) -> None:
        for tag in tags:
            assert self.asleep.pop(tag) or tag == "kv_cache", "the weights are on the device"

    def update_params(self, request: Any) -> None:
        """LMDeploy's own, with nothing of a GPU left around it."""
        from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent

        assert "weights" not in self.asleep, "the weights are on the meta device"
        assert "kv_cache" in self.asleep, "graphs have been captured with the weights that there were"
        torch.cuda.current_device = lambda: "the device"  # type: ignore[assignment]
        torch.cuda.synchronize = lambda: None  # type: ignore[assignment,misc]
        if not hasattr(self, "agent"):
            self.agent = SimpleNamespace(
                all_context=contextlib.nullcontext, _update_params_ipc_tensor=None, _update_params_ipc_event=None,
                patched_model=SimpleNamespace(get_model=lambda: self.model),
                spec_agent=SimpleNamespace(get_model=lambda: None, is_enabled=lambda: False),
            )  # fmt: skip
        BaseModelAgent.update_params(self.agent, request)

    @torch.no_grad()
    def _load_weights(self, weights: Any) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in weights:
            parameters[name].copy_(value)


class Instance:
    """One request after another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def async_cancel(self, session_id: int) -> None:
        if session_id in self._engine.cancelled:
            self._engine.cancelled[session_id] = True

    async def async_stream_infer(
        self, session_id: int, input_ids: list[int], gen_config: Any, **_: Any
    ) -> AsyncIterator[Any]:
        from lmdeploy.messages import EngineOutput, ResponseType
        from lmdeploy.pytorch.messages import SamplingParam

        engine = self._engine
        assert not engine.asleep
        param = SamplingParam.from_gen_config(gen_config)
        engine.cancelled[session_id] = False
        cache, ids = None, list(input_ids)
        try:
            for number in range(param.max_new_tokens):
                if engine.cancelled[session_id]:
                    yield EngineOutput(ResponseType.CANCEL, [])
                    return
                with torch.no_grad():
                    answer = engine.model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
                cache, raw = answer.past_key_values, answer.logits[0, -1].log_softmax(-1)
                token = _draw(raw, param, number)
                ids = [token]
                rows = None
                if param.num_logprobs > 0:
                    best, which = raw.topk(param.num_logprobs)
                    rows = [{token: float(raw[token])} | dict(zip(which.tolist(), best.tolist(), strict=True))]
                ended = number + 1 == param.max_new_tokens or token in param.stop_words
                engine.ticks += 1
                yield EngineOutput(ResponseType.FINISH if ended else ResponseType.SUCCESS, ids, logprobs=rows)
                if ended:
                    return
                await asyncio.sleep(0)
        finally:
            del engine.cancelled[session_id]


def _draw(raw: torch.Tensor, param: Any, number: int) -> int:
    """By the request's seed and the place of the token."""
    scores = raw / param.temperature
    if number < param.min_new_tokens:
        scores[param.stop_words] = -torch.inf
    if param.top_k > 0:
        scores[scores < scores.topk(param.top_k).values[-1]] = -torch.inf
    generator = torch.Generator().manual_seed((param.random_seed & 0xFFFFFFFF) * 1000 + number)
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


if __name__ == "__main__":
    main()
