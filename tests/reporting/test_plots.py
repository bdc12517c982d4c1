"""The figures show the numbers they were given, with units, and leave pyplot alone."""

import importlib.util
import sys

import pytest
from reporting import plans

from zero_jax.reporting import plots

BYTES = {
    0: {"params": 4 << 20, "grads": 4 << 20, "opt_state": 8 << 20, "other": 4},
    3: {"params": 1 << 19, "grads": 1 << 19, "opt_state": 1 << 20, "other": 4},
}


def words(figure) -> str:
    figure.draw_without_rendering()
    axes = figure.axes[0]
    labels = [t.get_text() for t in axes.texts + axes.get_xticklabels()]
    legend = [t.get_text() for t in axes.get_legend().get_texts()]
    titles = [axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()]
    return "\n".join(labels + legend + titles)


def test_losses_are_drawn_with_their_last_values_and_unit():
    curves = {"training": [(1, 5.0), (2, 4.0)], "validation": [(2, 4.25)], "absent": []}
    figure = plots.plot_losses(curves, "nats per byte")
    text = words(figure)
    assert "training: 4.000" in text and "validation: 4.250" in text and "absent" not in text
    assert "training step" in text and "loss (nats per byte)" in text
    low, high = figure.axes[0].get_ylim()
    assert low < 4.0 and high > 5.0


def test_a_long_curve_is_smoothed_and_its_first_fall_may_leave_the_figure():
    losses = [10.0] * 2 + [2.0, 3.0] * 49
    figure = plots.plot_losses({"training": list(enumerate(losses))})
    faint, mean = figure.axes[0].lines
    assert list(faint.get_ydata()) == losses
    assert mean.get_ydata()[0] == 10.0 and mean.get_ydata()[-1] == 2.5
    assert figure.axes[0].get_ylim()[1] < 4


def test_bars_have_the_heights_of_the_bytes():
    figure = plots.plot_bytes_by_stage(BYTES, devices=8)
    heights = [[bar.get_height() for bar in bars] for bars in figure.axes[0].containers]
    assert heights == [[4.0, 0.5], [4.0, 0.5], [8.0, 1.0]]  # params, grads, optimizer; MiB
    text = words(figure)
    assert "16 MiB" in text and "2 MiB\n12.5%" in text and "over 8 devices" in text
    assert "parameters" in text and "gradients" in text and "optimizer state" in text


@pytest.mark.parametrize(("count", "unit"), [(0, "bytes"), (1023, "bytes"), (1024, "KiB")])
def test_the_unit_is_that_of_the_tallest_bar(count, unit):
    figure = plots.plot_bytes_by_stage({1: {"params": count, "grads": 0, "opt_state": 0}}, 2)
    assert f"bytes on one device ({unit})" in words(figure)


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="no points"):
        plots.plot_losses({"training": []})
    with pytest.raises(ValueError, match="at least one stage"):
        plots.plot_bytes_by_stage({}, 8)


FOUR = plans.plan(*(plans.forecast(stage, 6 * 10**9) for stage in range(4)))


def drawn(plan):
    """Axes of the figure, and its bars as part -> widths from the first candidate on."""
    figure = plots.plot_plan(plan)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    bars: dict[str, list[float]] = {}
    for container in axes.containers:
        bars.setdefault(str(container.get_label()), []).append(container[0].get_width())
    return axes, bars


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.figure.legends[0].get_texts()]


def hatched(axes) -> list[bool]:
    """Of each candidate, whether all of its bar is hatched."""
    hatches = [bool(container[0].get_hatch()) for container in axes.containers]
    return [all(hatches[i : i + 5]) for i in range(0, len(hatches), 5)]


def test_a_plan_is_drawn_as_stacks_of_its_parts():
    axes, bars = drawn(FOUR)
    gib = 6e9 / 2**30  # of one byte a parameter
    assert bars["parameters"] == pytest.approx([2 * gib, 2 * gib, 2 * gib, 2 * gib / 8])
    assert bars["gradients"] == pytest.approx([2 * gib, 2 * gib, 2 * gib / 8, 2 * gib / 8])
    assert bars["optimizer state"] == pytest.approx([12 * gib] + 3 * [12 * gib / 8])
    assert bars["activations and temporaries"] == pytest.approx(4 * [4 * gib])
    starts = [container[0].get_x() for container in axes.containers[:5]]
    assert starts == pytest.approx([0, 2 * gib, 4 * gib, 16 * gib, 16 * gib])  # other: 16 bytes
    assert [t.get_text() for t in axes.get_yticklabels()] == [str(f.choice) for f in FOUR.forecasts]
    assert "(GiB)" in axes.get_xlabel()
    assert "gpt2_xl on h100:8" in axes.get_title("left")


def test_sizes_and_verdicts_stand_beside_the_bars():
    axes, _ = drawn(FOUR)
    texts = [text.get_text() for text in axes.texts]
    assert "112 GiB, short of 32.8 GiB" in texts  # 20 x 6e9 bytes - 79 GiB
    assert "53.1 GiB, fits" in texts  # (2 + 2 + 12 / 8 + 4) x 6e9 bytes
    assert "67.1 GiB" in texts  # 12 x 6e9 bytes, in the bar


def test_what_does_not_fit_is_hatched():
    axes, _ = drawn(FOUR)
    assert hatched(axes) == [True, False, False, False]
    assert "does not fit" in legend(axes)
    axes, _ = drawn(plans.plan(plans.forecast(3)))
    assert hatched(axes) == [False]
    assert "does not fit" not in legend(axes)


def test_device_memory_is_a_line_unless_it_dwarfs_the_bars():
    axes, _ = drawn(FOUR)
    (line,) = [line for line in axes.lines if line.get_label() == "device memory 79.0 GiB"]
    assert list(line.get_xdata()) == [79, 79]
    axes, _ = drawn(plans.plan(plans.forecast(0, 50_000)))
    assert not axes.lines
    assert "79.0 GiB each), more than is drawn" in axes.get_title("left")


def test_the_compilers_peak_is_a_marker_where_there_is_one():
    gib = plans.GIB
    asked = plans.compiled(plans.forecast(2, 6 * 10**9), 40 * gib)
    axes, _ = drawn(plans.plan(plans.forecast(1, 6 * 10**9), asked))
    (marks,) = [line for line in axes.lines if line.get_label() == "compiler's peak"]
    assert list(marks.get_xydata()[0]) == [40, 1.17] and len(marks.get_xydata()) == 1
    assert "43.3 GiB (compiled 40.0 GiB), fits" in [text.get_text() for text in axes.texts]


def test_a_bar_of_many_device_memories_is_cut_off_beside_one_that_fits():
    huge, small = plans.forecast(0, 10**12), plans.forecast(3)
    axes, bars = drawn(plans.plan(huge, small))
    assert axes.get_xlim()[1] == pytest.approx(1.02 * 79)  # device memory, and a margin
    assert bars["parameters"][0] > axes.get_xlim()[1]
    arrows = [line for line in axes.lines if line.get_marker() == ">"]
    assert [list(arrow.get_ydata()) for arrow in arrows] == [[0]]
    axes, _ = drawn(plans.plan(huge))  # alone it is drawn to its end
    assert axes.get_xlim()[1] * 2**40 > huge.peak_bytes
    assert not [line for line in axes.lines if line.get_marker() == ">"]


@pytest.mark.parametrize("count", [1, 2, 24])
def test_no_two_candidates_overlap(count):
    choices = [(s, r, m) for s in range(4) for r in (False, True) for m in (1, 4, 16)][:count]
    forecasts = [plans.forecast(s, remat=r, microbatches=m) for s, r, m in choices]
    figure = plots.plot_plan(plans.plan(*forecasts))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert len(boxes) == count
    assert all(above.y0 > below.y1 for above, below in zip(boxes, boxes[1:], strict=False))
    page = figure.bbox
    texts = [*axes.texts, *axes.get_yticklabels(), axes.title, *figure.legends[0].get_texts()]
    for text in texts:
        box = text.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1, text.get_text()


def test_a_name_with_dollars_is_drawn_as_it_is():
    axes, _ = drawn(plans.plan(plans.forecast(1), program="a$\\no_such$b"))
    assert axes.get_title("left").startswith("a$\\no_such$b on")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.artist", None)
    spec = importlib.util.spec_from_file_location("zero_jax.reporting.again", plots.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'zero_jax\[plan\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_figure_is_saved_without_pyplot(tmp_path):
    plots.plot_bytes_by_stage(BYTES, 8).savefig(tmp_path / "bytes.png")
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
