"""Images as a classifier wants them: whole numbers in memory, and a small network."""

from __future__ import annotations

import io
import itertools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# What plain files call images and labels, for training and for validation.
NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)


@dataclass(frozen=True)
class Images:
    """Labelled images in two pieces.

    Attributes:
        train: ``(n, channels, height, width) uint8``; ``valid`` likewise.
        train_labels: ``(n,) int64``, from 0; ``valid_labels`` likewise.
    """

    train: Tensor
    train_labels: Tensor
    valid: Tensor
    valid_labels: Tensor

    def __post_init__(self) -> None:
        for piece in ("train", "valid"):
            images, labels = getattr(self, piece), getattr(self, f"{piece}_labels")
            if images.ndim != 4 or not len(images) or labels.shape != (len(images),):
                raise ValueError(
                    f"{piece}: images of shape {tuple(images.shape)} and labels of shape "
                    f"{tuple(labels.shape)} do not fit; (n, height, width[, channels]) and (n,) do."
                )
        if self.train.shape[1:] != self.valid.shape[1:]:
            raise ValueError("Images for training and for validation must be of one size.")

    @property
    def classes(self) -> int:
        """How many kinds there are."""
        return int(torch.cat([self.train_labels, self.valid_labels]).max()) + 1

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.train.shape[1]


def load(path: Path | None) -> Images:
    """Return the images in an ``.npz`` file, or scikit-learn's digits if there is none.

    Raises:
        ValueError: the file is not what it should be; the message says what is missing.
    """
    if path is None:
        return digits()
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an .npz file that numpy can read: {error}") from error
    return read(path, arrays)


def digits() -> Images:
    """Return 1,797 handwritten digits of 8 x 8 pixels; every third one is for validation.

    Every third of a fixed random order: neighbours in the file were written by the same hand.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.uint8).unsqueeze(1)  # (n, 1, 8, 8), 0..16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(len(order)) % 3 == 0
    train, valid = order[~valid], order[valid]
    return Images(images[train], labels[train], images[valid], labels[valid])


def read(path: Path, arrays: dict[str, Any]) -> Images:
    """Return images from arrays: plain ones, or JPEGs one after the other with their offsets."""
    if "train_jpeg" in arrays:
        names: tuple[str, ...] = ("train_labels", "test_labels", "test_jpeg")
        names += ("train_offsets", "test_offsets")
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"{path} has train_jpeg, but lacks {', '.join(missing)}.")
        train, valid = (
            decode(arrays[f"{piece}_jpeg"], arrays[f"{piece}_offsets"])
            for piece in ("train", "test")
        )
        return Images(train, whole(arrays["train_labels"]), valid, whole(arrays["test_labels"]))
    for names in NAMES:
        if all(name in arrays for name in names):
            train, train_labels, valid, valid_labels = (arrays[name] for name in names)
            return Images(
                pixels(path, train), whole(train_labels), pixels(path, valid), whole(valid_labels)
            )
    raise ValueError(
        f"{path} holds {', '.join(sorted(arrays)) or 'nothing'}. Wanted are the arrays "
        f"{', '.join(NAMES[0])} (or {', '.join(NAMES[1])}), or train_jpeg with train_offsets."
    )


def whole(labels: Any) -> Tensor:
    """Return labels as ``(n,) int64``; some files have a column of them."""
    return torch.from_numpy(np.asarray(labels).astype(np.int64)).flatten()


def pixels(path: Path, images: Any) -> Tensor:
    """Return ``(n, height, width[, channels])`` as ``(n, channels, height, width)``."""
    if images.dtype != np.uint8:
        raise ValueError(
            f"{path}: images must be whole numbers 0..255 (uint8), not {images.dtype}."
        )
    grey = images[..., None] if images.ndim == 3 else images
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(grey, -1, 1)))


def decode(data: Any, offsets: Any) -> Tensor:
    """Return JPEGs as pixels; image i is ``data[offsets[i]:offsets[i + 1]]``."""
    from PIL import Image  # only this kind of file needs it

    files = (data[start:stop] for start, stop in itertools.pairwise(offsets))
    images = [np.asarray(Image.open(io.BytesIO(file.tobytes())).convert("RGB")) for file in files]
    return torch.from_numpy(np.stack(images)).movedim(-1, 1).contiguous()


class Photos(pl.LightningDataModule):
    """Gives every worker its own share of the images, in a new order every epoch.

    Args:
        images: what there is.
        workers: how many share it.
        batch: images per worker and step.
        seed: of the order.
    """

    def __init__(self, images: Images, workers: int, batch: int, seed: int) -> None:
        super().__init__()
        if len(images.train) < workers * batch or len(images.valid) < workers:
            raise ValueError(
                f"{len(images.train):,} images to train on and {len(images.valid):,} to validate "
                f"on are too few for {workers} workers with batches of {batch}."
            )
        self.images, self.workers, self.batch, self.seed = images, workers, batch, seed
        seen = images.train[:10_000].float()
        self.mean, self.std = float(seen.mean()), max(float(seen.std()), 1e-6)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return this worker's part of the training images; all parts are of one length."""
        data = TensorDataset(self.images.train, self.images.train_labels)
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, self.workers, self._worker(), seed=self.seed, drop_last=True
        )
        return DataLoader(data, self.batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return this worker's part: no image is left out or seen twice."""
        mine = slice(self._worker(), None, self.workers)
        data = TensorDataset(self.images.valid[mine], self.images.valid_labels[mine])
        return DataLoader(data, batch_size=256)

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor], dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Make real numbers of whole ones only here: bytes take a quarter of the memory."""
        images, labels = batch
        images = images.float()
        if self.trainer is not None and self.trainer.training:
            images = self._shift(images)
        return (images - self.mean) / self.std, labels

    def _shift(self, images: Tensor) -> Tensor:
        """Move every image by up to an eighth of its size, or so few are soon known by heart.

        How far depends on seed, step and worker only, so that a resumed run goes on alike.
        """
        assert self.trainer is not None
        step = self.seed * 1_000_000 + self.trainer.global_step
        draw = torch.Generator().manual_seed(step * self.workers + self._worker())
        height, width = images.shape[2:]
        far = min(height, width) // 8
        padded = nn.functional.pad(images, [far] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (n, c, ways, ways, h, w)
        down, right = torch.randint(2 * far + 1, (2, len(images)), generator=draw)
        return windows[torch.arange(len(images)), :, down, right]

    def _worker(self) -> int:
        assert self.trainer is not None
        return self.trainer.global_rank


def resnet(
    channels: int, classes: int, width: int = 16, stages: int = 3, blocks: int = 1
) -> nn.Sequential:
    """Return a ResNet; each stage is twice as wide and half as large as the one before."""
    layers: list[nn.Module] = [convolution(channels, width, 3, 1), nn.ReLU()]
    before = width
    for stage in range(stages):
        wide = width << stage
        for block in range(blocks):
            layers.append(Block(before, wide, 2 if stage and not block else 1))
            before = wide
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.around = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(n, outputs, height / stride, width / stride)``."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.around(x))


def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    """Return a convolution and its normalisation.

    In groups, not over the batch: batch norm would leave every worker with running averages of its
    own, and their models would not be the same.
    """
    convolve = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolve, nn.GroupNorm(outputs // 4, outputs))
