"""The demo's model with random weights, engines over it, and what `transformers` says of the same weights."""

import asyncio
import functools
import importlib
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors, iter_hf_tensors, save_hf_model
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.served import ServedEngine
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.train.demo.model import write_config, write_tokenizer

CONTEXT, SLOTS = 256, 8
CLASSES = {"lmdeploy": "LMDeployEngine", "sglang": "SGLangEngine", "vllm": "VLLMEngine"}


KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""What is other than in the demo's model, whose head is tied to the embedding."""


def write_model(folder: Path, seed: int, std: float = 0.12, hidden_size: int = 128, kind: str = "tied") -> Path:
    """Random weights, wide enough that the most likely token stands out."""
    source = folder.parent / f"source-{kind}"
    if not source.exists():
        write_config(source, hidden_size)
        write_tokenizer(source)
        config = source / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | KINDS[kind]))
    model = get_model_config_from_hf(source).build("cpu")
    model.init_weights(seed, std)
    save_hf_model(export_hf_tensors(model, torch.float32), model.config, folder, source_dir=source)
    return folder


def buckets(folder: Path, parts: int = 3) -> list[WeightBucket]:
    items = list(iter_hf_tensors(folder))
    return [WeightBucket(dict(items[i::parts])) for i in range(parts)]


@functools.cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits(folder: Path, ids: list[int]) -> Tensor:
    """[T, V] of `transformers`."""
    return reference(folder)(torch.tensor([ids])).logits[0].float()


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that `transformers` finds most likely."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(folder, ids)[-1].argmax()))
        if ids[-1] == 2:
            break
    return ids[len(prompt) :]


def logprobs_of(folder: Path, prompt: list[int], output: GenerateOutput, temperature: float = 1.0) -> Tensor:
    """[R] of the output's tokens, after temperature, by `transformers`."""
    rows = logits(folder, prompt + output.token_ids)[len(prompt) - 1 : -1]
    return torch.log_softmax(rows / temperature, -1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]


def prompt(seed: int, length: int = 11) -> list[int]:
    """Begins with the token that pads, which is one like the others."""
    generator = torch.Generator().manual_seed(seed)
    return [0, *torch.randint(3, 384, (length - 1,), generator=generator).tolist()]


def request(number: int = 0, ids: list[int] | None = None, seed: int | None = None, **params: Any) -> GenerateRequest:
    params = {"max_tokens": 12} | params
    return GenerateRequest(
        number, prompt(number) if ids is None else ids, SampleParams(**params), number if seed is None else seed
    )


class Engines:
    """Starts engines of one kind, one after another."""

    def __init__(self, name: str, models: list[Path], log_dir: Path, runner: asyncio.Runner, device: str = "cpu"):
        self.name, self.models, self.log_dir, self.device, self._runner = name, models, log_dir, device, runner
        self._module = f"xtuner.v1.rl.rollout.backends.{name}"
        if name == "lmdeploy" and device == "cpu":
            self.device, self._module = "cuda", "tests.engines.lmdeploy_on_cpu"
        self._started: list[ServedEngine] = []

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    def config(self, **changes: Any) -> RolloutConfig:
        fields: dict[str, Any] = {
            "model_path": self.models[0], "context_length": CONTEXT, "backend": self.name,
            "rollout_max_batch_size_per_instance": SLOTS,
        }  # fmt: skip
        return RolloutConfig(**(fields | changes)).resolve(self.device)

    def start(self, **changes: Any) -> ServedEngine:
        module = importlib.import_module(self._module)
        engine: ServedEngine = getattr(module, CLASSES[self.name])(self.config(**changes), 0, self.device, self.log_dir)
        self._started.append(engine)
        self.run(engine.start())
        return engine

    def generate(self, engine: ServedEngine, *requests: GenerateRequest) -> list[GenerateOutput]:
        async def all_of_them() -> list[GenerateOutput]:
            return await asyncio.gather(*(engine.generate(r) for r in requests))

        return self.run(all_of_them())

    async def stopped(self) -> None:
        for engine in self._started:
            await engine.stop()

    def close(self) -> None:
        self.run(self.stopped())


def update(engines: Engines, engine: ServedEngine, which: int, version: int) -> Path:
    engines.run(engine.update_weights(buckets(engines.models[which]), version))
    return engines.models[which]


def many_long_requests(engine: ServedEngine) -> "list[asyncio.Future[GenerateOutput]]":
    """Seconds of work."""
    length = CONTEXT - 20
    requests = [request(i, max_tokens=length, min_tokens=length) for i in range(10 * SLOTS)]
    return [asyncio.ensure_future(engine.generate(r)) for r in requests]


def descendants(pid: int) -> set[int]:
    """Of a process, itself included."""
    found = {pid}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= descendants(int(child))
    except OSError:
        pass
    return found


def server_processes(pid: int) -> list[int]:
    """Those that supervisors among the descendants of a process watch over."""
    supervisors = [p for p in descendants(pid) if b"supervisor.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return [int(child) for p in supervisors for child in Path(f"/proc/{p}/task/{p}/children").read_text().split()]


def running(pids: set[int]) -> set[int]:
    """Those that are there and no zombies."""
    there = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            there.add(pid)
    return there


def shared_memory(pids: set[int]) -> set[str]:
    """Files of shared memory that processes have in use."""
    lines = [line for pid in running(pids) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    paths = {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line}
    return {path for path in paths if not path.endswith(" (deleted)")}
