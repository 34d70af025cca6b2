"""An accelerator for tests without one: its tensors' data is on the host, and waits are counted.

Tensors say that they are on ``DEVICE``, so the program takes the ways that it takes on a GPU. What
would make the host wait for a GPU is known from torch's sources: reading a value, a result whose
size depends on values, and copies from or to the host that are not asynchronous.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_gc.core.bucket import Bucket

DEVICE = torch.device("meta")  # the one besides the host that every build of torch has
_aten = torch.ops.aten
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CHECKS = {_aten._linalg_eigh, _aten.isin, _aten.unique_dim}
"""These wait inside: for an error code, or for the number of different elements."""


class Elsewhere(Tensor):
    """A tensor on ``DEVICE`` with its data on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of Accelerator")


class Accelerator(TorchDispatchMode):
    """Runs operations on tensors of ``DEVICE`` on the host.

    Attributes:
        waits: name of the operation, for each time that the host would have waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._calls = _Calls(self)

    def __enter__(self) -> Accelerator:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        asked = kwargs.get("device")
        ours = any(isinstance(tensor, Elsewhere) for tensor in tensors)
        if not ours and asked != DEVICE:
            return func(*args, **kwargs)
        if _waits(func, args, kwargs, tensors):
            self.waits.append(str(func))
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        given = {id(_held(tensor)): tensor for tensor in tensors}  # what is changed in place
        to_host = asked is not None and asked != DEVICE
        return result if to_host else tree_map(lambda each: given.get(id(each), _put(each)), result)


def on_device(tensor: Tensor) -> Tensor:
    """Return a copy on ``DEVICE``."""
    return Elsewhere(tensor.clone())


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _put(value: Any) -> Any:
    return Elsewhere(value) if isinstance(value, Tensor) else value


def _waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    packet = func.overloadpacket
    if packet in (_aten._to_copy, _aten.copy_):
        source = args[0] if packet is _aten._to_copy else args[1]
        target = kwargs.get("device", source.device) if source is args[0] else args[0].device
        asynchronous = kwargs.get("non_blocking", False) or args[2:] == (True,)
        return torch.device(target) != source.device and not (
            asynchronous and torch.device(target) == DEVICE
        )
    _refuse_mixture(func, tensors)
    on_host = any(not isinstance(tensor, Elsewhere) for tensor in tensors)
    if packet in (_aten.index, _aten.index_put, _aten.index_put_):
        masks = any(index is not None and index.dtype in _BYTES for index in args[1])
        return masks or on_host
    if packet is _aten.where:
        return on_host
    if packet is _aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in _CHECKS or any(tag in _READS for tag in func.tags)


_BYTES = (torch.bool, torch.uint8)


def _refuse_mixture(func: Any, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Elsewhere) and tensor.dim():
            raise RuntimeError(f"{func}: a tensor on the host among those on the device")


class _Calls(TorchFunctionMode):
    """Sees what never arrives at the dispatcher."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.waits = accelerator.waits

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], Elsewhere):
            self.waits.append("tolist")
            return args[0].held.tolist()
        if func is Tensor.__setitem__ and isinstance(args[0], Elsewhere):
            # A number becomes a tensor on the host; only masks and slices are filled by it.
            index, value = args[1:]
            indices = index if isinstance(index, tuple) else (index,)
            places = [i for i in indices if isinstance(i, Tensor) and i.dtype not in _BYTES]
            if places and isinstance(value, int | float):
                self.waits.append("index_put_ of a number")
        made = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE
        if made or (func is Tensor.new_tensor and isinstance(args[0], Elsewhere)):
            self.waits.append(func.__name__)
            kwargs.pop("device", None)
            data, *more = args if made else args[1:]
            kwargs.setdefault("dtype", None if made else args[0].dtype)
            return Elsewhere(torch.tensor(data, *more, **kwargs))
        return func(*args, **kwargs)


class Generator(torch.Generator):
    """A generator of the host that says it is on ``DEVICE``."""

    device = DEVICE


def generator(bucket: Bucket, *, shared: bool) -> torch.Generator:
    """Take the place of ``Bucket.generator``: torch has none for ``DEVICE``."""
    key = (bucket.step, *bucket.shapes, *(() if shared else (bucket.worker, bucket.phase)))
    made = Generator()
    made.manual_seed(zlib.crc32(repr(key).encode()))
    return made
