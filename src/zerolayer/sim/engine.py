"""A model of one vLLM engine: continuous batching, chunked prefill, KV memory, preemption, prefix
cache (vLLM V1 `core/sched/scheduler.py`).

Work per step does not grow with the batch. A decoding stream is known by the step that gave its
first token and the step that gives its last; a step changes two sums (streams, context tokens).
While only decoding happens, the steps until the next finisher are one event, a *stretch*: its step
times grow linearly with the context, so that any moment in it can be found in closed form.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, sqrt

from zerolayer.sim.gaps import LongestSince
from zerolayer.sim.noise import StepNoise
from zerolayer.sim.prefix_cache import KvMemory
from zerolayer.sim.profiles import RESTORE_S, EngineProfile
from zerolayer.sim.sequence import Seq, SimOutput

BLOCK_SLACK_TOKENS = 8
"""Half of vLLM's 16-token block: what the last block of a stream wastes on average."""
FLUSH_TOKENS_MIN = 32
FLUSH_SHARE = 8
"""A decoding stream hands out its tokens when they are an eighth of its context, at least
FLUSH_TOKENS_MIN: they are only counted, so that sooner would change nothing but the work."""
LENGTH = "length"


class SimEngine:
    """One engine. Times are seconds of virtual time. What streams get lies in `outbox`."""

    def __init__(self, slot: int, profile: EngineProfile, kv: KvMemory, noise: StepNoise) -> None:
        self.slot = slot
        self.profile = profile
        self.kv = kv
        self.prefill_slow = 1.0
        """Its prefill takes this many times the nominal time."""
        self.decode_slow = 1.0
        self.dead = False
        self.frozen_until = 0.0
        self.busy = False
        self.end_s = inf
        """End of the running stretch; inf when there is none or it hangs."""
        self.version = 0
        """Rises whenever `end_s` changes: an event of an older version is void."""
        self.outbox: list[SimOutput] = []
        self.step = 0
        self.decodes = 0
        self.context = 0
        """Context tokens of the decoding streams together."""
        self.running: dict[str, Seq] = {}
        """Admitted streams in the order of admission."""
        self.waiting: deque[Seq] = deque()
        self.work = (0, 0, 0)
        """Prefill tokens, decoding streams and context tokens of the running step."""
        self.last_step_s = 0.0
        """Mean seconds of the steps that ended last; `last_work` is what they did."""
        self.last_work = (0, 0, 0)
        self.steps = 0
        self.preemptions = 0
        self.generated = 0
        """Tokens that streams got from here."""
        self.token_gaps: list[tuple[int, float]] | None = None
        """Where it is a list, gaps between tokens are noted in it: how many, seconds of each."""
        self.hit_tokens = 0
        self.computed_tokens = 0
        self.restored_tokens = 0
        self._noise = noise
        self._prefilling: list[Seq] = []
        self._aborts: list[str] = []
        self._due: list[tuple[int, int, Seq]] = []
        self._gaps = LongestSince()
        self._order = 0
        self._chunks: list[tuple[Seq, int]] = []
        self._planned = 0
        self._began_s = 0.0
        self._first_s = 0.0
        self._rise_s = 0.0
        self._stall_s = 0.0
        self._stream_s = 0.0

    # -- from outside -----------------------------------------------------------------------------

    def submit(self, seq: Seq, now: float) -> None:
        """Put a stream into the queue. A dead engine loses it in silence, as a socket does."""
        if self.dead:
            return
        if seq.first:
            self.waiting.appendleft(seq)
        else:
            self.waiting.append(seq)
        if not self.busy:
            self.start(now)
        elif (
            seq.first or len(self.waiting) == 1
        ):  # behind others it could not be admitted now either
            self._cut(now)

    def abort(self, request_ids: Sequence[str], now: float) -> None:
        """Take streams out, when the running step has ended."""
        self._aborts.extend(request_ids)
        if self.busy:
            self._cut(now)
        else:
            self._take_aborts()

    def freeze(self, now: float, seconds: float) -> None:
        """Nothing happens for so long; inf for ever. The running step ends that much later."""
        self.frozen_until = max(self.frozen_until, now + seconds)
        if self.busy:
            self._cut(now)
            self._stall_s += seconds
            self._set_end(self.end_s + seconds)

    def set_speed(self, now: float, prefill_slow: float, decode_slow: float) -> None:
        """Steps from the next on take that many times the nominal time."""
        self.prefill_slow, self.decode_slow = prefill_slow, decode_slow
        if self.busy:
            self._cut(now)

    def let_go(self, now: float) -> None:
        """Hand out everything that was generated up to now, and note what snapshots hold."""
        self._settle(now)
        for seq in self.running.values():
            if not seq.alive:
                continue
            request = seq.request
            if seq.decoding:
                self._flush(seq, self._began_s if self.busy else now)
                request.committed = seq.base + self.step - seq.joined
            else:
                request.committed = max(request.committed, seq.done)

    def die(self) -> None:
        """The process is gone, and everything in it."""
        self.kv.clear()
        self.running.clear()
        self.waiting.clear()
        self._prefilling.clear()
        self._aborts.clear()
        self._due.clear()
        self._chunks.clear()
        self._gaps.clear()
        self.outbox.clear()
        self.decodes = self.context = 0
        self.work = (0, 0, 0)
        self.dead, self.busy = True, False
        self._set_end(inf)

    def revive(self) -> None:
        """A new process serves."""
        self.dead = False
        self.frozen_until = 0.0

    def stream_seconds(self, now: float) -> float:
        """Integral of the number of decoding streams over time."""
        since = now - self._began_s if self.busy else 0.0
        return self._stream_s + self.decodes * since

    def late_s(self, now: float) -> float:
        """Seconds since the running step began; 0 when idle. Exact for steps that stand alone."""
        return now - self._began_s if self.busy and self._planned == 1 else 0.0

    # -- steps ------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin the next step or stretch, if there is work and nothing is in the way."""
        if self.busy or self.dead or now < self.frozen_until:
            return
        kept = self._make_room(now)
        prefill, attention, restoring_s = self._plan_prefill(admit=kept)
        streams, context, profile = self.decodes, self.context, self.profile
        if not prefill and not streams:
            self._gaps.clear()
            self.work = (0, 0, 0)
            return
        first = self.decode_slow * (
            profile.decode_s[streams] + profile.context_s[streams] * context
        )
        if prefill:
            extra = profile.work_s[streams + prefill] - profile.work_s[streams]
            extra += profile.attention_s * attention
            first += self.prefill_slow * extra + restoring_s
            planned, rise = 1, 0.0
        else:
            rise = self.decode_slow * profile.context_s[streams] * streams
            planned = self._quiet_steps()
        factor, planned = self._noise.stretch(planned)
        self.work = (prefill, streams, context)
        self._planned, self._began_s, self._stall_s = planned, now, 0.0
        self._first_s, self._rise_s = first * factor, rise * factor
        self.busy = True
        self._set_end(now + self._lasting(planned))

    def finish(self) -> None:
        """The stretch has ended, at `end_s`: streams move on."""
        now, planned = self.end_s, self._planned
        prefill, streams, context = self.work
        lasted = now - self._began_s - self._stall_s
        self.last_step_s = (lasted + self._stall_s) / planned
        self.last_work = (prefill, streams, context + streams * (planned - 1) // 2)
        self._advance(planned, now - self._began_s, self._step_s(planned) + self._stall_s)
        self.busy = False
        self._end_chunks(now)
        self._end_due(now)
        if self._aborts:
            self._take_aborts()

    def _set_end(self, end_s: float) -> None:
        self.end_s = end_s
        self.version += 1

    def _lasting(self, steps: int) -> float:
        """Seconds of the first so many steps of the stretch."""
        return steps * self._first_s + self._rise_s * (steps * (steps - 1) // 2)

    def _step_s(self, number: int) -> float:
        return self._first_s + self._rise_s * (number - 1)

    def _steps_by(self, now: float) -> int:
        """Whole steps of the stretch that had ended by `now`, without the last one."""
        left = now - self._began_s
        if left <= 0.0 or self._planned == 1:
            return 0
        half = 0.5 * self._rise_s
        linear = self._first_s - half
        if half > 1e-12 * linear:
            steps = int((sqrt(linear * linear + 4.0 * half * left) - linear) / (2.0 * half))
        else:
            steps = int(left / linear)
        steps = max(0, min(steps, self._planned - 1))
        while steps > 0 and self._lasting(steps) > left:
            steps -= 1
        while steps < self._planned - 1 and self._lasting(steps + 1) <= left:
            steps += 1
        return steps

    def _settle(self, now: float) -> None:
        """Account for the steps of the stretch that have ended; the running one remains."""
        steps = self._steps_by(now) if self.busy else 0
        if not steps:
            return
        lasted = self._lasting(steps)
        self._advance(steps, lasted, self._step_s(steps))
        self._first_s += self._rise_s * steps
        self._began_s += lasted
        self._planned -= steps
        self.work = (0, self.decodes, self.context)

    def _cut(self, now: float) -> None:
        """End the stretch with the step that runs now."""
        if self._planned > 1:
            self._settle(now)
            self._planned = 1
            self._set_end(self._began_s + self._first_s + self._stall_s)

    def _advance(self, steps: int, lasted: float, longest: float) -> None:
        self.step += steps
        self.steps += steps
        streams = self.decodes
        if not streams:
            return
        if self.token_gaps is not None:
            self.token_gaps.append((streams * steps, lasted / steps))
        self._stream_s += streams * lasted
        self.generated += streams * steps
        self.context += streams * steps
        self.kv.grow(streams * steps)
        self._gaps.note(self.step, longest)

    def _quiet_steps(self) -> int:
        """Decode steps until something can change: a stream is due, or KV is full."""
        due = self._due
        while due and not _current(due[0]):
            heappop(due)
        steps = due[0][0] - self.step
        return max(1, min(steps, (self.kv.capacity - self.kv.used) // self.decodes))

    # -- prefill ----------------------------------------------------------------------------------

    def _plan_prefill(self, *, admit: bool) -> tuple[int, float, float]:
        """Chunks of the next step: (tokens, pairs of tokens that attend, seconds of restoring)."""
        budget = self.profile.batch_tokens - self.decodes
        tokens, pairs, restoring_s = 0, 0.0, 0.0
        chunks: list[tuple[Seq, int]] = []
        self._chunks = chunks
        for seq in self._prefilling:
            budget, tokens, pairs = self._add_chunk(chunks, seq, budget, tokens, pairs)
        while admit and budget > 0 and self.waiting:
            if not self.waiting[0].alive:
                self.waiting.popleft()
                continue
            if len(self.running) >= self.profile.requests_max or not self._admit(self.waiting[0]):
                break
            seq = self.waiting.popleft()
            if seq.restored:
                restoring_s += RESTORE_S + seq.restored * self.profile.restore_s_per_token
            budget, tokens, pairs = self._add_chunk(chunks, seq, budget, tokens, pairs)
        return tokens, pairs, restoring_s

    @staticmethod
    def _add_chunk(
        chunks: list[tuple[Seq, int]], seq: Seq, budget: int, tokens: int, pairs: float
    ) -> tuple[int, int, float]:
        chunk = min(seq.context - seq.done, budget)
        if chunk <= 0:
            return budget, tokens, pairs
        chunks.append((seq, chunk))
        return budget - chunk, tokens + chunk, pairs + chunk * (seq.done + 0.5 * chunk)

    def _admit(self, seq: Seq) -> bool:
        """Give a waiting stream its KV; False when there is no room for it."""
        kv = self.kv
        wanted = seq.request.blocks
        blocks = wanted[: kv.held(wanted)] if wanted else wanted
        hits = len(blocks) * kv.block_tokens
        private = seq.context - hits + BLOCK_SLACK_TOKENS
        if not kv.room_for(blocks, private + self.decodes):
            return False
        kv.take(blocks, private)
        seq.blocks, seq.private = list(blocks), private
        if seq.restored <= hits:
            seq.restored = 0
        seq.done = max(hits, seq.restored)
        self.hit_tokens += hits
        self.restored_tokens += seq.done - hits
        self.computed_tokens += seq.context - seq.done
        self.running[seq.request_id] = seq
        self._prefilling.append(seq)
        return True

    def _end_chunks(self, now: float) -> None:
        for seq, chunk in self._chunks:
            seq.done += chunk
            if seq.done == seq.context:
                self._prefilling.remove(seq)
                self._join(seq, now)
        self._chunks = []

    def _join(self, seq: Seq, now: float) -> None:
        """The prompt of a stream is computed: its first token is here."""
        if seq.request.blocks:
            new = self.kv.share(seq.request.blocks[len(seq.blocks) :])
            seq.blocks += new
            seq.private -= len(new) * self.kv.block_tokens
        seq.base = seq.context + 1
        seq.joined = seq.flushed = self.step
        self.generated += 1
        self.decodes += 1
        self.context += seq.base
        last = seq.owed == 1
        self.outbox.append(SimOutput(seq, 1, now, -1.0, LENGTH if last else None))
        if last:
            self._leave(seq)
        else:
            self._schedule(seq)

    # -- decode -----------------------------------------------------------------------------------

    def _schedule(self, seq: Seq) -> None:
        """Set the step at which the stream is looked at again."""
        context = seq.base + self.step - seq.joined
        flush = self.step + max(FLUSH_TOKENS_MIN, context // FLUSH_SHARE)
        seq.due = min(flush, seq.joined + seq.owed - 1)
        self._order += 1
        heappush(self._due, (seq.due, self._order, seq))

    def _end_due(self, now: float) -> None:
        due, step = self._due, self.step
        while due and due[0][0] <= step:
            entry = heappop(due)
            if not _current(entry):
                continue
            seq = entry[2]
            if step >= seq.joined + seq.owed - 1:
                self._flush(seq, now, LENGTH)
                self._leave(seq)
            else:
                self._flush(seq, now)
                self._schedule(seq)

    def _flush(self, seq: Seq, at_s: float, finish_reason: str | None = None) -> None:
        tokens = self.step - seq.flushed
        if tokens > 0:
            gap_s = self._gaps.longest(seq.flushed)
            self.outbox.append(SimOutput(seq, tokens, at_s, gap_s, finish_reason))
            seq.flushed = self.step

    def _leave(self, seq: Seq) -> None:
        """The stream is done here: everything that it holds goes back."""
        seq.alive = False
        self._free(seq)
        del self.running[seq.request_id]

    def _free(self, seq: Seq) -> None:
        grown = 0
        if seq.decoding:
            grown = self.step - seq.joined
            self.decodes -= 1
            self.context -= seq.base + grown
        else:
            self._prefilling.remove(seq)
        self.kv.give_back(seq.blocks, seq.private + grown)
        seq.blocks, seq.private, seq.due = [], 0, -1

    def _make_room(self, now: float) -> bool:
        """Push out the newest streams until a decode step fits; False if any had to go."""
        kept = True
        while self.decodes and self.kv.used + self.decodes > self.kv.capacity:
            kept = False
            _, seq = self.running.popitem()
            self.preemptions += 1
            if seq.decoding:
                self._flush(seq, now)
                produced = self.step - seq.joined + 1
            else:
                produced = 0
            self._free(seq)
            seq.context += produced
            seq.owed -= produced
            seq.joined, seq.done, seq.restored = -1, 0, 0
            self.waiting.appendleft(seq)
        return kept

    def _take_aborts(self) -> None:
        wanted, self._aborts = dict.fromkeys(self._aborts), []
        for seq in self.waiting:
            if seq.request_id in wanted:
                seq.alive = False
        for request_id in wanted:
            seq_here = self.running.get(request_id)
            if seq_here is not None:
                self._leave(seq_here)


def _current(entry: tuple[int, int, Seq]) -> bool:
    """Whether an entry of the heap is the latest of its stream."""
    return entry[2].alive and entry[2].due == entry[0]
