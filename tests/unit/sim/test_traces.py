"""Traces of the package, as they are read."""

import pytest

from zerolayer.sim.traces import load_trace


@pytest.mark.parametrize("name", ["agentic_coding_4h", "mooncake_conversation"])
def test_every_prompt_with_known_blocks_has_as_many_as_cover_it(name: str) -> None:
    trace = load_trace(name)
    assert trace.prefixes is not None
    for tokens, blocks in zip(trace.prompt_tokens.tolist(), trace.prefixes, strict=True):
        assert len(blocks) in (0, tokens // trace.block_tokens, -(-tokens // trace.block_tokens))


def test_turns_of_a_session_begin_with_the_blocks_of_the_turn_before() -> None:
    """The file writes runs of ids as ranges: read wrongly, prefixes would no more be shared."""
    trace = load_trace("agentic_coding_4h")
    assert trace.prefixes is not None
    firsts = [blocks[0] for blocks in trace.prefixes if blocks]
    assert len(set(firsts)) < 0.1 * len(firsts)
