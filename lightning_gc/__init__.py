from lightning_gc.compressors import *
from lightning_gc.memories import *
from lightning_gc.schemes import *
