"""Local steps: what is exchanged every H steps and how it moves the common weights; pure torch."""

from lightning_gc.local_steps.outer_sgd import OuterSGD as OuterSGD
from lightning_gc.local_steps.round_plan import GrowingRounds as GrowingRounds
