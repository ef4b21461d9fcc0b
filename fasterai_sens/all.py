"""Everything for notebooks: `from fasterai_sens.all import *`."""

import fasterai_sens as _package
from fasterai_sens import *
from fasterai_sens.plans.applier import Compressor
from fasterai_sens.train.prune_callback import PruneCallback
from fasterai_sens.train.quantize_callback import QuantizeCallback
from fasterai_sens.train.recovery import gradual_degradation_recovery
from fasterai_sens.train.sparsify_callback import SparsifyCallback

# `random` stays out: a star import must not hide Python's own; it is `fasterai_sens.random`.
# `CompressCallback` stays out, too, since it needs transformers: `from fasterai_sens import CompressCallback`
__all__ = [n for n in dir(_package) if not n.startswith("_") and n not in ("random", "all", "CompressCallback") and type(getattr(_package, n)).__name__ != "module"]
__all__ += ["Compressor"]   # a name of before
