"""The command line: words to options, results to text.

Owns: everything that is printed, the exit status, and the environment, which is read nowhere else.
Refuses: to do the work itself. A command gathers its options, calls one function of a lower room
and shows what came back; vLLM, torch and numpy are imported only by commands that need them.
"""
