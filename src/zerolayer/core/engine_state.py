"""The life of an engine: every state, every event, every legal transition.

```
            CAME_UP            SUSPECTED              STALLED
 STARTING ───────────► READY ◄──────────► SUSPECT ───────────► STALLED
    ▲                    ▲      CLEARED                           │
    │ RESTARTED          └────────────────────────────────────────┘ CLEARED
  DEAD ◄── DIED from every state with a process; DRAIN and UNDRAIN between READY and DRAINING
    └── GAVE_UP ──► SET_ASIDE ── RESTARTED (by the operator) ──► STARTING
```
"""

from enum import StrEnum


class IllegalEngineEvent(AssertionError):
    """An event that cannot happen in this state. A bug of ours, so not part of the error tree."""


class EngineState(StrEnum):
    """Where an engine is in its life; the value is the metric label."""

    STARTING = "starting"
    """A process exists and does not serve yet."""
    READY = "ready"
    SUSPECT = "suspect"
    """A step is late. Serves, gets new work only when no other engine can."""
    STALLED = "stalled"
    """Its streams were moved. It may prove itself and return."""
    DRAINING = "draining"
    """No new work; its streams finish or are moved. A stall changes nothing in that."""
    DEAD = "dead"
    """No process. Waits for its restart."""
    SET_ASIDE = "set_aside"
    """Died again and again; only the operator brings it back."""

    @property
    def accepts(self) -> bool:
        """Whether new streams may be placed here."""
        return self in (EngineState.READY, EngineState.SUSPECT)

    @property
    def has_process(self) -> bool:
        """Whether there is a process to watch and to end."""
        return self not in (EngineState.DEAD, EngineState.SET_ASIDE)


class EngineEvent(StrEnum):
    """What may happen to an engine."""

    CAME_UP = "came_up"
    SUSPECTED = "suspected"
    CLEARED = "cleared"
    STALLED = "stalled"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    DIED = "died"
    RESTARTED = "restarted"
    GAVE_UP = "gave_up"


_S, _E = EngineState, EngineEvent
TRANSITIONS: dict[tuple[EngineState, EngineEvent], EngineState] = {
    (_S.STARTING, _E.CAME_UP): _S.READY,
    (_S.STARTING, _E.DIED): _S.DEAD,
    (_S.READY, _E.SUSPECTED): _S.SUSPECT,
    (_S.READY, _E.STALLED): _S.STALLED,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.DIED): _S.DEAD,
    (_S.SUSPECT, _E.CLEARED): _S.READY,
    (_S.SUSPECT, _E.STALLED): _S.STALLED,
    (_S.SUSPECT, _E.DRAIN): _S.DRAINING,
    (_S.SUSPECT, _E.DIED): _S.DEAD,
    (_S.STALLED, _E.CLEARED): _S.READY,
    (_S.STALLED, _E.DRAIN): _S.DRAINING,
    (_S.STALLED, _E.DIED): _S.DEAD,
    (_S.DRAINING, _E.SUSPECTED): _S.DRAINING,
    (_S.DRAINING, _E.CLEARED): _S.DRAINING,
    (_S.DRAINING, _E.STALLED): _S.DRAINING,
    (_S.DRAINING, _E.UNDRAIN): _S.READY,
    (_S.DRAINING, _E.DIED): _S.DEAD,
    (_S.DEAD, _E.RESTARTED): _S.STARTING,
    (_S.DEAD, _E.GAVE_UP): _S.SET_ASIDE,
    (_S.SET_ASIDE, _E.RESTARTED): _S.STARTING,
}
"""Every pair that is not in here is illegal."""


def next_state(state: EngineState, event: EngineEvent) -> EngineState:
    """The state after `event`. Raises IllegalEngineEvent where the event cannot happen."""
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalEngineEvent(f"an engine that is {state} cannot get the event {event}")
    return after


class EngineLife:
    """State and incarnation of the engine in one slot."""

    __slots__ = ("_incarnation", "_state")

    def __init__(self, incarnation: int = 1) -> None:
        self._state = EngineState.STARTING
        self._incarnation = incarnation

    @property
    def state(self) -> EngineState:
        """Where it is now."""
        return self._state

    @property
    def incarnation(self) -> int:
        """From 1; rises by one at each restart."""
        return self._incarnation

    def can(self, event: EngineEvent) -> bool:
        """Whether `apply(event)` would be legal now."""
        return (self._state, event) in TRANSITIONS

    def apply(self, event: EngineEvent) -> EngineState:
        """Take the event and return the new state. Raises IllegalEngineEvent and changes
        nothing."""
        after = next_state(self._state, event)
        if event is EngineEvent.RESTARTED:
            self._incarnation += 1
        self._state = after
        return after
