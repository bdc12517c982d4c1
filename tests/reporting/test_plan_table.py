"""The table shows a plan's numbers on any width of console, the JSON all of them."""

import dataclasses
import json

import pytest
from reporting import plans
from rich.console import Console

from zero_jax.reporting.plan_table import plan_json, plan_table

B = 10**9
FOUR = plans.plan(*(plans.forecast(stage, 6 * B) for stage in range(4)), advice="Take stage 1.")
VARIED = plans.plan(
    *(plans.compiled(plans.forecast(s, 6 * B, remat=s > 1, microbatches=2**s)) for s in range(4)),
    advised=plans.forecast(2, 6 * B, microbatches=16),
)


def lines(plan, width=250) -> list[str]:
    console = Console(width=width, force_terminal=False, no_color=True)
    with console.capture() as capture:
        console.print(plan_table(plan))
    return [line.rstrip() for line in capture.get().splitlines()]


AWAY = plans.plan(
    plans.forecast(1, 6 * B),
    plans.compiled(plans.offloaded(plans.forecast(0, 6 * B))),
    notes=("The link takes [long].",),
)


def rows(plan, width=250) -> list[list[str]]:
    """Cells of the rows of all tables: lines that start with a stage."""
    found = [line for line in lines(plan, width) if line[:5].strip().isdigit()]
    return [[cell for cell in line.split("  ") if cell] for line in found]


def test_a_row_has_the_numbers_of_its_candidate():
    row = [cell.strip() for cell in rows(FOUR)[1]]
    gib = [2, 2, 12 / 8]  # bytes a parameter at stage 1: parameters, gradients, optimizer
    states = [f"{x * 6e9 / 2**30:.3g} GiB" for x in gib]
    assert row == [
        "1",
        "53.1 GiB",  # 9.5 x 6e9 bytes
        "67.2%",  # of 79 GiB
        "fits",
        *states,
        "16 B",
        "22.4 GiB",  # 4 x 6e9 bytes
        "22.4 GiB",  # on the wire: all-gather and reduce-scatter of 2 x 6e9 bytes each
        "300 ms",
        "31.2 ms",  # transfers 281.25 ms, computing 250 ms
        "11.2 GiB",
        "-",
        "11.2 GiB",
    ]


def test_it_says_what_it_is_of_first_and_the_advice_last():
    text = lines(FOUR)
    assert text[0] == "gpt2_xl on h100:8 (8 devices with 79.0 GiB each)"
    assert text[1].startswith("6,000,000,000 parameters; 2 + 2 + 12 bytes a parameter")
    assert text[-1] == "Take stage 1."


def test_what_does_not_fit_is_told_without_colour():
    assert [row[3].strip() for row in rows(FOUR)] == ["short of 32.8 GiB", "fits", "fits", "fits"]


def test_columns_that_say_nothing_are_left_out():
    head = "\n".join(lines(FOUR)[:6])
    for heading in ("remat", "micro-", "host", "compile"):
        assert heading not in head
    text = "\n".join(lines(VARIED))
    for heading in ("remat", "micro-", "compiler's", "exposed\n"):
        assert heading in text


def test_the_compilers_words_stand_beside_the_predicted_ones():
    text = rows(VARIED, 300)
    assert len(text) == 5  # four asked for, one advised
    cells = [cell.strip() for cell in text[0]]
    assert cells[3:8] == ["112 GiB", "141.5%", "101 GiB", "127.3%", "short of 21.6 GiB"]
    assert "15.6 ms" in cells
    advised = [cell.strip() for cell in text[4]]
    assert advised[5:8] == ["-", "-", "fits, advised"]


def test_what_is_on_the_host_has_columns_where_it_is():
    """12 bytes of 6e9 parameters, for two devices of a process; the other candidate has nothing."""
    resident, away = ([cell.strip() for cell in row] for row in rows(AWAY, 400))
    assert resident[1] == "-" and away[1] == "optimizer"
    assert away.count("67.1 GiB") == 2 and "134 GiB" in away  # held, sent; of a process
    at = away.index("68.1 GiB")  # fetched, with 1 GiB of gradients
    assert away[at : at + 3] == ["68.1 GiB", "67.1 GiB", "1.50 s"]
    text = "\n".join(lines(AWAY, 400))
    for heading in ("loaded", "by a process", "link to", "from the"):
        assert heading in text and heading not in "\n".join(lines(FOUR, 400))
    assert "on disk" not in text.replace("\n", " ")
    assert lines(AWAY)[-2] == "The link takes [long]."  # the advice is last


def test_what_is_on_a_disk_has_a_column():
    filed = dataclasses.replace(plans.forecast(1), disk_bytes=3 * 2**30)
    (row,) = rows(plans.plan(filed))
    assert "3.00 GiB" in [cell.strip() for cell in row]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("plan", [FOUR, VARIED], ids=["four", "varied"])
def test_a_narrow_console_gets_more_tables_and_whole_cells(plan, width):
    text = lines(plan, width)
    assert max(map(len, text)) <= width
    assert not any("…" in line for line in text)
    count = len(rows(plan, 300))
    narrow = rows(plan, width)
    assert len(narrow) % count == 0
    choice = 3 if plan is VARIED else 1  # stage, remat, microbatches in front of each table
    tables = [narrow[i : i + count] for i in range(0, len(narrow), count)]
    together = [
        [cell.strip() for table in tables for cell in table[i][choice:]] for i in range(count)
    ]
    assert together == [[cell.strip() for cell in row[choice:]] for row in rows(plan, 300)]


def test_markup_in_a_name_is_text():
    plan = plans.plan(plans.forecast(1), program="a[red]b[/]", advice="[bold]c")
    text = lines(plan)
    assert text[0].startswith("a[red]b[/] on") and text[-1] == "[bold]c"


def test_json_has_the_records_names_and_whole_bytes():
    record = json.loads(plan_json(VARIED), parse_constant=pytest.fail)
    assert list(record)[:5] == ["program", "topology", "memory_bytes", "convention", "parameters"]
    first = record["forecasts"][0]
    assert first["choice"] == {
        "stage": 0,
        "remat": False,
        "microbatches": 1,
        "offload": "none",
    }
    assert first["params_bytes"] == 2 * 6 * B and first["optimizer_bytes"] == 12 * 6 * B
    assert first["peak_bytes"] == 20 * 6 * B + 16 and first["fits"] is False
    assert first["missing_bytes"] == first["compiled"]["peak_bytes"] - 79 * 2**30
    assert first["compiled"]["wire_bytes"] == 4 * 6 * B + 2**20
    assert record["smallest_change"]["choice"]["microbatches"] == 16
    for name, value in first.items():
        if name.endswith("_bytes"):
            assert isinstance(value, int), name


def test_json_is_strict_about_what_is_no_number():
    plan = plans.plan(plans.without_figures(plans.forecast(1)))
    record = json.loads(plan_json(plan), parse_constant=pytest.fail)
    assert record["forecasts"][0]["step_seconds"] is None
    assert record["smallest_change"] is None
