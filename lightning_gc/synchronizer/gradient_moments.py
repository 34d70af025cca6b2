"""gradient_moments: noise, length and dissimilarity of gradients, from sums over an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gc.engine.epoch_statistics import EpochStatistics
from lightning_gc.synchronizer.peers import Peers


def gradient_moments(
    epochs: Sequence[EpochStatistics], steps: int, workers: int, peers: Peers
) -> dict[str, float]:
    """Estimate E‖g−∇fᵢ‖², ‖∇fᵢ‖² and meanᵢ‖∇fᵢ−∇f‖², with the bias of 1/steps removed.

    Args:
        epochs: sums of this process's workers.
        steps: of the epoch.
        workers: W, of all processes.
        peers: the other processes.

    Returns:
        Fields of an ``Observation``; none if the moments were not summed, as after a resume without
        a worker's file, or of one step.
    """
    if not epochs[0].summed() or not epochs[0].moments or steps < 2:
        return {}
    means = [epoch.sum() / steps for epoch in epochs]
    owns = [float(mean.double().square().sum()) for mean in means]
    spread = [
        (epoch.squares() / steps - own) * steps / (steps - 1)
        for epoch, own in zip(epochs, owns, strict=True)
    ]
    mean = peers.mean(sum(means[1:], means[0]) / len(means))
    together = float(peers.parts.total(mean.double().square().sum()))
    noise, own = peers.whole_of(zip(spread, owns, strict=True))
    apart = own - together - noise / steps * (1 - 1 / workers)
    return {
        "gradient_noise": max(noise, 0.0),
        "gradient_squared": own - noise / steps,
        "gradient_dissimilarity": apart,
    }
