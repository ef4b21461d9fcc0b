"""A budget is met and no step too many, the caller's model stays, curves and verdicts are right when worked out another way."""
import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastcore.test import test_close as close
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from toys import Net, all_pairs

from fasterai_sens import (
    LayerSensitivity,
    LayerTargets,
    Pruner,
    SensitivityAnalyzer,
    SensitivityResult,
    Sparsifier,
    SweepResult,
    analyze_degradation,
    changes,
    compress_to_size,
    compress_with_layer_sensitivity,
    count_flops_params,
    fingerprint,
    identify_critical_layers,
    n_bytes,
    quantize_model,
    recommend_compression_target,
    squared_final,
    validate_compression_target,
    wanda,
)
from fasterai_sens.core.layers import find_units
from fasterai_sens.measure.scores import Score, compare
from fasterai_sens.plans.degradation import DegradationResult, size_point
from fasterai_sens.plans.sizes import check_size, find_steps, pct_up, planner, stepped
from fasterai_sens.plans.verdicts import allowed_points

g = torch.Generator().manual_seed(0)
x = torch.randn(64, 3, 6, 6, generator=g)


def small_net(seed=0):
    """Convolutions with batch norm, and a linear layer"""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)).eval()


def tied_net():
    """Two linear layers of one weight, which cannot lose channels, behind one that can"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 5)).eval()
    net[7].weight = net[5].weight
    return net


def residual_net():
    """A sum that couples two layers, a depthwise and a grouped convolution"""
    torch.manual_seed(0)
    return Net(lambda m, t: m.fc((m.b(m.d(m.a(t)).relu()) + m.a(t)).mean((2, 3))), a=nn.Conv2d(3, 8, 1), d=nn.Conv2d(8, 8, 3, padding=1, groups=8), b=nn.Conv2d(8, 8, 1, groups=2), fc=nn.Linear(8, 5)).eval()


def attention_net():
    """Self-attention over the pixels"""
    torch.manual_seed(0)
    return Net(lambda m, t: m.fc(m.att(*[m.a(t).flatten(2).mT]*3)[0].mean(1)), a=nn.Conv2d(3, 8, 1), att=nn.MultiheadAttention(8, 2, batch_first=True), fc=nn.Linear(8, 5)).eval()


def transposed_net():
    """A transposed convolution, whose weight has its inputs first, and one in groups, which cannot lose channels"""
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(800, 5)).eval()


far = {("attention", "flops", "sparsity"): (100, 95), ("transposed", "flops", "pruning"): (100, 80)}   # what cannot be compressed is most of these
zoo = {"plain": small_net, "transposed": transposed_net, "tied": tied_net, "residual": residual_net, "attention": attention_net}


def loss_of(net):
    """How far the outputs are from those of `net`, image by image"""
    with torch.no_grad(): right = net(x).softmax(1)

    def loss(m):
        with torch.no_grad(): return F.cross_entropy(m(x), right, reduction="none")

    return loss


def counted(model, cost):
    """The size of a model, counted from its tensors"""
    units = find_units(model)[0]
    zeros = {u: int((u.weight == 0).sum()) for u in units}
    if cost == "params": return sum(p.numel() for p in model.parameters()) - sum(zeros.values())
    packed = {u: min(4*u.weight.numel(), math.ceil(u.weight.numel()/8) + 4*(u.weight.numel() - zeros[u])) for u in units}
    return n_bytes(model) - sum(4*u.weight.numel() - packed[u] for u in units)


@pytest.mark.parametrize("name,cost,compression", all_pairs(list(zoo), ["bytes", "params", "flops"], ["pruning", "sparsity"]))
def test_budget_is_met_and_the_model_stays(name, cost, compression):
    """Every budget is met by the counted model, which `Pruner` or `Sparsifier` makes of the same plan, in few tries."""
    net = zoo[name]()
    before = fingerprint(net)
    for pct in far.get((name, cost, compression), (100, 90, 55, 40)):
        small = compress_to_size(net, x[:1], pct, compression, cost=cost)
        assert changes(before, fingerprint(net)) == [] and small.model is not net
        assert small.size <= pct/100*small.dense_size and small.tries <= 24
        real = {"flops": lambda m: count_flops_params(m, x[:1], verbose=False)[0], "bytes": n_bytes, "params": lambda m: sum(p.numel() for p in m.parameters())}[cost]
        if compression == "pruning": assert real(small.model) == small.size
        elif cost != "flops": assert counted(small.model, cost) == small.size
        again = copy.deepcopy(net)
        if small.plan and compression == "pruning": Pruner(again, small.plan, example_inputs=x[:1]).prune_model()
        elif small.plan: Sparsifier(again).sparsify_model(small.plan)
        with torch.no_grad(): close(again(x), small.model(x), 1e-6)
        assert (pct == 100) == (not small.plan)


@pytest.mark.parametrize("compression", stepped())
@given(share=st.floats(.3, .99))
@settings(max_examples=15, deadline=None)
def test_no_step_too_many(compression, share):
    """Without the last step that one of the layers made, or with one step less of each that is ahead, the model is too large."""
    net = small_net()
    steps = find_steps(net, x[:1], compression)
    budget = share*steps.size({}, "bytes")
    plan, _ = planner(steps, "bytes")(budget)
    counts = steps.counts(steps.levels(plan))
    assert steps.size(plan, "bytes") <= budget
    one_less = [counts - e for e in np.eye(len(counts), dtype=int) if (counts - e).min() >= 0]
    assert max(steps.size(steps.plan(n), "bytes") for n in one_less) > budget


def test_tries_are_those_of_bisection():
    """1,720 single channels take at most 12 looks at a size, 7 million weights 25."""
    torch.manual_seed(0)
    net = nn.Sequential(*[m for i in range(5) for m in (nn.Linear(8 if i == 0 else 344, 344), nn.ReLU())], nn.Linear(344, 2)).eval()
    for pct in (90, 50, 20): assert 8 <= compress_to_size(net, torch.ones(1, 8), pct).tries <= math.ceil(math.log2(5*344)) + 2
    assert compress_to_size(net, torch.ones(1, 8), 33, "sparsity").tries <= 25


def test_alike_is_alike():
    """Without a plan all layers go equally far: shares differ by less than one step."""
    net = small_net()
    sparse = compress_to_size(net, x[:1], 50, "sparsity").plan
    assert max(sparse.values()) - min(sparse.values()) < 100/216 + 1e-9
    pruned = find_steps(net, x[:1], "pruning")
    for share in (.3, .5, .8):
        plan, _ = planner(pruned, "flops")(share*pruned.size({}, "flops"))
        assert abs(plan["0"] - plan["3"]) <= 100/8
    bits = planner(find_steps(net, x[:1], "quantization"), "bytes")(.3*n_bytes(net))[0]
    assert set(bits) == {"0", "3", "6"} and max(bits.values()) - min(bits.values()) <= 1


def test_a_plan_is_scaled():
    """The order of the layers stays, layers that are not named stay as they are, and the plan's own size gives the plan."""
    net = small_net()
    plan = LayerTargets({"0": 25, "3": 50})
    own = find_steps(net, x[:1], "sparsity").size(plan, "params")
    again = compress_to_size(net, x[:1], own, "sparsity", cost="params", absolute=True, plan=plan)
    assert again.plan == plan
    for size in ("95 %", "60 %"):
        got = compress_to_size(net, x[:1], size, "sparsity", cost="params", plan=plan).plan
        assert set(got) == {"0", "3"} and got["3"] > got["0"]
    mild = compress_to_size(net, x[:1], 42, "sparsity", cost="params", plan={"0": 20, "3": 100})
    assert 0 < mild.plan["0"] < 20 < mild.plan["3"] < 100, "a layer that goes altogether does not go before all others"
    bits = planner(find_steps(net, x[:1], "quantization"), "bytes", {"0": 8, "3": 4})
    assert bits(1700)[0]["0"] > bits(1700)[0]["3"]


def test_measured_plans():
    """Each size has targets of its own from the sweep, better than uniform ones; the sensitivities of bits are solved exactly."""
    net = small_net()
    with torch.no_grad(): net[3].weight[:, :6] *= 1e-3   # half of this layer is next to nothing
    loss = loss_of(net)
    analyzer = SensitivityAnalyzer(net, x[:1], lambda m: (loss(m), loss(m)), higher_is_better=False, metric_name="loss")
    for compression, level in (("sparsity", 60), ("pruning", 60)):
        sweep = analyzer.sweep(compression, [25, 50, 75, 90], verbose=False)
        by = {plan: compress_to_size(net, x[:1], level, compression, cost="params", plan=sweep if plan else None) for plan in (True, False)}
        assert loss(by[True].model).mean() < loss(by[False].model).mean() and by[True].size <= .6*by[True].dense_size
        mean = by[True].plan.mean(net) if len(by[True].plan) == len(sweep.names) else None
        if mean and compression == "sparsity":   # between single weights, the plan is that of `to_layer_targets`
            wanted = sweep.to_layer_targets(net, mean)
            assert all(abs(by[True].plan[n] - wanted[n]) < .5 for n in wanted)
    bits = analyzer.sweep("quantization", [8, 6, 4, 3, 2], verbose=False)
    got = compress_to_size(net, x[:1], 1500, "quantization", absolute=True, plan=bits)
    assert got.plan == bits.to_bit_plan(net, target_bytes=1500) and got.size == got.plan.size_bytes <= 1500
    with quantize_model(net, got.plan), torch.no_grad(): out = net(x)
    with torch.no_grad(): close(got.model(x), out, 1e-6)


def test_out_of_reach_says_what_is_possible():
    """The limit that an error names can be reached, and nothing below it."""
    net = small_net()
    for compression in stepped():
        with pytest.raises(ValueError) as e: compress_to_size(net, x[:1], 1, compression)
        limit = int(e.value.args[0].split("down to ")[1].split(" ")[0].replace(",", ""))
        assert compress_to_size(net, x[:1], limit, compression, absolute=True).size == limit
        pct = e.value.args[0].rsplit("(", 1)[1].split(" %")[0]
        assert compress_to_size(net, x[:1], float(pct), compression).size == compress_to_size(net, x[:1], f"{pct} %", compression).size == limit
        with pytest.raises(ValueError): compress_to_size(net, x[:1], limit - 1, compression, absolute=True)
    with pytest.raises(ValueError): compress_to_size(net, x[:1], 5000)
    with pytest.raises(ValueError, match="can lose channels"): compress_to_size(nn.Sequential(nn.Linear(3, 2)), torch.ones(1, 3), 50)
    with pytest.raises(ValueError, match="multiply-accumulates .1e-05 %. is out of reach"): compress_to_size(net, x[:1], ".00001 %", cost="flops")
    assert "multiply-accumulates" in repr(compress_to_size(net, x[:1], 50, cost="flops"))
    flops = analyze_degradation(net, x[:1], lambda m: .5, [100], cost="flops", runs=0, verbose=False)
    assert all("multiply-accumulates" in text for text in (repr(flops), flops._repr_html_(), flops.plot().get_xlabel())) and flops.cost == "flops"


def test_percent_named_in_an_error_is_enough():
    """Rounded up, whatever the sizes: a budget of that percentage holds what is possible."""
    for dense in (97, 5516, 10000, 44_730_512):
        for least in {1, dense//2000 + 1, dense//20, dense//20 + 1, dense//3, dense - 1, dense}:
            assert least <= check_size(f"{pct_up(least, dense)} %", dense) <= max(least*1.011, least + 1e-6)
    assert pct_up(0, 97) == "0"


def test_blocks_criteria_and_layers():
    """Whole filters, a criterion that looks at data, and some of the layers: as `Sparsifier` does it, and counted from the tensors."""
    net = small_net()
    small = compress_to_size(net, x[:1], 60, "sparsity", cost="params", granularity="filter", criteria=wanda, calibration_data=x, layers=["0", "3"])
    again = copy.deepcopy(net)
    Sparsifier(again, granularity="filter", criteria=wanda, calibration_data=x).sparsify_model(small.plan)
    assert torch.equal(again[3].weight, small.model[3].weight) and torch.equal(again[6].weight, net[6].weight)
    assert counted(small.model, "params") == small.size <= .6*small.dense_size and set(small.plan) <= {"0", "3"}
    assert all((f == 0).all() or (f != 0).all() for f in small.model[3].weight)
    with pytest.raises(KeyError, match="unknown layer 'block'"): compress_to_size(net, x[:1], 60, layers=["block"])
    with pytest.raises(TypeError): compress_to_size(net, x[:1], 60, granularity="row")
    fixed = compress_to_size(net, x[:1], 60, recalibrate=x)
    assert not torch.equal(fixed.model[1].running_mean, compress_to_size(net, x[:1], 60).model[1].running_mean)


def test_already_sparse_weights_are_not_counted_twice():
    """A model that is half zeros has a size of its own, and zeros go first."""
    net = small_net()
    Sparsifier(net).sparsify_model(50)
    small = compress_to_size(net, x[:1], 80, "sparsity", cost="params")
    assert small.dense_size == counted(net, "params") and small.size == counted(small.model, "params") == math.floor(.8*small.dense_size)


def test_dense_size_is_that_of_the_model():
    """Zeros that were there count as zeros, whichever layers may be compressed."""
    net = small_net()
    Sparsifier(net).sparsify_model(50)
    for cost in ("params", "bytes"):
        some, every = (compress_to_size(net, x[:1], 90, "sparsity", cost=cost, layers=layers) for layers in (["3"], None))
        assert some.dense_size == every.dense_size == counted(net, cost) and some.size == counted(some.model, cost) <= .9*some.dense_size


def made_up_result(deltas, level=50, compression="sparsity"):
    """A result with these damages for the layers of `small_net`"""
    params = {u.name: u.params for u in find_units(small_net())[0]}
    return SensitivityResult(compression, level, .9, [LayerSensitivity(n, "", params[n], .9, .9 - d, d) for n, d in deltas.items()])


@given(deltas=st.lists(st.floats(0, 1), min_size=3, max_size=3, unique=True), target=st.floats(5, 85))
@settings(max_examples=30, deadline=None)
def test_more_sensitive_is_less_compressed(deltas, target):
    """The sign: whatever the damages, a layer that is more sensitive never gets more compression, and the mean is met."""
    result = made_up_result(dict(zip("036", deltas, strict=True)))
    small = compress_with_layer_sensitivity(small_net(), x[:1], result, target)
    given_pct = [small.plan[n] for n in identify_critical_layers(result)]
    assert all(a <= b + 1e-9 for a, b in zip(given_pct, given_pct[1:], strict=False)) and given_pct[0] < given_pct[-1]
    assert abs(small.plan.mean(small_net()) - target) < 1e-6
    zeros = [float((small.model[int(n)].weight == 0).float().mean()) for n in identify_critical_layers(result)]
    assert zeros[0] < zeros[-1]


@pytest.mark.parametrize("compression", ["sparsity", "pruning", "quantization"])
def test_measured_plan_for_some_layers(compression):
    """What was measured of the other layers is left out, and they stay as they are."""
    net = small_net()
    sweep = SensitivityAnalyzer(net, x[:1], loss_of(net), higher_is_better=False).sweep(compression, [8, 4] if compression == "quantization" else [30, 60], verbose=False)
    small = compress_to_size(net, x[:1], 80, compression, plan=sweep, layers=["3"])
    assert set(small.plan) == {"3"} and small.size <= .8*small.dense_size and torch.equal(small.model[0].weight, net[0].weight)
    early = SweepResult([sweep[0], SensitivityResult(compression, sweep[1].compression_level, sweep[1].baseline_metric, [r for r in sweep[1].layers if r.name != "3"])])
    if compression != "quantization": assert set(compress_to_size(net, x[:1], 95, compression, plan=early, layers=["3"]).plan) == {"3"}


def test_measured_with_other_settings():
    """A plan is carried out with the criterion and the blocks it was measured with, or not at all."""
    net = small_net()
    analyzer = SensitivityAnalyzer(net, x[:1], loss_of(net), higher_is_better=False, criteria=squared_final)
    one, filters, pruned = (analyzer.analyze("sparsity", 50, verbose=False), analyzer.analyze("sparsity", 50, granularity="filter", verbose=False), analyzer.analyze("pruning", 50, verbose=False))
    for f in (lambda: compress_with_layer_sensitivity(net, x[:1], one), lambda: compress_to_size(net, x[:1], 70, "sparsity", plan=one), lambda: compress_to_size(net, x[:1], 70, plan=pruned),
              lambda: analyze_degradation(net, x[:1], loss_of(net), [70], "sparsity", plan=SweepResult([one]), verbose=False)):
        with pytest.raises(ValueError, match="measured with criteria=squared_final, and criteria is large_final here"): f()
    with pytest.raises(ValueError, match="granularity=filter, and granularity is weight here"): compress_to_size(net, x[:1], 70, "sparsity", plan=filters, criteria=squared_final)
    assert compress_to_size(net, x[:1], 70, "sparsity", plan=filters, criteria=squared_final, granularity="filter").size_pct <= 70
    assert compress_with_layer_sensitivity(net, x[:1], pruned, 30, criteria=squared_final).plan


def test_more_sensitive_loses_fewer_channels():
    """The same for pruning, on a copy."""
    net = small_net()
    before = fingerprint(net)
    for fragile, robust in ("03", "30"):
        small = compress_with_layer_sensitivity(net, x[:1], made_up_result({fragile: .5, robust: .01}, compression="pruning"), 40)
        left = {n: small.model[int(n)].out_channels/net[int(n)].out_channels for n in "03"}
        assert left[fragile] > left[robust]
    assert changes(before, fingerprint(net)) == []


def test_curve_is_what_measuring_by_hand_gives():
    """Sizes, metric, drop, interval, ratio and efficiency of each point, from a copy that was compressed to it."""
    net = small_net()
    loss, before = loss_of(net), fingerprint(net)
    for compression, cost in (("pruning", "flops"), ("sparsity", "params"), ("quantization", "bytes")):
        sizes = [40, "100 %", 70]
        curve = analyze_degradation(net, x[:1], loss, sizes, compression, cost=cost, higher_is_better=False, metric_name="loss", runs=2, verbose=False)
        assert changes(before, fingerprint(net)) == []
        close([p.target_size for p in curve], [curve.dense_size*f for f in (1, .7, .4)], 1e-9)
        for p in curve:
            small = compress_to_size(net, x[:1], p.target_size, compression, cost=cost, absolute=True)
            worse = (loss(small.model) - loss(net)).double().numpy()
            assert small.size == p.size and small.plan == p.plan and p.latency_ms > 0
            close(p.metric, loss(small.model).mean().item(), 1e-5)
            close(p.drop, worse.mean(), 1e-5)
            close(p.stderr, worse.std(ddof=1)/8, 1e-5)
            close(p.ratio, curve.dense_size/p.size, 1e-9)
            assert p.efficiency is None if p.size == curve.dense_size else abs(p.efficiency - p.drop/(1 - p.size/curve.dense_size)) < 1e-9
        assert (curve[0].drop, curve[0].size_pct, curve[0].ci) == (0, 100, (0, 0)) and curve[2].drop > (0 if compression != "quantization" else -1e-6)


def test_one_evaluation_a_size_and_nothing_left_behind():
    """The baseline is evaluated once, full size not again; a metric that raises, writes or breaks leaves the model as it was."""
    net, calls = small_net(), []
    before = fingerprint(net)

    def metric(m):
        calls.append(m)
        if len(calls) == 3: raise RuntimeError("halfway")
        return .5

    with pytest.raises(RuntimeError): analyze_degradation(net, x[:1], metric, [100, 70, 50, 40], verbose=False)
    assert len(calls) == 3 and changes(before, fingerprint(net)) == []
    analyze_degradation(net, x[:1], metric, [100, 70, 50], verbose=False, runs=0)
    assert len(calls) == 6
    with pytest.raises(ValueError): analyze_degradation(net, x[:1], metric, [70, 1], verbose=False)
    assert len(calls) == 6, "what cannot be reached is said before anything is measured"

    def writes(m):
        with torch.no_grad(): return m[0].weight.zero_().mean()

    with pytest.raises(ValueError): analyze_degradation(net, x[:1], writes, [50], verbose=False)
    with pytest.raises(ValueError): validate_compression_target(net, net, writes, .1)
    assert changes(before, fingerprint(net)) == []


def test_nothing_left():
    """All weights gone is a size, too: infinitely smaller."""
    net = nn.Sequential(nn.Linear(4, 2, bias=False)).eval()
    assert compress_to_size(net, torch.ones(1, 4), 10, "sparsity", cost="params").ratio == math.inf
    curve = analyze_degradation(net, torch.ones(1, 4), lambda m: float(m[0].weight.abs().sum()), [10, 50], "sparsity", cost="params", verbose=False, runs=0)
    assert [(p.size, p.ratio, p.size_pct) for p in curve] == [(4, 2, 50), (0, math.inf, 0)] and curve[1].drop == curve[1].efficiency == pytest.approx(curve.baseline_metric)


def test_metrics_that_break_and_pairs():
    """NaN is recorded, never within, and survives JSON; an objective is kept; a baseline of 0 is fine."""
    net = small_net()
    full = n_bytes(net)

    def metric(m): return (float("nan") if n_bytes(m) < .5*full else 0., n_bytes(m)/full)

    curve = analyze_degradation(net, x[:1], metric, [100, 80, 30], verbose=False, runs=0)
    assert [math.isnan(p.metric) for p in curve] == [False, False, True] and curve.smallest_within(.9) is curve[1]
    assert curve[2].objective == curve[2].size/full and curve.to_dataframe().objective.tolist() == [p.objective for p in curve]
    assert "nan" in curve._repr_html_() and curve.plot().get_xlabel()
    with pytest.raises(ValueError, match="must return a pair"): analyze_degradation(net, x[:1], lambda m: (1., 1.) if n_bytes(m) == full else 1., [50], verbose=False)


def test_json_of_every_method(tmp_path):
    """What was saved comes back equal, bit plans with what they carry."""
    net = small_net()
    bits = SensitivityAnalyzer(net, x[:1], loss_of(net), higher_is_better=False).sweep("quantization", [8, 4], verbose=False)
    for compression, plan in (("pruning", None), ("sparsity", {"0": 30}), ("quantization", bits)):
        curve = analyze_degradation(net, x[:1], loss_of(net), [100, 90] if plan == {"0": 30} else [100, 60], compression, plan=plan, higher_is_better=False, verbose=False)
        curve.to_json(tmp_path/"curve.json")
        back = DegradationResult.from_json(tmp_path/"curve.json")
        assert back == curve and [vars(p.plan) for p in back] == [vars(p.plan) for p in curve] and [type(p.plan) for p in back] == [type(p.plan) for p in curve]
    with pytest.raises(ValueError, match="holds DegradationResult"): SensitivityResult.from_json(tmp_path/"curve.json")


def curve_of(drops, up=True, base=.9):
    """A made-up curve at 100, 80, ... percent"""
    points = [size_point(s, s, 100, Score(base), Score(base - d if up else base + d), up) for s, d in zip((100, 80, 60, 40, 20), drops, strict=True)]
    return DegradationResult("pruning", "bytes", 100, base, points, higher_is_better=up)


@pytest.mark.parametrize("up", [True, False])
def test_recommendations(up):
    """Every task names its smallest size in both directions, with the metric to expect there."""
    drops = [0, .008, .03, .08, .14]
    curve = curve_of(drops, up, base=.9 if up else .1)
    scale = None if up else 1
    taken = {task: recommend_compression_target(task, curve=curve, full_scale=scale).point.size_pct for task in allowed_points}
    assert taken == dict(safety_critical=80, medical_diagnosis=80, standard_classification=60, ranking_recommendation=40, generative_creative=20)
    t = recommend_compression_target("standard_classification", curve=curve, full_scale=scale)
    close([t.worst_metric, t.expected_metric], [.85, .87] if up else [.15, .13], 1e-9)
    assert t.expected_ci is None and recommend_compression_target(max_drop_pct=50, curve=curve).allowed_drop == pytest.approx(.45 if up else .05)
    assert curve.knee.size_pct == 60
    other = recommend_compression_target("standard_classification", .5, curve, full_scale=scale)   # measured on other data
    close(other.expected_metric, .47 if up else .53, 1e-9)
    better = recommend_compression_target("safety_critical", curve=curve_of([0, -.02, .5, .5, .5], up, base=.9 if up else .1), full_scale=scale)   # a gain is noise
    assert better.point.size_pct == 80 and better.expected_metric == (.9 if up else .1)
    with pytest.raises(ValueError, match="leave it out"): recommend_compression_target(max_drop=.1, curve=curve, higher_is_better=not up)
    with pytest.raises(ValueError, match="baseline is the metric"): recommend_compression_target("safety_critical", float("nan"))


def test_a_loss_has_no_scale():
    """Points of a metric where lower is better are not guessed, and not drawn; what a full scale is must make sense."""
    net, curve = nn.Linear(1, 1), curve_of([0, .1, .2, .3, .4], False, base=1.5)
    for loss in (1.5, .8):
        with pytest.raises(ValueError): recommend_compression_target("standard_classification", loss, higher_is_better=False)
        with pytest.raises(ValueError): validate_compression_target(net, loss, lambda m: .8, "safety_critical", higher_is_better=False)
    with pytest.raises(ValueError, match="does not tell"): recommend_compression_target("safety_critical", curve=curve)
    assert recommend_compression_target("safety_critical", curve=curve, full_scale=10).allowed_drop == pytest.approx(.1)
    assert not curve.plot().texts and len(curve_of([0, .1, .2, .3, .4]).plot().texts) == len(allowed_points)
    for scale in (0, "x", True, math.inf, math.nan):
        with pytest.raises(ValueError): recommend_compression_target("safety_critical", .9, full_scale=scale)


def test_advice_when_only_the_whole_model_will_do():
    """That nothing smaller is within the drop is said, and not that all is well."""
    got = recommend_compression_target("safety_critical", curve=curve_of([0, .1, .2, .3, .4]))
    assert got.point.size_pct == 100 and got.advice.startswith("nothing smaller that was measured is within it")
    assert recommend_compression_target("ranking_recommendation", curve=curve_of([0, .1, .2, .3, .4])).advice == ""


def test_just_what_is_allowed():
    """.9 - .85 is more than .05 in floating point, and within it."""
    assert .9 - .85 > .05
    assert validate_compression_target(nn.Linear(1, 1), .9, lambda m: .85, .05).verdict == "passes"
    assert not validate_compression_target(nn.Linear(1, 1), .9, lambda m: .85 - 1e-6, .05)
    assert curve_of([0, .01, .05, .2, .3]).smallest_within(.05).size_pct == 60
    assert recommend_compression_target("standard_classification", curve=curve_of([0, .01, .05, .2, .3])).point.size_pct == 60


def test_points_for_a_metric_up_to_1():
    """Two points given as 2 would let everything pass; a loss may rise by that."""
    net, curve = nn.Linear(1, 1), curve_of([0, .1, .2, .3, .4])
    up = (lambda: validate_compression_target(net, .9, lambda m: .1, 5), lambda: recommend_compression_target(max_drop=1, baseline=.9), lambda: curve.smallest_within(2), lambda: curve.plot(5),
          lambda: validate_compression_target(net, .1, lambda m: .9, 5, higher_is_better=False, metric_name="error_rate"))
    for f in up:
        with pytest.raises(ValueError): f()
    assert validate_compression_target(net, .9, lambda m: 3., 5, higher_is_better=False, metric_name="loss") and validate_compression_target(net, 90., lambda m: 88., 5)
    assert recommend_compression_target("standard_classification", curve=curve_of([0, .1, .2, .3, .4]), full_scale=100).point.size_pct == 20   # an accuracy below 1 %, whoever wants that


def test_intervals_of_right_and_wrong_cover():
    """Over many draws, 95 % intervals hold the true drop at least about that often, also where few answers change."""
    rng = np.random.default_rng(0)
    for lost, gained, n in ((.02, 0., 100), (.05, .02, 200), (.01, .01, 300)):
        held = 0
        for _ in range(500):
            fate = rng.choice([-1, 1, 0], n, p=[lost, gained, 1 - lost - gained])
            base, other = np.where(fate == 1, 0., 1.), np.where(fate == -1, 0., 1.)
            low, high = compare(Score(base.mean(), base), Score(other.mean(), other))[2]
            held += low <= lost - gained <= high
        assert held/500 > .935
    low, high = compare(Score(.5, np.linspace(0, 1, 50)), Score(.4, np.linspace(0, .8, 50)))[2]
    assert low < .1 < high


def test_verdicts_need_data():
    """The same share of changed answers: 20 samples do not tell, the number asked for does."""
    def answers(n, wrong): return torch.tensor([0.]*wrong + [1.]*(n - wrong))
    net = nn.Linear(1, 1)
    few = validate_compression_target(net, answers(50, 0), lambda m: answers(50, 1), .05)
    assert few.verdict == "not enough data to tell" and not few and few.more_samples > 0 and "more samples" in few.advice[0]
    n = 50 + few.more_samples
    assert validate_compression_target(net, answers(n, 0), lambda m: answers(n, round(n/50)), .05)
    failed = validate_compression_target(net, answers(200, 0), lambda m: answers(200, 60), "standard_classification", sensitivities=made_up_result({"0": .1, "3": .4}))
    assert failed.verdict == "fails" and "compress 3, 0 less" in failed.advice[0]
    assert validate_compression_target(net, answers(50, 0), lambda m: float("nan")*answers(50, 0), .05).verdict == "fails"
    with pytest.raises(ValueError): validate_compression_target(net, float("nan"), lambda m: .5, .05)
    lower = validate_compression_target(net, .2, lambda m: .3, target := recommend_compression_target(max_drop=.05, baseline=.2, higher_is_better=False))
    assert lower.verdict == "fails" and lower.drop == pytest.approx(.1)
    with pytest.raises(ValueError, match="is False for the target"): validate_compression_target(net, .2, lambda m: .3, target, higher_is_better=True)


def test_one_sample_is_no_proof():
    """Right or wrong, or any other score: a single one passes no standard, and no number is made up for it."""
    net = nn.Linear(1, 1)
    right = validate_compression_target(net, torch.ones(1), lambda m: torch.ones(1), "safety_critical")
    assert right.verdict == "not enough data to tell" and right.ci[1] > .7 and right.more_samples > 100
    for score in (.5, .1, .9):
        other = validate_compression_target(net, torch.tensor([.5]), lambda m, s=score: torch.tensor([s]), .01)
        assert (other.verdict, other.ci, other.more_samples) == ("not enough data to tell", None, None) and "1 sample cannot show" in other.advice[0]
    assert validate_compression_target(net, torch.tensor([.5]), lambda m: torch.tensor([math.nan]), .01).verdict == "fails"
    assert validate_compression_target(net, .9, lambda m: .9, .01)   # one number is not one sample


def test_critical_layers_of_a_sweep():
    """The worst level counts; a layer that could not be compressed is not ranked."""
    mild, harsh = made_up_result({"0": .3, "3": .1}), made_up_result({"3": .2, "6": .25}, 75)
    harsh.layers[1].prunable = False
    assert identify_critical_layers(SweepResult([mild, harsh])) == ["0", "3"]
    assert identify_critical_layers(mild, 1) == ["0"] and identify_critical_layers(mild, min_drop=.5) == []


def test_wrong_kinds():
    """What cannot be meant is refused where it is given, by name."""
    result, curve = made_up_result({"0": .3, "3": .1}), curve_of([0, .1, .2, .3, .4])
    for value in (True, math.nan):
        with pytest.raises(ValueError): identify_critical_layers(result, min_drop=value)
    for allowed in ("standard_classification", -5, {"mine": -5}, True):
        with pytest.raises(ValueError): curve.plot(allowed)


def test_on_real_digits():
    """From a trained network to one that passes on digits that nothing has seen, and one that does not."""
    data = load_digits()
    inputs, labels = torch.tensor(data.images, dtype=torch.float32).flatten(1)/16, torch.tensor(data.target)
    train, valid, test = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0)).split([900, 400, 497])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        opt.zero_grad()
        F.cross_entropy(net(inputs[train]), labels[train]).backward()
        opt.step()

    def correct_on(i):
        def correct(m):
            with torch.no_grad(): return m(inputs[i]).argmax(1) == labels[i]
        return correct

    sweep = SensitivityAnalyzer(net, inputs[:1], correct_on(valid)).sweep("pruning", [20, 40, 60, 80], verbose=False)
    curve = analyze_degradation(net, inputs[:1], correct_on(valid), [100, 80, 60, 40, 20, 15], plan=sweep, verbose=False)
    assert curve.baseline_metric > .93 and curve[-1].drop > .1 and curve[1].drop < .03
    target = recommend_compression_target("standard_classification", curve=curve)
    assert target.point.size_pct <= 80 and target.point.ci[1] <= .05
    small = compress_to_size(net, inputs[:1], target.point.size, plan=sweep, absolute=True)
    assert small.size == target.point.size
    assert validate_compression_target(small, net, correct_on(test), target)
    tiny = validate_compression_target(compress_to_size(net, inputs[:1], 15, plan=sweep), net, correct_on(test), target, sensitivities=sweep)
    assert tiny.verdict == "fails" and not tiny and "compress" in tiny.advice[0]
