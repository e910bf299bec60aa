"""What becomes of a stream when its engine stops half-way.

Owns: the life of a stream across engines (`stream`), the judgement whether an engine is stalled or
only slow (`stall`, with its words in `stall_evidence` and its memory in `stall_history`), and the
asyncio driver around both (`driver`), which carries out what the two decide.
Refuses: to choose an engine (that is `dispatch`), to speak to one (that is `engines`), and to touch
the text of an answer. `stream` and `stall*` never wait and never read a clock.
"""
