"""Runs inside vLLM's processes, in its environment: what its own server lacks."""

import hmac
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the server's front end needs none of it
    from xtuner_weights import Update


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


_AS_THEY_ARE = ("NoneType", "UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
"""Methods of layers that compute with the weights as they are loaded, on a GPU."""


class TakeWeights:
    """Extension of vLLM's worker. What takes weights returns what it was given."""

    def take_weights_of(self, folder: str) -> dict[str, str]:
        """Load the weights of a model folder into the running model, all of it."""
        self._reload(weights_path=folder)
        return {"folder": folder}

    def take_weights_from(self, address: str) -> dict[str, str]:
        """The same from the update that waits at this Unix socket."""
        from xtuner_weights import take_update

        worker: Any = self
        take_update(address, worker.device, self._load)
        return {"address": address}

    def sum_weights(self, modules: list[str]) -> dict[str, Any]:
        """See `xtuner_sums.describe`. A layer that keeps only a packed copy, as on a CPU, has no elements here."""
        from xtuner_sums import describe, inside

        worker: Any = self
        return describe(inside(worker.model_runner.get_model().named_parameters(), modules))

    def _load(self, update: "Update") -> None:
        worker: Any = self
        model = worker.model_runner.get_model()
        if worker.device.type == "cpu" or not all(map(_loads_in_place, model.modules())):
            # It keeps what it is given until a layer is whole, which may be after the next bucket.
            self._reload(weights_iterator=((name, t.clone()) for bucket in update for name, t in bucket))
            return
        missing = {name for name, _ in model.named_parameters()}
        for bucket in update:
            missing -= model.load_weights(bucket)
        if missing and not update.broken:
            raise RuntimeError(f"{len(missing)} parameters are not in the update: {', '.join(sorted(missing)[:5])}")

    def _reload(self, **source: Any) -> None:
        """Load, and compute anew what layers keep beside their weights.

        On a CPU a layer computes with a packed copy of its weight. `reload_weights` packs anew what it has loaded, and
        a tied head is not among that: it would go on with the head of the start.
        """
        worker: Any = self
        worker.reload_weights(**source)
        seen: set[int] = set()
        for layer in worker.model_runner.get_model().modules():
            weight = layer._parameters.get("weight")
            if weight is None:
                continue
            method: Any = getattr(layer, "quant_method", None)
            if id(weight) in seen and hasattr(method, "process_weights_after_loading"):
                vars(layer).pop("_already_called_process_weights_after_loading", None)
                method.process_weights_after_loading(layer)
            seen.add(id(weight))


def _loads_in_place(layer: Any) -> bool:
    """Whether new values of its parameters are all that a layer on a GPU needs."""
    method = type(getattr(layer, "quant_method", None)).__name__
    derives = hasattr(layer, "process_weights_after_loading") and type(layer).__name__ != "Attention"
    return method in _AS_THEY_ARE and not derives
