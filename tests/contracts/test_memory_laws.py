"""Every registered memory keeps the laws of memories."""

import pytest

from lightning_gc.testing.contracts import MemoryContract
from tests.support.instances import ALL_MEMORIES, ONE_MEMORY_EACH


class TestMemories(MemoryContract):
    instances = ONE_MEMORY_EACH


@pytest.mark.nightly
class TestAllMemories(MemoryContract):
    instances = tuple(m for m in ALL_MEMORIES if m not in ONE_MEMORY_EACH)
