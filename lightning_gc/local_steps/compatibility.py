"""Compatibility: refuse compressors, memories and controllers that do not fit local steps."""

from __future__ import annotations

import dataclasses

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.local_steps.outer_sgd import OuterSGD
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.memories import Memory


def refuse(
    owner: str,
    compressor: Compressor,
    memory: Memory,
    controller: Controller | None,
    outer: OuterSGD,
) -> None:
    """Raise ValueError for what reads learning rates or gradients, which differences have not.

    What is exchanged is a difference of weights, in which learning rates are contained already.

    Args:
        owner: the strategy, for the sentence.
        compressor: of the differences.
        memory: likewise.
        controller: of levels, or None.
        outer: the outer step.
    """
    if not compressor.traits.conserves:
        raise ValueError(
            f"{owner}({compressor!r}): its workers vote, and the result, of equal magnitude in "
            f"every element, is no mean of how far their weights have come; use EFSignSGD() for "
            f"signs with magnitudes, or QSGD(4)."
        )
    if memory.lr_aware:
        raise ValueError(
            f"{owner}(memory={memory!r}): differences of weights contain the learning rate "
            f"already, so errors must not follow it; use memory=Residual()."
        )
    if memory.lookahead or memory.reads_weights:
        raise ValueError(
            f"{owner}(memory={memory!r}): it changes gradients by weights or weights by errors at "
            f"each optimizer step, but here something is exchanged every H steps only; use "
            f"memory=Residual()."
        )
    if outer.momentum:
        try:
            memory.check_optimizer({"momentum": outer.momentum})
        except ValueError:
            raise ValueError(
                f"{owner}(memory={memory!r}, outer={outer!r}): the memory has the outer momentum; "
                f"use outer=OuterSGD(lr={outer.lr!r}), or memory=Residual()."
            ) from None
    if controller is not None and (controller.needs.errors or controller.needs.scale):
        raise ValueError(
            f"{owner}(controller={controller!r}): it computes with gradients and learning rates, "
            f"but differences of weights contain both; use Accordion or a Schedule."
        )


def check_rounds(owner: str, plan: RoundPlan, controller: Controller | None) -> None:
    """Raise ValueError for a controller whose H the plan cannot have.

    Args:
        owner: the strategy, for the sentence.
        plan: as the strategy begins.
        controller: of H, of levels, or None.
    """
    every = () if controller is None else controller.needs.rounds
    if every and plan.growing is not None:
        raise ValueError(
            f"{owner}(every={plan.growing!r}, controller={controller!r}): both set the steps of a "
            f"round; give every=8, say, or another controller."
        )
    for steps in every:
        dataclasses.replace(plan, every=steps)
