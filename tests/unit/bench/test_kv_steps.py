"""The layout index, found from the outside in pages one token apart."""

import numpy as np

from zerolayer.bench.kv_steps import Step, StepCopy, derive_rows, gather, steps_of
from zerolayer.bench.snapshot import changed_pages, measure

LAYERS, BLOCK_TOKENS, PER_TOKEN = 3, 4, 8
ELEMENTS = BLOCK_TOKENS * PER_TOKEN
RNG = np.random.default_rng(0)
ROWS = RNG.permutation(ELEMENTS).reshape(BLOCK_TOKENS, PER_TOKEN)


def pages() -> list[StepCopy]:
    """A block that fills token by token, in a layout that scatters each token."""
    page = np.zeros((LAYERS, ELEMENTS), dtype=np.uint16)
    copies = [StepCopy(0, 0, 0, page.copy().view(np.uint8).reshape(-1))]
    for row in range(BLOCK_TOKENS):
        page[:, ROWS[row]] = RNG.integers(1, 60_000, (LAYERS, PER_TOKEN))
        raw = page.copy().view(np.uint8).reshape(-1)
        copies.append(StepCopy(row + 1, 0, 100 * (row + 1), raw))
    return copies


def test_rows_are_found_as_they_were_scattered() -> None:
    rows = derive_rows(steps_of(pages(), BLOCK_TOKENS), LAYERS, BLOCK_TOKENS)
    assert not isinstance(rows, str)
    assert sorted(rows) == list(range(BLOCK_TOKENS))
    for row, elements in rows.items():
        assert sorted(ROWS[row]) == elements.tolist()


def test_only_neighbours_of_one_block_make_a_step() -> None:
    copies = pages()
    assert len(steps_of(copies, BLOCK_TOKENS)) == BLOCK_TOKENS
    assert steps_of([copies[0], copies[2]], BLOCK_TOKENS) == []
    other_block = StepCopy(copies[1].tokens, 1, 0, copies[1].page)
    assert steps_of([copies[0], other_block], BLOCK_TOKENS) == []


def test_what_the_engine_wrote_is_counted_by_step() -> None:
    assert {step.bytes_written for step in steps_of(pages(), BLOCK_TOKENS)} == {100}


def test_a_page_that_changed_elsewhere_too_gives_no_index() -> None:
    step = steps_of(pages(), BLOCK_TOKENS)[0]
    after = step.after.copy()
    after.view(np.uint16)[ROWS[3][0]] = 7
    found = derive_rows([Step(0, step.before, after, 0)], LAYERS, BLOCK_TOKENS)
    assert isinstance(found, str)
    assert "should own" in found


def test_no_steps_give_a_sentence() -> None:
    assert derive_rows([], LAYERS, BLOCK_TOKENS) == "no two copies of a page were one token apart"


def test_gathered_rows_hold_exactly_the_new_token() -> None:
    steps = steps_of(pages(), BLOCK_TOKENS)
    rows = derive_rows(steps, LAYERS, BLOCK_TOKENS)
    assert not isinstance(rows, str)
    step = steps[2]
    token = gather(step.after, LAYERS, rows[2])
    assert token.shape == (LAYERS, PER_TOKEN)
    assert (token != gather(step.before, LAYERS, rows[2])).all()


def test_only_memory_pages_that_changed_are_taken() -> None:
    before = np.zeros(3 * 4096 + 100, dtype=np.uint8)
    after = before.copy()
    after[4096] = after[3 * 4096 + 99] = 1
    assert len(changed_pages(Step(0, before, after, 0))) == 2 * 4096
    assert changed_pages(Step(0, before, before, 0)) == b""


def test_each_codec_gets_a_size_and_a_time() -> None:
    steps = steps_of(pages(), BLOCK_TOKENS)
    found = measure(
        steps, lambda step: bytes(2048), {"none": lambda d: d, "half": lambda d: d[:1024]}
    )
    assert found["none"]["kib_per_token"] == 2.0
    assert found["half"]["kib_per_token"] == 1.0
    assert found["none"]["us_per_token"] >= 0
