"""The life of one stream across engines: a pure state machine.

    WAITING --place--> PLACED --leave--> WAITING          (as often as engines come and go)
       |                  |
       +------end---------+------end---> ENDED(outcome)   (exactly once)

A stream has one owner at a time. Each stay on an engine has an *epoch*; what an engine sends
under an older epoch is refused (fencing), whenever it arrives. So a frozen engine that wakes up
can neither repeat nor add a token.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from zerolayer.core.ids import engine_request_id
from zerolayer.core.outcome import Outcome


class Phase(Enum):
    """Where a stream is in its life."""

    WAITING = auto()  # owned by no engine: not placed yet, or its engine is gone
    PLACED = auto()  # owned by one engine
    ENDED = auto()  # has its outcome


class IllegalTransition(AssertionError):
    """An event that the stream's phase does not allow: a bug of ours. Nothing was changed."""


@dataclass(slots=True)
class Stream:
    """One stream's ledger: who owns it, under which epoch, and what the client already has."""

    stream_id: str
    prompt_tokens: int
    phase: Phase = Phase.WAITING
    engine: int | None = None  # slot of the owner while PLACED
    epoch: int = 0  # raised whenever the stream leaves an engine
    delivered: list[int] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def request_id(self) -> str:
        """The id under which the current owner knows the stream."""
        return engine_request_id(self.stream_id, self.epoch)

    @property
    def context_tokens(self) -> int:
        """Prompt and delivered tokens."""
        return self.prompt_tokens + len(self.delivered)

    def place(self, engine: int) -> str:
        """Give a waiting stream to an engine; returns the request id to submit under."""
        self._require(self.phase is Phase.WAITING, "place")
        self.phase, self.engine = Phase.PLACED, engine
        return self.request_id

    def leave(self) -> tuple[int, str]:
        """Take the stream from its engine; returns (engine, request id) to abort there.

        The epoch rises at once: nothing that this engine still sends is accepted.
        """
        self._require(self.phase is Phase.PLACED, "leave")
        assert self.engine is not None
        left = (self.engine, self.request_id)
        self.phase, self.engine = Phase.WAITING, None
        self.epoch += 1
        return left

    def accepts(self, epoch: int) -> bool:
        """Whether output that was sent under `epoch` may reach the client."""
        return self.phase is Phase.PLACED and epoch == self.epoch

    def is_owned_as(self, request_id: str) -> bool:
        """Whether an engine owns the stream under just this request id."""
        return self.phase is Phase.PLACED and self.request_id == request_id

    def deliver(self, tokens: list[int]) -> None:
        """Note tokens that go to the client now."""
        self._require(self.phase is Phase.PLACED, "deliver")
        self.delivered.extend(tokens)

    def end(self, outcome: Outcome) -> tuple[int, str] | None:
        """End the stream; returns (engine, request id) when an engine still owns it."""
        self._require(self.phase is not Phase.ENDED, "end")
        owner = (self.engine, self.request_id) if self.engine is not None else None
        self.phase, self.engine, self.outcome = Phase.ENDED, None, outcome
        return owner

    def _require(self, legal: bool, event: str) -> None:
        if not legal:
            raise IllegalTransition(f"stream {self.stream_id}: {event} while {self.phase.name}")
