"""The text of the language-model examples: split by file, cut without loss, asked for by step."""

import numpy as np
import pytest
from lm import schema
from lm.data import Windows, find_files, load_corpus, split_by_file


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        (tmp_path / f"m{i:02d}.py").write_text(f"# file {i}\n" + f"x{i} = {i}\n" * 20)
    for skipped in ("site-packages", "test", "package/tests"):
        (tmp_path / skipped).mkdir(parents=True)
        (tmp_path / skipped / "absent.py").write_text("ABSENT")
    (tmp_path / "notes.txt").write_text("ABSENT")
    return tmp_path


def test_windows_cover_the_text_and_targets_are_one_byte_later():
    text = bytes(range(23))
    windows = Windows(text, 5)
    assert len(windows) == 4  # 22 targets, 5 to a window
    inputs = np.concatenate([windows[i]["inputs"] for i in range(4)])
    targets = np.concatenate([windows[i]["targets"] for i in range(4)])
    assert list(inputs) == list(text[:20]) and list(targets) == list(text[1:21])
    assert inputs.dtype == targets.dtype == np.int32
    assert len(Windows(b"", 5)) == 0 and len(Windows(b"12345", 5)) == 0


def test_each_file_is_whole_on_one_side_and_stays_there(folder):
    files = find_files(folder, "*.py")
    assert len(files) == 40
    train, validation = (set(side.split(b"\0")) for side in split_by_file(folder, files, 0.3))
    assert train | validation == {path.read_bytes() for path in files}
    assert not train & validation
    fewer = split_by_file(folder, files[::2], 0.3)
    assert set(fewer[0].split(b"\0")) <= train and set(fewer[1].split(b"\0")) <= validation


def test_a_batch_is_a_function_of_its_step_and_the_seed(folder):
    def corpus(seed):
        data = schema.Data(folder=str(folder), batch_size=4, seed=seed, val_fraction=0.3)
        return load_corpus(data, 32)

    one, again, other = corpus(0), corpus(0), corpus(1)
    far = 10 * one.train_bytes  # many epochs later
    for step in (0, 7, far):
        assert one.train[step]["inputs"].shape == (4, 32)
        np.testing.assert_array_equal(one.train[step]["inputs"], again.train[step]["inputs"])
    assert (one.train[0]["inputs"] != other.train[0]["inputs"]).any()
    assert (one.train[0]["inputs"] != one.train[far]["inputs"]).any()
    for i in range(len(one.validation)):
        np.testing.assert_array_equal(one.validation[i]["inputs"], other.validation[i]["inputs"])


def test_too_little_text_is_said_in_numbers(folder):
    data = schema.Data(folder=str(folder), batch_size=10_000)
    with pytest.raises(ValueError, match=r"training side .* windows of 32; a batch needs 10000"):
        load_corpus(data, 32)
