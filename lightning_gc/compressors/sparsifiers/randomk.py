"""RandomK: send k elements drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.compressors.sparsifiers.random_sparsifier import RandomSparsifier


@dataclass(frozen=True, repr=False)
class RandomK(RandomSparsifier):
    """Send k = density·numel elements, drawn without replacement.

    ``C(x)_i = x_i`` for i in a random set of size k, else 0. With ``unbiased``,
    ``C(x)_i = (d/k)·x_i``, so that ``E C(x) = x``.

    With ``shared``, all workers draw the same set from (seed, parameter name, step). Then no
    positions are sent, values are all-reduced, and a sent element takes 32 bits. Otherwise each
    worker draws its own set, as in the papers, and also sends the seed of the positions, 8 bytes.
    The mean of W workers then has up to W times as many elements. But payloads cannot be
    all-reduced, bytes grow with W, and every worker draws the positions of all.

    The unbiased form needs no error feedback, but its variance is large: at 1 % a hundred times the
    squared gradient. If workers have similar gradients, independent sets divide the variance of the
    mean by W. A shared set does not.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.
        unbiased: multiply sent elements by numel/k, for use without error feedback.
        shared: whether all workers draw the same elements.

    Example:
        >>> from lightning_gc import RandomK
        >>> RandomK(density=0.01).traits.linear, RandomK(0.01, shared=False).traits.linear
        (True, False)

    Reference:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. Unbiased: Wangni,
        Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient Distributed
        Optimization", NeurIPS 2018 (with equal probabilities); Horváth and Richtárik, "A Better
        Alternative to Error Feedback", ICLR 2021.
    """

    unbiased: bool = False
    shared: bool = True

    @classmethod
    def examples(cls) -> tuple[RandomK, ...]:
        return (cls(0.1), cls(1.0), cls(0.3, unbiased=True, shared=False))
