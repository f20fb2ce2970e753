"""Real workers and a real controller whose engines answer by a script."""

import asyncio
import itertools

from xtuner.v1.data_proto import RolloutState
from xtuner.v1.rl.rollout.backends.base import GenerateOutput
from xtuner.v1.rl.rollout.controller import RolloutController
from xtuner.v1.rl.rollout.worker import RolloutConfig, RolloutWorker
from xtuner.v1.rl.utils import WorkerLostError

HANG = "hang"


class Letters:
    """A tokenizer: id n is a letter, id 0 a special token, id 30 the last three letters."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        special = {0: "" if skip_special_tokens else "<end>", 30: "xyz"}
        return "".join(special.get(i) if i in special else chr(96 + i) for i in ids)


def answer(request, ids=(8, 9, 0), **changes):
    output = GenerateOutput(request.request_id, list(ids), [-0.5] * len(ids), [3] * len(ids), "stop")
    for name, value in changes.items():
        setattr(output, name, value)
    return output


class ScriptedEngine:
    """`script(request, n)` is the answer to the n-th request (from 1), an exception to raise, or HANG."""

    def __init__(self, script):
        self.script, self.requests, self.waiting = script, [], {}
        self.cancelled, self.healthy = 0, True

    async def start(self):
        pass

    async def generate(self, request):
        self.requests.append(request)
        action = self.script(request, len(self.requests))
        await asyncio.sleep(0)
        if isinstance(action, Exception):
            raise action
        if action != HANG:
            return action
        future = self.waiting[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            del self.waiting[request.request_id]

    async def abort(self):
        for number, future in self.waiting.items():
            if not future.done():
                future.set_result(GenerateOutput(number, [1, 2], [-0.1, -0.2], [3, 3], "abort"))

    async def update_weights(self, buckets, version):
        await asyncio.sleep(0)

    async def health(self):
        return self.healthy if self.healthy != HANG else await asyncio.sleep(60)

    async def stop(self):
        pass


class ScriptedWorker(RolloutWorker):
    def __init__(self, script):
        super().__init__(CONFIG, 0, "cpu")
        self.script = script

    def build_engine(self):
        return ScriptedEngine(self.script)


class NamedHandle:
    """Finds its worker by name, so that a copy of it speaks to the same worker, as over a process border."""

    workers: dict = {}
    dead: set = set()

    def __init__(self, name):
        self.name = name

    async def call(self, method, *args, **kwargs):
        if self.name in self.dead:
            raise WorkerLostError(f"worker {self.name!r} died during {method}()")
        return await getattr(self.workers[self.name], method)(*args, **kwargs)


CONFIG = RolloutConfig(model_path="m", context_length=100, rollout_timeout=1.0)
NUMBERS = itertools.count()


async def setup(*scripts, **changes):
    """A started controller, and its engines."""
    names = [f"rollout_{next(NUMBERS)}" for _ in scripts]
    for name, script in zip(names, scripts, strict=True):
        NamedHandle.workers[name] = ScriptedWorker(script)
    config = CONFIG.model_copy(update=changes)
    controller = RolloutController(config, [NamedHandle(n) for n in names], names, Letters(), seed=42)
    await controller.start()
    return controller, [NamedHandle.workers[name].engine for name in names]


def state(number=1, **values):
    return RolloutState(message=[], prompt_ids=[5, 6, 7], rollout_id=number, **values)


def good(request, n):
    return answer(request)
