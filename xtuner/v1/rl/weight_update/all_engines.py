"""One update for all engines, each from the rank that it lives with."""

import asyncio
from collections.abc import Awaitable, Iterable

from .inventory import EngineDownError, EngineLostError, WeightUpdateError


async def push_to_all(pushes: Iterable[Awaitable[None]]) -> EngineLostError | None:
    """Wait for the updates of all engines. Of one that was lost on the way, what became of it: all need the update
    again. Engines that are down are left out.

    Raises:
        What a push raised: an error that is no engine's at once; a WeightUpdateError where no engine was lost, since
        engines may also give up because they had to wait for a lost one; EngineDownError if no engine has the weights.
    """
    pending = {asyncio.ensure_future(push) for push in pushes}
    count, errors = len(pending), list[BaseException]()
    while pending:  # gathering is collective: what becomes of one engine leaves nothing under way
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        errors += [error for push in ended if (error := push.exception())]
        for error in errors:
            if not isinstance(error, (WeightUpdateError, EngineDownError)):
                raise error
    for error in errors:
        if isinstance(error, EngineLostError):
            return error
    down = [error for error in errors if isinstance(error, EngineDownError)]
    for error in errors:
        if error not in down or len(down) == count:
            raise error
    return None
