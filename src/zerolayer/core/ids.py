"""Names of engines and streams, and the id under which an engine knows a stream.

An engine is called after its slot (`e0`), so that metric labels stay right over restarts. A
stream's id as an engine sees it carries the epoch (`chatcmpl-7@2`): an output that names an old
epoch comes from an engine that no longer owns the stream and is dropped.
"""

from typing import NamedTuple

from zerolayer.core.limits import ENGINES_MAX

_ENGINE_PREFIX = "e"
_EPOCH_MARK = "@"


class RequestId(NamedTuple):
    """What the id on the wire to an engine says."""

    stream_id: str
    """The id that the serving process knows; it may itself contain an `@`."""
    epoch: int
    """From 0; rises by one at each move of the stream."""


def engine_name(slot: int) -> str:
    """The name of the engine in `slot` (0 to ENGINES_MAX - 1). Raises ValueError outside that
    range."""
    if not 0 <= slot < ENGINES_MAX:
        raise ValueError(f"engine slot {slot} is outside 0..{ENGINES_MAX - 1}")
    return f"{_ENGINE_PREFIX}{slot}"


def engine_slot(name: str) -> int:
    """The slot that `name` stands for. Raises ValueError for anything that `engine_name` does not
    make."""
    digits = name.removeprefix(_ENGINE_PREFIX)
    slot = _canonical_number(digits) if name != digits else None
    if slot is None or slot >= ENGINES_MAX:
        raise ValueError(f"{name!r} is not an engine; engines are called e0 to e{ENGINES_MAX - 1}")
    return slot


def engine_request_id(stream_id: str, epoch: int) -> str:
    """The id under which an engine gets this stream. Raises ValueError for an epoch below 0."""
    if epoch < 0:
        raise ValueError(f"epoch {epoch} of stream {stream_id!r} is below 0")
    return f"{stream_id}{_EPOCH_MARK}{epoch}"


def split_request_id(request_id: str) -> RequestId | None:
    """Stream and epoch of an id that came from an engine; None for an id that we never made."""
    stream_id, mark, digits = request_id.rpartition(_EPOCH_MARK)
    epoch = _canonical_number(digits)
    if not mark or epoch is None:
        return None
    return RequestId(stream_id, epoch)


def _canonical_number(digits: str) -> int | None:
    """The number that is written exactly so (no sign, space, leading zero or other script)."""
    if not (digits.isascii() and digits.isdigit()) or (digits[0] == "0" and digits != "0"):
        return None
    return int(digits) if len(digits) <= 18 else None
