"""Find out which layers of a neural network can be compressed, and turn that into a plan that works."""

__version__ = "0.1.0"

from . import plot, targets
from .analyzer import SensitivityAnalyzer, analyze_sensitivity
from .baselines import erk, global_magnitude, lamp, uniform
from .counters import count_flops_params, latency, n_bytes
from .criteria import (
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
from .cutting import cut_by_masks
from .degradation import (
    DegradationResult,
    analyze_degradation,
    identify_critical_layers,
    recommend_compression_target,
    validate_compression_target,
)
from .evaluate import Divergence, FineTuned, evaluation, kl_from
from .inference import split_plan, to_torchao_config
from .joint import search_plan
from .plans import Compressor, CostTable, allocate, cost_table
from .prune import Pruned, Pruner
from .quantize import Quantized, quantize_model
from .results import BitPlan, LayerSensitivity, LayerTargets, Plan, SensitivityResult, SweepResult
from .schedules import Schedule, agp, cos, dsd, iterative, lin, one_cycle, one_shot
from .search import Recalibrated, SearchResult, reestimate_norms, search_targets
from .sizes import compress_to_size, compress_with_layer_sensitivity
from .sparsify import Sparse, Sparsifier
from .state import Perturbation, changes, fingerprint, leave_no_trace, method
from .topology import ChannelDependency, fix_mask_conflict, not_safe_to_prune

# These need fastai, which is imported when one of them is first used.
_lazy = {
    "PruneCallback": "callbacks",
    "QuantizeCallback": "callbacks",
    "RecoveryResult": "recovery",
    "SparsifyCallback": "callbacks",
    "gradual_degradation_recovery": "recovery",
}


def __getattr__(name):
    if name not in _lazy:
        raise AttributeError(f"module 'fasterai_sens' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_lazy[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *_lazy])
