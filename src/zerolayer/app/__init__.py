"""Composition root: builds the real parts and wires them into a running service.

Owns: which parts there are and how they are connected. Refuses: to decide anything about
placement or continuation, and to read the environment or print (that is `cli`).
"""
