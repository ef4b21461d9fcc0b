"""Targets know their method, keep it wherever they go, and are refused by the tools of another."""
import copy
import json
import pickle

import pytest
import torch
from toys import rows, three_layers, unchanged

from fasterai_sens import (
    BitPlan,
    LayerTargets,
    Plan,
    PruneCallback,
    Pruner,
    QuantizeCallback,
    RecoveryResult,
    SearchResult,
    SensitivityAnalyzer,
    Sparsifier,
    SparsifyCallback,
    allocate,
    analyze_degradation,
    compress_to_size,
    erk,
    global_magnitude,
    lamp,
    quantize_model,
    search_targets,
    split_plan,
    to_torchao_config,
    uniform,
)
from fasterai_sens.train.recovery import stage_targets

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
score = rows(x)


@pytest.fixture
def net():
    """Three layers"""
    return three_layers()


def analyzer(net):
    """Of the fixture"""
    return SensitivityAnalyzer(net, x[:1], score)


def measured(net, method):
    """Targets as each method makes them"""
    sweep = analyzer(net).sweep(method, [8, 4, 2] if method == "quantization" else [25, 50, 75], verbose=False)
    return sweep.to_bit_plan(net, 4) if method == "quantization" else sweep.to_layer_targets(net, 30)


names = "sparsity", "pruning", "quantization"


@pytest.mark.parametrize("method", names)
def test_what_was_measured_says_for_what(net, method, tmp_path):
    targets = measured(net, method)
    assert targets.method == method
    if method != "quantization":
        assert analyzer(net).analyze(method, 50, verbose=False).to_layer_targets(net, 30).method == method
    for again in (copy.copy(targets), copy.deepcopy(targets), pickle.loads(pickle.dumps(targets)), LayerTargets(targets)):
        assert again == targets and again.method == method and again.unit == targets.unit
    targets.to_json(tmp_path / "t.json")
    back = type(targets).from_json(tmp_path / "t.json")
    assert back == targets and vars(back) == vars(targets) and type(back) is type(targets)
    for plain in (dict(targets), targets | {}, {**targets}):
        assert type(plain) is dict
    if method != "quantization":
        assert type(targets.as_fractions()) is dict


def test_baselines_are_for_sparsity(net):
    for plan in (uniform, erk, lamp, global_magnitude):
        assert plan(net, 50).method == "sparsity"


def test_plans_divide_by_method(net, tmp_path):
    a = analyzer(net)
    sweeps = [a.sweep("sparsity", [50, 80], verbose=False), a.sweep("pruning", [50, 75], verbose=False), a.sweep("quantization", [8, 4], verbose=False)]
    plan = allocate(sweeps, "40%", "bytes", model=net, sample=x[:1])
    plan.to_json(tmp_path / "p.json")
    for p in (plan, Plan.from_json(tmp_path / "p.json"), Plan(), Plan(sparsity={"0": 5}, quantization={"2": 8})):
        assert [getattr(p, m).method for m in names] == list(names)
    assert Plan.from_json(tmp_path / "p.json").as_dict() == plan.as_dict()
    with pytest.raises(ValueError, match="for sparsity, and this is pruning"):
        Plan(pruning=plan.sparsity)
    shared = LayerTargets({"0": 50})
    both = Plan(pruning=shared, sparsity=shared)
    assert (both.pruning.method, both.sparsity.method, shared.method) == ("pruning", "sparsity", None)


def tools_of(net, method):
    """Everything that takes targets of one method"""
    a, fresh = analyzer(net), copy.deepcopy(net)
    if method == "sparsity":
        return [
            lambda t: Sparsifier(fresh).sparsify_model(t), SparsifyCallback, lambda t: compress_to_size(net, x[:1], 60, "sparsity", plan=t),
            lambda t: analyze_degradation(net, x[:1], score, [60], "sparsity", plan=t, verbose=False, runs=0), lambda t: stage_targets(net, [20], "sparsity", t),
            lambda t: a.sweep("sparsity", [25, 75], verbose=False).predict(t), lambda t: uniform(net, 50, locked=t),
            lambda t: Plan(sparsity=t),
        ]
    if method == "pruning":
        return [
            lambda t: Pruner(fresh, t, example_inputs=x[:1]), PruneCallback, lambda t: compress_to_size(net, x[:1], 60, plan=t), lambda t: stage_targets(net, [20], "pruning", t),
            lambda t: analyze_degradation(net, x[:1], score, [60], plan=t, verbose=False, runs=0), lambda t: a.sweep("pruning", [25, 75], verbose=False).predict(t),
            lambda t: Plan(pruning=t),
        ]
    return [lambda t: quantize_model(copy.deepcopy(net), t), QuantizeCallback, lambda t: split_plan(t, net), lambda t: Plan(quantization=t)]


def asked(method):
    """Targets that all tools of a method take"""
    return {"0": 4, "2": 8} if method == "quantization" else {"0": 25., "2": 50.}


@pytest.mark.parametrize("method", names)
def test_tools_refuse_the_targets_of_others(net, method):
    plain = asked(method)
    unit = "bits" if method == "quantization" else "percent"
    for tool in tools_of(net, method):
        tool(LayerTargets(plain, unit, method))
        for other in {*names, "low_rank"} - {method}:
            with pytest.raises(ValueError, match=f"these targets are for {other}, and this is {method}: sweep"):
                tool(LayerTargets(plain, unit, other))


@pytest.mark.parametrize("method", names)
def test_plain_dictionaries_and_files_of_before_go_everywhere(net, method, tmp_path):
    unit = "bits" if method == "quantization" else "percent"
    LayerTargets(asked(method), unit, method).to_json(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    del data["method"]
    (tmp_path / "t.json").write_text(json.dumps(data))
    old = LayerTargets.from_json(tmp_path / "t.json")
    assert old.method is None and old.unit == unit
    for tool in tools_of(net, method):
        for targets in (old, dict(old), LayerTargets(dict(old), unit, method)):
            with unchanged(net):
                tool(targets)


def test_a_deliberate_use_has_its_way(net):
    targets = measured(net, "sparsity")
    channels = {n: pct for n, pct in targets.items() if n != "4"}
    for ratios in (channels, LayerTargets(channels, method="pruning"), LayerTargets(LayerTargets(channels, method="sparsity"), method="pruning")):
        pruner = Pruner(copy.deepcopy(net), ratios, example_inputs=x[:1])
        pruner.prune_model()
        assert pruner.model[0].out_features == round(16*(1 - channels["0"]/100))


def test_searches_start_from_plans_for_sparsity(net):
    plain = {"0": 50, "2": 50, "4": 50}
    for plan in (plain, LayerTargets(plain), LayerTargets(plain, method="sparsity")):
        found = search_targets(net, x[:1], score, 50, plans={"mine": plan}, evaluations=60, verbose=False)
        assert found.plans["mine"] == plain and found.plans["mine"].method == "sparsity"
    with pytest.raises(ValueError, match="this is sparsity"):
        search_targets(net, x[:1], score, 50, plans={"mine": LayerTargets(plain, method="pruning")}, verbose=False)


def test_bits_never_become_percent(net):
    plan = BitPlan({"0": 4, "2": 4, "4": 4})
    assert LayerTargets(plan).unit == "bits" and LayerTargets(plan).method == "quantization"
    with pytest.raises(ValueError, match="in bits, not in percent"):
        LayerTargets(plan, "percent")
    with pytest.raises(ValueError, match="these targets are for quantization"):
        search_targets(net, x[:1], score, 4, plans={"mine": plan}, verbose=False)
    with pytest.raises(ValueError, match="in bits, not in percent"):
        search_targets(net, x[:1], score, 4, plans={"mine": LayerTargets(dict(plan), "bits")}, verbose=False)


def test_results_keep_the_method_of_their_targets(net, tmp_path):
    found = search_targets(net, x[:1], score, 50, verbose=False, evaluations=60)
    assert found.plan.method == "sparsity" and {p.method for p in found.plans.values()} == {"sparsity"}
    found.to_json(tmp_path / "s.json")
    back = SearchResult.from_json(tmp_path / "s.json")
    assert back.plan.method == "sparsity" and {p.method for p in back.plans.values()} == {"sparsity"}
    for method, cost in (("sparsity", "bytes"), ("pruning", "bytes"), ("quantization", "bytes")):
        curve = analyze_degradation(net, x[:1], score, [100, 60], method, cost=cost, verbose=False, runs=0)
        curve.to_json(tmp_path / "d.json")
        assert [p.plan.method for p in curve] == [p.plan.method for p in type(curve).from_json(tmp_path / "d.json")] == [method]*2
        assert compress_to_size(net, x[:1], 60, method).plan.method == method
    stages = RecoveryResult("pruning", .9, [], None, targets=stage_targets(net, [20, 40], "pruning", {"0": 30, "2": 50}))
    stages.to_json(tmp_path / "r.json")
    assert {t.method for t in stages.targets} == {t.method for t in RecoveryResult.from_json(tmp_path / "r.json").targets} == {"pruning"}


def test_torchao_takes_bits_only(net):
    pytest.importorskip("torchao")
    with pytest.raises(ValueError, match="for low_rank, and this is quantization"):
        to_torchao_config(LayerTargets({"0": 4}, "bits", "low_rank"), net)


def test_bounds_and_locks_of_another_method(net):
    sweep = analyzer(net).sweep("sparsity", [25, 50, 75], verbose=False)
    with pytest.raises(ValueError, match="this is sparsity"):
        allocate(sweep, "80%", model=net, sample=x[:1], bounds=LayerTargets({"0": 25}, method="pruning"))
    bits = analyzer(net).sweep("quantization", [8, 4, 2], verbose=False)
    with pytest.raises(ValueError, match="for low_rank, and this is quantization"):
        bits.to_bit_plan(net, 4, locked=LayerTargets({"0": 4}, "bits", "low_rank"))
    with pytest.raises(ValueError, match="this is sparsity"):
        uniform(net, 50, locked=LayerTargets({"0": 25}, method="pruning"))
