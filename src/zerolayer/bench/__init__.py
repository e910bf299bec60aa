"""Measures what the product promises, on real servers that it starts, hurts and ends itself.

Owns: starting a fleet (or stock vLLM) as a process of its own and leaving nothing of it behind
(`fleet_process`), faults on purpose (`chaos_signals`), a client that notes every token as it comes
(`stream_client`), comparing a run with its undisturbed reference (`compare`), and the measurements
made of these (`failover`, `overhead`, `snapshot`, `demo`). Refuses: to import vLLM (servers are
processes and HTTP here), to be imported by anything that serves, and to print a figure that was
not measured in the same run.
"""
