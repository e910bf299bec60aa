"""Waiting for what another process does, with a limit."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_EVERY_S = 0.02


def until(look: Callable[[], T | None], seconds: float) -> T:
    """The first true value of `look`; fails when there is none in time."""
    end = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(LOOK_EVERY_S)
    return value
