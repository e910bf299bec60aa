"""The headers by which a client asks for a placement and learns of it.

    in    X-Zero-Layer-Preference, x-kernel-hint, x-precision-preference, x-model-hint
          what matters in the choice of the engine (`dispatch.preference` has the values)
    in    x-zerolayer-explain: 1
    out   x-zerolayer-decision: the engine, its score, the runner-up, and why
    out   Retry-After on 429: seconds after which the same request may be let in

A header that cannot be understood is answered with 400 before anything of the request is read.
"""

import json
import math
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zerolayer.core.errors import ConfigError
from zerolayer.core.ids import engine_name
from zerolayer.dispatch.asked import Asked, asked
from zerolayer.dispatch.policies.base import Decision
from zerolayer.dispatch.preference import (
    KERNEL_HEADER,
    MODEL_HEADER,
    PRECISION_HEADER,
    PREFERENCE_HEADER,
    hints_from_headers,
)

EXPLAIN_HEADER = "x-zerolayer-explain"
DECISION_HEADER = "x-zerolayer-decision"
READ = frozenset({PREFERENCE_HEADER, KERNEL_HEADER, PRECISION_HEADER, MODEL_HEADER, EXPLAIN_HEADER})
#: A longer value of a header that we read is refused; no value that means something is.
VALUE_BYTES_MAX = 256
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no", "")


class PlacementHeaders:
    """ASGI middleware around an application; see the module's docstring."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        try:
            wishes = read_wishes(scope["headers"])
        except ConfigError as error:
            await _refusal(error)(scope, receive, send)
            return
        token = asked.set(wishes)
        try:
            await self._app(scope, receive, _Answer(send, wishes))
        finally:
            asked.reset(token)


class _Answer:
    """Sends a response, its headers completed.

    Of a stream the server sends the head before it asks for the engine: where the choice is to
    stand in the head, that is held until the first piece of the body is there.
    """

    def __init__(self, send: Send, wishes: Asked) -> None:
        self._send = send
        self._asked = wishes
        self._held: Message | None = None

    async def __call__(self, message: Message) -> None:
        """The next message of the response."""
        if message["type"] == "http.response.start":
            if self._asked.explain and self._asked.decision is None:
                self._held = message
                return
            message = _completed(message, self._asked)
        elif self._held is not None:
            head, self._held = self._held, None
            await self._send(_completed(head, self._asked))
        await self._send(message)


def read_wishes(headers: Iterable[tuple[bytes, bytes]]) -> Asked:
    """What a request's headers ask for. Raises `ConfigError` naming the header, its value and the
    values that are allowed."""
    found: dict[str, str] = {}
    for raw_name, raw in headers:
        name = raw_name.decode("latin-1").lower()
        if name not in READ:
            continue
        if len(raw) > VALUE_BYTES_MAX or name in found:
            wrong = f"{raw[:20].decode('latin-1')}..." if name not in found else "given twice"
            raise ConfigError(name, wrong, f"give it once, in at most {VALUE_BYTES_MAX} bytes")
        found[name] = raw.decode("latin-1")
    explain = found.pop(EXPLAIN_HEADER, "").strip().lower()
    if explain not in (*_YES, *_NO):
        raise ConfigError(EXPLAIN_HEADER, explain, "write one of: 1, 0")
    return Asked(hints_from_headers(found), explain=explain in _YES)


def decision_line(decision: Decision) -> str:
    """A decision in one line of visible ASCII."""
    second = "none" if decision.runner_up is None else engine_name(decision.runner_up)
    line = (
        f"engine={engine_name(decision.engine)}; score={decision.score:.4g}; "
        f"runner-up={second}; reason={decision.reason}"
    )
    parts = [f"{name}={value:.4g}" for name, value in (decision.parts or {}).items()]
    return "; ".join((line, *parts))


def _completed(head: Message, wishes: Asked) -> Message:
    """The head of a response with our headers behind its own."""
    more: list[tuple[bytes, bytes]] = []
    if wishes.explain and wishes.decision is not None:
        more.append((DECISION_HEADER.encode(), decision_line(wishes.decision).encode()))
    if wishes.retry_after_s is not None and head["status"] == 429:
        seconds = max(1, math.ceil(wishes.retry_after_s))
        more.append((b"retry-after", str(seconds).encode()))
    return {**head, "headers": [*head.get("headers", ()), *more]} if more else head


def _refusal(error: ConfigError) -> Response:
    """400 in the form that OpenAI's clients know."""
    body = {
        "error": {
            "message": str(error),
            "type": "BadRequestError",
            "param": error.field,
            "code": 400,
        }
    }
    return Response(json.dumps(body), status_code=400, media_type="application/json")
