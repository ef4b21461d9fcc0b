"""Units measured until they are settled, levels where curves bend: the error rate in 1,000 simulations, the sides of all samples, faults, reuse, no trace."""
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import three_layers, unchanged

from fasterai_sens import (
    Divergence,
    Perturbation,
    Refine,
    SensitivityAnalyzer,
    SensitivityResult,
    Settle,
    allocate,
    evaluation,
    identify_critical_layers,
    method,
)
from fasterai_sens.core.protocol import methods
from fasterai_sens.measure.settle import Bets, SkewedMean, least_for_losses, list_looks, settle_scores

TRIALS = 1000


def margin(rate):
    """What the share of wrong answers in 1,000 trials stays below with a chance of .999, if the rate is held."""
    return rate + 3.1*math.sqrt(rate*(1 - rate)/TRIALS)


def right_and_wrong(rng, rows, n, lost, won=0.):
    """Damage where samples are lost and won at random, exactly so many."""
    row = np.r_[np.ones(round(lost*n)), -np.ones(round(won*n))]
    return rng.permuted(np.tile(np.r_[row, np.zeros(n - len(row))], (rows, 1)), axis=1)


def losses(rng, rows, n, kind):
    """Damage to a loss, with a mean of about 1."""
    if kind == "normal": return 1 + rng.normal(0, 5, (rows, n))
    if kind == "ties": return np.round(rng.normal(1, 1, (rows, n)))
    if kind == "heavy tail": return 1 + rng.standard_t(2.5, (rows, n))
    if kind == "lognormal": return rng.lognormal(-.5, 1, (rows, n))
    if kind == "very skewed": return rng.lognormal(-2, 2, (rows, n))
    share, small = .1, rng.normal(0, .1, (rows, n))   # one sample in ten has it all
    return small + np.where(rng.random((rows, n)) < share, rng.lognormal(-.5, 1, (rows, n))/share, 0)


def wrong(d, settle, way):
    """Share of the rows that were settled on another side than that of all samples, and of the samples that it took."""
    trials = settle_scores(d, settle, way)
    assert (trials.side != 0).all()
    return float(((trials.side > 0) != (d.mean(1) > settle.threshold)).mean()), trials.n.mean()/d.shape[1]


@pytest.mark.parametrize("error", [.05, .2])
@pytest.mark.parametrize("lost, won", [(.012, 0), (.03, .019), (.2, .19), (.0, .0), (.01, .0)])
def test_error_rate_of_right_and_wrong(lost, won, error):
    """Losses rare and frequent, none at all, and a mean that is the threshold itself; it lies just beside a threshold of one sample in a hundred"""
    d = right_and_wrong(np.random.default_rng(0), TRIALS, 500, lost, won)
    share_wrong, used = wrong(d, Settle(threshold=.01, error=error), Bets(-1, 1))
    assert share_wrong <= margin(error)
    if not lost: assert used < .75


@pytest.mark.parametrize("kind", ["normal", "ties", "heavy tail", "lognormal", "very skewed", "rare"])
def test_error_rate_of_losses(kind):
    """Thresholds on either side of the mean, near and far; a far one takes few samples"""
    d = losses(np.random.default_rng(1), TRIALS, 600, kind)
    looks = list_looks(600, Settle(threshold=1))
    way = SkewedMean(sum(least_for_losses <= n < 600 for n in looks), 5.)
    for threshold in (.6, .9, 1.15, 2.):
        share_wrong, _ = wrong(d, Settle(threshold=threshold), way)
        assert share_wrong <= margin(.05), threshold
    assert wrong(d, Settle(threshold=20.), way)[1] < .4


def test_error_rate_of_zero_damage():
    """Nothing changes in the samples that were seen; in one of 20 it would"""
    rng = np.random.default_rng(2)
    d = np.where(rng.random((TRIALS, 1000)) < .05, 1., 0.)
    for threshold in (.02, .045, .055, .2):
        assert wrong(d, Settle(threshold=threshold), SkewedMean(7, 1.))[0] <= margin(.05), threshold
    share_wrong, used = wrong(np.zeros((10, 2000)), Settle(threshold=.05), SkewedMean(7, 1.))
    assert share_wrong == 0 and used < .2


def groups_of(rng, kind, units, n):
    """1,000 times some units, of which each has a damage of its own"""
    rows = TRIALS*units
    means = np.tile(np.linspace(0, .3, units), TRIALS)[:, None]
    if kind == "right and wrong": return (rng.random((rows, n)) < means).astype(float), Bets(-1, 1)
    if kind == "all alike": return (rng.random((rows, n)) < .1).astype(float), Bets(-1, 1)
    if kind == "no damage": return np.zeros((rows, n)), Bets(-1, 1)
    hard = np.repeat(rng.lognormal(0, 1, (TRIALS, n)), units, axis=0)   # the same samples are hard for all
    return hard*means + rng.normal(0, .5, (rows, n)), SkewedMean(3, 5.)


@pytest.mark.parametrize("kind", ["right and wrong", "all alike", "no damage", "losses"])
def test_error_rate_of_the_top(kind):
    """The whole set is that of all samples; of those with the same damage the first"""
    units, n, top = 4, 200, 2
    d, way = groups_of(np.random.default_rng(3), kind, units, n)
    trials = settle_scores(d, Settle(top=top), way, np.repeat(range(TRIALS), units))
    means = d.mean(1).reshape(TRIALS, units)
    best = np.argsort(-means, axis=1, kind="stable")[:, :top]
    expected = np.zeros((TRIALS, units), bool)
    np.put_along_axis(expected, best, True, axis=1)
    found = (trials.side > 0).reshape(TRIALS, units)
    assert (found.sum(1) == top).all()
    assert (found != expected).any(1).mean() <= margin(.05)
    if kind == "no damage": assert (trials.n == n).all() and (found == expected).all()   # no number of samples tells, so it takes all


def test_together():
    """With one error rate for all answers, each has its share"""
    d = right_and_wrong(np.random.default_rng(4), 200, 500, .06)
    own, together = (settle_scores(d, Settle(threshold=.05, error=.4, together=t), Bets(-1, 1)) for t in (False, True))
    assert together.tail == pytest.approx(.4/200) and together.n.mean() > own.n.mean()
    of_sets = settle_scores(d, Settle(top=3, together=True), Bets(-1, 1), np.repeat(range(20), 10))
    assert of_sets.tail == pytest.approx(.05/20/21)


# ---- with models


def classifier(n=1500):
    """A net whose first layer bears little, the classes that it finds, and its analyzer's data"""
    net, x = three_layers(), torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    for layer in net[::2]: layer.weight.data *= 3
    with torch.no_grad(): return net, x, net(x).argmax(1)


def is_right(preds, targs): return (preds.argmax(1) == targs).float()


class Seen:
    """How many samples went through the model"""
    def __init__(self, model): self.n, self.hook = 0, model[0].register_forward_pre_hook(self)
    def __call__(self, module, args): self.n += len(args[0])


LEVELS = {"sparsity": [30, 60, 90], "quantization": [8, 4, 2], "pruning": [10, 40], "low_rank": [30, 60]}


@pytest.fixture
def fifth():
    """A method from outside the package"""
    @method("damping")
    @dataclass(frozen=True)
    class Damped(Perturbation):
        level: float = 50
        def refusal(self, unit): return "it is the last one" if unit.name == "4" else None
        def change(self, model, unit): unit.weight.data[: len(unit.weight)//2].mul_(1 - self.level/100)

    yield
    del methods["damping"]


def check_threshold(settled, full, threshold):
    """The same sides as all samples, and rows that are as they should be"""
    n_all = max(row.n for result in settled for row in result.layers if row.prunable)
    for some, every in zip(settled, full, strict=True):
        assert some.skipped == every.skipped and some.baseline_metric == pytest.approx(every.baseline_metric)
        assert [(r.name, r.prunable, r.params, r.group_id) for r in some.layers] == [(r.name, r.prunable, r.params, r.group_id) for r in every.layers]
        for a, b in zip(some.layers, every.layers, strict=True):
            if not b.prunable: continue
            assert a.side == ("above" if b.delta > threshold + 1e-12 else "below")
            assert a.compressed_metric == pytest.approx(a.baseline_metric - (1 if some.higher_is_better else -1)*a.delta)
            if a.ci: assert a.ci[0] - 1e-6 <= a.delta <= a.ci[1] + 1e-6
            if a.n == n_all == 1500: assert a.delta == pytest.approx(b.delta)


@pytest.mark.parametrize("name", LEVELS)
def test_same_sides(name):
    """Every method: the sides of the full measurement with fewer samples, and no trace"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    with unchanged(net): settled = analyzer.sweep(name, LEVELS[name], adaptive=Settle(threshold=.1), verbose=False)
    full = analyzer.sweep(name, LEVELS[name], verbose=False)
    check_threshold(settled, full, .1)
    rows = [r for result in settled for r in result.layers if r.prunable]
    assert sum(r.n for r in rows) < .5*1500*len(rows)
    assert all(r.objective_delta is not None and r.stderr is not None for r in rows)


def test_fifth_method(fifth):
    """A user's method, with a unit that it refuses"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    with unchanged(net): settled = analyzer.sweep("damping", [20, 100], adaptive=Settle(threshold=.05), verbose=False)
    check_threshold(settled, analyzer.sweep("damping", [20, 100], verbose=False), .05)
    assert settled[0].skipped == [("4", "it is the last one")] and settled[0].layers[2].n is None


@pytest.mark.parametrize("by", ["metric", "objective"])
def test_same_top(by):
    """By the metric and by the objective: the set that `top` finds at each level"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    settled = analyzer.sweep(levels=[50, 80], adaptive=Settle(top=1, by=by), verbose=False)
    full = analyzer.sweep(levels=[50, 80], verbose=False)
    for some, every in zip(settled, full, strict=True):
        assert [r.name for r in some.layers if r.side == "top"] == [r.name for r in every.top(1, by=by)]
        assert sum(r.side == "rest" for r in some.layers) == 2
    assert min(r.n for r in settled[1].layers) < (300 if by == "objective" else 1500)


def test_losses_and_directions():
    """A loss that is lower when better, and one with known bounds"""
    net, x, y = classifier()
    def loss(preds, targs): return F.cross_entropy(preds, targs, reduction="none")
    def squashed(preds, targs): return 1 - torch.exp(-loss(preds, targs))
    for metric, threshold, bounds in ((loss, .1, None), (squashed, .05, (0, 1)), (Divergence(), .2, None)):
        analyzer = SensitivityAnalyzer(net, x[:1], evaluation((x, y), metric), higher_is_better=False, metric_name="loss")
        with unchanged(net):
            settled = analyzer.sweep(levels=[20, 50, 90], adaptive=Settle(threshold=threshold, bounds=bounds), verbose=False)
        check_threshold(settled, analyzer.sweep(levels=[20, 50, 90], verbose=False), threshold)
        assert min(r.n for result in settled for r in result.layers) <= 120


def test_sequences():
    """Right or wrong for each token, in sequences of several lengths"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 20)).eval()
    x = torch.randint(20, (600, 12))
    with torch.no_grad(): y = net(x).argmax(-1)
    lengths = torch.randint(1, 13, (600,))
    y[torch.arange(12) >= lengths[:, None]] = -100
    data = [(x[:400], y[:400]), (x[400:], y[400:])]
    def hits(preds, targs): return [(p.argmax(-1) == t)[t != -100].float() for p, t in zip(preds, targs, strict=True)]
    analyzer = SensitivityAnalyzer(net, x[:1], evaluation(data, hits))
    settled, full = (analyzer.sweep(levels=[40, 90], adaptive=a, verbose=False) for a in (Settle(threshold=.2), None))
    check_threshold(settled, full, .2)
    assert min(r.n for r in settled[1].layers) < 300
    whole = analyzer.sweep(levels=[40, 90], adaptive=Settle(threshold=.2, first=599), verbose=False)
    assert [r.delta for result in whole for r in result.layers if r.n == 600] == pytest.approx(
        [b.delta for result, every in zip(whole, full, strict=True) for r, b in zip(result.layers, every.layers, strict=True) if r.n == 600])


def test_samples_are_counted():
    """What went through the model is what the rows say, once for the untouched model and never again"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y), reuse=False)
    seen = Seen(net)
    settled = analyzer.sweep(levels=[30, 90], adaptive=Settle(threshold=.05), verbose=False)
    seen.hook.remove()
    assert seen.n == 1500 + sum(r.n for result in settled for r in result.layers)
    assert {r.n for result in settled for r in result.layers} <= set(list_looks(1500, Settle(top=1)))


def test_most():
    """What is not settled within the samples that a unit may get is undecided"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    exact = analyzer.analyze(level=60, verbose=False).layers[0].delta
    found = analyzer.analyze(level=60, adaptive=Settle(threshold=exact, most=100), verbose=False)
    assert (found.layers[0].side, found.layers[0].n) == ("undecided", 100) and found.baseline_metric == 1
    places = analyzer.analyze(level=5, adaptive=Settle(top=1, most=40), verbose=False)
    assert {r.side for r in places.layers} == {"undecided"}


def test_reuse():
    """The same numbers with and without, and a report of all blocks"""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 4)).eval()
    x = torch.randn(2000, 64)
    with torch.no_grad(): y = net(x).argmax(1)
    plain, reusing = (SensitivityAnalyzer(net, x[:1], [(x[:1000], y[:1000]), (x[1000:], y[1000:])], reuse=r) for r in (False, True))
    with unchanged(net): with_reuse = reusing.sweep(levels=[50, 80], adaptive=Settle(threshold=.15), verbose=False)
    assert with_reuse == plain.sweep(levels=[50, 80], adaptive=Settle(threshold=.15), verbose=False)
    report = reusing.reuse_report
    assert report.n_reused > 8 and report.n_evaluations >= report.n_reused and "evaluations reused" in repr(report)


def test_result_is_usual(tmp_path):
    """Saved, read back, shown and ranked; no plan is made of it"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    settled = analyzer.sweep(levels=[30, 90], adaptive=Settle(threshold=.2), verbose=False)
    settled[1].to_json(tmp_path/"a.json")
    assert SensitivityResult.from_json(tmp_path/"a.json") == settled[1]
    assert settled[1].settings["adaptive"] == "threshold 0.2 by metric, error 0.05"
    assert {"n", "side"} <= set(settled.to_dataframe().columns)
    assert "n" not in analyzer.analyze(verbose=False).to_dataframe().columns
    assert settled.plot().shape == (2,) and settled[0].plot() is not None
    assert identify_critical_layers(settled[1], min_drop=.05) and settled.top(1)
    mixed = next(result for result in settled if len({r.n for r in result.layers}) > 1)
    with pytest.raises(ValueError): mixed.to_layer_targets(net, 50)
    with pytest.raises(ValueError): allocate(settled, "50%", "bytes", model=net, sample=x[:1])
    with pytest.raises(ValueError, match="and others on all"): allocate([analyzer.sweep("quantization", verbose=False), settled], "50%", "bytes", model=net, sample=x[:1])


def test_broken_units():
    """A unit whose scores are not numbers is above any threshold, and first at the top, on the first samples"""
    net, x, y = classifier()
    def breaks(preds, targs):
        lost = (net[2].weight == 0).float().mean() > .5
        return is_right(preds, targs)*(float("nan") if lost else 1.)
    analyzer = SensitivityAnalyzer(net, x[:1], evaluation((x, y), breaks))
    above = analyzer.analyze(level=80, adaptive=Settle(threshold=.3), verbose=False).layers[1]
    assert (above.side, above.n, math.isnan(above.delta)) == ("above", 32, True)
    at_top = analyzer.analyze(level=80, adaptive=Settle(top=1), verbose=False).layers
    assert [r.side for r in at_top] == ["rest", "top", "rest"] and at_top[1].n == 32


def test_at_the_door():
    """Opaque evaluations, metrics without scores of samples, and what does not go together"""
    net, x, y = classifier(200)
    def opaque(model): return (model(x).argmax(1) == y).float()
    ask = dict(adaptive=Settle(threshold=.1), verbose=False)
    with pytest.raises(TypeError, match="give data, .inputs, targets."): SensitivityAnalyzer(net, x[:1], opaque).analyze(**ask)
    means = evaluation((x, y), lambda p, t: is_right(p, t).mean())
    with pytest.raises(TypeError): SensitivityAnalyzer(net, x[:1], means).analyze(**ask)
    halves = evaluation((x, y), lambda p, t: is_right(p, t)[::2])
    with pytest.raises(ValueError, match="16 scores for 32 samples"): SensitivityAnalyzer(net, x[:1], halves).analyze(**ask)
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    with pytest.raises(ValueError): SensitivityAnalyzer(net, x[:1], evaluation((x, y), lambda p, t: 5*is_right(p, t))).analyze(
        adaptive=Settle(threshold=.1, bounds=(0, 1)), verbose=False)
    with pytest.raises(TypeError, match="the objective is one number"): SensitivityAnalyzer(net, x[:1], evaluation((x, y), is_right)).analyze(
        adaptive=Settle(threshold=.1, by="objective"), verbose=False)
    with pytest.raises(TypeError): analyzer.sweep(adaptive=.01)
    with pytest.raises(ValueError): analyzer.sweep(recalibrate=x, **ask)
    with pytest.raises(ValueError): analyzer.sweep(early_stop_mode="dropped", early_stop_value=.1, **ask)


@pytest.mark.parametrize("fault", ["raises", "interrupt", "writes"])
def test_faults_leave_no_trace(fault):
    """An error in the middle, an interrupt, and a metric that changes weights"""
    net, x, y = classifier(300)
    calls = []
    def faulty(preds, targs):
        calls.append(1)
        if len(calls) == 6:
            if fault == "raises": raise RuntimeError("no")
            if fault == "interrupt": raise KeyboardInterrupt
            with torch.no_grad(): net[0].weight.add_(1)
        return is_right(preds, targs)
    analyzer = SensitivityAnalyzer(net, x[:1], evaluation((x, y), faulty))
    expected = {"raises": RuntimeError, "interrupt": KeyboardInterrupt, "writes": ValueError}[fault]
    with unchanged(net), pytest.raises(expected): analyzer.sweep(adaptive=Settle(threshold=.02), verbose=False)


# ---- levels where curves bend

GRIDS = {"sparsity": list(range(10, 100, 10)), "quantization": [8, 7, 6, 5, 4, 3, 2], "pruning": [10, 20, 30, 40, 50, 60, 70], "low_rank": [20, 30, 40, 50, 60, 70, 80], "damping": [20, 40, 60, 80, 100]}


@pytest.mark.parametrize("name", GRIDS)
def test_refined(fifth, name):
    """Every method: within the budget, the ends among the levels, each row that of the full sweep, the same refused, no trace"""
    net, x, y = classifier(300)
    calls = []
    def counted(model):
        calls.append(1)
        with torch.no_grad(): return F.cross_entropy(model(x), y, reduction="none")
    analyzer = SensitivityAnalyzer(net, x[:1], counted, higher_is_better=False, metric_name="loss", reuse=False)
    full = analyzer.sweep(name, GRIDS[name], verbose=False)
    calls.clear()
    with unchanged(net): refined = analyzer.sweep(name, GRIDS[name], adaptive=Refine(per_unit=4), verbose=False)
    units = {r.group_id or r.name for result in full for r in result.layers if r.prunable}
    measured = {(r.group_id or r.name, result.compression_level) for result in refined for r in result.layers if r.prunable}
    assert len(measured) <= 4*len(units) and len(measured) <= len(calls) <= len(measured) + 8   # each round begins with the untouched model
    for layer in full.ranked:
        every, some = full.rows(layer), refined.rows(layer)
        assert list(some) == [level for level in every if level in some] and {min(every), max(every)} <= set(some)
        assert all(some[level] == every[level] for level in some)
    assert {pair for result in refined for pair in result.skipped} <= {pair for result in full for pair in result.skipped}
    assert refined.levels == [level for level in GRIDS[name] if level in refined.levels]
    if name == "quantization": assert {type(level) for level in refined.levels} == {int}
    assert refined[0].settings["adaptive"] == "4 levels of a unit"


def test_refined_in_plans():
    """Plans take it; so do levels of each layer, statistics estimated anew, and reuse gives the same"""
    net, x, y = classifier(300)
    plain, reusing = (SensitivityAnalyzer(net, x[:1], (x, y), reuse=r) for r in (False, True))
    refined = plain.sweep(levels=GRIDS["sparsity"], adaptive=Refine(evaluations=14), verbose=False)
    assert refined == reusing.sweep(levels=GRIDS["sparsity"], adaptive=Refine(evaluations=14), verbose=False)
    assert refined.to_layer_targets(net, 50).mean(net) == pytest.approx(50)
    assert allocate(refined, "60%", "bytes", model=net, sample=x[:1]).costs["bytes"] <= .6*sum(p.numel() for p in net.parameters())*4
    own = plain.sweep(levels={"0": [10, 20, 30], "4": [50, 60, 70, 80]}, adaptive=Refine(per_unit=3), verbose=False)
    assert len(own.rows("0")) + len(own.rows("4")) <= 6 and set(own.rows("0")) <= {10, 20, 30}
    normed = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()
    anew = SensitivityAnalyzer(normed, x[:1], (x, y)).sweep(levels=GRIDS["sparsity"], adaptive=Refine(per_unit=4), recalibrate=x, verbose=False)
    assert all(result.settings["recalibrated"] for result in anew)


def test_refined_at_the_door():
    """One level, too few evaluations, nothing that bends, and a model that breaks"""
    net, x, y = classifier(200)
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    with pytest.raises(ValueError): analyzer.analyze(adaptive=Refine(per_unit=4), verbose=False)
    with pytest.raises(ValueError, match="levels? of 3 units take 6"): analyzer.sweep(levels=[25, 50, 75], adaptive=Refine(evaluations=5), verbose=False)
    with pytest.raises(ValueError): analyzer.sweep(adaptive=Refine(per_unit=4), early_stop_mode="dropped", early_stop_value=.1, verbose=False)
    flat = SensitivityAnalyzer(net, x[:1], lambda model: .5 + 0*float(model[0].weight.sum()))
    with pytest.warns(UserWarning): found = flat.sweep(levels=GRIDS["sparsity"], adaptive=Refine(per_unit=5), verbose=False)
    assert found.levels == [10, 90]
    def breaks(model): return float("inf") if (model[2].weight == 0).float().mean() > .65 else float(model[2].weight.abs().mean() + model[0].weight.std())
    broken = SensitivityAnalyzer(net, x[:1], breaks, higher_is_better=False).sweep(levels=GRIDS["sparsity"], adaptive=Refine(per_unit=5), verbose=False)
    assert 60 in broken.rows("2") or 70 in broken.rows("2")   # close to where it breaks
