"""Searched plans keep their promises: the budget, the bounds, the caller's model, and never worse than a plan they started from."""
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastcore.test import test_close as close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fasterai_sens import SensitivityAnalyzer, Sparsifier, changes, evaluation, fingerprint, lamp, large_final, leave_no_trace, search_targets, uniform, wanda
from fasterai_sens.core.layers import find_units
from fasterai_sens.measure.norms import Recalibrated, reestimate_norms
from fasterai_sens.methods.sparsify import sparsity_mask
from fasterai_sens.plans.baselines import budget
from fasterai_sens.plans.meter import Meter, SearchResult
from fasterai_sens.plans.race import race
from fasterai_sens.plans.search import Masker, ShareTrack, descend, drop_order, path_factor
from fasterai_sens.plans.targets import least_total

g = torch.Generator().manual_seed(0)
x = torch.randn(64, 3, 6, 6, generator=g)


def net_and_eval(seed=0):
    """A small network with batch norm, and how far its outputs are from its own, image by image."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(.5), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    reestimate_norms(net, x)
    net.eval()
    with torch.no_grad(): right = net(x).softmax(1)

    def eval_fn(m):
        with torch.no_grad(): return F.cross_entropy(m(x), right, reduction="none")

    return net, eval_fn


def search(net, eval_fn, pct=70, **kwargs):
    """A short search for the least loss."""
    return search_targets(net, x[:1], eval_fn, pct, **dict(dict(higher_is_better=False, metric_name="loss", evaluations=60, verbose=False), **kwargs))


@pytest.mark.parametrize("pct", [30, 70, 90.5, 99])
def test_budget_is_exact_and_no_plan_is_better(pct):
    """The mean is the target to 1e-6; the returned plan measured best of all, and as `Sparsifier` makes it."""
    net, eval_fn = net_and_eval()
    r = search(net, eval_fn, pct)
    assert abs(r.plan.mean(net) - pct) < 1e-6 and all(abs(p.mean(net) - pct) < 1e-6 for p in r.plans.values())
    assert list(r.plans) == ["uniform", "global_magnitude", "erk", "lamp", "classic", "search"]
    assert r.measured_metric <= min(row["search_metric"] for row in r.ranking) and r.ranking[0]["plan"] == r.plan_name
    assert r.evaluations <= 60
    for row in r.ranking:
        with leave_no_trace(net):
            Sparsifier(net).sparsify_model(r.plans[row["plan"]])
            close(eval_fn(net).mean().item(), row["metric"], 1e-6)
            zeros = sum(int((u.weight == 0).sum()) for u in find_units(net)[0])
        close(row["sparsity"], 100*zeros/sum(u.weight.numel() for u in find_units(net)[0]), 1e-9)


def test_search_gains_something():
    """On this network the race finds a plan that is better than all it started from, and says what adding up would have predicted."""
    net, eval_fn = net_and_eval()
    r = search(net, eval_fn, 80, evaluations=120)
    assert r.plan_name == "search" and r.measured_metric < r.ranking[1]["search_metric"] - 1e-3
    alone = 0
    with torch.no_grad(): base = eval_fn(net).mean().item()
    for name, pct in r.plan.items():
        with leave_no_trace(net):
            Sparsifier(net).sparsify_layer(name, pct)
            alone += max(0, eval_fn(net).mean().item() - base)
    close(r.predicted_metric, base + alone, 1e-5)
    close(r.interaction_gap, r.measured_metric - base - alone, 1e-5)


def test_path_leads_off_a_plateau():
    """Where every baseline looks the same the search still finds a better plan, and a much better one if there are enough evaluations for a path."""
    net, eval_fn = net_and_eval()
    best = min(row["search_metric"] for row in search(net, eval_fn, 80).ranking if row["plan"] != "search")
    capped = lambda m: min(eval_fn(m).mean().item(), best - 1e-3)
    stuck, led = (search(net, capped, 80, evaluations=n) for n in (24, 120))
    assert len({row["search_metric"] for row in stuck.ranking if row["plan"] != "search"}) == 1
    assert led.measured_metric < stuck.measured_metric <= best - 1e-3
    assert led.plan_name == "search" and led.measured_metric < best - .005


@pytest.mark.parametrize("evaluations", [22, 27, 40, 60, 200])
def test_evaluations_are_counted(evaluations):
    """Every call of `eval_fn` is in the number, and there are no more than allowed, with a path and without. What `reuse` writes down and compares is beside that."""
    net, eval_fn = net_and_eval()
    calls = []
    r = search(net, lambda m: calls.append(1) or eval_fn(m), 85, evaluations=evaluations, reuse=False)
    assert len(calls) == r.evaluations <= evaluations


def test_path_keeps_to_bounds():
    """Locked layers and bounds hold at the end of a path too, and where bounds block it the search goes on without."""
    net, eval_fn = net_and_eval()
    for kwargs in (dict(min_pct=40, max_pct=95), dict(locked={"8": 0}), dict(locked={"8": 100}, max_pct=88), dict(min_pct=85, max_pct=85)):
        r = search(net, eval_fn, 85 if "locked" not in kwargs else 70, evaluations=120, **kwargs)
        at, least, most = kwargs.get("locked", {}), kwargs.get("min_pct", 0), kwargs.get("max_pct", 100)
        assert all(pct == at[n] if n in at else least - 1e-9 <= pct <= most + 1e-9 for n, pct in r.plans["search"].items())
        assert abs(r.plans["search"].mean(net) - r.budgets["sparsity"]) < 1e-6


def test_bounds_locked_and_layers():
    """Every plan keeps to what was asked; layers that were not named stay out."""
    net, eval_fn = net_and_eval()
    r = search(net, eval_fn, 60, min_pct=50, max_pct=80, locked={"8": 20})
    for plan in r.plans.values(): assert plan["8"] == 20 and all(50 - 1e-9 <= plan[n] <= 80 + 1e-9 for n in ("0", "4"))
    some = search(net, eval_fn, 60, layers=["0", "4"])
    assert list(some.plan) == ["0", "4"] and abs(some.plan.mean(net) - 60) < 1e-6
    assert list(search(net, eval_fn, 60, layer_types=nn.Conv2d).plan) == ["0", "4"]
    everything = search(net, eval_fn, 60, locked={"0": 60, "4": 60, "8": 60})   # nothing may move
    assert everything.plan == {"0": 60, "4": 60, "8": 60}


def test_model_comes_back_bit_for_bit():
    """Also with recalibration, and when the evaluation raises or is interrupted at any call."""
    net, eval_fn = net_and_eval()
    net.train()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    before = fingerprint(net)
    search(net, eval_fn, recalibrate=x)
    assert changes(before, fingerprint(net)) == []
    for error in (RuntimeError, KeyboardInterrupt):
        for last in (1, 3, 15):
            calls = []

            def failing(m, calls=calls, last=last, error=error):
                calls.append(m.train())
                torch.rand(1)
                if len(calls) == last: raise error("halfway")
                return eval_fn(m.eval())

            with pytest.raises(error): search(net, failing, recalibrate=[x[:32], x[32:]])
            assert len(calls) == last and changes(before, fingerprint(net)) == []

    def careless(m):
        nn.init.zeros_(m[0].weight)
        return 1.

    with pytest.raises(ValueError, match="must only evaluate"): search(net, careless)
    assert changes(before, fingerprint(net)) == []


def test_recalibration_is_what_it_says():
    """Means over batches of batch statistics, by hand; undone; and inside the search the same as on the plan that comes out."""
    net, eval_fn = net_and_eval()
    before = fingerprint(net)
    parts = [x[:20] + 1, x[20:]]
    with Recalibrated(parts)(net):
        h = [net[0](p).detach() for p in parts]
        close(net[1].running_mean, sum(t.mean((0, 2, 3)) for t in h)/2, 1e-5)
        close(net[1].running_var, sum(t.transpose(0, 1).flatten(1).var(1) for t in h)/2, 1e-5)
        inner = [F.relu(F.batch_norm(t, None, None, net[1].weight, net[1].bias, training=True)) for t in h]
        close(net[5].running_mean, sum(net[4](t).mean((0, 2, 3)) for t in inner).detach()/2, 1e-5)
        assert not net[1].training and net[1].momentum == .1
    assert changes(before, fingerprint(net)) == []
    labels = torch.zeros(64, dtype=torch.long)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=32)
    for data in (parts, loader):
        r = search(net, eval_fn, 80, recalibrate=data)
        with leave_no_trace(net):
            Sparsifier(net).sparsify_model(r.plan)
            reestimate_norms(net, data)
            close(eval_fn(net).mean().item(), r.measured_metric, 1e-6)
    assert r.settings["recalibrated"] and changes(before, fingerprint(net)) == []


def test_same_call_same_result(tmp_path):
    """Deterministic, whatever the random state; JSON gives back an equal result."""
    net, eval_fn = net_and_eval()
    one = search(net, eval_fn)
    torch.rand(5)
    two = search(net, eval_fn)
    assert one == two
    one.to_json(tmp_path/"r.json")
    back = SearchResult.from_json(tmp_path/"r.json")
    assert back == one and type(back.plan) is type(one.plan) and back.interaction_gap == one.interaction_gap


def test_report_on_other_data_decides(capsys):
    """The ranking is that of `report_fn`, in its own direction, and a baseline that is better there is returned."""
    net, eval_fn = net_and_eval()
    units = find_units(net)[0]
    goal = [uniform(net, 70)[u.name] for u in units]

    def like_uniform(m):
        return -sum(abs(100*(u.weight == 0).float().mean().item() - p) for u, p in zip(units, goal, strict=True))

    r = search(net, eval_fn, report_fn=like_uniform, report_higher_is_better=True)
    assert r.plan_name == "uniform" and r.plan == uniform(net, 70) == r.plans["uniform"] and r.reported_on == "report_fn"
    assert [row["metric"] for row in r.ranking] == sorted((row["metric"] for row in r.ranking), reverse=True)
    assert r.measured_metric == r.ranking[0]["search_metric"]
    r.summary()
    assert "returned: uniform (it measured better" in capsys.readouterr().out
    mine = search(net, eval_fn, report_fn=None, plans={"mine": lamp(net, 70)})
    assert mine.reported_on == "eval_fn" and "mine" in mine.plans


@pytest.mark.parametrize("granularity", ["weight", "filter", "kernel"])
def test_masks_are_those_of_the_sparsifier(granularity):
    """Ties, zeros, transposed and grouped convolutions: weight for weight."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.Linear(5, 7))
    net[0].weight.data[1:3] = .5
    net[2].weight.data[2] = 0
    units = find_units(net)[0]
    for pct in (0, 10, 49.9, 77, 100):
        expected = [u.weight.detach()*sparsity_mask(u, pct, granularity) for u in units]
        with leave_no_trace(net):
            m = Masker(units, granularity, large_final)
            m.set([55]*3)
            m.set([pct]*3)
            assert all(torch.equal(u.weight, e) for u, e in zip(units, expected, strict=True))
    assert drop_order(units[2], "weight", large_final)[2].max() == 4      # zeros go first


def test_tied_weights_and_a_plain_number():
    """A weight that two layers share is one unit; an evaluation may return one number."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    data = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): right = net(data)
    r = search_targets(net, data[:1], lambda m: -F.mse_loss(m(data), right).item(), 50, evaluations=40, verbose=False, metric_name="fit")
    assert abs(r.plan.mean(net) - 50) < 1e-6 and list(r.plan) == ["0", "3"] and r.ranking[0]["stderr"] is None
    assert "fit" in repr(r)


def test_a_metric_that_breaks_is_avoided():
    """Plans with a metric that is no number rank last and are never returned."""
    net, eval_fn = net_and_eval()
    fine = lambda m: eval_fn(m).mean().item() if (m[8].weight == 0).float().mean() < .6 else float("nan")
    r = search(net, fine, 70)
    assert r.plan["8"] < 60.5 and np.isfinite(r.measured_metric)
    broken = [row["plan"] for row in r.ranking if np.isnan(row["metric"])]
    assert "uniform" in broken and broken == [row["plan"] for row in r.ranking[-len(broken):]] and len(broken) < len(r.ranking)
    with pytest.raises(ValueError, match="no plan to start from has a metric"): search(net, lambda m: float("nan") if any((m[i].weight == 0).any() for i in (0, 4, 8)) else 1.)
    with pytest.raises(ValueError): search(net, lambda m: float("nan"))


@pytest.mark.parametrize("kwargs, error, message", [
    (dict(pct=10, min_pct=20), ValueError, "out of reach"),
    (dict(pct=True), ValueError, "target_pct is"),
    (dict(locked={"8": 0, "4": 0, "0": 0}), ValueError, "are locked"),
    (dict(layers=["7"]), KeyError, "Flatten"),
    (dict(granularity="layer"), ValueError, "leaves no choice"),
    (dict(granularity="blocks"), ValueError, "blocks"),
    (dict(criteria=wanda), ValueError, "wanda needs"),
    (dict(evaluations=10), ValueError, "evaluations is at least 22 for 3 layers and 5 plans"),
    (dict(evaluations=60.5), ValueError, "evaluations is a whole number"),
    (dict(recalibrate=5), TypeError, "recalibrate is a tensor, a list of batches or a DataLoader"),
    (dict(recalibrate=[]), ValueError, "recalibrate is empty"),
    (dict(plans=[{"0": 70}]), TypeError, "plans maps names to targets; got list"),
    (dict(plans={"mine": {"0": 70}}), ValueError, "for other layers"),
    (dict(plans={"mine": {"0": 10, "4": 10, "8": 10}}), ValueError, "comes to 10 %, the target is 70 %"),
    (dict(plans={"mine": {"0": 70, "4": 70, "8": 70}}, locked={"8": 20}), ValueError, "outside min_pct, max_pct or locked"),
])
def test_what_cannot_be_done_is_said(kwargs, error, message):
    """Every bad call, before anything is measured."""
    net, eval_fn = net_and_eval()
    before, calls = fingerprint(net), []
    with pytest.raises(error, match=message): search(net, lambda m: calls.append(1) or eval_fn(m), **kwargs)
    assert changes(before, fingerprint(net)) == [] and not calls


def test_wrong_kinds():
    """No batch norm, no batches."""
    net, eval_fn = net_and_eval()
    with pytest.raises(ValueError, match="no batch norm with running statistics"): reestimate_norms(nn.Linear(2, 2), torch.ones(2, 2))
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    before = fingerprint(net)
    for bad, error in ((5, TypeError), ([x[:2], "images"], (TypeError, AttributeError))):
        with pytest.raises(error): reestimate_norms(net, bad)
        assert {name: mark[-1] for name, mark in before["buffers"].items()} == {name: mark[-1] for name, mark in fingerprint(net)["buffers"].items()}
        assert changes({k: before[k] for k in ("modes", "hooks")}, fingerprint(net)) == [] and net[1].momentum == .1
    with pytest.raises(ValueError): reestimate_norms(plain, torch.ones(4, 4))


def shares_track(seed, n, target, *, breaks=False):
    """Layers of random sizes with random bounds, and a random damage with interactions of what is left of each; every call is noted."""
    rng = np.random.default_rng(seed)
    net = nn.ModuleList(nn.Linear(int(size), 1, bias=False) for size in rng.integers(100, 1000, n))
    low, high = rng.random(n)*target, target + (1 - target)*rng.random(n)
    bounds = {str(i): (100 - 100*most, 100 - 100*least) for i, (least, most) in enumerate(zip(low, high, strict=True))}
    b = budget(net, 100*(1 - target), bounds=bounds)
    a, mix, calls = rng.random(n) + .1, rng.normal(size=(n, n)), []

    def damage(model):
        kept = np.array([float((layer.weight != 0).float().mean()) for layer in model])
        calls.append(kept)
        return float("nan") if breaks and rng.random() < .05 else float(np.sum(a/(kept + .01)) + np.sum((mix@kept)**2))

    return ShareTrack(Meter(net, Masker(b.units, "weight", large_final), damage, higher_is_better=False), b), calls


@pytest.mark.filterwarnings("ignore:levels are percent")   # bounds at random may be below 1
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(.05, .95))
def test_race_of_a_function_keeps_the_mean_and_the_bounds(n, seed, target):
    """For random damages with interactions: same mean, within bounds, never worse, not more calls than allowed."""
    track, calls = shares_track(seed, n, target)
    weights, start = track.b.weights, np.full(n, target)
    best = race(track, [(start, track.damage(start))], 60)
    assert len(calls) == track.spent <= 60 and best.damage <= track.damage(start) and track.damage(best.plan) == best.damage
    assert abs(best.plan@weights/weights.sum() - target) < 1e-9 and (best.plan >= track.low).all() and (best.plan <= track.high).all()


@pytest.mark.filterwarnings("ignore:levels are percent")
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(.02, .5), st.integers(1, 5))
def test_descend_ends_at_the_mean_or_says_so(n, seed, target, steps):
    """The mean falls by the factor at each step, within bounds, with a look and a call; a way that is barred has infinite damage."""
    track, calls = shares_track(seed, n, target, breaks=True)
    weights = track.b.weights
    start = np.clip(np.full(n, min(target/path_factor**steps, 1.)), track.low, track.high)
    kept, there = descend(track, start, track.damage(start), steps)
    assert len(calls) <= 1 + steps*(2*n + 1) and (kept >= track.low).all() and (kept <= track.high).all()
    if np.isfinite(there): assert abs(kept@weights - start@weights*path_factor**steps) < 1e-9*weights.sum()
    if start@weights*path_factor**steps < track.low@weights*.999: assert there == np.inf


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6), st.floats(.2, .9))
def test_least_total_is_best_for_convex_curves(n, seed, target):
    """No plan among many random ones of the same mean is better; the mean is exact also for wild curves."""
    rng = np.random.default_rng(seed)
    weights, a, grid = rng.integers(1, 50, n).astype(float), rng.random(n) + .05, np.linspace(.05, 1, 400)
    cost = lambda kept: float(np.sum(a/kept))
    kept = least_total([(grid, c/grid) for c in a], weights, target)
    assert abs(kept@weights/weights.sum() - target) < 1e-9
    for _ in range(50):
        other = np.clip(kept*np.exp(rng.normal(0, .3, n)), .05, 1)
        if other@weights/weights.sum() <= target: assert cost(other) >= cost(kept)*(1 - 2e-3)
    wild = least_total([(grid, rng.normal(size=400)) for _ in range(n)], weights, target)
    assert abs(wild@weights/weights.sum() - target) < 1e-9


def test_norms_that_the_data_never_reach_keep_their_statistics():
    """As in a head that is used in training only."""
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aux = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        def forward(self, x): return self.main(x)
    model = Aux().eval()
    model.aux.running_mean.fill_(3)
    reestimate_norms(model, torch.randn(20, 3) + 5)
    assert model.aux.running_mean.tolist() == [3, 3, 3] and model.main.running_mean.mean() > 4


@pytest.mark.parametrize("recalibrate", [None, x + 1])
def test_an_evaluation_that_was_used_before(recalibrate):
    """Divergence is from the untouched model of this search, as it is and not recalibrated, whatever the evaluation saw earlier; so is that of the report."""
    net, _ = net_and_eval()
    other, _ = net_and_eval(1)
    make = lambda: evaluation((x, torch.zeros(64, dtype=torch.long)), lambda p, t: (p.argmax(1) == t).float(), "kl")
    used, report = make(), make()
    used(other), report(other)
    results = [search_targets(net, x[:1], fn, 80, report_fn=rep, evaluations=60, recalibrate=recalibrate, verbose=False) for fn, rep in ((make(), make()), (used, report))]
    assert results[0] == results[1] and results[0].evaluations <= 60
    assert used(net)[1].abs().max() < 1e-6 and report(net)[1].abs().max() < 1e-6
    calls = []
    class Counted(type(used)):
        def __call__(self, model):
            calls.append(1)
            return super().__call__(model)
    for metric in (used.metric, lambda p, t: float((p.argmax(1) == t).float().mean())):
        calls.clear()
        r = search_targets(net, x[:1], Counted(used.run, metric, used.objective), 80, evaluations=60, recalibrate=recalibrate, verbose=False, reuse=False)
        assert r.evaluations == len(calls) <= 60


def test_classic_targets_are_among_the_plans():
    """As `to_layer_targets` makes them from an analysis at the target; within bounds and around locked layers."""
    net, eval_fn = net_and_eval()
    by_hand = SensitivityAnalyzer(net, x[:1], eval_fn, higher_is_better=False).analyze("sparsity", 70, verbose=False).to_layer_targets(net, 70, max_pct=100)
    found = search(net, eval_fn, 70).plans["classic"]
    for n, pct in by_hand.items(): close(found[n], pct, 1e-4)
    bounded = search(net, eval_fn, 60, locked={"0": 10}, min_pct=20, max_pct=80).plans["classic"]
    assert abs(bounded.mean(net) - 60) < 1e-6 and abs(bounded["0"] - 10) < 1e-9 and all(20 <= v <= 80 for n, v in bounded.items() if n != "0")


def test_plots_only_with_the_sweep_of_the_same_metric():
    """What was expected comes from a sweep of the same metric of the same model, or it is refused."""
    net, eval_fn = net_and_eval()
    r = search(net, eval_fn)
    sweep = SensitivityAnalyzer(net, x[:1], eval_fn, higher_is_better=False, metric_name="loss").sweep(levels=[50, 90], verbose=False)
    for bad in (dict(metric_name="loss"), dict(metric_name="accuracy", higher_is_better=False)):
        other = SensitivityAnalyzer(net, x[:1], eval_fn, **bad).sweep(levels=[50], verbose=False)
        with pytest.raises(ValueError, match="sweep with the same eval_fn"): r.plot(other)
    twice = SensitivityAnalyzer(net, x[:1], lambda m: 2*eval_fn(m), higher_is_better=False, metric_name="loss").sweep(levels=[50], verbose=False)
    with pytest.raises(ValueError, match="sweep with the same eval_fn"): r.plot(twice)
    ax = r.plot(sweep)[1]
    assert len(ax.collections) + len(ax.lines) > 1


def test_classic_targets_of_a_layer_that_breaks():
    """It stays at the least, as in `to_layer_targets`; where that leaves no plan, there is none."""
    net, eval_fn = net_and_eval()
    breaks = lambda i: lambda m: eval_fn(m).mean().item() if (m[i].weight == 0).float().mean() < .55 else float("nan")
    assert search(net, breaks(0), 60).plans["classic"]["0"] == 0
    mine = {"0": 95, "4": (60*1320 - 95*456)/864, "8": 95}      # with no zero in layer 4 the mean of 60 % is out of reach
    assert list(search(net, breaks(4), 60, plans={"mine": mine}).plans) == ["uniform", "global_magnitude", "erk", "lamp", "mine", "search"]


def test_files_of_before(tmp_path):
    """Plans were plain dictionaries in files, without a method; a number that is not finite is a word there."""
    net, eval_fn = net_and_eval()
    r = search(net, eval_fn, evaluations=22)
    r.ranking[-1]["delta"] = math.inf
    r.to_json(tmp_path/"r.json")
    d = json.loads((tmp_path/"r.json").read_text())
    d["plan"], d["plans"] = dict(r.plan), {name: dict(plan) for name, plan in r.plans.items()}
    (tmp_path/"before.json").write_text(json.dumps(d))
    for name in ("r.json", "before.json"):
        back = SearchResult.from_json(tmp_path/name)
        assert back == r and {(plan.method, plan.unit) for plan in (back.plan, *back.plans.values())} == {("sparsity", "percent")}


# ---- the race, for data as `eval_fn`


def losses_of(preds, targs):
    """Cross-entropy of each sample."""
    return F.cross_entropy(preds, targs, reduction="none")


def hits(preds, targs):
    """Whether each sample is right."""
    return (preds.argmax(1) == targs).float()


def net_and_data(objective=losses_of, n=64, batch=20):
    """The small network, and batches on which it is right, as an evaluation."""
    net, _ = net_and_eval()
    with torch.no_grad(): right = net(x[:n]).argmax(1)
    return net, evaluation([(x[i:i + batch], right[i:i + batch]) for i in range(0, n, batch)], hits, objective)


@pytest.mark.parametrize("objective", [losses_of, "kl", None])
@pytest.mark.parametrize("pct", [30, 80, 99])
def test_race_keeps_the_budget_and_leaves_no_trace(objective, pct):
    """With gradients of a loss and of a divergence, and without any; the plan measured best of all, and as `Sparsifier` makes it."""
    net, eval_fn = net_and_data(objective)
    before = fingerprint(net)
    r = search_targets(net, x[:1], eval_fn, pct, evaluations=40, verbose=False)
    assert changes(before, fingerprint(net)) == [] and r.evaluations <= 40
    assert list(r.plans) == ["uniform", "global_magnitude", "erk", "lamp", "classic", "search"]
    assert all(abs(p.mean(net) - pct) < 1e-6 for p in r.plans.values())
    eval_fn.new_baseline()
    eval_fn(net)

    def worth(plan):
        with leave_no_trace(net):
            Sparsifier(net).sparsify_model(plan)
            score = eval_fn(net)
        return -score.mean().item() if objective is None else score[1].mean().item()

    worths = {name: worth(plan) for name, plan in r.plans.items()}
    assert worths["search"] <= min(worths.values()) + 1e-6
    if objective is not None and pct == 80: assert worths["search"] < .99*min(w for name, w in worths.items() if name != "search")


def test_race_counts_samples():
    """Every sample that the network sees is in the number: a part counts its share, a backward pass as two forward passes."""
    net, eval_fn = net_and_data()
    seen = []
    net.register_forward_hook(lambda m, args, out: seen.append(len(args[0])*(3 if out.requires_grad else 1)))
    for limit in (25, 60):
        seen.clear()
        with torch.no_grad(): r = search_targets(net, x[:1], eval_fn, 80, evaluations=limit, verbose=False)
        assert 0 <= sum(seen)/64 - r.evaluations + 1 < 1.3 and r.evaluations <= limit   # the door looks at one sample, a few times


def test_race_is_the_same_each_time():
    """Whatever the random state, and whatever the evaluation was used for before; batch statistics estimated anew are in force for the gradients, too."""
    net, eval_fn = net_and_data("kl")
    for recalibrate in (None, x):
        one = search_targets(net, x[:1], eval_fn, 85, evaluations=40, recalibrate=recalibrate, verbose=False)
        torch.rand(3), eval_fn(net_and_eval(1)[0])
        assert search_targets(net, x[:1], eval_fn, 85, evaluations=40, recalibrate=recalibrate, verbose=False) == one


def test_race_keeps_bounds_and_locked_layers():
    """Every proposal is within them, so the winner is; where nothing may move it says the plan there is."""
    net, eval_fn = net_and_data()
    for kwargs in (dict(min_pct=40, max_pct=95), dict(locked={"8": 0}), dict(locked={"8": 100}, max_pct=88), dict(min_pct=70, max_pct=70), dict(granularity="filter"), dict(layers=["4"])):
        r = search_targets(net, x[:1], eval_fn, 70, evaluations=40, verbose=False, **kwargs)
        at, least, most = kwargs.get("locked", {}), kwargs.get("min_pct", 0), kwargs.get("max_pct", 100)
        assert all(abs(pct - at[n]) < 1e-9 if n in at else least - 1e-9 <= pct <= most + 1e-9 for n, pct in r.plans["search"].items())
        assert abs(r.plans["search"].mean(net) - 70) < 1e-6


def test_race_on_data_of_other_kinds():
    """A pair, a DataLoader, dicts with labels, single samples; batches that cannot be counted go as a function."""
    net, eval_fn = net_and_data()
    right = torch.cat([y for _, y in eval_fn.data])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, right), batch_size=7)
    for data in ((x, right), loader, [(x[i:i + 1], right[i:i + 1]) for i in range(64)], [{"input": x, "labels": right}]):
        r = search_targets(net, x[:1], data, 85, evaluations=30, verbose=False)
        assert r.plan_name == "search" or r.ranking[0]["search_metric"] >= max(row["search_metric"] for row in r.ranking)
        assert r.evaluations <= 30


def test_race_survives_what_is_not_a_number():
    """A loss that breaks for some plans: they lose, and gradients there are not used."""
    net, good = net_and_data()

    def breaks(preds, targs):
        loss = losses_of(preds, targs)
        return loss.log() if net[8].weight.count_nonzero() < 40 else loss

    r = search_targets(net, x[:1], evaluation(good.data, hits, breaks), 80, evaluations=40, verbose=False)
    assert math.isfinite(r.measured_metric) and abs(r.plan.mean(net) - 80) < 1e-6
