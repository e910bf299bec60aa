"""Zero-Layer's own part of the HTTP surface, in front of vLLM's server.

Owns: the admin routes (`routes`) and what is put right in event streams on their way out (`sse`).
Refuses: to know vLLM or the fleet (everything it shows comes from injected callables), to hold
a stream back, and to judge requests: those go straight to vLLM's own routes.
"""
