"""Traces of the package, as they are read."""

from pathlib import Path

import pytest

from zerolayer.core.errors import ConfigError
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


def shared_prompts(path: Path, header: str, *rows: str) -> str:
    path.write_text("\n".join((header, *rows)) + "\n")
    return str(path)


def test_a_file_of_ones_own_can_say_which_prompts_begin_alike(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,block_tokens,prefix_hashes"
    rows = ("0,40,5,16,1 2", "1,64,5,16,1 7-9", "2,8,5,16,")
    trace = load_trace(shared_prompts(tmp_path / "mine.csv", header, *rows))
    assert trace.prefixes == ((1, 2), (1, 7, 8, 9), ())
    assert trace.block_tokens == 16


@pytest.mark.parametrize(
    ("columns", "row", "said"),
    [
        ("prefix_hashes", "1 2", "without block_tokens"),
        ("block_tokens", "16", "prefix_hashes"),
        ("block_tokens,prefix_hashes", "0,1 2", "not one number of at least 1"),
        ("block_tokens,prefix_hashes", "16,one", "one"),
        ("block_tokens,prefix_hashes", ",1 2", "int"),
        ("block_tokens,prefix_hashes", "16,1-4", "line 2 has 4 blocks for 40 prompt tokens"),
    ],
)
def test_prefixes_that_cannot_be_read_are_refused(
    tmp_path: Path, columns: str, row: str, said: str
) -> None:
    header = f"arrival_s,prompt_tokens,output_tokens,{columns}"
    path = shared_prompts(tmp_path / "mine.csv", header, f"0,40,5,{row}")
    with pytest.raises(ConfigError, match=said) as refused:
        load_trace(path)
    assert path in str(refused.value)


def test_blocks_of_two_lengths_in_one_file_are_refused(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,block_tokens,prefix_hashes"
    path = shared_prompts(tmp_path / "mine.csv", header, "0,40,5,16,1", "1,40,5,32,1")
    with pytest.raises(ConfigError, match=r"\[16, 32\]"):
        load_trace(path)
