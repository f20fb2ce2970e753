"""From samples to packs: balanced over ranks by cost, padded to a small multiple, blind to each other."""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from xtuner.v1.data_proto import PackedBatch, SegmentLayout

from .samples import IGNORE, TrainingSample


@dataclass(slots=True)
class _Unit:
    """Samples that are packed together: siblings that share the rows of their prompt, or a single sample."""

    samples: list[TrainingSample]
    rows: int
    cost: float


def _unit(samples: list[TrainingSample], shared: bool, hidden_size: int) -> _Unit:
    """Rows and relative cost. A row costs 1 for the matmuls and context / (6 * hidden) for attention."""
    prompt = samples[0].prompt_len if shared else 0
    own = [len(s.input_ids) - prompt for s in samples]
    rows = prompt + sum(own)
    context = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in own)
    return _Unit(samples, rows, rows + context / (6 * hidden_size))


def _siblings(
    samples: Sequence[TrainingSample], max_samples: int, max_rows: float = math.inf
) -> list[list[TrainingSample]]:
    """Samples with one prompt together, cut into parts of at most so many samples and, with the prompt, rows."""
    by_prompt: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        by_prompt.setdefault(tuple(sample.input_ids[: sample.prompt_len]), []).append(sample)
    parts: list[list[TrainingSample]] = []
    for siblings in by_prompt.values():
        part: list[TrainingSample] = []
        rows = siblings[0].prompt_len
        for sample in siblings:
            own = len(sample.input_ids) - sample.prompt_len
            if part and (len(part) == max_samples or rows + own > max_rows):
                parts.append(part)
                part, rows = [], sample.prompt_len
            part.append(sample)
            rows += own
        parts.append(part)
    return parts


def split_updates(samples: Sequence[TrainingSample], optimizer_steps: int) -> list[list[TrainingSample]]:
    """One slice of samples an optimizer step, about equally many, siblings together where that allows it.

    Which sample belongs to which update does not depend on ranks, packs or device.
    """
    if optimizer_steps == 1:
        return [list(samples)]
    most = max(1, len(samples) // (2 * optimizer_steps))
    slices: list[list[TrainingSample]] = [[] for _ in range(optimizer_steps)]
    for part in sorted(_siblings(samples, most), key=lambda part: -len(part)):
        min(slices, key=len).extend(part)
    return slices


def make_units(
    samples: Sequence[TrainingSample], share_prompts: bool, max_rows: int, hidden_size: int, max_samples: int
) -> list[_Unit]:
    """Siblings with one prompt become one unit of at most `max_rows` rows and `max_samples` samples."""
    if not share_prompts:
        return [_unit([s], False, hidden_size) for s in samples]
    return [_unit(part, True, hidden_size) for part in _siblings(samples, max_samples, max_rows)]


def balance(units: Sequence[_Unit], bins: int, max_rows: int) -> list[list[_Unit]] | None:
    """Longest processing time first: each unit goes to the cheapest bin that has room. None if one finds none."""
    heap = [(0.0, index, 0) for index in range(bins)]
    out: list[list[_Unit]] = [[] for _ in range(bins)]
    for unit in sorted(units, key=lambda u: -u.cost):
        full = []
        while heap and heap[0][2] + unit.rows > max_rows:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index, rows = heapq.heappop(heap)
        out[index].append(unit)
        heapq.heappush(heap, (cost + unit.cost, index, rows + unit.rows))
        for entry in full:
            heapq.heappush(heap, entry)
    return out


def make_pack(
    units: Sequence[_Unit], share_prompts: bool, pad_multiple: int, routing_shape: tuple[int, int, int] | None = None
) -> PackedBatch:
    """Lay units one behind the other. No units: a pack of padding without trained tokens."""
    ids: list[int] = []
    segments = _Spans()  # positions of the rows of each segment
    prefix: list[int] = []
    sources = _Spans()  # rows that predict the response of each sample; before them, no row is trained
    labels: list[int] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    samples = [sample for unit in units for sample in unit.samples]
    for unit in units:
        shared, base, first = -1, len(ids), 0
        if share_prompts:
            shared, first = len(prefix), unit.samples[0].prompt_len
            ids += unit.samples[0].input_ids[:first]
            segments.add(0, first)
            prefix.append(-1)
        for sample in unit.samples:
            last, length = sample.prompt_len - 1, len(sample.input_ids)
            if share_prompts:
                sources.add(base + last, 1)
                sources.add(len(ids), length - first)
            else:
                sources.add(len(ids) + last, length - last)
            ids += sample.input_ids[first:]
            if length > first:
                segments.add(first, length - first)
                prefix.append(shared)
            labels += sample.labels[last:]
            advantages += sample.advantages[last:]
            known = sample.rollout_logprobs
            logprobs += known[last:] if known is not None else [math.nan] * (length - last)
    padding = -len(ids) % pad_multiple or (pad_multiple if not ids else 0)
    if padding:
        ids += [0] * padding
        segments.add(0, padding)
        prefix.append(-1)
    label_array = np.array(labels, dtype=np.int64)
    trained = label_array != IGNORE

    def of_trained(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[trained])

    lengths = [len(s.labels) - s.prompt_len + 1 for s in samples]
    inv_temperature = np.array([1.0 / s.temperature for s in samples], dtype=np.float32)
    return PackedBatch(
        input_ids=torch.from_numpy(np.array(ids, dtype=np.int64)),
        position_ids=torch.from_numpy(segments.numbers()),
        layout=SegmentLayout(segments.lengths, prefix),
        target_rows=of_trained(sources.numbers()),
        labels=of_trained(label_array),
        advantages=of_trained(np.array(advantages, dtype=np.float32)),
        inv_temperature=of_trained(np.repeat(inv_temperature, lengths)),
        sample_index=of_trained(np.repeat(np.arange(len(samples)), lengths)),
        rollout_ids=[s.rollout_id for s in samples],
        rollout_logprobs=of_trained(np.array(logprobs, dtype=np.float32)),
        has_all_logprobs=all(s.rollout_logprobs is not None for s in samples),
        routed_experts=_lay_experts(units, share_prompts, len(ids), routing_shape) if routing_shape else None,
        num_padding=padding,
    )


def _lay_experts(
    units: Sequence[_Unit], share_prompts: bool, rows: int, routing_shape: tuple[int, int, int]
) -> torch.Tensor:
    """int16 [rows, L, K] in the order of `make_pack`. A shared prompt has the experts of its first sample with any."""
    *shape, num_experts = routing_shape
    out, row = np.full((rows, *shape), -1, np.int16), 0
    for unit in units:
        first = unit.samples[0].prompt_len if share_prompts else 0
        known = [s.routed_experts for s in unit.samples if s.routed_experts is not None]
        spans = [(known[0] if known else None, 0, first)]
        spans += [(s.routed_experts, first, len(s.input_ids)) for s in unit.samples]
        for experts, start, end in spans:
            if experts is not None:
                part = experts[start:end]
                if part.shape[1:] != tuple(shape) or part.max(initial=-1) >= num_experts:
                    raise ValueError(
                        f"routed_experts of shape {part.shape} with ids up to {part.max(initial=-1)} do not belong to "
                        f"a model with (layers, top_k)={tuple(shape)} and {num_experts} experts a layer."
                    )
                out[row : row + len(part)] = part
            row += end - start
    return torch.from_numpy(out)


class _Spans:
    """Runs of consecutive numbers, one behind the other."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def add(self, start: int, length: int) -> None:
        self.starts.append(start)
        self.lengths.append(length)

    def numbers(self) -> np.ndarray:
        """All of them, int64 [sum of the lengths]."""
        starts, lengths = np.array(self.starts, dtype=np.int64), np.array(self.lengths, dtype=np.int64)
        ends = np.cumsum(lengths)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def pack_samples(
    samples: Sequence[TrainingSample],
    *,
    ranks: int,
    optimizer_steps: int,
    pack_max_length: int,
    hidden_size: int,
    share_prompts: bool,
    pad_multiple: int = 1,
    seed: int | None = None,
    skip_zero_advantage: bool = False,
    routing_shape: tuple[int, int, int] | None = None,
) -> list[list[list[PackedBatch]]]:
    """Packs by rank and optimizer step: `out[rank][step]` is a list of packs, as long on every rank.

    Samples are shuffled by `seed` (None: kept in order), dealt over the updates (`split_updates`), and those of an
    update over the ranks by cost. A rank gets a pack without samples only where an update has fewer samples than
    ranks. With `skip_zero_advantage`, samples of groups without signal go into packs of their own that need no
    gradient; an update that has no others keeps them, so that momentum and weight decay go on. With `routing_shape`
    (layers with experts, experts a token, experts of a layer) packs carry the engine's experts.

    Raises:
        ValueError: fewer samples than optimizer steps, or a sample longer than `pack_max_length`.
    """
    if len(samples) < optimizer_steps:
        raise ValueError(
            f"{len(samples)} samples cannot fill optimizer_steps={optimizer_steps} updates; "
            "lower train_worker_cfg.optimizer_steps or raise train_batch_size."
        )
    longest = max(len(s.input_ids) for s in samples)
    if longest > pack_max_length:
        raise ValueError(f"a sample of {longest} tokens does not fit pack_max_length={pack_max_length}.")
    order = list(samples)
    if seed is not None:
        random.Random(seed).shuffle(order)
    room = max(longest, pack_max_length // pad_multiple * pad_multiple)
    out: list[list[list[PackedBatch]]] = [[] for _ in range(ranks)]
    for part in split_updates(order, optimizer_steps):
        idle = [s for s in part if not any(s.advantages)] if skip_zero_advantage else []
        idle = [] if len(idle) == len(part) else idle
        active = [s for s in part if any(s.advantages)] if idle else part
        for packs in out:
            packs.append([])
        for chosen, needs_gradient in ((active, True), (idle, False)):
            if not chosen:
                continue
            # Parts of a group small enough that the ranks can be given equally much.
            units = make_units(chosen, share_prompts, room, hidden_size, max(1, len(chosen) // (2 * ranks)))
            per_rank = -(-sum(u.rows for u in units) // (room * ranks)) or 1
            while (bins := balance(units, per_rank * ranks, room)) is None:
                per_rank += 1
            for rank, packs in enumerate(out):
                made = [make_pack(pack, share_prompts, pad_multiple, routing_shape) for pack in bins[rank::ranks]]
                packs[-1] += [replace(pack, needs_gradient=needs_gradient) for pack in made]
    return out
