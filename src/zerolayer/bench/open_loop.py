"""Requests that come at fixed times, however long answers take, and what the fleet says meanwhile.

An open loop, because a closed one sends less to a fleet that is slow and so hides that it is.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from zerolayer.bench.prompts import prompt_of
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt
from zerolayer.core.errors import EngineError

POOL_EXTRA_TOKENS = 1000
"""Tokens of the text that prompts are cut from, beyond the longest prompt."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    """Seconds after the begin."""
    prompt_tokens: int
    output_tokens: int


async def requests_of(
    client: StreamClient, arrivals: Sequence[Arrival], seed: int
) -> list[StreamRequest]:
    """The request of each arrival: exact lengths, and no prefix that a cache could know.

    Raises `httpx.HTTPError`.
    """
    rng = Random(f"{seed}/prompts")
    longest = max(arrival.prompt_tokens for arrival in arrivals)
    text = await prompt_of(client.tokenize, rng, longest + POOL_EXTRA_TOKENS)
    return [_request(text, arrival, rng) for arrival in arrivals]


def _request(text: list[int], arrival: Arrival, rng: Random) -> StreamRequest:
    begin = rng.randrange(len(text) - arrival.prompt_tokens + 1)
    return StreamRequest(
        {
            "prompt": text[begin : begin + arrival.prompt_tokens],
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": cold_salt(),
        }
    )


async def play(
    client: StreamClient, arrivals: Sequence[Arrival], requests: Sequence[StreamRequest]
) -> list[StreamRecord]:
    """Send each request at its time, from now on; their records once all have ended."""
    begin_ns = time.monotonic_ns()
    tasks: list[asyncio.Task[StreamRecord]] = []
    async with asyncio.TaskGroup() as group:
        for arrival, request in zip(arrivals, requests, strict=True):
            wait_s = arrival.at_s - (time.monotonic_ns() - begin_ns) / 1e9
            await asyncio.sleep(max(0.0, wait_s))
            tasks.append(group.create_task(client.run(request)))
    return [task.result() for task in tasks]


@asynccontextmanager
async def watched(
    client: StreamClient, every_s: float, take: Callable[[int, dict[str, Any]], None]
) -> AsyncIterator[None]:
    """Inside, `take` gets the fleet's status so often, with CLOCK_MONOTONIC of each.

    Raises EngineError where the status does not come: at once, whatever runs inside.
    """

    async def look() -> None:
        while True:
            try:
                status = await client.status()
            except httpx.HTTPError as cause:
                why = str(cause) or type(cause).__name__
                raise EngineError(f"the fleet does not say how it is: {why}") from cause
            take(time.monotonic_ns(), status)
            await asyncio.sleep(every_s)

    try:
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(look())
            try:
                yield
            finally:
                looking.cancel()
    except ExceptionGroup as several:
        silent = several.subgroup(EngineError)
        if silent is None:
            raise
        raise silent.exceptions[0] from several
