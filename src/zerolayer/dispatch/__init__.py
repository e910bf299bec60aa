"""Which engine computes a stream: a pure function of the fleet's load.

Owns: what a step will cost (`cost`), the choice (`policies`), what a step did cost (`steps`), and
how fast the choice is (`bench`).
Refuses: to send anything, to know streams by name, and to read a clock. A policy never learns how
long an answer will really be.
"""
