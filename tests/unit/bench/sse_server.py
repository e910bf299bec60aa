"""A small HTTP server that plays one prepared event stream, and can break it off."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """What the server answers, whatever is asked."""

    events: Sequence[str] = ()
    """Data of each event; one TCP write each."""
    status: str = "200 OK"
    cut: bool = False
    """Close the connection in mid-answer, without the last chunk."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests that came."""
    left_early: int = 0
    """Clients that closed while there was more to send."""
    gate: asyncio.Event | None = None
    """Waited for before the last event."""
    expected: int = 0
    all_came: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `expected` requests came."""


def chunk(token: int, text: str = "", **more: Any) -> str:
    """One completion chunk with one token."""
    choice = {"index": 0, "text": text, "token_ids": [token], "finish_reason": None, **more}
    return json.dumps({"id": "cmpl-1", "choices": [choice]})


def answer(tokens: Sequence[int]) -> list[str]:
    """A whole stream: each token, the last with its finish reason, usage, [DONE]."""
    events = [chunk(token, f" {token}") for token in tokens[:-1]]
    events.append(chunk(tokens[-1], f" {tokens[-1]}", finish_reason="length"))
    usage = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
    events.append(json.dumps({"id": "cmpl-1", "choices": [], "usage": usage}))
    return [*events, "[DONE]"]


@asynccontextmanager
async def sse_server(script: Script) -> AsyncIterator[str]:
    """The server's URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(reader, writer, script)
        except (ConnectionError, asyncio.IncompleteReadError):
            script.left_early += 1
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Script
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    script.bodies.append(json.loads(await reader.readexactly(length)))
    if len(script.bodies) == script.expected:
        script.all_came.set()
    writer.write(
        f"HTTP/1.1 {script.status}\r\ncontent-type: text/event-stream\r\n"
        "transfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    )
    for number, event in enumerate(script.events):
        if script.gate is not None and number == len(script.events) - 1:
            await script.gate.wait()
        data = f"data: {event}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
    if not script.cut:
        writer.write(b"0\r\n\r\n")
        await writer.drain()
