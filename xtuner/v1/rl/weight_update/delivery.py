"""An update from one process to another, through two buffers that both see.

While the receiver copies from one buffer, the sender gathers the next bucket and writes it into the other.
"""

import secrets
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.utils.device import synchronize

from .buckets import exhaust
from .flat import Place, lay_out, pack, unpack
from .inventory import DeliveryError, WeightUpdateError
from .line import Line
from .shared_memory import CudaShared, GroupShared, HostShared, Openings, Shared

_SLOTS = 2


class TakesWeights(Protocol):
    """An engine, or its worker."""

    async def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None: ...


def send_weights(
    buckets: Iterable[WeightBucket],
    line: Line,
    version: int,
    memory: Literal["host", "cuda", "group"],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send an update and wait until the receiver has verified all of it.

    memory: whether the buffers are in host memory or, for two processes that use one GPU, on `device`; or on `device`
    and sent to the other rank of `group`, for two processes with a device each. They are given back at the end,
    whatever it is. `buckets` are iterated to the end in any case: gathering may be collective.

    Raises:
        WeightUpdateError: the receiver is gone, does not answer, or refuses; says why and what was the last it took.
    """
    iterator = iter(buckets)
    slots: list[Shared | None] = [None] * _SLOTS
    tensors = num_bytes = count = 0
    try:
        line.update = secrets.token_hex(8)
        line.send("begin", version=version)
        for index, bucket in enumerate(iterator):
            bucket.refuse_parameters()
            if index >= _SLOTS:
                _expect_index(line, "taken", index - _SLOTS)
            places, size = lay_out(bucket)
            last, slots[index % _SLOTS] = slots[index % _SLOTS], None
            slot = slots[index % _SLOTS] = _room(last, size, memory, device, group)
            pack(bucket, places, slot.memory)
            slot.flush()
            sums = None if bucket.checksums is None else bucket.checksums.tolist()
            line.send(
                "bucket", () if slot is last else slot.files, index=index, memory=slot.describe(),
                tensors=[p.to_json() for p in places], checksums=sums,
            )  # fmt: skip
            slot.hand_over()
            tensors, num_bytes, count = tensors + len(places), num_bytes + bucket.num_bytes, index + 1
        line.send("end", buckets=count, tensors=tensors, num_bytes=num_bytes)
        for index in range(max(0, count - _SLOTS), count):
            _expect_index(line, "taken", index)
        done, _ = line.receive("done")
        if done.get("version") != version:
            raise DeliveryError(f"the receiver says that it has version {done.get('version')} now.")
    except DeliveryError as error:
        exhaust(iterator)
        raise WeightUpdateError(f"version {version} of the weights did not reach the engine: {error}") from error
    except BaseException:
        line.refuse("the sender broke down.")
        raise
    finally:
        for taken in slots:
            if taken is not None:
                taken.close()


def _expect_index(line: Line, kind: str, index: int) -> None:
    message, _ = line.receive(kind)
    if message.get("index") != index:
        raise DeliveryError(f"{kind} {message.get('index')} came where {kind} {index} was due.")


def _room(
    slot: Shared | None, num_bytes: int, memory: str, device: torch.device, group: dist.ProcessGroup | None
) -> Shared:
    """The slot, or a larger one in its place."""
    if slot is not None and slot.memory.numel() >= num_bytes:
        return slot
    if slot is not None:
        slot.close()
    if memory == "group":
        assert group is not None, "memory='group' needs the group"
        return GroupShared(num_bytes, device, group)
    return CudaShared(num_bytes, device) if memory == "cuda" else HostShared(num_bytes)


class IncomingWeights:
    """The buckets of an update that another process sends; to be iterated once. A bucket is there until the next."""

    def __init__(self, line: Line, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Waits for the beginning of an update. `device`: of the engine; `group`: with the sender, if it uses one."""
        self._line, self._device = line, device
        self._openings = Openings(device, group)
        line.update = None
        beginning, _ = line.receive("begin")
        line.update, self.version = beginning["update"], int(beginning["version"])

    def __iter__(self) -> Iterator[WeightBucket]:
        buckets = tensors = num_bytes = 0
        while True:
            message, files = self._line.receive("bucket", "end")
            if message["kind"] == "end":
                break
            if message["index"] != buckets:
                raise DeliveryError(f"bucket {message['index']} came where bucket {buckets} was due.")
            memory = self._openings.open(message["memory"], files)
            places = [Place.from_json(value) for value in message["tensors"]]
            sums = message["checksums"]
            bucket = WeightBucket(
                dict(zip([p.name for p in places], unpack(places, memory), strict=True)),
                checksums=None if sums is None else torch.tensor(sums, dtype=torch.int64),
            )
            if len(bucket.tensors) != len(places):
                raise DeliveryError(f"bucket {buckets} holds a name twice.")
            yield bucket
            synchronize(self._device)  # the sender writes there next
            self._line.send("taken", index=buckets)
            buckets, tensors, num_bytes = buckets + 1, tensors + len(places), num_bytes + bucket.num_bytes
        came, said = (buckets, tensors, num_bytes), tuple(message[k] for k in ("buckets", "tensors", "num_bytes"))
        if came != said:
            raise DeliveryError(f"{came} buckets, tensors and bytes came, {said} were sent.")

    def close(self) -> None:
        """Let go of the sender's memory."""
        self._openings.close()


async def receive_weights(
    engine: TakesWeights,
    line: Line,
    device: torch.device,
    expected_version: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Wait for an update, give it to the engine, and answer. Returns the version that the engine has now.

    Raises:
        WeightUpdateError: it was not whole, or not of the version that was expected. The sender gets the reason too.
    """
    incoming = IncomingWeights(line, device, group)
    try:
        if expected_version not in (None, incoming.version):
            raise WeightUpdateError(
                f"version {incoming.version} of the weights came where version {expected_version} was due."
            )
        await engine.update_weights(incoming, incoming.version)
    except BaseException as error:
        line.refuse(str(error))
        raise
    finally:
        incoming.close()
    line.send("done", version=incoming.version)
    return incoming.version
