"""The stacks of a plan as SVG for a page: text stays text, colours come from the page's style.

Lengths along the bars are percentages and heights are pixels, so that the drawing is as wide as the
screen and its text as large as the page's, on a telephone too. For files there is
`plots.plot_plan`, which shows the same with matplotlib.

Not here: the style sheet (`page`), which defines the classes `part0` to `part4`, `ink0` to `ink4`,
`short`, `hatch`, `memory`, `peak`, `quiet` and `edge`.
"""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from .plan_words import PARTS, candidates, scale_end_bytes, sizes_text, verdict_text
from .tables import bytes_text

if TYPE_CHECKING:
    from ..planning.fit import Plan
    from ..planning.forecast import Forecast

ROW, BAR, TOP = 68, 22, 26
"""Pixels: from one bar to the next, height of a bar, what is above the first row."""

WIDTH = 96.0
"""Percent of the drawing where the scale ends; the rest is for arrows and half of a diamond."""

NUMBERED = 0.2
"""A part shows its size inside when it takes this share of the width: 60 pixels of a telephone."""


def stacks_svg(plan: "Plan") -> str:
    """Draw what one device holds for each candidate, as an SVG element.

    Args:
      plan: from `zero_jax.planning.fit`.
    """
    end_bytes, shown = scale_end_bytes(plan), candidates(plan)
    height = TOP + ROW * len(shown)
    rows = [
        line
        for index, forecast in enumerate(shown)
        for line in _row(plan, forecast, TOP + ROW * index, end_bytes)
    ]
    return "\n".join(
        [
            f'<svg role="img" aria-labelledby="stacks-title stacks-desc" width="100%" '
            f'height="{height}" xmlns="http://www.w3.org/2000/svg">',
            '<title id="stacks-title">Predicted peak memory of one device, by candidate</title>',
            f'<desc id="stacks-desc">{escape(_description(plan))}</desc>',
            '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect class="hatch" width="3" height="8"/></pattern>'
            "</defs>",
            *rows,
            *_memory_line(plan, height, end_bytes),
            "</svg>",
        ]
    )


def _description(plan: "Plan") -> str:
    """All that is drawn, in words."""
    sentences = [f"Device memory is {bytes_text(plan.memory_bytes)}."]
    for f in candidates(plan):
        parts = ", ".join(f"{label} {bytes_text(getattr(f, p))}" for p, label in PARTS.items())
        sentences.append(f"{f.choice}: {sizes_text(f)}, {verdict_text(plan, f)}; {parts}.")
    return " ".join(sentences)


def _row(plan: "Plan", forecast: "Forecast", y: int, end_bytes: int) -> Iterator[str]:
    """Two lines of text, one would be too long for a telephone, and the bar under them."""
    sizes = f"{sizes_text(forecast)}, {verdict_text(plan, forecast)}"
    yield f'<text x="0" y="{y + 12}">{escape(str(forecast.choice))}</text>'
    yield f'<text class="quiet" x="0" y="{y + 28}">{escape(sizes)}</text>'
    bar = y + 34
    start_bytes, numbers, room_bytes = 0, [], NUMBERED * end_bytes
    marked_bytes = forecast.compiled.peak_bytes if forecast.compiled is not None else 0
    for index, (field, label) in enumerate(PARTS.items()):
        part_bytes = getattr(forecast, field)
        seen_bytes = min(start_bytes + part_bytes, end_bytes) - start_bytes
        x, width = _percent(start_bytes, end_bytes), _percent(seen_bytes, end_bytes)
        size = bytes_text(part_bytes)
        if seen_bytes > 0:
            title = f"<title>{escape(label)}: {size}</title>"
            where = f'x="{x}" y="{bar}" width="{width}" height="{BAR}"'
            yield f'<rect class="part{index}" {where}>{title}</rect>'
        in_the_way = start_bytes < marked_bytes < start_bytes + room_bytes
        if seen_bytes >= room_bytes and not in_the_way:
            where = f'x="{x}" dx="6" y="{bar + BAR - 7}"'
            numbers.append(f'<text class="ink{index}" {where}>{size}</text>')
        start_bytes += part_bytes
    if not forecast.fits:
        width = _percent(min(start_bytes, end_bytes), end_bytes)
        yield f'<rect class="short" x="0" y="{bar}" width="{width}" height="{BAR}"/>'
    yield from numbers
    yield from _marks(forecast, start_bytes, bar, end_bytes)


def _marks(forecast: "Forecast", stop_bytes: int, bar: int, end_bytes: int) -> Iterator[str]:
    """An arrow at the edge of a bar that is cut off, a diamond at the compiler's peak."""
    if stop_bytes > end_bytes:
        yield _at(WIDTH, bar + BAR / 2, '<path class="edge" d="M2 -6 L10 0 L2 6 Z"/>')
    if forecast.compiled is not None and forecast.compiled.peak_bytes <= end_bytes:
        peak_bytes = forecast.compiled.peak_bytes
        title = f"<title>compiler's peak: {bytes_text(peak_bytes)}</title>"
        diamond = f'<path class="peak" d="M0 -7 L6 0 L0 7 L-6 0 Z">{title}</path>'
        yield _at(WIDTH * peak_bytes / end_bytes, bar + BAR / 2, diamond)


def _memory_line(plan: "Plan", height: int, end_bytes: int) -> Iterator[str]:
    memory_bytes = plan.memory_bytes
    size = bytes_text(memory_bytes)
    if memory_bytes > end_bytes:
        text = f"device memory {size}, more than is drawn"
        yield f'<text class="quiet" x="100%" y="12" text-anchor="end">{text}</text>'
        return
    share = memory_bytes / end_bytes
    x, anchor = _percent(memory_bytes, end_bytes), "end" if share > 0.5 else "start"
    yield f'<line class="memory" x1="{x}" x2="{x}" y1="18" y2="{height}"/>'
    yield f'<text class="quiet" x="{x}" y="12" text-anchor="{anchor}">device memory {size}</text>'


def _percent(count: int, end_bytes: int) -> str:
    return f"{WIDTH * count / end_bytes:.3f}%"


def _at(percent: float, y: float, shape: str) -> str:
    """A shape in pixels at a place in percent: only an inner drawing's corner can be there."""
    return f'<svg x="{percent:.3f}%" y="{y:g}" overflow="visible">{shape}</svg>'
