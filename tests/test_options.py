"""An option that nothing would take raises, at every door, and names the method and what could be meant."""
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from toys import rows, three_layers, unchanged

from fasterai_sens import (
    Perturbation,
    SensitivityAnalyzer,
    Sparse,
    SweepResult,
    allocate,
    analyze_degradation,
    analyze_sensitivity,
    compress_to_size,
    compress_with_layer_sensitivity,
    large_final,
    method,
    quantize_model,
    random,
    recommend_compression_target,
    search_plan,
    search_targets,
)
from fasterai_sens.core.protocol import methods

x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
score = rows(x)
quant = dict(quant_per_channel=True, quant_activations=False, quant_group_size=2, quant_ranges="mse", quant_symmetric=True)


@pytest.fixture(scope="module")
def net():
    """Three layers"""
    return three_layers()


def doors(net):
    """Every way to measure"""
    a = SensitivityAnalyzer(net, x[:1], score)
    return [partial(a.analyze, verbose=False), partial(a.sweep, verbose=False), lambda m, **options: analyze_sensitivity(net, x[:1], score, m, verbose=False, **options)]


foreign = [("pruning", dict(granularity="filter")), ("pruning", dict(granularity="weight")), ("quantization", dict(granularity="weight")), ("quantization", dict(granularity="2:4")),
           *((m, {k: v}) for m in ("sparsity", "pruning") for k, v in quant.items())]


@pytest.mark.parametrize("name, option", foreign, ids=str)
def test_options_of_other_methods(net, name, option):
    key, = option
    owner = "sparsity" if key == "granularity" else "quantization"
    for door in doors(net):
        with pytest.raises(TypeError, match=f"{name} takes no option '{key}'; it is an option of {owner}"):
            door(name, **option)


@pytest.mark.parametrize("name, wrong, right", [("quantization", "quant_perchannel", "quant_per_channel"), ("quantization", "quant_activation", "quant_activations"), ("sparsity", "granularty", "granularity"),
                                                ("sparsity", "layer_type", "layer_types"), ("pruning", "layer", "layers"), ("pruning", "verbos", "verbose")])
def test_misspelled_options(net, name, wrong, right):
    for door in doors(net):
        with pytest.raises(TypeError, match=f"{name} takes no option '{wrong}'; did you mean .*'{right}'"):
            door(name, **{wrong: 1})


def test_options_that_are_taken(net):
    for door in doors(net):
        for name in methods:
            found = door(name, layers=["0", "2"], layer_types=nn.Linear, **dict.fromkeys([*quant, "granularity"]))
            first = found[0] if isinstance(found, SweepResult) else found
            assert {row.name for row in first.layers} == {"0", "2"}
        assert door("sparsity", granularity="filter") is not None
        assert door("quantization", **quant | dict(quant_activations="output")) is not None


def test_ranges_need_activations(net):
    for door in doors(net):
        with pytest.raises(ValueError):
            door("quantization", quant_ranges="mse")
    with pytest.raises(ValueError):
        quantize_model(net, 8, quant_ranges="mse")
    quantize_model(net, 8, quant_ranges="mse", quant_activations=True, sample=x).remove()


def test_a_perturbation_has_its_options(net):
    for door in doors(net):
        with pytest.raises(TypeError, match=r"Sparse\(.*has its options already; leave granularity out"):
            door(Sparse(50), granularity="filter")
    with pytest.raises(TypeError, match="has its options already; leave criteria out"):
        analyze_sensitivity(net, x[:1], score, Sparse(50), criteria=random, verbose=False)


def test_criteria_for_what_ranks_nothing(net):
    for given in (random, large_final):
        with pytest.raises(TypeError):
            analyze_sensitivity(net, x[:1], score, "quantization", criteria=given, verbose=False)
        for name in ("sparsity", "pruning"):
            assert analyze_sensitivity(net, x[:1], score, name, criteria=given, verbose=False).settings["criteria"] == given.name
    assert SensitivityAnalyzer(net, x[:1], score, criteria=random).analyze("quantization", verbose=False).compression_level == 8
    assert analyze_sensitivity(net, x[:1], score, "sparsity", verbose=False).settings["criteria"] == "large_final"


@pytest.fixture
def noise():
    """A method of one's own with one option, entered into the table and taken out again"""
    @method("noise")
    @dataclass(frozen=True)
    class Noisy(Perturbation):
        level: float = 50
        seed: int = 0
        @classmethod
        def configure(cls, *, model, noise_seed=0):
            assert isinstance(model, nn.Module)
            return partial(cls, seed=noise_seed)
        @property
        def settings(self): return dict(noise_seed=self.seed)
        def change(self, model, unit): unit.weight.data.mul_(1 - self.level/200)

    yield Noisy
    del methods["noise"]


def test_a_method_of_ones_own_says_what_it_takes(net, noise):
    for door in doors(net):
        got = door("noise", noise_seed=3)
        assert (got if hasattr(got, "settings") else got[0]).settings == {"noise_seed": 3}
        assert (got if hasattr(got, "settings") else got[0]).compression_type == "noise"
        with pytest.raises(TypeError, match="noise takes no option 'noise_sed'; did you mean 'noise_seed'"):
            door("noise", noise_sed=3)
        with pytest.raises(TypeError, match="noise takes no option 'granularity'; it is an option of sparsity"):
            door("noise", granularity="filter")
        with pytest.raises(TypeError, match="sparsity takes no option 'noise_seed'; it is an option of noise"):
            door("sparsity", noise_seed=3)
    with pytest.raises(TypeError, match="noise takes no criteria"):
        analyze_sensitivity(net, x[:1], score, "noise", criteria=random, verbose=False)


def test_what_a_configure_swallows_is_no_option(net, noise):
    @method("noise")
    class Plain(Perturbation):
        def __init__(self, level): self.level = level
        @classmethod
        def configure(cls, *, units, amount=1, **_): return cls
        def change(self, model, unit): unit.weight.data.mul_(.5)

    a = SensitivityAnalyzer(net, x[:1], score)
    assert a.analyze("noise", 10, amount=2, verbose=False).compression_level == 10
    with pytest.raises(TypeError, match="noise takes no option 'amont'"):
        a.analyze("noise", 10, amont=2, verbose=False)


def small_of(net):
    """Both functions that make a model smaller by a method"""
    return [partial(compress_to_size, net, x[:1], 60), lambda m, **more: analyze_degradation(net, x[:1], score, [60], m, verbose=False, runs=0, **more)]


@pytest.mark.parametrize("name, option", [("pruning", "granularity"), ("quantization", "granularity"), ("quantization", "criteria")])
def test_sizes(net, name, option):
    for f in small_of(net):
        with pytest.raises(TypeError, match=f"{name} takes no option '{option}'; it is an option of "):
            f(name, **{option: {"granularity": "weight", "criteria": random}[option]})
        for plan in (None, {"0": 4} if name == "quantization" else {"0": 50}):
            with pytest.raises(ValueError, match="max_pct is for plans in percent"):
                f(name, plan=plan, max_pct=50)
        f(name)
    a = SensitivityAnalyzer(net, x[:1], score)
    if name == "pruning":
        with pytest.raises(TypeError):
            compress_with_layer_sensitivity(net, x[:1], a.analyze("pruning", verbose=False), granularity="filter")
    else:
        with pytest.raises(ValueError, match="max_pct is for plans in percent"):
            compress_to_size(net, x[:1], 60, "quantization", plan=a.sweep("quantization", verbose=False), max_pct=50)


def test_sizes_take_what_is_theirs(net):
    a = SensitivityAnalyzer(net, x[:1], score, criteria=random)
    sweep = a.sweep("sparsity", granularity="row", verbose=False)
    for f in small_of(net):
        with unchanged(net):
            sparse = f("sparsity", granularity="row", criteria=random, plan=sweep, max_pct=80)
            pruned = f("pruning", criteria=random)
        sparse, pruned = (made if hasattr(made, "plan") else made[0] for made in (sparse, pruned))
        assert sparse.size_pct <= 60 and pruned.size_pct <= 60
        assert 0 < max(sparse.plan.values()) <= 80 and pruned.plan


def test_budgets_say_what_they_are_of(net):
    a = SensitivityAnalyzer(net, x[:1], score)
    sweep, bits = a.sweep("sparsity", verbose=False), a.sweep("quantization", verbose=False)
    for f in (partial(allocate, sweep, model=net, sample=x[:1]), lambda budget, **more: search_plan(net, x[:1], score, sweep, budget, verbose=False, evaluations=1, **more)):
        with pytest.raises(ValueError):
            f({"bytes": "70%"}, cost="params")
        with pytest.raises(ValueError, match="leave cost='flops' out"):
            f({"bytes": "70%"}, cost="flops")
        assert f({"bytes": "70%"}) is not None
    with pytest.raises(TypeError):
        allocate(bits, "30%", "bytes", model=net, criteria=random)
    assert allocate(sweep, "70%", model=net).budgets.keys() == {"params"}


def test_directions_and_scales_of_nothing(net):
    sweep = SensitivityAnalyzer(net, x[:1], score).sweep("sparsity", verbose=False)
    with pytest.raises(ValueError, match="direction of report_fn"):
        search_targets(net, x[:1], score, 50, report_higher_is_better=False, verbose=False)
    with pytest.raises(ValueError, match="direction of report_fn"):
        search_plan(net, x[:1], score, sweep, "70%", report_higher_is_better=False, verbose=False)
    for allowed in (dict(max_drop=.1), dict(max_drop_pct=5)):
        with pytest.raises(ValueError, match="full_scale is what 100 points are"):
            recommend_compression_target(baseline=.9, full_scale=1, **allowed)
