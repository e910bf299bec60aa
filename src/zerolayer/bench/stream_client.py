"""An HTTP client that notes every token of a stream as it comes: id, time, text, ending, errors.

Nothing is raised for what a server does to a stream: a cut connection, an error event or silence
past the limit is a fact about the run and stands in its record.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import httpx
import msgspec

CONNECT_TIMEOUT_S = 10.0
#: Longest silence in a stream, and longest whole stream, before the client gives it up.
SILENCE_TIMEOUT_S = 120.0
STREAM_TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 2.0
"""Idle connections are used again for so long: servers close them after 5 s, and a request sent at
that moment, as after a pause of the whole machine, is lost."""
#: Characters of an error that are kept.
ERROR_CHARS_MAX = 500
#: Open connections of one client: more than any measurement here uses at a time.
CONNECTIONS_MAX = 1024

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class StreamRequest:
    """One request. `return_token_ids`, `stream` and usage are asked for by the client itself."""

    body: Mapping[str, Any]
    """OpenAI fields and vLLM's own (`ignore_eos`, `vllm_xargs`, ...), without `stream`."""
    kind: Literal["completions", "chat"] = "completions"
    leave_after_tokens: int | None = None
    """Close the connection on purpose once so many tokens came."""
    on_tokens: "Callable[[StreamRecord], None] | None" = None
    """Called after each chunk with tokens, on the event loop; must be quick."""


@dataclass
class ChoiceRecord:
    """One choice (`n` > 1 has several) of one answer."""

    token_ids: list[int] = field(default_factory=list)
    arrivals_ns: list[int] = field(default_factory=list)
    """CLOCK_MONOTONIC of the chunk that brought each token."""
    text: str = ""
    finish_reason: str | None = None


@dataclass
class StreamRecord:
    """Everything that came of one request."""

    sent_ns: int = 0
    response_id: str = ""
    http_status: int = 0
    choices: dict[int, ChoiceRecord] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    prompt_tokens: int | None = None
    errors: list[str] = field(default_factory=list)
    """Error events inside the stream, and what the server said with a status other than 200."""
    connection_error: str | None = None
    """How the transport failed, if it did."""
    done: bool = False
    """`[DONE]` came."""
    left: bool = False
    """The client closed it on purpose."""
    last_text: str = ""
    """Text of the newest chunk, for whoever shows the stream."""

    @property
    def first(self) -> ChoiceRecord:
        """The first choice; an empty one before anything came."""
        return self.choices.get(0) or ChoiceRecord()

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.first.token_ids

    @property
    def arrivals_ns(self) -> list[int]:
        """Arrival of each token of the first choice."""
        return self.first.arrivals_ns

    @property
    def tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def broken(self) -> bool:
        """Not ended by itself: an error, a cut, a missing finish reason or a missing `[DONE]`."""
        if self.left:
            return False
        ended = bool(self.choices) and all(c.finish_reason for c in self.choices.values())
        failed = bool(self.errors) or self.connection_error is not None
        return failed or not ended or not self.done

    @property
    def fault(self) -> str:
        """Why it is broken, in words; empty when it is not."""
        if not self.broken:
            return ""
        said = [*self.errors, *([self.connection_error] if self.connection_error else [])]
        return "; ".join(said) or f"ended silently after {self.tokens} tokens"

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from sending to the first token of the first choice."""
        return (self.arrivals_ns[0] - self.sent_ns) / 1e6 if self.arrivals_ns else None

    def take(self, data: str, now_ns: int) -> None:
        """Note one event's data."""
        if data.strip() == "[DONE]":
            self.done = True
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self.errors.append(f"not JSON: {data[:ERROR_CHARS_MAX]}")
            return
        if not isinstance(event, dict):
            self.errors.append(f"not an object: {data[:ERROR_CHARS_MAX]}")
        elif event.get("error"):
            self.errors.append(_error_text(event["error"]))
        else:
            self._take_chunk(event, now_ns)

    def _take_chunk(self, event: dict[str, Any], now_ns: int) -> None:
        self.response_id = self.response_id or event.get("id", "")
        self.usage = event.get("usage") or self.usage
        self.last_text = ""
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part.get("index", 0), ChoiceRecord())
            text = part.get("text") or (part.get("delta") or {}).get("content") or ""
            token_ids = part.get("token_ids") or []
            choice.text += text
            choice.token_ids += token_ids
            choice.arrivals_ns += [now_ns] * len(token_ids)
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            self.last_text += text


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:ERROR_CHARS_MAX]


def cold_salt() -> str:
    """A fresh `cache_salt`: no prefix cache can know the prompt.

    With a cached prefix the prefill has another shape, and vLLM does not promise the same bits
    for another shape; every run that is compared token by token is therefore cold.
    """
    return uuid.uuid4().hex


class StreamClient:
    """Many streams at a time against one server. Use it as an async context manager."""

    def __init__(
        self,
        base_url: str,
        model: str,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self.model = model
        self._clock_ns = clock_ns
        self._http = httpx.AsyncClient(
            base_url=base_url,
            transport=transport,
            timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=64,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
            trust_env=False,
        )

    async def __aenter__(self) -> "StreamClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def run(self, request: StreamRequest, record: StreamRecord | None = None) -> StreamRecord:
        """Send one request and read its stream to its end; `record` is filled while it runs."""
        record = StreamRecord() if record is None else record
        record.sent_ns = self._clock_ns()
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                async with self._opened(request) as response:
                    await self._read(response, request, record)
        except TimeoutError:
            record.connection_error = f"not finished after {STREAM_TIMEOUT_S:.0f} s"
        except httpx.HTTPError as error:
            record.connection_error = f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
        return record

    async def run_all(self, requests: Sequence[StreamRequest]) -> list[StreamRecord]:
        """Run requests side by side; records in their order."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run(request)) for request in requests]
        return [task.result() for task in tasks]

    async def status(self) -> dict[str, Any]:
        """`GET /zerolayer/status`. Raises `httpx.HTTPError`."""
        response = await self._http.get("/zerolayer/status", timeout=STATUS_TIMEOUT_S)
        response.raise_for_status()
        status: dict[str, Any] = response.json()
        return status

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises `httpx.HTTPError`."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        response = await self._http.post("/tokenize", json=body, timeout=STATUS_TIMEOUT_S)
        response.raise_for_status()
        return [int(token) for token in response.json()["tokens"]]

    @asynccontextmanager
    async def _opened(self, request: StreamRequest) -> AsyncIterator[httpx.Response]:
        body = {
            "model": self.model,
            **request.body,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        async with self._http.stream("POST", PATHS[request.kind], json=body) as response:
            yield response

    async def _read(
        self, response: httpx.Response, request: StreamRequest, record: StreamRecord
    ) -> None:
        record.http_status = response.status_code
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")
            record.errors.append(f"HTTP {response.status_code}: {said[:ERROR_CHARS_MAX]}")
            return
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            before = record.tokens
            record.take(line[5:].lstrip(), self._clock_ns())
            if record.tokens > before and request.on_tokens is not None:
                request.on_tokens(record)
            wanted = request.leave_after_tokens
            if wanted is not None and record.tokens >= wanted:
                record.left = True
                return
