"""Supervised warm-up with the run's own engine, until the model is right now and then."""

import asyncio
import time
from pathlib import Path

import torch
import torch.distributed as dist

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.judger.gsm8k import score_gsm8k
from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.backends.native import NativeEngine
from xtuner.v1.rl.trainer.packing import make_pack, make_units
from xtuner.v1.rl.trainer.samples import IGNORE, TrainingSample
from xtuner.v1.utils import get_logger
from xtuner.v1.utils.device import keep_freed_memory
from xtuner.v1.utils.tensor_file import write_tensor_file

from .task import make_rows

BATCH, MAX_STEPS, CHECK_EVERY = 64, 600, 5
SAY_EVERY = 8.0
"""Seconds without a line of progress before the loss may be checked for accuracy."""
TEMPERATURE = 0.65
"""Worked solutions are learned at this temperature and answers sampled at 1: so the model starts unsure of what it half
knows, as a model before reinforcement is, instead of sure of what it has learned wrong."""


class Prompts:
    """Rows as token ids."""

    def __init__(self, tokenizer, rows: list[dict]):
        texts = [
            tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows
        ]
        answers = [r["extra_info"]["answer"] + tokenizer.eos_token for r in rows]
        self.prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.answers = tokenizer(answers, add_special_tokens=False)["input_ids"]
        self.truths = [r["reward_model"]["ground_truth"] for r in rows]

    def samples(self) -> list[TrainingSample]:
        """Supervised samples: the worked solutions are the responses."""
        out = []
        for index, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            ids, labels = prompt + answer[:-1], [IGNORE] * (len(prompt) - 1) + answer
            out.append(TrainingSample(index, ids, labels, [0.0] * len(labels), None, len(prompt), TEMPERATURE))
        return out


async def sampled_accuracy(engine: NativeEngine, tokenizer, data: Prompts, seed: int) -> float:
    """Share of right answers, one response a prompt at temperature 1."""
    params = SampleParams(max_tokens=36)
    requests = [GenerateRequest(i, ids, params, seed * 100_003 + i) for i, ids in enumerate(data.prompts)]
    outputs = await asyncio.gather(*(engine.generate(r) for r in requests))
    if failed := [o.error for o in outputs if o.finish_reason == "error"]:
        raise RuntimeError(f"the rollout engine failed on {len(failed)} of {len(outputs)} prompts: {failed[0]}")
    right = [
        score_gsm8k(tokenizer.decode(o.token_ids, skip_special_tokens=True), truth, {"score": 1, "format_score": 0})
        for o, truth in zip(outputs, data.truths, strict=True)
    ]
    return sum(float(r["score"]) for r in right) / len(right)


async def warm_start(folder: Path, device: torch.device, target: float, seed: int = 0) -> float:
    """Train the random model of `folder` (config and tokenizer) until held-out sampled accuracy reaches `target`.

    Writes the weights into `folder` and returns the accuracy.
    """
    from transformers import AutoTokenizer

    if device.type == "cpu":
        keep_freed_memory()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = make_rows(BATCH * MAX_STEPS, seed=11, evaluation=False)
    check = Prompts(tokenizer, make_rows(256, seed=12, evaluation=True))
    own_group = not dist.is_initialized()
    if own_group:
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    engine = TrainEngine(
        get_model_config_from_hf(folder),
        FSDPConfig(recompute_ratio=0.0, torch_compile=False, param_dtype=torch.float32),
        device=device,
        optim_cfg=AdamWConfig(lr=2e-3, weight_decay=0.01),
        lr_cfg=LRConfig(warmup_ratio=0.03),
        total_optimizer_steps=MAX_STEPS,
    )
    engine.model.init_weights(seed)
    rollout = NativeEngine(
        folder, device=device, dtype=torch.float32, max_batch_size=256, context_length=128, load_weights=False
    )
    await rollout.start()
    accuracy, start = 0.0, time.perf_counter()
    said = start
    for step in range(1, MAX_STEPS + 1):
        batch = Prompts(tokenizer, rows[(step - 1) * BATCH : step * BATCH])
        units = make_units(batch.samples(), False, 1 << 30, 128, 1)
        pack = make_pack(units, share_prompts=False, pad_multiple=1).to(device)
        logprobs, _ = engine.forward(pack)
        loss = -logprobs.mean()
        engine.backward(loss)
        engine.step()
        if step % CHECK_EVERY == 0 and float(loss.detach()) < 0.15:
            await rollout.update_weights(engine.weight_buckets(1 << 30), step)
            accuracy = await sampled_accuracy(rollout, tokenizer, check, step)
            said = _say(step, loss, start, f"  accuracy {accuracy:.3f}")
            if accuracy >= target:
                break
        elif time.perf_counter() - said >= SAY_EVERY:
            said = _say(step, loss, start)
    else:
        raise RuntimeError(f"the warm start reached {accuracy:.2f} after {MAX_STEPS} steps, not {target}.")
    await rollout.stop()
    _write_weights(engine, folder)
    if own_group:
        dist.destroy_process_group()
    return accuracy


def _say(step: int, loss: torch.Tensor, start: float, more: str = "") -> float:
    """One line of progress. Returns the time."""
    now = time.perf_counter()
    get_logger().info(f"warm start: step {step}  loss {float(loss.detach()):.3f}{more}  {now - start:.0f} s")
    return now


def _write_weights(engine: TrainEngine, folder: Path) -> None:
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for bucket in engine.weight_buckets(1 << 30, torch.float32)
        for name, tensor in bucket.tensors.items()
    }
    write_tensor_file(folder / "model.safetensors", tensors, {"format": "pt"})
