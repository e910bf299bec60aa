"""Routes by which an operator steers a running fleet.

POST /zerolayer/drain    {"engine": "e1", "may_wait": false}
POST /zerolayer/undrain  {"engine": "e1"}
POST /zerolayer/roll     {"vllm_args": ["--max-num-seqs", "8"], "may_wait": false}
POST /zerolayer/scale    {"engines": 3, "force": false}
POST /zerolayer/back     {"engine": "e1"}
GET  /zerolayer/operation   the newest operation: state, progress, result

An order is answered with 202 and the operation once it was checked, 400 when it is refused, 409
while another one runs. They end engines, so they are for this machine alone unless the operator
says otherwise: 403.
"""

import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from zerolayer.core.errors import ConfigError, ZeroLayerError

OPERATION_PATH = "/zerolayer/operation"
ORDER_PATHS = {kind: f"/zerolayer/{kind}" for kind in ("drain", "undrain", "roll", "scale", "back")}
BODY_BYTES_MAX = 64 << 10
WORDS_MAX = 256
WORD_CHARS_MAX = 4096

FIX_403 = (
    "this route ends engines and answers programs on its own machine alone; run the zerolayer "
    "command there, or start the server with --remote-admin behind a proxy that asks who it is"
)

Order = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Takes the checked fields of a body, begins the operation, returns it as JSON values."""


def operation_routes(
    orders: Mapping[str, Order],
    newest: Callable[[], dict[str, Any] | None],
    busy: type[ZeroLayerError],
    *,
    remote: bool = False,
) -> list[BaseRoute]:
    """Routes to put before vLLM's own.

    `orders`: by the names in `ORDER_PATHS`; they raise `busy` while another one runs and any other
    `ZeroLayerError` when they refuse. `remote`: answer everybody.
    """

    async def get_operation(request: Request) -> Response:
        operation = newest()
        if operation is None:
            return _said(404, "nothing was ordered yet")
        return JSONResponse(operation, headers={"cache-control": "no-store"})

    def post(kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not remote and not is_local(request):
                return _said(403, FIX_403)
            try:
                fields = checked_fields(kind, await _body(request))
                return JSONResponse(await orders[kind](fields), status_code=202)
            except busy as error:
                return _said(409, str(error))
            except ZeroLayerError as error:
                return _said(400, str(error))

        return endpoint

    return [
        Route(OPERATION_PATH, get_operation, methods=["GET"]),
        *(Route(path, post(kind), methods=["POST"]) for kind, path in ORDER_PATHS.items()),
    ]


def is_local(request: Request) -> bool:
    """Whether a program on this machine asks, and neither a proxy for somebody else nor a page in
    a browser, which may come from anywhere."""
    if any(name in request.headers for name in ("origin", "forwarded", "x-forwarded-for")):
        return False
    if request.client is None or not request.client.host:
        return True  # a Unix socket
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def checked_fields(kind: str, body: Any) -> dict[str, Any]:
    """The fields of an order with their types. Raises `ConfigError` for what does not belong."""
    if not isinstance(body, dict):
        raise ConfigError("body", type(body).__name__, "send a JSON object")
    known = _FIELDS[kind]
    for name in body:
        if name not in known:
            raise ConfigError(name, body[name], f"unknown; {kind} takes {', '.join(known)}")
    fields = {name: body.get(name, default) for name, default in known.items()}
    for name, value in fields.items():
        _check(name, value)
    return fields


_FIELDS: dict[str, dict[str, Any]] = {
    "drain": {"engine": None, "may_wait": False},
    "undrain": {"engine": None},
    "roll": {"vllm_args": [], "may_wait": False},
    "scale": {"engines": None, "force": False},
    "back": {"engine": None},
}


def _check(name: str, value: Any) -> None:
    if name in ("may_wait", "force"):
        if not isinstance(value, bool):
            raise ConfigError(name, value, "give true or false")
    elif name == "engine":
        if not isinstance(value, str) or len(value) > WORD_CHARS_MAX:
            raise ConfigError(name, value, 'name an engine, like "e1"')
    elif name == "engines":
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(name, value, "give a whole number")
    elif not _are_words(value):
        raise ConfigError(name, value, f"give a list of at most {WORDS_MAX} strings")


def _are_words(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > WORDS_MAX:
        return False
    return all(isinstance(word, str) and len(word) <= WORD_CHARS_MAX for word in value)


async def _body(request: Request) -> Any:
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > BODY_BYTES_MAX:
            raise ConfigError("body", f"over {BODY_BYTES_MAX} bytes", "send less")
    try:
        return json.loads(bytes(received) or b"{}")
    except ValueError as cause:
        raise ConfigError("body", bytes(received[:40]), "send a JSON object") from cause


def _said(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
