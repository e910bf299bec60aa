"""The choice of an engine for a new or moved stream: one short file per policy.

Each file states its formula and where it comes from. `base` holds what they share.
"""

from zerolayer.dispatch.policies.base import (
    TIE_SECONDS_MAX,
    Decision,
    PlacementRequest,
    Policy,
    Rotation,
)
from zerolayer.dispatch.policies.expected_wait import ExpectedWait, expected_wait_s
from zerolayer.dispatch.policies.least_requests import LeastRequests
from zerolayer.dispatch.policies.round_robin import RoundRobin

__all__ = [
    "TIE_SECONDS_MAX",
    "Decision",
    "ExpectedWait",
    "LeastRequests",
    "PlacementRequest",
    "Policy",
    "Rotation",
    "RoundRobin",
    "expected_wait_s",
]
