"""Repeated calls of an evaluation that returns one number: how often intervals hold the truth, what is said of its noise, and nothing lost."""
import json
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

from fasterai_sens import Refine, SensitivityAnalyzer, SensitivityResult, Settle, analyze_sensitivity
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.results import noise_text
from fasterai_sens.core.signals import limited
from fasterai_sens.methods.sparsify import Sparse


def network():
    """A small classifier with batch norm, and data on which it is right"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(300, 8)
    return net, x, net(x).argmax(1)


everything = slice(None)   # of the samples


def accuracy(model, of=everything):
    """One number"""
    _, x, y = network_data
    with torch.no_grad():
        return (model(x[of]).argmax(1) == y[of]).float().mean().item()


network_data = network()


class Drawn:
    """Accuracy on samples that are drawn at random, with a count of its calls; at one of them it does something else"""
    known_as = "accuracy of a few"   # which call goes wrong is no part of it

    def __init__(self, at=None, instead=None):
        self.n, self.at, self.instead = 0, at, instead

    def __call__(self, model):
        self.n += 1
        few = torch.randint(300, (100,))
        if self.n == self.at:
            return self.instead()
        return accuracy(model, few)


def sweep(eval_fn, *, levels=(50, 90), reuse=False, **options):
    """Each layer at two levels, with a network of its own"""
    net, x, _ = network()
    return SensitivityAnalyzer(net, x[:1], eval_fn, reuse=reuse).sweep("sparsity", levels, verbose=False, **options)


def plain(found):
    """All numbers, to compare to the bit"""
    return repr([result.as_dict() for result in found])


class Noisy:
    """The sum of the weights of a layer, and chance from a generator of its own"""

    def __init__(self, seed, spread):
        self.chance, self.spread = np.random.default_rng(seed), spread

    def __call__(self, model):
        return model.weight.sum().item() + self.chance.normal(0, self.spread)


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_intervals_cover(repeats):
    """The loss is 3 of 4; chance moves each call, with a spread that nobody is told"""
    layer, held, shares = nn.Linear(2, 1, bias=False), 0, 0
    layer.weight.data = torch.tensor([[3., 1.]])
    analyzer = SensitivityAnalyzer(layer, torch.ones(1, 2), Noisy(0, 1.), reuse=False)
    for _ in range(400):
        row = analyzer.analyze(level=50, repeats=repeats, verbose=False).layers[0]
        low, high = row.ci
        held += low <= 1 <= high
        shares += row.stderr**2
    assert 368 < held <= 400                                           # .92; of 400 draws at 95 % one standard error is .011
    assert shares / 400 == pytest.approx(2 / repeats, rel=.15)        # the variance of a difference of two means


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_each_evaluation_is_so_many_calls(repeats):
    """The untouched model and each layer at each level; the mean of calls that draw the same numbers for each layer"""
    eval_fn = Drawn()
    found = sweep(eval_fn, repeats=repeats)
    assert eval_fn.n == repeats * (1 + 2 * 3)
    assert all((row.ci is None) == (repeats == 1) for result in found for row in result.layers)
    calls = found[0].baseline_calls
    assert calls is None if repeats == 1 else len(calls) == repeats
    assert plain(found) == plain(sweep(Drawn(), repeats=repeats))


def test_first_calls_are_those_of_one():
    """The first of several calls draws what the only one would have drawn"""
    seen = []

    def few(model):
        seen.append(torch.rand(()).item())
        return 1.
    for n in (1, 3):
        sweep(few, levels=[50], repeats=n)
    assert len(set(seen[:4])) == 1 and seen[4] == seen[0] and len({*seen[4:]}) == 3


def test_a_metric_that_is_always_the_same():
    """It is said so, no interval is made up, and all numbers are those of single calls"""
    once, thrice = sweep(accuracy), sweep(accuracy, repeats=3)
    for one, three in zip(once, thrice, strict=True):
        for a, b in zip(one.layers, three.layers, strict=True):
            assert (a.compressed_metric, a.delta, b.ci, b.stderr) == (b.compressed_metric, b.delta, None, None)
            assert "no noise of its own" in b.no_ci and "one number" in a.no_ci
    assert noise_text(thrice).startswith("eval_fn is deterministic") and noise_text(once) == ""


def test_statistics_that_an_evaluation_moves_are_no_noise():
    """Each call begins with the model as it was"""
    def in_training(model):
        model.train()
        return accuracy(model)
    assert noise_text(sweep(in_training, repeats=3)).startswith("eval_fn is deterministic")


def test_what_is_said_of_noise(capsys):
    """Where repeated calls lie, in the summary, in HTML, in a report and in the file"""
    result = sweep(Noisier(), repeats=4)[0]
    text, calls = noise_text([result]), result.baseline_calls
    assert f"4 calls on the untouched model lie {max(calls) - min(calls):.4g} apart" in text
    result.summary()
    assert text in capsys.readouterr().out and text in result._repr_html_() and ("noise", text) in result.report_section().parts[0].pairs
    back = SensitivityResult.from_dict(json.loads(json.dumps(result.as_dict())))
    assert back.as_dict() == result.as_dict() and back.baseline_calls == calls
    with pytest.raises(TypeError):
        SensitivityResult.from_dict(result.as_dict() | {"baseline_calls": "0.5"})


def test_ranks_by_noise():
    """Damages that lie close together share a rank, one that is far from them does not; without repeats each has its own"""
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1), nn.Linear(1, 1))
    for layer, weight in zip(net, ([[100., 50.]], [[1.]], [[1.05]]), strict=True):
        layer.weight.data = torch.tensor(weight)
    chance = np.random.default_rng(0)

    def total(model):
        return sum(layer.weight.sum().item() for layer in model) + chance.normal(0, 1.)
    analyzer = SensitivityAnalyzer(net, torch.ones(1, 2), total, reuse=False)
    assert list(analyzer.analyze(Sparse(100), repeats=4, verbose=False).ranks().values()) == ["1", "2=", "2="]
    assert list(analyzer.analyze(Sparse(100), verbose=False).ranks().values()) == ["1", "2", "3"]


def test_two_quantities():
    """Both of a pair have intervals; a metric that rounds hides nothing of the other"""
    def pair(model):
        few = torch.randint(300, (100,))
        return 1., 1 - accuracy(model, few)
    result = sweep(pair, repeats=4)[1]
    assert all(row.objective_ci is not None and row.ci is None for row in result.layers)
    assert "not deterministic" in noise_text([result])


def test_no_trace():
    """Neither of the model nor of random numbers"""
    net, x, _ = network()
    before = fingerprint(net)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    SensitivityAnalyzer(net, x[:1], Drawn()).analyze(level=50, repeats=3, verbose=False)
    assert changes(before, fingerprint(net)) == []
    assert torch.equal(states[0], torch.get_rng_state()) and states[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002


@pytest.mark.parametrize("options", [dict(reuse=True), pytest.param(dict(n_jobs=2), marks=pytest.mark.slow), pytest.param(dict(n_jobs=2, reuse=True), marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:eval_fn gives the model other inputs")
def test_to_the_bit(options):
    """Whoever makes the calls"""
    torch.manual_seed(3)
    expected = plain(sweep(Drawn(), repeats=3))
    torch.manual_seed(3)
    assert plain(sweep(Drawn(), repeats=3, **options)) == expected


class Ends(BaseException):
    """What no code of ours catches"""


def end():
    """Stop here"""
    raise Ends


@pytest.mark.parametrize("at", [2, 3, 4, 8, 12, 21])
def test_ended_and_taken_up_again(at, tmp_path):
    """The same result, and nothing evaluated twice but the baseline and what was in flight"""
    path, whole = tmp_path / "repeats.jsonl", plain(sweep(Drawn(), repeats=3))
    with pytest.raises(Ends):
        sweep(Drawn(at, end), repeats=3, journal=path)
    rest = Drawn()
    assert plain(sweep(rest, repeats=3, journal=path)) == whole
    assert rest.n == 3 + 21 - max(3, 3 * ((at - 1) // 3))


def test_a_journal_of_noise(tmp_path):
    """The baseline that measurements were compared with stays the one; another number of calls is another measurement"""
    path = tmp_path / "noise.jsonl"
    torch.manual_seed(1)
    whole = plain(sweep(Noisier(), repeats=3, journal=path))
    assert plain(sweep(Noisier(7), repeats=3, journal=path)) == whole
    for repeats in (1, 4):
        with pytest.raises(ValueError, match="settings repeats was 3"):
            sweep(Noisier(), repeats=repeats, journal=path)
    with pytest.raises(ValueError):
        for seed in (0, 1):
            sweep(Noisier(seed), journal=tmp_path / "once.jsonl")


class Noisier:
    """Accuracy with chance of its own, that no seed of ours sets"""

    def __init__(self, seed=0):
        self.chance = np.random.default_rng(seed)

    def __call__(self, model):
        return accuracy(model) + self.chance.normal(0, .01)


def test_a_call_that_fails(tmp_path):
    """It leaves its layer out, as a single one would; a limit of time is for each call; NaN is the worst, and no baseline"""
    def fail():
        raise MemoryError("too large")
    found = sweep(Drawn(3 + 2, fail), levels=[50], repeats=3, on_error="skip")[0]
    assert [name for name, why in found.skipped if "MemoryError" in why] == ["0"] and [row.name for row in found.layers if row.prunable] == ["3", "5"]
    broken = sweep(Drawn(3 + 2, lambda: float("nan")), levels=[50], repeats=3)[0]
    assert broken.top(1)[0].name == "0" and broken.layers[0].delta != broken.layers[0].delta
    with pytest.raises(ValueError):
        sweep(Drawn(2, lambda: float("nan")), repeats=3)

    def slow(model):
        time.sleep(.03)
        return 1.
    with limited(.5):
        sweep(slow, levels=[50], repeats=20)   # .6 seconds for each layer


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "3", None])
def test_what_is_no_number_of_calls(wrong):
    """Before anything is evaluated"""
    net, x, _ = network()
    eval_fn = Drawn()
    analyzer = SensitivityAnalyzer(net, x[:1], eval_fn)
    for call in (analyzer.analyze, analyzer.sweep, lambda **kw: analyze_sensitivity(net, x[:1], eval_fn, **kw)):
        with pytest.raises(ValueError, match="repeats"):
            call(repeats=wrong, verbose=False)
    assert eval_fn.n == 0


def test_what_needs_no_repeats():
    """Scores of samples, and measurements that choose as they go"""
    net, x, y = network()
    for eval_fn in ((x, y), lambda m: (m(x).argmax(1) == y).float(), lambda m: (1., m(x).sum(1).detach())):
        with pytest.raises(ValueError):
            SensitivityAnalyzer(net, x[:1], eval_fn).analyze(repeats=2, verbose=False)
    for adaptive in (Settle(top=1), Refine(per_unit=3)):
        with pytest.raises(ValueError):
            SensitivityAnalyzer(net, x[:1], (x, y)).sweep(repeats=2, adaptive=adaptive, verbose=False)
