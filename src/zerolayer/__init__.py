"""Zero-Layer: who computes this token, and what if they stop half-way.

Rooms, from the bottom up: `core` (words and ports), `arena` (KV pages in shared memory),
`dispatch` (which engine), `stitch` (streams that survive their engine), `engines` (everything that
imports vLLM), `gateway` (our HTTP routes), `app` (wiring) and `cli`. Imports point down;
`docs/tour.md` follows one request through them.
"""

__version__ = "0.1.0"
