"""Faults on this side of an engine's server, or while several things happen to it at once."""

import os
import resource

import pytest
from toy_engine import started

from xtuner.v1.rl.rollout.backends.server import OutOfFilesError


def test_a_process_that_may_open_no_more_files_knows_nothing_of_the_server(run):
    """Every request is a connection; a server that works is not ended for it."""

    async def scenario(engine):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = len(os.listdir("/proc/self/fd")) + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        try:
            tasks = await started(engine, 5)
            failed = [task.exception() for task in tasks if task.done()]
            assert 0 < len(failed) < 5 and all(isinstance(error, OutOfFilesError) for error in failed)
            with pytest.raises(OutOfFilesError, match=f"open files, with a limit of {room}; raise `ulimit"):
                await engine.health()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await engine.abort()
        assert {task.result().finish_reason for task in tasks if task.exception() is None} == {"abort"}
        assert await engine.health() and engine.starts == 1

    run(scenario)


def test_a_process_with_servers_may_open_as_many_files_as_it_is_allowed_to(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    async def scenario(engine):
        allowed = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard)

    try:
        run(scenario)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
