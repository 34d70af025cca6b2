"""CompressedRayStrategy: the strategy for Ray Train, which launches workers and names devices.

For the Lightning package that Ray takes: ``lightning`` where it is installed, else
``pytorch_lightning``.
"""

try:
    from ray.train.lightning import RayDDPStrategy
except ImportError as _error:
    raise ImportError(
        f"lightning_gc.lightning.for_ray needs Ray Train ({_error}): pip install 'ray[train]'."
    ) from _error

from lightning_gc.lightning.ddp import CompressedDDP


class CompressedRayStrategy(CompressedDDP, RayDDPStrategy):
    """``CompressedDDPStrategy`` in the workers of Ray Train, where ``prepare_trainer`` accepts it.

    It takes ``CompressedDDPStrategy``'s arguments, except ``process_group_backend``, the group's
    ``timeout`` and ``start_method``, which belong into Ray's ``TorchConfig``.
    """
