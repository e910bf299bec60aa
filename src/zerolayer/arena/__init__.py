"""KV pages and small tables in shared memory, where they outlive the engine that wrote them.

Owns: the layout of an arena file (`layout`), the decision what is saved where (`ledger`, pure), the
messages between that decision and the copying (`plan`), the mapped memory (`mapping`, `writer`,
`reader`), the private directory that holds it all (`runtime_dir`), and the fixed-record tables
(`records`, `tables`).
Refuses: to know vLLM or an attention backend (a page is bytes; the caller brings the element index
of a token), to trust what it reads (every offset and length from a file is checked before use),
and to fail a stream: what cannot be verified is "no match".
"""
