"""The next five seconds of each engine in a line: how warm it will be, and what speaks for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

GLYPHS = "▁▂▃▄▅▆▇█"
#: Shares from which a cell has a colour; the last one is the limit that placement keeps to.
_STYLES = ((0.95, "bold red"), (0.7, "yellow"), (0.3, "green"), (0.0, "cyan"))


def heat_view(status: Mapping[str, Any]) -> list[RenderableType]:
    """A strip per engine and a line about the placement; nothing where the status has neither."""
    engines = [each for each in status["engines"] if each.get("forecast_util")]
    parts: list[RenderableType] = []
    if engines:
        parts.append(_table(engines))
    if status.get("placement"):
        parts.append(_summary(status["placement"], engines))
    return parts


def strip(shares: Sequence[float]) -> Text:
    """One glyph per second, its height and colour by the share (above 1: full), and the last one
    as a percentage."""
    cells = Text()
    for share in shares:
        level = min(len(GLYPHS) - 1, max(0, int(share * len(GLYPHS))))
        cells.append(GLYPHS[level], style=_style(share))
    last = shares[-1]
    return cells.append(f" {100 * last:3.0f}", style=_style(last))


def _style(share: float) -> str:
    return next((style for least, style in _STYLES if share >= least), _STYLES[-1][1])


def _table(engines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="next 5 s", title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 0)
    )
    table.add_column("engine", no_wrap=True)
    for name in ("util %", "KV %"):
        table.add_column(name, no_wrap=True)
    for name in ("uneven", "tok/s", "free run", "frag", "link %", "domain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for engine in engines:
        run = engine["free_run_tokens"]
        table.add_row(
            engine["id"],
            strip(engine["forecast_util"]),
            strip(engine["forecast_mem"]),
            f"{engine['entropy_share']:.3f}",
            f"{engine['tokens_per_s']:.0f}",
            "-" if run is None else str(run),
            f"{engine['fragmentation']:.2f}",
            f"{100 * engine['link_use']:.1f}",
            str(engine["domain"]),
            Text("hot", style="bold red") if engine["hot"] else "",
        )
    return table


def _summary(placement: Mapping[str, Any], engines: Sequence[Mapping[str, Any]]) -> Text:
    ttft = placement["ttft_error"]
    steps = [each["step_error"] for each in engines if each.get("step_error")]
    known = [each for each in steps if each["steps"]]
    text = (
        f"placed by {placement['policy']}, admission {placement['admission']}; "
        f"unevenness {placement['objective']:.4f}\n"
        f"predicted TTFT off by: p50 {_percent(ttft['p50'], ttft['count'])}, "
        f"p90 {_percent(ttft['p90'], ttft['count'])}"
    )
    if known:
        text += (
            f"\npredicted step off by: p50 {_percent(max(each['p50'] for each in known), 1)}, "
            f"p90 {_percent(max(each['p90'] for each in known), 1)} (worst engine)"
        )
    return Text(text)


def _percent(share: float, count: int) -> str:
    return f"{100 * share:.0f} %" if count else "-"
