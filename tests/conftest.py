"""Marks tests by their folder, so that `-m` can choose by what a test needs from the machine."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.fleet_fixture import fleet, model, shared_fleet

__all__ = ["fleet", "model", "shared_fleet"]

ROOT = Path(__file__).parent
ENGINE_TIMEOUT_S = 600  # an engine takes up to a minute to start on two busy cores

# The same examples on every run, and no wall-clock limit for one: a shared core is slow at times.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-minutes", type=float, default=20.0, help="how long `-m soak` keeps up its load"
    )


@pytest.fixture(scope="session")
def soak_minutes(request: pytest.FixtureRequest) -> float:
    minutes: float = request.config.getoption("--soak-minutes")
    return minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        room = item.path.relative_to(ROOT).parts[0]
        if room not in ("engine", "process"):
            continue
        item.add_marker(getattr(pytest.mark, room))
        if room == "process":
            item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
