"""A fleet on a virtual clock: the product's own `dispatch` and `stitch` code against modelled
engines.

Owns: traces and GPU profiles (`data/`, with their licences), the engine model, faults, the event
loop, and what is made of the results.
Refuses: to decide anything itself. A choice that the live fleet would not make is not made here.
"""
