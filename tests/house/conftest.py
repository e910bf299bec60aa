"""The source tree, read once, for the rules that no linter has."""

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, its lines and its syntax tree."""

    path: str
    lines: list[str]
    tree: ast.Module

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method of the file, nested ones too."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]


@pytest.fixture(scope="session")
def tree() -> list[str]:
    """Paths from the root of all files that are in git or would be added to it."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


@pytest.fixture(scope="session")
def sources(tree: list[str]) -> list[Source]:
    """Every Python file of the tree."""
    found = []
    for path in tree:
        if path.endswith(".py"):
            text = (ROOT / path).read_text(encoding="utf-8")
            found.append(Source(path, text.splitlines(), ast.parse(text, path)))
    return found
