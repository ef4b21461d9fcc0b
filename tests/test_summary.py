"""Summaries say what is known: no layer twice, nothing fragile that chance explains, the ranking that plans go by."""
import math
import re

import pytest
import torch
from torch import nn

from fasterai_sens import LayerSensitivity, SensitivityAnalyzer, SensitivityResult, SweepResult


def row(name, delta, ci=None, rise=None, **more):
    """One measured layer"""
    return LayerSensitivity(name, "Linear", 100, .9, .9 - delta, delta, ci=ci, objective=None if rise is None else 1 + rise, objective_delta=rise, **more)


def result(rows, level=50, **more):
    """Of several rows"""
    objective = {"objective_name": "loss", "baseline_objective": 1.} if any(r.objective_delta is not None for r in rows) else {}
    return SensitivityResult("sparsity", level, .9, rows, **objective, **more)


def lists(found, capsys, *top):
    """The names under "fragile" and under "robust", and the text"""
    capsys.readouterr()
    found.summary(**dict(zip(["top"], top, strict=False)))
    text = capsys.readouterr().out
    fragile, robust = re.search(r"most sensitive \(fragile\)(.*?)\n\n  most robust \(compressible\)(.*?)(\n\n|\Z)", text, re.S).groups()[:2]
    names = lambda part: [line.split()[0] for line in part.splitlines()[1:] if line.startswith("    ") and line.split()[0] != "none"]
    return names(fragile), names(robust), text


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 9, 10, 11, 30])
@pytest.mark.parametrize("given", [(), (0,), (1,), (5,)], ids=["by default", "0", "1", "5"])
def test_no_layer_is_in_both_lists(n, given, capsys):
    top, = given or [5]
    rows = [row(f"layer{i}", .01*(i + 1)) for i in range(n)]
    for found in (result(rows), SweepResult([result(rows), result(rows, 75)])) if n else (result(rows),):
        fragile, robust, _ = lists(found, capsys, *given)
        assert not set(fragile) & set(robust) and len(fragile) <= top and len(robust) <= top
        assert fragile == [f"layer{i}" for i in range(n - 1, -1, -1)][:len(fragile)] and robust == [f"layer{i}" for i in range(n)][:len(robust)]
        assert len(fragile) + len(robust) == min(n, 2*top)


def test_nothing_is_fragile_whose_interval_holds_0(capsys):
    rows = [row("sure", .1, (.05, .15)), row("perhaps", .2, (-.1, .5)), row("just", .15, (0., .3)), row("flat", 0., (0., 0.)), row("gain", -.1, (-.2, -.05)), row("alone", .05)]
    for found in (result(rows), SweepResult([result(rows), result(rows, 80)])):
        fragile, robust, text = lists(found, capsys, 6)
        assert fragile == ["sure", "alone"] and robust == ["gain", "flat"]   # of the less damaged half
        assert "not told apart from no damage (the interval holds 0): perhaps, just\n" in text
        fragile, robust, text = lists(found, capsys, 1)
        assert (fragile, robust) == (["sure"], ["gain"])
        assert "not told apart from no damage (the interval holds 0): perhaps, just, flat" in text


def test_what_is_fragile_goes_by_what_ranks(capsys):
    """By the interval of the objective where layers are ranked by it, whatever that of the metric holds."""
    noise, clear = (-.1, .1), (.1, .2)
    rows = [row("first", 0., noise, rise=.9, objective_ci=(.8, 1.)), row("second", .15, clear, rise=.5, objective_ci=(-.1, 1.1)),
            row("third", .15, clear, rise=.2, objective_ci=(.1, .3)), row("last", .15, clear, rise=.1, objective_ci=(-.1, .3))]
    for found in (result(rows), SweepResult([result(rows), result(rows, 80)])):
        fragile, robust, text = lists(found, capsys)
        assert fragile == ["first", "third"] and robust == ["last"]
        assert "not told apart from no damage (the interval holds 0): second\n" in text
        assert "robust: of the less damaged half" in text


@pytest.mark.parametrize("n", [2, 3, 4, 7, 20])
def test_no_damaged_layer_of_the_first_rank_is_robust(n, capsys):
    """Even if chance may explain every damage, and if all are shown; what did no damage at all is robust wherever it stands."""
    rows = [row(f"layer{i}", .01*(i + 1), (-.5, .5)) for i in range(n)]
    none = [row(f"layer{i}", 0., (0., 0.)) for i in range(n)]
    for harmed, unharmed in ((result(rows), result(none)), (SweepResult([result(rows)]), SweepResult([result(none)]))):
        fragile, robust, _ = lists(harmed, capsys, n)
        assert fragile == [] and robust == [f"layer{i}" for i in range(n - n//2)]
        fragile, robust, _ = lists(unharmed, capsys, n)
        assert fragile == [] and len(robust) == n


def test_nothing_that_broke_the_model_or_was_not_measured_is_robust(capsys):
    lost = LayerSensitivity("head", "Linear", 5, .9, math.nan, math.nan, prunable=False)
    rows = [row("gone", math.nan), row("lost", math.inf), row("away", -math.inf), row("fine", .01), lost]
    for found in (result(rows), SweepResult([result(rows)])):
        fragile, robust, _ = lists(found, capsys)
        assert set(fragile) == {"gone", "lost", "away"} and robust == ["fine"]


def test_the_ranking_is_that_of_plans(capsys):
    rows = [row("a", .2, (.1, .3), rise=.1), row("b", .1, (.05, .2), rise=.5), row("c", .05, (.01, .1), rise=.3), row("d", 0., (-.1, .1), rise=.01)]
    found = result(rows)
    fragile, robust, text = lists(found, capsys, 2)
    assert fragile == ["b", "c"] and robust == ["d", "a"]
    assert "loss rise" in text and "+0.5000" in text and "ranked by the rise of loss, as plans are" in text and "accuracy 0.9000, loss 1.0000" in text
    assert [r.name for r in found.top()] == ["a", "b", "c", "d"] and [r.name for r in found.top(by=None)] == [r.name for r in found.top(by="objective")] == ["b", "c", "a", "d"]
    order = re.findall(r"<td>([abcd])</td>", found._repr_html_())
    assert order == ["b", "c", "a", "d"]
    sweep = SweepResult([found, result(rows, 75)])
    fragile, robust, text = lists(sweep, capsys, 2)
    assert fragile == ["b", "c"] and robust == ["d", "a"] and "rise of loss, as plans are" in text and "+0.5000" in text
    assert re.findall(r"<td>([abcd])</td>", sweep._repr_html_()) == ["b", "c", "a", "d"]
    mixed = [*rows, row("e", .3)]
    assert "loss rise" not in lists(result(mixed), capsys)[2]
    assert "rise" not in lists(result([row("a", .2)]), capsys)[2]


def test_intervals_are_the_recorded_ones(capsys):
    text = lists(result([row("a", .2, (.05, .25), stderr=.01)]), capsys)[2]
    assert "[+0.0500, +0.2500]" in text and "±" not in text


def test_a_sweep_ranks_by_the_mean_over_its_levels():
    mild = result([row("late", .0), row("early", .1), row("noisy", .2), row("dead", .01)], 25)
    middle = result([row("late", .0), row("noisy", .0), row("dead", math.nan)], 50)
    harsh = result([row("late", .9), row("noisy", .1)], 75)
    for results in ([mild, middle, harsh], [harsh, mild, middle]):
        sweep = SweepResult(results, ["late", "early", "noisy", "dead"])
        assert [r.name for r in sweep.top(9)] == ["dead", "late", "noisy", "early"]
        assert [r.name for r in sweep.top(9, most_sensitive=False)] == ["early", "noisy", "late", "dead"]
        assert [(r.name, r.delta) for r in sweep.top(4)][1:] == [("late", .9), ("noisy", .1), ("early", .1)]
        assert [r.name for r in sweep.top(4, level=25)] == ["noisy", "early", "dead", "late"]
        assert [r.name for r in sweep.top(4, level=50)] == ["dead", "noisy", "early", "late"]
        assert sweep.top(0) == []
    with pytest.raises(ValueError):
        sweep.top(-1)
    with pytest.raises(ValueError):
        sweep.summary(top=-1)


def test_a_sweep_shows_what_was_measured(capsys):
    sweep = SweepResult([result([row("a", .1), row("b", .3)], 25), result([row("a", .2)], 75, skipped=[("b", "stopped early: accuracy 0.6 at level 25")])])
    fragile, robust, text = lists(sweep, capsys)
    assert fragile == ["b"] and robust == ["a"]
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("    ")}
    assert lines["a"][-2:] == ["+0.1000", "+0.2000"] and lines["b"][-1] == "+0.3000"
    assert "25 %" in text and "75 %" in text and "b: stopped early" in text
    assert sweep._repr_html_().count("<tr>") == 3 and "<td></td>" in sweep._repr_html_()


def test_coupled_layers_have_one_line(capsys):
    pair = [row(n, .1, group_id="g", group_members=["a", "b"]) for n in ("a", "b")]
    for found in (result([*pair, row("c", .2)]), SweepResult([result([*pair, row("c", .2)])])):
        fragile, robust, text = lists(found, capsys)
        assert fragile == ["c"] and robust == ["a"] and "a +1" in text
        assert [r.name for r in found.top(9)] == ["c", "a"]
        assert "<td>a +1</td>" in found._repr_html_() and "<td>b</td>" not in found._repr_html_()


def test_a_real_network_with_little_data(capsys):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(30, 8)
    with torch.no_grad():
        y = net(x).argmax(1)

    def right(m):
        with torch.no_grad():
            return m(x).argmax(1) == y

    for method in ("sparsity", "pruning", "quantization"):
        a = SensitivityAnalyzer(net, x[:1], right)
        for found in (a.analyze(method, verbose=False), a.sweep(method, verbose=False)):
            fragile, robust, _ = lists(found, capsys)
            assert not set(fragile) & set(robust)
            rows = [r for r in (found if isinstance(found, SweepResult) else [found])]
            for name in fragile:
                assert any(r.name == name and r.ci and r.ci[0] > 0 for res in rows for r in res.layers)
