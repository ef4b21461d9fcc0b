"""Find out which layers of a neural network can be compressed, and turn that into a plan that works."""

__version__ = "0.1.0"

from .plans import targets as _targets
from .show import plots as _plots
from .measure.analyzer import SensitivityAnalyzer, analyze_sensitivity
from .plans.baselines import erk, global_magnitude, lamp, uniform
from .core.counters import count_flops_params, latency, n_bytes
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
from .topology.cutting import cut_by_masks
from .plans.degradation import (
    DegradationResult,
    analyze_degradation,
    identify_critical_layers,
    recommend_compression_target,
    validate_compression_target,
)
from .measure.scores import Divergence, FineTuned, evaluation, kl_from
from .methods.torchao import split_plan, to_torchao_config
from .plans.joint import search_plan
from .plans.allocate import Compressor, CostTable, allocate, cost_table
from .methods.prune import Pruned, Pruner
from .methods.quantize import Quantized, quantize_model
from .core.results import BitPlan, LayerSensitivity, LayerTargets, Plan, SensitivityResult, SweepResult
from .train.schedules import Schedule, agp, cos, dsd, iterative, lin, one_cycle, one_shot
from .plans.search import Recalibrated, SearchResult, reestimate_norms, search_targets
from .plans.sizes import compress_to_size, compress_with_layer_sensitivity
from .methods.sparsify import Sparse, Sparsifier
from .core.state import Perturbation, changes, fingerprint, leave_no_trace, method
from .topology.coupling import ChannelDependency, fix_mask_conflict, not_safe_to_prune

# These need fastai, which is imported when one of them is first used.
_lazy = {
    "PruneCallback": "train.callbacks",
    "QuantizeCallback": "train.callbacks",
    "RecoveryResult": "train.recovery",
    "SparsifyCallback": "train.callbacks",
    "gradual_degradation_recovery": "train.recovery",
}


def __getattr__(name):
    if name not in _lazy:
        raise AttributeError(f"module 'fasterai_sens' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_lazy[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *_lazy])
