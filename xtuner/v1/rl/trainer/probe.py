"""Whether the engines compute with the trainer's weights: log-probs of what they draw behind a fixed prompt."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from xtuner.v1.data_proto import PackedBatch, SampleParams, SegmentLayout
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.weight_update import StaleWeightsError

from .packing import pack_samples
from .samples import TrainingSample

_ANSWER, _LEAST = 4, 2
"""Tokens."""


@dataclass(slots=True)
class Probe:
    """Answers of the engines after an update, and what a trainer needs to judge them."""

    version: int
    """Of the weights."""
    answers: list[dict[str, list[float]]]
    """The engines that gave the same tokens, with their log-probs, for each of the answers."""
    pack: PackedBatch
    """The answers; `rollout_ids` are places in `answers`."""
    limit: float
    """Largest mean |difference| that is taken for rounding."""

    def judge(self, logprobs: Mapping[int, list[float]]) -> dict[str, float]:
        """Metrics: the largest mean |difference| of an engine's log-probs from the trainer's, by place in `answers`.

        Raises:
            StaleWeightsError: it is above the limit; names the engine and both sides.
        """
        largest = 0.0
        for place, engines in enumerate(self.answers):
            ours = logprobs[place]
            for name, theirs in engines.items():
                differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
                gap = sum(differences) / len(differences)
                if not gap <= self.limit:
                    worst = differences.index(max(differences))
                    raise StaleWeightsError(
                        f"{name} does not compute with the weights of version {self.version} that it was given: its "
                        f"log-probs of the canary's {len(ours)} tokens are {gap:.4g} from the trainer's on average, "
                        f"{self.limit:g} is allowed (train_worker_cfg.weight_canary.logprob_gap). Farthest apart at "
                        f"token {worst}: {theirs[worst]!r} by the engine, {ours[worst]!r} by the trainer. Weights in "
                        "the wrong place, a head, adapter or cached prefix of other weights, or another model than "
                        "the trainer's. Nothing was trained on its tokens."
                    )
                largest = max(largest, gap)
        return {"canary/logprob_gap": largest, "canary/engines": float(sum(map(len, self.answers)))}


def probe_request(vocab_size: int, length: int, room: int) -> GenerateRequest | None:
    """The same prompt of up to `length` tokens, and the same draws, every time; None if `room` tokens are too few for
    that. No end tokens are excluded, as the distribution must be the model's."""
    answer = min(_ANSWER, room // 4)
    if answer < _LEAST:
        return None
    numbers = random.Random(0)
    ids = [numbers.randrange(vocab_size * 9 // 10) for _ in range(min(length, room - answer))]
    return GenerateRequest(-1, ids, SampleParams(max_tokens=answer, return_routed_experts=False), seed=0)


def make_probe(
    outputs: Mapping[str, GenerateOutput],
    request: GenerateRequest,
    *,
    version: int,
    limit: float,
    hidden_size: int,
    pad_multiple: int,
) -> Probe | None:
    """The probe of these answers, by engine; None if there is none.

    Raises:
        StaleWeightsError: one comes from other weights than those of `version`, as the engine itself says.
    """
    by_tokens: dict[tuple[int, ...], dict[str, list[float]]] = {}
    for name, output in outputs.items():
        if wrong := set(output.weight_versions) - {version}:
            raise StaleWeightsError(
                f"{name} answers with weights of version {sorted(wrong)}, and it was given version {version}."
            )
        by_tokens.setdefault(tuple(output.token_ids), {})[name] = output.logprobs
    if not by_tokens:
        return None
    prompt = request.prompt_ids
    samples = [
        TrainingSample(
            place, prompt + list(tokens[:-1]), [-100] * (len(prompt) - 1) + list(tokens),
            [0.0] * (len(prompt) - 1 + len(tokens)), None, len(prompt),
        )
        for place, tokens in enumerate(by_tokens)
    ]  # fmt: skip
    (((pack,),),) = pack_samples(
        samples, ranks=1, optimizer_steps=1, pack_max_length=len(samples) * (len(prompt) + _ANSWER) + pad_multiple,
        hidden_size=hidden_size, share_prompts=True, pad_multiple=pad_multiple,
    )  # fmt: skip
    return Probe(version, list(by_tokens.values()), pack, limit)


def with_rider(pack: PackedBatch, rider: PackedBatch, pad_multiple: int) -> PackedBatch:
    """`pack` with the rows of `rider` between its own and padding, and the rider's targets behind its own; neither sees
    the other. What targets are worth and whose they are is told for the pack's own alone."""
    parts = [_without_padding(p) for p in (pack, rider)]
    rows = parts[0].input_ids.numel()
    padding = -(rows + parts[1].input_ids.numel()) % pad_multiple
    zeros = pack.input_ids.new_zeros(padding)
    experts = parts[0].routed_experts
    segments = len(parts[0].layout.lengths)
    prefix = [p if p < 0 else p + segments for p in parts[1].layout.prefix]

    def joined(name: str, *more: Tensor) -> Tensor:
        return torch.cat([*(getattr(part, name) for part in parts), *more])

    return replace(
        pack,
        input_ids=joined("input_ids", zeros),
        position_ids=joined("position_ids", torch.arange(padding, device=zeros.device)),
        layout=SegmentLayout(
            [*parts[0].layout.lengths, *parts[1].layout.lengths, *([padding] if padding else [])],
            [*parts[0].layout.prefix, *prefix, *([-1] if padding else [])],
        ),
        target_rows=torch.cat((pack.target_rows, rider.target_rows + rows)),
        labels=joined("labels"),
        inv_temperature=joined("inv_temperature"),
        routed_experts=None if experts is None else _longer(experts, parts[1].input_ids.numel() + padding),
        num_padding=parts[1].input_ids.numel() + padding,
    )


def _without_padding(pack: PackedBatch) -> PackedBatch:
    if not pack.num_padding:
        return pack
    rows, layout = pack.input_ids.numel() - pack.num_padding, pack.layout
    return replace(
        pack, input_ids=pack.input_ids[:rows], position_ids=pack.position_ids[:rows],
        layout=SegmentLayout(layout.lengths[:-1], layout.prefix[:-1]), num_padding=0,
        routed_experts=None if pack.routed_experts is None else pack.routed_experts[:rows],
    )  # fmt: skip


def _longer(experts: Tensor, rows: int) -> Tensor:
    """With so many more rows, of which nothing is known."""
    return F.pad(experts, (0, 0, 0, 0, 0, rows), value=-1)
