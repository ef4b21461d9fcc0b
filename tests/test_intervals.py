"""Intervals hold the truth as often as they say, and everything that has an interval has this one."""
import json
import math
import random
import runpy
import sys
import warnings
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import t as student
from torch import nn

from fasterai_sens import (
    SensitivityAnalyzer,
    SensitivityResult,
    analyze_degradation,
    analyze_sensitivity,
    evaluation,
    kl_from,
    search_targets,
    validate_compression_target,
)
from fasterai_sens.core.results import holds_zero
from fasterai_sens.measure.intervals import mean_interval, paired_interval, sequence_scores, tango_interval
from fasterai_sens.measure.scores import as_score, compare, why_no_ci
from fasterai_sens.plans.meter import rank_plans

matplotlib.use("agg")


def scores(values):
    """A `Score` of an array."""
    return as_score(np.asarray(values, float))


# ---------------------------------------------------------------- right and wrong

@pytest.mark.parametrize("lost,won,n,z,published", [
    (9, 3, 32, 1.96, (-.027, .390)),        # Tango 1998, 6.2
    (0, 1, 44, 1.6449, (-.096, None)),      # Tango 1998, 6.1, at 90 %
    (60, 20, 1000, 1.96, (.0231, .0584)),   # R, PropCIs::scoreci.mp
    (1, 7, 21, 1.96, (-.517, -.026)),       # Fagerland, Lydersen and Laake 2014, airway reactivity
])
def test_published_numbers(lost, won, n, z, published):
    """The examples in the paper and what another implementation gives."""
    for mine, theirs in zip(tango_interval(lost, won, n, z), published, strict=True):
        assert theirs is None or mine == pytest.approx(theirs, abs=1e-3)


def surprise(d, lost, won, n):
    """Tango's statistic at a true difference `d`, the likeliest share won found by search."""
    def unlikely(share): return -sum(k*math.log(max(p, 1e-300)) for k, p in ((lost, share + d), (won, share), (n - lost - won, 1 - 2*share - d)) if k)
    low, high = max(0, -d), (1 - d)/2
    share = minimize_scalar(unlikely, bounds=(low, high), method="bounded", options=dict(xatol=1e-12)).x
    return (lost - won - n*d)/math.sqrt(n*(2*share + d*(1 - d)))


@pytest.mark.parametrize("lost,won,n", [(1, 0, 50), (4, 4, 30), (12, 5, 300), (0, 9, 40), (30, 1, 33), (100, 60, 1000)])
def test_ends_are_where_the_score_statistic_says(lost, won, n):
    """Found anew by root finding over a likelihood that is maximised by search."""
    d = (lost - won)/n
    low = brentq(lambda x: surprise(x, lost, won, n) - 1.96, -.9999, d - 1e-9)
    high = brentq(lambda x: surprise(x, lost, won, n) + 1.96, d + 1e-9, .9999)
    assert tango_interval(lost, won, n) == pytest.approx((low, high), abs=2e-5)


def test_width_without_flips():
    """Whatever stands for right and wrong, and however many samples there are, nothing that flipped is no certainty."""
    for n in (1, 2, 20, 1000):
        low, high = compare(scores(np.ones(n)), scores(np.ones(n)))[2]
        assert (-low, high) == pytest.approx([3.8416/(n + 3.8416)]*2)
    mixed = np.r_[np.zeros(30), np.ones(70)]
    for low_value, high_value in ((0, 100), (-1, 1), (1, 2), (-5, 0)):
        two = low_value + (high_value - low_value)*mixed
        ci = compare(scores(two), scores(two))[2]
        assert ci == pytest.approx(tuple((high_value - low_value)*end for end in tango_interval(0, 0, 100)))
    for one in (100., 0., -1., .7):
        low, high = compare(scores(np.full(50, one)), scores(np.full(50, one)))[2]
        assert (-low, high) == pytest.approx([(abs(one) or 1)*3.8416/53.8416]*2)
    losses = np.random.default_rng(0).exponential(1, 50)
    low, high = compare(scores(losses), scores(losses))[2]
    assert (-low, high) == pytest.approx([np.ptp(losses)*3.8416/53.8416]*2)


@pytest.mark.parametrize("lost,won,n", [(.003, 0, 300), (.01, 0, 100), (.01, .005, 300), (.03, .01, 100), (.03, .01, 1000)])
def test_accuracy_covers(lost, won, n):
    """The cases in which Student's t holds the truth in 60 to 90 % of all draws."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(1000):
        down, up, _ = rng.multinomial(n, [lost, won, 1 - lost - won])
        base = np.r_[np.ones(n - up), np.zeros(up)]
        other = np.r_[np.zeros(down), np.ones(n - down)]
        low, high = paired_interval(base, other)[0]
        held += low <= lost - won <= high
    assert held > 930


# ---------------------------------------------------------------- any other scores

def by_hand(d):
    """Student's t with Hall's arm, by a search for the longest arm."""
    n, scale = len(d), d.std(ddof=1)
    q, skew = student.ppf(.975, n - 1), n/((n - 1)*(n - 2))*(((d - d.mean())/scale)**3).sum()
    h = 1.5*abs(skew)/math.sqrt(n)
    arms = [3*(1 - np.cbrt(1 - x*(q + x/6)))/x for x in np.linspace(1e-3, h, 20_000)] if h > 1e-3 else []
    long, half = max([q, *arms]), scale/math.sqrt(n)
    return (d.mean() - q*half, d.mean() + long*half) if skew > 0 else (d.mean() - long*half, d.mean() + q*half)


@pytest.mark.parametrize("n", [3, 8, 20, 500])
def test_the_formula(n):
    """Against a slow computation of its own."""
    rng = np.random.default_rng(n)
    for d in (rng.normal(0, 1, n), rng.exponential(1, n), -rng.lognormal(0, 1.5, n), rng.uniform(2, 3, n)):
        low, high = by_hand(d)
        assert mean_interval(d) == pytest.approx((low, high), abs=2e-3*(high - low))


DAMAGE = {
    "normal": (lambda rng, n: rng.normal(.3, 1, n), .3),
    "exponential": (lambda rng, n: rng.exponential(1, n), 1),
    "lognormal": (lambda rng, n: rng.lognormal(0, 1, n), math.exp(.5)),
    "lognormal, sigma 1.5": (lambda rng, n: rng.lognormal(0, 1.5, n), math.exp(1.125)),
    "minus exponential": (lambda rng, n: -rng.exponential(1, n), -1),
    "rare": (lambda rng, n: rng.lognormal(0, 1, n)*(rng.random(n) < .1), .1*math.exp(.5)),
    "either sign": (lambda rng, n: np.where(rng.random(n) < .7, 1, -1)*rng.lognormal(0, 1, n), .4*math.exp(.5)),
}


@pytest.mark.parametrize("n", [20, 100])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_covers(name, n):
    """Within what is promised, less three standard errors of 1000 draws."""
    draw, truth = DAMAGE[name]
    rng, held = np.random.default_rng(2), 0
    for _ in range(1000):
        base = rng.exponential(1, n)
        low, high = paired_interval(base, base - draw(rng, n))[0]
        held += low <= truth <= high
    assert .91 < held/1000 < 1 if name == "rare" else .93 <= held/1000 <= .99


def test_units_signs_and_places():
    """In other units, the other way round, from another baseline, in another order it is the same interval."""
    rng = np.random.default_rng(3)
    for d in (rng.exponential(1, 30), rng.normal(0, 1, 30), rng.lognormal(0, 2, 30)):
        low, high = mean_interval(d)
        assert low < d.mean() < high
        assert mean_interval(-d) == (-high, -low)
        assert mean_interval(1024*d) == (1024*low, 1024*high)
        assert mean_interval(d + 5) == pytest.approx((low + 5, high + 5))
        assert mean_interval(rng.permutation(d)) == pytest.approx((low, high))
        assert mean_interval(1e200*d) == pytest.approx((1e200*low, 1e200*high)) and mean_interval(1e-200*d) == pytest.approx((1e-200*low, 1e-200*high))
        base = rng.normal(0, 1, 30)
        up, down = compare(scores(base), scores(base - d)), compare(scores(base), scores(base - d), higher_is_better=False)
        assert down[2] == (-up[2][1], -up[2][0]) and down[:2] == (-up[0], up[1])


def test_nothing_is_drawn():
    """No random number is taken from anywhere, and twice the same comes out."""
    d = np.random.default_rng(4).exponential(1, 40)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)   # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()   # noqa: NPY002
    assert paired_interval(d, 0*d) == paired_interval(d, 0*d)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1:] == (np.random.get_state()[1].tolist(), random.getstate())   # noqa: NPY002


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_few_samples(n):
    """Two samples give no interval; from three on there is one that is wider than Student's."""
    d = np.random.default_rng(5).exponential(1, n)
    ci, why = paired_interval(d, 0*d)
    if n == 2: return check_withheld(ci, why, "2 samples cannot show")
    half = student.ppf(.975, n - 1)*d.std(ddof=1)/math.sqrt(n)
    assert why is None and ci[0] <= d.mean() - half + 1e-9 and ci[1] >= d.mean() + half - 1e-9


def check_withheld(ci, why, words):
    """No interval, and the reason."""
    assert ci is None and words in why


def test_the_same_damage_to_all():
    """Nothing varies, so nothing tells how far the next sample may be; also where only rounding varies."""
    base = np.random.default_rng(6).exponential(1, 100)
    for other in (base - .1, base + 1e3):
        check_withheld(*paired_interval(base, other), "all 100 samples changed by the same")
    delta, stderr, ci = compare(scores(base), scores(base - .1))
    assert (delta, ci) == (pytest.approx(.1), None) and stderr < 1e-12 and "changed by the same" in why_no_ci(scores(base), scores(base - .1))
    assert paired_interval(np.ones(100), np.zeros(100))[0] == tango_interval(100, 0, 100)   # right and wrong: all lost, which is another thing


def test_numbers_that_are_none():
    """As a metric that breaks always was."""
    base, broken = scores(np.linspace(0, 1, 9)), scores(np.r_[np.linspace(0, 1, 8), math.nan])
    delta, stderr, ci = compare(base, broken)
    assert all(map(math.isnan, (delta, stderr, *ci))) and compare(base, base) == (0, base.samples.std(ddof=1)*0, (0, 0))


# ---------------------------------------------------------------- tokens

def test_tokens_of_a_sequence():
    """A matrix, or a list where lengths differ: the mean over tokens, with the sequence as the sample."""
    rng = np.random.default_rng(7)
    base, other = rng.normal(0, 1, (30, 16)), rng.normal(0, 1, (30, 16))
    delta, stderr, ci = compare(as_score(torch.tensor(base)), as_score(torch.tensor(other)))
    d = (base - other).mean(1)
    assert delta == pytest.approx(d.mean()) and stderr == pytest.approx(d.std(ddof=1)/30**.5) and ci == pytest.approx(mean_interval(d))
    lengths = rng.integers(3, 40, 25)
    parts = [[torch.tensor(rng.normal(0, 1, k)) for k in lengths] for _ in range(2)]
    first, second = map(as_score, parts)
    assert first.value == pytest.approx(torch.cat(parts[0]).mean().item()) and first.samples.mean() == pytest.approx(first.value)
    delta, stderr, ci = compare(first, second)
    sums = np.array([(a - b).sum().item() for a, b in zip(*parts, strict=True)])
    ratio = sums.sum()/lengths.sum()
    assert delta == pytest.approx(ratio) and stderr == pytest.approx((sums - ratio*lengths).std(ddof=1)/lengths.mean()/25**.5)
    assert ci == pytest.approx(mean_interval(sequence_scores(sums, lengths)))


def test_sequences_cover_and_tokens_do_not():
    """With effects of whole sequences, also where long ones lose more."""
    rng = np.random.default_rng(8)
    for ragged in (False, True):
        held = {"tokens": 0, "sequences": 0}
        for _ in range(400):
            lengths = rng.integers(16, 113, 30) if ragged else np.full(30, 64)
            effect = rng.exponential(1, 30) + .01*(lengths - 64)
            parts = [torch.tensor(e + rng.normal(0, 1, k)) for e, k in zip(effect, lengths, strict=True)]
            truth = 1 + .01*784/64*ragged
            for unit, loss in (("tokens", torch.cat(parts)), ("sequences", parts)):
                low, high = compare(as_score([0*p for p in loss] if unit == "sequences" else 0*loss), as_score(loss), higher_is_better=False)[2]
                held[unit] += low <= truth <= high
        assert held["tokens"] < 160 and .92*400 < held["sequences"] <= .995*400


def test_shapes_of_tokens():
    """What is one thing is taken as one thing, and what cannot be compared is refused."""
    right = torch.tensor([1., 0., 1., 1.])
    assert compare(as_score(right[:, None]), as_score(right[:, None]))[2] == tango_interval(0, 0, 4)
    assert compare(as_score(list(right.split(1))), as_score(1 - right[:, None]))[2] == tango_interval(3, 1, 4)
    with pytest.raises(ValueError, match="20 scores in 4 sequences first and 24 scores in 4 sequences later"): compare(as_score(torch.ones(4, 5)), as_score(torch.ones(4, 6)))
    with pytest.raises(ValueError, match="6 scores in 2 sequences first and 6 scores in 2 sequences later"): compare(as_score([torch.ones(2), torch.ones(4)]), as_score([torch.ones(4), torch.ones(2)]))
    with pytest.raises(ValueError): compare(as_score(torch.ones(4)), as_score(torch.ones(4, 2)))
    same = compare(as_score(torch.ones(4, 5)), as_score(torch.ones(4, 5)))[2]
    assert same == tango_interval(0, 0, 4)   # a sequence may change as a whole
    means = torch.tensor([[1., 0.], [1., 1.], [1., 0.], [0., 1.]])   # means of .5 and 1, which are not wrong and right
    assert compare(as_score(means), as_score(means.roll(1, 0)))[2] == mean_interval(np.array([0, .5, -.5, 0]) * -1)


def test_a_language_model_is_judged_by_its_sequences():
    """Analysis, sweep and objective of a model of tokens, by the loss of each token."""
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)), torch.randint(0, 12, (10, 7)), torch.randint(0, 12, (10, 7))

    def loss(p, t): return nn.functional.cross_entropy(p.transpose(1, 2), t, reduction="none")

    res = SensitivityAnalyzer(net, x[:1], evaluation((x, y), loss, loss), higher_is_better=False).analyze(level=80, layers=["1"], verbose=False)
    row, weight = res.layers[0], net[1].weight.detach().clone()
    with torch.no_grad():
        before = loss(net(x), y).mean(1).double().numpy()
        net[1].weight.flatten()[weight.abs().flatten().argsort()[:int(.8*weight.numel())]] = 0
        after = loss(net(x), y).mean(1).double().numpy()
        net[1].weight.copy_(weight)
    assert row.delta == pytest.approx((after - before).mean(), abs=1e-6) and row.ci == pytest.approx(mean_interval(after - before), abs=1e-5)
    assert row.objective_delta == pytest.approx(row.delta, abs=1e-6)
    assert kl_from(net, x)(net).shape == (10,)


def test_tokens_that_count_one_by_one_are_noticed():
    """By `evaluation`, which knows how many samples there are; any other vector is taken as it is."""
    x = torch.randint(0, 6, (5, 8))
    net, images = nn.Embedding(6, 6), torch.randn(5, 3, 4, 4)
    flat = evaluation((x, x), lambda p, t: nn.functional.cross_entropy(p.flatten(0, 1), t.flatten(), reduction="none"))
    with pytest.warns(UserWarning, match="returned 40 scores for 5 samples.*scores.reshape\\(5, -1\\)"): assert flat(net).shape == (40,)
    pixels = evaluation((images, images), lambda p, t: (p.argmax(1) == t.argmax(1)).flatten())
    with pytest.warns(UserWarning, match="returned 80 scores for 5 samples"): pixels(nn.Conv2d(3, 3, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reduce in (lambda s: s.reshape(5, -1), lambda s: s.reshape(5, -1).mean(1), lambda s: s.mean()):
            evaluation((x, x), lambda p, t, reduce=reduce: reduce((p.argmax(-1) == t).float().flatten()))(net)
        evaluation((images.mean((2, 3)), images), lambda p, t: p.flatten())(nn.Linear(3, 2))   # two outputs for each sample are no tokens


# ---------------------------------------------------------------- everything that has an interval

def small_net():
    """Two layers on made-up data that it fits."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)), torch.randn(120, 6)
    with torch.no_grad(): return net, x, net(x).argmax(1)


def test_all_places_have_it(capsys):
    """Analysis, sweep, search, degradation and verdict, with 0/1 scores and a level that flips nothing: the paired score interval."""
    net, x, y = small_net()

    def correct(m):
        with torch.no_grad(): return m(x).argmax(1) == y

    nothing = tango_interval(0, 0, 120)
    rows = analyze_sensitivity(net, x[:1], correct, level=3, verbose=False).layers
    assert [r.ci for r in rows] == [nothing]*2 and all(r.stderr == 0 and holds_zero(r) and r.no_ci is None for r in rows)
    for result in SensitivityAnalyzer(net, x[:1], correct).sweep(levels=[50, 90], verbose=False):
        for r in result.layers:
            flips = round(120*r.delta)   # all were right
            assert r.ci == pytest.approx(tango_interval(flips, 0, 120))
    curve = SensitivityAnalyzer(net, x[:1], correct).sweep(levels=[3, 90], verbose=False).curve("0")
    assert list(curve.columns) == ["metric", "delta", "stderr", "low", "high"] and (curve.low[3], curve.high[3]) == nothing
    found = search_targets(net, x[:1], correct, 60, verbose=False)
    for row in found.ranking: assert (row["low"], row["high"]) == pytest.approx(tango_interval(round(120*row["delta"]), 0, 120)) and row["no_ci"] is None
    curve = analyze_degradation(net, x[:1], correct, [90, 50], "sparsity", cost="params", verbose=False, runs=0)
    for p in curve: assert p.ci == pytest.approx(tango_interval(round(120*p.drop), 0, 120))
    verdict = validate_compression_target(small_net()[0], net, correct, .01)
    assert verdict.ci == nothing and verdict.verdict == "not enough data to tell" and verdict.more_samples == 381 - 120   # 3.84/(n + 3.84) is below .01
    found.summary()
    curve.summary()
    SensitivityResult("sparsity", 50, 1., rows).summary()
    low, high = (f"{end:+.4f}" for end in nothing)
    assert f"[{low}, {high}]" in capsys.readouterr().out


def test_rankings_have_the_interval_of_other_scores():
    """Also where lower is better."""
    rng = np.random.default_rng(9)
    dense, plan = scores(rng.exponential(1, 60)), scores(rng.exponential(1.5, 60))
    row = rank_plans({"a": plan}, {"a": plan}, dense, False, {"a": {}})[0]
    assert (row["low"], row["high"]) == mean_interval(plan.samples - dense.samples)


def test_no_interval_is_explained(capsys, tmp_path):
    """One number for the metric: no interval in any place, and the reason beside it, in files too."""
    net, x, y = small_net()

    def accuracy(m):
        with torch.no_grad(): return (m(x).argmax(1) == y).float().mean()

    res = analyze_sensitivity(net, x[:1], accuracy, verbose=False)
    assert all(r.ci is None and "the metric is one number" in r.no_ci for r in res.layers)
    res.to_json(tmp_path/"r.json")
    assert SensitivityResult.from_json(tmp_path/"r.json") == res
    old = json.loads((tmp_path/"r.json").read_text())
    for row in old["layers"]: del row["no_ci"]   # a file of an earlier version
    (tmp_path/"old.json").write_text(json.dumps(old))
    assert SensitivityResult.from_json(tmp_path/"old.json").layers[0].no_ci is None
    found = search_targets(net, x[:1], accuracy, 60, verbose=False)
    curve = analyze_degradation(net, x[:1], accuracy, [50], "sparsity", cost="params", verbose=False, runs=0)
    assert all(r["low"] is None and "one number" in r["no_ci"] for r in found.ranking) and "one number" in curve[0].no_ci
    for printed in (res, found, curve):
        printed.summary()
        assert "no 95 % interval" in (out := capsys.readouterr().out) and "the metric is one number" in out
    few = analyze_sensitivity(net, x[:1], lambda m: m(x[:2]).detach().abs().sum(1), verbose=False)
    assert all(r.ci is None and r.stderr > 0 and "2 samples cannot show" in r.no_ci for r in few.layers)
    same = validate_compression_target(net, torch.linspace(0, 1, 50), lambda m: torch.linspace(0, 1, 50, dtype=torch.float64) - .1, .2)
    assert same.verdict == "not enough data to tell" or same.ci is not None
    exact = np.linspace(0, 1, 50)
    same = validate_compression_target(net, exact, lambda m: exact - .1, .2)
    assert (same.verdict, same.ci) == ("not enough data to tell", None) and "changed by the same" in same.no_ci and same.no_ci in same.advice[0]


def test_grey_where_the_interval_holds_zero():
    """In the bars of one level and the heat map of several; without an interval nothing is grey."""
    net, x, y = small_net()

    def correct(m):
        with torch.no_grad(): return m(x).argmax(1) == y

    sweep = SensitivityAnalyzer(net, x[:1], correct).sweep(levels=[3, 95], verbose=False)
    noise = [[holds_zero(r) for r in result.layers] for result in sweep]
    assert noise == [[True]*2, [False]*2]
    grey = matplotlib.colors.to_rgba("0.8")
    for result, expected in zip(sweep, noise, strict=True): assert [bar.get_facecolor() == grey for bar in result.plot().patches] == expected
    axes = sweep.plot()
    assert (~np.isnan(np.ma.filled(axes[0].images[1].get_array(), np.nan))).T.tolist() == noise and "grey" in axes[0].get_title()
    for result in sweep:
        for r in result.layers: r.ci = None
    assert len(sweep.plot()[0].images) == 1 and not any(bar.get_facecolor() == grey for bar in sweep[0].plot().patches)
    plt.close("all")


def test_the_benchmark_runs(monkeypatch, capsys):
    """Few draws, all tables."""
    script = str(Path(__file__).parent.parent/"benchmarks/intervals.py")
    monkeypatch.setattr(sys, "argv", [script, "--repetitions", "20"])
    runpy.run_path(script, run_name="__main__")
    out = capsys.readouterr().out
    assert all(word in out for word in ("accuracy", "lognormal, sigma 1.5", "sequences as samples", "withheld", "milliseconds"))
