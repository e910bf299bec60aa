import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from zerolayer.gateway.sse import DoneFilter, NoDoneAfterError

TOKEN = (
    b'data: {"id": "c1", "choices": [{"delta": {"content": "data: [DONE] \\n {\\"error\\""}}]}\n\n'
)
ERROR = b'data: {"error": {"message": "no engine came back", "code": 503}}\n\n'
NO_ERROR = b'data: {"error": null, "id": "c1"}\n\n'
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

calm = st.lists(st.sampled_from([TOKEN, NO_ERROR, COMMENT]), max_size=6).map(b"".join)
after = st.lists(st.sampled_from([TOKEN, ERROR, COMMENT]), max_size=3).map(b"".join)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream in pieces; a cut named twice makes an empty piece."""
    at = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(at)]


def through(pieces: list[bytes]) -> bytes:
    done = DoneFilter()
    last = len(pieces) - 1
    return b"".join(done.feed(piece, last=i == last) for i, piece in enumerate(pieces))


cuts = st.lists(st.integers(0, 10_000), max_size=40)


@given(calm, cuts)
def test_a_stream_without_an_error_goes_through_as_it_is(before: bytes, at: list[int]) -> None:
    stream = before + DONE
    assert through(cut(stream, at)) == stream


@given(calm, cuts)
def test_before_an_error_no_byte_is_held_back(before: bytes, at: list[int]) -> None:
    done = DoneFilter()
    for piece in cut(before + DONE, at):
        assert done.feed(piece) == piece


@given(calm, after, cuts)
def test_behind_an_error_done_and_only_done_is_gone(
    before: bytes, behind: bytes, at: list[int]
) -> None:
    stream = before + ERROR + behind
    assert through(cut(stream + DONE, at)) == stream


@given(calm, after, cuts)
def test_behind_an_error_a_done_in_the_middle_is_gone_too(
    before: bytes, behind: bytes, at: list[int]
) -> None:
    assert through(cut(before + ERROR + DONE + behind, at)) == before + ERROR + behind


@given(calm, cuts, st.sampled_from([b"data: [DONE]", b"data:[DONE]\n", b"data: [DONE]\r\n\r\n"]))
def test_other_spellings_of_done_are_gone_too(before: bytes, at: list[int], done: bytes) -> None:
    assert through(cut(before + ERROR + done, at)) == before + ERROR


@given(st.binary(max_size=200), cuts)
def test_bytes_that_are_no_events_pass_even_behind_an_error(noise: bytes, at: list[int]) -> None:
    stream = ERROR + noise
    if b"DONE" not in noise:
        assert through(cut(stream, at)) == stream


@given(calm, after, cuts)
def test_what_is_held_is_always_less_than_one_line(
    before: bytes, behind: bytes, at: list[int]
) -> None:
    done, fed, given_out = DoneFilter(), 0, 0
    for piece in cut(before + ERROR + behind, at):
        fed += len(piece)
        given_out += len(done.feed(piece))
        assert fed - given_out <= len("data: [DONE]")


def run_app(start: Message, bodies: list[Message], scope_type: str = "http") -> list[Message]:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start)
        for body in bodies:
            await send(body)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(NoDoneAfterError(app)({"type": scope_type}, receive, send))
    return sent


def start(content_type: bytes, *more: tuple[bytes, bytes]) -> Message:
    headers = [(b"Content-Type", content_type), *more]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_the_middleware_takes_done_out_and_still_ends_the_response() -> None:
    sent = run_app(
        start(b"text/event-stream; charset=utf-8"),
        [body(TOKEN, more=True), body(ERROR + b"data: [D", more=True), body(b"ONE]\n\n", more=True),
         body(b"", more=False)],
    )  # fmt: skip
    assert b"".join(m["body"] for m in sent[1:]) == TOKEN + ERROR
    assert [m["more_body"] for m in sent[1:]] == [True, True, True, False]


def test_each_response_has_a_state_of_its_own() -> None:
    opening = start(b"text/event-stream")
    run_app(opening, [body(ERROR, more=False)])
    assert run_app(opening, [body(DONE, more=False)])[1]["body"] == DONE


@pytest.mark.parametrize(
    "opening",
    [
        start(b"application/json"),
        start(b"text/event-stream", (b"content-length", b"99")),
        start(b"text/event-stream", (b"content-encoding", b"gzip")),
    ],
)
def test_other_responses_pass_as_the_very_same_messages(opening: Message) -> None:
    messages: list[Any] = [body(ERROR + DONE, more=False)]
    sent = run_app(opening, messages)
    assert sent[1] is messages[0]


def test_what_is_not_http_is_not_looked_at() -> None:
    opening = {"type": "websocket.accept"}
    assert run_app(opening, [], scope_type="websocket") == [opening]
