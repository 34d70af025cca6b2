"""Tune hyper-parameters with Optuna: one study per method, with equal numbers of trials."""

import importlib.util as _util

_NEEDED = ("optuna", "jsonargparse", "rich", "matplotlib")
_missing = [_name for _name in _NEEDED if _util.find_spec(_name) is None]
if _missing:
    raise ImportError(
        f"lightning_gc.tuning needs {', '.join(_missing)}, which {'are' if _missing[1:] else 'is'} "
        f"not installed. Install the extra: pip install 'lightning-gc[tune]'."
    )

from lightning_gc.local_steps import RoundPlan as RoundPlan  # noqa: E402
from lightning_gc.methods.method import Method as Method  # noqa: E402
from lightning_gc.tuning.comparison import Event as Event  # noqa: E402
from lightning_gc.tuning.comparison import tune as tune  # noqa: E402
from lightning_gc.tuning.curves import write_curves as write_curves  # noqa: E402
from lightning_gc.tuning.early_stopping import MissingMetric as MissingMetric  # noqa: E402
from lightning_gc.tuning.experiment import Experiment as Experiment  # noqa: E402
from lightning_gc.tuning.journal import StorageError as StorageError  # noqa: E402
from lightning_gc.tuning.journal import open_storage as open_storage  # noqa: E402
from lightning_gc.tuning.report import report as report  # noqa: E402
from lightning_gc.tuning.trial import TrialError as TrialError  # noqa: E402
