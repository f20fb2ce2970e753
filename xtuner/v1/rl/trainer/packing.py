"""From samples to packs: balanced over ranks by cost, padded to a small multiple, blind to each other."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    samples: Sequence[TrainingSample], fits: Callable[[list[TrainingSample]], bool]
) -> list[list[TrainingSample]]:
    """Samples with one prompt together, cut where `fits` says that a part is too large."""
    by_prompt: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        by_prompt.setdefault(tuple(sample.input_ids[: sample.prompt_len]), []).append(sample)
    parts: list[list[TrainingSample]] = []
    for siblings in by_prompt.values():
        current: list[TrainingSample] = []
        for sample in siblings:
            if current and not fits([*current, sample]):
                parts.append(current)
                current = []
            current = [*current, sample]
        parts.append(current)
    return parts


def split_updates(samples: Sequence[TrainingSample], optimizer_steps: int) -> list[list[TrainingSample]]:
    """One slice of samples an optimizer step, about equally many, siblings together where that allows it.

    Which sample belongs to which update does not depend on ranks, packs or device.
    """
    if optimizer_steps == 1:
        return [list(samples)]
    most = max(1, len(samples) // (2 * optimizer_steps))
    slices: list[list[TrainingSample]] = [[] for _ in range(optimizer_steps)]
    for part in sorted(_siblings(samples, lambda part: len(part) <= most), key=lambda part: -len(part)):
        min(slices, key=len).extend(part)
    return slices


def make_units(
    samples: Sequence[TrainingSample], share_prompts: bool, max_rows: int, hidden_size: int, max_samples: int
) -> list[_Unit]:
    """Siblings with one prompt become one unit of at most `max_rows` rows and `max_samples` samples."""
    if not share_prompts:
        return [_unit([s], False, hidden_size) for s in samples]

    def fits(part: list[TrainingSample]) -> bool:
        return len(part) <= max_samples and _unit(part, True, hidden_size).rows <= max_rows

    return [_unit(part, True, hidden_size) for part in _siblings(samples, fits)]


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


def make_pack(units: Sequence[_Unit], share_prompts: bool, pad_multiple: int) -> PackedBatch:
    """Lay units one behind the other. No units: a pack of padding without trained tokens."""
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    prefix: list[int] = []
    rows: list[int] = []
    labels: list[int] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    inv_temperature: list[float] = []
    sample_index: list[int] = []
    rollout_ids: list[int] = []
    has_logprobs = all(s.rollout_logprobs is not None for u in units for s in u.samples)
    for unit in units:
        shared = -1
        base = len(ids)
        if share_prompts:
            shared = len(lengths)
            prompt = unit.samples[0].input_ids[: unit.samples[0].prompt_len]
            ids += prompt
            positions += range(len(prompt))
            lengths.append(len(prompt))
            prefix.append(-1)
        for sample in unit.samples:
            first = sample.prompt_len if share_prompts else 0
            start = len(ids)
            own = sample.input_ids[first:]
            ids += own
            positions += range(first, first + len(own))
            if own:
                lengths.append(len(own))
                prefix.append(shared)
            trained = [i for i, label in enumerate(sample.labels) if label != IGNORE]
            rows += [base + i if i < first else start + i - first for i in trained]
            labels += [sample.labels[i] for i in trained]
            advantages += [sample.advantages[i] for i in trained]
            if has_logprobs and sample.rollout_logprobs is not None:
                logprobs += [sample.rollout_logprobs[i] for i in trained]
            inv_temperature += [1.0 / sample.temperature] * len(trained)
            sample_index += [len(rollout_ids)] * len(trained)
            rollout_ids.append(sample.rollout_id)
    padding = -len(ids) % pad_multiple or (pad_multiple if not ids else 0)
    if padding:
        ids += [0] * padding
        positions += range(padding)
        lengths.append(padding)
        prefix.append(-1)
    return PackedBatch(
        input_ids=torch.tensor(ids),
        position_ids=torch.tensor(positions),
        layout=SegmentLayout(lengths, prefix),
        target_rows=torch.tensor(rows, dtype=torch.int64),
        labels=torch.tensor(labels, dtype=torch.int64),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        inv_temperature=torch.tensor(inv_temperature, dtype=torch.float32),
        sample_index=torch.tensor(sample_index, dtype=torch.int64),
        rollout_ids=rollout_ids,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32) if has_logprobs else None,
        num_padding=padding,
    )


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
) -> list[list[list[PackedBatch]]]:
    """Packs by rank and optimizer step: `out[rank][step]` is a list of packs, as long on every rank.

    Samples are shuffled by `seed` (None: kept in order), dealt over the updates (`split_updates`), and those of an
    update over the ranks by cost. A rank gets a pack without samples only where an update has fewer samples than
    ranks. With `skip_zero_advantage`, samples of groups without signal go into packs of their own that need no
    gradient; an update that has no others keeps them, so that momentum and weight decay go on.

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
                made = [make_pack(pack, share_prompts, pad_multiple) for pack in bins[rank::ranks]]
                packs[-1] += [replace(pack, needs_gradient=needs_gradient) for pack in made]
    return out
