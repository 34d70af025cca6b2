"""Local steps: what is exchanged every H steps and how it moves the common weights; pure torch."""

from lightning_gc.local_steps.round_plan import Elastic as Elastic
from lightning_gc.local_steps.round_plan import GrowingRounds as GrowingRounds
from lightning_gc.local_steps.round_plan import InnerMoments as InnerMoments
from lightning_gc.local_steps.round_plan import OuterSGD as OuterSGD
from lightning_gc.local_steps.round_plan import RoundFields as RoundFields
from lightning_gc.local_steps.round_plan import RoundPlan as RoundPlan
from lightning_gc.local_steps.unequal import Unequal as Unequal
