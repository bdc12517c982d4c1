"""A plan as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

Light and dark follow the reader's setting; the tables scroll inside their frames on a narrow
screen. All text from the plan is escaped.

Not here: the drawing (`plan_svg`), the words of the cells (`plan_words`).
"""

from collections.abc import Callable, Mapping
from html import escape
from string import Template
from typing import TYPE_CHECKING

from .plan_svg import stacks_svg
from .plan_words import (
    PARTS,
    any_compiled,
    candidates,
    compiled_cell,
    exposed_seconds,
    host_cells,
    kinds,
    link_cells,
    place_text,
    seconds_text,
    sent_text,
    share_text,
    verdict_text,
)
from .tables import bytes_text

if TYPE_CHECKING:
    from ..planning.fit import Plan
    from ..planning.forecast import Forecast

Cell = Callable[["Forecast"], str]

VERDICT = "verdict"
"""Heading of the one column that is coloured."""


def plan_page(plan: "Plan") -> str:
    """Write a plan as a self-contained HTML page: advice, stacks, tables, what the numbers mean.

    Args:
      plan: from `zero_jax.planning.fit`.
    """
    columns = _memory_columns(plan) | _time_columns(plan)
    return PAGE.substitute(
        style=STYLE,
        title=escape(place_text(plan)),
        advice=escape(plan.advice),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in plan.notes),
        parameters=f"{plan.parameters:,}",
        legend=_legend(plan),
        stacks=stacks_svg(plan),
        table=_table(plan, columns, "Memory and time"),
        wire=_table(plan, _wire_columns(plan), "Wire bytes of a step by kind"),
        convention=escape(plan.convention),
        host=HOST if link_cells(plan) else "",
    )


def _legend(plan: "Plan") -> str:
    keys = {f"key{index}": label for index, label in enumerate(PARTS.values())}
    if any_compiled(plan):
        keys["diamond"] = "compiler's peak"
    if not all(forecast.fits for forecast in candidates(plan)):
        keys["hatched"] = "does not fit"
    return "\n".join(f'<li><i class="{key}"></i>{label}</li>' for key, label in keys.items())


def _memory_columns(plan: "Plan") -> dict[str, Cell]:
    memory = plan.memory_bytes
    columns: dict[str, Cell] = {
        VERDICT: lambda f: verdict_text(plan, f),
        "predicted peak": lambda f: bytes_text(f.peak_bytes),
        "of the device": lambda f: share_text(f.peak_bytes, memory),
    }
    if any_compiled(plan):
        columns["compiler's peak"] = compiled_cell(lambda c: bytes_text(c.peak_bytes))
    for field, label in PARTS.items():
        columns[label] = lambda f, field=field: bytes_text(getattr(f, field))
    return columns | {name.replace("\n", " "): cell for name, cell in host_cells(plan).items()}


def _time_columns(plan: "Plan") -> dict[str, Cell]:
    columns: dict[str, Cell] = {
        "computing": lambda f: seconds_text(f.compute_seconds),
        "transfers": lambda f: seconds_text(f.transfer_seconds),
        "step": lambda f: seconds_text(f.step_seconds),
        "of it exposed": lambda f: seconds_text(exposed_seconds(f)),
    }
    if any_compiled(plan):
        columns["exposed, compiled"] = compiled_cell(lambda c: seconds_text(c.exposed_seconds))
    return columns | {name.replace("\n", " "): cell for name, cell in link_cells(plan).items()}


def _wire_columns(plan: "Plan") -> dict[str, Cell]:
    columns: dict[str, Cell] = {"in all": lambda f: bytes_text(f.wire_bytes)}
    if any_compiled(plan):
        columns["in all, compiled"] = compiled_cell(lambda c: bytes_text(c.wire_bytes))
    for kind in kinds(plan):
        columns[kind] = lambda f, kind=kind: sent_text(f, kind)
        if any_compiled(plan):
            columns[f"{kind}, compiled"] = compiled_cell(lambda c, kind=kind: sent_text(c, kind))
    return columns


def _table(plan: "Plan", columns: Mapping[str, Cell], label: str) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("candidate", *columns))
    body = "\n".join(_table_row(forecast, columns) for forecast in candidates(plan))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _table_row(forecast: "Forecast", columns: Mapping[str, Cell]) -> str:
    row = [f'<th scope="row">{escape(str(forecast.choice))}</th>']
    for name, cell in columns.items():
        kind = f' class="{"fits" if forecast.fits else "lacks"}"' if name == VERDICT else ""
        row.append(f"<td{kind}>{escape(cell(forecast))}</td>")
    return f"<tr>{''.join(row)}</tr>"


STYLE = """\
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --quiet: #595959; --line: #d4d4d4;
  --good: #00694c; --bad: #a32b00; --raised: #f4f4f2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e9e9e7; --quiet: #a9a9a6; --line: #3b3e42; --good: #4cc79f;
    --bad: #ff9a73; --raised: #212428; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
.advice { padding: .7rem 1rem; border-left: 4px solid var(--ink); background: var(--raised);
  font-size: 1.1rem; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none;
  font-size: .85rem; }
.legend i { display: inline-block; width: .85em; height: .85em; margin-right: .45em; }
.part0, .key0 { fill: #0072b2; background: #0072b2; }
.part1, .key1 { fill: #e69f00; background: #e69f00; }
.part2, .key2 { fill: #009e73; background: #009e73; }
.part3, .key3 { fill: #999; background: #999; }
.part4, .key4 { fill: #cc79a7; background: #cc79a7; }
svg { display: block; overflow: visible; }
svg text { font-size: 13px; fill: var(--ink); }
svg .quiet { font-size: 12px; fill: var(--quiet); }
svg .ink0 { fill: #fff; }
svg .ink1, svg .ink2, svg .ink3, svg .ink4 { fill: #000; }
svg [class^=ink] { font-size: 12px; pointer-events: none; }
.hatch { fill: #fff; fill-opacity: .35; }
.short { fill: url(#hatch); pointer-events: none; }
.memory { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 5 4; }
.edge { fill: var(--ink); }
.peak { fill: #fff; stroke: #000; stroke-width: 1.5; }
.legend .diamond { background: #fff; border: 1.5px solid #000; width: .7em; height: .7em;
  transform: rotate(45deg); }
.legend .hatched { background: repeating-linear-gradient(135deg,
  #777 0, #777 3px, #ccc 3px, #ccc 6px); }
.scroll { overflow-x: auto; border: 1px solid var(--line); }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody th { font-weight: 400; }
tr > :first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
@media (max-width: 40rem) { tr > :first-child { white-space: normal; min-width: 7.5rem; } }
.fits { color: var(--good); }
.lacks { color: var(--bad); font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 .6rem; }
"""

HOST = """\
<dt>Host</dt><dd>What lies in the host's memory for one device, and in all for those of one process;
what passes in one step between the two, each way; and how long the link takes for the longer way,
part of it before the update and part in it.</dd>"""

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="advice">$advice</p>
<p>$parameters parameters.</p>
$notes
<h2>What one device holds at the peak of a step</h2>
<ul class="legend">
$legend
</ul>
$stacks
<h2>Memory and time</h2>
$table
<h2>Wire bytes of a step by kind</h2>
$wire
<h2>What the numbers mean</h2>
<dl>
<dt>Convention</dt><dd>$convention</dd>
<dt>Predicted</dt><dd>Parameters, gradients, optimizer state and other state (statistics, keys, the
batch) are counted leaf by leaf from the layout. Activations and temporaries are what the predicted
peak has beyond them.</dd>
<dt>Compiled</dt><dd>The word of the compiler for this topology, where it was asked: its peak is
arguments + outputs - aliased + temporaries, its wire bytes are read off the compiled step. Where it
was asked, it decides whether a candidate fits.</dd>
<dt>Wire bytes</dt><dd>What one device sends in one step, in rings: an all-gather or
reduce-scatter over N devices (N-1)/N of the whole, an all-reduce twice that.</dd>
$host
<dt>Time</dt><dd>From the vendors' peak figures for arithmetic and links, so a bound from below,
not a promise. Exposed is the part of the transfers that no computing covers. A dash stands for what
was not compiled, is not sent, or has no figure.</dd>
<dt>Sizes</dt><dd>1 GiB is 2<sup>30</sup> bytes.</dd>
</dl>
</main>
</body>
</html>
""")
