"""CommonWeights: a module's weights and buffers at the last exchanges, and a worker's own ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_gc.local_steps.common_buffers import CommonBuffers
from lightning_gc.local_steps.fragment import in_fragments
from lightning_gc.local_steps.outer_sgd import OuterSGD


class CommonWeights:
    """Keeps the weights that all workers share beside those that this one trains.

    Args:
        module: holds the common weights now.
        params: name -> trained parameter.
        buffers: returns name -> buffer.
        untrained: returns name -> parameter that is not trained.
        number: of fragments.
        outer: the step of the common weights.

    Attributes:
        fragments: of the parameters.
        buffers: with floating point.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
        untrained: Callable[[], Mapping[str, Tensor]],
        number: int,
        outer: OuterSGD,
    ) -> None:
        self._module = module
        self.fragments = in_fragments(params, number, outer)
        self.buffers = CommonBuffers(buffers, untrained)
        # This worker's own, while the module holds the common ones.
        self._aside: tuple[list[Tensor], dict[str, Tensor]] | None = None

    @property
    def shown(self) -> bool:
        """Whether the module holds the common weights for a while."""
        return self._aside is not None

    def show(self) -> None:
        """Put the common weights and buffers into the module, and this worker's own aside."""
        if self._aside is None:
            self._aside = self.held()
            self.go_back()

    def hide(self) -> None:
        """Put this worker's own weights back, and buffers that nobody has changed meanwhile."""
        if self._aside is not None:
            weights, buffers = self._aside
            self._aside = None
            self._put(weights)
            self.buffers.put_back(buffers)

    def forget(self) -> None:
        """Give up this worker's own weights and buffers that are aside."""
        self._aside = None

    @property
    def replaced(self) -> bool:
        """Whether the module's weights are not the common ones."""
        return any(not torch.equal(each.weights(), each.start()) for each in self.fragments)

    @property
    def moved(self) -> bool:
        """Whether the module's weights or buffers are not the common ones."""
        return self.replaced or self.buffers.moved

    def begin(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take weights, ``(numel,)`` for each fragment, and buffers for the common ones."""
        for each, flat in zip(self.fragments, weights, strict=True):
            each.anchor = flat.clone()
        self.buffers.begin(buffers)
        self.go_back()

    def go_back(self) -> None:
        """Let this worker go on from the common weights and buffers."""
        self._put([each.anchor for each in self.fragments])
        self.buffers.put(self.buffers.common)

    def own(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of this worker's weights and buffers by name, also while others are shown.

        Of the buffers those that a ``state_dict`` has.
        """
        weights, buffers = self._aside or self.held()
        saved = {name.replace("_orig_mod.", "") for name in self._module.state_dict()}
        return self.named(weights), {n: b for n, b in buffers.items() if n in saved}

    def load_own(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set this worker's weights and buffers; those that are not named stay."""
        self._put([each.flat(weights, each.weights()) for each in self.fragments])
        self.buffers.put(buffers)

    def drift(self) -> dict[str, Tensor]:
        """Return this worker's weights minus the common ones, by name."""
        weights, _ = self._aside or self.held()
        pairs = zip(weights, self.fragments, strict=True)
        return self.named([own - each.start() for own, each in pairs])

    def load_drift(self, drift: Mapping[str, Tensor]) -> None:
        """Set this worker's weights to the common ones plus ``drift``."""
        zeros = [torch.zeros_like(each.anchor) for each in self.fragments]
        pairs = zip(self.fragments, zeros, strict=True)
        self._put([each.start() + each.flat(drift, zero) for each, zero in pairs])

    def named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return copies of pieces of flat tensors, one per fragment, by parameter name."""
        pairs = zip(self.fragments, flats, strict=True)
        return {name: piece for each, flat in pairs for name, piece in each.named(flat).items()}

    def held(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return copies of the module's weights, one per fragment, and buffers."""
        return [each.weights() for each in self.fragments], self.buffers.own()

    def _put(self, flats: Sequence[Tensor]) -> None:
        for each, flat in zip(self.fragments, flats, strict=True):
            each.put(flat)
