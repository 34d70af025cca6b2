"""Choose compression levels, epoch by epoch (controllers). Standard library only."""

if __name__ == "controllers":
    raise ImportError(
        "Import this folder as lightning_gc.controllers. Under the name 'controllers' every class "
        "would exist twice."
    )

from lightning_gc.core.registry import export as _export

from .accordion import Accordion as Accordion
from .adaqs import AdaQS as AdaQS
from .auto import Auto as Auto
from .bandwidth_aware import BandwidthAware as BandwidthAware
from .base import Candidate as Candidate
from .base import Controller as Controller
from .base import Curve as Curve
from .base import Decision as Decision
from .base import ExchangeRecord as ExchangeRecord
from .base import Needs as Needs
from .base import Observation as Observation
from .base import Point as Point
from .base import Weighed as Weighed
from .budget import Budget as Budget
from .bytes_budget import BytesBudget as BytesBudget
from .chain import Chain as Chain
from .congestion_aimd import CongestionAIMD as CongestionAIMD
from .dqsgd import DQSGD as DQSGD
from .dynamic_bit_width import DynamicBitWidth as DynamicBitWidth
from .fixed import Fixed as Fixed
from .gain_search import GainSearch as GainSearch
from .layer_budget import LayerBudget as LayerBudget
from .plan import Plan as Plan
from .round_schedule import RoundSchedule as RoundSchedule
from .schedule import Schedule as Schedule
from .total_error import TotalError as TotalError
from .total_error_budget import TotalErrorBudget as TotalErrorBudget

_export(globals())
