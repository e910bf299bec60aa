"""How a request ends. Each request ends in exactly one of these, and nothing else names an ending.

The value is the metric label; the HTTP status is fixed here and nowhere else. A stream that has
begun has sent its 200 already: then the status stands in its one error event.
"""

from enum import StrEnum


class Outcome(StrEnum):
    """The ending of one request."""

    FINISHED = "finished"
    """The engine ended it: stop token, stop string or length."""
    CLIENT_LEFT = "client_left"
    """The client closed the connection; its work was aborted at once."""
    REJECTED = "rejected"
    """No engine may run it as asked (too long, unknown parameter). Nothing was computed."""
    OVERLOADED = "overloaded"
    """A limit of this process was reached. The same request may pass later."""
    REFUSED = "refused"
    """Every engine is over its limits, and the operator wants new requests refused then. Nothing
    was computed; the answer says when to come back."""
    ENGINES_LOST = "engines_lost"
    """No engine was left, and none came back in the time that streams wait for one."""
    NOT_RESUMABLE = "not_resumable"
    """Its engine was lost and this request cannot be continued exactly; the error says which
    part."""
    SHUT_DOWN = "shut_down"
    """This process was told to stop and the time for running streams was over."""
    FAILED = "failed"
    """A fault of ours or of the engine. The log has the cause."""

    @property
    def label(self) -> str:
        """The value of the metric label `outcome`."""
        return self.value

    @property
    def http_status(self) -> int:
        """The status of an answer that has not begun; 499 is for logs, as nobody is left to read
        it."""
        return _HTTP_STATUS[self]

    @property
    def is_fault(self) -> bool:
        """Whether the service, and not the client, is to blame."""
        return self.http_status >= 500


_HTTP_STATUS = {
    Outcome.FINISHED: 200,
    Outcome.CLIENT_LEFT: 499,
    Outcome.REJECTED: 400,
    Outcome.OVERLOADED: 503,
    Outcome.REFUSED: 429,
    Outcome.ENGINES_LOST: 503,
    Outcome.NOT_RESUMABLE: 500,
    Outcome.SHUT_DOWN: 503,
    Outcome.FAILED: 500,
}
