"""Whether an update is whole: every weight once, of the right shape and type, and on request with the right bits."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.ops.bit_sums import bit_sums

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


class WeightUpdateError(RuntimeError):
    """An update did not bring every weight exactly once, or not its values. The model holds a mixture and must not
    serve."""


class EngineLostError(WeightUpdateError):
    """The engine died or hung asleep or while it took an update. Revived, it takes the next one."""


class EngineDownError(RuntimeError):
    """The engine is dead, and could not be started again."""


class DeliveryError(RuntimeError):
    """A transport broke down, or brought what was not announced."""


class Inventory:
    """What of an update has come, against the weights that an engine has.

    `targets`: name -> where the engine wants the values, by the names that the trainer uses in this update.
    """

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self._targets = targets
        self._seen: set[str] = set()
        self._twice: list[str] = []
        self._unknown: list[str] = []
        self._checksums: list[tuple[list[str], torch.dtype, Tensor]] = []

    def take(self, bucket: WeightBucket) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of the bucket's tensors.

        Raises:
            WeightUpdateError: a shape or type that does not fit.
        """
        pairs = []
        for name, tensor in bucket.tensors.items():
            if name in self._seen:
                self._twice.append(name)
            self._seen.add(name)
            target = self._targets.get(name)
            if target is None:
                self._unknown.append(name)
                continue
            if target.shape != tensor.shape:
                raise WeightUpdateError(
                    f"the weights do not fit the engine's model: {name} is {list(tensor.shape)}, expected "
                    f"{list(target.shape)}."
                )
            _check_type(name, bucket.dtype or tensor.dtype, target.dtype)
            pairs.append((target, tensor))
        if bucket.checksums is not None:
            self._note_checksums(bucket, bucket.checksums)
        return pairs

    def _note_checksums(self, bucket: WeightBucket, checksums: Tensor) -> None:
        if len(checksums) != len(bucket.tensors):
            raise WeightUpdateError(
                f"{len(checksums)} checksums came with {len(bucket.tensors)} tensors ({some(bucket.tensors)})."
            )
        for dtype in {bucket.dtype or t.dtype for t in bucket.tensors.values()}:
            which = {n: i for i, (n, t) in enumerate(bucket.tensors.items()) if (bucket.dtype or t.dtype) == dtype}
            if narrow := [n for n in which if n in self._targets and self._targets[n].dtype.itemsize < dtype.itemsize]:
                raise WeightUpdateError(
                    f"{some(narrow)}: the engine keeps {self._targets[narrow[0]].dtype} of the {dtype} that came, and "
                    "checksums compare bits. Let fsdp_cfg.param_dtype and rollout_config.dtype agree, or set "
                    "update_weight_checksum=False."
                )
            self._checksums.append((list(which), dtype, checksums[list(which.values())]))

    @property
    def missing(self) -> list[str]:
        """Names of the weights that have not come, in order."""
        return sorted(set(self._targets) - self._seen)

    def check(self) -> None:
        """To be called when all is said to be there. Waits for the device only if checksums came.

        Raises:
            WeightUpdateError: names what is missing, came twice, is unknown or has other bits.
        """
        problems = {"missing": self.missing, "sent twice": self._twice, "unknown": self._unknown}
        if any(problems.values()):
            text = "; ".join(f"{len(names)} {kind}: {some(names)}" for kind, names in problems.items() if names)
            raise WeightUpdateError(f"the engine did not get every weight exactly once. {text}")
        if wrong := self._with_other_bits():
            raise WeightUpdateError(
                f"{len(wrong)} weights of the engine do not have the checksums of the trainer's: {some(wrong)}. They "
                "were lost, exchanged or rounded on the way."
            )

    def _with_other_bits(self) -> list[str]:
        found = []
        for names, dtype, wanted in self._checksums:
            here = bit_sums(self.values(names), dtype)
            found.append((names, here != wanted.to(here.device)))
        return [name for names, differ in found for name, other in zip(names, differ.tolist(), strict=True) if other]

    def values(self, names: list[str]) -> list[Tensor]:
        """What the engine has now."""
        return [self._targets[name] for name in names]


def _check_type(name: str, sent: torch.dtype, wanted: torch.dtype) -> None:
    """An engine may compute in less than the trainer's float32, or keep the trainer's values in more; anything else
    is a cast that nobody asked for."""
    if sent != wanted and (torch.float32 not in (sent, wanted) or not {sent, wanted} <= _FLOATS):
        raise WeightUpdateError(
            f"{name} comes in {sent}, which the engine's {wanted} cannot hold. Let fsdp_cfg.param_dtype and "
            "rollout_config.dtype agree."
        )


def some(names: Iterable[str], show: int = 5) -> str:
    """The first names, for a message."""
    names = list(names)
    return ", ".join(names[:show]) + (", …" if len(names) > show else "")
