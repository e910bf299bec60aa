"""What the pure rooms need from the world, handed in by constructor: time and chance."""

from typing import Protocol


class Clock(Protocol):
    """Time. Real in production, virtual in simulation and tests."""

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC in ns: never goes back, comparable between processes of one machine."""
        ...

    def unix(self) -> float:
        """Seconds since 1970, for people only; it may jump."""
        ...


class Rng(Protocol):
    """Chance, one stream per purpose. `random.Random(seed)` is one."""

    def random(self) -> float:
        """A number in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """A whole number in [0, stop). Raises ValueError for a stop below 1."""
        ...
