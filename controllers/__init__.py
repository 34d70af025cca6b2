"""Controllers: policies that choose compression levels, epoch by epoch. Standard library only."""

if __name__ == "controllers":
    raise ImportError(
        "Import this folder as lightning_gc.controllers. Under the name 'controllers' every class "
        "would exist twice."
    )

from .accordion import Accordion as Accordion
from .base import Controller as Controller
from .base import Decision as Decision
from .base import Observation as Observation
from .by_size import BySize as BySize
from .chain import Chain as Chain
from .dynamic_bit_width import DynamicBitWidth as DynamicBitWidth
from .estimated_threshold import EstimatedThreshold as EstimatedThreshold
from .fixed import Fixed as Fixed
from .needs import Needs as Needs
from .plan import Plan as Plan
from .schedule import Schedule as Schedule
from .total_error import TotalError as TotalError
from .total_error_budget import TotalErrorBudget as TotalErrorBudget

__all__ = [
    "Accordion",
    "BySize",
    "Chain",
    "Controller",
    "Decision",
    "DynamicBitWidth",
    "EstimatedThreshold",
    "Fixed",
    "Needs",
    "Observation",
    "Plan",
    "Schedule",
    "TotalError",
    "TotalErrorBudget",
]
