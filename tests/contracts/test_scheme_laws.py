"""Every registered scheme keeps the laws of schemes."""

from lightning_gc import SCHEMES, Hierarchical, TwoHop
from lightning_gc.testing.contracts import SchemeContract


class TestSchemes(SchemeContract):
    instances = tuple(
        cls(2) if issubclass(cls, TwoHop | Hierarchical) else cls() for cls in SCHEMES.values()
    )
