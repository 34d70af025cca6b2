"""Buckets are those that DDP's own function makes; segments put every layout together."""

import itertools
from typing import Any

import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.exchange.bucketing import DEFAULT_CAPS, MIB, caps, layout, pieces_of, segments
from tests.support.replay import patient

c10d: Any = torch.distributed
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@patient
@given(SIZES, st.lists(st.integers(1, 100), min_size=1, max_size=3))
def test_as_ddp_cuts(sizes: list[int], limits: list[int]) -> None:
    tensors = [torch.empty(size) for size in sizes]
    byte_limits = [4 * limit for limit in limits]
    theirs, _ = c10d._compute_bucket_assignment_by_size(tensors, byte_limits)
    ours = layout([4 * size for size in sizes], byte_limits)
    assert [list(bucket) for bucket in ours] == [list(bucket) for bucket in theirs]


def test_the_default_caps_are_those_of_this_torch() -> None:
    assert caps(None) == DEFAULT_CAPS
    assert DEFAULT_CAPS[0] == c10d._DEFAULT_FIRST_BUCKET_BYTES
    assert caps(5) == (5 * MIB,)


@patient
@given(SIZES, st.lists(st.integers(1, 100), min_size=1, max_size=4), st.integers(1, 60))
def test_segments_make_up_every_bucket(sizes: list[int], limits: list[int], alone: int) -> None:
    layouts = [layout(sizes, [limit]) for limit in limits]
    found = segments(sizes, layouts, alone)
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    for bucket in itertools.chain(*layouts):
        inside = [i for piece in pieces_of(bucket, found) for i in found[piece]]
        assert inside == list(bucket)
    for position, size in enumerate(sizes):
        assert size < alone or range(position, position + 1) in found
