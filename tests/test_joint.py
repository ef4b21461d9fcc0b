"""The search within any budget: what it promises, on small networks and on ResNet-18."""
import functools
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import MobileNetV2
from toys import NarrowResNet

from fasterai_sens import Applier, SearchResult, SensitivityAnalyzer, changes, evaluation, fingerprint, search_plan, search_targets
from fasterai_sens.measure.curvature import Curvature
from fasterai_sens.plans.joint import LevelTrack

percent, bits = [25, 50, 75], [8, 4, 3]
every = list(itertools.combinations(("pruning", "sparsity", "quantization"), 2))


def moved_by(model, images):
    """How far the outputs move, for each image: an eval_fn that needs no labels; lower is better."""
    with torch.no_grad():
        start = model(images)
    return torch.inference_mode()(lambda m: (m(images) - start).square().mean(1).clone())


def sweeps_of(model, images, methods):
    """One sweep for each method, and the eval_fn."""
    eval_fn = moved_by(model, images)
    analyzer = SensitivityAnalyzer(model, images[:1], eval_fn, higher_is_better=False, metric_name="moved")
    return [analyzer.sweep(m, bits if m == "quantization" else percent, verbose=False) for m in methods], eval_fn


@pytest.fixture(scope="module")
def small():
    """A network with batch norm, images, and sweeps of three methods."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)).eval()
    images = torch.randn(64, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return model, images, *sweeps_of(model, images, ("pruning", "sparsity", "quantization"))


@pytest.mark.parametrize(("which", "budget"), [((0,), {"flops": "50%"}), ((1,), {"params": "40%"}), ((2,), {"bytes": "20%"}),
    pytest.param((0, 1, 2), {"bytes": "12%", "flops": "60%"}, marks=pytest.mark.slow)])
def test_what_it_promises(small, which, budget, tmp_path):
    """Within the budget, never worse than a start on the same data, everything counted, the model as it was, plain data."""
    model, images, sweeps, eval_fn = small
    before, calls = fingerprint(model), []
    def counted(m):
        calls.append(1)
        return eval_fn(m)
    r = search_plan(model, images[:1], counted, [sweeps[i] for i in which], budget, combine=every if len(which) > 1 else (), verbose=False, reuse=False)
    assert changes(before, fingerprint(model)) == [] and r.evaluations == len(calls)
    assert r.ranking[0]["plan"] == r.plan_name and r.plan == r.plans[r.plan_name]
    assert all(row[n] <= b*(1 + 1e-9) for row in r.ranking for n, b in r.budgets.items())
    assert r.measured_metric == min(row["metric"] for row in r.ranking)
    applier = Applier(model, images[:1], settings=r.plan.settings)
    for name, plan in r.plans.items():
        with applier(plan):
            assert float(eval_fn(model).mean()) == pytest.approx(next(row["metric"] for row in r.ranking if row["plan"] == name), rel=1e-5, abs=1e-9)
    r.to_json(tmp_path/"r.json")
    assert SearchResult.from_json(tmp_path/"r.json") == r
    assert list(r.to_dataframe().columns[-len(r.budgets):]) == list(r.budgets)


def test_predicted_is_the_sum_of_what_each_layer_does_alone(small):
    """Recomputed with one layer at a time."""
    model, images, sweeps, eval_fn = small
    r = search_plan(model, images[:1], eval_fn, sweeps[2], {"bytes": "20%"}, verbose=False)
    applier, alone = Applier(model, images[:1], settings=r.plan.settings), 0.
    for n, b in r.plan.quantization.items():
        with applier(type(r.plan)(quantization=type(r.plan.quantization)({n: b}))):
            alone += float(eval_fn(model).mean())
    assert r.predicted_metric == pytest.approx(alone, rel=1e-5)
    assert r.interaction_gap == pytest.approx(r.measured_metric - alone, rel=1e-4)


@pytest.mark.parametrize("higher", [True, False])
def test_a_gain_is_not_predicted(small, higher):
    """An eval_fn by which every compression looks better than the untouched model, in both directions."""
    model, images, _, eval_fn = small
    liked = (lambda m: eval_fn(m) + .5) if higher else lambda m: .5 - eval_fn(m)   # untouched, it moves by 0
    sweep = SensitivityAnalyzer(model, images[:1], liked, higher_is_better=higher).sweep("sparsity", [50, 90], verbose=False)
    r = search_plan(model, images[:1], liked, sweep, "40%", evaluations=6, verbose=False)
    assert r.predicted_metric == r.plan.predicted_metric == r.baseline_metric == .5
    assert (r.measured_metric > .5) == higher
    s = search_targets(model, images[:1], liked, 50, higher_is_better=higher, evaluations=30, verbose=False)
    assert s.predicted_metric == s.baseline_metric == .5 and (s.measured_metric > .5) == higher


def test_report_on_other_data_decides(small):
    """The plan that is best on the data of `report_fn` is returned, even if it is not the searched one."""
    model, images, sweeps, eval_fn = small
    flipped = lambda m: -eval_fn(m)   # what is worst for the search is best here
    r = search_plan(model, images[:1], eval_fn, sweeps[1], {"params": "50%"}, report_fn=flipped, verbose=False)
    worst = max(r.ranking, key=lambda row: row["search_metric"])
    assert r.plan_name == worst["plan"] and r.reported_on == "report_fn"


def test_bounds_and_locked_hold_in_every_plan(small):
    """Also in the plans without curves, and after the search."""
    model, images, sweeps, eval_fn = small
    r = search_plan(model, images[:1], eval_fn, sweeps[1], {"params": "45%"}, locked=["0"], bounds={"8": (0, 50)}, verbose=False)
    for plan in r.plans.values():
        assert "0" not in plan.sparsity and plan.sparsity["8"] <= 50


def test_recalibrated(small):
    """Batch-norm statistics are those of the given data in every evaluation, and the model's own afterwards."""
    model, images, sweeps, eval_fn = small
    before, means = fingerprint(model), []
    def looked(m):
        means.append(m[1].running_mean.clone())
        return eval_fn(m)
    r = search_plan(model, images[:1], looked, sweeps[0], {"flops": "60%"}, recalibrate=images, verbose=False)
    with torch.no_grad():
        expected = model[0](images).mean((0, 2, 3))
    assert torch.allclose(means[0], expected, atol=1e-5) and r.settings["recalibrated"]
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize(("options", "error", "text"), [
    (dict(budget=1), ValueError, "out of reach"), (dict(evaluations=0), ValueError, "evaluations"),
    (dict(locked="nope"), KeyError, "unknown measured"), (dict(recalibrate=[]), ValueError, ""), (dict(eval_fn=lambda m: math.nan), ValueError, "is nan")])
def test_refused_at_the_door(small, options, error, text):
    """Clear errors, and the model as it was."""
    model, images, sweeps, eval_fn = small
    before = fingerprint(model)
    options = dict(eval_fn=eval_fn, sweeps=sweeps[1], budget="50%") | options
    with pytest.raises(error, match=text or None):
        search_plan(model, images[:1], options.pop("eval_fn"), options.pop("sweeps"), options.pop("budget"), verbose=False, **options)
    assert changes(before, fingerprint(model)) == []


def test_the_model_comes_back_when_eval_fn_raises(small):
    """Also in the middle of the search."""
    model, images, sweeps, eval_fn = small
    before, calls = fingerprint(model), itertools.count()
    def fragile(m):
        if next(calls) == 9:
            raise RuntimeError("no")
        return eval_fn(m)
    with pytest.raises(RuntimeError, match="no"):
        search_plan(model, images[:1], fragile, sweeps, {"bytes": "20%"}, combine=every, verbose=False)
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("arch", [partial(NarrowResNet, layers=[1, 1, 1, 1]), lambda num_classes: MobileNetV2(num_classes, .5, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]])], ids=["resnet", "mobilenet"])
def test_channels_of_real_networks(arch):
    """Coupled and depthwise layers: one level a group, at equal multiply-accumulates, no worse than any start."""
    torch.manual_seed(0)
    model, images = arch(num_classes=10).eval(), torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    (sweep,), eval_fn = sweeps_of(model, images, ["pruning"])
    before = fingerprint(model)
    r = search_plan(model, images[:1], eval_fn, sweep, "60%", "flops", evaluations=2*len({row.group_id or row.name for row in sweep[0].layers}) + 3, verbose=False)
    assert changes(before, fingerprint(model)) == []
    assert {"allocate", "uniform pruning", "global pruning", "search"} == set(r.plans)
    for plan in r.plans.values():
        assert all(len({plan.pruning[n] for n in row.group_members}) == 1 for row in sweep[0].layers if row.prunable and row.group_members)


def test_lower_bounds_and_forbidden_pairs_hold_in_every_plan(small):
    """Also in one ranking of all channels; a layer that must be pruned is not made sparse unless that is said."""
    model, images, (pruning, sparsity, _), eval_fn = small
    r = search_plan(model, images[:1], eval_fn, pruning, {"flops": "70%"}, bounds={"0": (25, 75)}, verbose=False)
    assert all(25 <= p.pruning["0"] <= 75 for p in r.plans.values())
    r = search_plan(model, images[:1], eval_fn, [pruning, sparsity], {"params": "60%"}, bounds={"3": {"pruning": (25, 75)}}, verbose=False)
    assert all(p.pruning["3"] >= 25 and not p.sparsity.get("3") for p in r.plans.values())


def test_by_the_metric_or_the_objective(small):
    """The search makes small what `by` says."""
    model, images, _, eval_fn = small
    def both(m):
        metric = eval_fn(m)
        return metric, (m[3].weight == 0).float().mean()   # an objective that wants the second convolution dense
    sweep = SensitivityAnalyzer(model, images[:1], both, higher_is_better=False, metric_name="moved").sweep("sparsity", percent, verbose=False)
    by = {b: search_plan(model, images[:1], both, sweep, "60%", by=b, verbose=False).plans["search"] for b in ("metric", "objective")}
    assert by["objective"].sparsity["3"] < by["metric"].sparsity["3"]
    with pytest.raises(ValueError):
        search_plan(model, images[:1], eval_fn, sweep, "60%", verbose=False)
    with pytest.raises(TypeError):
        search_plan(model, images[:1], eval_fn, sweep, "60%", report_fn="x", verbose=False)


@pytest.mark.parametrize("recalibrated", [False, True])
def test_an_evaluation_that_compares(small, recalibrated):
    """One that was used on another model sees the untouched one first, as it is; one that writes to the weights is refused, and leaves no trace."""
    model, images, sweeps, _ = small
    torch.manual_seed(1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(432, 5))
    make = lambda: evaluation((images, torch.zeros(64, dtype=torch.long)), lambda p, t: (p.argmax(1) == t).float(), "kl")
    used, fresh = make(), make()
    used(other)
    ours = SensitivityAnalyzer(model, images[:1], make()).sweep("pruning", percent, verbose=False)
    options = dict(sweeps=ours, budget="60%", evaluations=15, recalibrate=images + 1 if recalibrated else None, verbose=False)
    before = fingerprint(model)
    assert search_plan(model, images[:1], used, **options) == search_plan(model, images[:1], fresh, **options)
    assert used(model)[1].abs().max() < 1e-6
    class Rough(type(used)):
        def __call__(self, m):
            for p in m.parameters(): p.data.mul_(1.01)
            return super().__call__(m)
    with pytest.raises(ValueError): search_plan(model, images[:1], Rough(used.run, used.metric, used.objective), **options)
    assert changes(before, fingerprint(model)) == []


def test_an_objective_that_is_not_used(small):
    """By the metric, an objective that is no number does not matter; by the objective it is said at once."""
    model, images, sweeps, eval_fn = small
    nan = lambda m: (eval_fn(m), math.nan)
    assert search_plan(model, images[:1], nan, sweeps[0], "60%", by="metric", evaluations=15, verbose=False).plan.pruning
    with pytest.raises(ValueError, match="the objective of the untouched model is nan"):
        search_plan(model, images[:1], nan, with_objective(sweeps[0]), "60%", evaluations=15, verbose=False)


def with_objective(sweep):
    """The sweep, as if the damage were that to an objective."""
    for r in sweep:
        r.objective_name, r.baseline_objective = "loss", 0.
        for row in r.layers: row.objective, row.objective_delta = row.delta, row.delta
    return sweep


# ---- the race, for data as `eval_fn`


def losses_of(preds, targs):
    """Cross-entropy of each sample."""
    return nn.functional.cross_entropy(preds, targs, reduction="none")


def hits(preds, targs):
    """Whether each sample is right."""
    return (preds.argmax(1) == targs).float()


@pytest.fixture(scope="module")
def data_of(small):
    """Name of an objective -> an evaluation of the small network's own answers, in uneven batches, and sweeps by it."""
    model, images, *_ = small
    right = model(images).argmax(1)
    batches = [(images[i:i + 20], right[i:i + 20]) for i in range(0, 64, 20)]

    @functools.cache
    def of(objective):
        eval_fn = evaluation(batches, hits, losses_of if objective == "loss" else objective)
        analyzer = SensitivityAnalyzer(model, images[:1], eval_fn)
        return eval_fn, [analyzer.sweep(m, bits if m == "quantization" else percent, verbose=False) for m in ("pruning", "sparsity", "quantization")]

    return of


def searched(small, data_of, objective="loss", which=(1,), budget=None, **options):
    """A short race."""
    eval_fn, sweeps = data_of(objective)
    names = [("pruning", "sparsity", "quantization")[i] for i in which]
    options = dict(combine=list(itertools.combinations(names, 2)), evaluations=14, verbose=False) | options
    return search_plan(small[0], small[1][:1], eval_fn, [sweeps[i] for i in which], budget or {"params": "40%"}, **options)


joint = (0, 1, 2), {"bytes": "12%", "flops": "60%"}


@pytest.mark.parametrize(("objective", "which", "budget"), [("loss", (0,), {"flops": "50%"}), ("loss", (1,), {"params": "40%"}), ("kl", (2,), {"bytes": "20%"}), pytest.param("kl", *joint, marks=pytest.mark.slow), (None, *joint)])
def test_race_keeps_budgets_and_leaves_no_trace(small, data_of, objective, which, budget):
    """With gradients of a loss and of a divergence, and without any; what it found measured no worse than any start, and is worth it outside the search."""
    model, images, *_ = small
    before = fingerprint(model)
    r = searched(small, data_of, objective, which, budget)
    assert changes(before, fingerprint(model)) == []
    eval_fn = data_of(objective)[0]
    eval_fn.new_baseline()
    eval_fn(model)
    worth = {}
    for name, plan in r.plans.items():
        applier = Applier(model, images[:1], settings=r.settings)
        costs = applier.costs(plan, tuple(r.budgets), really=True)
        assert all(costs[n] <= b*(1 + 1e-9) for n, b in r.budgets.items())
        with applier(plan): score = eval_fn(model)
        worth[name] = -float(score.mean()) if objective is None else float(score[1].mean())
    assert worth["search"] <= min(worth.values()) + 1e-5


def test_race_counts_samples(small, data_of):
    """Every sample that the network sees is in the number: a part counts its share, a backward pass as two forward passes; what is asked for is not exceeded."""
    model = small[0]
    data_of("loss")   # measured before anything is counted
    for which, limit in (((0,), 12), ((2,), 30)):
        seen = []
        hook = model.register_forward_hook(lambda m, args, out, seen=seen: seen.append(len(args[0])*(3 if out.requires_grad else 1)))
        with torch.no_grad(): r = searched(small, data_of, which=which, budget={"flops": "50%"} if which == (0,) else {"bytes": "20%"}, evaluations=limit)
        hook.remove()
        n_alone = sum(map(len, r.plan.values()))
        assert 0 <= sum(seen)/64 - r.evaluations + 1 < 1.6   # the door looks at one sample, a few times
        assert r.evaluations <= limit + 2 + len(r.plans) + n_alone/6


def test_race_is_the_same_each_time(small, data_of):
    """Whatever the random state, and whatever the evaluation was used for before."""
    one = searched(small, data_of, "kl", (0, 2), {"bytes": "20%"})
    torch.rand(3), data_of("kl")[0](nn.Sequential(nn.Flatten(), nn.Linear(432, 5)))
    assert searched(small, data_of, "kl", (0, 2), {"bytes": "20%"}) == one


def test_race_is_interrupted_at_any_time(small, data_of, monkeypatch):
    """In an evaluation on a part, in the backward pass, and while the moves are read off: the model comes back."""
    model = small[0]
    before = fingerprint(model)
    for place in ("damages", "look", "cheapest"):
        really, calls = getattr(LevelTrack, place), itertools.count()

        def fragile(self, *args, really=really, calls=calls, place=place, **kwargs):
            if next(calls) == (0 if place == "look" else 2): raise KeyboardInterrupt
            return really(self, *args, **kwargs)

        with monkeypatch.context() as m:
            m.setattr(LevelTrack, place, fragile)
            with pytest.raises(KeyboardInterrupt): searched(small, data_of, which=(0, 2), budget={"bytes": "20%"})
        assert changes(before, fingerprint(model)) == []

    def breaks(self, tensors, differences): raise KeyboardInterrupt
    monkeypatch.setattr(Curvature, "terms", breaks)
    with pytest.raises(KeyboardInterrupt): searched(small, data_of, which=(2,), budget={"bytes": "20%"})
    assert changes(before, fingerprint(model)) == []


def test_race_keeps_bounds_locked_and_pairs(small, data_of):
    """Every proposal is within them, so the winner is."""
    r = searched(small, data_of, budget={"params": "45%"}, locked=["0"], bounds={"8": (0, 50)})
    assert all("0" not in plan.sparsity and plan.sparsity["8"] <= 50 for plan in r.plans.values())
    r = searched(small, data_of, which=(0, 1), budget={"params": "60%"}, combine=(), bounds={"3": {"pruning": (25, 75)}})
    for plan in r.plans.values():
        assert 25 <= plan.pruning["3"] <= 75 and not plan.sparsity.get("3")
        assert not any(plan.pruning.get(n) and plan.sparsity.get(n) for n in ("0", "3", "8"))
    still = searched(small, data_of, which=(2,), budget={"bytes": "22%"}, locked={"0": 8, "3": 4, "8": 4})   # nothing may move: the race ends at once
    assert still.plans["search"].quantization == {"0": 8, "3": 4, "8": 4}


def test_a_look_that_is_no_number(small, data_of):
    """Where gradients break, the sweeps say what moves do."""
    model, images, *_ = small
    eval_fn, sweeps = data_of("loss")

    def steep(preds, targs): return losses_of(preds, targs) + (preds - preds.detach()).abs().sqrt().sum(1)   # an infinite slope

    r = search_plan(model, images[:1], evaluation(eval_fn.data, hits, steep), sweeps[2], {"bytes": "20%"}, evaluations=25, verbose=False)
    assert math.isfinite(r.measured_metric) and r.evaluations > 10


def test_rounded_activations_are_not_seen_by_gradients(small, data_of):
    """Their slope is zero or wrong, so there is no look, and the race goes by the sweeps."""
    model, images, *_ = small
    eval_fn, _ = data_of("loss")
    sweep = SensitivityAnalyzer(model, images[:1], eval_fn, calibration_data=images).sweep("quantization", [8, 4], verbose=False, quant_activations=True)
    r = search_plan(model, images[:1], eval_fn, sweep, {"bytes": "22%"}, evaluations=10, calibration_data=images, verbose=False)
    assert r.plan.costs["bytes"] <= r.budgets["bytes"]
