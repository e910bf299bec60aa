"""The result of `zerolayer bench forecast` as tables, and where the promise is not kept."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from zerolayer.bench.skill import Skill, Subject

_SHOWN = (0, 2, 4)  # 1, 3 and 5 s ahead


def skill_table(skills: Sequence["Skill"]) -> "Table":
    """One trace: a row per quantity; cells are skill at 1, 3 and 5 s."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from zerolayer.bench.skill import AVERAGE_S

    subject = skills[0].subject
    title = f"{subject.trace}: skill at 1, 3, 5 s, by baseline"
    table = Table(title=title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("forecast of", no_wrap=True)
    for heading in ("no change", f"mean of {AVERAGE_S} s", "best mean"):
        table.add_column(heading, justify="right", no_wrap=True)
    for skill in skills:
        columns = (skill.no_change, skill.average, skill.best_average)
        table.add_row(
            _name(skill.subject),
            *(" ".join(f"{column[at]:5.2f}" for at in _SHOWN) for column in columns),
        )
    return table


def verdict(skills: Sequence["Skill"]) -> list[str]:
    """Sentences about where the skill against "no change" is what is wanted, and where not."""
    from zerolayer.bench.skill import WANTED

    held = sum(skill.holds for skill in skills)
    lines = [f"Against no change above {WANTED} at each of 1 to 5 s: {held} of {len(skills)}. Not:"]
    for skill in skills:
        if not skill.holds:
            worst, worst_rms = min(skill.no_change), min(skill.no_change_rms)
            lines.append(
                f"  {skill.subject.trace}, {_name(skill.subject)}: "
                f"least {worst:.2f} ({worst_rms:.2f} by mean squares)"
            )
    return lines


def _name(subject: "Subject") -> str:
    return f"{subject.quantity.removeprefix('prompt_')}, {subject.rate}"
