"""The methods, one file each. A new one is a new file and one import line."""

from lightning_gc.compressors.adacomp import AdaComp as AdaComp
from lightning_gc.compressors.atomo_svd import AtomoSVD as AtomoSVD
from lightning_gc.compressors.byte_codes import ByteCodes as ByteCodes
from lightning_gc.compressors.cast import Cast as Cast
from lightning_gc.compressors.compressor import AbsoluteError as AbsoluteError
from lightning_gc.compressors.compressor import Codec as Codec
from lightning_gc.compressors.compressor import Compressor as Compressor
from lightning_gc.compressors.compressor import Contraction as Contraction
from lightning_gc.compressors.compressor import Knob as Knob
from lightning_gc.compressors.compressor import Multiple as Multiple
from lightning_gc.compressors.compressor import Unbounded as Unbounded
from lightning_gc.compressors.compressor import Variance as Variance
from lightning_gc.compressors.dgc import DGC as DGC
from lightning_gc.compressors.ecqsgd import ECQSGD as ECQSGD
from lightning_gc.compressors.ef_sign_sgd import EFSignSGD as EFSignSGD
from lightning_gc.compressors.estimating import Estimating as Estimating
from lightning_gc.compressors.fixed_proportion import FixedProportion as FixedProportion
from lightning_gc.compressors.float8 import Float8 as Float8
from lightning_gc.compressors.gaussian_k import GaussianK as GaussianK
from lightning_gc.compressors.gradzip import GradZip as GradZip
from lightning_gc.compressors.gtopk import GTopK as GTopK
from lightning_gc.compressors.hard_threshold import HardThreshold as HardThreshold
from lightning_gc.compressors.identity import Identity as Identity
from lightning_gc.compressors.int8 import Int8 as Int8
from lightning_gc.compressors.integer_qsgd import IntegerQSGD as IntegerQSGD
from lightning_gc.compressors.low_rank import LowRank as LowRank
from lightning_gc.compressors.natural_compression import NaturalCompression as NaturalCompression
from lightning_gc.compressors.one_bit_sgd import OneBitSGD as OneBitSGD
from lightning_gc.compressors.per_parameter import PerParameter as PerParameter
from lightning_gc.compressors.powersgd import PowerSGD as PowerSGD
from lightning_gc.compressors.qsgd import QSGD as QSGD
from lightning_gc.compressors.quantised import Quantised as Quantised
from lightning_gc.compressors.random_mask import RandomMask as RandomMask
from lightning_gc.compressors.randomk import RandomK as RandomK
from lightning_gc.compressors.ranges import Choice as Choice
from lightning_gc.compressors.ranges import Range as Range
from lightning_gc.compressors.redsync import RedSync as RedSync
from lightning_gc.compressors.sidco import SIDCo as SIDCo
from lightning_gc.compressors.sign_sgd import SignSGD as SignSGD
from lightning_gc.compressors.signum import Signum as Signum
from lightning_gc.compressors.size_switch import SizeSwitch as SizeSwitch
from lightning_gc.compressors.strom_threshold import StromThreshold as StromThreshold
from lightning_gc.compressors.terngrad import TernGrad as TernGrad
from lightning_gc.compressors.topk import TopK as TopK
from lightning_gc.compressors.unbiased_randomk import UnbiasedRandomK as UnbiasedRandomK
from lightning_gc.compressors.variance_sparsifier import VarianceSparsifier as VarianceSparsifier
from lightning_gc.compressors.wrapper import Wrapper as Wrapper
from lightning_gc.registry import concrete as _concrete
from lightning_gc.registry import export as _export

COMPRESSORS = _concrete(globals(), Compressor, Wrapper)
"""``{name: class}`` of all compressors that have a name; wrappers need an inner one."""

_export(globals(), "COMPRESSORS")
