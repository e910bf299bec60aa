"""The words of Zero-Layer: ids, engine state, outcomes, limits, errors, and the ports to the world.

Owns: what every other room may name. Refuses: I/O, clocks, randomness, and knowledge of any room
above.
"""
