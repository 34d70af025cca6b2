"""Collect the compressors, one method per file. A new method needs one import line here."""

from lightning_gc.compressors.base import AbsoluteError as AbsoluteError
from lightning_gc.compressors.base import BatchedCollective as BatchedCollective
from lightning_gc.compressors.base import Codec as Codec
from lightning_gc.compressors.base import Collective as Collective
from lightning_gc.compressors.base import Compressor as Compressor
from lightning_gc.compressors.base import Contraction as Contraction
from lightning_gc.compressors.base import Knob as Knob
from lightning_gc.compressors.base import Multiple as Multiple
from lightning_gc.compressors.base import Traits as Traits
from lightning_gc.compressors.base import Unbounded as Unbounded
from lightning_gc.compressors.base import Variance as Variance
from lightning_gc.compressors.base import Waits as Waits
from lightning_gc.compressors.base import Worst as Worst
from lightning_gc.compressors.identity import Identity as Identity
from lightning_gc.compressors.lossless import Lossless as Lossless
from lightning_gc.compressors.low_rank.atomo_svd import AtomoSVD as AtomoSVD
from lightning_gc.compressors.low_rank.factorisation import LowRank as LowRank
from lightning_gc.compressors.low_rank.gradiveq import GradiVeQ as GradiVeQ
from lightning_gc.compressors.low_rank.gradzip import GradZip as GradZip
from lightning_gc.compressors.low_rank.powersgd import PowerSGD as PowerSGD
from lightning_gc.compressors.low_rank.svd_threshold import SVDThreshold as SVDThreshold
from lightning_gc.compressors.quantisers.absolute_rounding import (
    AbsoluteRounding as AbsoluteRounding,
)
from lightning_gc.compressors.quantisers.aqsgd import AQSGD as AQSGD
from lightning_gc.compressors.quantisers.bin_means import BinMeans as BinMeans
from lightning_gc.compressors.quantisers.blockwise_codes import Blockwise8Bit as Blockwise8Bit
from lightning_gc.compressors.quantisers.cast import Cast as Cast
from lightning_gc.compressors.quantisers.coded_qsgd import CodedQSGD as CodedQSGD
from lightning_gc.compressors.quantisers.dynamic_tree import DynamicTree as DynamicTree
from lightning_gc.compressors.quantisers.ecqsgd import ECQSGD as ECQSGD
from lightning_gc.compressors.quantisers.float4 import Float4 as Float4
from lightning_gc.compressors.quantisers.float8 import Float8 as Float8
from lightning_gc.compressors.quantisers.int8 import Int8 as Int8
from lightning_gc.compressors.quantisers.integer_qsgd import IntegerQSGD as IntegerQSGD
from lightning_gc.compressors.quantisers.mx import MXFP4 as MXFP4
from lightning_gc.compressors.quantisers.mx import MXFP8 as MXFP8
from lightning_gc.compressors.quantisers.natural_compression import (
    NaturalCompression as NaturalCompression,
)
from lightning_gc.compressors.quantisers.nvfp4 import NVFP4 as NVFP4
from lightning_gc.compressors.quantisers.qsgd import QSGD as QSGD
from lightning_gc.compressors.quantisers.rotated import Rotated as Rotated
from lightning_gc.compressors.quantisers.terngrad import TernGrad as TernGrad
from lightning_gc.compressors.quantisers.uniform import Uniform as Uniform
from lightning_gc.compressors.signs.ef_sign_sgd import EFSignSGD as EFSignSGD
from lightning_gc.compressors.signs.one_bit_sgd import OneBitSGD as OneBitSGD
from lightning_gc.compressors.signs.sign_sgd import SignSGD as SignSGD
from lightning_gc.compressors.signs.signum import Signum as Signum
from lightning_gc.compressors.sparsifiers.adacomp import AdaComp as AdaComp
from lightning_gc.compressors.sparsifiers.atomo_entries import AtomoEntries as AtomoEntries
from lightning_gc.compressors.sparsifiers.chunked_topk import ChunkedTopK as ChunkedTopK
from lightning_gc.compressors.sparsifiers.dgc import DGC as DGC
from lightning_gc.compressors.sparsifiers.fixed_proportion import FixedProportion as FixedProportion
from lightning_gc.compressors.sparsifiers.gaussian_k import GaussianK as GaussianK
from lightning_gc.compressors.sparsifiers.gtopk import GTopK as GTopK
from lightning_gc.compressors.sparsifiers.hard_threshold import HardThreshold as HardThreshold
from lightning_gc.compressors.sparsifiers.model_topk import ModelTopK as ModelTopK
from lightning_gc.compressors.sparsifiers.nonzero_blocks import NonzeroBlocks as NonzeroBlocks
from lightning_gc.compressors.sparsifiers.random_mask import RandomMask as RandomMask
from lightning_gc.compressors.sparsifiers.randomk import RandomK as RandomK
from lightning_gc.compressors.sparsifiers.redsync import RedSync as RedSync
from lightning_gc.compressors.sparsifiers.reused_threshold import ReusedThreshold as ReusedThreshold
from lightning_gc.compressors.sparsifiers.sidco import SIDCo as SIDCo
from lightning_gc.compressors.sparsifiers.sketched_sgd import SketchedSGD as SketchedSGD
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec as SparseCodec
from lightning_gc.compressors.sparsifiers.stc import STC as STC
from lightning_gc.compressors.sparsifiers.strom_threshold import StromThreshold as StromThreshold
from lightning_gc.compressors.sparsifiers.topk import TopK as TopK
from lightning_gc.compressors.sparsifiers.topk_selection import (
    ThresholdEstimator as ThresholdEstimator,
)
from lightning_gc.compressors.sparsifiers.variance_criterion import (
    VarianceCriterion as VarianceCriterion,
)
from lightning_gc.compressors.sparsifiers.variance_sparsifier import (
    VarianceSparsifier as VarianceSparsifier,
)
from lightning_gc.compressors.wrappers.induced import Induced as Induced
from lightning_gc.compressors.wrappers.menu import Menu as Menu
from lightning_gc.compressors.wrappers.per_parameter import PerParameter as PerParameter
from lightning_gc.compressors.wrappers.quantised import Quantised as Quantised
from lightning_gc.compressors.wrappers.size_switch import SizeSwitch as SizeSwitch
from lightning_gc.compressors.wrappers.wrapper import Preset as Preset
from lightning_gc.compressors.wrappers.wrapper import Wrapper as Wrapper
from lightning_gc.core import Choice as Choice
from lightning_gc.core import Range as Range
from lightning_gc.core.registry import concrete as _concrete
from lightning_gc.core.registry import export as _export

COMPRESSORS = _concrete(globals(), Compressor)
"""``{name: class}`` of all compressors with default settings. Wrappers need an inner compressor."""

_export(globals(), "COMPRESSORS")
