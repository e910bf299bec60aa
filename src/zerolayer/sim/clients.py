"""What the clients of a run see: one row per request, and a digest of everything that happened."""

import struct
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from zerolayer.sim.results import REQUEST_ROW, Ending
from zerolayer.sim.sequence import SimOutput, SimRequest
from zerolayer.sim.traces import Trace

_EVENT = struct.Struct("<dcii")
_BUFFER_BYTES = 1 << 16


class EventLog:
    """A hash over the important events in their order: equal seeds give equal digests."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._buffer = bytearray()

    def note(self, at_s: float, what: bytes, engine: int, row: int) -> None:
        """An event: its time, one letter, an engine and a request (-1 for none)."""
        self._buffer += _EVENT.pack(at_s, what, engine, row)
        if len(self._buffer) > _BUFFER_BYTES:
            self._hash.update(self._buffer)
            self._buffer.clear()

    def digest(self) -> str:
        """The hash of everything up to now, in hex."""
        self._hash.update(self._buffer)
        self._buffer.clear()
        return self._hash.hexdigest()


class Clients:
    """Takes tokens as they come, and notes how long each client waited for them."""

    def __init__(self, trace: Trace, log: EventLog) -> None:
        count = len(trace)
        self._trace = trace
        self._log = log
        self._first_s = [-1.0] * count
        self._last_s = [0.0] * count
        self._worst_s = [0.0] * count
        self._ended = [False] * count
        self.rows: npt.NDArray[np.void] = np.zeros(count, dtype=REQUEST_ROW)
        self.rows["arrival_s"] = trace.arrival_s
        self.rows["prompt_tokens"] = trace.prompt_tokens
        self.rows["output_tokens"] = trace.output_tokens
        self.rows["ttft_s"] = self.rows["e2e_s"] = np.nan
        self.rows["ending"] = Ending.LOST
        self.left = count
        """Requests that have not ended."""

    def take(self, output: SimOutput) -> None:
        """Tokens reached the client of this request."""
        row, at_s = output.request.row, output.at_s
        gap_s = output.gap_s
        if gap_s < 0.0:
            if self._first_s[row] < 0.0:
                self._first_s[row] = at_s
                self._log.note(at_s, b"f", 0, row)
            else:
                gap_s = at_s - self._last_s[row]
        if gap_s > self._worst_s[row]:
            self._worst_s[row] = gap_s
        self._last_s[row] = at_s
        if output.finish_reason is not None:
            ending = Ending.BROKEN if output.request.broken else Ending.FINISHED
            self._end(output.request, ending, at_s)

    def lost(self, request: SimRequest, now: float) -> None:
        """The request was given up."""
        self._end(request, Ending.LOST, now)

    def _end(self, request: SimRequest, ending: Ending, now: float) -> None:
        row = request.row
        assert not self._ended[row], f"request {row} ends a second time"
        self._ended[row] = True
        self.left -= 1
        self._log.note(now, b"e", int(ending), row)
        record = self.rows[row]
        record["ending"], record["moves"], record["retries"] = (
            ending, request.moves, request.retries,
        )  # fmt: skip
        record["worst_gap_s"] = self._worst_s[row]
        arrived_s = float(self._trace.arrival_s[row])
        if self._first_s[row] >= 0.0:
            record["ttft_s"] = self._first_s[row] - arrived_s
        if ending is not Ending.LOST:
            record["e2e_s"] = now - arrived_s
