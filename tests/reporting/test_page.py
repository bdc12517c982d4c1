"""The page: whole HTML, nothing from elsewhere, every number of the plan, everything escaped."""

import re
from html.parser import HTMLParser

import pytest
from reporting import plans

from zero_jax.reporting.page import plan_page

B = 10**9
VOID = {"meta", "br", "link", "img", "input", "hr"}
PLAN = plans.plan(
    *(plans.compiled(plans.forecast(stage, 6 * B)) for stage in range(4)),
    advised=plans.forecast(3, 6 * B, remat=True),
    advice="Take stage 1 & be happy.",
)
HUGE = plans.plan(plans.forecast(0, 1000 * B), plans.forecast(3))


class Reader(HTMLParser):
    """Checks that tags are balanced, and collects elements and words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open and data.strip():
            self.words.append((self.open[-1], data.strip()))

    def all(self, tag: str, kind: str | None = None) -> list[dict[str, str | None]]:
        found = [attrs for name, attrs in self.elements if name == tag]
        return [attrs for attrs in found if kind is None or attrs.get("class") == kind]

    def said(self, tag: str) -> list[str]:
        return [word for name, word in self.words if name == tag]


@pytest.mark.parametrize("plan", [PLAN, HUGE, plans.plan(plans.forecast(1, 50_000))])
def test_the_page_is_whole_and_needs_nothing_else(plan):
    page = plan_page(plan)
    reader = Reader(page)
    assert page.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in reader.elements}
    outside = [a for _, attrs in reader.elements for a in attrs if a in ("src", "href", "onload")]
    assert not outside and "@import" not in page
    assert re.findall(r"url\((.*?)\)", page) == ["#hatch"]
    addresses = set(re.findall(r"https?://[^\s\"<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_it_says_the_advice_the_convention_and_every_candidate():
    reader = Reader(plan_page(PLAN))
    assert "Take stage 1 & be happy." in reader.said("p")
    assert PLAN.convention in reader.said("dd")
    named = [str(f.choice) for f in PLAN.forecasts] + ["stage 3, remat"]
    heads = [word for word in reader.said("th") if word.startswith("stage")]
    assert heads == named + named  # memory and time, then wire bytes
    assert [word for word in reader.said("text") if word in named] == named


def test_the_tables_have_the_numbers():
    cells = Reader(plan_page(PLAN)).said("td")
    # stage 0: 20 x 6e9 bytes predicted, nine tenths compiled, of 79 GiB
    assert cells[:4] == ["short of 21.6 GiB", "112 GiB", "141.5%", "101 GiB"]
    assert "15.6 ms" in cells and "1.00 MiB" in cells  # exposed, and all-to-all, compiled
    assert "fits, advised" in cells


def test_what_is_on_the_host_is_told_where_it_is():
    away = plans.compiled(plans.offloaded(plans.forecast(0, 6 * B)))
    reader = Reader(plan_page(plans.plan(away, notes=("The link & more.",))))
    assert "The link & more." in reader.said("p") and "Host" in reader.said("dt")
    heads, cells = reader.said("th"), reader.said("td")
    for name in ("on the host", "on its host, by a process", "link to the host"):
        assert name in heads and name not in Reader(plan_page(PLAN)).said("th")
    assert "134 GiB" in cells and "68.1 GiB" in cells and "1.50 s" in cells
    assert "Host" not in Reader(plan_page(PLAN)).said("dt")


def widths(reader, kind, key="width"):
    return [float(str(attrs[key]).rstrip("%")) for attrs in reader.all("rect", kind)]


def test_stacks_have_the_lengths_of_the_bytes():
    reader = Reader(plan_page(PLAN))
    percent = 96 / 20  # of one byte a parameter; stage 0 has 20 and ends the scale at 96 %
    assert widths(reader, "part0") == pytest.approx(
        [2 * percent] * 3 + [2 * percent / 8] * 2, abs=2e-3
    )
    assert widths(reader, "part2") == pytest.approx(
        [12 * percent] + [12 * percent / 8] * 4, abs=2e-3
    )
    assert widths(reader, "part2", "x")[0] == pytest.approx(4 * percent, abs=2e-3)
    (line,) = reader.all("line", "memory")
    assert float(str(line["x1"]).rstrip("%")) == pytest.approx(96 * 79 * 2**30 / 120e9, abs=2e-3)
    assert len(reader.all("rect", "short")) == 1  # stage 0
    assert len(reader.all("path", "peak")) == 4  # the advised one was not compiled
    assert "does not fit" in reader.said("li")


def test_a_bar_that_is_cut_off_ends_at_the_edge_with_an_arrow():
    reader = Reader(plan_page(HUGE))
    assert len(reader.all("path", "edge")) == 1
    assert widths(reader, "part0")[0] == 96
    assert len(reader.all("rect", "part2")) == 1  # of the huge one only parameters are seen


def test_a_size_in_a_bar_makes_way_for_the_diamond():
    f, gib = plans.forecast(0, 6 * B), plans.GIB  # 67.1 GiB of optimizer state from 22.4 on
    for peak, free in ((30 * gib, False), (60 * gib, True)):
        words = Reader(plan_page(plans.plan(plans.compiled(f, peak)))).said("text")
        assert ("67.1 GiB" in words) == free


def test_the_drawing_is_told_in_words():
    reader = Reader(plan_page(PLAN))
    (svg,) = [attrs for attrs in reader.all("svg") if attrs.get("role") == "img"]
    ids = {attrs["id"] for tag, attrs in reader.elements if tag in ("title", "desc") and attrs}
    assert set(str(svg["aria-labelledby"]).split()) <= ids
    (description,) = reader.said("desc")
    assert "Device memory is 79.0 GiB." in description
    assert "stage 0, no remat: 112 GiB (compiled 101 GiB), short of 21.6 GiB;" in description
    assert "optimizer state 67.1 GiB" in description
    assert "gradients: 11.2 GiB" in reader.said("title")


def test_everything_is_escaped():
    bad = "<script>alert('1')</script>&\"$x"
    page = plan_page(plans.plan(plans.forecast(1), program=bad, advice=bad))
    reader = Reader(page)
    assert "script" not in {tag for tag, _ in reader.elements}
    assert reader.said("p")[0] == bad


def test_it_follows_the_readers_setting_and_screen():
    page = plan_page(PLAN)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    light, dark = re.findall(r":root \{(.*?)\}", page, re.S)
    names = set(re.findall(r"--\w+(?=:)", dark))
    assert names == set(re.findall(r"--\w+(?=:)", light)) == set(re.findall(r"var\((.*?)\)", page))


def test_every_class_that_is_drawn_has_a_style():
    page = plan_page(PLAN)
    style = page[: page.index("</style>")]
    reader = Reader(page)
    used = {name for _, a in reader.elements for name in str(a.get("class") or "").split()}
    assert {name for name in used if not re.search(rf"\.{name}\b", style)} == set()
