"""Says when the serving process itself stood still: then no engine is at fault.

Every stream passes through one event loop. What holds it up for seconds (a call that blocks, a box
that was paused) is felt by all clients at once and leaves no trace of its own. So the fleet's log
says for how long it was, and while it lasts the stacks of all threads go to the error output.
"""

import faulthandler
from collections.abc import Callable

NOTED_S = 1.0
"""A standstill of so long is in the fleet's log."""
STACKS_AFTER_S = 5.0
"""A standstill of so long shows what every thread is doing."""
ARM_EVERY_S = 1.0
STDERR = 2


class Standstill:
    """Call `tick` at least every `NOTED_S` from the event loop, and `end` when it stops."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` takes a line for people."""
        self._note = note
        self._last_ns = self._armed_ns = 0

    def tick(self, now_ns: int) -> None:
        """The loop runs; `now_ns` is CLOCK_MONOTONIC in ns."""
        still_s = (now_ns - self._last_ns) / 1e9 if self._last_ns else 0.0
        self._last_ns = now_ns
        if still_s >= NOTED_S:
            self._note(f"this process stood still for {still_s:.1f} s")
        if now_ns - self._armed_ns >= ARM_EVERY_S * 1e9:
            self._armed_ns = now_ns
            faulthandler.dump_traceback_later(STACKS_AFTER_S, file=STDERR)

    def end(self) -> None:
        """The loop ends; a silence means nothing any more."""
        faulthandler.cancel_dump_traceback_later()
