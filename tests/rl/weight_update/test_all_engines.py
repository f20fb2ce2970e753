"""What comes of an update that not all engines take."""

import asyncio

from xtuner.v1.rl.weight_update import EngineDownError, EngineLostError, WeightUpdateError, push_to_all


def run(*ends):
    """Pushes that end so, each after the seconds that come with it; and how many had ended."""
    ended = []

    async def push(seconds, error):
        await asyncio.sleep(seconds)
        ended.append(seconds)
        if error is not None:
            raise error

    try:
        return asyncio.run(push_to_all(push(*end) for end in ends)), len(ended)
    except Exception as error:
        return error, len(ended)


def test_a_lost_engine_is_why_others_gave_up_and_none_is_left_under_way():
    tired, lost = WeightUpdateError("no message came within 120 s"), EngineLostError("it hangs")
    assert run((0, tired), (0.05, lost), (0.1, None)) == (lost, 3)
    assert run((0, lost), (0.05, tired), (0.1, tired)) == (lost, 3)
    assert run((0, None), (0.05, tired), (0.1, None)) == (tired, 3)
    assert run((0, None), (0.05, None)) == (None, 2)


def test_engines_that_are_down_are_left_out_unless_all_are():
    one, other = EngineDownError("one"), EngineDownError("other")
    assert run((0, one), (0.05, None), (0.1, None)) == (None, 3)
    lost = EngineLostError("it died")
    assert run((0, one), (0.05, lost)) == (lost, 2)
    error, _ = run((0, one), (0, other))
    assert error in (one, other)


def test_what_is_no_engine_s_fault_ends_the_run_at_once():
    fault = RuntimeError("CUDA out of memory")
    assert run((0, None), (0.05, fault), (30, None)) == (fault, 2)
