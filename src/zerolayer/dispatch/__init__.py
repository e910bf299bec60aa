"""Which engine computes a stream: a pure function of the fleet's load.

Owns: what a step (`cost`) and a request (`request_cost`, `load`) will cost, what a step did cost
(`steps`), what the next seconds bring (`outlook`, `inflow`, `output_lengths`, shown by `heat`), how
even the fleet will be (`entropy`), where memory fits (`memory_fit`), who holds which prefix
(`prefix_index`), which engines are hot (`drain_rule`) or equal (`domains`), the choice
(`policies`), which running streams to move (`offload`), what a client (`preference`, `asked`) and
an operator (`choices`) may say to it, and how fast it is (`bench`).
Refuses: to send anything, to know streams by name, and to read a clock. A policy never learns how
long an answer will really be.
"""
