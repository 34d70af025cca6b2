"""Joining: workers have a minute to join, whatever the timeout for a silent peer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_gc.synchronizer import JOINING


class Joining:
    """Mixin, before a strategy of Lightning's, that has ``_timeout``."""

    _timeout: timedelta | None

    @contextlib.contextmanager
    def _patiently(self) -> Iterator[None]:
        """Join with a timeout of at least a minute, then set the user's.

        Startup takes workers differently long, often longer than a timeout for a silent peer.
        """
        timeout = self._timeout
        if timeout is None or timeout >= JOINING:
            yield
            return
        try:
            self._timeout = JOINING
            yield
        finally:
            self._timeout = timeout
        _set_pg_timeout(timeout)
