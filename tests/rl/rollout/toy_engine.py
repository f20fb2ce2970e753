"""An engine with a small program in its server's place."""

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from xtuner.v1.data_proto import SampleParams, WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.rl.rollout.backends.base import GenerateOutput, GenerateRequest
from xtuner.v1.rl.rollout.backends.carriers import FolderCarrier
from xtuner.v1.rl.rollout.backends.served import ServedEngine

PROGRAM = r"""
import http.server, json, sys, threading
weights, asleep, aborted, broken, at_work = 0, set(), threading.Event(), "nothing", set()
class Handler(http.server.BaseHTTPRequestHandler):
    def say(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.say(200, {"asleep": sorted(asleep), "at_work": len(at_work)})
    def do_POST(self):
        global weights, broken
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path.startswith(broken):
            self.say(500, "Internal Server Error")
        elif self.path == "/generate":
            at_work.add(self)
            ended = body["slow"] and aborted.wait(60)
            at_work.discard(self)
            self.say(200, {"token": weights, "reason": "abort" if ended else "stop"})
        elif self.path == "/load":
            if body["version"] == 13:
                return self.say(500, "no room for 13")
            weights = body["version"]
            self.say(200, None)
        else:
            if self.path == "/break":
                broken = body
            if self.path == "/abort":
                aborted.set()
            if self.path == "/release":
                asleep.update(body)
            if self.path == "/resume":
                asleep.difference_update(body)
            self.say(200, None)
    def log_message(self, *args):
        pass
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Engine(ServedEngine):
    """The server's token is the version of the weights that it has."""

    name = "toy"
    own_path = "/"
    call_s = 30.0

    def command(self, port):
        return ["-c", PROGRAM, str(port)]

    def environment(self, key):
        return {}

    async def ask(self, request):
        body = {"slow": request.params.max_tokens > 1}
        answer = await self.server.post("/generate", body, timeout=self.config.rollout_timeout)
        return GenerateOutput(request.request_id, [answer["token"]], [0.0], [], answer["reason"])

    async def post(self, path, body=None):
        await self.server.post(path, body, timeout=self.call_s)

    async def abort_all(self):
        await self.post("/abort")

    def new_carrier(self):
        return FolderCarrier(self)

    async def load(self, folder, version):
        await self.post("/load", {"version": version})

    async def flush(self):
        return True

    async def release(self, tags):
        await self.post("/release", sorted(tags))

    async def resume(self, tags):
        await self.post("/resume", sorted(tags))

    # ---- for the tests ----

    @property
    def process(self) -> int:
        """The server's."""
        (child,) = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        return int(child)

    def says(self) -> dict[str, Any]:
        """The server: what is asleep, how many requests are at work."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/") as answer:
            return json.load(answer)

    def hang(self) -> None:
        os.kill(self.process, signal.SIGSTOP)

    async def update(self, version: int) -> None:
        await self.update_weights([WeightBucket(dict(iter_hf_tensors(self.model_path)))], version)

    async def token(self) -> tuple[int, list[int]]:
        output = await self.generate(request(0))
        assert output.error is None, output.error
        return output.token_ids[0], output.weight_versions


def request(number: int, slow: bool = False) -> GenerateRequest:
    return GenerateRequest(number, [5], SampleParams(max_tokens=2 if slow else 1), 0)


async def started(engine: Engine, count: int = 3) -> "list[asyncio.Future[GenerateOutput]]":
    """Requests that are at work in the server."""
    tasks = [asyncio.ensure_future(engine.generate(request(i, slow=True))) for i in range(count)]
    async with asyncio.timeout(30):
        while (await asyncio.to_thread(engine.says))["at_work"] < count:
            await asyncio.sleep(0.01)
    return tasks
