import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from xtuner.v1.data_proto import RolloutState, Status


@pytest.fixture
def sample() -> Callable[..., RolloutState]:
    """A completed sample; keywords override its fields, `label` its ground truth."""

    def make(response: str | None = "#### 4", label: Any = "4", **fields: Any) -> RolloutState:
        reward_model = {"style": "rule", "ground_truth": label}
        state = {"message": [{"role": "user", "content": "2+2?"}], "status": Status.COMPLETED}
        return RolloutState(**{**state, "response": response, "reward_model": reward_model, **fields})

    return make


class Service:
    """A real HTTP server: `replies` are given in turn (the last one again and again) as (status, body)."""

    def __init__(self, *replies: tuple[int, Any]):
        self.replies, self.requests = list(replies), []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                service.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                replies = service.replies
                status, body = replies.pop(0) if len(replies) > 1 else replies[0]
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/reward"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def start(*replies: tuple[int, Any]) -> Service:
        started.append(Service(*replies))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()
