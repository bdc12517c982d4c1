"""A plan for a terminal, and as JSON.

One row per candidate. The columns come in groups (does it fit, where the bytes are, what a step
costs, what crosses the wire); a console that is too narrow for all of them gets several tables,
each with the candidate in front. Colour repeats what words say, so nothing is lost in a log.

Not here: how the numbers come about (`zero_jax.planning`), figures (`plots`), the page (`page`).
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .plan_words import (
    PARTS,
    any_compiled,
    candidates,
    compiled_cell,
    exposed_seconds,
    host_cells,
    kinds,
    link_cells,
    offload_text,
    place_text,
    seconds_text,
    sent_text,
    share_text,
    verdict_text,
)
from .tables import bytes_text

if TYPE_CHECKING:
    from ..planning.fit import Plan
    from ..planning.forecast import Compiled, Forecast

NOTE = (
    "Bytes are those of one device; wire bytes are what it sends in a step, in all and by kind. "
    "Predicted wire bytes are those that a step writes down itself, as make_train_step does, and "
    "the paper's for any other; a step is at least as long as given: peak bf16 rates, "
    "no latency."
)


def plan_table(plan: "Plan") -> RenderableType:
    """Lay out a plan for a terminal: what it is of, a row per candidate, and the advice last.

    Columns that would say the same for all candidates (no remat, one microbatch, nothing on the
    host, nothing compiled) are left out.

    Args:
      plan: from `zero_jax.planning.fit`.
    """
    groups = [_fit_columns(plan), _part_columns(plan), _cost_columns(plan), _kind_columns(plan)]
    return Group(
        Text(place_text(plan), style="bold"),
        Text(f"{plan.parameters:,} parameters; {plan.convention}", style="dim"),
        Text(),
        _Tables(_choice_columns(plan), groups),
        Text(NOTE, style="dim"),
        *(Text(note) for note in plan.notes),
        Text(plan.advice, style="bold"),
    )


def plan_json(plan: "Plan") -> str:
    """Write a plan as strict JSON: the records' own names, bytes as integers, NaN as null.

    Properties (`peak_bytes`, `fits`, ...) are written beside the fields that they follow from.
    """
    return json.dumps(_plain(plan), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Records, mappings and sequences as JSON has them."""
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        names += [name for name, x in vars(type(value)).items() if isinstance(x, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class _Column:
    """A heading, and a cell for each forecast."""

    heading: str
    cells: tuple[Text, ...]
    right: bool = True

    @property
    def width(self) -> int:
        lines = [Text(line) for line in self.heading.split("\n")]
        return max(text.cell_len for text in (*lines, *self.cells))


GAP = 2
"""Blanks between two columns."""


@dataclass(frozen=True)
class _Tables:
    """Groups of columns in as few tables as the console is wide, `first` in front of each."""

    first: list[_Column]
    groups: list[list[_Column]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        for columns in self.packed(options.max_width):
            yield _table([*self.first, *columns])
            yield Text()

    def packed(self, width: int) -> list[list[_Column]]:
        """Columns of each table: a group stays together unless it alone is too wide."""
        room = width + GAP - _width(self.first)  # no gap follows the last column
        tables: list[list[_Column]] = []
        for group in self.groups:
            if tables and _width([*tables[-1], *group]) <= room:
                tables[-1] += group
                continue
            tables.append([])
            for column in group:
                if tables[-1] and _width([*tables[-1], column]) > room:
                    tables.append([])
                tables[-1].append(column)
        return tables


def _width(columns: list[_Column]) -> int:
    return sum(column.width + GAP for column in columns)


def _table(columns: list[_Column]) -> Table:
    # The box draws one of the two blanks between columns.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(Text(column.heading), justify=justify, vertical="bottom", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _column(
    plan: "Plan", heading: str, cell: Callable[["Forecast"], str], right: bool = True
) -> _Column:
    return _Column(heading, tuple(Text(cell(forecast)) for forecast in candidates(plan)), right)


def _compiled_column(plan: "Plan", heading: str, cell: Callable[["Compiled"], str]) -> _Column:
    return _column(plan, heading, compiled_cell(cell))


def _choice_columns(plan: "Plan") -> list[_Column]:
    choices = [forecast.choice for forecast in candidates(plan)]
    columns = [_column(plan, "stage", lambda f: str(f.choice.stage))]
    if any(choice.remat for choice in choices):
        columns.append(_column(plan, "remat", lambda f: "yes" if f.choice.remat else "no", False))
    if any(choice.microbatches != 1 for choice in choices):
        columns.append(_column(plan, "micro-\nbatches", lambda f: str(f.choice.microbatches)))
    if any(choice.offload != "none" for choice in choices):
        columns.append(_column(plan, "off-\nloaded", offload_text, False))
    return columns


def _fit_columns(plan: "Plan") -> list[_Column]:
    memory = plan.memory_bytes
    columns = [
        _column(plan, "predicted\npeak", lambda f: bytes_text(f.peak_bytes)),
        _column(plan, "of\ndevice", lambda f: share_text(f.peak_bytes, memory)),
    ]
    if any_compiled(plan):
        columns += [
            _compiled_column(plan, "compiler's\npeak", lambda c: bytes_text(c.peak_bytes)),
            _compiled_column(plan, "of\ndevice", lambda c: share_text(c.peak_bytes, memory)),
        ]
    verdicts = [
        Text(verdict_text(plan, f), style="green" if f.fits else "bold red")
        for f in candidates(plan)
    ]
    return [*columns, _Column("verdict", tuple(verdicts), right=False)]


def _part_columns(plan: "Plan") -> list[_Column]:
    headings = {**PARTS, "optimizer_bytes": "optimizer", "other_bytes": "other"}
    headings["temporaries_bytes"] = "activations,\ntemporaries"
    columns = [
        _column(plan, heading, lambda f, name=name: bytes_text(getattr(f, name)))
        for name, heading in headings.items()
    ]
    return columns + [_column(plan, heading, cell) for heading, cell in host_cells(plan).items()]


def _cost_columns(plan: "Plan") -> list[_Column]:
    wire = _column(plan, "wire bytes\nper step", lambda f: bytes_text(f.wire_bytes))
    step = _column(plan, "step", lambda f: seconds_text(f.step_seconds))
    exposed = _column(plan, "of it\nexposed", lambda f: seconds_text(exposed_seconds(f)))
    link = [_column(plan, heading, cell) for heading, cell in link_cells(plan).items()]
    if not any_compiled(plan):
        return [wire, step, exposed, *link]
    compiled = [
        _compiled_column(plan, "wire bytes\ncompiled", lambda c: bytes_text(c.wire_bytes)),
        _compiled_column(plan, "exposed\ncompiled", lambda c: seconds_text(c.exposed_seconds)),
    ]
    return [wire, compiled[0], step, exposed, compiled[1], *link]


def _kind_columns(plan: "Plan") -> list[_Column]:
    columns = []
    for kind in kinds(plan):
        columns.append(_column(plan, kind, lambda f, kind=kind: sent_text(f, kind)))
        if any_compiled(plan):
            heading = f"{kind}\ncompiled"
            columns.append(_compiled_column(plan, heading, lambda c, k=kind: sent_text(c, k)))
    return columns
