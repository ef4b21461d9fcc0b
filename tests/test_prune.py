"""Structural pruning: what is measured is what is done, on real networks; `Pruner`, optimizers, `PruneCallback`, and the pruners before us."""

import io
import math
import pickle
import warnings
from copy import deepcopy
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as tv
from fastai.callback import progress, schedule
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.fp16 import AMPMode, MixedPrecision
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders, Datasets
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import SGD as FastaiSGD
from fastai.optimizer import Adam as FastaiAdam
from fastai.optimizer import OptimWrapper
from fastai.torch_core import params, set_seed
from fastcore.basics import noop
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from toys import SHORT, peer

import fasterai_sens.methods.pruner as pruner_module
from fasterai_sens import LayerTargets, Plan, PruneCallback, Pruner, Schedule, SensitivityAnalyzer, SparsifyCallback, hold
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.state import leave_no_trace
from fasterai_sens.methods.criteria import large_final, movement, random, seeded, taylor, updating_movement, wanda
from fasterai_sens.methods.proof import channel_groups
from fasterai_sens.train.schedules import agp, dsd, iterative, one_cycle, schedules

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*CUDA.*"),  # mixed precision on a machine without a GPU
    pytest.mark.filterwarnings("ignore:load_learner"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]

assert Learner.lr_find is not None and schedule  # the import gives the Learner this, fit_one_cycle and fine_tune
rising = {n: s for n, s in schedules.items() if n != "dsd"}


# ---------------------------------------------------------------- networks


def distinct(model, seed=0):
    """Give numbers of their own to the parameters and statistics that a fresh network has all alike, so that no channel is like another."""
    g = torch.Generator().manual_seed(seed)
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if not t.is_floating_point() or t.numel() == 1 or (t != t.flatten()[0]).any():
            continue
        if name.endswith(("weight", "running_var", "layer_scale")) and t.dim() != 2:
            t.data.copy_(torch.rand(t.shape, generator=g) + .5)
        else:
            t.data.copy_(torch.randn(t.shape, generator=g) * .1)
    return model.eval()


@cache
def _made(name):
    torch.manual_seed(0)
    build = getattr(tv, name) if name in ("resnet18", "mobilenet_v2") else SHORT[name]
    model = distinct(build(num_classes=10))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for m in norms:  # statistics of real activations, or nothing of the image is left after thirty layers
        m.train().momentum = 1.
    with torch.no_grad():
        model(torch.randn(16, 3, 32, 32))
    for m in norms:
        m.eval().momentum = .1
    return model


def made(name):
    """A torchvision network of ten classes."""
    return deepcopy(_made(name))


torch.manual_seed(0)
images, classes = torch.randn(2, 3, 32, 32), torch.tensor([3, 7])


@torch.no_grad()
def losses(model):
    """The loss of each image."""
    return F.cross_entropy(model(images), classes, reduction="none")


def small(seed=0):
    """Two convolutions with batch norm, and a head."""
    torch.manual_seed(seed)
    return distinct(nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 20), nn.ReLU(), nn.Linear(20, 10)))


def mlp(*sizes, seed=0):
    """Linear layers named 0, 2, 4, ... with ReLU between them."""
    torch.manual_seed(seed)
    return nn.Sequential(*[m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())][:-1])


class Residual(nn.Module):
    """`stem` and `back` lose the same channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.back, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 8, 1), nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((x + self.back(self.inner(x).relu())).mean((2, 3)))


def residual():
    torch.manual_seed(0)
    return Residual().eval()


def widths(model):
    """Layer name -> output channels."""
    return {u.name: u.filters.shape[0] for u in all_units(model)[0]}


def n_left(n, pct):
    """How many of `n` stay when `pct` percent, rounded down, go."""
    return n - math.floor(n * pct / 100)


def kept_rows(new, old, dim=0):
    """Which slices of `old` along one axis are those of `new`, in order."""
    old, new = old.movedim(dim, 0), new.movedim(dim, 0)
    return [next(i for i, o in enumerate(old) if torch.equal(o, n)) for n in new]


def worst(scores, n):
    """The numbers of the `n` smallest, rising."""
    return sorted(sorted(range(len(scores)), key=lambda i: float(scores[i]))[:n])


def others(n, gone):
    """The numbers below `n` that are not in `gone`."""
    return [i for i in range(n) if i not in set(gone)]


# ---------------------------------------------------------------- what is measured is what is done

coupled = dict(resnet18=12, densenet=28, efficientnet=13, vit=3, convnext=9)  # groups that can be pruned


def pruned_losses(model, names, pct, reuse):
    """Name -> losses after a `Pruner` of its own removed channels of that layer alone, from a copy of the model.

    With `reuse` the copy's groups are found once, because tracing it for each of them takes minutes.
    """
    found = {}
    if not reuse:
        for name in names:
            own = deepcopy(model)
            Pruner(own, {name: pct}, example_inputs=images).prune_model()
            found[name] = losses(own)
        return found
    own = deepcopy(model)
    groups = channel_groups(own, images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruner_module, "channel_groups", lambda *args, **options: groups)
        for name in names:
            with leave_no_trace(own, weights=()):
                Pruner(own, {name: pct}, example_inputs=images).prune_model()
                found[name] = losses(own)
    return found


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[] if a in ("resnet18", "vit") else pytest.mark.slow) for a in coupled])
def test_each_delta_is_what_the_pruner_does(arch):
    model, calls = made(arch), []

    def counted(model):
        calls.append(1)
        return losses(model)

    before = fingerprint(model)
    result = SensitivityAnalyzer(model, images, counted, higher_is_better=False, metric_name="loss").analyze("pruning", 40, verbose=False)
    assert changes(before, fingerprint(model)) == []

    groups = {}
    for r in result.layers:
        groups.setdefault(r.group_id or r.name, []).append(r)
    can = {rows[0].name: rows for rows in groups.values() if rows[0].prunable}
    assert len(can) == coupled[arch]
    assert len(calls) - len(can) in (1, 2)   # the untouched model; and where results are reused, the first group plainly as well
    for rows in groups.values():
        assert len({repr((r.delta, r.stderr, r.ci, r.prunable)) for r in rows}) == 1
        assert all(r.group_members == ([x.name for x in rows] if len(rows) > 1 else []) for r in rows)
    assert [r.name for r in result.layers] == [u.name for u in all_units(model)[0]]

    skipped, last = dict(result.skipped), result.layers[-1]
    assert {r.name for r in result.layers if not r.prunable} == set(skipped) & {r.name for r in result.layers}  # besides norms and the like
    assert not last.prunable and math.isnan(last.delta) and "output of the model" in skipped[last.name]

    base = losses(model)
    some = list(can)[::math.ceil(len(can) / 12)]
    for name, after in pruned_losses(model, some, 40, reuse=True).items():
        assert can[name][0].delta == pytest.approx(float((after.double() - base.double()).mean()), abs=1e-6), name
    assert len({r[0].delta for r in can.values()}) == len(can) and all(r[0].delta != 0 for r in can.values())  # nothing here is degenerate


@pytest.mark.parametrize("arch", ["resnet18", "densenet", "vit"])
def test_a_pruner_that_finds_its_own_groups_agrees(arch):
    """Above they were found once for all: here two layers with everything done anew."""
    model = made(arch)
    names = [g.name for g in channel_groups(model, images) if not g.reason]
    names = [names[len(names) // 2], names[-1]]
    shared, alone = (pruned_losses(model, names, 40, reuse) for reuse in (True, False))
    for n in names:
        torch.testing.assert_close(alone[n], shared[n], rtol=0, atol=1e-6)


# ---------------------------------------------------------------- which channels go


def filters(w):
    """Mean size of each filter."""
    return w.abs().mean((1, 2, 3))


def readers(w):
    """Mean size of the weights that read each channel."""
    return w.abs().mean((0, 2, 3))


@pytest.mark.parametrize("pct", [40, 50, 75, 99])
def test_the_channels_of_resnet18_that_go(pct):
    """All filters and readers of the residual stream of the first stage, averaged."""
    old, new = made("resnet18"), made("resnet18")
    Pruner(new, {"conv1": pct}, example_inputs=images).prune_model()
    outs = [m.weight for m in (old.conv1, old.layer1[0].conv2, old.layer1[1].conv2)]
    ins = [m.weight for m in (old.layer1[0].conv1, old.layer1[1].conv1, old.layer2[0].conv1, old.layer2[0].downsample[0])]
    scores = (sum(map(filters, outs)) + sum(map(readers, ins))) / 7
    kept = others(64, worst(scores, math.floor(64 * pct / 100)))
    assert new.conv1.out_channels == len(kept)
    for m in ("conv1", "layer1.0.conv2", "layer1.1.conv2", "bn1", "layer1.1.bn2"):
        assert torch.equal(new.get_submodule(m).weight, old.get_submodule(m).weight[kept]), m
    for m in ("layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1", "layer2.0.downsample.0"):
        assert torch.equal(new.get_submodule(m).weight, old.get_submodule(m).weight[:, kept]), m
    for b in ("running_mean", "running_var"):
        assert torch.equal(getattr(new.bn1, b), getattr(old.bn1, b)[kept])
    same = [n for n in widths(old) if n not in ("conv1", "layer1.0.conv2", "layer1.1.conv2")]
    assert {n: widths(new)[n] for n in same} == {n: widths(old)[n] for n in same}


def test_the_channels_around_a_depthwise_convolution_that_go():
    """Its filters count once, beside those of the layer before it and the weights that read it."""
    old, new = made("mobilenet_v2"), made("mobilenet_v2")
    name = "features.2.conv"
    expand, depth, project = (old.get_submodule(f"{name}.{i}") for i in ("0.0", "1.0", "2"))
    Pruner(new, {f"{name}.1.0": 40}, example_inputs=images).prune_model()
    scores = (filters(expand.weight) + filters(depth.weight) + readers(project.weight)) / 3
    kept = others(96, worst(scores, 38))
    assert torch.equal(new.get_submodule(f"{name}.0.0").weight, expand.weight[kept])
    assert torch.equal(new.get_submodule(f"{name}.1.0").weight, depth.weight[kept])
    assert torch.equal(new.get_submodule(f"{name}.2").weight, project.weight[:, kept])
    assert new.get_submodule(f"{name}.1.0").groups == len(kept) == 58


def test_the_readers_behind_a_flattening():
    """A channel of 2 x 2 pixels is read by four columns; they count as one reader."""
    old, new = small(), small()
    Pruner(new, {"3": 50}, example_inputs=images).prune_model()
    scores = filters(old[3].weight) + old[8].weight.abs().mean(0).view(24, 4).mean(1)
    kept = others(24, worst(scores, 12))
    assert torch.equal(new[3].weight, old[3].weight[kept])
    assert torch.equal(new[8].weight, old[8].weight.view(20, 24, 4)[:, kept].flatten(1))


# ---------------------------------------------------------------- a level that removes nothing


def uneven():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 32, 1), nn.ReLU(), nn.Conv2d(32, 16, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).eval()


def test_a_level_that_removes_no_channel_is_no_result():
    model = uneven()
    model(images[..., :4, :4])
    calls = []

    def counted(model):
        calls.append(1)
        return F.cross_entropy(model(images[..., :4, :4]), classes, reduction="none")

    result = SensitivityAnalyzer(model, images[..., :4, :4], counted, higher_is_better=False).analyze("pruning", 20, verbose=False)
    rows, skipped = {r.name: r for r in result.layers}, dict(result.skipped)
    assert not rows["0"].prunable and math.isnan(rows["0"].delta) and math.isnan(rows["0"].compressed_metric)
    assert "20 % of 4 channels is none" in skipped["0"] and set(skipped) == {"0", "7"}
    assert len(calls) == 3
    for most in (True, False):
        assert {r.name for r in result.top(9, most_sensitive=most)} == {"2", "4"}
    targets = result.to_layer_targets(model, 30, max_pct=60)
    assert targets.mean(model) == pytest.approx(30, abs=1e-6) and set(targets) <= {"0", "2", "4", "7"}
    assert targets.get("0", 0) == targets.get("7", 0) == 0
    Pruner(model, targets, example_inputs=images[..., :4, :4]).prune_model()
    assert widths(model) == {"0": 4, "2": n_left(32, targets["2"]), "4": n_left(16, targets["4"]), "7": 10}


def test_a_coupled_group_is_one_knob():
    model = made("resnet18")
    result = SensitivityAnalyzer(model, images, losses, higher_is_better=False).analyze("pruning", 40, verbose=False)
    targets = result.to_layer_targets(model, 30)
    for r in result.layers:
        assert len({targets[n] for n in r.group_members}) <= 1
    Pruner(model, targets, example_inputs=images).prune_model()
    for name, n in widths(made("resnet18")).items():
        assert widths(model)[name] == n_left(n, targets.get(name, 0)), name


# ---------------------------------------------------------------- what may be asked


def test_one_percentage_for_all():
    model = small()
    pruner = Pruner(model, 40, example_inputs=images)
    assert widths(model) == widths(small())  # nothing happens before it is told
    pruner.prune_model()
    assert widths(model) == {"0": 10, "3": 15, "8": 12, "10": 10}
    pruner.prune_model()
    assert widths(model) == {"0": 10, "3": 15, "8": 12, "10": 10}
    assert model(images).shape == (2, 10)


@pytest.mark.parametrize("key", ["stem", "back", "module"])
def test_any_coupled_layer_may_be_named(key):
    model = residual()
    Pruner(model, {model.back if key == "module" else key: 50, "inner": 0}, example_inputs=images).prune_model()
    assert widths(model) == {"stem": 4, "inner": 6, "back": 4, "head": 10}


def test_coupled_layers_may_not_disagree():
    Pruner(residual(), {"stem": 50, "back": 50}, example_inputs=images)
    with pytest.raises(ValueError, match="coupled"):
        Pruner(residual(), {"stem": 50, "back": 25}, example_inputs=images)


@pytest.mark.parametrize("ratio", [{"inne": 50}, {"stem": 50, "inne": 50}])
def test_an_unknown_name_names_the_near_one(ratio):
    with pytest.raises(KeyError, match="'inner'"):
        Pruner(residual(), ratio, example_inputs=images)


def test_a_module_of_another_model_is_unknown():
    with pytest.raises(KeyError, match="unknown|not in the model"):
        Pruner(residual(), {residual().stem: 50}, example_inputs=images)


def test_less_than_one_percent_warns():
    model = mlp(4, 400, 10)
    with pytest.warns(UserWarning, match="percent") as seen:
        Pruner(model, .5, example_inputs=torch.randn(2, 4)).prune_model()
    assert len(seen) == 1 and widths(model) == {"0": 398, "2": 10}


@pytest.mark.parametrize("bad", [100, 150, -1, float("nan"), float("inf"), True, "50", None], ids=repr)
@pytest.mark.parametrize("where", ["all", "one", "callback"])
def test_what_is_no_percentage(bad, where):
    with pytest.raises(ValueError, match="percent|%"):
        if where == "callback":
            PruneCallback(bad)
        else:
            Pruner(residual(), bad if where == "all" else {"stem": bad}, example_inputs=images)


def test_bits_are_no_percentage():
    for make in (partial(Pruner, residual(), example_inputs=images), PruneCallback):
        with pytest.raises(ValueError, match="bits"):
            make(LayerTargets({"stem": 8}, unit="bits"))


@pytest.mark.parametrize(("options", "error"), [
    (dict(context="both"), ValueError), (dict(schedule=dsd), ValueError), (dict(schedule="agp"), TypeError), (dict(steps=0), ValueError),
    (dict(steps=True), ValueError), (dict(steps=1.5), ValueError), (dict(round_to=0), ValueError), (dict(round_to=True), ValueError),
    (dict(criteria="large_final"), TypeError), (dict(ignored_layers=["stam"]), KeyError), (dict(ignored_layers=[nn.Linear(1, 1)]), KeyError),
    (dict(criteria=taylor), ValueError), (dict(criteria=wanda), ValueError)], ids=lambda v: " ".join(v) if isinstance(v, dict) else v.__name__)
def test_options_that_make_no_sense(options, error):
    model = residual()
    before = fingerprint(model)
    with pytest.raises(error):
        Pruner(model, 50, example_inputs=images, **options)
    assert changes(before, fingerprint(model)) == []


def test_targets_and_one_ranking_exclude_each_other():
    with pytest.raises(ValueError, match="local"):
        Pruner(residual(), {"stem": 50}, context="global", example_inputs=images)


@pytest.mark.parametrize("layer", ["head", "fc"])
def test_what_cannot_be_pruned_is_refused_if_named(layer):
    model = residual() if layer == "head" else made("resnet18")
    with pytest.raises(ValueError, match="output of the model"):
        Pruner(model, {layer: 50}, example_inputs=images)


@pytest.mark.parametrize("kind", ["name", "module", "container", "one"])
def test_ignored_layers_stay(kind):
    """A layer, or a container with everything in it; what is coupled to it stays too."""
    old, model = made("resnet18"), made("resnet18")
    ignored = {"name": ["layer1.0.conv2"], "module": [model.layer1[0].conv2], "container": [model.layer2], "one": "layer1"}[kind]
    pruner = Pruner(model, 50, ignored_layers=ignored, example_inputs=images)
    pruner.prune_model()
    stay = {"name": {"conv1", "layer1.0.conv2", "layer1.1.conv2"}, "container": {n for n in widths(old) if n.startswith("layer2.")}}
    stay["module"], stay["one"] = stay["name"], {"conv1", *(n for n in widths(old) if n.startswith("layer1."))}
    assert {n for n, w in widths(old).items() if widths(model)[n] == w} == stay[kind] | {"fc"}
    reasons = dict(pruner.skipped)
    assert set(reasons) == stay[kind] | {"fc"} and all("ignored" in reasons[n] for n in stay[kind]) and "output" in reasons["fc"]
    assert model(images).shape == (2, 10)


# ---------------------------------------------------------------- one ranking, multiples


def group_sizes(model):
    """Group name -> channels, of the groups that can be pruned."""
    return {g.name: len(g.granules) for g in channel_groups(model, images) if not g.reason}


@pytest.mark.parametrize("pct", [10, 50, 95])
def test_one_ranking_removes_the_share_that_was_asked(pct):
    old, model = made("resnet18"), made("resnet18")
    before = group_sizes(old)
    Pruner(model, pct, context="global", example_inputs=images).prune_model()
    left = {n: widths(model)[n] for n in before}
    assert sum(before.values()) - sum(left.values()) == math.floor(sum(before.values()) * pct / 100)
    assert all(n >= 1 for n in left.values()) and len({left[n] / before[n] for n in left}) > 2
    assert model(images).shape == (2, 10)


def test_one_ranking_by_hand():
    old, model = mlp(6, 12, 10, 8, 4), mlp(6, 12, 10, 8, 4)
    old[2].weight.data *= .5
    model[2].weight.data *= .5
    Pruner(model, 40, context="global", example_inputs=torch.randn(2, 6)).prune_model()
    scores = {n: (a.weight.abs().mean(1) + b.weight.abs().mean(0)) / 2 for n, a, b in (("0", old[0], old[2]), ("2", old[2], old[4]), ("4", old[4], old[6]))}
    ranked = sorted((float(s), n) for n, x in scores.items() for s in x.sort().values[:-1])
    gone = [n for _, n in ranked[:math.floor(30 * 40 / 100)]]
    assert widths(model) == {"0": 12 - gone.count("0"), "2": 10 - gone.count("2"), "4": 8 - gone.count("4"), "6": 4}
    assert torch.equal(model[0].bias, old[0].bias[others(12, worst(scores["0"], gone.count("0")))])


def test_every_group_keeps_its_best_channel():
    model = mlp(6, 12, 10, 8, 4)
    Pruner(model, 99, context="global", example_inputs=torch.randn(2, 6)).prune_model()
    assert widths(model) == {"0": 1, "2": 1, "4": 1, "6": 4}


@pytest.mark.parametrize("context", ["local", "global"])
@pytest.mark.parametrize("arch", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnext", "mobilenet_v2"))])
def test_multiples_of_eight(arch, context):
    """Also in grouped convolutions, which lose as many channels from each group."""
    old, model = made(arch), made(arch)
    pruner = Pruner(model, 45, context=context, round_to=8, example_inputs=images)
    pruner.prune_model()
    ours = [n for g in pruner.groups.values() for n in g.members]
    assert all(widths(model)[n] % 8 == 0 for n in ours)
    assert sum(widths(model)[n] for n in ours) < .8 * sum(widths(old)[n] for n in ours)
    if context == "local":
        grouped = [n for n, m in old.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
        assert all(abs(widths(model)[n] - .55 * widths(old)[n]) <= 8 for n in ours if arch != "resnext" and n not in grouped)
    for m in model.modules():
        if isinstance(m, nn.Conv2d) and arch == "resnext" and m.groups > 1:
            assert m.groups == 32 and m.out_channels % 32 == m.in_channels % 32 == 0
    assert model(images).shape == (2, 10)


# ---------------------------------------------------------------- in steps


@pytest.mark.parametrize("rise", [agp, one_cycle, iterative, None], ids=["agp", "one_cycle", "iterative", "equal"])
def test_a_schedule_in_steps(rise):
    model = small()
    pruner, old = Pruner(model, 75, schedule=rise, steps=5, example_inputs=images), widths(model)
    seen = []
    for i in range(1, 6):
        pruner.prune_model()
        share = i / 5 if rise is None else rise.progress(i / 5)
        assert {n: widths(model)[n] for n in ("0", "3", "8")} == {n: n_left(old[n], round(75 * share, 9)) for n in ("0", "3", "8")}
        assert model(images).shape == (2, 10)
        seen.append(widths(model)["3"])
    assert len(set(seen)) >= 3
    pruner.prune_model()
    assert widths(model)["3"] == seen[-1] == 6


def test_a_global_ranking_in_steps_reaches_the_same_total():
    model = small()
    pruner = Pruner(model, 60, context="global", steps=4, example_inputs=images)
    for i in range(1, 5):
        pruner.prune_model()
        assert 60 - sum(widths(model)[n] for n in ("0", "3", "8")) == math.floor(60 * 15 * i / 100)


def test_one_layer_in_steps_is_one_step():
    """Scores of a lone group do not depend on what went before."""
    once, steps = small(), small()
    Pruner(once, {"3": 50}, example_inputs=images).prune_model()
    pruner = Pruner(steps, {"3": 50}, steps=4, example_inputs=images)
    for _ in range(4):
        pruner.prune_model()
    assert all(torch.equal(a, b) for a, b in zip(once.state_dict().values(), steps.state_dict().values(), strict=True))


# ---------------------------------------------------------------- criteria


def gone_by(criteria, **options):
    """The channels of the first layer that go at 50 %."""
    old, model = small(), small()
    Pruner(model, {"0": 50}, criteria=criteria, example_inputs=images, **options).prune_model()
    return others(16, kept_rows(model[0].weight, old[0].weight))


def test_random_channels():
    found = [gone_by(c) for c in (random, random, seeded(1), seeded(2), large_final)]
    assert found[0] == found[1] and len({tuple(f) for f in found}) >= 3 and all(len(f) == 8 for f in found)


def test_criteria_that_use_data():
    """Scores by hand: squared weight times mean squared gradient, and size times the norm of the input."""
    x, y = torch.randn(12, 3, 8, 8), torch.randint(10, (12,))
    model = small()
    squared = {}
    for a in range(0, 12, 4):
        model.zero_grad()
        F.cross_entropy(model(x[a:a+4]), y[a:a+4]).backward()
        for i in (0, 3):
            squared[i] = squared.get(i, 0) + model[i].weight.grad.square() / 3
    w0, w3 = model[0].weight.detach(), model[3].weight.detach()
    scores = (w0.square() * squared[0]).mean((1, 2, 3)) + (w3.square() * squared[3]).mean((0, 2, 3))
    batches = [(x[a:a+4], y[a:a+4]) for a in range(0, 12, 4)]
    assert gone_by(taylor, calibration_data=batches) == worst(scores, 8)
    with torch.no_grad():
        norm0 = x.square().sum((0, 2, 3)).sqrt()
        norm3 = model[:3](x).square().sum((0, 2, 3)).sqrt()
    scores = (w0.abs() * norm0[:, None, None]).mean((1, 2, 3)) + (w3.abs() * norm3[:, None, None]).mean((0, 2, 3))
    assert gone_by(wanda, calibration_data=[b for b, _ in batches]) == worst(scores, 8)
    for c in (taylor, wanda):
        with pytest.raises(ValueError, match="calibration_data"):
            gone_by(c)


@pytest.mark.parametrize("steps", [1, 3])
def test_how_far_weights_moved(steps):
    first, now = mlp(6, 12, 10, 4), mlp(6, 12, 10, 4, seed=1)
    old = deepcopy(now)
    pruner = Pruner(now, {"2": 50}, criteria=movement.since(first), steps=steps, example_inputs=torch.randn(2, 6))
    for _ in range(steps):
        pruner.prune_model()
    scores = (old[2].weight - first[2].weight).abs().mean(1) + (old[4].weight - first[4].weight).abs().mean(0)
    assert torch.equal(now[2].bias, old[2].bias[others(10, worst(scores, 5))])


def test_how_far_weights_moved_in_layers_that_shrink_together():
    """Earlier weights are cut with the weights they are compared with."""
    first, now = mlp(6, 12, 10, 4), mlp(6, 12, 10, 4, seed=1)
    pruner = Pruner(now, {"0": 50, "2": 50}, criteria=movement.since(first), steps=2, example_inputs=torch.randn(2, 6))
    w = [deepcopy(m) for m in (first, now)]
    kept = dict.fromkeys((0, 2))
    kept[0], kept[2] = list(range(12)), list(range(10))
    for n0, n2 in ((9, 8), (6, 5)):
        pruner.prune_model()
        d = [(b.weight - a.weight).detach().abs() for a, b in zip(*(m[::2] for m in w), strict=True)]
        d[0], d[1], d[2] = d[0][kept[0]], d[1][kept[2]][:, kept[0]], d[2][:, kept[2]]
        gone0, gone2 = worst(d[0].mean(1) + d[1].mean(0), len(kept[0]) - n0), worst(d[1].mean(1) + d[2].mean(0), len(kept[2]) - n2)
        kept[0], kept[2] = [kept[0][i] for i in others(len(kept[0]), gone0)], [kept[2][i] for i in others(len(kept[2]), gone2)]
        assert torch.equal(now[0].bias, w[1][0].bias[kept[0]]) and torch.equal(now[2].bias, w[1][2].bias[kept[2]])


def test_how_far_weights_moved_since_the_step_before():
    model = mlp(6, 12, 4)
    pruner = Pruner(model, {"0": 75}, criteria=updating_movement, steps=3, example_inputs=torch.randn(2, 6))
    g = torch.Generator().manual_seed(0)
    for left in (9, 6, 3):
        step = [torch.rand(m.weight.shape, generator=g) for m in (model[0], model[2])]
        with torch.no_grad():
            model[0].weight += step[0]
            model[2].weight += step[1]
        bias = model[0].bias.detach().clone()
        pruner.prune_model()
        kept = others(len(bias), worst(step[0].mean(1) + step[1].mean(0), 3))
        assert torch.equal(model[0].bias, bias[kept]) and len(kept) == left


# ---------------------------------------------------------------- inputs


class Named(nn.Module):
    """Takes two inputs, in a tuple or by name."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 8), nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, a, b):
        return self.head((self.left(a) + self.right(b)).relu())


@pytest.mark.parametrize("inputs", [(torch.randn(2, 5), torch.randn(2, 3)), dict(b=torch.randn(2, 3), a=torch.randn(2, 5))], ids=["tuple", "dict"])
def test_several_inputs(inputs):
    model = Named()
    Pruner(model, {"right": 50}, example_inputs=inputs).prune_model()
    assert widths(model) == {"left": 4, "right": 4, "head": 4}
    assert (model(**inputs) if isinstance(inputs, dict) else model(*inputs)).shape == (2, 4)


def test_inputs_are_guessed_for_images_and_rows():
    model = made("resnet18")
    Pruner(model, 50).prune_model()
    assert model.conv1.out_channels == 32 and model(images).shape == (2, 10)
    for model in (mlp(7, 8, 3), nn.Sequential(nn.Flatten(), *mlp(7, 8, 3)), mlp(7, 8, 3).double()):
        Pruner(model, 50).prune_model()
        assert sorted(widths(model).values()) == [3, 4]


@pytest.mark.parametrize("model", [
    nn.Sequential(nn.Conv1d(3, 8, 3), nn.Conv1d(8, 4, 3)), nn.Sequential(nn.Conv3d(3, 8, 3), nn.Conv3d(8, 4, 3)),
    nn.Sequential(nn.Embedding(20, 6), *mlp(6, 8, 3)), Named()], ids=["Conv1d", "Conv3d", "Embedding", "two inputs"])
def test_inputs_that_cannot_be_guessed(model):
    before = fingerprint(model)
    with pytest.raises(ValueError, match="example_inputs|sample"):
        Pruner(model, 50)
    assert changes(before, fingerprint(model)) == []


def test_an_error_names_the_parameter_of_the_call():
    """`example_inputs` where the user calls `Pruner`, `sample` where another call takes one"""
    def model(): return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Conv1d(8, 4, 3))

    plan, net = Plan(pruning={"0": 50}), model()
    optimizer = torch.optim.SGD(net.parameters(), .1)
    with pytest.raises(ValueError, match="^give example_inputs: what Sequential takes"): Pruner(model(), 50)
    with pytest.raises(ValueError, match="^give sample: what Sequential takes"): plan.apply(model())
    with pytest.raises(ValueError, match="^give sample: what Sequential takes"), hold(net, plan, total_steps=4, optimizer=optimizer): pass
    plan.apply(net, torch.randn(1, 3, 9))
    assert net[0].out_channels == 4


# ---------------------------------------------------------------- what stays


@pytest.mark.parametrize("training", [True, False])
def test_modes_stay(training):
    model = small().train(training)
    model[4].train(not training)
    before = [m.training for m in model.modules()]
    pruner = Pruner(model, 50, example_inputs=images)
    pruner.prune_model()
    pruner.print_sparsity()
    assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize("frozen", [["0.weight", "1.bias", "8.weight"], None], ids=["some", "all"])
def test_frozen_parameters_stay_frozen(frozen):
    model = small()
    frozen = [n for n, _ in model.named_parameters()] if frozen is None else frozen
    for n in frozen:
        model.get_parameter(n).requires_grad_(False)
    Pruner(model, 50, example_inputs=images).prune_model()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == frozen
    assert widths(model) == {"0": 8, "3": 12, "8": 10, "10": 10}


def test_gradients_are_cut_as_their_parameters():
    model = small()
    F.cross_entropy(model(images), classes).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.copy_(3 * p + 1)  # tells where each number came from
    model[3].bias.grad = None
    pruner = Pruner(model, 40, steps=2, example_inputs=images)
    for _ in range(2):
        pruner.prune_model()
        for n, p in model.named_parameters():
            assert p.grad is None if n == "3.bias" else torch.equal(p.grad, 3 * p + 1), n
    F.cross_entropy(model(images), classes).backward()


def test_a_shared_weight_stays_shared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model.append(nn.ReLU()).append(nn.Linear(4, 8)).append(nn.ReLU()).append(nn.Linear(8, 4))
    model[8].weight = model[4].weight
    pruner = Pruner(model, 50, example_inputs=torch.randn(2, 6))
    pruner.prune_model()
    assert model[8].weight is model[4].weight and model(torch.randn(3, 6)).shape == (3, 4)


# ---------------------------------------------------------------- the report


@pytest.mark.parametrize("arch", ["resnet18", "mobilenet_v2", "small"])
def test_the_report_is_a_count(arch, capsys):
    model = small() if arch == "small" else made(arch)

    def count():
        with torch.no_grad(), FlopCounterMode(display=False) as flops:
            model(images[:1])
        return dict(parameters=sum(p.numel() for p in model.parameters())) | {"multiply-accumulates": flops.get_total_flops() // 2}

    before, old = count(), {n: (w, sum(p.numel() for p in model.get_submodule(n).parameters())) for n, w in widths(model).items()}
    pruner = Pruner(model, 40, example_inputs=images)
    pruner.prune_model()
    pruner.print_sparsity()
    lines, after = [line for line in capsys.readouterr().out.splitlines() if line.split()], count()   # a slow machine shows a bar
    for what in before:
        words = next(line for line in lines if line.startswith(what)).split()
        assert (int(words[1].replace(",", "")), int(words[3].replace(",", ""))) == (before[what], after[what])
        assert float(words[4]) == pytest.approx(100 * (1 - after[what] / before[what]), abs=.051)
    for n, (width, size) in old.items():
        words = next(line for line in lines if line.split()[0] == n).split()
        now = sum(p.numel() for p in model.get_submodule(n).parameters())
        assert [int(w.replace(",", "")) for w in (words[2], words[4], words[5], words[7])] == [width, widths(model)[n], size, now]
    assert pruner.skipped and [line for line in lines if line.startswith("skipped")] == [f"skipped {n}: {why}" for n, why in pruner.skipped]


# ---------------------------------------------------------------- the smaller model is a model


def smaller(arch, ratio=40):
    model = small() if arch == "small" else made(arch)
    Pruner(model, ratio, example_inputs=images).prune_model()
    return model.eval()


@pytest.mark.parametrize("arch", ["small", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet18", "mobilenet_v2"))])
def test_the_smaller_model_trains(arch):
    model = smaller(arch).train()
    torch.manual_seed(0)
    x, y, opt, seen = torch.randn(8, 3, 32, 32), torch.arange(8), torch.optim.Adam(model.parameters(), 5e-3), []
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.
    for _ in range(15):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
        opt.step()
        seen.append(loss.item())
    assert seen[-1] < .9 * seen[0]


@pytest.mark.parametrize("arch", ["small", "resnet18", "vit"])
def test_the_smaller_model_is_saved_copied_and_exported(arch):
    model, file = smaller(arch, {f"encoder.layers.encoder_layer_{i}.mlp.0": 40 for i in (0, 2)} if arch == "vit" else 40), io.BytesIO()
    with torch.no_grad():
        out = model(images)
    assert all(p.is_leaf and p.requires_grad and p.is_contiguous() for p in model.parameters())
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = deepcopy(model)
    for p in copied.parameters():
        p.data.zero_()
    copied.load_state_dict(model.state_dict())
    exported = torch.export.export(model, (images,)).module()
    with torch.no_grad():
        assert torch.equal(loaded(images), out) and torch.equal(copied(images), out)
        torch.testing.assert_close(exported(images), out, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- optimizers

optimizers = dict(
    momentum=lambda groups: torch.optim.SGD(groups, 1e-2, momentum=.9), adam=lambda groups: torch.optim.Adam(groups, 1e-2),
    amsgrad=lambda groups: torch.optim.Adam(groups, 1e-2, amsgrad=True, foreach=True), adamw=lambda groups: torch.optim.AdamW(groups, 1e-2, weight_decay=.1),
    rmsprop=lambda groups: torch.optim.RMSprop(groups, 1e-2, momentum=.9, centered=True),
    fastai_adam=lambda groups: FastaiAdam([g["params"] for g in groups], lr=1e-2), fastai_sgd=lambda groups: FastaiSGD([g["params"] for g in groups], lr=1e-2, mom=.9),
    wrapped=lambda groups: OptimWrapper(groups, torch.optim.AdamW, lr=1e-2))


def three_groups(model):
    """Parameter groups: first layer, batch norms, the rest."""
    norms = [*model[1].parameters(), *model[4].parameters()]
    return [dict(params=[*model[0].parameters()], lr=1e-3), dict(params=norms), dict(params=[*model[3].parameters(), *model[8:].parameters()])]


def members(opt, model):
    """The names of the parameters in each group."""
    names = {p: n for n, p in model.named_parameters()}
    inner = getattr(opt, "opt", opt)
    lists = [g["params"] for g in inner.param_groups] if isinstance(inner, torch.optim.Optimizer) else inner.param_lists
    return [[names[p] for p in ps] for ps in lists]


def one_step(model, opt, seed=0):
    """One step on random images."""
    torch.manual_seed(seed)
    opt.zero_grad()
    F.cross_entropy(model(torch.randn(6, 3, 16, 16)), torch.randint(10, (6,))).backward()
    opt.step()


@pytest.mark.parametrize("kind", optimizers)
def test_the_state_is_cut_as_its_parameter(kind):
    model = small()
    opt = optimizers[kind](three_groups(model))
    one_step(model, opt)
    state, marked = getattr(opt, "opt", opt).state, set()
    with torch.no_grad():
        for p in model.parameters():
            for i, k in enumerate(sorted(k for k, v in state[p].items() if torch.is_tensor(v) and v.shape == p.shape)):
                state[p][k].copy_((i + 2) * p + i)  # tells where each number came from
                marked.add(k)
    assert marked
    before, hypers = members(opt, model), [{k: v for k, v in g.items() if k != "params"} for g in getattr(getattr(opt, "opt", opt), "param_groups", [])]
    count = len(state)
    pruner = Pruner(model, 40, steps=2, example_inputs=images)
    for _ in range(2):
        pruner.prune_model(opt)
        assert members(opt, model) == before and len(state) == count and set(state) == set(model.parameters())
        for n, p in model.named_parameters():
            for i, k in enumerate(sorted(marked & set(state[p]))):
                assert torch.equal(state[p][k], (i + 2) * p + i), (n, k)
    assert [{k: v for k, v in g.items() if k != "params"} for g in getattr(getattr(opt, "opt", opt), "param_groups", [])] == hypers
    for seed in range(3):
        one_step(model, opt, seed)


def cut_by_hand(model, kept):
    """A new network that holds the named channels of layers 0, 3 and 8, with the cut of each parameter."""
    a, b, c = (torch.tensor(kept[i]) for i in (0, 3, 8))
    new = nn.Sequential(nn.Conv2d(3, len(a), 3, padding=1), nn.BatchNorm2d(len(a)), nn.ReLU(), nn.Conv2d(len(a), len(b), 3, stride=2, padding=1),
                        nn.BatchNorm2d(len(b)), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * len(b), len(c)), nn.ReLU(), nn.Linear(len(c), 10))

    def cut(name, t):
        layer, kind = name.split(".")
        if t.dim() == 0:
            return t.clone()
        if kind == "weight" and t.dim() > 1:
            return {"0": lambda: t[a], "3": lambda: t[b][:, a], "8": lambda: t[c].unflatten(1, (24, 4))[:, b].flatten(1), "10": lambda: t[:, c]}[layer]().clone()
        return {"0": t[:], "10": t}.get(layer, t).clone() if layer == "10" else t[{"0": a, "1": a, "3": b, "4": b, "8": c}[layer]].clone()

    new.load_state_dict({n: cut(n, t) for n, t in model.state_dict().items()})
    return new.train(model.training), cut


@pytest.mark.parametrize("kind", ["momentum", "adam", "amsgrad", "adamw", "rmsprop"])
def test_training_goes_on_as_if_cut_by_hand(kind):
    model = small().train()
    opt = optimizers[kind](three_groups(model))
    for seed in range(3):
        one_step(model, opt, seed)
    old = deepcopy(model)
    state = [{k: v.clone() if torch.is_tensor(v) else v for k, v in opt.state[p].items()} for p in model.parameters()]
    Pruner(model, 40, example_inputs=images).prune_model(opt)
    kept = {i: kept_rows(model[i].bias, old[i].bias) for i in (0, 3, 8)}
    hand, cut = cut_by_hand(old, kept)
    hand_opt = optimizers[kind](three_groups(hand))
    for (n, p), s in zip(hand.named_parameters(), state, strict=True):
        hand_opt.state[p] = {k: cut(n, v) if torch.is_tensor(v) and v.dim() else v for k, v in s.items()}
    for seed in (7, 8):
        one_step(model, opt, seed)
        one_step(hand, hand_opt, seed)
        for (n, a), b in zip(model.state_dict().items(), hand.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=n)


def test_an_optimizer_of_some_parameters():
    """What the optimizer does not hold is none of its business; what has no state yet gets none."""
    model = small()
    opt = torch.optim.Adam(model[8:].parameters())
    Pruner(model, 40, example_inputs=images).prune_model(opt)
    assert members(opt, model) == [["8.weight", "8.bias", "10.weight", "10.bias"]] and not opt.state
    one_step(model, opt)


# ---------------------------------------------------------------- while fastai trains


@cache
def digits():
    """Shuffled digits: images `[1797, 1, 8, 8]` and classes."""
    d = load_digits()
    order = torch.randperm(len(d.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(d.images / 16, dtype=torch.float32)[order, None], torch.tensor(d.target)[order]


class Net(nn.Module):
    """Two convolutions with batch norm, and a head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                                  nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))

    def forward(self, x):
        return self.head(self.body(x))


full, half = {"body.0": 16, "body.3": 32, "head.2": 10}, {"body.0": 8, "body.3": 16, "head.2": 10}


def halves(model):
    """Parameter groups of body and head."""
    return [params(model.body), params(model.head)]


def image(i):
    """Image number `i`."""
    return digits()[0][i]


def label(i):
    """Class number `i`."""
    return digits()[1][i]


def learner(path, *, seed=0, n=320, exportable=False, **kwargs):
    """A quiet Learner for the digits."""
    set_seed(seed)
    x, y = digits()
    dls = DataLoaders.from_dsets(*[Datasets(range(a, b), [[image], [label]]) for a, b in ((0, n), (1200, 1500))] if exportable
                                 else [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, n), (1200, 1500))], bs=64, device="cpu", num_workers=0)
    learn = Learner(dls, Net(), **{"loss_func": CrossEntropyLossFlat(), "metrics": accuracy, "path": path, **kwargs})
    learn.remove_cb(progress.ProgressCallback)
    learn.logger = noop
    return learn


class Watch(Callback):
    """After each step: the widths, and that the optimizer holds the model's parameters with states of their shapes."""

    order, run_valid = 90, False

    def __init__(self):
        self.seen = []

    def before_fit(self):
        self.groups = [len(g) for g in self._lists()]

    def _lists(self):
        opt = getattr(self.opt, "opt", self.opt)
        return [g["params"] for g in opt.param_groups] if isinstance(opt, torch.optim.Optimizer) else opt.param_lists

    def after_batch(self):
        self.seen.append(widths(self.learn.model))
        assert {id(p) for ps in self._lists() for p in ps} == {id(p) for p in self.learn.model.parameters()}
        assert [len(g) for g in self._lists()] == self.groups
        for p in self.learn.model.parameters():
            for k, v in self.opt.state.get(p, {}).items():
                assert not torch.is_tensor(v) or v.dim() == 0 or v.shape == p.shape, k


def check_runs(learn):
    """The model runs and learns something with one more fit."""
    before = [p.detach().clone() for p in learn.model.parameters()]
    learn.fit(1, 1e-3)
    assert all(not torch.equal(a, b) for a, b in zip(before, learn.model.parameters(), strict=True))
    assert math.isfinite(learn.validate()[0])


@pytest.mark.parametrize("name", rising)
def test_every_schedule_arrives(tmp_path, name):
    learn, watch = learner(tmp_path), Watch()
    learn.fit(4, 1e-2, cbs=[PruneCallback(50, schedule=rising[name]), watch])
    assert widths(learn.model) == half
    seen = [w["body.3"] for w in watch.seen]
    assert len(seen) == 20 and seen[-1] == 16 and all(b <= a for a, b in pairwise(seen)) and len(set(seen)) >= (2 if name == "one_shot" else 3)
    for i, n in enumerate(seen):
        share = math.floor(rising[name].progress((i + 1) / 20) * 20 + 1e-9) / 20
        assert n == n_left(32, 50 * share), i
    check_runs(learn)


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_are_how_often_channels_go(tmp_path, steps):
    learn, watch = learner(tmp_path), Watch()
    learn.fit(4, 1e-2, cbs=[PruneCallback(50, schedule=schedules["lin"], steps=steps), watch])
    assert len({w["body.3"] for w in watch.seen}) == (steps if steps > 1 else 2) + (steps > 1) and watch.seen[-1] == half


@pytest.mark.parametrize("targets", [{"body.0": 25, "body.3": 75}, LayerTargets({"body.3": 62.5}), {"body.0": 0, "body.3": 50}], ids=str)
def test_targets_for_each_layer(tmp_path, targets):
    learn = learner(tmp_path)
    learn.fit(2, 1e-2, cbs=PruneCallback(targets))
    assert widths(learn.model) == {n: n_left(w, targets.get(n, 0)) for n, w in full.items()}
    check_runs(learn)


def test_the_smaller_network_still_knows_the_digits(tmp_path):
    learn = learner(tmp_path, n=1200)
    learn.fit_one_cycle(5, 2e-2)
    learn.fit_one_cycle(4, 1e-2, cbs=PruneCallback(50))
    assert widths(learn.model) == half and learn.validate()[1] > .9


def test_fine_tune_prunes_once(tmp_path):
    learn, watch = learner(tmp_path, splitter=halves), Watch()
    learn.fine_tune(2, 1e-2, cbs=[PruneCallback(50), watch])
    seen = [w["body.3"] for w in watch.seen]
    assert seen[4] == 16 and set(seen[5:]) == {16} and widths(learn.model) == half
    assert all(p.requires_grad for p in learn.model.parameters())


def test_a_second_fit_removes_nothing_twice_and_a_second_callback_does(tmp_path):
    learn, cb = learner(tmp_path), PruneCallback(50)
    for _ in range(2):
        learn.fit(1, 1e-2, cbs=cb)
        assert widths(learn.model) == half
    learn.fit(1, 1e-2, cbs=[PruneCallback(50), Watch()])
    assert widths(learn.model) == {"body.0": 4, "body.3": 8, "head.2": 10}


def test_two_callbacks_in_one_fit(tmp_path):
    learn = learner(tmp_path)
    learn.fit(2, 1e-2, cbs=[PruneCallback({"body.0": 50}), PruneCallback({"body.3": 50}), Watch()])
    assert widths(learn.model) == half
    check_runs(learn)


def test_finding_a_learning_rate_and_predicting_prune_nothing(tmp_path):
    learn = learner(tmp_path, cbs=PruneCallback(50))
    before = deepcopy(learn.model.state_dict())
    learn.lr_find(show_plot=False, num_it=10)
    assert widths(learn.model) == full and all(torch.equal(a, b) for a, b in zip(before.values(), learn.model.state_dict().values(), strict=True))
    preds, _ = learn.get_preds()
    learn.validate()
    assert preds.shape == (300, 10) and widths(learn.model) == full
    learn.fit(1, 1e-2)
    assert widths(learn.model) == half
    learn.lr_find(show_plot=False, num_it=10)
    assert learn.get_preds()[0].shape == (300, 10) and widths(learn.model) == half
    check_runs(learn)


@pytest.mark.parametrize("cb", [lambda: MixedPrecision(amp_mode=AMPMode.BF16), lambda: GradientAccumulation(128)], ids=["bf16", "accumulated"])
def test_beside_other_callbacks(tmp_path, cb):
    learn = learner(tmp_path, cbs=cb())
    learn.fit(3, 1e-2, cbs=[PruneCallback(50), Watch()])
    assert widths(learn.model) == half and all(p.dtype == torch.float32 for p in learn.model.parameters())
    check_runs(learn)


class Look(Callback):
    """The first layer's weight and gradient at the start of each batch, before or after channels go."""

    run_valid = False

    def __init__(self, order):
        self.order, self.seen = order, []

    def before_batch(self):
        w = self.learn.model.body[0].weight
        self.seen.append((w.detach().clone(), None if w.grad is None else w.grad.clone()))


def test_accumulated_gradients_are_not_lost(tmp_path):
    """Channels that go between two halves of a step take their gradients along; those that stay keep theirs."""
    learn, before, after = learner(tmp_path), Look(PruneCallback.order - 1), Look(PruneCallback.order + 1)
    learn.fit(1, 1e-2, cbs=[GradientAccumulation(1000), PruneCallback(50, schedule=schedules["lin"]), before, after])
    assert [len(w) for w, _ in before.seen] == [16, 15, 13, 12, 10] and [len(w) for w, _ in after.seen] == [15, 13, 12, 10, 8]
    for (old, grad), (new, left) in zip(before.seen[1:], after.seen[1:], strict=True):
        assert grad.flatten(1).any(1).all() and torch.equal(left, grad[kept_rows(new, old)])


@pytest.mark.parametrize("opt", [partial(OptimWrapper, opt=torch.optim.AdamW), FastaiSGD, FastaiAdam], ids=["AdamW", "sgd", "adam"])
@pytest.mark.parametrize("frozen", [False, True], ids=["free", "frozen"])
def test_optimizers_and_freezing(tmp_path, opt, frozen):
    learn = learner(tmp_path, opt_func=opt, splitter=halves)
    if frozen:
        learn.freeze()
    grads = {n: p.requires_grad for n, p in learn.model.named_parameters()}
    learn.fit(2, 1e-2, cbs=[PruneCallback(50), Watch()])
    assert widths(learn.model) == half and {n: p.requires_grad for n, p in learn.model.named_parameters()} == grads
    assert all(grads.values()) is not frozen
    learn.unfreeze()
    check_runs(learn)


def test_the_pruned_learner_is_exported(tmp_path):
    cb = PruneCallback(50)
    learn = learner(tmp_path, exportable=True, cbs=cb)
    learn.fit(1, 1e-2)
    x = digits()[0][:20]
    learn.model.eval()
    with torch.no_grad():
        out = learn.model(x)
    learn.export("pruned.pkl")
    loaded = load_learner(tmp_path / "pruned.pkl")
    assert widths(loaded.model) == half
    with torch.no_grad():
        assert torch.equal(loaded.model.eval()(x), out)
    learn.fit(1, 1e-2)
    assert widths(learn.model) == half


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_pruner_is_pickled_with_its_model(done):
    """Before, between and after its steps; the loaded one goes on where it was"""
    model = made("resnet18")
    p = Pruner(model, 50, schedule=schedules["lin"], example_inputs=images, steps=2)
    for _ in range(done):
        p.prune_model()
    loaded = pickle.loads(pickle.dumps(p))
    for _ in range(2 - done):
        p.prune_model()
        loaded.prune_model()
    assert loaded.model is not model and loaded.model.layer1[0].conv1.out_channels == 32
    ours, theirs = model.state_dict(), loaded.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_an_exported_learner_goes_on(tmp_path):
    """Half way there, saved with its callback and loaded: the rest goes, and not once more half of what is left."""
    learn = learner(tmp_path, exportable=True, cbs=PruneCallback(50, schedule=schedules["lin"]))
    learn.fit(2, 1e-2, cbs=Stop(5, CancelFitException()))
    now = {"body.0": 12, "body.3": 24, "head.2": 10}
    learn.export("half_way.pkl")
    loaded = load_learner(tmp_path / "half_way.pkl")
    assert widths(learn.model) == widths(loaded.model) == now
    assert all(torch.equal(a, b) for a, b in zip(learn.model.state_dict().values(), loaded.model.state_dict().values(), strict=True))
    loaded.dls, watch = learn.dls, Watch()
    loaded.fit(2, 1e-2, cbs=watch)
    assert widths(loaded.model) == half and [w["body.3"] for w in watch.seen] == [24] * 5 + [23, 21, 20, 18, 16]
    check_runs(loaded)
    assert widths(learn.model) == now
    learn.fit(2, 1e-2)
    assert widths(learn.model) == half


def test_the_report_of_a_fit(tmp_path, capsys):
    learn, cb = learner(tmp_path), PruneCallback(50)
    with pytest.raises(ValueError, match="nothing to report"):
        cb.print_sparsity()
    n = sum(p.numel() for p in learn.model.parameters())
    learn.fit(1, 1e-2, cbs=cb)
    cb.print_sparsity()
    words = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters")).split()
    assert (int(words[1].replace(",", "")), int(words[3].replace(",", ""))) == (n, sum(p.numel() for p in learn.model.parameters()))


class Stop(Callback):
    """Ends the fit at its `n`-th batch."""

    order, run_valid = 80, False

    def __init__(self, n, error):
        self.n, self.error = n, error

    def after_batch(self):
        if self.train_iter == self.n:
            raise self.error


@pytest.mark.parametrize("error", [CancelFitException(), KeyboardInterrupt()], ids=["cancelled", "interrupted"])
def test_an_interrupted_fit_leaves_a_running_model(tmp_path, error):
    learn, cb = learner(tmp_path), PruneCallback(50, schedule=schedules["lin"])
    try:
        learn.fit(2, 1e-2, cbs=[cb, Stop(5, error)])
    except KeyboardInterrupt:
        pass
    assert half["body.3"] < widths(learn.model)["body.3"] < full["body.3"]
    check_runs(learn)
    learn.fit(1, 1e-2, cbs=[cb, Watch()])
    assert widths(learn.model) == half


def test_masks_do_not_fit_layers_that_shrink(tmp_path):
    for cbs in ([SparsifyCallback(50), PruneCallback(50)], [PruneCallback(50), SparsifyCallback(50)]):
        learn = learner(tmp_path)
        with pytest.raises(ValueError, match="masks do not fit"):
            learn.fit(1, cbs=cbs)
        assert widths(learn.model) == full
    learn.fit(1, 1e-2, cbs=PruneCallback(50))
    learn.fit(1, 1e-2, cbs=SparsifyCallback(50))
    assert int((learn.model.body[3].weight == 0).sum()) == 16 * 8 * 9 // 2


@pytest.mark.parametrize("criteria", [taylor, wanda, movement, updating_movement, random], ids=lambda c: c.name)
def test_criteria_while_training(tmp_path, criteria):
    learn = learner(tmp_path)
    learn.fit(2, 1e-2, cbs=[PruneCallback(50, criteria=criteria, context="global", steps=4), Watch()])
    now = widths(learn.model)
    assert now["body.0"] + now["body.3"] == 24 and min(now.values()) >= 1
    check_runs(learn)


@pytest.mark.parametrize("options", [dict(context="global"), dict(criteria=seeded(3)), dict(ignored_layers=["body.0"]), dict(round_to=8)], ids=str)
def test_options_reach_the_pruner(tmp_path, options):
    """With a learning rate of 0, so that a `Pruner` outside the fit sees the same weights."""
    learn, sample = learner(tmp_path), digits()[0][:2]
    same, other = deepcopy(learn.model), deepcopy(learn.model)
    learn.fit(1, 0., cbs=PruneCallback(40, schedule=schedules["one_shot"], **options))
    Pruner(same, 40, example_inputs=sample, **options).prune_model()
    Pruner(other, 40, example_inputs=sample).prune_model()
    found, right, wrong = ([p.detach() for p in m.parameters()] for m in (learn.model, same, other))
    assert all(map(torch.equal, found, right)) and not all(map(torch.equal, found, wrong))


@pytest.mark.parametrize(("ratio", "error"), [({"body.9": 50}, KeyError), ({"head.2": 50}, ValueError)])
def test_targets_that_do_not_fit_the_model(tmp_path, ratio, error):
    learn = learner(tmp_path)
    with pytest.raises(error):
        learn.fit(1, cbs=PruneCallback(ratio))
    assert widths(learn.model) == full


def test_a_schedule_that_falls_is_refused():
    with pytest.raises(ValueError):
        PruneCallback(50, schedule=Schedule(lambda pos: pos if pos < .9 else .5))
    with pytest.raises(TypeError, match="Schedule"):
        PruneCallback(50, schedule="agp")


# ---------------------------------------------------------------- the pruners before us

@pytest.fixture(scope="module")
def old():
    with peer("0.3.2") as load:
        yield load("prune.pruner").Pruner, load("core.criteria").large_final


@pytest.fixture(scope="module")
def new():
    with peer("0.4.1") as load:
        yield load("prune.pruner").Pruner, load("core.criteria").large_final


@pytest.mark.parametrize("arch", ["resnet18", pytest.param("mobilenet_v2", marks=pytest.mark.slow)])
def test_fasterai_04_takes_our_targets(new, arch):
    theirs, criterion = new
    model, other = made(arch), made(arch)
    result = SensitivityAnalyzer(model, images, losses, higher_is_better=False).analyze("pruning", 40, verbose=False)
    targets = result.to_layer_targets(model, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs(other, targets.as_fractions(), "local", criterion, example_inputs=images).prune_model()
    mine = made(arch)
    Pruner(mine, targets, example_inputs=images).prune_model()
    assert other(images).shape == mine(images).shape == (2, 10)
    for n, w in widths(other).items():
        assert abs(w - widths(mine)[n]) <= 1, n  # theirs rounds up, ours down
    assert sum(p.numel() for p in other.parameters()) < .95 * sum(p.numel() for p in model.parameters())


def test_fasterai_03_removes_the_same_channels(old):
    """Of each group of ResNet-18 alone; at 50 % both remove the same number."""
    theirs, criterion = old
    model = made("resnet18")
    groups = [g for g in channel_groups(model, images) if not g.reason]
    assert len(groups) == 12
    for g in groups[::2]:   # each stage, its residual stream and what is inside
        a, b = made("resnet18"), made("resnet18")
        Pruner(a, {g.name: 50}, example_inputs=images).prune_model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs(b, dict.fromkeys(g.members, 50), "local", criterion, ignored_layers=[b.fc], example_inputs=images).prune_model()
        assert widths(a) == widths(b) and widths(a)[g.name] == widths(model)[g.name] // 2, g.name
        for (n, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
            assert torch.equal(p, q), (g.name, n)
