"""Whether training and rollout have room on a device at the same time."""

from xtuner.v1.utils import get_logger

MARGIN = 0.05
"""Share of the device that stays free: for libraries' own memory, and holes between blocks."""


def has_room(free: int, total: int, wanted: int, working: int, growth: float) -> bool:
    """Whether `wanted` bytes can be taken of `free` ones for good.

    working: bytes that the largest pack so far has needed beside weights and moments, which are held now though nobody
    uses them; growth: how many times as many rows a pack may have.
    """
    more = working * max(0.0, growth - 1)
    room = free - wanted - more >= MARGIN * total
    get_logger().debug(
        f"memory beside each other: {free / 2**30:.1f} GiB free, {wanted / 2**30:.1f} for the engine, "
        f"{more / 2**30:.1f} for longer packs: {'enough' if room else 'too little'}."
    )
    return room
