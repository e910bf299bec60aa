"""What the demo's acts come to: the closing table, and whether the promise held."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Act:
    """One run of the demo's request, against the undisturbed one."""

    title: str
    delivered: int
    """Tokens that the client got."""
    lost: int
    repeated: int
    exact: bool
    """Token by token equal to the undisturbed run."""
    gap_ms: float | None
    """The silence into which the fault fell; None: no token came any more, or no fault."""
    other_gap_ms: float
    """The longest other silence (from the fault on, if there was one)."""
    broken: bool
    moved: bool = True
    """The fault hit the engine that served it."""
    note: str = ""
    after_declared_ms: float | None = None
    restored_tokens: int = 0


@dataclass(frozen=True)
class DemoActs:
    """All acts; `plain` and `prefill` are for comparison and cannot break the promise."""

    undisturbed: Act
    kill: Act
    freeze: Act
    prefill: Act
    plain: Act | None
    plain_missing: str
    """Why there is no figure of plain vLLM, if there is none."""
    left_behind: Sequence[str]
    """Processes and files that the fleet left."""


def result_of(acts: DemoActs, seconds: float) -> dict[str, Any]:
    """The demo's JSON object. Its first fields are those of the two promised acts together."""
    promised = (acts.kill, acts.freeze)
    gaps = [act.gap_ms for act in promised if act.gap_ms is not None]
    result: dict[str, Any] = {
        "broken": sum(act.broken for act in promised),
        "tokens_lost": sum(act.lost for act in promised),
        "tokens_repeated": sum(act.repeated for act in promised),
        "exact": all(act.exact for act in promised),
        "gap_ms": max(gaps, default=None),
        "tokens_delivered": sum(act.delivered for act in promised),
    }
    held = not (result["broken"] or result["tokens_lost"] or result["tokens_repeated"])
    held = held and result["exact"] and all(act.moved for act in promised)
    result["promise_held"] = held and not acts.left_behind
    for name in ("undisturbed", "kill", "freeze", "prefill", "plain"):
        act = getattr(acts, name)
        result[name] = asdict(act) if act is not None else {"not_measured": acts.plain_missing}
    result["left_behind"] = list(acts.left_behind)
    result["seconds"] = round(seconds, 1)
    return result


def table_of(acts: DemoActs) -> Table:
    """One row per act; fits 80 columns."""
    table = Table(
        title="the same request, five times (gaps in ms, as the client saw them)",
        title_justify="left",
        pad_edge=False,
        box=box.SIMPLE,
    )
    table.add_column("its engine was")
    for heading in ("tokens", "lost", "repeated"):
        table.add_column(heading, justify="right")
    table.add_column("same text")
    table.add_column("gap at fault", justify="right")
    table.add_column("other", justify="right")
    for act in (acts.undisturbed, acts.kill, acts.freeze, acts.prefill, acts.plain):
        if act is not None:
            table.add_row(*_cells(act))
    if acts.plain is None:
        table.add_row("plain vLLM: not measured", "-", "-", "-", "-", "-", "-")
        table.caption = f"plain vLLM: {acts.plain_missing}"
    return table


def _cells(act: Act) -> tuple[str, ...]:
    same = "yes" if act.exact else "no, other"
    if act.broken:
        same = "no, broke"
    elif act.lost or act.repeated:
        same = "no"
    gap = "for ever" if act.broken else "-"
    gap = gap if act.gap_ms is None else f"{act.gap_ms:.0f}"
    counts = (str(act.delivered), str(act.lost), str(act.repeated))
    return act.title, *counts, same, gap, f"{act.other_gap_ms:.0f}"
