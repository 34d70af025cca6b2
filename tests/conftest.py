import os
import signal

import pytest

# Before torch: two processes run tests, some of which start two more. Threads beside those would
# wait for cores in loops that take the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs pytest in the background has it ignore Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("lightning_gc.testing.contracts")
