"""Every 50 ms, from the engines' boards: free KV, its longest run, snapshot traffic, token rate.

What a policy reads of it is in `FleetState`; this file turns counters into rates.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zerolayer.arena.board import CoreState, EngineBoard, WorkerState
from zerolayer.core.fleet_state import FleetState, MemoryReport

EVERY_NS = 50_000_000
#: Rates forget the past with this time constant: several samples long, and well below the horizon.
MEMORY_S = 1.0


@dataclass(slots=True)
class _Seen:
    """One engine's counters as of the last picture."""

    pid: int = 0
    at_ns: int = 0
    snapshot_bytes: int = 0
    tokens: int = 0
    bytes_per_s: float = 0.0
    tokens_per_s: float = 0.0


class MemoryPicture:
    """Keeps `FleetState` up to date with what boards say of memory and traffic."""

    def __init__(self, fleet: FleetState, boards: Sequence[EngineBoard]) -> None:
        """`boards`: one per slot; it may grow and shrink with the fleet."""
        self._fleet = fleet
        self._boards = boards
        self._seen: defaultdict[int, _Seen] = defaultdict(_Seen)
        self._tokens: Counter[int] = Counter()

    def generated(self, slot: int, tokens: int) -> None:
        """So many tokens of our streams came from this engine."""
        self._tokens[slot] += tokens

    def look(self, slot: int, core: CoreState, block_tokens: int, now_ns: int) -> None:
        """Take over a slot's board, if the last picture of it is 50 ms old or of another life."""
        seen = self._seen[slot]
        new_life = seen.pid != core.core_pid
        if not new_life and now_ns - seen.at_ns < EVERY_NS:
            return
        worker = self._boards[slot].read_worker(0) or WorkerState()
        moved = worker.saved_bytes + worker.loaded_bytes
        if not new_life:
            self._rates(seen, moved, self._tokens[slot], (now_ns - seen.at_ns) / 1e9)
        else:
            seen.pid, seen.bytes_per_s, seen.tokens_per_s = core.core_pid, 0.0, 0.0
        seen.at_ns, seen.snapshot_bytes, seen.tokens = now_ns, moved, self._tokens[slot]
        path = worker.path_bytes_per_s
        self._fleet.picture(
            slot,
            MemoryReport(
                free_tokens=core.free_blocks * block_tokens,
                free_run_tokens=core.longest_free_run * block_tokens,
                link_use=seen.bytes_per_s / path if path else 0.0,
                tokens_per_s=seen.tokens_per_s,
            ),
        )

    @staticmethod
    def _rates(seen: _Seen, moved: int, tokens: int, passed_s: float) -> None:
        """Exponential means; a counter that went back belongs to a worker that began anew."""
        share = passed_s / (passed_s + MEMORY_S)
        bytes_now = max(0, moved - seen.snapshot_bytes) / passed_s
        seen.bytes_per_s += share * (bytes_now - seen.bytes_per_s)
        tokens_now = (tokens - seen.tokens) / passed_s
        seen.tokens_per_s += share * (tokens_now - seen.tokens_per_s)
