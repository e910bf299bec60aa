"""`make soak`: random kills, freezes, disconnects and long prefills under load, for minutes.

Rounds of load with faults at random moments. Each round ends with quiet, and one probe: a single
stream under a fault, which must be equal token by token to its undisturbed run. Under load vLLM
rounds differently from step to step, so there each answer is counted: it must have its full length,
and what it has in common with its reference must be neither shifted forward nor back.
"""

import asyncio
import json
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.asking import COMPLETIONS, Ask, Fault, ask
from tests.fleet_fixture import heal
from zerolayer.bench import chaos_signals
from zerolayer.bench.compare import compare
from zerolayer.bench.fleet_process import SERVED_NAME, FleetProcess
from zerolayer.bench.stream_client import StreamClient, StreamRecord, StreamRequest, cold_salt

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

CLIENTS = 5
ROUND_S = 40.0
#: Seconds between two faults, and how long one stays frozen.
PAUSE_S, FROZEN_S = (3.0, 9.0), (0.3, 2.0)
#: An engine that dies five times in a row this soon after coming up is set aside, as it should be.
YOUNG_S = 10.0
LEAVES_SHARE, LONG_SHARE = 0.15, 0.15
#: What the kernel or vLLM calls the end or the stall of an engine that we struck comes this late.
AFTERMATH_S = 12.0
#: Resident memory may differ by so much between two quiet moments after the warm-up.
RSS_GROWTH_MAX = 1.10
RSS_SLACK_BYTES = 48 * 2**20
WARM_UP_ROUNDS = 2
PROBE = Ask(
    COMPLETIONS,
    {"prompt": "A soldier walked along the river and", "max_tokens": 40, "temperature": 0.9,
     "seed": 4242, "ignore_eos": True},
)  # fmt: skip


@dataclass
class Findings:
    """Everything that a soak saw; its numbers are printed last, as one JSON line."""

    streams: int = 0
    tokens: int = 0
    left: int = 0
    kills: int = 0
    freezes: int = 0
    probes: int = 0
    other_text: int = 0
    faults: list[str] = field(default_factory=list)
    strikes: list[tuple[str, float]] = field(default_factory=list)
    """(engine, unix second)"""
    rss_bytes: list[int] = field(default_factory=list)
    """Of the serving process, at each quiet moment."""


class Load:
    """Clients and faults of one round."""

    def __init__(self, fleet: FleetProcess, rng: random.Random, found: Findings) -> None:
        self._fleet = fleet
        self._rng = rng
        self._found = found
        self._known: dict[int, list[int]] = {}
        self._end = 0.0

    async def run(self, seconds: float, *, faults: bool) -> None:
        self._end = time.monotonic() + seconds
        async with (
            StreamClient(self._fleet.base_url, SERVED_NAME) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(CLIENTS):
                group.create_task(self._client(client))
            if faults:
                group.create_task(self._strike(client))

    async def _client(self, client: StreamClient) -> None:
        while time.monotonic() < self._end:
            number = self._rng.randrange(8)
            leaves = self._rng.random() < LEAVES_SHARE
            wanted = 24 + 4 * number
            record = await client.run(
                StreamRequest(
                    self._body(number, wanted),
                    leave_after_tokens=self._rng.randrange(1, wanted) if leaves else None,
                )
            )
            self._judge(number, wanted, record)

    def _body(self, number: int, tokens: int) -> dict[str, Any]:
        words = 1500 if self._rng.random() < LONG_SHARE else 30
        prompt = " ".join(f"{word * number + 1}" for word in range(words // 2))
        return {
            "prompt": f"{prompt}. Story {number}:", "max_tokens": tokens, "ignore_eos": True,
            "temperature": 1.0, "seed": number, "cache_salt": cold_salt(),
        }  # fmt: skip

    def _judge(self, number: int, wanted: int, record: StreamRecord) -> None:
        found = self._found
        found.streams += 1
        found.tokens += record.tokens
        found.left += record.left
        if record.broken:
            found.faults.append(f"broken: {record.fault}")
        if record.left or record.broken:
            return
        key = (record.usage or {}).get("prompt_tokens", 0) * 100 + number
        reference = self._known.setdefault(key, record.token_ids)
        result = compare(reference, record.token_ids)
        found.other_text += result.other_text
        if len(record.token_ids) != wanted or result.lost or result.repeated:
            found.faults.append(
                f"{len(record.token_ids)} of {wanted} tokens, {result.lost} lost, "
                f"{result.repeated} repeated"
            )

    async def _strike(self, client: StreamClient) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            if time.monotonic() > self._end:
                return
            status = await client.status()
            ready = [row for row in status["engines"] if row["state"] == "ready"]
            if len(ready) < len(status["engines"]):
                continue
            row = self._rng.choice(ready)
            if self._rng.random() < 0.5 and time.time() - row["up_since"] > YOUNG_S:
                self._hit(row, signal.SIGKILL)
                self._found.kills += 1
            else:
                self._hit(row, signal.SIGSTOP)
                self._found.freezes += 1
                await asyncio.sleep(self._rng.uniform(*FROZEN_S))
                self._hit(row, signal.SIGCONT)

    def _hit(self, row: dict[str, Any], number: signal.Signals) -> None:
        chaos_signals.send(row, number)
        self._found.strikes.append((row["id"], time.time()))


def test_soak(shared_fleet: FleetProcess, soak_minutes: float) -> None:
    fleet, found = shared_fleet, Findings()
    seed = random.randrange(2**32)
    print(f"\nsoak: {soak_minutes:g} minutes, seed {seed}")
    load = Load(fleet, random.Random(seed), found)
    reference = ask(fleet, PROBE)
    events: dict[tuple[float, str], str] = {}
    end, rounds = time.monotonic() + 60.0 * soak_minutes, 0
    while time.monotonic() < end:
        # The first round of each three has no faults: what stalls there, stalls falsely.
        asyncio.run(load.run(ROUND_S, faults=rounds % 3 != 0))
        heal(fleet)
        fleet.wait_all_ready()
        probe(fleet, reference.content, found)
        note_quiet(fleet, found, events)
        rounds += 1
        print(f"soak: {summary(found)}", flush=True)
    false = false_stalls(events, found.strikes)
    print(json.dumps({**summary(found), "seed": seed, "false_stalls": len(false)}))
    assert not found.faults, found.faults
    assert not false, false
    assert_flat(found.rss_bytes)


def probe(fleet: FleetProcess, reference: dict[str, Any], found: Findings) -> None:
    """A single stream under a fault is the undisturbed one."""
    number = signal.SIGKILL if found.probes % 2 else signal.SIGSTOP
    fault = Fault(fleet, number, 5 + 7 * found.probes % 30)
    got = ask(fleet, PROBE, fault)
    assert fault.victim is not None
    found.strikes.append((fault.victim["id"], time.time()))
    found.probes += 1
    if got.content != reference:
        found.faults.append(f"probe {found.probes}: {got.content} is not {reference}")
    heal(fleet)
    fleet.wait_all_ready()


def note_quiet(fleet: FleetProcess, found: Findings, events: dict[tuple[float, str], str]) -> None:
    """Memory, processes and files while nothing runs."""
    status = fleet.status()
    events.update({(e["unix"], e["engine"]): e["what"] for e in status["events"]})
    rows = {row.pid: row for row in fleet.tree()}
    found.rss_bytes.append(rows[fleet.pid].rss_bytes)
    if status["streams"]["active"]:
        found.faults.append(f"{status['streams']} while nobody asks")
    engine_pids = {p for row in status["engines"] for p in chaos_signals.engine_pids(row)}
    helpers = len(rows) - 1 - len(engine_pids)
    if helpers > 3 * len(status["engines"]) + 2:
        found.faults.append(f"{helpers} processes beside the engines: {list(rows.values())}")
    arenas = [path.name for path in fleet.runtime().files() if path.suffix == ".kv"]
    if len(arenas) > 2 * len(status["engines"]):
        found.faults.append(f"arenas pile up: {arenas}")


def false_stalls(
    events: dict[tuple[float, str], str], strikes: list[tuple[str, float]]
) -> list[str]:
    """Stalls of engines that nobody had struck shortly before."""
    return [
        f"{engine} {what} at {unix:.1f}"
        for (unix, engine), what in events.items()
        if what.startswith("stalled")
        and not any(e == engine and -5.0 <= unix - at <= AFTERMATH_S for e, at in strikes)
    ]


def assert_flat(rss_bytes: list[int]) -> None:
    settled = rss_bytes[WARM_UP_ROUNDS:]
    if len(settled) > WARM_UP_ROUNDS:
        limit = RSS_GROWTH_MAX * settled[0] + RSS_SLACK_BYTES
        assert settled[-1] <= limit, f"the serving process grows: {settled}"


def summary(found: Findings) -> dict[str, Any]:
    return {
        "streams": found.streams, "tokens": found.tokens, "left": found.left,
        "kills": found.kills, "freezes": found.freezes, "probes": found.probes,
        "other_text": found.other_text, "faults": len(found.faults),
        "rss_mib": [rss // 2**20 for rss in found.rss_bytes[-3:]],
    }  # fmt: skip
