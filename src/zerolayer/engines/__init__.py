"""Everything that imports vLLM, so that an upgrade of vLLM touches one room.

Owns: starting engine processes and ending them, the client that vLLM's AsyncLLM talks to, the KV
connector and the resume plugin that run inside an engine, and the packaged default model.
Refuses: to decide. Where a stream goes is `dispatch`; whether an engine is stalled, and what a
stream does next, is `stitch`. This room carries their decisions out.
"""
