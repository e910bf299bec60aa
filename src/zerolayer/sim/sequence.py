"""A request as the client, and as one engine, sees it; and what an engine hands out for it."""

from dataclasses import dataclass
from typing import Any

from zerolayer.sim.traces import Trace


@dataclass(slots=True)
class SimRequest:
    """What the simulator knows of a request. Only engines look at `output_tokens`."""

    row: int
    """Its place in the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the full prefix blocks of its prompt, without the one that holds the last token: that
    token is always computed."""
    committed: int = 0
    """Tokens whose KV is in snapshots."""
    moves: int = 0
    retries: int = 0
    broken: bool = False


def request_of(trace: Trace, row: int) -> SimRequest:
    """The request in this row of a trace."""
    prompt = int(trace.prompt_tokens[row])
    blocks: tuple[int, ...] = ()
    if trace.prefixes is not None:
        blocks = trace.prefixes[row][: (prompt - 1) // trace.block_tokens]
    return SimRequest(row, prompt, int(trace.output_tokens[row]), blocks)


class Seq:
    """A request on one engine."""

    __slots__ = (
        "alive", "base", "blocks", "context", "done", "due", "first", "flushed", "joined", "order",
        "owed", "private", "request", "request_id", "restored",
    )  # fmt: skip

    def __init__(self, request: SimRequest, request_id: str, delivered: int, restored: int) -> None:
        self.request = request
        self.request_id = request_id
        self.context = request.prompt_tokens + delivered
        """Tokens whose KV the engine needs before the next token comes."""
        self.owed = request.output_tokens - delivered
        """Tokens that are to come from here."""
        self.restored = restored
        """Leading tokens that can be loaded from a snapshot."""
        self.first = False
        """It waits in front of the queue: its client is reading already."""
        self.done = 0
        """Leading tokens whose KV is here, while its prompt is computed."""
        self.blocks: list[int] = []
        """Shared blocks that it holds."""
        self.private = 0
        """KV tokens that it holds alone, without those of its decode steps."""
        self.joined = -1
        """The step that gave its first token; -1 before."""
        self.base = 0
        """Its context in the step after that."""
        self.flushed = -1
        """The step up to which its tokens were handed out."""
        self.due = -1
        """The step at whose end something has to happen to it."""
        self.order = 0
        self.alive = True

    @property
    def decoding(self) -> bool:
        """Its prompt is computed and its next token comes with the next step."""
        return self.joined >= 0


class SimOutput:
    """Tokens of one stream: an EngineOutput of the driver."""

    __slots__ = (
        "at_s", "finish_reason", "gap_s", "new_token_ids", "request", "request_id", "restored",
    )  # fmt: skip

    def __init__(
        self, seq: Seq, tokens: int, at_s: float, gap_s: float, finish_reason: Any = None
    ) -> None:
        self.request = seq.request
        self.request_id = seq.request_id
        self.new_token_ids = [0] * tokens
        self.at_s = at_s
        """When the last of them came."""
        self.gap_s = gap_s
        """The longest pause before any of them; below 0 for a stream's first token on an engine."""
        self.finish_reason = finish_reason
        self.restored = seq.restored
