"""A writer process that saves and ends streams for ever, in an arena too small for them."""

import sys
from pathlib import Path

import numpy as np

from tests.unit.arena.fake_kv import carry_out, hashes_of, small_geometry, tokens_of
from zerolayer.arena.ledger import ArenaLedger
from zerolayer.arena.mapping import ArenaFile
from zerolayer.arena.writer import ArenaWriter


def main() -> None:
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    choose = np.random.default_rng(seed)
    file = ArenaFile.create(path, small_geometry(page_count=8), bytes(32))
    writer, ledger = ArenaWriter(file), ArenaLedger(file.geometry, 3)
    counts: dict[str, int] = {}
    while True:
        variant = int(choose.integers(4))
        name = f"s{variant}"
        if name not in counts and ledger.open(name, int(choose.integers(1 << 30))):
            counts[name] = 0
        elif choose.random() < 0.05 and name in counts:
            ledger.close(name)
            del counts[name]
        elif name in counts:
            counts[name] = min(24, counts[name] + int(choose.choice([1, 1, 1, 2, 7])))
            tokens = tokens_of(variant)
            hashes = hashes_of(tokens, counts[name])
            plan = ledger.advance(name, counts[name], hashes, tokens)
            if plan is not None:
                carry_out(writer, plan, tokens)
            if ledger.watermark(name) is None:
                ledger.close(name)
                del counts[name]
        for clear in ledger.take_clears():
            writer.clear(clear)
        ledger.begin_step()


if __name__ == "__main__":
    main()
