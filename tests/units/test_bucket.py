"""Which random numbers of a bucket are alike: those of all workers, of shards, of encodings."""

import torch

from lightning_gc.core.bucket import Bucket
from lightning_gc.testing.contracts import cases


def seed(bucket: Bucket, shared: bool) -> int:
    return bucket.generator(shared=shared).initial_seed()


def test_random_numbers_of_shards() -> None:
    """Each shard has others, both shared and private; the shared ones are alike on all workers."""
    flat = torch.zeros(8)
    shards = [
        [cases.bucket_of(flat, worker=worker, workers=2).shard(i, 4) for i in range(2)]
        for worker in range(2)
    ]
    private = {seed(shard, shared=False) for own in shards for shard in own}
    assert len(private) == 4
    assert len({seed(shard, shared=True) for shard in shards[0]}) == 2
    for mine, theirs in zip(*shards, strict=True):
        assert seed(mine, shared=True) == seed(theirs, shared=True)


def test_a_second_encoding_has_private_random_numbers_of_its_own() -> None:
    bucket = cases.bucket_of(torch.zeros(8))
    assert seed(bucket, shared=False) != seed(bucket.again(), shared=False)
    assert seed(bucket, shared=True) == seed(bucket.again(), shared=True)
