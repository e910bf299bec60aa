"""The engine with the fewest streams."""

from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, Rotation


class LeastRequests:
    """The engine with the fewest streams."""

    def __init__(self) -> None:
        self._rotation = Rotation("least_requests")

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int] = frozenset()
    ) -> Decision | None:
        """See Policy."""
        return self._rotation.pick(fleet, request, exclude, fleet.running_requests)
