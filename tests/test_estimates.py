"""Estimates: every method and estimator on every kind of layer, without a trace, and as results that all plans take."""
import math

import pytest
import torch
import torch.nn.functional as F
from test_zoo import ZOO, fresh
from torch import nn
from toys import three_layers, unchanged
from transformers import BertConfig, BertForSequenceClassification

from fasterai_sens import Plan, SensitivityAnalyzer, SweepResult, allocate, evaluation, search_targets
from fasterai_sens.core.inputs import call, tensors_in
from fasterai_sens.measure.estimates import estimators

METHODS = {"sparsity": [40, 80], "quantization": [6, 3], "pruning": [25, 50], "low_rank": [40, 70]}


def classifier(n=64):
    """Three layers, and the classes that they find"""
    net, x = three_layers(), torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): return net, x, net(x).argmax(1)


@pytest.mark.parametrize("by", estimators)
@pytest.mark.parametrize("method", METHODS)
def test_like_a_sweep(method, by):
    """The same layers, levels, reasons and order as `sweep`; marked; it goes through JSON; nothing is left behind"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    with unchanged(net): estimate = analyzer.estimate(method, METHODS[method], by=by, verbose=False)
    sweep = analyzer.sweep(method, METHODS[method], verbose=False)
    assert estimate.levels == sweep.levels and estimate.names == sweep.names
    for guess, found in zip(estimate, sweep, strict=True):
        assert guess.skipped == found.skipped and guess.settings == found.settings | {"estimate": by}
        assert [(r.name, r.params, r.prunable, r.group_id) for r in guess.layers] == [(r.name, r.params, r.prunable, r.group_id) for r in found.layers]
        assert guess.metric_name == "estimated kl" and not guess.higher_is_better and guess.layers[0].no_ci .startswith("an estimate has no interval; `check` measures some units")
    assert SweepResult.from_dict(estimate.as_dict()) == estimate


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name):
    """Shared, tied, grouped, transposed, recurrent and attention layers: a finite number for each, and no trace"""
    case = fresh(name)
    model, sample = case.model, case.sample
    def first(out): return next(iter(tensors_in(out))).float().flatten(1)

    with torch.no_grad(): target = first(call(model, sample))

    def away(preds, targs): return (first(preds) - targs - .1).square().mean(1)

    analyzer = SensitivityAnalyzer(model, sample, evaluation([(sample, target)], away), higher_is_better=False)
    for by in estimators:
        with unchanged(model): found = analyzer.estimate("sparsity", [50], by=by, verbose=False)
        assert all(math.isfinite(r.delta) for r in found[0].layers if r.prunable), by


@pytest.mark.parametrize("method", ["sparsity", "quantization", "low_rank"])
def test_small_changes_are_predicted(method):
    """Where the damage is small, the second order is all there is: `taylor` with one sample a piece is close to the measured divergence"""
    net, x, y = classifier(400)
    for layer in net[::2]: layer.weight.data *= 2
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    mild = {"sparsity": [15], "quantization": [6], "low_rank": [30]}[method]
    guess = analyzer.estimate(method, mild, by="taylor", size=1, verbose=False)[0]
    found = analyzer.sweep(method, mild, verbose=False)[0]
    for mine, theirs in zip(guess.layers, found.layers, strict=True):
        if theirs.prunable: assert .4 < mine.delta/theirs.objective_delta < 2.5, theirs.name


def test_every_plan_takes_them():
    """Targets, bits, budgets over several methods, a search that starts from them"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    zeros, bits = analyzer.estimate("sparsity", [25, 50, 75, 90], verbose=False), analyzer.estimate("quantization", [8, 4, 3, 2], verbose=False)
    assert zeros.to_layer_targets(net, 60).mean(net) == pytest.approx(60)
    assert bits.to_bit_plan(net, target_bits=4).mean(net) <= 4
    plan = allocate([zeros, bits], "25%", "bytes", model=net, sample=x[:1], verbose=False)
    assert isinstance(plan, Plan) and plan.costs["bytes"] <= .25*plan.whole["bytes"]
    found = search_targets(net, x[:1], (x, y), 60, plans={"estimate": zeros.to_layer_targets(net, 60)}, evaluations=30, verbose=False)
    assert "estimate" in {row["plan"] for row in found.ranking}
    with pytest.raises(ValueError):
        allocate([zeros, analyzer.sweep("quantization", [8, 4], verbose=False)], "25%", "bytes", model=net, sample=x[:1], verbose=False)


def test_by_the_metric():
    """Without an objective the metric is predicted, if it has gradients, in its own direction"""
    net, x, y = classifier()

    def likelihood(preds, targs): return -F.cross_entropy(preds, targs, reduction="none")

    found = SensitivityAnalyzer(net, x[:1], evaluation((x, y), likelihood), metric_name="likelihood").estimate(levels=[80], verbose=False)[0]
    assert found.metric_name == "estimated likelihood" and found.higher_is_better
    assert all(r.compressed_metric == pytest.approx(r.baseline_metric - r.delta) for r in found.layers)


def test_own_levels_and_layers():
    """A dict of levels estimates those layers at those levels; layers and layer_types choose"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    own = analyzer.estimate(levels={"0": [25, 50], "4": [50]}, verbose=False)
    assert {r.compression_level: [row.name for row in r.layers] for r in own} == {25: ["0"], 50: ["0", "4"]}
    assert analyzer.estimate(levels=[50], layers=["2"], verbose=False).names == ["2"]


def test_check_says_when_not_to_trust():
    """Units measured beside: a warning if their order is another, none if it is the same; the evaluations it takes"""
    torch.manual_seed(1)
    layers = [layer for i in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(16, 4)).eval()
    for i, layer in enumerate(net[:-1:2]): layer.weight.data = torch.eye(16)*2 + (i + 1)*.05*torch.randn(16, 16)
    x = torch.randn(300, 16)
    with torch.no_grad(): y = net(x).argmax(1)
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    found = analyzer.estimate("quantization", [5, 4], check=9, verbose=False).agreement
    assert len(found.units) == 9 and found.spearman_ci[0] <= found.spearman <= found.spearman_ci[1]
    assert found.estimated == sorted(found.estimated)
    measured = analyzer.sweep("quantization", [5, 4], layers=found.units, verbose=False)
    means = [sum(r.objective_delta for r in measured.rows(name).values())/2 for name in found.units]
    assert means == pytest.approx(found.measured)
    net2, x2, y2 = classifier()
    with pytest.warns(UserWarning, match="the order of this estimate"):   # three units prove nothing
        SensitivityAnalyzer(net2, x2[:1], (x2, y2)).estimate(levels=[50], check=3, verbose=False)


def test_nothing_warns_unless_it_checks(capsys, recwarn):
    """Without `check` nothing is measured, and the summary says how to know more"""
    net, x, y = classifier()
    SensitivityAnalyzer(net, x[:1], (x, y)).estimate(levels=[50], verbose=False)[0].summary()
    assert "no interval; `check` measures some units beside it" in capsys.readouterr().out and not recwarn.list
    said = " ".join(SensitivityAnalyzer.estimate.__doc__.split())
    assert "0: nothing is measured, and nothing warns" in said and "check once before you rely on an order" in said


def test_hugging_face():
    """Batches that are dicts, outputs with named parts, embeddings and attention"""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3)).eval()
    inputs = dict(input_ids=torch.randint(50, (40, 12)), attention_mask=torch.ones(40, 12, dtype=torch.long))
    labels = torch.randint(3, (40,))
    analyzer = SensitivityAnalyzer(model, {k: v[:1] for k, v in inputs.items()}, [(inputs, labels)])
    for by in estimators:
        with unchanged(model): found = analyzer.estimate("sparsity", [50, 90], by=by, verbose=False)
        assert all(r.delta > -1e-9 for r in found[1].layers) and max(r.delta for r in found[1].layers) > 0


def test_at_the_door():
    """Said before anything is computed"""
    net, x, y = classifier()
    analyzer = SensitivityAnalyzer(net, x[:1], (x, y))
    with pytest.raises(KeyError, match="unknown by 'fischer'"): analyzer.estimate(by="fischer", verbose=False)
    with pytest.raises(ValueError, match="check"): analyzer.estimate(check=-1)
    with pytest.raises(ValueError, match="size"): analyzer.estimate(size=0)
    with pytest.raises(TypeError, match="takes no option"): analyzer.estimate("quantization", granularity="row")
