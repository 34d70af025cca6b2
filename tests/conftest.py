import pytest

pytest.register_assert_rewrite("lightning_gc.testing.contracts")
