"""Together: several optimizers as one, so that automatic optimization can train with them."""

from __future__ import annotations

import inspect
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class Together(Optimizer):
    """Join optimizers of different parameters into one ``torch.optim.Optimizer``.

    ``torch.optim.Muon`` takes matrices only, so its users have a second optimizer for the other
    parameters. Lightning's automatic optimization, local steps, simulated workers and studies take
    one optimizer. ``param_groups`` and ``state`` contain the groups and states of all parts. A
    ``step`` calls the closure once and steps each part in order.

    Gradient clipping and a ``GradScaler`` see the gradients of all parts. If one of them is not
    finite, no part makes its step. A scaler would skip only one of two separate optimizers.

    ``state_dict`` has the format of torch: its parameters are numbered in the order of the parts.
    ``"parts"`` has the class of each part and the shapes of its parameters. Each part loads its
    share by its own ``load_state_dict``.

    A scheduler of ``Together`` sets the rates of all groups. For one scheduler per part see
    ``scheduler``.

    Args:
        optimizers: the parts, with different parameters. Keep their order for checkpoints: two of
            one class with parameters of equal shapes cannot be distinguished.

    Raises:
        ValueError: no optimizer, a parameter in two parts, a part that needs a closure
            (``torch.optim.LBFGS``) or has its own form of ``state_dict``
            (``ZeroRedundancyOptimizer``), a new parameter group.

    Example:
        >>> import torch
        >>> from lightning_gc import Together
        >>> model = torch.nn.Linear(4, 2)
        >>> sgd = torch.optim.SGD([model.weight], lr=0.02)
        >>> optimizer = Together([sgd, torch.optim.AdamW([model.bias], lr=0.003)])
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.003]

    Attributes:
        optimizers: the parts.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        parts = tuple(optimizers)
        if not parts:
            raise ValueError("Together([]): give at least one optimizer.")
        seen: dict[Tensor, Optimizer] = {}
        for part in parts:
            _refuse(part)
            for param in _params(part):
                if param in seen:
                    raise ValueError(
                        f"Together: a parameter of shape {tuple(param.shape)} is in "
                        f"{type(seen[param]).__name__} and in {type(part).__name__}, and would be "
                        f"stepped twice; give it to one of them."
                    )
            seen |= dict.fromkeys(_params(part), part)
        # Not Optimizer.__init__, which would make other groups and another state.
        self.__setstate__({"optimizers": parts, "defaults": {}})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parts' groups, in the order of the parts; the list is a copy, the groups are not."""
        return [group for part in self.optimizers for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for part, own in zip(self.optimizers, self._shares(groups), strict=True):
            part.param_groups = own

    @property  # type: ignore[override]
    def state(self) -> MutableMapping[Tensor, Any]:
        """The parts' states as one mapping; an entry that is written goes to its part."""
        return _States(self.optimizers)

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        if isinstance(state, _States):
            for part, own in zip(self.optimizers, state.maps, strict=True):
                part.state = own  # type: ignore[assignment]
            return
        for part in self.optimizers:
            own = {param: state[param] for param in _params(part) if param in state}
            part.state = defaultdict(dict, own)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each part in order; return the loss of the closure, which is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.optimizers:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parts."""
        for part in self.optimizers:
            part.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a new group, since it could be of any part."""
        raise ValueError(
            "Together.add_param_group does not know which part is to train the new parameters; "
            "call optimizer.optimizers[0].add_param_group(...) for the first part."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return settings and states of all parts in torch's format.

        Raises:
            ValueError: a part's state has entries that belong to no parameter.
        """
        for part in self.optimizers:
            others = [key for key in part.state if not isinstance(key, Tensor)]
            if others:
                raise ValueError(
                    f"Together.state_dict: {type(part).__name__} keeps {others[0]!r}, which "
                    f"belongs to no parameter, and so to no part of a checkpoint; return "
                    f"{type(part).__name__} alone from configure_optimizers."
                )
        return super().state_dict() | {"parts": self._in_words()}

    def _in_words(self) -> list[str]:
        """Return the class of each part, and the shapes of its parameters."""
        return [
            f"{type(part).__name__} of {[tuple(param.shape) for param in _params(part)]}"
            for part in self.optimizers
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict()``, each part by its own ``load_state_dict``.

        Raises:
            ValueError: it has another number of parameter groups, or other parts in this order.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        shares = self._shares(state_dict["param_groups"])
        now = self._in_words()
        saved = state_dict.get("parts", now)  # torch's distributed checkpoints drop them
        if saved != now:
            raise ValueError(
                f"Together.load_state_dict: its parts are {now}, but the state has {saved}. Give "
                f"it the parts in the order in which they were saved."
            )
        for part, groups in zip(self.optimizers, shares, strict=True):
            numbers = {number for group in groups for number in group["params"]}
            state = {n: each for n, each in state_dict["state"].items() if n in numbers}
            part.load_state_dict({"state": state, "param_groups": groups})
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def scheduler(self, schedulers: Iterable[LRScheduler]) -> LRScheduler:
        """Join schedulers of the parts into one that steps them all.

        Lightning refuses the scheduler of an optimizer that ``configure_optimizers`` does not
        return. So a scheduler of a part has to be joined to ``Together``.

        Args:
            schedulers: of parts; a part may have none.

        Raises:
            ValueError: a scheduler of another optimizer, or a ``ReduceLROnPlateau``, which needs a
                metric; make one of ``Together``.

        Example:
            >>> import torch
            >>> from lightning_gc import Together
            >>> model = torch.nn.Linear(4, 2)
            >>> sgd = torch.optim.SGD([model.weight], lr=0.02)
            >>> optimizer = Together([sgd, torch.optim.AdamW([model.bias], lr=0.003)])
            >>> falling = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
            >>> optimizer.step()
            >>> optimizer.scheduler([falling]).step()
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.01, 0.003]
        """
        return _Schedulers(self, tuple(schedulers))

    def _shares(self, groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return each part's share of ``groups``."""
        numbers = [len(part.param_groups) for part in self.optimizers]
        if sum(numbers) != len(groups):
            raise ValueError(
                f"Together has {sum(numbers)} parameter groups, but the state to load has "
                f"{len(groups)}; give it the optimizers and groups that the state was saved with."
            )
        left = iter(groups)
        return [[next(left) for _ in range(number)] for number in numbers]


class _States(ChainMap[Tensor, Any]):
    """The dictionaries that parts have as their states now."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__(*(part.state for part in parts))
        self._owner = {param: part.state for part in parts for param in _params(part)}

    def __iter__(self) -> Iterator[Tensor]:
        return (param for state in self.maps for param in state)

    def __getitem__(self, param: Tensor) -> Any:
        return self._owner[param][param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._owner[param][param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._owner[param][param]


class _Schedulers(LRScheduler):
    """Steps the schedulers of an optimizer's parts."""

    def __init__(self, optimizer: Together, schedulers: Sequence[LRScheduler]) -> None:
        for each in schedulers:
            what = type(each).__name__
            if not any(each.optimizer is part for part in optimizer.optimizers):
                raise ValueError(
                    f"Together.scheduler: {what} is of {type(each.optimizer).__name__}, which is "
                    f"none of its parts; make it of one of optimizer.optimizers."
                )
            if isinstance(each, ReduceLROnPlateau):
                raise ValueError(
                    f"Together.scheduler: {what} needs a metric in each step; make it of the "
                    f"whole: {what}(optimizer)."
                )
        self.optimizer, self._schedulers = optimizer, tuple(schedulers)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        return max((each.last_epoch for each in self._schedulers), default=0)

    def step(self, epoch: int | None = None) -> None:
        for each in self._schedulers:
            each.step()

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {str(index): each.state_dict() for index, each in enumerate(self._schedulers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, each in enumerate(self._schedulers):
            each.load_state_dict(state_dict[str(index)])


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _refuse(part: Any) -> None:
    """Raise ValueError if ``part`` cannot be one of several."""
    name = type(part).__name__
    if not isinstance(part, Optimizer):
        raise ValueError(f"Together([..., {part!r}]): give instances of torch.optim.Optimizer.")
    if isinstance(part, Together):
        raise ValueError(f"Together of a Together: give its parts, {name}.optimizers, instead.")
    if type(part).state_dict is not Optimizer.state_dict:
        raise ValueError(
            f"Together([..., {name}]): {name} has its own form of state_dict, which cannot be "
            f"joined with the others; return {name} alone from configure_optimizers."
        )
    closure = inspect.signature(part.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"Together([..., {name}]): {name}.step needs a closure, which it calls several times, "
            f"but the closure is called once for all parts; use another optimizer."
        )
