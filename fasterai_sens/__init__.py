"""Find out which layers of a neural network can be compressed, and turn that into a plan that works."""

__version__ = "0.1.0"

from .core.counters import count_flops_params, latency, n_bytes
from .core.fingerprint import changes, fingerprint
from .core.plans import BitPlan, LayerTargets, Plan
from .core.protocol import Perturbation, method
from .core.protocol import methods_in as _methods_in
from .core.results import LayerSensitivity, SensitivityResult
from .core.state import leave_no_trace
from .core.sweeps import SweepResult
from .measure.analyzer import SensitivityAnalyzer, analyze_sensitivity
from .measure.finetuned import FineTuned
from .measure.objectives import Divergence, evaluation, kl_from
from .measure.refine import Refine
from .measure.settle import Settle
from .methods.criteria import (
    Criterion,
    large_final,
    large_init,
    large_init_large_final,
    magnitude_increase,
    movement,
    random,
    small_final,
    small_init,
    small_init_small_final,
    squared_final,
    taylor,
    updating_magnitude_increase,
    updating_movement,
    updating_movmag,
    wanda,
)
from .methods.prune import Pruned
from .methods.pruner import Pruner, Recipe
from .methods.quantize import Quantized, quantize_model
from .methods.sparsify import Sparse, Sparsifier
from .methods.torchao import split_plan, to_torchao_config
from .plans.allocate import allocate, cost_table
from .plans.applier import Applier
from .plans.baselines import erk, global_magnitude, lamp, uniform
from .plans.choices import CostTable
from .plans.degradation import DegradationResult, analyze_degradation
from .plans.files import describe_compressed, load_compressed, save_compressed
from .plans.joint import search_plan
from .plans.meter import SearchResult
from .measure.norms import Recalibrated, reestimate_norms
from .plans.running import measure_runs
from .plans.search import search_targets
from .plans.sizes import compress_to_size, compress_with_layer_sensitivity
from .plans.verdicts import identify_critical_layers, recommend_compression_target, validate_compression_target
from .show.report import report
from .topology.coupling import ChannelDependency, not_safe_to_prune
from .topology.cutting import cut_by_masks
from .topology.masks import fix_mask_conflict
from .train.hold import hold
from .train.schedules import Schedule, agp, cos, dsd, iterative, lin, one_cycle, one_shot
from .train.stages import RecoveryResult

# Whatever module there is in `methods` is imported, and the class of each method that is found has its name here.
globals().update(_methods_in("fasterai_sens.methods"))

# These add methods to classes of others.
from .plans import bits as _bits, targets as _targets
from .show import plots as _plots

# These need fastai or transformers, which are imported when one of them is first used.
_lazy = {
    "CompressCallback": "train.trainer_callback",
    "PruneCallback": "train.prune_callback",
    "QuantizeCallback": "train.quantize_callback",
    "SparsifyCallback": "train.sparsify_callback",
    "gradual_degradation_recovery": "train.recovery",
}

# Names of before: they work for two more versions, and say what to use instead.
_retired = {"Compressor": "Applier"}


def __getattr__(name):
    if name in _retired:
        from warnings import warn

        warn(f"{name} is called {_retired[name]} now", DeprecationWarning, stacklevel=2)
        return globals()[_retired[name]]
    if name not in _lazy:
        raise AttributeError(f"module 'fasterai_sens' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_lazy[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *_lazy])
