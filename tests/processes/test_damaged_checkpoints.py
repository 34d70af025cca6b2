"""A side file that is damaged, malformed, swapped or foreign is refused by its name."""

import io
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import prepared
from tests.support.damage import (
    FOREIGN,
    MALFORMED,
    NAME,
    SLIGHT,
    edit,
    files_of,
    flip,
    main_edited,
    outcome,
    put,
    resume,
    save,
    without_record,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, on what is left of a pickle


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def whole(saved: Path) -> str:
    """What a resume restores from files as they were written."""
    return resume(saved)


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(saved.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / NAME


def assert_refused(path: Path, file: Path, why: str = "", **options: Any) -> None:
    how, said = outcome(path, **options)
    assert how == "refused"
    what = f"the error state in {file}" if file == path else str(file)
    assert f"could not use {what}: " in said, said
    assert "state='off'" in said
    assert re.search(why, said), said


def bits_flipped(saved: Path, whole: str, path: Path, count: int, seed: int) -> dict[str, int]:
    """Flip single bits of side files; return how many were refused, and how many did nothing."""
    draw, counts = random.Random(seed), {"refused": 0, "restored": 0}
    for _ in range(count):
        worker = draw.randrange(2)
        file = files_of(path)[worker]
        bit = flip(file, draw)
        how, said = outcome(path)
        counts[how] += 1
        if how == "refused":
            assert f"could not use {file}: " in said, (bit, said)
        else:
            assert said == whole, bit
        put(files_of(saved)[worker], file)
    return counts


def test_a_flipped_bit_is_refused_or_does_nothing(saved: Path, whole: str, path: Path) -> None:
    counts = bits_flipped(saved, whole, path, 12, seed=1)
    assert counts["refused"] > counts["restored"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_400_flipped_bits(
    saved: Path, whole: str, path: Path, record_property: Any, capsys: Any
) -> None:
    counts = bits_flipped(saved, whole, path, 400, seed=2)
    with capsys.disabled():
        print(f"400 flipped bits: {counts}")  # noqa: T201
    assert counts["refused"] > 300


SOME = ("no memory", "the other worker", "an error of NaN", "a text for a factor", "a list")
"""Of each kind of malformed content one, by day."""


def by_day(edits: Any, some: Any) -> list[Any]:
    return [n if n in some else pytest.param(n, marks=pytest.mark.nightly) for n in edits]


@pytest.mark.parametrize("name", by_day(MALFORMED, SOME))
def test_malformed_content_is_refused(path: Path, name: str) -> None:
    """With the checksum of before, and with its own."""
    file = files_of(path)[1]
    before = file.read_bytes()
    edit(file, MALFORMED[name])
    assert_refused(path, file)
    file.write_bytes(before)
    without_record(path)
    edit(file, MALFORMED[name], anew=True)
    assert_refused(path, file)


@pytest.mark.parametrize("name", by_day(FOREIGN, ("another run", "no buffer", "errors flat")))
def test_foreign_content_is_refused(path: Path, name: str) -> None:
    """With the checksum of before, and with its own."""
    file = files_of(path)[1]
    before = file.read_bytes()
    edit(file, FOREIGN[name])
    assert_refused(path, file)
    file.write_bytes(before)
    without_record(path)
    edit(file, FOREIGN[name], anew=name != "no sha256")
    assert_refused(path, file)


@pytest.mark.parametrize("name", by_day(SLIGHT, ("one error",)))
def test_slight_changes_are_refused(path: Path, name: str) -> None:
    """By the checksum within, and one that was made to fit by that in the checkpoint."""
    file = files_of(path)[1]
    before = file.read_bytes()
    edit(file, SLIGHT[name])
    assert_refused(path, file, "checksum")
    file.write_bytes(before)
    edit(file, SLIGHT[name], anew=True)
    assert_refused(path, file, "not the file that was saved with its checkpoint")


def test_what_is_no_side_file_is_refused(path: Path) -> None:
    file = files_of(path)[0]
    content = file.read_bytes()
    for other in (b"", content[:1000], content[:-1], random.Random(0).randbytes(5000), b"text\n"):
        file.write_bytes(other)
        assert_refused(path, file)
    put(path, file)
    assert_refused(path, file)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
def test_files_that_do_not_belong_together_are_refused(
    saved: Path, path: Path, tmp_path: Path, recorded: bool
) -> None:
    """Swapped; one for all; of another step; of another run. Each is whole, by itself."""
    zero, one = files_of(path)
    if not recorded:
        without_record(path)
    put(files_of(saved)[0], one)
    assert_refused(path, one)
    put(files_of(saved)[1], zero)
    assert_refused(path, zero)
    put(files_of(saved)[1], one)
    assert_refused(path, zero)
    for number, step in enumerate((2, 3)):
        folder = tmp_path / f"other{number}"
        folder.mkdir()
        put(files_of(save(folder, step=step))[0], zero)
        assert_refused(path, zero)


def test_files_of_other_numbers_of_workers_are_checked_too(path: Path) -> None:
    """Each of three new workers reads both; each of two old ones is checked by one new one."""
    zero, one = files_of(path)
    put(zero, one)
    assert_refused(path, one, workers=3)
    assert_refused(path, one, workers=1)


def test_the_checkpoint_before_is_named(saved: Path, path: Path) -> None:
    """That with the highest step of those before, if it has all its files."""
    earlier = [save(path.parent, f"step={step}.ckpt", step=step) for step in (1, 2, 4)]
    file = files_of(path)[0]
    put(files_of(path)[1], file)
    assert_refused(
        path, file, f"resume from the checkpoint before it, {re.escape(str(earlier[1]))}"
    )
    files_of(earlier[1])[1].unlink()
    assert_refused(path, file, re.escape(str(earlier[0])))
    earlier[0].unlink()
    assert " resume from " not in outcome(path)[1]


BROKEN_MAIN: dict[str, Any] = {
    "no step": lambda main: main.pop("step"),
    "a stem elsewhere": lambda main: main.update(stem="../" + main["stem"]),
    "no controller": lambda main: main.pop("controller"),
    "a decision without a level": lambda main: main["controller"]["decision"].pop("level"),
    "a negative level": lambda main: main["controller"]["decision"].update(level=-1.0),
    "a level that no knob has": lambda main: main["controller"].update(levels=[1e300, {}]),
    "levels of no parameter": lambda main: main["controller"].update(levels=[2, {"w": "much"}]),
    "a layout of numbers": lambda main: main.update(layout=[[1, 2]]),
    "no workers": lambda main: main.update(workers=0),
    "a mode of its own": lambda main: main.update(mode="some"),
    "a format to come": lambda main: main.update(format=99),
    "a former format": lambda main: main.update(format=2),
    "nothing in it": dict.clear,
}


@pytest.mark.parametrize("name", by_day(BROKEN_MAIN, ("no step", "a level that no knob has")))
def test_a_malformed_part_of_the_checkpoint_is_refused(path: Path, name: str) -> None:
    """With its own checksum, too."""
    main_edited(path, BROKEN_MAIN[name])
    assert_refused(path, path)


def test_the_mean_in_a_checkpoint_is_checked(tmp_path: Path) -> None:
    path = save(tmp_path, state="mean")
    whole = resume(path)
    before = path.read_bytes()
    for name, change in {**SLIGHT, "NaN": MALFORMED["an error of NaN"]}.items():
        main_edited(path, change, anew=False)
        assert_refused(path, path, "checksum")
        path.write_bytes(before)
        if name not in SLIGHT:
            main_edited(path, change)
            assert_refused(path, path, r"body\.0\.weight/error is a tensor .*NaN")
            path.write_bytes(before)
    main_edited(path, MALFORMED["a text for a factor"])
    assert_refused(path, path, r"compressor/body\.0\.weight/q is 'q', not a tensor")
    path.write_bytes(before)
    assert resume(path) == whole


def test_off_reads_none_of_it(path: Path) -> None:
    """The way out, if there is no other file."""
    for file in files_of(path):
        file.write_bytes(b"")
    main_edited(path, BROKEN_MAIN["no controller"], anew=False)
    assert outcome(path)[0] == "refused"
    assert outcome(path, state="off")[0] == "restored"
    main_edited(path, dict.clear)
    assert outcome(path, state="off")[0] == "restored"


@pytest.mark.parametrize("state", ["full", "mean"])
def test_a_checkpoint_from_within_a_step_has_no_errors(tmp_path: Path, state: str) -> None:
    path = save(tmp_path, state=state)

    def tear(main: Any) -> None:
        main.update(torn=True, files=[None] * 2)
        main.pop("averaged", None)
        main.pop("compressor", None)

    main_edited(path, tear)
    assert outcome(path)[0] == "restored"


def test_a_prepared_checkpoint_or_side_file_runs_nothing(path: Path) -> None:
    """Lightning loads the former, so it must be told; the latter is never unpickled."""
    folder = path.parent
    side, content = files_of(path)[0], path.read_bytes()
    prepared.saved(side, folder)
    assert_refused(path, side, "cannot be read")
    prepared.saved(path, folder, **torch.load(io.BytesIO(content), weights_only=True))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        resume(path, weights_only=True)
    assert not prepared.harmed(folder)
