"""What is kept of a stream's move from one engine to another."""

from dataclasses import dataclass


@dataclass(slots=True)
class PendingMove:
    """A move whose first token has not come yet."""

    source: int
    reason: str
    declared_ns: int
    declared_unix: float
    on_purpose: bool = False


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A finished move, for the status page."""

    stream: str
    source: str
    target: str
    reason: str
    delivered_tokens: int
    context_tokens: int
    restored_tokens: int
    declared_unix: float
    after_declared_ms: float
    gap_ms: float
    """From the token before the move (from the request's arrival, if none) to the one after it."""
    on_purpose: bool


@dataclass(frozen=True, slots=True)
class MoveReply:
    """What became of an order to move streams."""

    moved: tuple[str, ...]
    stayed: dict[str, str]
    """Stream id: why it could not go."""
