"""What it takes to go on from a snapshot: seconds of loading, told as tokens to compute."""

import numpy as np

from zerolayer.core.fleet_state import FleetState

LOAD_S = 2e-3
"""Of a load, whatever its size: finding it, one order, one part of a step."""
LOAD_S_PER_TOKEN = 6e-6
"""Seconds to load a token's KV, in which the streams of the target wait too. Measured: 11-20 ms for
3,500 tokens of 22.5 KiB on two cores."""


def held_by_snapshot(fleet: FleetState, tokens: int) -> dict[int, int]:
    """`held_tokens` of a stream whose snapshot has so many, and which every engine can load.

    Each engine holds so many tokens less as it could compute while it loads. Else a load would cost
    nothing, and all streams of a lost engine would go to the one that is least busy, where each
    waits for the loads of all: loads queue inside the steps of their engine, as prefill does.
    """
    load_s = LOAD_S + LOAD_S_PER_TOKEN * tokens
    as_tokens = load_s / np.maximum(fleet.prefill_s_per_token, 1e-9)
    held = np.maximum(0.0, tokens - as_tokens)
    return dict(enumerate(held.astype(np.int64).tolist()))
