"""A configuration is read exactly, or refused with a letter that says what to change."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm import schema

from zero_jax import config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@dataclass(frozen=True)
class Inner:
    count: int = 1
    rate: float = 0.5
    name: Literal["a", "b"] = "a"
    limit: float | None = None
    on: bool = False
    text: str = ""


@dataclass(frozen=True)
class Outer:
    first: Inner = Inner()
    second: Inner = Inner(count=2)


@dataclass(frozen=True)
class Demanding:
    size: int


def read(text: str, *overrides: str) -> Outer:
    return config.from_dict(Outer, tomllib.loads(text), overrides)


def letter(text: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        read(text, *overrides)
    return str(error.value)


def test_what_is_not_written_is_the_default():
    assert read("") == Outer()
    assert read("[first]\ncount = 3") == Outer(first=Inner(count=3))


def test_an_integer_is_a_float_and_nothing_else_is_converted():
    rate = read("[first]\nrate = 1").first.rate
    assert rate == 1.0 and type(rate) is float
    for value in ("true", '"1"', "[1]"):
        assert "first.rate is the" in letter(f"[first]\nrate = {value}")
    for value in ("1.0", "true", '"1"'):
        assert "first.count is the" in letter(f"[first]\ncount = {value}")
    assert "first.on is the integer 1; expected true or false." in letter("[first]\non = 1")


def test_an_unknown_key_is_named_with_the_valid_ones_and_the_nearest():
    text = letter("[first]\ncuont = 3")
    assert "[first] has no key 'cuont'" in text
    assert "expected one of count, rate, name, limit, on, text." in text
    assert "Did you mean 'count'?" in text
    assert "there is no section 'frist'" in letter("[frist]\ncount = 3")
    assert "Did you mean" not in letter("[first]\nzzzz = 3")


def test_a_wrong_type_is_named_with_what_it_has_and_what_was_expected():
    assert "first.name is the string 'c'; expected one of 'a', 'b'." in letter('[first]\nname="c"')
    assert "first is the integer 3; expected a section with the keys count," in letter("first = 3")
    assert "first.count is a table with the keys x" in letter("[first.count]\nx = 1")


def test_a_missing_key_without_a_default_is_named():
    with pytest.raises(ValueError, match="size is missing; expected an integer"):
        config.from_dict(Demanding, {})


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("first.count=7", "count", 7),
        ("first.rate = 1e-3", "rate", 1e-3),
        ("first.name=b", "name", "b"),
        ('first.name="b"', "name", "b"),
        ("first.limit=2", "limit", 2.0),
        ("first.on=true", "on", True),
        ("first.text=a=b", "text", "a=b"),
        ("first.text=", "text", ""),
        ("first.text=1\nb = 2", "text", "1\nb = 2"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_string(override, field, value):
    assert read("", override) == Outer(first=dataclasses.replace(Inner(), **{field: value}))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones():
    outer = read("[first]\ncount = 3\nrate = 0.1", "first.count=4", "first.count=5")
    assert outer.first == Inner(count=5, rate=0.1)


@pytest.mark.parametrize("override", ["first.count", "=3", "first.=3", ".count=3", ""])
def test_an_override_that_is_not_one_says_its_form(override):
    assert "expected section.key=value" in letter("", override)


def test_a_wrong_override_is_blamed_itself_and_not_the_file():
    assert letter("", "first.count=x").startswith("override 'first.count=x': first.count is the")
    assert letter("", "first.conut=3").startswith("override 'first.conut=3': [first] has no key")
    assert "expected an integer" in letter("", "first.count.x=3")
    with pytest.raises(ValueError, match=r"^config with overrides: \[model\] hidden=128 is not"):
        config.from_dict(schema.LanguageModelRun, {}, ["model.heads=3"])


floats = st.floats(allow_nan=False)
inners = st.builds(
    Inner,
    count=st.integers(-(2**63), 2**63 - 1),
    rate=floats,
    name=st.sampled_from(["a", "b"]),
    limit=st.none() | floats,
    on=st.booleans(),
    text=st.text(st.characters(exclude_categories=["Cs"])),
)


@given(st.builds(Outer, inners, inners))
def test_law_what_is_written_is_read_back(outer):
    assert config.from_dict(Outer, tomllib.loads(config.to_toml(outer))) == outer


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_shipped_configs_are_read_and_written_back(path, tmp_path):
    run = config.load(schema.LanguageModelRun, path)
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml(run), encoding="utf-8")
    assert config.load(schema.LanguageModelRun, again) == run


def test_there_are_shipped_configs():
    assert {path.stem for path in CONFIGS} >= {"lm_tiny", "lm_gpt2_small"}


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[run\nsteps = 3")
    with pytest.raises(ValueError, match=r"broken\.toml is not a TOML file: .*line 1"):
        config.load(schema.LanguageModelRun, path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"broken\.toml is not a TOML file"):
        config.load(schema.LanguageModelRun, path)
    with pytest.raises(FileNotFoundError):
        config.load(schema.LanguageModelRun, tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=3", "[model] hidden=128 is not a multiple of heads=3."),
        ("model.layers=0", "[model] layers=0; expected at least 1."),
        ("model.vocab_size=255", "[model] vocab_size=255; expected at least 256."),
        ("model.dtype=float16", "model.dtype is the string 'float16'; expected one of 'float32'"),
        ("data.val_fraction=1", "[data] val_fraction=1.0; expected one between 0 and 1."),
        ("optimizer.learning_rate=nan", "[optimizer] learning_rate=nan; expected at least 0."),
        ("optimizer.clip_norm=0", "[optimizer] clip_norm=0.0; expected a positive number"),
        ("zero.stage=4", "zero.stage is the integer 4; expected one of 0, 1, 2, 3."),
        ("zero.stage=true", "zero.stage is the boolean True; expected one of 0, 1, 2, 3."),
        ("run.steps=0", "[run] steps=0; expected at least 1."),
        ("run.temperature=0", "[run] temperature=0.0; expected a positive number."),
    ],
)
def test_values_that_no_run_can_have_are_refused(override, words):
    with pytest.raises(ValueError) as error:
        config.from_dict(schema.LanguageModelRun, {}, [override])
    assert words in str(error.value)
