"""A configuration names its program; what is wrong with the name is told before anything runs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_jax.planning.program import Choice, find_builder

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _imports_end_with_the_test(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def config(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def called(path: Path) -> str:
    """What the function that a configuration names returns; those here take no arguments."""
    found: Any = find_builder(path)
    return found()


def program_file(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def test_a_file_beside_the_configuration_or_elsewhere(tmp_path):
    program_file(tmp_path, "here_program.py", "def program(): return 'here'")
    program_file(tmp_path / "there", "there_program.py", "def build(): return 'there'")
    assert called(config(tmp_path, "program = 'here_program.py:program'")) == "here"
    assert called(config(tmp_path, "program = 'there/there_program.py:build'")) == "there"


def test_a_program_in_parts(tmp_path):
    """What lies beside the program's file can be imported, as by a script."""
    program_file(tmp_path, "a_part_of_it.py", "WORD = 'part'")
    text = "import a_part_of_it\ndef program(): return a_part_of_it.WORD"
    program_file(tmp_path, "whole_of_it.py", text)
    assert called(config(tmp_path, "program = 'whole_of_it.py:program'")) == "part"
    assert sys.path.count(str(tmp_path)) == 1
    find_builder(tmp_path / "run.toml")
    assert sys.path.count(str(tmp_path)) == 1


def test_two_programs_of_one_name(tmp_path):
    for folder in ("one", "two"):
        program_file(tmp_path / folder, "same_name.py", f"def program(): return '{folder}'")
        text = "program = 'same_name.py:program'"
        assert called(config(tmp_path / folder, text)) == folder


def test_a_module_of_the_same_name_stays(tmp_path):
    import json

    program_file(tmp_path, "json.py", "def program(): return 'mine'")
    assert called(config(tmp_path, "program = 'json.py:program'")) == "mine"
    assert sys.modules["json"] is json


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_the_configurations_here_name_one(path):
    found: Any = find_builder(path)
    assert found.__name__ == "program" and found.__module__ == "plan_lm"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("program = ", "run.toml is not a TOML file"),
        (b"program = '\xff'", "run.toml is not a TOML file"),
        ("", "program is None; expected 'FILE.py:FUNCTION'"),
        ("[model]\nprogram = 'a_program.py:program'", "program is None"),
        ("program = 3", "program is 3; expected"),
        ("program = 'a_program.py'", "program is 'a_program.py'; expected"),
        ("program = 'a_program.py:program:x'", "program is 'a_program.py:program:x'; expected"),
        ("program = 'other/b_program.py:program'", "there is no file b_program.py there"),
        ("program = ':program'", "program names ''; there is no file"),
        ("program = '.:program'", "program names '.'; there is no file"),
    ],
)
def test_letters_before_anything_is_imported(tmp_path, text, words):
    program_file(tmp_path, "a_program.py", "raise AssertionError('imported')")
    path, modules = [*sys.path], {*sys.modules}
    with pytest.raises(ValueError, match="run.toml") as error:
        find_builder(config(tmp_path, text))
    assert words in str(error.value)
    assert sys.path == path and "a_program" not in {*sys.modules} - modules


@pytest.mark.parametrize("name", ["missing", "number", ""])
def test_a_function_that_is_not_there(tmp_path, name):
    program_file(tmp_path, "a_program.py", "number = 3")
    with pytest.raises(ValueError, match=f"program names '{name}'; a_program.py has no such func"):
        find_builder(config(tmp_path, f"program = 'a_program.py:{name}'"))


def test_a_file_that_is_no_python(tmp_path):
    program_file(tmp_path, "a_broken_program.py", "def program(:")
    with pytest.raises(ValueError, match="a_broken_program.py is no Python: invalid syntax"):
        find_builder(config(tmp_path, "program = 'a_broken_program.py:program'"))


def test_a_configuration_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.toml"):
        find_builder(tmp_path / "nothing.toml")
    with pytest.raises(OSError):
        find_builder(tmp_path)  # a folder


def test_a_choice_in_words():
    choice = Choice(stage=2, remat=False, microbatches=1)
    assert str(choice) == "stage 2, no remat"
    assert str(replace(choice, remat=True, microbatches=4)) == "stage 2, remat, 4 microbatches"
