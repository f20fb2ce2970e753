"""A reward service: JSON in, JSON out."""

import asyncio
import functools
import ssl
from typing import Any

import httpx

from .base import JudgeError

_RETRYABLE = {408, 429}
_MAX_DELAY_S = 8.0
_LOOPBACK = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""Never asked through a proxy."""


async def post_json(url: str, body: dict[str, Any], timeout: float, max_retries: int, retry_delay: float) -> Any:
    """POST `body` and return the JSON of the reply.

    Connection errors and the statuses 408, 429 and 5xx are tried again, up to `max_retries` times, after
    `retry_delay` seconds, doubled each time (at most 8 s).
    """
    # A client per sample: connections of a shared one belong to one event loop, and samples come from several.
    async with httpx.AsyncClient(timeout=timeout, verify=_ssl_context(), mounts=_LOOPBACK) as client:
        attempt = 0
        while True:
            try:
                response = await client.post(url, json=body)
                failure = f"HTTP {response.status_code}: {response.text[:200]}"
                again = response.status_code in _RETRYABLE or response.status_code >= 500
            except httpx.TransportError as error:
                failure, again = f"{type(error).__name__}: {error}", True
            else:
                if response.is_success:
                    return _json_of(response)
            attempt += 1
            if not again or attempt > max_retries:
                tries = f" after {attempt} tries" if attempt > 1 else ""
                raise JudgeError(f"reward service {_shown(url)}: {failure}{tries}")
            await asyncio.sleep(min(retry_delay * 2 ** (attempt - 1), _MAX_DELAY_S))


def _json_of(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise JudgeError(
            f"reward service {_shown(str(response.url))}: the reply is not JSON: {response.text[:200]!r}"
        ) from error


def _shown(url: str) -> str:
    """The URL without user, password and query, which may be secrets."""
    parts = httpx.URL(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.host}{port}{parts.path}"


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()
