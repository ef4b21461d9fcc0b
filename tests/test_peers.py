"""The tools before us, side by side: fasterai 0.3.2, whose analysis this library replaces, and fasterai 0.4.1, which takes our targets.

Neither is a requirement: `make peers` puts each in a folder of its own in `.venv/peers`. Where results differ, `differences` below says why.
"""
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from inspect import Parameter, signature
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import NarrowResNet, folder_of, forget_fasterai, peer, peers

import fasterai_sens as ours
from fasterai_sens import LayerTargets
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.state import leave_no_trace
from fasterai_sens.methods.quantize import Quantized
from fasterai_sens.methods.sparsify import n_dropped, sparsity_mask
from fasterai_sens.show.demo import digits_learner

noise = 1e-6  # what float32 may do to a mean loss; the models compared hold the same numbers
metrics = dict(  # name -> function of outputs and labels: one that is smooth, one that counts
    loss=lambda out, y: F.cross_entropy(out, y).item(),
    accuracy=lambda out, y: (out.argmax(1) == y).double().mean().item())


def public(*modules):
    """What the modules hold, in one namespace."""
    return SimpleNamespace(**{k: v for m in modules for k, v in vars(m).items() if not k.startswith("__")})


@pytest.fixture(scope="module")
def old():
    """fasterai 0.3.2: its analysis, its `Sparsifier`, and its criteria."""
    with peer("0.3.2") as load: return public(load("core.criteria"), load("analyze.sensitivity"))


@pytest.fixture(scope="module")
def new():
    """fasterai 0.4.1: its `Sparsifier`, `SparsifyCallback` and schedules."""
    with peer("0.4.1") as load: return public(load("sparse.all"))


@pytest.fixture(scope="module")
def learn():
    """A narrow ResNet with one block in each stage, trained on the digits for so long that its layers differ."""
    return digits_learner(epochs=2, arch=partial(NarrowResNet, layers=[1, 1, 1, 1]))


@pytest.fixture(scope="module")
def outputs(learn):
    """Function from a model to its outputs for some of the validation digits, and their labels."""
    x, y = (t[:64] for t in learn.dls.valid_ds.tensors)
    return lambda model: (torch.no_grad()(model)(x), y)


@pytest.fixture(scope="module")
def evals(outputs):
    """Metric name -> `eval_fn`."""
    return {name: lambda model, f=f: f(*outputs(model)) for name, f in metrics.items()}


@pytest.mark.parametrize("version", ["0.3.2", "0.4.1"])
def test_peer_is_installed_and_kept_apart(version):
    """Each version is imported from its own folder, and is gone afterwards."""
    with peer(version) as load: assert Path(load("analyze.sensitivity").__file__).is_relative_to(folder_of(version))
    assert not forget_fasterai() and not any(Path(p).is_relative_to(peers) for p in sys.path)


# What one weight can change

def at_threshold(scores, kept):
    """The highest-scoring of the blocks that are dropped: `scores >= threshold` keeps them if the k-th smallest score is the threshold."""
    return ~kept & (scores == scores.masked_fill(kept, -torch.inf).max())


def ties_expected(n):
    """How many more of `n` weights may have the very same float32 score as the one at the threshold."""
    return min(n//10**5, 3)


def their_scores(old, module, granularity="weight", criteria="large_final"):
    """Scores of fasterai 0.3.2, which are shifted above zero in float32, one for each weight."""
    return getattr(old, criteria)(module, granularity).expand(module.weight.shape)


@pytest.fixture(scope="module", params=[50, 80], ids=lambda pct: f"{pct} %")
def sparse(request, old, learn, outputs, evals):
    """Both analyses at one level, and the metrics when our mask keeps the weight at the threshold too."""
    pct, sample, out = request.param, learn.dls.valid_ds.tensors[0][:1], SimpleNamespace(theirs={}, ours={}, one_more={}, extra={}, size={})
    for name, eval_fn in evals.items():
        args, kwargs = (learn.model, sample, eval_fn), dict(higher_is_better=name == "accuracy", metric_name=name)
        out.theirs[name] = old.SensitivityAnalyzer(*args, **kwargs).analyze("sparsity", pct, verbose=False)
        out.ours[name] = ours.SensitivityAnalyzer(*args, **kwargs).analyze("sparsity", pct, verbose=False)
    for unit in all_units(learn.model)[0]:
        kept = sparsity_mask(unit, pct)
        extra = at_threshold(their_scores(old, unit.module), kept)
        with leave_no_trace(learn.model, unit.tensors):
            unit.weight.data.masked_fill_(~(kept | extra), 0)
            learn.model.eval()
            outs = outputs(learn.model)
        out.one_more[unit.name] = {name: f(*outs) for name, f in metrics.items()}
        out.extra[unit.name], out.size[unit.name] = int(extra.sum()), extra.numel()
    return out


def check_same_layers(theirs, mine):
    """Same baseline, same layers, same order."""
    assert theirs.baseline_metric == pytest.approx(mine.baseline_metric, abs=noise)
    assert [(r.name, r.layer_type) for r in theirs.layers] == [(r.name, r.layer_type) for r in mine.layers]


def check_same_ranking(theirs, mine, moved):
    """`top` of both in the same order, but for pairs of layers that are no further apart than they moved."""
    place = {r.name: i for i, r in enumerate(theirs.top(len(theirs.layers)))}
    for a, b in combinations(mine.top(len(mine)), 2):
        assert place[a.name] < place[b.name] or a.delta - b.delta <= moved[a.name] + moved[b.name] + noise, f"{a.name} and {b.name} change places"


@pytest.mark.slow
def test_their_threshold_keeps_one_weight_more(sparse):
    """Each layer keeps one weight more in fasterai 0.3.2 than was asked; among very many weights some may have its score too."""
    for name, n in sparse.extra.items(): assert 1 <= n <= 1 + ties_expected(sparse.size[name]), name
    assert len(sparse.extra) == 13


@pytest.mark.slow
@pytest.mark.parametrize("metric", metrics)
def test_sparsity_with_one_weight_more_is_theirs(sparse, metric):
    """With the weight at the threshold kept, our masked layers give the metrics of fasterai 0.3.2."""
    assert {r.name: r.compressed_metric for r in sparse.theirs[metric].layers} == pytest.approx({n: m[metric] for n, m in sparse.one_more.items()}, abs=noise)


@pytest.mark.slow
@pytest.mark.parametrize("metric", metrics)
def test_sparsity_agrees_to_what_one_weight_can_change(sparse, metric):
    """Same layers, and deltas that differ by no more than keeping that one weight changes the metric; so the same ranking."""
    theirs, mine = sparse.theirs[metric], sparse.ours[metric]
    moved = {r.name: abs(sparse.one_more[r.name][metric] - r.compressed_metric) for r in mine.layers}
    check_same_layers(theirs, mine)
    for t, m in zip(theirs.layers, mine.layers, strict=True): assert abs(t.delta - m.delta) <= moved[m.name] + noise, m.name
    check_same_ranking(theirs, mine, moved)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "per_channel"), [(8, True), (4, True), (4, False)])
def test_weight_quantization_is_the_same(old, learn, evals, bits, per_channel):
    """Rounded weights are equal bit for bit in every layer, so deltas and ranking are too."""
    args, kwargs = (learn.model, learn.dls.valid_ds.tensors[0][:1], evals["loss"]), dict(higher_is_better=False)
    theirs, mine = (lib.SensitivityAnalyzer(*args, **kwargs).analyze("quantization", bits, quant_per_channel=per_channel, verbose=False) for lib in (old, ours))
    check_same_layers(theirs, mine)
    assert [r.delta for r in theirs.layers] == pytest.approx([r.delta for r in mine.layers], abs=noise)
    check_same_ranking(theirs, mine, dict.fromkeys((r.name for r in mine.layers), 0))
    for unit in all_units(learn.model)[0]:
        with leave_no_trace(learn.model, unit.tensors):
            old.SensitivityAnalyzer(*args)._apply_weight_quantization(unit.module, bits, per_channel)
            rounded = unit.weight.detach().clone()
        with Quantized(bits, per_channel)(learn.model, unit): assert torch.equal(unit.weight, rounded), unit.name


@pytest.mark.slow
@pytest.mark.parametrize(("target", "low", "high", "gamma"), [(50, 0, 90, 1), (70, 0, 90, 1.5), (30, 10, 80, .5), (85, 0, 95, 3)])
def test_targets_are_the_same_up_to_their_rounding(old, sparse, learn, target, low, high, gamma):
    """The same deltas give the targets of fasterai 0.3.2, which are rounded to two decimals."""
    rows = [old.LayerSensitivity(r.name, r.layer_type, u.weight.numel(), r.baseline_metric, r.compressed_metric, r.delta)
            for r, u in zip(sparse.ours["loss"].layers, all_units(learn.model)[0], strict=True)]
    theirs = old.SensitivityResult("sparsity", 50, rows[0].baseline_metric, rows).to_layer_targets(learn.model, target, low, high, gamma)
    assert sparse.ours["loss"].to_layer_targets(learn.model, target, low, high, gamma) == pytest.approx(theirs, abs=.005 + noise)


# Masks

layers = dict(conv=lambda: nn.Conv2d(8, 16, 3), grouped=lambda: nn.Conv2d(8, 16, 3, groups=2),
              transposed=lambda: nn.ConvTranspose2d(8, 16, 3), linear=lambda: nn.Linear(40, 30))
flat = ("weight", "row", "column")  # all that theirs has for linear layers
shared = [(kind, g) for kind in layers for g in (flat if kind == "linear" else (*flat, "kernel", "channel", "filter"))]


def both_masks(old, model, unit, pct, granularity, criteria, data=None):
    """Scores and mask of fasterai 0.3.2 for one layer, as it makes them (one value a block), and our mask."""
    theirs = old.Sparsifier(model, granularity, "local", getattr(old, criteria), layer_type=type(unit.module), data=None if data is None else [data])
    scores = theirs.criteria(unit.module, granularity)
    with leave_no_trace(model):
        theirs.sparsify_layer(unit.module, pct)
        mask = unit.module._mask.bool()
    theirs._clean_buffers()
    criterion = ours.Sparsifier(model, criteria=getattr(ours, criteria), calibration_data=data, sample=data).criteria
    return scores, mask, sparsity_mask(unit, pct, granularity, criterion)


@pytest.mark.parametrize("criteria", ["large_final", "small_final", "squared_final"])
@pytest.mark.parametrize(("kind", "granularity"), shared)
def test_masks_differ_by_the_block_at_the_threshold(old, kind, granularity, criteria):
    """Ours drops exactly the blocks asked; theirs drops the same but for the one at its threshold."""
    torch.manual_seed(0)
    model = nn.Sequential(layers[kind]())
    unit = all_units(model)[0][0]
    for pct in (20, 50, 80):
        scores, theirs, mine = both_masks(old, model, unit, pct, granularity, criteria)
        asked, block = n_dropped(scores.numel(), pct), mine.numel()//scores.numel()
        assert int((~mine).sum()) == asked*block and int((~theirs).sum()) == asked - 1
        assert torch.equal(theirs.expand_as(mine), mine | at_threshold(scores.expand_as(mine), mine))


@pytest.mark.parametrize("criteria", ["large_final", "small_final", "squared_final"])
def test_masks_of_a_trained_network_differ_by_what_is_at_the_threshold(old, learn, criteria):
    """In all layers theirs keeps besides our weights only those that its float32 scores cannot tell from the threshold."""
    for unit in all_units(learn.model)[0]:
        kept = sparsity_mask(unit, 80, criteria=getattr(ours, criteria))
        scores = their_scores(old, unit.module, criteria=criteria)
        theirs = scores >= scores.flatten().kthvalue(n_dropped(kept.numel(), 80)).values
        assert torch.equal(theirs, kept | at_threshold(scores, kept)), unit.name


@pytest.mark.parametrize(("kind", "granularity"), [(k, g) for k, g in shared if k in ("conv", "linear")])
def test_wanda_masks_agree(old, kind, granularity):
    """Their input norms are ours over a constant: masks differ by the block at the threshold, and by none that is not within rounding of it."""
    torch.manual_seed(0)
    model, data = nn.Sequential(layers[kind]()), torch.randn(32, *((8, 6, 6) if kind == "conv" else (40,)))
    unit = all_units(model)[0][0]
    for pct in (20, 50, 80):
        scores, theirs, mine = both_masks(old, model, unit, pct, granularity, "wanda", data)
        differ = theirs.expand_as(mine) != mine
        edge = scores.expand_as(mine)[at_threshold(scores.expand_as(mine), mine)][0]
        assert int(differ.sum()) == mine.numel()//scores.numel()
        torch.testing.assert_close(scores.expand_as(mine)[differ], edge.expand(int(differ.sum())), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["conv", "grouped"])
def test_filters_take_their_bias_along(old, kind):
    """Weight and bias after `sparsify_layer` are those of fasterai 0.3.2, but for the one filter at its threshold."""
    torch.manual_seed(0)
    model = nn.Sequential(layers[kind]())
    before, unit = deepcopy(model), all_units(model)[0][0]
    for pct in (20, 50, 80):
        _, kept, mine = both_masks(old, model, unit, pct, "filter", "large_final")
        theirs, sparse = (deepcopy(before) for _ in range(2))
        old.Sparsifier(theirs, "filter", "local", old.large_final, layer_type=nn.Conv2d).sparsify_layer(theirs[0], pct)
        ours.Sparsifier(sparse, "filter").sparsify_layer("0", pct)
        kept, mine = kept.flatten(), mine.flatten(1).all(1)
        same = kept == mine
        assert int((~same).sum()) == 1 and int((~mine).sum()) == n_dropped(16, pct)
        assert torch.equal(theirs[0].bias[same], sparse[0].bias[same]) and torch.equal(theirs[0].weight[same], sparse[0].weight[same])
        assert torch.equal(sparse[0].bias, before[0].bias.masked_fill(~mine, 0))


# Differences

@dataclass(frozen=True)
class Difference:
    """One way in which our results differ from those of fasterai 0.3.2, with its reason."""
    behaviour: str
    theirs: object
    ours: object
    why: str
    show: Callable  # fasterai 0.3.2 -> (what it does, what we do)


differences = []


def difference(behaviour, *, theirs, ours, why):
    """Enter a function that runs both libraries into `differences`."""
    def enter(show):
        differences.append(Difference(behaviour, theirs, ours, why, show))
        return show
    return enter


def toy():
    """A convolution, batch norm and a linear layer, in training mode; the same numbers each time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


image = torch.linspace(-1, 1, 2*3*5*5).view(2, 3, 5, 5)
untouched = toy()[0].weight.detach()


@torch.no_grad()
def mean_square(model, x=image):
    """A metric: the mean square of the outputs."""
    return model(x).square().mean().item()


def both(old, model=None, eval_fn=mean_square, sample=image, **options):
    """Analyzers of both libraries, each with a model of its own."""
    return [cls(deepcopy(model or toy()), sample, eval_fn, **options) for cls in (old.SensitivityAnalyzer, ours.SensitivityAnalyzer)]


def outcome(f, *args, **kwargs):
    """What a call returns, or the name of the error it raises."""
    try: return f(*args, **kwargs)
    except (ValueError, KeyError, RuntimeError, ArithmeticError) as e: return type(e).__name__


def analyze(analyzers, *args, **kwargs):
    """What each analyzer returns, or the name of the error it raises."""
    return [outcome(a.analyze, *args, verbose=False, **kwargs) for a in analyzers]


def names(result):
    """Layer names of a result."""
    return result if isinstance(result, str) else [r.name for r in result.layers]


def traces(analyzers, *args, **kwargs):
    """What an analysis leaves changed on each model; `state_dict` goes without saying, its keys are parameters and buffers."""
    before = [fingerprint(a.model) for a in analyzers]
    analyze(analyzers, *args, **kwargs)
    return tuple({c.split(":")[0] for c in changes(b, fingerprint(a.model))} - {"state_dict"} for a, b in zip(analyzers, before, strict=True))


def seen(analyzers, look, *args, **kwargs):
    """What `look` sees on each model when it is evaluated with its first layer compressed."""
    out = []
    for a in analyzers:
        looks = []
        def eval_fn(model, looks=looks):
            looks.append(look(model))
            return float(len(looks))
        a.eval_fn = eval_fn
        analyze([a], *args, **kwargs)
        out.append(looks[1])
    return tuple(out)


hang = """
from fasterai.analyze.sensitivity import LayerSensitivity, SensitivityResult
result = SensitivityResult("sparsity", 50, 1., [LayerSensitivity("a", "Linear", 10, 1., .9, .1), LayerSensitivity("b", "Linear", 10, 1., .8, .2)])
print(sorted(result.to_layer_targets(None, 50, max_pct=90)), flush=True)
result.to_layer_targets(None, 95, max_pct=90)
"""


@difference("target_pct outside [min_pct, max_pct]", theirs="runs for ever", ours="ValueError", why="its bracket search has no end")
def out_of_bounds(old):
    env = {**os.environ, "PYTHONPATH": str(folder_of("0.3.2")), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, "-c", hang], stdout=subprocess.PIPE, env=env, text=True) as process:
        try:
            assert process.stdout.readline() == "['a', 'b']\n", "a target within the bounds is found, so what follows is about the other one only"
            theirs = f"returns {process.wait(2)}"
        except subprocess.TimeoutExpired: theirs = "runs for ever"
        finally: process.kill()
    return theirs, outcome(analyze(both(old))[1].to_layer_targets, toy(), 95, max_pct=90)


@difference("targets for 40 % have that mean to a millionth", theirs=False, ours=True, why="it rounds each target to two decimals")
def rounded_targets(old):
    return tuple(abs(LayerTargets(r.to_layer_targets(toy(), 40)).mean(toy()) - 40) < 1e-6 for r in analyze(both(old)))


def breaks_with_last_layer(model):
    """A metric that counts what is left of the first layer, and is NaN once the last layer has lost weights."""
    return math.nan if (model[-1].weight == 0).any() else (model[0].weight != 0).double().mean().item()


@difference("a layer without which the metric is NaN", theirs="most robust", ours="most fragile", why="it sorts by delta, and NaN compares with nothing")
def nan_ranks(old):
    return tuple("most fragile" if r.top(1)[0].name == "5" else "most robust" for r in analyze(both(old, eval_fn=breaks_with_last_layer)))


@difference("the target of that layer", theirs=90, ours=0, why="max(0, NaN) is 0, which is no damage at all")
def nan_target(old):
    return tuple(r.to_layer_targets(toy(), 40, max_pct=90)["5"] for r in analyze(both(old, eval_fn=breaks_with_last_layer)))


@difference("a baseline that is NaN", theirs=["0", "5"], ours="ValueError", why="every delta is NaN, so there is nothing to rank")
def nan_baseline(old):
    return tuple(map(names, analyze(both(old, eval_fn=lambda model: math.nan))))


def raises_when_compressed(model):
    """A metric that fails once the first layer is compressed."""
    return mean_square(model) if torch.equal(model[0].weight, untouched) else 1/0


@difference("changed on the model after eval_fn raised", theirs={"parameters", "buffers", "modes"}, ours=set(), why="it cleans up only on the way to a result")
def raising(old):
    return traces(both(old, eval_fn=raises_when_compressed), "sparsity", 50)


@difference("changed after eval_fn raised, with activations quantized", theirs={"parameters", "hooks", "modes"}, ours=set(), why="the same")
def raising_with_hooks(old):
    return traces(both(old, eval_fn=raises_when_compressed), "quantization", 4, quant_activations=True)


@difference("changed after an analysis of a model in training mode", theirs={"modes"}, ours=set(), why="it calls model.eval() and leaves it at that")
def mode(old):
    return traces(both(old), "sparsity", 50)


@difference("changed after an analysis whose eval_fn calls model.train()", theirs={"buffers"}, ours=set(), why="it does not restore batch-norm statistics")
def training_eval(old):
    return traces(both(old, eval_fn=lambda model: mean_square(model.train())), "sparsity", 50)


@difference("1 bit", theirs="quantization-8bit", ours="ValueError", why="its test for a level that was left out is `level > 1`")
def one_bit(old):
    theirs, mine = analyze(both(old), "quantization", 1)
    return theirs.compression_type, mine


@difference("quantization without a level", theirs=50, ours=8, why="its default is the one of sparsity")
def default_bits(old):
    return tuple(r.compression_level for r in analyze(both(old), "quantization"))


@difference("compression_type of a quantization result", theirs="quantization-4bit", ours="quantization",
            why="the level has a field of its own, and a name can be looked up")
def quantization_name(old):
    return tuple(r.compression_type for r in analyze(both(old), "quantization", 4))


@difference("a mistyped layer", theirs=[], ours="KeyError", why="it keeps the layers whose names are in the list, if any")
def mistyped(old):
    return tuple(map(names, analyze(both(old), layers=["conv_1"])))


@difference("two layers with one weight", theirs=["0", "2"], ours=["0"], why="it looks at modules; both rows are the same measurement")
def tied(old):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x = torch.ones(1, 4)
    return tuple(map(names, analyze(both(old, model, lambda m: mean_square(m, x), x))))


@difference("a layer it has no granularities for", theirs=[], ours=["0"],
            why="it knows Conv1d, Conv2d, ConvTranspose2d and Linear, and says nothing of the rest")
def unknown_kind(old):
    x = torch.ones(1, 1, 3, 3, 3)
    return tuple(map(names, analyze(both(old, nn.Sequential(nn.Conv3d(1, 4, 3)), lambda m: mean_square(m, x), x))))


@difference("the axis with a scale for each index, in a transposed convolution", theirs=0, ours=1, why="its axis 0 is the input channels there")
def transposed_axis(old):
    x, model = torch.ones(1, 4, 3, 3), nn.Sequential(nn.ConvTranspose2d(4, 6, 3))
    largest = [model[0].weight.abs().amax(axes) for axes in ((1, 2, 3), (0, 2, 3))]
    def look(m): return [torch.allclose(m[0].weight.abs().amax(axes), best) for axes, best in zip(((1, 2, 3), (0, 2, 3)), largest, strict=True)].index(True)
    return seen(both(old, model, sample=x), look, "quantization", 3)


@difference("outputs between 10 and 11, quantized to 8 bits", theirs=1., ours=10.5, why="its range need not contain zero, so the zero point is cut off")
def range_without_zero(old):
    model, x = nn.Sequential(nn.Linear(1, 1)), torch.linspace(0, 1, 11)[:, None]
    model[0].weight.data.fill_(1)
    model[0].bias.data.fill_(10)
    rows = [r.layers[0] for r in analyze(both(old, model, lambda m: m(x).mean().item(), x), "quantization", 8, quant_activations=True)]
    return tuple(round(r.compressed_metric, 1) for r in rows)


@difference("evaluations of a sweep over 3 levels of 2 layers", theirs=9, ours=7, why="it measures the baseline again for each level")
def evaluations(old):
    out = []
    for a in both(old):
        calls = []
        a.eval_fn = lambda model, calls=calls: calls.append(1) or 1.
        a.sweep("sparsity", [25, 50, 75], verbose=False)
        out.append(len(calls))
    return tuple(out)


@difference("levels of a sweep without levels", theirs=[25, 50, 75], ours=[25, 50, 75, 90],
            why="targets end at the last level measured; 90 is the default max_pct")
def default_levels(old):
    return tuple([r.compression_level for r in a.sweep(verbose=False)] for a in both(old))


@difference("params", theirs=[216, 32], ours=[224, 36], why="ours are the layer's own parameters, so its bias too")
def params(old):
    return tuple([r.params for r in result.layers] for result in analyze(both(old)))


@difference("a level that drops no block: 10 % of 8 filters", theirs=["0"], ours=[],
            why="nothing was dropped, so a delta of 0 says nothing; ours has the reason in `skipped`")
def nothing_dropped(old):
    results = analyze(both(old, toy()[:1]), "sparsity", 10, granularity="filter")
    return tuple([r.name for r in result.top(most_sensitive=False)] for result in results)


@difference("biases that are zero when half of 8 filters are dropped", theirs=3, ours=4,
            why="a bias goes with its filter in both; its threshold keeps one filter more")
def filter_bias(old):
    return seen(both(old, toy()[:1]), lambda m: int((m[0].bias == 0).sum()), "sparsity", 50, granularity="filter")


@difference("filters of a linear layer", theirs="ValueError", ours=["0", "5"],
            why="it has no such granularity for Linear, so a network that ends in one cannot be analyzed")
def linear_filters(old):
    return tuple(map(names, analyze(both(old), "sparsity", 50, granularity="filter")))


@difference("row sparsity of a Conv1d of 4 outputs, 3 inputs, kernel 5: weights in a block", theirs=3, ours=5,
            why="it takes Conv1d for Linear; a row is a row of the kernel")
def rows_of_conv1d(old):
    model, x = nn.Sequential(nn.Conv1d(3, 4, 5)), torch.ones(1, 3, 5)
    def look(m):
        dropped = (m[0].weight == 0)
        return 3 if (dropped.all(1) == dropped.any(1)).all() else 5 if (dropped.all(2) == dropped.any(2)).all() else 1
    return seen(both(old, model, sample=x), look, "sparsity", 50, granularity="row")


@difference("wanda with calibration_data", theirs="ValueError", ours=["0", "5"], why="it takes calibration_data, and uses it nowhere")
def calibration(old):
    a, b = both(old, calibration_data=image)
    a.criteria, b.criteria = old.wanda, ours.wanda
    return tuple(map(names, analyze([a, b])))


@difference("wanda on a convolution with groups, in its Sparsifier", theirs="RuntimeError", ours=[50., 50.],
            why="it takes the inputs of one group for all inputs")
def wanda_with_groups(old):
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1)), torch.ones(1, 4, 3, 3)
    theirs = outcome(old.Sparsifier, deepcopy(model), "weight", "local", old.wanda, data=x)
    s = ours.Sparsifier(model, criteria=ours.wanda, calibration_data=x, sample=x)
    s.sparsify_model(50)
    return theirs, [100*(u.weight == 0).double().mean().item() for u in s.units]


@pytest.mark.parametrize("d", differences, ids=lambda d: d.show.__name__)
def test_difference_is_as_listed(d, old):
    """Run on the same model, both libraries do what the table of differences says."""
    assert d.show(old) == (d.theirs, d.ours), d.behaviour


# Drop-in

@pytest.mark.parametrize("name", ["analyze_sensitivity", "SensitivityAnalyzer", "SensitivityAnalyzer.analyze", "SensitivityAnalyzer.sweep",
                                  "LayerSensitivity", "SensitivityResult", "SensitivityResult.top", "SensitivityResult.summary",
                                  "SensitivityResult.to_layer_targets", "SensitivityResult.plot"])
def test_calls_written_for_it_bind(old, name):
    """Parameters come in its order and under its names, and defaults are its own; where ours is None it means 50 % or 8 bits for `level`, and what the method has for its options."""
    def parameters(where):
        for part in name.split("."): where = getattr(where, part)
        return {n: p for n, p in signature(where).parameters.items() if p.kind is not Parameter.VAR_KEYWORD}
    def by_position(parameters): return [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    theirs, mine = parameters(old), parameters(ours)
    assert by_position(mine)[:len(by_position(theirs))] == by_position(theirs)
    for n, p in theirs.items(): assert mine[n].kind == p.kind and (n == "criteria" or mine[n].default in (None, p.default)), n


def test_results_have_its_fields(old):
    """Every field of its results is there under its name, first and in its order."""
    for name in ("LayerSensitivity", "SensitivityResult"):
        theirs, mine = ([f.name for f in fields(getattr(lib, name)) if f.init] for lib in (old, ours))
        assert mine[:len(theirs)] == theirs


def test_its_successor_has_no_analysis():
    """fasterai 0.4.1 raises ImportError for the names that this library gives back."""
    with peer("0.4.1") as load:
        for name in ("analyze_sensitivity", "SensitivityAnalyzer", "SensitivityResult", "LayerSensitivity"):
            with pytest.raises(ImportError): getattr(load("analyze.sensitivity"), name)
            assert hasattr(ours, name)


# fasterai 0.4.1 takes our targets

compressible = (nn.Conv2d, nn.Linear)  # its default is convolutions only


@pytest.fixture(scope="module")
def targets(learn, evals):
    """Targets for 70 % from an analysis."""
    result = ours.analyze_sensitivity(learn.model, learn.dls.valid_ds.tensors[0][:1], evals["loss"], level=80, higher_is_better=False, verbose=False)
    return result.to_layer_targets(learn.model, 70, max_pct=95)


@contextmanager
def no_unit_warning():
    """It warns when it takes a number for percent, which is an error here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=FutureWarning, message=".*percent")
        yield


def test_sparsifier_of_its_successor_takes_our_targets(new, learn, targets):
    """`as_fractions` goes into its `Sparsifier` unchanged; every layer keeps our weights for its target, and the one at the threshold."""
    model = deepcopy(learn.model)
    with no_unit_warning(): new.Sparsifier(model, "weight", "local", new.large_final, layer_type=compressible).sparsify_model(targets.as_fractions())
    assert max(targets.values()) - min(targets.values()) > 20
    for mine, theirs in zip(*(all_units(m)[0] for m in (learn.model, model)), strict=True):
        kept = sparsity_mask(mine, targets[mine.name])
        assert torch.equal(theirs.weight != 0, kept | at_threshold(new.large_final(mine.module, "weight"), kept)), mine.name


@pytest.mark.slow
def test_callback_of_its_successor_takes_our_targets(new, learn, targets):
    """`as_fractions` goes into its `SparsifyCallback` unchanged; after a fit every layer has the zeros of its target but for the one at the threshold."""
    schedule = new.Schedule(new.sched_agp, start_pct=.2, end_pct=.8)
    with no_unit_warning(): callback = new.SparsifyCallback(targets.as_fractions(), "weight", "local", new.large_final, schedule, layer_type=compressible)
    with leave_no_trace(learn.model):
        before = learn.model.conv1.weight.detach().clone()
        learn.create_opt()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=callback)
        assert not torch.equal(learn.model.conv1.weight, before)
        for u in all_units(learn.model)[0]:
            n = u.weight.numel()
            missing = n_dropped(n, targets[u.name]) - int((u.weight == 0).sum())
            assert 0 <= missing <= 1 + ties_expected(n), u.name
