"""Every engine in turn, whatever its load: the yardstick for the others."""

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.policies.base import Decision, PlacementRequest


class RoundRobin:
    """Every engine in turn, whatever its load: the yardstick for the others."""

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        for suspects_too in (False, True):
            for turn in range(fleet.engines):
                engine = (self._next + turn) % fleet.engines
                if self._may(fleet, request, engine, suspects_too) and engine not in exclude:
                    self._next = engine + 1
                    reason = "round_robin:suspect" if suspects_too else "round_robin"
                    return Decision(engine, 0.0, None, reason)
        return None

    @staticmethod
    def _may(fleet: FleetState, request: PlacementRequest, engine: int, suspects_too: bool) -> bool:
        in_domain = request.domain is None or fleet.domain[engine] == request.domain
        standing = bool(fleet.accepts[engine]) and (suspects_too or not fleet.suspect[engine])
        return standing and bool(in_domain)
