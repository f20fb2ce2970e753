"""Dense models on the CPU: whole forwards, and many steps at a time, by the kernels of `kernels.py`."""

import time
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

from xtuner.v1.model.config import DenseModelConfig
from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.ops.cpu import bits, large_pages
from xtuner.v1.ops.jit_gemm import pack
from xtuner.v1.ops.simd import LANES, MULTIPLIES_FLOAT16
from xtuner.v1.ops.threads import num_threads
from xtuner.v1.utils import get_logger

from . import kernels
from .cache import Prompt
from .kernel_cache import KernelCache, round_up
from .kernels import Dimensions, Rows, Weights
from .runner import draw, refuse_not_finite
from .scheduler import NOT_FINITE, Done, Scheduler

_BLOCK, _TEAM_BLOCK = 64, 192
"""Most rows that a thread, or a team of them, takes through the model at a time: as many as share one reading of the
weights. Those of a team's larger models come from far."""
_SHARES = 8
"""Pieces a thread that a team's work is cut into, so that a thread that lost time to others is not waited for."""
_TEAM_PARAMETERS, _TEAM_ROWS = 30_000_000, 8
"""Threads each take their own sequences through smaller models, and need not wait for each other. Larger ones, or so
few rows, they take through together, so that each reads its part of the weights."""
_PREFILL_BLOCKS = 4
"""Blocks of prompts a thread, so that one with long prompts is not waited for."""
_TILE = 8
"""Blocks have a multiple of so many rows, which products take together."""
_MAX_STEPS = 16
_CALL_OPERATIONS = 4e9
"""Multiplications and additions of one call: 10 to 30 ms, so that neither arrivals nor an abort wait long."""

_KNOWN = {
    "model_type", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "num_hidden_layers", "hidden_size", "intermediate_size", "rms_norm_eps", "attention", "layer_types", "rope",
    "tie_word_embeddings", "mlp_bias", "num_attention_heads", "num_key_value_heads", "head_dim", "qkv_bias", "qk_norm",
    "o_bias", "sliding_window",
}  # fmt: skip
"""Fields of a model and its attention that the kernels act on. Any other must stand at its default."""


def kernel_types() -> list[torch.dtype]:
    """Types of weights that they multiply on this machine."""
    return [torch.float32, torch.bfloat16, *([torch.float16] if MULTIPLIES_FLOAT16 else [])]


def kernels_know(model: DecoderModel) -> bool:
    """Whether they compute all of a model."""
    config = model.config
    if type(config) is not DenseModelConfig or model.head_weight().dtype not in kernel_types():
        return False
    a = config.attention
    unusual = {*config.model_dump(exclude_defaults=True), *a.model_dump(exclude_defaults=True)} - _KNOWN
    windows = any(config.window_of(layer) is not None for layer in range(config.num_hidden_layers))
    return not unusual and not windows and a.head_dim % (2 * LANES) == 0


class KernelRunner:
    """Prefill leaves out a prompt's last token: the first step feeds it, as every step feeds the token before."""

    def __init__(self, model: DecoderModel, max_slots: int, max_length: int, threads: int | None = None) -> None:
        """threads None: as many as torch uses."""
        self.model, self.cache = model, KernelCache(model, max_slots, max_length)
        c = model.config
        assert isinstance(c, DenseModelConfig)
        a = c.attention
        self._dimensions = Dimensions(
            a.num_attention_heads, a.num_key_value_heads, a.head_dim, c.intermediate_size, c.vocab_size,
            np.float32(c.rms_norm_eps), np.float32(a.head_dim**-0.5),
        )  # fmt: skip
        parameters = sum(p.numel() for p in model.parameters())
        self._operations, self._together = 2 * parameters, parameters > _TEAM_PARAMETERS
        self._weights: Weights | None = read_weights(model)
        self._threads = threads
        self._memory: dict[int, Rows] = {}
        self.prefilled_rows = 0
        """Rows that went through the model in prefills since the start."""

    def compile(self) -> None:
        """All kernels, for the types that will come; later runs on this machine find them on the disk."""
        get_logger().info("native engine: preparing the CPU kernels; the first time on a machine it takes seconds.")
        begin, nobody = time.perf_counter(), Scheduler(1)
        self.prefill(nobody, [], 0)
        self._decode(nobody, np.zeros(0, np.bool_), 1)
        get_logger().info(f"native engine: CPU kernels are ready after {time.perf_counter() - begin:.1f} s.")

    def weights_changed(self) -> None:
        self._weights = read_weights(self.model)

    def forget_weights(self) -> None:
        self._weights = None

    def steps(self, scheduler: Scheduler, ahead: int = 0) -> int:
        rows = scheduler.rows()
        if rows["shaped"].any():
            return 1
        fair = int(_CALL_OPERATIONS / self._operations / len(rows))
        return max(1, min(fair, _MAX_STEPS, int((rows["limit"] - rows["length"]).max())))

    def may_run_ahead(self, scheduler: Scheduler) -> bool:
        return False

    def prefill(self, scheduler: Scheduler, prompts: list[Prompt], first_slot: int) -> list[Done]:
        places, copies = self._places(scheduler, prompts, first_slot)
        parts = [prompt.ids[prompt.begin : min(prompt.end, prompt.ids.size - 1)] for prompt in prompts]
        sizes = np.array([ids.size for ids in parts], np.int64)
        threads, team = self._crews(int(sizes.sum()))
        begins = np.array([prompt.begin for prompt in prompts], np.int64)
        # Blocks are whole prompts, of about as many rows each.
        blocks = min(threads * _PREFILL_BLOCKS if team == 1 else 1, len(parts))
        starts, copy_starts = _starts(sizes), _starts(np.array([len(c) for c in copies], np.int64))
        cuts = np.searchsorted(starts, np.arange(blocks + 1) * starts[-1] // max(blocks, 1))
        cuts[-1] = len(parts)
        kernels.prefill(
            starts[cuts], np.concatenate([np.zeros(0, np.int32), *parts]),
            np.arange(starts[-1]) + (begins - starts[:-1]).repeat(sizes), np.array(places, np.int64).repeat(sizes),
            copy_starts[cuts], np.array([c for of_prompt in copies for c in of_prompt], np.int64).reshape(-1, 3),
            self._dimensions, self._weights, self.cache.arrays, self._rows(blocks, team), threads, team,
        )  # fmt: skip
        self.prefilled_rows += int(starts[-1])
        return []

    def _places(
        self, scheduler: Scheduler, prompts: list[Prompt], first_slot: int
    ) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
        """Where each prompt goes, and what to copy from there for its siblings: from, to, how many tokens."""
        cut = [prompt for prompt in prompts if not prompt.complete and not self.cache.holds(prompt)]
        length = max([scheduler.max_length, *(prompt.ids.size for prompt in cut)])
        for prompt in cut:
            self.cache.hold(prompt)  # before rows move: its beginning was found in one of them
        self.cache.reserve(len(scheduler.running), length)
        self.cache.take_over()
        rows = iter(self.cache.place_of[first_slot:].tolist())
        of_members = [list(islice(rows, len(p.members))) if p.complete else [self.cache.partial_row] for p in prompts]
        copies = [[(own[0], to, p.ids.size - 1) for to in own[1:]] for own, p in zip(of_members, prompts, strict=True)]
        return [own[0] for own in of_members], copies

    def begin_decode(self, scheduler: Scheduler, steps: int, ahead: int = 0) -> Callable[[], list[Done]]:
        done = self.decode(scheduler, steps)
        return lambda: done

    def decode(self, scheduler: Scheduler, steps: int) -> list[Done]:
        before, rows = scheduler.rows()["length"].copy(), scheduler.rows()
        elsewhere = rows["shaped"]
        ends, logits = self._decode(scheduler, elsewhere, steps)
        refuse_not_finite(ends == NOT_FINITE)
        if not elsewhere.any():
            return scheduler.settle(np.arange(len(rows)), before, ends)
        here, elsewhere = np.flatnonzero(~elsewhere), np.flatnonzero(elsewhere)
        done = scheduler.settle(here, before[here], ends[here])
        return done + draw(scheduler, elsewhere, torch.from_numpy(logits[elsewhere]), self.model.exact)

    def _decode(self, scheduler: Scheduler, elsewhere: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """How each sequence stands, int64 [B], and the logits [B, V] of those that are drawn elsewhere."""
        scheduler.make_room(steps)
        rows = scheduler.rows()
        threads, team = self._crews(len(rows))
        ends = np.zeros(len(rows), np.int64)
        logits = np.empty((len(rows) if elsewhere.any() else 0, self._dimensions.vocab), np.float32)
        starts = _blocks(len(rows), threads, _block(team))
        memory = self._rows(len(starts) - 1, team)
        kernels.decode(
            starts, steps, rows, scheduler.tokens(), scheduler.logprobs(), scheduler.stop_ids(), self.cache.place_of,
            ends, logits, self._dimensions, self._weights, self.cache.arrays, memory, threads, team,
        )  # fmt: skip
        return ends, logits

    def _crews(self, rows: int) -> tuple[int, int]:
        """Threads that take a block each, and threads that share the work on one; one of the two is 1."""
        threads = self._threads or num_threads()
        return (1, threads) if self._together or rows <= _TEAM_ROWS else (threads, 1)

    def _rows(self, blocks: int, team: int) -> Rows:
        """Working memory for so many blocks."""
        length, shares = self.cache.length, 1 if team == 1 else _SHARES * team
        memory = self._memory.get(shares)
        if memory is None or len(memory.slots) < blocks or memory.scores.shape[3] < length:
            hidden, size = self.model.config.hidden_size, _block(team)
            memory = Rows.allocate(blocks, size, shares, hidden, length, self._dimensions)
            self._memory[shares] = memory
        return memory


def _starts(sizes: np.ndarray) -> np.ndarray:
    """[N] -> [N + 1]: where each begins if they lie one behind the other."""
    return np.concatenate((np.zeros(1, np.int64), sizes.cumsum()))


def _block(team: int) -> int:
    """Most rows of a block that so many threads share."""
    return _BLOCK if team == 1 else _TEAM_BLOCK


def _blocks(count: int, threads: int, most: int) -> np.ndarray:
    """Where blocks of at most `most` sequences begin: equally many for all threads, of whole tiles."""
    tiles, blocks = -(-count // _TILE), -(-count // most)
    blocks = min(tiles, round_up(blocks, threads))
    return np.minimum(np.arange(blocks + 1) * tiles // max(blocks, 1) * _TILE, count)


def read_weights(model: DecoderModel) -> Weights:
    """The parameters as the kernels want them; all but the embedding are copies."""
    parameters_of = [dict(layer.named_parameters()) for layer in model.layers]

    def vectors(name: str) -> np.ndarray:
        """[N, width], width 0 if the layers have no such parameter."""
        found = [parameters[name].detach().float() for parameters in parameters_of if name in parameters]
        return torch.stack(found or [torch.empty(0)] * len(parameters_of)).numpy()

    def matrices(name: str) -> np.ndarray:
        return _stacked([parameters[name] for parameters in parameters_of])

    return Weights(
        embedding=bits(model.embed_tokens.weight),
        norm=vectors("input_layernorm.weight"),
        qkv=matrices("self_attn.qkv_proj.weight"),
        qkv_bias=vectors("self_attn.qkv_proj.bias"),
        q_norm=vectors("self_attn.q_norm.weight"),
        k_norm=vectors("self_attn.k_norm.weight"),
        o=matrices("self_attn.o_proj.weight"),
        o_bias=vectors("self_attn.o_proj.bias"),
        mlp_norm=vectors("post_attention_layernorm.weight"),
        gate_up=matrices("mlp.gate_up_proj.weight"),
        gate_up_bias=vectors("mlp.gate_up_proj.bias"),
        down=matrices("mlp.down_proj.weight"),
        down_bias=vectors("mlp.down_proj.bias"),
        last_norm=model.norm.weight.detach().float()[None].numpy(),
        head=_stacked([model.head_weight()]),
        head_bias=np.empty((1, 0), np.float32),
    )


def _stacked(matrices: list[torch.Tensor]) -> np.ndarray:
    """Packed, [N, panels, K, width]."""
    packed: torch.Tensor | None = None
    for i, matrix in enumerate(matrices):
        one = pack(matrix.detach())
        if packed is None:
            packed = large_pages((len(matrices), *one.shape), one.dtype)
        packed[i] = one
    assert packed is not None
    return bits(packed)
