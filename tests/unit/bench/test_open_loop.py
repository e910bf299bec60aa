import asyncio
from typing import Any

import httpx
import pytest

from zerolayer.bench.open_loop import watched
from zerolayer.core.errors import EngineError


class Fleet:
    """Says how it is `times`, then no more."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def status(self) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise httpx.ReadTimeout("")
        return {"left": self.left}


async def test_looks_end_with_what_they_watch() -> None:
    seen: list[int] = []
    enough = asyncio.Event()

    def take(_at_ns: int, status: dict[str, Any]) -> None:
        seen.append(status["left"])
        if len(seen) == 3:
            enough.set()

    async with watched(Fleet(10), 0.001, take):  # type: ignore[arg-type]
        await enough.wait()
    looks = len(seen)
    await asyncio.sleep(0.01)
    assert seen[:3] == [9, 8, 7]
    assert len(seen) == looks


async def test_a_fleet_that_says_nothing_ends_the_run_with_one_sentence() -> None:
    with pytest.raises(EngineError, match="does not say how it is: ReadTimeout"):
        async with watched(Fleet(2), 0.001, lambda *_: None):  # type: ignore[arg-type]
            await asyncio.sleep(60.0)


async def test_errors_of_what_is_watched_are_its_own() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with watched(Fleet(10), 0.001, lambda *_: None):  # type: ignore[arg-type]
            raise ValueError("mine")
    assert failed.group_contains(ValueError, match="mine")
