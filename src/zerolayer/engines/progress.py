"""An engine core's part of its board: when its current step began and what it computes."""

import os
import time
from pathlib import Path
from typing import Any

from zerolayer.arena.board import CoreState, EngineBoard
from zerolayer.engines.free_map import FreeMap
from zerolayer.engines.settings import ConnectorSettings

#: While steps follow each other, the longest free run is looked for this often at most.
PICTURE_EVERY_NS = 50_000_000


class ProgressBoard:
    """Follows the scheduler and writes one record at the start and the end of each step."""

    def __init__(self, settings: ConnectorSettings) -> None:
        self._board = EngineBoard.open_writer(Path(settings.board))
        self._incarnation = settings.incarnation
        self._pid = os.getpid()
        self._blocks: FreeMap | None = None
        self._run, self._run_changes, self._run_ns = 0, -1, 0  # longest run, as of then
        self._requests: set[str] = set()
        self._step_seq = 0
        self._state = CoreState(incarnation=self._incarnation, core_pid=self._pid)
        self._board.write_core(self._state)

    def bind_blocks(self, pool: Any) -> None:
        """vLLM's `BlockPool`."""
        self._blocks = FreeMap(pool, self._blocks_freed)
        self._write_idle(0)

    def added(self, request: Any) -> None:
        """A request entered the engine."""
        self._requests.add(request.request_id)

    def removed(self, request: Any) -> None:
        """A request left the engine; without one the engine takes no step that would say so."""
        self._requests.discard(request.request_id)
        if self._state.step_started_ns == 0:
            self._write_idle(self._state.step_ended_ns)

    def step_started(self, scheduled: Any) -> None:
        """The step in this `SchedulerOutput` begins now; one without tokens is not a step."""
        if scheduled.total_num_scheduled_tokens == 0:
            return
        counts, now_ns = scheduled.num_scheduled_tokens, time.monotonic_ns()
        decodes = sum(1 for count in counts.values() if count == 1)
        context = sum(scheduled.scheduled_cached_reqs.num_computed_tokens)
        context += sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        self._step_seq += 1
        self._state = CoreState(
            incarnation=self._incarnation,
            core_pid=self._pid,
            step_seq=self._step_seq,
            step_started_ns=now_ns,
            step_ended_ns=self._state.step_ended_ns,
            prefill_tokens=scheduled.total_num_scheduled_tokens - decodes,
            decode_requests=decodes,
            context_tokens=context,
            running_requests=len(counts),
            waiting_requests=max(0, len(self._requests) - len(counts)),
            free_blocks=self._blocks.free_blocks if self._blocks else 0,
            total_blocks=self._blocks.total_blocks if self._blocks else 0,
            longest_free_run=self._longest_run(now_ns),
        )
        self._board.write_core(self._state)

    def step_ended(self) -> None:
        """The step's output is there: idle until the next one."""
        if self._state.step_started_ns:
            self._write_idle(time.monotonic_ns())

    def _write_idle(self, step_ended_ns: int) -> None:
        state, requests = self._state, len(self._requests)
        running = min(state.running_requests, requests)
        self._state = CoreState(
            incarnation=state.incarnation,
            core_pid=state.core_pid,
            step_seq=state.step_seq,
            step_ended_ns=step_ended_ns,
            prefill_tokens=state.prefill_tokens,
            decode_requests=state.decode_requests,
            context_tokens=state.context_tokens,
            running_requests=running,
            waiting_requests=requests - running,
            free_blocks=self._blocks.free_blocks if self._blocks else 0,
            total_blocks=self._blocks.total_blocks if self._blocks else 0,
            longest_free_run=self._longest_run(time.monotonic_ns() if requests else None),
        )
        self._board.write_core(self._state)

    def _blocks_freed(self) -> None:
        """Blocks of an ended request come back after it left: an idle engine writes no more."""
        if self._state.step_started_ns == 0:
            self._write_idle(self._state.step_ended_ns)

    def _longest_run(self, now_ns: int | None = None) -> int:
        """The longest run of free blocks, not older than `PICTURE_EVERY_NS`; without a time it is
        that of this moment (nothing may be written for long after it)."""
        blocks = self._blocks
        if blocks is None:
            return 0
        stale = now_ns is None or now_ns - self._run_ns >= PICTURE_EVERY_NS
        if stale and blocks.changes != self._run_changes:
            self._run, self._run_changes = blocks.longest_run(), blocks.changes
            self._run_ns = now_ns or time.monotonic_ns()
        return min(self._run, blocks.free_blocks)
