"""Runs inside vLLM's processes, in its environment: what its own server lacks."""

import hmac
import os
from typing import Any


class RequireKey:
    """ASGI middleware: who does not have the key is answered 401, wherever he asks.

    vLLM itself asks for it only below /v1 and the like, and leaves calls to its workers open to anybody.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(shown, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


class TakeWeights:
    """Extension of vLLM's worker."""

    def take_weights_of(self, folder: str) -> None:
        """Load the weights of a model folder into the running model, all of it.

        On a CPU a layer computes with a packed copy of its weight. `reload_weights` packs anew what it has loaded, and
        a tied head is not among that: it would go on with the head of the start.
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        seen: set[int] = set()
        for layer in worker.model_runner.get_model().modules():
            weight = layer._parameters.get("weight")
            if weight is None:
                continue
            method = getattr(layer, "quant_method", None)
            if id(weight) in seen and hasattr(method, "process_weights_after_loading"):
                vars(layer).pop("_already_called_process_weights_after_loading", None)
                method.process_weights_after_loading(layer)
            seen.add(id(weight))
