"""When engine and trainer may keep their memory in each other's phases."""

import pytest

from xtuner.v1.rl.trainer.room import MARGIN, has_room

GIB = 2**30
TOTAL = 140 * GIB


@pytest.mark.parametrize(
    "free, wanted, working, growth, room",
    [
        (100, 50, 30, 1.0, True),
        (100, 50, 30, 2.0, True),  # packs may become twice as long: 30 more
        (100, 50, 30, 2.5, False),
        (100, 50, 30, 0.5, True),  # one sample longer than a pack is no reason to expect less than now
        (50 + MARGIN * 140 + 0.1, 50, 0, 1.0, True),
        (50 + MARGIN * 140 - 0.1, 50, 0, 1.0, False),
        (49, 50, 0, 1.0, False),
    ],
)
def test_room_is_what_is_free_less_the_engine_longer_packs_and_a_margin(free, wanted, working, growth, room):
    assert has_room(int(free * GIB), TOTAL, wanted * GIB, working * GIB, growth) is room
