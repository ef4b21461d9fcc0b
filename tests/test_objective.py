"""A second quantity beside the metric, what plans make of it, and sweeps in all their forms."""

import copy
import itertools
import json
import math

import fastai.callback.progress  # noqa: F401
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import F1Score, accuracy
from scipy.optimize import isotonic_regression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Net

from fasterai_sens import (
    Divergence,
    LayerSensitivity,
    SensitivityAnalyzer,
    SensitivityResult,
    Sparse,
    SweepResult,
    analyze_sensitivity,
    changes,
    evaluation,
    fingerprint,
)
from fasterai_sens.core.results import damage, plan_basis
from fasterai_sens.measure.learner import learner_eval
from fasterai_sens.measure.scores import as_score

NAN, INF = math.nan, math.inf


def correct(preds, targs):
    """Which answers are right"""
    return preds.argmax(1) == targs


@pytest.fixture
def net():
    """A small convolutional network with batch norm and dropout"""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(6 * 4, 8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


@pytest.fixture
def data(net):
    """Images, and labels that the network mostly gets right"""
    torch.manual_seed(1)
    x = torch.randn(50, 1, 4, 4)
    with torch.no_grad():
        y = net.eval()(x).argmax(1)
    y[::7] = (y[::7] + 1) % 3
    net.train()
    return x, y


def dropped(model, name, pct):
    """A copy in which the smallest weights of one layer are zero: sorted and counted by hand"""
    out = copy.deepcopy(model).eval()
    w = out.get_submodule(name).weight
    with torch.no_grad():
        w.view(-1)[w.abs().flatten().argsort()[: int(w.numel() * pct / 100)]] = 0
    return out


# ---------------------------------------------------------------- the pair


def test_loss_is_the_one_computed_by_hand(net, data):
    """The objective of each layer is cross entropy on a copy compressed by hand; the metric is as without it."""
    x, y = data
    for loss in (F.cross_entropy, lambda p, t: F.cross_entropy(p, t, reduction="none"), lambda p, t: F.cross_entropy(p, t).item()):
        res = SensitivityAnalyzer(net, x[:1], evaluation((x, y), correct, loss), objective_name="loss").analyze(level=75, verbose=False)
        with torch.no_grad():
            base = F.cross_entropy(copy.deepcopy(net).eval()(x), y).item()
            by_hand = {n: F.cross_entropy(dropped(net, n, 75)(x), y).item() for n in ("0", "5", "7")}
        assert res.objective_name == "loss" and res.baseline_objective == pytest.approx(base, abs=1e-6)
        assert {r.name: r.objective for r in res.layers} == pytest.approx(by_hand, abs=1e-6)
        assert {r.name: r.objective_delta for r in res.layers} == pytest.approx({n: v - base for n, v in by_hand.items()}, abs=1e-6)
    alone = SensitivityAnalyzer(net, x[:1], evaluation((x, y), correct)).analyze(level=75, verbose=False)
    assert [(r.delta, r.stderr, r.ci) for r in alone.layers] == [(r.delta, r.stderr, r.ci) for r in res.layers]
    assert (alone.objective_name, alone.baseline_objective) == (None, None)
    assert {(r.objective, r.objective_delta) for r in alone.layers} == {(None, None)}


def test_divergence_is_the_one_computed_by_hand(net, data):
    """KL of the outputs, from p log(p/q) in float64."""
    x, y = data
    res = SensitivityAnalyzer(net, x[:1], evaluation((x, y), correct, "kl")).analyze(level=75, verbose=False)
    assert res.baseline_objective == 0
    with torch.no_grad():
        p = copy.deepcopy(net).eval()(x).double().softmax(1).numpy()
        for r in res.layers:
            q = dropped(net, r.name, 75)(x).double().softmax(1).numpy()
            assert r.objective == pytest.approx((p * np.log(p / q)).sum(1).mean(), abs=1e-6)
            assert r.objective == r.objective_delta > 1e-4


@pytest.mark.parametrize("pair", [(0.5, 0.25), (torch.tensor(0.5), np.float32(0.25)), (torch.tensor([1, 0]), torch.tensor([0.5, 0.0])), (np.array([0.0, 1.0]), 0.25)])
def test_each_of_the_pair_is_a_number_or_scores(pair):
    """All that a metric may be, an objective may be."""
    score = as_score(pair)
    assert (score.value, score.objective) == (0.5, 0.25)


def measured(*answers, levels=(50,), **kw):
    """A sweep over two layers whose evaluations return these, the last one again and again"""
    left = list(answers)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    analyzer = SensitivityAnalyzer(model, torch.randn(1, 4), lambda m: left.pop(0) if len(left) > 1 else left[0], **kw)
    return model, analyzer.sweep(levels=list(levels), verbose=False)


@pytest.mark.parametrize(
    "answers,kind,words",
    [
        ([(1.0, 0.5), 1.0], ValueError, "each time or never"),
        ([1.0, (1.0, 0.5)], ValueError, "each time or never"),
        ([(1.0, 0.5), (1.0, 0.5), 1.0], ValueError, "each time or never"),
        ([(1.0, NAN)], ValueError, "loss of"),
        ([(1.0, INF)], ValueError, "loss of the untouched model is inf"),
        ([(NAN, 1.0)], ValueError, "accuracy of the untouched model is nan"),
        ([(1.0, 0.5, 0.1)], TypeError, "tuple of 3"),
        ([(1.0,)], TypeError, "tuple of 1"),
        ([(1.0, None)], TypeError, "NoneType"),
        ([(1.0, "0.5")], TypeError, "str"),
        ([(1.0, (0.5, 0.5))], TypeError, "tuple"),
        ([(1.0, torch.ones(2, 2, 2))], ValueError, "(2, 2, 2)"),
        ([(1.0, torch.ones(0))], ValueError, "(0,)"),
    ],
)
def test_bad_pairs_are_refused(answers, kind, words):
    """What came, in the message."""
    with pytest.raises(kind) as e:
        measured(*answers, objective_name="loss")
    assert words in str(e.value)


def test_a_broken_objective_is_recorded_and_protected():
    """NaN stays NaN; the plan leaves that layer alone, the ranking goes by the metric."""
    for bad in (NAN, INF):
        model, sweep = measured((0.9, 1.0), (0.9, bad), (0.5, 1.1))
        rows = sweep[0].layers
        assert [str(r.objective) for r in rows] == [str(bad), "1.1"]
        assert [damage(r) for r in rows] == [INF, pytest.approx(0.1)]
        assert dict(sweep[0].to_layer_targets(model, 40)) == {"0": 0, "1": pytest.approx(80)}
        assert [r.name for r in sweep[0].top()] == ["1", "0"]
        assert dict(sweep.to_layer_targets(model, 20)) == {"0": 0, "1": pytest.approx(40)}
        # a metric that broke is as bad for a plan, whatever the loss says
    model, sweep = measured((0.9, 1.0), (NAN, 1.0), (0.5, 1.1))
    assert [damage(r) for r in sweep[0].layers] == [INF, pytest.approx(0.1)]
    assert sweep[0].to_layer_targets(model, 40)["0"] == 0


def test_model_comes_back_and_runs_once_an_evaluation(net, data):
    """As many passes with an objective as without, and no trace of either."""
    x, y = data
    before, passes = fingerprint(net), []
    hook = net.register_forward_hook(lambda *_: passes.append(1))
    counts = []
    for objective in (None, "kl", F.cross_entropy):
        analyzer = SensitivityAnalyzer(net, x[:1], evaluation(DataLoader(TensorDataset(x, y), 20), correct, objective))
        passes.clear()
        sweep = analyzer.sweep(levels=[50, 90], verbose=False)
        counts.append(len(passes))
        assert sweep[0].objective_name == {None: None, "kl": "kl"}.get(objective, "objective")
    hook.remove()
    assert counts == [3 * (1 + 3 * 2)] * 3  # three batches, the baseline and each layer at each level
    assert changes(before, fingerprint(net)) == []


def test_an_evaluation_that_raises_leaves_no_trace(net, data):
    """Also from within the objective."""
    x, y = data
    before, calls = fingerprint(net), []

    def fails(preds, targs):
        calls.append(1)
        if len(calls) > 2:
            raise ArithmeticError("no")
        return 0.0

    with pytest.raises(ArithmeticError):
        SensitivityAnalyzer(net, x[:1], evaluation((x, y), correct, fails)).analyze(verbose=False)
    assert len(calls) == 3 and changes(before, fingerprint(net)) == []


def test_in_one_line(net, data):
    """`analyze_sensitivity` passes the name on."""
    x, y = data
    res = analyze_sensitivity(net, x[:1], evaluation((x, y), correct, F.cross_entropy), level=75, verbose=False, objective_name="loss")
    assert res.objective_name == "loss" and all(r.objective > 0 for r in res.layers)


def test_rows_that_could_not_be_compressed():
    """They have no objective to speak of, and take no part in plans."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(20, 4)
    res = SensitivityAnalyzer(model, x[:1], evaluation((x, model(x).argmax(1)), correct, "kl")).analyze("pruning", 50, verbose=False)
    assert [r.prunable for r in res.layers] == [True, False]
    assert math.isnan(res.layers[1].objective) and math.isnan(res.layers[1].objective_delta)
    assert dict(res.to_layer_targets(model, 40)) == {"0": pytest.approx(40)}


# ---------------------------------------------------------------- plain data


def row(name="a", delta=0.1, rise=None, **kw):
    """A row with these damages"""
    return LayerSensitivity(name, "Linear", 20, 0.9, 0.9 - delta, delta, objective=None if rise is None else 1 + rise, objective_delta=rise, **kw)


def both(level, rows):
    """A result with a loss beside the accuracy"""
    return SensitivityResult("sparsity", level, 0.9, rows, objective_name="loss", baseline_objective=1.0)


def test_files_keep_the_objective(tmp_path):
    """Saved and read back equal, not a number included."""
    res = both(50, [row(rise=0.5), row("b", 0.2, -0.25), row("c", 0.0, INF)])
    sweep = SweepResult([res, both(75, [row("b", 0.3, 0.5)])], ["b", "a", "c"])
    res.to_json(tmp_path / "r.json"), sweep.to_json(tmp_path / "s.json")
    assert SensitivityResult.from_json(tmp_path / "r.json") == res
    back = SweepResult.from_json(tmp_path / "s.json")
    assert back == sweep and back.names == ["b", "a", "c"]
    broken = both(50, [row(rise=NAN)])
    broken.to_json(tmp_path / "n.json")
    assert math.isnan(SensitivityResult.from_json(tmp_path / "n.json").layers[0].objective_delta)


def test_files_of_before_still_load(tmp_path):
    """Without the new fields."""
    old = {k: v for k, v in row().as_dict().items() if "objective" not in k}
    res = {k: v for k, v in SensitivityResult("sparsity", 50, 0.9, []).as_dict().items() if "objective" not in k} | {"layers": [old]}
    (tmp_path / "r.json").write_text(json.dumps({"kind": "SensitivityResult", **res}))
    (tmp_path / "s.json").write_text(json.dumps({"kind": "SweepResult", "results": [res]}))
    expected = SensitivityResult("sparsity", 50, 0.9, [row()])
    assert SensitivityResult.from_json(tmp_path / "r.json") == expected
    assert SweepResult.from_json(tmp_path / "s.json") == SweepResult([expected])


def test_tables_show_the_objective_only_if_there_is_one(tmp_path, capsys):
    """Data frames, CSV, HTML and summary."""
    plain, res = SensitivityResult("sparsity", 50, 0.9, [row()]), both(50, [row(rise=0.5)])
    assert not [c for c in plain.to_dataframe() if "objective" in c] and "rise" not in plain._repr_html_()
    assert list(plain.to_dataframe().columns)[:6] == ["name", "layer_type", "params", "baseline_metric", "compressed_metric", "delta"]
    assert res.to_dataframe()[["objective", "objective_delta"]].values.tolist() == [[1.5, 0.5]]
    assert "<th>loss rise</th>" in res._repr_html_() and "+0.5000" in res._repr_html_() and "loss 1.0000" in res._repr_html_()
    assert list(SweepResult([plain]).curve("a").columns) == ["metric", "delta", "stderr"]
    assert SweepResult([res]).curve("a").loc[50, ["objective", "objective_delta"]].tolist() == [1.5, 0.5]
    assert res.as_dict()["baseline_objective"] == 1 and res.as_dict()["layers"][0]["objective"] == 1.5
    SweepResult([res, both(75, [row(rise=0.75)])]).to_dataframe().to_csv(tmp_path / "long.csv", index=False)
    assert pd.read_csv(tmp_path / "long.csv")[["level", "objective_delta"]].values.tolist() == [[50, 0.5], [75, 0.75]]
    res.summary()
    assert "accuracy 0.9000, loss 1.0000" in capsys.readouterr().out
    plain.summary()
    assert "loss" not in capsys.readouterr().out


def test_rankings_go_by_the_metric_and_plans_by_the_objective():
    """Unless told otherwise."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    rows = [row("a", 0.2, 0.1), row("b", 0.1, 0.2)]
    res, sweep = both(50, rows), SweepResult([both(50, rows), both(90, [row("a", 0.4, 0.2), row("b", 0.2, 0.4)])])
    metric_only = [SensitivityResult("sparsity", r.compression_level, 0.9, [LayerSensitivity(x.name, "Linear", 20, 0.9, x.compressed_metric, x.delta) for x in r.layers]) for r in sweep]
    assert [r.name for r in res.top()] == ["a", "b"]
    for found, plain in ((res, metric_only[0]), (sweep, SweepResult(metric_only))):
        plan = found.to_layer_targets(model, 45)
        assert plan["a"] > plan["b"] and plan == found.to_layer_targets(model, 45, by="objective")
        other = found.to_layer_targets(model, 45, by="metric")
        assert other == plain.to_layer_targets(model, 45) and other["a"] < other["b"] and other.mean(model) == pytest.approx(45, abs=1e-9)
    mixed = SweepResult([res, metric_only[1]])
    with pytest.raises(ValueError, match="say by='metric'"):
        mixed.to_layer_targets(model, 45)
    assert mixed.to_layer_targets(model, 45, by="metric") == sweep.to_layer_targets(model, 45, by="metric")
    assert plan_basis([row("x", NAN, prunable=False), row(rise=0.1)]) == "objective"


@pytest.mark.parametrize("seed", range(8))
def test_plans_by_an_objective_have_the_least_total(seed):
    """No plan on a fine grid with the same budget has a smaller sum of rises, for curves with and without dents."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, 3)
    model = nn.ModuleDict({n: nn.Linear(int(k), 4, bias=False) for n, k in zip("abc", sizes, strict=True)})
    levels = [0, 20, 40, 60, 80]
    rises = {n: np.r_[0, np.sort(rng.random(4)) * rng.random()] for n in "abc"}
    rows = lambda j: [LayerSensitivity(n, "Linear", 4 * int(k), 0.9, 0.9, 0.0, objective=rises[n][j], objective_delta=rises[n][j]) for n, k in zip("abc", sizes, strict=True)]
    sweep = SweepResult([SensitivityResult("sparsity", p, 0.9, rows(j), objective_name="loss", baseline_objective=0.0) for j, p in enumerate(levels) if p])
    weights = sizes / sizes.sum()
    for low, high, target in ((0, 80, 37.0), (10, 70, 50.0), (0, 80, 80.0), (15, 80, 15.0)):
        plan = sweep.to_layer_targets(model, target, low, high)
        assert plan.mean(model) == pytest.approx(target, abs=1e-9) and all(low - 1e-9 <= v <= high + 1e-9 for v in plan.values())
        ends = [p for p in levels if low < p < high] + [low, high]

        def bridged(name, at, ends=ends):
            """The lower convex hull at one level: the best mixture of two levels"""
            y = {p: np.interp(p, levels, rises[name]) for p in ends}
            pairs = [(a, b) for a in ends for b in ends if a <= at <= b]
            return min(y[a] if a == b else y[a] + (y[b] - y[a]) * (at - a) / (b - a) for a, b in pairs)

        total = sum(bridged(n, float(np.clip(plan[n], low, high))) for n in "abc")
        grid = np.linspace(low, high, 41)
        for a, b in itertools.product(grid, grid):
            c = (target - weights[0] * a - weights[1] * b) / weights[2]
            if low <= c <= high:
                assert total <= bridged("a", a) + bridged("b", b) + bridged("c", c) + 1e-9


def test_layers_with_the_same_slope_go_on_together():
    """Nothing depends on their order."""
    model = nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in "abc"})
    rows = [LayerSensitivity(n, "Linear", 16, 0.9, 0.9, 0.0, objective=1.0, objective_delta=0.0) for n in "abc"]
    assert list(SweepResult([both(80, rows)]).to_layer_targets(model, 30).values()) == pytest.approx([30] * 3)


def test_plots_of_a_sweep_by_either():
    """Axes say which; curves cross the levels that are not theirs."""
    import matplotlib

    matplotlib.use("Agg")
    sweep = SweepResult([both(50, [row("a", 0.2, 0.5)]), both(75, [row("b", 0.1, 0.25)]), both(90, [row("a", 0.3, 0.75), row("b", 0.1, INF)])])
    for by, text, highest in (("metric", "damage to accuracy", 0.3), ("objective", "rise of loss", 0.75)):
        axes = sweep.plot(by=by)
        assert axes[1].get_ylabel() == text and max(np.nanmax(np.where(np.isfinite(line.get_ydata()), line.get_ydata(), 0)) for line in axes[1].lines) == highest
        assert {line.get_label(): line.get_xdata().tolist() for line in axes[1].lines} == {"a": [50, 90], "b": [75, 90]}
        matplotlib.pyplot.close("all")
    assert sweep.plot()[1].get_ylabel() == "damage to accuracy"
    matplotlib.pyplot.close("all")


# ---------------------------------------------------------------- a fastai Learner


class Scaled(nn.Module):
    """Cross entropy that knows nothing of `reduction`"""

    def forward(self, preds, targs):
        """A number for the batch"""
        return 2 * F.cross_entropy(preds, targs)


def learner(net, data, loss=None, **kw):
    """A Learner with batches of 16, 16, 16 and 2"""
    ds = TensorDataset(*data)
    return Learner(DataLoaders.from_dsets(ds, ds, bs=16, device="cpu", num_workers=0), net, loss_func=loss or CrossEntropyLossFlat(), metrics=kw.pop("metrics", accuracy), **kw)


@pytest.mark.parametrize("loss", [CrossEntropyLossFlat(), nn.CrossEntropyLoss(), F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)], ids=["fastai", "module", "function", "smooth"])
def test_the_loss_of_a_learner_comes_for_each_sample(net, data, loss):
    """The loss that torch gives for each sample, the mean that `validate` reports, and the Learner as it was."""
    learn = learner(net, data, loss)
    with learn.no_bar(), learn.no_logging():
        validated = learn.validate()[0]
    before, callbacks, reduction = fingerprint(net), list(learn.cbs), getattr(loss, "reduction", None)
    scores, losses = learner_eval(learn, objective="loss")(net)
    with torch.no_grad():
        one_by_one = torch.stack([F.cross_entropy(copy.deepcopy(net).eval()(x[None]), y[None], label_smoothing=getattr(loss, "label_smoothing", 0.0)) for x, y in zip(*data, strict=True)])
    assert torch.allclose(losses, one_by_one, atol=1e-5) and losses.mean().item() == pytest.approx(validated, abs=1e-5)
    assert scores.shape == losses.shape == (50,)
    assert learn.loss_func is loss and getattr(loss, "reduction", None) == reduction and list(learn.cbs) == callbacks
    assert [c for c in changes(before, fingerprint(net)) if "training" not in c and "rng" not in c] == []


def test_a_loss_that_is_only_a_number(net, data):
    """The batches count by their size, as in `validate`."""
    learn = learner(net, data, Scaled())
    with learn.no_bar(), learn.no_logging():
        validated = learn.validate()[0]
    assert learner_eval(learn, objective="loss")(net)[1].mean().item() == pytest.approx(validated, abs=1e-5)


@pytest.mark.parametrize("metric", [None, F1Score(average="macro"), lambda p, t: (p.argmax(-1) == t).float().mean()], ids=["accuracy", "F1", "function"])
@pytest.mark.parametrize("objective", ["loss", "kl", None])
def test_learner_analysis(net, data, metric, objective):
    """One pass an evaluation whatever the metric; the model is as it was; objective as by hand."""
    learn = learner(net, data)
    passes, before = [], fingerprint(net)
    hook = net.register_forward_hook(lambda *_: passes.append(1))
    analyzer = SensitivityAnalyzer.from_learner(learn, metric, objective=objective, higher_is_better=True)
    passes.clear()
    res = analyzer.analyze(level=75, verbose=False)
    hook.remove()
    assert len(passes) == 4 * (1 + 3)
    assert changes(before, fingerprint(net)) == []
    assert res.objective_name == objective
    x, y = data
    with torch.no_grad():
        base = copy.deepcopy(net).eval()(x)
        for r in res.layers:
            out = dropped(net, r.name, 75)(x)
            by_hand = {"loss": F.cross_entropy(out, y), "kl": F.kl_div(out.log_softmax(1), base.softmax(1), reduction="batchmean")}
            assert r.objective is None if objective is None else r.objective == pytest.approx(by_hand[objective].item(), abs=1e-5)


def test_learner_defaults_and_names(net, data):
    """KL is the default of a classifier; a function gives its name; both can be renamed."""
    learn = learner(net, data)

    def margin(preds, targs):
        return -preds.gather(1, targs[:, None])[:, 0]

    first = SensitivityAnalyzer.from_learner(learn).analyze(level=50, layers=["5"], verbose=False)
    assert (first.metric_name, first.objective_name, first.baseline_objective) == ("accuracy", "kl", 0)
    assert SensitivityAnalyzer.from_learner(learn, objective=margin).analyze(level=50, layers=["5"], verbose=False).objective_name == "margin"
    named = SensitivityAnalyzer.from_learner(learn, objective_name="entropy").analyze(level=50, layers=["5"], verbose=False)
    assert named.objective_name == "entropy" and named.layers[0].objective == first.layers[0].objective


def test_learner_objectives_that_make_no_sense(net, data):
    """Told at the door."""
    learn = learner(net, data)
    learn.loss_func = None
    with pytest.raises(ValueError, match="no loss_func"):
        SensitivityAnalyzer.from_learner(learn)
    assert SensitivityAnalyzer.from_learner(learner(net, data), objective="auto").objective_name == "kl"
    regression = Learner(DataLoaders.from_dsets(*[TensorDataset(torch.randn(8, 2), torch.randn(8, 1))] * 2, bs=4, device="cpu", num_workers=0), nn.Linear(2, 1), loss_func=nn.MSELoss())
    mse = lambda p, t: ((p - t) ** 2).mean()
    with pytest.raises(ValueError):
        SensitivityAnalyzer.from_learner(regression, mse, objective="kl", higher_is_better=False).analyze(verbose=False)
    res = SensitivityAnalyzer.from_learner(regression, mse, higher_is_better=False).analyze(verbose=False)
    assert res.baseline_objective == pytest.approx(res.baseline_metric, abs=1e-6)


def test_a_failing_evaluation_leaves_the_learner_as_it_was(net, data):
    """Loss, reduction, callbacks and model."""

    class Fails(Callback):
        def after_pred(self):
            raise ArithmeticError("no")

    loss = CrossEntropyLossFlat()
    learn = learner(net, data, loss)
    learn.add_cb(Fails())
    callbacks = list(learn.cbs)
    with pytest.raises(ArithmeticError):
        learner_eval(learn, objective="loss")(copy.deepcopy(net))
    assert learn.model is net and learn.loss_func is loss and loss.reduction == "mean" and set(learn.cbs) == set(callbacks)


def test_kl_starts_anew_with_each_analysis(net, data):
    """After more training the new model is the untouched one."""
    learn = learner(net, data)
    analyzer = SensitivityAnalyzer.from_learner(learn, objective="kl")
    first = analyzer.analyze(level=75, verbose=False)
    with torch.no_grad():
        net[5].weight.mul_(1.5)
    second = analyzer.sweep(levels=[75], verbose=False)[0]
    assert first.baseline_objective == second.baseline_objective == 0
    fresh = SensitivityAnalyzer.from_learner(learn, objective="kl").analyze(level=75, verbose=False)
    assert [r.objective for r in second.layers] == [r.objective for r in fresh.layers] != [r.objective for r in first.layers]


def test_learner_with_two_outputs(data):
    """Loss and metric get both outputs; KL says what it needs."""
    torch.manual_seed(0)
    model = Net(lambda m, x: (m.one(x.flatten(1)), m.two(x.flatten(1))), one=nn.Linear(16, 3), two=nn.Linear(16, 2))

    def loss(preds, targs):
        return F.cross_entropy(preds[0], targs) + F.cross_entropy(preds[1], targs % 2)

    def right(preds, targs):
        return ((preds[0].argmax(1) == targs) & (preds[1].argmax(1) == targs % 2)).float().mean()

    x, y = data
    learn = learner(model, data, loss, metrics=right)
    res = SensitivityAnalyzer.from_learner(learn).analyze(level=50, verbose=False)
    by_hand = lambda m: loss(m(x), y).item()
    assert res.baseline_objective == pytest.approx(by_hand(model), abs=1e-5)
    assert {r.name: r.objective for r in res.layers} == pytest.approx({n: by_hand(dropped(model, n, 50)) for n in ("one", "two")}, abs=1e-5)
    with pytest.raises(ValueError, match="one tensor of outputs"):
        SensitivityAnalyzer.from_learner(learn, objective="kl").analyze(verbose=False)


def test_learner_with_two_targets(data):
    """A loss and a metric of two targets."""
    torch.manual_seed(0)
    x, y = data
    ds = TensorDataset(x.flatten(1), y, y % 2)
    ds.n_inp = 1
    dls = DataLoaders.from_dsets(ds, ds, bs=16, device="cpu")
    model = Net(lambda m, x: (m.one(x), m.two(x)), one=nn.Linear(16, 3), two=nn.Linear(16, 2))
    loss = lambda p, a, b: F.cross_entropy(p[0], a) + F.cross_entropy(p[1], b)
    learn = Learner(dls, model, loss_func=loss, metrics=lambda p, a, b: (p[0].argmax(1) == a).float().mean())
    res = SensitivityAnalyzer.from_learner(learn, metric_name="first", higher_is_better=True).analyze(level=50, verbose=False)
    assert res.baseline_objective == pytest.approx(loss(model(x.flatten(1)), y, y % 2).item(), abs=1e-5)
    assert res.baseline_metric == pytest.approx((model(x.flatten(1))[0].argmax(1) == y).float().mean().item(), abs=1e-6)


# ---------------------------------------------------------------- plain PyTorch


def test_evaluation_takes_what_data_loaders_give():
    """Tuples and dicts of inputs, dicts of outputs, several batches, a model in training mode."""
    torch.manual_seed(0)
    a, b, y = torch.randn(7, 3), torch.randn(7, 3), torch.randint(0, 2, (7,))
    model = Net(lambda m, left, right: {"logits": m.drop(m.out(left * right))}, out=nn.Linear(3, 2), drop=nn.Dropout())
    expected = F.cross_entropy(model.out(a * b), y)
    shapes = [
        [((a[:4], b[:4]), y[:4]), ((a[4:], b[4:]), y[4:])],
        [[{"left": a, "right": b}, y]],
        ((a, b), y),
        DataLoader([((a[i], b[i]), y[i]) for i in range(7)], 3),
    ]
    for data in shapes:
        score, loss = evaluation(data, lambda p, t: correct(p["logits"], t), lambda p, t: F.cross_entropy(p["logits"], t))(model)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6) and not loss.requires_grad
        assert score.shape == (7,)
    assert model.training and model.drop.training


@pytest.mark.parametrize(
    "args,kind,words",
    [
        ((3, correct), TypeError, "data is a list of batches"),
        (([], correct), ValueError, "data is empty"),
        (([(torch.ones(2, 2),) * 3], correct), ValueError, "got tuple of 3"),
        (([(torch.ones(2, 2), ["a", "b"])], correct), TypeError, "str"),
        (([(torch.ones(2, 2), torch.ones(2))], 0.9), TypeError, "metric is"),
    ],
)
def test_evaluation_refuses(args, kind, words):
    """What came, in the message."""
    with pytest.raises(kind) as e:
        evaluation(*args)(nn.Linear(2, 2))
    assert words in str(e.value)


def test_divergence_at_its_edges():
    """Classes ruled out, other axes, numbers that are none, other shapes."""
    masked = torch.tensor([[0.0, 0.0, -INF]])
    kl = Divergence()
    assert kl(masked).item() == 0
    assert kl(torch.tensor([[0.0, 0.0, 0.0]])).item() == pytest.approx(math.log(1.5), abs=1e-6)
    assert kl(torch.tensor([[0.0, -INF, 0.0]])).item() == INF
    assert math.isnan(kl(torch.tensor([[NAN, 0.0, 0.0]])).item())
    p, q = torch.randn(4, 5, 3), torch.randn(4, 5, 3)
    last, second = Divergence(axis=-1), Divergence(axis=1)
    last(p), second(p)
    assert torch.allclose(last(q), (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean(1), atol=1e-5)
    assert torch.allclose(second(q), (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1).mean(1), atol=1e-5)
    soft = torch.tensor([[0.25, 0.75]])
    assert Divergence()(torch.zeros(1, 2), soft).item() == 0


# ---------------------------------------------------------------- sweeps


def graded(scores, **kw):
    """A sweep whose metric is given for each layer and level, with the calls it took"""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in scores])
    calls = []

    def metric(m):
        zeros = [round(100 * (w == 0).float().mean().item()) for w in m.parameters()]
        calls.append(zeros)
        return next((s[z] for s, z in zip(scores, zeros, strict=True) if z), 0.9)

    analyzer = SensitivityAnalyzer(model, torch.randn(1, 8), metric, higher_is_better=kw.pop("higher_is_better", True))
    return model, analyzer.sweep(verbose=False, **kw), calls


def test_default_levels_and_one_baseline():
    """25, 50, 75 and 90 percent; the untouched model once."""
    _, sweep, calls = graded([dict.fromkeys((25, 50, 75, 91, 89, 90, 92), 0.8)] * 2)
    assert sweep.levels == [25, 50, 75, 90] and len(calls) == 1 + 2 * 4 and calls.count([0, 0]) == 1


@pytest.mark.parametrize("mode,value,last", [("minimize", 0.55, 75), ("minimize", 0.1, 100), ("dropped", 0.15, 50), ("dropped", 0.05, 25), ("maximize", 0.85, 25), ("raised", 0.1, 100)])
def test_early_stop_modes_on_a_falling_metric(mode, value, last):
    """The level that crossed the line is measured, the harsher ones are not."""
    scores = {25: 0.86 if value == 0.85 else 0.8, 50: 0.7, 75: 0.5, 100: 0.2}
    _, sweep, calls = graded([scores, dict.fromkeys(scores, 0.84)], levels=[100, 25, 75, 50], early_stop_mode=mode, early_stop_value=value)
    found = list(sweep.curve("0").index)
    assert found == [p for p in (25, 50, 75, 100) if p <= last]
    assert len(calls) == 1 + len(found) + len(sweep.curve("1"))
    for r in sweep:
        stopped = [why for name, why in r.skipped if name == "0"]
        assert bool(stopped) == (r.compression_level > last) and all("stopped early" in why for why in stopped)


def test_early_stop_raised_on_a_rising_metric(tmp_path):
    """For errors and losses; the CSV leaves those cells empty."""
    _, sweep, _ = graded([{50: 1.5, 75: 2.5, 100: 9.0}, {50: 1.0, 75: 1.0, 100: 1.0}], levels=[50, 75, 100], early_stop_mode="raised", early_stop_value=1.0, higher_is_better=False)
    assert list(sweep.curve("0").index) == [50, 75] and list(sweep.curve("1").index) == [50, 75, 100]
    assert sweep.curve("0").delta.tolist() == pytest.approx([0.6, 1.6])
    sweep.to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().splitlines() == ["layer,50,75,100", "0,1.5,2.5,", "1,1.0,1.0,1.0"]


SCORES = [{25: 0.89, 50: 0.8, 75: 0.6, 100: 0.1}, {25: 0.9, 50: 0.9, 75: 0.88, 100: 0.3}, {25: 0.9, 50: 0.85, 75: 0.8, 100: 0.2}]


def test_levels_of_their_own(tmp_path):
    """Only what was asked for is measured; names, tables, plans and files are in model order."""
    model, sweep, calls = graded(SCORES, levels={"2": [100, 50], "0": [25, 50, 75]})
    _, full, _ = graded(SCORES, levels=[25, 50, 75, 100])
    assert len(calls) == 1 + 5 and sweep.levels == [25, 50, 75, 100] and sweep.names == ["0", "2"]
    assert [[r.name for r in level.layers] for level in sweep] == [["0"], ["0", "2"], ["0"], ["2"]]
    assert all(not level.skipped for level in sweep)
    for name, levels in (("0", [25, 50, 75]), ("2", [50, 100])):
        assert sweep.rows(name) == {p: row for p, row in full.rows(name).items() if p in levels}
    late = graded(SCORES, levels={"2": [25, 50], "0": [75], "1": [100, 25]})[1]
    assert late.names == ["0", "1", "2"]  # though the first level has none of "0"
    late.to_csv(tmp_path / "s.csv"), late.to_json(tmp_path / "s.json")
    assert (tmp_path / "s.csv").read_text().splitlines() == ["layer,25,50,75,100", "0,,,0.6,", "1,0.9,,,0.3", "2,0.9,0.85,,"]
    assert SweepResult.from_json(tmp_path / "s.json").names == late.names
    assert len(late.to_dataframe()) == 5
    plan = late.to_layer_targets(model, 45)
    assert list(plan) == ["0", "1", "2"] and plan.mean(model) == pytest.approx(45, abs=1e-9)
    assert plan["0"] <= 75 and plan["2"] <= 50


def test_levels_of_their_own_stop_early():
    """Each curve ends for itself."""
    _, sweep, calls = graded(SCORES, levels={"0": [25, 50, 75, 100], "1": [75, 100]}, early_stop_mode="dropped", early_stop_value=0.05)
    assert list(sweep.curve("0").index) == [25, 50] and list(sweep.curve("1").index) == [75, 100] and len(calls) == 1 + 4


def test_levels_of_their_own_in_bits_and_by_default(net, data):
    """None stands for the usual levels; bits run from many to few."""
    x, y = data
    analyzer = SensitivityAnalyzer(net, x[:1], evaluation((x, y), correct, "kl"))
    sweep = analyzer.sweep("quantization", {"7": None, "0": [4]}, verbose=False)
    assert sweep.levels == [8, 6, 4, 3, 2] and list(sweep.curve("0").index) == [4] and len(sweep.curve("7")) == 5
    assert sweep.rows("0")[4] == analyzer.analyze("quantization", 4, layers=["0"], verbose=False).layers[0]


def test_groups_are_measured_at_the_levels_of_all_members():
    """Two layers that add up are pruned as one."""
    torch.manual_seed(0)
    model = Net(lambda m, x: m.out((m.a(x) + m.b(x)).relu()), a=nn.Linear(4, 8), b=nn.Linear(4, 8), out=nn.Linear(8, 3))
    x = torch.randn(30, 4)
    analyzer = SensitivityAnalyzer(model, x[:1], evaluation((x, model(x).argmax(1)), correct, "kl"))
    sweep = analyzer.sweep("pruning", {"a": [25], "b": [50]}, verbose=False)
    assert [[r.name for r in level.layers] for level in sweep] == [["a", "b"]] * 2
    assert len({r.objective for r in sweep[1].layers}) == 1
    assert sweep[1].layers == analyzer.analyze("pruning", 50, layers=["a"], verbose=False).layers


@pytest.mark.parametrize(
    "kw,kind,words",
    [
        (dict(levels={}), ValueError, "levels is empty"),
        (dict(levels={"0": []}), ValueError, "levels of '0' is empty"),
        (dict(levels={"0": "50"}), ValueError, "levels of '0' is a list"),
        (dict(levels={"0": [150]}), ValueError, "in percent"),
        (dict(levels={"0": [50]}, layer_types=nn.Conv2d), KeyError, "layer_types leaves it out"),
        (dict(compression=Sparse(50), levels={"0": [50]}), ValueError, "its level"),
    ],
)
def test_levels_of_their_own_that_make_no_sense(kw, kind, words):
    """What came, in the message."""
    with pytest.raises(kind) as e:
        graded(SCORES, **kw)
    assert words in str(e.value)


# ---------------------------------------------------------------- smoothing


def isotonic(values):
    """The nearest values that never fall, by the min-max formula"""
    n = len(values)
    return [max(min(np.mean(values[a : b + 1]) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]


def curve(values, rises=None, higher=True, name="a", **kw):
    """A sweep of one layer with these damages"""
    sign = 1 if higher else -1
    rises = rises or [None] * len(values)
    out = []
    for p, d, o in zip(range(10, 91, 10), values, rises, strict=False):
        r = LayerSensitivity(name, "Linear", 20, 0.9, 0.9 - sign * d, d, stderr=0.01, ci=(d - 0.02, d + 0.02), objective=None if o is None else 2 + o, objective_delta=o, **kw)
        out.append(SensitivityResult("sparsity", p, 0.9, [r], higher_is_better=higher, objective_name=o and "loss", baseline_objective=o and 2.0))
    return SweepResult(out)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_smoothing_is_isotonic_regression(seed, higher):
    """Metric, damage and objective agree; what did not move keeps its error."""
    rng = np.random.default_rng(seed)
    values, rises = (np.linspace(0, 0.2, 8) + 0.1 * rng.standard_normal(8)).tolist(), (np.linspace(0, 1, 8) + 0.4 * rng.standard_normal(8)).tolist()
    sweep = curve(values, rises, higher)
    before = copy.deepcopy(sweep)
    smooth = sweep.smoothed()
    c = smooth.curve("a")
    assert c.delta.tolist() == pytest.approx(isotonic(values), abs=1e-12) == isotonic_regression(values).x.tolist()
    assert c.objective_delta.tolist() == pytest.approx(isotonic(rises), abs=1e-12)
    assert c.metric.tolist() == pytest.approx([0.9 - (d if higher else -d) for d in c.delta], abs=1e-12)
    assert c.objective.tolist() == pytest.approx([2 + o for o in c.objective_delta], abs=1e-12)
    for old, new in zip(before, smooth, strict=True):
        moved = old.layers[0].delta != new.layers[0].delta
        assert (new.layers[0].stderr is None, new.layers[0].ci is None) == (moved, moved)
        assert new.settings == {"smoothed": True}
    assert any(r.layers[0].stderr is None for r in smooth) and sweep == before and smooth.levels == sweep.levels
    assert [r.layers for r in smooth.smoothed()] == [r.layers for r in smooth]


def test_smoothing_leaves_what_was_not_measured():
    """Broken metrics, rows that were not compressed, single levels, results without objective."""
    broken = curve([0.2, NAN, 0.1, INF], [0.5, 0.25, INF, 1.0]).smoothed().curve("a")
    assert broken.delta.tolist() == pytest.approx([0.15, NAN, 0.15, INF], nan_ok=True)
    assert broken.objective_delta.tolist() == pytest.approx([0.375, 0.375, INF, 1.0])
    rising = curve([0.1, 0.2, 0.2])
    assert [r.layers for r in rising.smoothed()] == [r.layers for r in rising]
    unsplit = LayerSensitivity("head", "Linear", 5, 0.9, NAN, NAN, prunable=False)
    sweep = curve([0.2, 0.1])
    sweep[0].layers.append(unsplit)
    smooth = SweepResult(sweep.results, ["head", "a"]).smoothed()
    assert smooth[0].layers[1] is unsplit and [len(r.layers) for r in smooth] == [2, 1]
    assert smooth[0].layers[0].delta == pytest.approx(0.15) and smooth[0].layers[0].objective is None and smooth.names == ["head", "a"]


def test_smoothing_uneven_and_stopped_curves():
    """Each layer for itself, with the levels it has."""
    a, b = curve([0.3, 0.2, 0.4, 0.3]), curve([0.1, 0.05, 0.2], name="b")
    sweep = SweepResult([SensitivityResult("sparsity", r.compression_level, 0.9, rows) for r, rows in zip(a, itertools.zip_longest(*[[x.layers[0] for x in s] for s in (a, b)]), strict=True)])
    for r in sweep:
        r.layers = [x for x in r.layers if x]
    del sweep[1].layers[0]
    smooth = sweep.smoothed()
    assert smooth.curve("a").delta.to_dict() == pytest.approx({10: 0.3, 30: 0.35, 40: 0.35})
    assert smooth.curve("b").delta.to_dict() == pytest.approx({10: 0.075, 20: 0.075, 30: 0.2})


def test_smoothed_sweeps_are_saved_and_planned(tmp_path):
    """Like any other."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    smooth = curve([0.2, 0.1, 0.3], [0.4, 0.2, 0.6]).smoothed()
    smooth.to_json(tmp_path / "s.json")
    assert SweepResult.from_json(tmp_path / "s.json") == smooth
    assert dict(smooth.to_layer_targets(model, 20)) == {"a": pytest.approx(20)}
