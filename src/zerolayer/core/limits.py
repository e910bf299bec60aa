"""How much of anything there may be, and what happens when it is full.

One named constant each. What an operator may change is a setting elsewhere; these are the walls
behind the settings.
"""

from typing import Final

ENGINES_MAX: Final = 256
"""Slots of one fleet, rows of `load_heatmap`. A start that asks for more is refused."""

ENGINES_PER_GPU_MAX: Final = 64
"""Engines that may share a GPU. A start that asks for more is refused."""

STREAMS_MAX: Final = 65_536
"""Streams in flight in one serving process, rows of `kv_snapshot_meta`. One more is refused with
`Outcome.OVERLOADED`."""

MOVES_PER_STREAM_MAX: Final = 16
"""Times that one stream may change its engine. One more ends it with `Outcome.ENGINES_LOST`: a
stream that kills every engine it meets must not take the fleet with it."""

DEATHS_WITHOUT_TOKEN_MAX: Final = 5
"""Engines in a row that may end before they gave a stream one token since it came to them. The
last one ends the stream with `Outcome.ENGINES_LOST`: it is taken to be what they die of. Of two
engines then neither is set aside."""

RECENT_MOVES_KEPT: Final = 256
"""Moves that `/zerolayer/status` shows. The oldest is forgotten first."""

EVENTS_KEPT: Final = 256
"""Fleet events that `/zerolayer/status` shows. The oldest is forgotten first."""

STEP_HISTORY_KEPT: Final = 64
"""Finished steps of one kind that an engine's stall bound is made from. The oldest is forgotten
first."""

COST_ERRORS_KEPT: Final = 256
"""Prediction errors that a cost model keeps for its percentiles. The oldest is forgotten first."""

STEP_SECONDS_MAX: Final = 600.0
"""Longest step that a cost model predicts or learns from, in seconds. More is cut to this."""
