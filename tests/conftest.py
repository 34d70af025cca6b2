import os

import pytest

# Before torch: two processes run tests, some of which start two more. Threads beside those would
# wait for cores in loops that take the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("lightning_gc.testing.contracts")
