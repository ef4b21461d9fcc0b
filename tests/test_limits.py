"""One grammar for `locked`, `bounds`, `layers` and `layer_types`: every form and every error, at every entry point."""
import math

import numpy as np
import pytest
import torch
from torch import nn

from fasterai_sens import (
    LayerTargets,
    SweepResult,
    allocate,
    analyze_degradation,
    compress_to_size,
    compress_with_layer_sensitivity,
    erk,
    global_magnitude,
    lamp,
    search_plan,
    search_targets,
    uniform,
)
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.limits import LayerLimits, LimitReader, only_layers, read_limits
from fasterai_sens.core.results import LayerSensitivity, SensitivityResult

x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
pct = [20, 40, 60, 80]


class Head(nn.Linear):
    """A kind of layer of its own."""


def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), Head(10, 8)).eval()


def swept(method="sparsity", levels=pct, names=("0", "2", "4")):
    """A sweep with made-up damages that rise with the level."""
    params = {u.name: u.params for u in all_units(toy())[0]}
    def row(name, i):
        harm = .01 * (i + 1) * (1 + int(name))
        return LayerSensitivity(name, "Linear", params[name], .9, .9 - harm, harm)
    return SweepResult([SensitivityResult(method, level, .9, [row(name, i) for name in names]) for i, level in enumerate(levels)])


def of_plan(plan, **limits):
    return lambda **limits: plan(toy(), 35, **limits)


def spread(model):
    """A metric that every change moves."""
    with torch.no_grad(): return -float((model(x) - toy()(x)).abs().mean())


def smaller(limits):
    """A size that leaves something to decide."""
    return 65 if {"locked", "bounds"} & set(limits) else 80


doors = {   # entry point -> limits -> layer name -> percent
    **{plan.__name__: of_plan(plan) for plan in (uniform, global_magnitude, erk, lamp)},
    "one level": lambda **limits: swept()[1].to_layer_targets(toy(), 35, **limits),
    "sweep": lambda **limits: swept().to_layer_targets(toy(), 35, **limits),
    "allocate": lambda **limits: allocate(swept(), "65%" if {"locked", "bounds"} & set(limits) else "80%", model=toy(), verbose=False, **limits).sparsity,
    "search_targets": lambda **limits: search_targets(toy(), x[:1], spread, 35, evaluations=40, verbose=False, **limits).plan,
    "search_plan": lambda **limits: search_plan(toy(), x[:1], spread, swept(), f"{smaller(limits)}%", evaluations=6, verbose=False, **limits).plan.sparsity,
    "size": lambda **limits: compress_to_size(toy(), x[:1], smaller(limits), "sparsity", cost="params", verbose=False, **limits).plan,
    "size by curves": lambda **limits: compress_to_size(toy(), x[:1], smaller(limits), "sparsity", cost="params", plan=swept(), verbose=False, **limits).plan,
    "degradation": lambda **limits: analyze_degradation(toy(), x[:1], spread, [smaller(limits)], "sparsity", cost="params", runs=0, verbose=False, **limits)[0].plan,
    "sensitivities": lambda **limits: compress_with_layer_sensitivity(toy(), x[:1], swept(), 35, verbose=False, **limits).plan,
}
of_mean = [plan for name, plan in doors.items() if name in ("uniform", "global_magnitude", "erk", "lamp", "one level", "sweep", "search_targets")]
every_door = pytest.mark.parametrize("plan", doors.values(), ids=doors)


@every_door
@pytest.mark.parametrize("locked", ["2", ["2"], ("2",), {"2"}, {"2": None}, {"2": 0}, LayerTargets({"2": 0}), LayerTargets({"2": 0}, method="sparsity")], ids=repr)
def test_locked_stays_as_it_is(plan, locked):
    """By name, in any collection, or at the level that changes nothing; the others still reach the target."""
    found = plan(locked=locked)
    assert found.get("2", 0) == 0 and max(found["0"], found["4"]) > 35


@every_door
@pytest.mark.parametrize("locked", [{"2": 60}, LayerTargets({"2": 60}, method="sparsity"), {"2": {"sparsity": 60}}], ids=repr)
def test_locked_at_a_level(plan, locked):
    """That level and no other, whatever the bounds."""
    assert plan(locked=locked)["2"] == 60
    assert plan(locked=locked, bounds={"2": (0, 20)})["2"] == 60


@every_door
@pytest.mark.parametrize("bounds", [{"4": (0, 20)}, {"4": [0, 20]}, {"4": {"sparsity": (0, 20)}}, {"sparsity": {"4": (0, 20)}}], ids=repr)
def test_bounds_of_a_layer(plan, bounds):
    found = plan(bounds=bounds)
    assert found.get("4", 0) <= 20 and max(found["0"], found["2"]) > 35


@every_door
@pytest.mark.parametrize("bounds", [(20, 40), [20, 40], {"sparsity": (20, 40)}], ids=repr)
def test_bounds_of_all_layers(plan, bounds):
    found = plan(bounds=bounds)
    assert all(20 <= level <= 40 for level in found.values()) and len(found) == 3


@every_door
def test_a_number_is_both_ends(plan):
    assert plan(bounds={"2": 60})["2"] == 60


@every_door
def test_what_is_said_of_a_layer_goes_first(plan):
    found = plan(bounds={"sparsity": (0, 40), "4": (60, 80)})
    assert found["4"] >= 60 and max(found["0"], found["2"]) <= 40


@every_door
@pytest.mark.parametrize("which", [dict(layers=["0", "2"]), dict(layers=("2", "0")), dict(layer_types=nn.Linear, layers=["0", "2"])], ids=repr)
def test_layers_that_are_planned_for(plan, which):
    assert set(plan(**which)) == {"0", "2"}


@every_door
def test_one_layer_and_its_kind(plan):
    assert set(plan(layers="2")) == {"2"}
    assert set(plan(layer_types=[Head])) == {"4"}


@every_door
@pytest.mark.parametrize(("limits", "error", "text"), [
    (dict(locked=5), TypeError, "several in a list, or layer name -> level"),
    (dict(locked="nope"), KeyError, "nope"),
    (dict(locked={"nope": 0}), KeyError, "nope"),
    (dict(locked={"2": 150}), ValueError, "sparsity of '2' is in percent, a number from 0 to 100; got 150"),
    (dict(locked={"2": {"bits": 4}}), KeyError, "unknown method 'bits'"),
    (dict(locked=LayerTargets({"2": 4}, "bits")), ValueError, "in bits"),
    (dict(locked=LayerTargets({"2": 4}, method="pruning")), ValueError, "this is sparsity"),
    (dict(bounds=7), TypeError, r"bounds is a pair \(low, high\) for all layers, or layer name -> pair"),
    (dict(bounds=["2"]), TypeError, r"bounds is a pair \(low, high\) for all layers"),
    (dict(bounds={"nope": (0, 50)}), KeyError, "nope"),
    (dict(bounds={"2": (60, 20)}), ValueError, "bounds of '2': 60 is above 20"),
    (dict(bounds=(60, 20)), ValueError, "bounds of 'all layers': 60 is above 20"),
    (dict(bounds={"2": (0, 20, 40)}), ValueError, r"bounds of '2' are \(low, high\), or one number"),
    (dict(bounds={"2": (0, math.nan)}), ValueError, "sparsity of '2' is in percent"),
    (dict(bounds={"2": "half"}), ValueError, "bounds of '2' are"),
    (dict(layers=[]), ValueError, "layers is empty"),
    (dict(layers=5), TypeError, "layers is a list of names"),
    (dict(layers="nope"), KeyError, "nope"),
    (dict(layer_types=nn.Conv2d), ValueError, "of type Conv2d"),
    (dict(layer_types="Linear"), TypeError, "layer_types is"),
    (dict(layers=["0"], locked="2"), KeyError, "'2' is locked, but is not among the layers to plan for; those are 0|unknown measured layer '2'"),
    (dict(layers=["0"], bounds={"2": 5}), KeyError, "'2' has bounds, but is not among the layers to plan for; those are 0|unknown measured layer '2'"),
], ids=str)
def test_refused(plan, limits, error, text):
    with pytest.raises(error, match=text):
        plan(**limits)


@pytest.mark.parametrize("plan", of_mean)
def test_bounds_for_all_and_the_shorthand_exclude_each_other(plan):
    with pytest.raises(ValueError, match="is for all layers; leave the least and the most for any layer out"):
        plan(bounds=(0, 60), max_pct=70)
    assert plan(bounds={"4": (0, 80)}, max_pct=50)["2"] <= 50


@pytest.mark.parametrize("plan", of_mean)
def test_out_of_reach_says_why(plan):
    with pytest.raises(ValueError, match="0, 2 are locked; between"):
        plan(locked=["0", "2"], max_pct=50)
    with pytest.raises(ValueError, match="there are bounds; between"):
        plan(bounds={"0": (0, 5), "2": (0, 5), "4": (0, 5)})


def test_several_methods():
    """A level needs its method; the methods of which no level is given leave a locked layer alone."""
    both = [swept(), swept("quantization", [8, 4])]
    def plan(**limits): return allocate(both, {"bytes": "75%"}, model=toy(), combine=("sparsity", "quantization"), verbose=False, **limits).levels()
    assert plan(locked={"2": {"quantization": 8}})["2"] == {"quantization": 8}
    assert plan(locked=LayerTargets({"2": 8}, "bits", "quantization"))["2"] == {"quantization": 8}
    assert plan(bounds={"2": {"quantization": 8}})["2"]["quantization"] == 8
    assert all(levels["quantization"] == 4 for levels in plan(bounds={"quantization": 4}).values())
    assert "2" not in plan(locked=["2"])
    with pytest.raises(ValueError, match=r"locked of '2' could be percent or bits; say for which method, such as \{'sparsity': 40\}"):
        plan(locked={"2": 40})
    with pytest.raises(ValueError, match="bounds of '2' could be percent or bits"):
        plan(bounds={"2": (0, 40)})
    with pytest.raises(ValueError, match="bounds of 'all layers' could be percent or bits"):
        plan(bounds=(0, 40))


def test_tied_layers_have_one_limit():
    """By any of their names; two names must not contradict each other."""
    known = {"a": "a", "b": "a", "c": "c"}
    assert read_limits("sparsity", known, locked={"b": 40}).layers == {"a": {"sparsity": (40, 40)}}
    assert read_limits("sparsity", known, bounds={"a": 40, "b": 40}).layers == {"a": {"sparsity": (40, 40)}}
    for said in (dict(locked={"a": 10, "b": 75}), dict(bounds={"a": 10, "b": (0, 75)})):
        with pytest.raises(ValueError, match="'b' shares its weight with 'a', but their targets differ"):
            read_limits("sparsity", known, **said)


def test_layers_that_go_together():
    """All of them must allow a level; where they leave none, they are named."""
    limits = LayerLimits({"pruning": (0, 90)}, {"a": {"pruning": (20, 60)}, "b": {"pruning": (40, 80)}, "c": {"pruning": None}})
    assert limits.range_of(["a", "b", "d"], "pruning") == (40, 60)
    assert limits.range_of(["d"], "pruning") == (0, 90) and limits.range_of(["c", "d"], "pruning") is None
    with pytest.raises(ValueError, match="a, c have one level, and what is said of each of them leaves none"):
        limits.range_of(["a", "c"], "pruning")


def test_half_a_percent_of_a_plan_is_meant(recwarn):
    """Targets come from formulas, so half a percent is none to warn of."""
    read_limits("sparsity", ["a"], locked=LayerTargets({"a": .5}))
    assert not recwarn
    with pytest.warns(UserWarning, match="levels are percent"):
        LimitReader("sparsity", ["a"]).level(.4321, "a", "sparsity", False)


def test_only_layers_leaves_the_result_as_it_was():
    sweep = swept()
    part = only_layers(sweep, toy(), layers=["4", "0"])
    assert part.names == ["0", "4"] and sweep.names == ["0", "2", "4"] and part.levels == sweep.levels
    assert only_layers(sweep) is sweep
    assert np.array_equal([row.delta for row in part[1].layers], [row.delta for row in sweep[1].layers if row.name != "2"])


@pytest.mark.parametrize("plan", [None, swept("quantization", [8, 6, 4, 2])], ids=["alike", "by curves"])
def test_sizes_in_bits(plan):
    """Bits that are locked or bounded stay there, at every size; what is left as it is has none."""
    def bits(size, **limits): return compress_to_size(toy(), x[:1], size, "quantization", plan=plan, verbose=False, **limits).plan
    assert bits(35, locked={"2": 8})["2"] == 8
    assert "2" not in bits(60, locked="2")
    assert all(4 <= b <= 8 for b in bits(40, bounds=(4, 8)).values())
    assert bits(40, bounds={"0": (6, 8)})["0"] in (6, 7, 8)
    with pytest.raises(ValueError, match="got 40"): bits(40, locked={"2": 40})
    with pytest.raises(ValueError): bits(10, bounds=(8, 16))


def test_channels_that_are_locked():
    """Channels of a locked layer stay, a layer that cannot be pruned may be locked as it is, and at no other level."""
    def channels(**limits): return compress_to_size(toy(), x[:1], 60, "pruning", verbose=False, **limits)
    assert channels(locked="0").plan.get("0", 0) == 0 and channels(locked="0").model[0].out_features == 10
    assert channels(locked={"0": 30}).model[0].out_features == 7
    assert channels(bounds={"2": (0, 20)}).model[2].out_features >= 8
    assert channels(locked="4").plan
    with pytest.raises(ValueError, match="4 cannot be compressed"): channels(locked={"4": 50})


def test_the_least_is_done_even_where_nothing_is_needed():
    """A size that the model has already still gets what was locked at a level."""
    found = compress_to_size(toy(), x[:1], 100, "sparsity", cost="params", locked={"2": 50}, verbose=False)
    assert found.plan == {"2": 50} and found.size < found.dense_size
    assert compress_to_size(toy(), x[:1], 100, "sparsity", cost="params", verbose=False).plan == {}
