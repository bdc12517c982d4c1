"""The figures show the numbers they were given, with units, and leave pyplot alone."""

import sys

import pytest

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


def test_a_figure_is_saved_without_pyplot(tmp_path):
    plots.plot_bytes_by_stage(BYTES, 8).savefig(tmp_path / "bytes.png")
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
