"""The driver's part of the canary: asks the engines, and says what difference is rounding."""

from typing import TYPE_CHECKING

import torch

from xtuner.v1.rl.rollout.backends.base import GenerateRequest
from xtuner.v1.rl.rollout.controller import RolloutController
from xtuner.v1.rl.trainer.probe import Probe, make_probe, probe_request
from xtuner.v1.utils import get_logger

from .exact import is_exact

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

_FLOAT32_GAP, _TF32_GAP, _HALF_GAP, _HALF_GAP_WITH_EXPERTS = 1e-3, 0.02, 0.15, 1.5
"""Rounding can lead a token to other experts. TF32 has three bits more than bfloat16."""
_PROMPT, _LONG_PROMPT = 72, 144
"""Tokens of the prompt: they fill a page of our engine's cache, or a block of any other's, so that one that was kept
shows."""


class Canary:
    """Asks every engine once after each update."""

    def __init__(self, cfg: "RLColocateTrainerConfig"):
        self._cfg, self._model = cfg, cfg.train_worker_cfg.model_cfg
        self.due = False
        """Whether some engine has weights that it was not asked about."""

    async def weights_changed(self, rollout: RolloutController) -> None:
        """Have the engines asked together with their next prompts, where that costs least."""
        self.due = True
        if (request := self._request(rollout)) is not None:
            await rollout.ask_beside(request)

    def _request(self, rollout: RolloutController) -> GenerateRequest | None:
        """None if none is due, or there is no room for it."""
        worker = self._cfg.train_worker_cfg
        if not (self.due and worker.weight_canary.enabled):
            return None
        length = _PROMPT if rollout.config.backend == "native" else _LONG_PROMPT
        return probe_request(self._model.vocab_size, length, min(rollout.context_length, worker.pack_max_length))

    async def ask(self, rollout: RolloutController, version: int) -> Probe | None:
        """What the engines, which have weights of `version`, say to the fixed prompt; None if none is due."""
        if (request := self._request(rollout)) is None:
            return None
        outputs = await rollout.ask_engines(request)
        answered = {name: output for name, output in outputs.items() if output.token_ids and output.logprobs}
        self.due = len(answered) < len(outputs)
        for name in outputs.keys() - answered.keys():
            problem = outputs[name].error or f"it has no tokens ({outputs[name].finish_reason})"
            get_logger().warning(f"{name} did not answer the canary: {problem}")
        pad = 1 if self._cfg.resources.device == "cpu" else 64
        return make_probe(
            answered, request, version=version, limit=gap_limit(self._cfg), hidden_size=self._model.hidden_size,
            pad_multiple=pad,
        )  # fmt: skip


def gap_limit(cfg: "RLColocateTrainerConfig") -> float:
    """Largest mean |difference| of an engine's log-probs from the trainer's that is taken for rounding."""
    wanted = cfg.train_worker_cfg.weight_canary.logprob_gap
    if wanted is not None:
        return wanted
    if is_exact(cfg):
        return 0.0
    fsdp, rollout = cfg.train_worker_cfg.fsdp_cfg, cfg.rollout_config
    on_cpu = cfg.resources.device == "cpu"
    ours, theirs = (fsdp.cpu_param_dtype, rollout.cpu_dtype) if on_cpu else (fsdp.param_dtype, rollout.dtype)
    if ours == theirs == torch.float32:
        # Attention kernels of the served engines multiply float32 as TF32 on a GPU; vLLM's gap is 0.0013 then.
        return _FLOAT32_GAP if on_cpu or rollout.named_backend() == "native" else _TF32_GAP
    return _HALF_GAP if cfg.train_worker_cfg.model_cfg.routing_shape is None else _HALF_GAP_WITH_EXPERTS
