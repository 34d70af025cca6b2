"""Draw random words with splitmix64, a hash of a counter: equal on every device."""

import torch
from torch import Tensor

_STEP, *_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_LOW = {shift: (1 << (64 - shift)) - 1 for shift in (27, 30, 31)}


def words(count: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the first numbers of splitmix64, ``(count,)`` int64, which are all different.

    Only integer operations, so that results do not depend on the device. The host does not wait.

    Args:
        count: how many.
        seed: determines the first word; a number, or a tensor of one int64 on the device.
        device: of the result.

    Reference:
        Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    found = torch.arange(count, device=device).mul_(_STEP).add_(seed)  # modulo 2^64
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        found.bitwise_xor_((found >> shift).bitwise_and_(_LOW[shift])).mul_(factor)
    return found.bitwise_xor_((found >> 31).bitwise_and_(_LOW[31]))
