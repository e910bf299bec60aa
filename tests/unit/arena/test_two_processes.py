import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.unit.arena.fake_kv import BLOCK_TOKENS, rows_are_right, tokens_of
from zerolayer.arena.reader import ArenaReader

ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0


def read_and_check(reader: ArenaReader, variant: int) -> int:
    """Copies what a reader may use of one stream, as a resume does; returns its tokens.

    0 when there is nothing or when the pages changed hands while they were copied.
    """
    tokens = tokens_of(variant)
    slot = reader.find(f"s{variant}")
    if slot is None:
        return 0
    verified = reader.verified_tokens(slot, tokens)
    blocks = -(-verified // BLOCK_TOKENS)
    pages = slot.pages[:blocks].tolist()
    copies = [reader.page_view(page).copy() for page in pages]
    if not reader.unchanged(slot, pages):
        return 0
    for block, copy in enumerate(copies):
        rows = min(BLOCK_TOKENS, verified - block * BLOCK_TOKENS)
        assert rows_are_right(copy, tokens, block, rows), f"wrong token in s{variant}, {block}"
    return verified


@pytest.mark.parametrize("seed", range(4))
def test_a_writer_killed_at_any_moment_leaves_no_wrong_token(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a.kv"
    command = [sys.executable, "-m", "tests.unit.arena.crash_writer", str(path), str(seed)]
    deadline = time.monotonic() + DEADLINE_S
    reads_before_kill = int(np.random.default_rng(seed).integers(50, 400))
    writer = subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
    try:
        reader = None
        while reader is None:
            assert writer.poll() is None
            assert time.monotonic() < deadline
            reader = ArenaReader.open_or_none(path)
        reads = 0
        while reads < reads_before_kill:
            assert writer.poll() is None
            assert time.monotonic() < deadline, f"{reads} reads"
            reads += sum(read_and_check(reader, variant) > 0 for variant in range(4))
    finally:
        writer.kill()
        writer.wait()
    kept = [read_and_check(reader, variant) for variant in range(4)]
    assert kept == [read_and_check(reader, variant) for variant in range(4)]
    reader.close()
