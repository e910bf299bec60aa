"""Requests to a real server, faults struck while they run, and answers in a form that can be equal.

Two answers to the same request differ in ids, times and in how tokens are grouped into chunks.
`Answer.content` has none of these: deltas are joined per choice, ids and times are left out.
"""

import json
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from zerolayer.bench import chaos_signals
from zerolayer.bench.fleet_process import SERVED_NAME, FleetProcess
from zerolayer.bench.stream_client import cold_salt

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ANSWER_TIMEOUT_S = 120.0
#: How often a fault looks at the fleet while nothing of the answer can be seen, in seconds.
LOOK_EVERY_S = 0.01
#: What is another value in each answer, and says nothing about it.
OWN_TO_EACH = frozenset(
    {
        "id", "call_id", "item_id", "created", "created_at", "completed_at", "sequence_number",
        "kernel_dispatch_time_ms", "system_fingerprint",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request. Its prompt is unknown to every prefix cache unless `cached`."""

    path: str
    body: Mapping[str, Any]
    stream: bool = True
    cached: bool = False

    def but(self, **fields: Any) -> "Ask":
        """The same with other body fields."""
        return replace(self, body={**self.body, **fields})

    def sent(self) -> dict[str, Any]:
        """The body as it goes out."""
        body: dict[str, Any] = {"model": SERVED_NAME, "stream": self.stream, **self.body}
        if not self.cached:
            body["cache_salt"] = cold_salt()
        if self.path != RESPONSES:
            body["return_token_ids"] = True
            if self.stream:
                body["stream_options"] = {"include_usage": True}
        return body


@dataclass
class Fault:
    """Strikes the engine that computes the request once `after_tokens` of its tokens have come."""

    fleet: FleetProcess
    number: signal.Signals
    after_tokens: int
    victim: dict[str, Any] | None = None
    struck: bool = False
    _over: threading.Event = field(default_factory=threading.Event)

    def tokens_came(self, tokens: int) -> None:
        """So many tokens of the request are at the client."""
        if self.victim is None and tokens:
            self.aim(self.fleet.status())
        if tokens >= self.after_tokens:
            self.strike()

    def aim(self, status: dict[str, Any]) -> None:
        """Choose the engine that has the stream."""
        engine = chaos_signals.busiest_engine(status)
        if engine is not None:
            self.victim = chaos_signals.engine_row(status, engine)

    def strike(self) -> None:
        """Once."""
        if self.victim is not None and not self.struck:
            self.struck = True
            chaos_signals.send(self.victim, self.number)

    def watch(self, delivered_before: int) -> None:
        """Strike by what the fleet has delivered, for an answer that comes in one piece."""
        while not self._over.wait(LOOK_EVERY_S) and not self.struck:
            status = self.fleet.status()
            self.aim(status)
            if status["totals"]["tokens_delivered"] - delivered_before >= self.after_tokens:
                self.strike()

    def end(self) -> None:
        """Wake what was frozen."""
        self._over.set()
        if self.struck and self.victim is not None and self.number is signal.SIGSTOP:
            chaos_signals.send(self.victim, signal.SIGCONT)


@dataclass(frozen=True)
class Answer:
    """What came, joined and without what is another value each time."""

    content: dict[str, Any]
    errors: tuple[str, ...] = ()
    done: bool = True
    """A stream ended with its end mark; always true of an answer in one piece."""
    moves: tuple[dict[str, Any], ...] = ()
    """Moves that the fleet finished while it was answered."""

    @property
    def choices(self) -> dict[str, Any]:
        """By index, as text."""
        found: dict[str, Any] = self.content["choices"]
        return found

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return list(self.choices["0"]["token_ids"])

    @property
    def text(self) -> str:
        """Of the first choice."""
        return str(self.choices["0"].get("text") or self.choices["0"].get("content"))


def ask(fleet: FleetProcess, request: Ask, fault: Fault | None = None) -> Answer:
    """Send a request, strike `fault` under it, and read the answer to its end."""
    before = fleet.status()["totals"]
    try:
        with httpx.Client(
            base_url=fleet.base_url, timeout=ANSWER_TIMEOUT_S, trust_env=False
        ) as http:
            if request.stream:
                answer = _streamed(http, request, fault)
            else:
                answer = _whole(http, request, fault, before["tokens_delivered"])
    finally:
        if fault is not None:
            fault.end()
    status = fleet.status()
    moved = status["totals"]["moves"] - before["moves"]
    return replace(answer, moves=tuple(status["recent_moves"][-moved:] if moved else ()))


def _whole(http: httpx.Client, request: Ask, fault: Fault | None, delivered_before: int) -> Answer:
    watching = threading.Thread(target=fault.watch, args=(delivered_before,)) if fault else None
    if watching is not None:
        watching.start()
    response = http.post(request.path, json=request.sent())
    if watching is not None and fault is not None:
        fault.end()
        watching.join()
    if response.status_code != httpx.codes.OK:
        return Answer({}, (response.text,))
    body = response.json()
    choices = {str(c["index"]): {**c, **c.pop("message", {})} for c in body.pop("choices", [])}
    return Answer(without_own({**body, "choices": choices}))


def _streamed(http: httpx.Client, request: Ask, fault: Fault | None) -> Answer:
    joined = Joined()
    with http.stream("POST", request.path, json=request.sent()) as response:
        if response.status_code != httpx.codes.OK:
            return Answer({}, (response.read().decode(),))
        for line in response.iter_lines():
            if line.startswith("data:"):
                joined.take(line[5:].strip())
                if fault is not None:
                    fault.tokens_came(joined.tokens)
    return Answer(without_own(joined.content), tuple(joined.errors), joined.done)


class Joined:
    """The events of one stream, joined."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {"choices": {}}
        self.errors: list[str] = []
        self.tokens = 0
        self.done = False

    def take(self, data: str) -> None:
        """One event's data."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self.errors.append(json.dumps(event["error"]))
        elif "choices" in event:
            self._take_chunk(event)
        else:
            self._take_response_event(event)

    def _take_chunk(self, event: dict[str, Any]) -> None:
        self.content["usage"] = event.get("usage") or self.content.get("usage")
        for part in event["choices"]:
            delta = part.pop("delta", {})
            choice = self.content["choices"].setdefault(str(part["index"]), {})
            self.tokens += len(part.get("token_ids") or ())
            join(choice, {**{k: v for k, v in part.items() if k != "index"}, **delta})

    def _take_response_event(self, event: dict[str, Any]) -> None:
        """The responses API names its events, and repeats the whole answer in the last one."""
        kind = event["type"]
        if kind.endswith(".delta"):
            self.tokens += 1
            self.content["streamed"] = self.content.get("streamed", "") + event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            self.done = True
            self.content["response"] = event["response"]
        elif kind == "response.failed":
            self.errors.append(json.dumps(event["response"]))


def join(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta to what came before: texts and lists grow, tool calls by their index."""
    for key, value in delta.items():
        if value is None:
            continue
        if key == "tool_calls":
            calls = whole.setdefault(key, {})
            for call in value:
                join(calls.setdefault(str(call.pop("index")), {}), call)
        elif isinstance(value, dict):
            join(whole.setdefault(key, {}), value)
        elif isinstance(value, str) and key in _GROWING:
            whole[key] = whole.get(key, "") + value
        elif isinstance(value, list):
            whole[key] = whole.get(key, []) + value
        else:
            whole[key] = value


_GROWING = frozenset({"text", "content", "arguments", "reasoning", "reasoning_content"})


def without_own(value: Any) -> Any:
    """A JSON value without ids and times."""
    if isinstance(value, dict):
        return {k: without_own(v) for k, v in value.items() if k not in OWN_TO_EACH}
    if isinstance(value, list):
        return [without_own(item) for item in value]
    return value
