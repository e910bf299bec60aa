"""The house rules that a machine can check: sizes, names, docstrings, purity, no local paths."""

import ast
import re
from pathlib import PurePosixPath

from tests.house.conftest import ROOT, Source

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 6
VAGUE_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "manager", "misc"})
# Folders of somebody's machine. Split, so that this file does not name them either.
MACHINE_PATHS = re.compile(
    "|".join(("/wo" + "rk/", "/tm" + "p/w", "/ro" + "ot/", "/ho" + "me/[a-z]"))
)
TEXT_SUFFIXES = frozenset(
    {
        ".py",
        ".md",
        ".toml",
        ".yml",
        ".yaml",
        ".lock",
        ".cfg",
        ".txt",
        ".json",
        ".sh",
        ".html",
        ".js",
        "",
    }
)
PURE_ROOMS = (
    "core/",
    "dispatch/",
    "arena/ledger.py",
    "arena/layout.py",
    "stitch/stream.py",
    "stitch/stall.py",
)
IMPURE = frozenset(
    {"asyncio", "threading", "time", "random", "os", "socket", "subprocess", "torch", "vllm"}
)
ENGINE = frozenset({"gguf", "torch", "transformers", "vllm", "zmq"})


def product(sources: list[Source]) -> list[tuple[str, Source]]:
    """The files of the package, each with its path inside it."""
    prefix = "src/zerolayer/"
    return [(s.path.removeprefix(prefix), s) for s in sources if s.path.startswith(prefix)]


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command of the terminal: typer makes an option of each parameter, so they may be many."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(
        isinstance(d, ast.Attribute) and d.attr in {"command", "callback"} for d in decorators
    )


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a caller fills in."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def imports(tree: ast.Module) -> set[str]:
    """Top-level names of everything that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def reads_environment(node: ast.AST) -> bool:
    """True for `os.getenv`, `environ[...]` and `environ.get`; setting it for a child is allowed."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and names(node.value, "environ")
    if isinstance(node, ast.Attribute):
        return node.attr == "getenv" or (node.attr == "get" and names(node.value, "environ"))
    return False


def names(node: ast.expr, name: str) -> bool:
    """True for `name` and for `anything.name`."""
    if isinstance(node, ast.Attribute):
        return node.attr == name
    return isinstance(node, ast.Name) and node.id == name


def test_no_file_is_longer_than_600_lines(sources: list[Source]) -> None:
    long = [f"{s.path}: {len(s.lines)}" for s in sources if len(s.lines) > FILE_LINES_MAX]
    assert not long, long


def test_no_function_is_longer_than_70_lines(sources: list[Source]) -> None:
    long = []
    for source in sources:
        for function in source.functions:
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                long.append(f"{source.path}:{function.lineno} {function.name}: {lines}")
    assert not long, long


def test_no_function_takes_more_than_6_parameters(sources: list[Source]) -> None:
    many = [
        f"{source.path}:{function.lineno} {function.name}: {parameter_count(function)}"
        for source in sources
        for function in source.functions
        if parameter_count(function) > PARAMETERS_MAX and not is_command(function)
    ]
    assert not many, f"{many}: make a dataclass of them"


def test_every_file_has_a_name_that_says_what_it_holds(tree: list[str]) -> None:
    vague = [p for p in tree if {PurePosixPath(part).stem for part in p.split("/")} & VAGUE_NAMES]
    assert not vague, vague


def test_every_package_says_what_it_owns(sources: list[Source]) -> None:
    packages = [s for _, s in product(sources) if s.path.endswith("/__init__.py")]
    mute = [s.path for s in packages if not ast.get_docstring(s.tree)]
    assert packages
    assert not mute, mute


def test_every_folder_with_code_is_a_package(sources: list[Source]) -> None:
    files = {path for path, _ in product(sources)}
    folders = {str(PurePosixPath(path).parent) for path in files}
    bare = [f for f in sorted(folders) if str(PurePosixPath(f) / "__init__.py") not in files]
    assert not bare, bare


def test_nothing_names_a_path_of_one_machine(tree: list[str]) -> None:
    named = []
    for path in tree:
        if PurePosixPath(path).suffix in TEXT_SUFFIXES:
            text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
            named += [f"{path}: {found.group()}" for found in MACHINE_PATHS.finditer(text)]
    assert not named, named


def test_pure_rooms_import_neither_clock_nor_chance_nor_io(sources: list[Source]) -> None:
    impure = [
        f"{source.path}: {', '.join(sorted(imports(source.tree) & IMPURE))}"
        for path, source in product(sources)
        if path.startswith(PURE_ROOMS) and imports(source.tree) & IMPURE
    ]
    assert not impure, impure


def test_the_engine_is_imported_in_engines_and_app_alone(sources: list[Source]) -> None:
    strangers = [
        f"{source.path}: {', '.join(sorted(imports(source.tree) & ENGINE))}"
        for path, source in product(sources)
        if not path.startswith(("engines/", "app/")) and imports(source.tree) & ENGINE
    ]
    assert not strangers, strangers


def test_only_the_command_line_reads_the_environment(sources: list[Source]) -> None:
    readers = []
    for path, source in product(sources):
        if path.startswith("cli/"):
            continue
        for node in ast.walk(source.tree):
            line = getattr(node, "lineno", 0)
            if reads_environment(node):
                readers.append(f"{source.path}:{line}")
    assert not readers, readers


def test_no_function_rebinds_a_module_global(sources: list[Source]) -> None:
    rebound = [
        f"{source.path}:{node.lineno}"
        for _, source in product(sources)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert not rebound, rebound
