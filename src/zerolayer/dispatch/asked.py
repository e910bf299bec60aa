"""What one HTTP request asked of its placement, and what became of it.

The headers are read at the door (room `gateway`), the engine is chosen further down (room
`stitch`), and between the two lies vLLM, which passes neither. One object per request,
carried by a context variable, goes around it: contexts are copied from task to task, the object is
not, so what the dispatcher writes into it the door can read.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from zerolayer.dispatch.policies.base import Decision, PlacementRequest
from zerolayer.dispatch.preference import Hints, apply_hints


@dataclass(slots=True)
class Asked:
    """One request's wishes, and the answers to them."""

    hints: Hints = field(default_factory=Hints)
    explain: bool = False
    """Say in a response header why the engine was chosen."""
    admitted: bool = False
    """Admission control has let it in; it is asked once a request."""
    labels: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """What the operator calls the domains, by number: hints are compared with it."""
    decision: Decision | None = None
    """The first placement of its (first) stream."""
    retry_after_s: float | None = None
    """It was refused; the same request may pass after so many seconds."""

    def wanted(self, request: PlacementRequest) -> PlacementRequest:
        """`request` with these wishes."""
        return replace(apply_hints(request, self.hints, self.labels), explain=self.explain)


asked: ContextVar[Asked | None] = ContextVar("zerolayer_asked", default=None)
"""The request that the current task serves; None outside of one."""
