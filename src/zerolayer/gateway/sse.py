"""No event stream ends with `data: [DONE]` after a failure.

vLLM writes `[DONE]` at the end of every stream, also behind an error event, and clients that look
for nothing else take a broken answer for a whole one. This middleware lets everything through as
it comes; only behind an error event it takes the `[DONE]` line (and its empty line) out.
"""

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: An event whose object begins with an error; `"error": null` is none.
_ERROR = re.compile(rb'[\r\n]data: ?\{ ?"error" ?: ?[^ n]')
#: No match of `_ERROR` is longer; so much of the past is kept to see one that was cut in two.
_ERROR_BYTES_MAX = 24
_DONE = b"data:[DONE]"
#: A line that is held because it may become `data: [DONE]` is never longer.
_HELD_BYTES_MAX = 32


class DoneFilter:
    """One response's bytes, in order and cut anywhere. State: at most `_HELD_BYTES_MAX` bytes."""

    def __init__(self) -> None:
        self._failed = False
        self._past = b"\n"  # before an error: the last bytes that went through
        self._held = b""  # after an error: a started line that may become [DONE]
        self._inside_line = False  # the current line's beginning went through already
        self._drop_empty_line = False  # the [DONE] line was dropped, its end goes too

    def feed(self, body: bytes, *, last: bool = False) -> bytes:
        """What may go to the client of this piece; `last`: no more pieces come."""
        if self._failed:
            return self._filter(body, last)
        seen = self._past + body
        error = _ERROR.search(seen)
        if error is None:
            self._past = seen[-_ERROR_BYTES_MAX:]
            return body
        self._failed = self._inside_line = True
        rest = seen[error.end() :]
        return body[: len(body) - len(rest)] + self._filter(rest, last)

    def _filter(self, body: bytes, last: bool) -> bytes:
        lines = (self._held + body).split(b"\n")
        started = lines.pop()
        passed = [line + b"\n" for line in lines if self._passes(line)]
        self._held = b""
        if last or self._inside_line or not self._may_become_done(started):
            passed.append(b"" if last and self._is_done(started) else started)
            self._inside_line = self._inside_line or bool(started)
        else:
            self._held = started
        return b"".join(passed)

    def _passes(self, line: bytes) -> bool:
        """Whether a complete line (without its line feed) goes to the client."""
        inside, self._inside_line = self._inside_line, False
        drop_empty, self._drop_empty_line = self._drop_empty_line, False
        if inside:
            return True
        if self._is_done(line):
            self._drop_empty_line = True
            return False
        return not (drop_empty and line in (b"", b"\r"))

    def _is_done(self, line: bytes) -> bool:
        return not self._inside_line and _squeezed(line) == _DONE

    def _may_become_done(self, started: bytes) -> bool:
        if len(started) > _HELD_BYTES_MAX:
            return False
        return _DONE.startswith(_squeezed(started)) or started == b"\r"


def _squeezed(line: bytes) -> bytes:
    return line.rstrip(b"\r").replace(b" ", b"")


class NoDoneAfterError:
    """ASGI middleware around an application; see the module's docstring."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stream: DoneFilter | None = None

        async def send_filtered(message: Message) -> None:
            nonlocal stream
            if message["type"] == "http.response.start" and _is_event_stream(message):
                stream = DoneFilter()
            elif stream is not None and message["type"] == "http.response.body":
                last = not message.get("more_body", False)
                body = stream.feed(message.get("body", b""), last=last)
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, send_filtered)


def _is_event_stream(start: Message) -> bool:
    """Whether this is a plain event stream: one with a length or an encoding is left alone."""
    headers = {name.lower(): value for name, value in start.get("headers", ())}
    if b"content-length" in headers or b"content-encoding" in headers:
        return False
    kind: bytes = headers.get(b"content-type", b"")
    return kind.lower().startswith(b"text/event-stream")
