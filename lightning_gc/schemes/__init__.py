"""Schemes: how workers turn payloads into their mean, one communication pattern per file."""

from lightning_gc.core.registry import concrete as _concrete
from lightning_gc.core.registry import export as _export
from lightning_gc.schemes.all_gather import AllGather as AllGather
from lightning_gc.schemes.all_gather_or_two_shot import AllGatherOrTwoShot as AllGatherOrTwoShot
from lightning_gc.schemes.all_reduce import AllReduce as AllReduce
from lightning_gc.schemes.base import Scheme as Scheme
from lightning_gc.schemes.hierarchical import Hierarchical as Hierarchical
from lightning_gc.schemes.sparse_reduce import SparseReduce as SparseReduce
from lightning_gc.schemes.two_hop import TwoHop as TwoHop
from lightning_gc.schemes.two_shot import TwoShot as TwoShot

SCHEMES = _concrete(globals(), Scheme)
"""``{name: class}`` of all schemes that have a name."""

_export(globals(), "SCHEMES")
