"""What every way of weights does with their buckets."""

from collections.abc import Iterable, Iterator

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.ops.bit_sums import bit_sums


def with_checksums(buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
    """The same buckets with the sums of their tensors' bits."""
    for bucket in buckets:
        bucket.checksums = bit_sums(list(bucket.tensors.values()), bucket.dtype)
        yield bucket


def exhaust(buckets: Iterator[WeightBucket]) -> None:
    """Iterate to the end, whoever else stopped: other ranks wait for this one to gather the rest."""
    for _ in buckets:
        pass
