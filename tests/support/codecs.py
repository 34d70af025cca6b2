"""What reference tests share: tensors that methods find hard, and one trip through a codec."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc.compressors import Codec
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.testing.contracts import cases

_DRAW = torch.Generator().manual_seed(7)
STUDENT = torch.randn(300, generator=_DRAW) / torch.randn(2, 300, generator=_DRAW).norm(dim=0)
KINDS: dict[str, Tensor] = {
    **cases.tensors(300),
    "Student t, 2 degrees": STUDENT,
    "bfloat16": STUDENT.bfloat16().float(),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def apply(
    codec: Codec, x: Tensor, step: int = 0, worker: int = 0, bucket: Bucket | None = None
) -> tuple[np.ndarray, np.ndarray, Payload]:
    """Return what was sent, what is left, and the payload; another worker decodes it."""
    buffer, out = x.clone(), torch.zeros_like(x)
    sender = bucket or cases.bucket_of(x, step=step, worker=worker, workers=8)
    payload = codec.encode(buffer, sender)
    receiver = bucket or cases.bucket_of(x, step=step, worker=7, workers=8)
    codec.decode(payload, out, 1.0, receiver)
    return out.numpy(), buffer.numpy(), payload
