import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from zerolayer.core.errors import ConfigError
from zerolayer.dispatch.asked import Asked, asked
from zerolayer.dispatch.policies.base import Decision, Preference
from zerolayer.gateway.placement import PlacementHeaders, decision_line, read_wishes

CHOSEN = Decision(1, 0.25, 0, "zerolayer", {"wait_s": 0.2, "util": 0.5})
LINE = b"engine=e1; score=0.25; runner-up=e0; reason=zerolayer; wait_s=0.2; util=0.5"


class Server:
    """An application that streams two pieces; a choice is made at `decides`."""

    def __init__(self, decides: str = "body", status: int = 200) -> None:
        self.decides, self.status = decides, status
        self.seen: list[Asked | None] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wishes = asked.get()
        self.seen.append(wishes)
        if self.decides == "start" and wishes is not None:
            wishes.decision = CHOSEN
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if self.decides == "body" and wishes is not None:
            wishes.decision = CHOSEN
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})


async def ask(server: Server, method: str = "POST", **headers: str) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": method, "headers": raw}
    await PlacementHeaders(server)(scope, receive, send)
    return sent


def head(sent: list[Message]) -> dict[bytes, bytes]:
    assert [m["type"] for m in sent][:1] == ["http.response.start"]
    return dict(sent[0]["headers"])


async def test_what_a_client_prefers_reaches_whoever_serves_it_and_nobody_after_it() -> None:
    server = Server()
    await ask(server, x_zero_layer_preference="Low_Latency", x_kernel_hint="aggressive")
    assert server.seen[0] is not None
    assert server.seen[0].hints.preference is Preference.LOW_LATENCY
    assert server.seen[0].hints.contiguous
    assert asked.get() is None


async def test_a_value_that_means_nothing_is_answered_with_400_and_asks_no_engine() -> None:
    server = Server()
    sent = await ask(server, x_zero_layer_preference="fastest")
    assert (sent[0]["status"], server.seen) == (400, [])
    error = json.loads(sent[1]["body"])["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "BadRequestError", "X-Zero-Layer-Preference", 400,
    )  # fmt: skip
    for word in ("fastest", "low-latency", "high-throughput", "cost-optimal"):
        assert word in error["message"]


@pytest.mark.parametrize("decides", ["start", "body"])
async def test_the_choice_stands_in_the_head_even_if_it_comes_after_it(decides: str) -> None:
    sent = await ask(Server(decides), x_zerolayer_explain="1")
    assert head(sent)[b"x-zerolayer-decision"] == LINE
    assert [m.get("body") for m in sent[1:]] == [b"a", b"b"]


async def test_without_the_wish_a_response_passes_as_the_very_same_messages() -> None:
    sent = await ask(Server("start"))
    assert head(sent) == {b"content-type": b"text/event-stream"}
    assert len(sent) == 3


async def test_a_request_that_chose_no_engine_has_no_such_header() -> None:
    sent = await ask(Server("never"), x_zerolayer_explain="1")
    assert b"x-zerolayer-decision" not in head(sent)


async def test_a_refusal_says_when_to_come_back_in_whole_seconds() -> None:
    class Refusing(Server):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            wishes = asked.get()
            assert wishes is not None
            wishes.retry_after_s = 2.1
            await super().__call__(scope, receive, send)

    assert head(await ask(Refusing(status=429)))[b"retry-after"] == b"3"
    assert b"retry-after" not in head(await ask(Refusing(status=200)))


async def test_reading_requests_are_left_alone() -> None:
    server = Server()
    sent = await ask(server, method="GET", x_zero_layer_preference="nonsense")
    assert (len(sent), server.seen) == (3, [None])


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-kernel-hint", b"a" * 257)],
        [(b"x-kernel-hint", b"aggressive"), (b"X-Kernel-Hint", b"balanced")],
        [(b"x-zerolayer-explain", b"perhaps")],
        [(b"x-precision-preference", b"fp13")],
        [(b"x-model-hint", b"")],
        [(b"x-kernel-hint", b"\xff\xfe")],
    ],
)
def test_headers_that_cannot_be_meant_are_refused_by_name(
    headers: list[tuple[bytes, bytes]],
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_wishes(headers)
    assert refused.value.field.lower() == headers[0][0].decode().lower()
    assert len(str(refused.value)) < 400


def test_a_line_is_visible_ascii_whatever_the_decision() -> None:
    lone = decision_line(Decision(0, float("inf"), None, "zerolayer:suspect:overload"))
    assert lone == "engine=e0; score=inf; runner-up=none; reason=zerolayer:suspect:overload"
    assert all(0x20 <= ord(c) < 0x7F for c in lone)


async def test_a_choice_made_inside_a_streams_generator_stands_in_its_head() -> None:
    async def events() -> AsyncIterator[bytes]:
        await asyncio.sleep(0)
        wishes = asked.get()
        assert wishes is not None
        wishes.decision = CHOSEN
        yield b"data: a\n\n"

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    async def in_between(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)  # it runs what is inside in a task of its own

    app = Starlette(
        routes=[Route("/v1", endpoint, methods=["POST"])],
        middleware=[
            Middleware(PlacementHeaders), Middleware(BaseHTTPMiddleware, dispatch=in_between),
        ],
    )  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h") as client:
        answer = await client.post("/v1", headers={"x-zerolayer-explain": "1"})
    assert answer.headers["x-zerolayer-decision"].encode() == LINE
    assert answer.text == "data: a\n\n"
