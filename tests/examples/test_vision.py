"""The vision example loads images correctly, and its summary shows how levels moved."""

import importlib
import io
import itertools
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.examples import EXAMPLES, as_script, each_way

pytest.importorskip("sklearn", reason="the example's digits come with scikit-learn")


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("images")


def pixels(n: int, size: int = 8, channels: int = 3) -> Any:
    return np.random.default_rng(n).integers(0, 256, (n, size, size, channels), dtype=np.uint8)


def plain(path: Path, train: int = 64, valid: int = 9, **more: Any) -> Path:
    arrays = {"x_train": pixels(train), "y_train": np.arange(train)[:, None] % 4}
    arrays |= {"x_test": pixels(valid), "y_test": np.arange(valid) % 4}
    np.savez(path, **(arrays | more))
    return path


@pytest.mark.processes
@each_way
def test_accordion_moves_levels_and_the_summary_tells(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = plain(tmp_path / "data.npz")
    out = tmp_path / "out"
    small = ("--epochs", 5, "--batch", 8, "--interval", 1, "--low", 0.2, "--high", 0.05)
    options = ("--data", data, "--out", out, "--controller", "accordion", *small)
    done = run("vision", options, monkeypatch, capsys)
    assert done.code == 0, done.err
    summary = json.loads((out / "accordion" / "summary.json").read_text())
    assert summary["controller"] == "accordion"
    assert summary["seed"] == 0
    assert summary["replicas_identical"] is True
    assert summary["policy"].startswith("Accordion(low=0.2, high=0.05, interval=1")
    assert 0 <= summary["accuracy"] <= 1
    epochs = summary["epochs"]
    assert [row["epoch"] for row in epochs] == list(range(5))
    assert [row["level"]["min"] for row in epochs[:2]] == [0.2, 0.2]
    assert min(row["level"]["min"] for row in epochs) == 0.05
    assert summary["density"] == pytest.approx(np.mean([row["density"] for row in epochs]))
    assert 0.05 < summary["density"] < 0.2
    wire = [row["wire_bytes_per_step"] for row in epochs]
    assert wire[0] == max(wire) > min(wire)
    assert summary["total_wire_bytes"] == pytest.approx(4 * sum(wire))  # 4 steps an epoch
    assert summary["wire_bytes_per_step"] == pytest.approx(np.mean(wire))
    assert 1 < summary["ratio"] < 20
    assert "critical regime" in epochs[-1]["reason"]
    assert epochs[-1]["figures"]["critical_share"] <= 1
    assert (out / "accordion" / "levels.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for line in done.out.splitlines() if line.startswith("accordion  epoch")]
    if run is as_script:  # else a worker says so, whom one does not hear
        assert len(lines) == 5
    assert all("accuracy" in line and "bytes/step" in line for line in lines)


@each_way
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "nowhere.npz"], "No such file"),
        (["--epochs", 0], "--epochs 0: must be at least 1"),
        (["--low", 0.01, "--high", 0.1], "swap the two"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    run: Any,
    options: list[Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = run("vision", tuple(options), monkeypatch, capsys)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err


def test_digits_are_split_the_same_way_every_time(images: ModuleType) -> None:
    digits, again = images.load(None), images.load(None)
    assert digits.train.shape == (1198, 1, 8, 8)
    assert digits.valid.shape == (599, 1, 8, 8)
    assert digits.classes == 10
    assert torch.equal(digits.valid, again.valid)
    assert digits.train_labels.bincount().min() > 90


def test_jpegs_are_decoded_by_their_offsets(images: ModuleType, tmp_path: Path) -> None:
    from PIL import Image

    arrays: dict[str, Any] = {}
    colours = np.array([[250, 10, 10], [10, 250, 10], [10, 10, 250]], dtype=np.uint8)
    for piece, count in (("train", 6), ("test", 3)):
        files = []
        for i in range(count):
            file = io.BytesIO()
            Image.fromarray(np.broadcast_to(colours[i % 3], (8, 8, 3)).copy()).save(file, "JPEG")
            files.append(np.frombuffer(file.getvalue(), np.uint8))
        arrays[f"{piece}_jpeg"] = np.concatenate(files)
        ends = itertools.accumulate(len(file) for file in files)
        arrays[f"{piece}_offsets"] = np.array([0, *ends])
        arrays[f"{piece}_labels"] = np.arange(count, dtype=np.uint8) % 3
    np.savez(tmp_path / "jpeg.npz", **arrays)
    found = images.load(tmp_path / "jpeg.npz")
    assert found.train.shape == (6, 3, 8, 8)
    strongest = found.train.float().mean(dim=(2, 3)).argmax(dim=1)
    assert torch.equal(strongest, found.train_labels)
    del arrays["test_offsets"]
    np.savez(tmp_path / "jpeg.npz", **arrays)
    with pytest.raises(ValueError, match="lacks test_offsets"):
        images.load(tmp_path / "jpeg.npz")


def test_plain_arrays_are_taken_under_both_names(images: ModuleType, tmp_path: Path) -> None:
    found = images.load(plain(tmp_path / "a.npz"))
    assert found.train.shape == (64, 3, 8, 8)
    assert found.train_labels.shape == (64,)
    grey = {"train_images": pixels(5)[..., 0], "train_labels": np.arange(5)}
    grey |= {"test_images": pixels(3)[..., 0], "test_labels": np.arange(3)}
    np.savez(tmp_path / "b.npz", **grey)
    found = images.load(tmp_path / "b.npz")
    assert found.train.shape == (5, 1, 8, 8)
    assert np.array_equal(found.train[:, 0], grey["train_images"])


def test_files_that_do_not_fit_are_refused_with_a_reason(
    images: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match="holds other"):
        images.load(path)
    with pytest.raises(ValueError, match="uint8"):
        images.load(plain(path, x_train=pixels(64) / 255))
    with pytest.raises(ValueError, match="do not fit"):
        images.load(plain(path, y_train=np.arange(63)))
    with pytest.raises(ValueError, match="one size"):
        images.load(plain(path, x_test=pixels(9, size=16)))
    path.write_text("no archive")
    with pytest.raises(ValueError, match=r"is not an \.npz file"):
        images.load(path)
    with pytest.raises(ValueError, match="too few for 2 workers"):
        images.Photos(images.load(plain(path)), workers=2, batch=33, seed=0)


def test_every_worker_has_its_own_images(images: ModuleType, tmp_path: Path) -> None:
    whole = images.load(plain(tmp_path / "a.npz"))
    data = images.Photos(whole, workers=2, batch=8, seed=0)
    trained, validated = [], []
    for worker in range(2):
        data.trainer = SimpleNamespace(global_rank=worker, training=True)
        trained += [batch[0] for batch in data.train_dataloader()]
        validated += [batch[1] for batch in data.val_dataloader()]
    assert len({image.numpy().tobytes() for image in torch.cat(trained)}) == 64
    assert torch.equal(torch.cat(validated).sort().values, whole.valid_labels.sort().values)


def test_images_are_moved_in_training_only(images: ModuleType, tmp_path: Path) -> None:
    whole = images.load(plain(tmp_path / "a.npz"))
    data = images.Photos(whole, workers=1, batch=64, seed=0)
    data.trainer = SimpleNamespace(global_rank=0, training=True, global_step=0)
    data.train_dataloader()
    batch = (whole.train, whole.train_labels)
    moved, _ = data.on_after_batch_transfer(batch, 0)
    data.trainer.training = False
    kept, _ = data.on_after_batch_transfer(batch, 0)
    assert moved.shape == kept.shape == whole.train.shape
    assert abs(float(kept.mean())) < 0.01
    assert float(kept.std()) == pytest.approx(1, abs=0.01)
    same = [torch.equal(a, b) for a, b in zip(moved, kept, strict=True)]
    assert 0 < sum(same) < 20  # one in nine stays where it is
    inner = [
        torch.equal(a[:, 1:-1, 1:-1], b[:, :-2, :-2]) for a, b in zip(moved, kept, strict=True)
    ]
    assert any(inner)  # some are moved down and to the right
