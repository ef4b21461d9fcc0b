"""Plans that need no measurement: what they are by definition, and that all of them keep to one budget."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from toys import SHORT, NarrowResNet, Net

from fasterai_sens import LayerTargets, Sparsifier, erk, global_magnitude, lamp, small_final, uniform, wanda
from fasterai_sens.core.layers import all_units, find_units
from fasterai_sens.methods.criteria import seeded
from fasterai_sens.plans.baselines import baselines, below_threshold, lamp_scores

pytestmark = pytest.mark.filterwarnings("ignore:levels are percent")
many = settings(max_examples=60, deadline=None, derandomize=True)
every_plan = pytest.mark.parametrize("plan", baselines.values(), ids=baselines)
ranked_plans = pytest.mark.parametrize("plan", [global_magnitude, lamp])


# ---------------------------------------------------------------- models


class Words(nn.Module):
    """A transformer layer between an embedding and a head that is tied to it"""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        self.cross, self.head = nn.MultiheadAttention(16, 2, kdim=8, vdim=8), nn.Linear(16, 50)
        self.head.weight = self.embed.weight


def upsampler():
    """Transposed convolutions, one with groups, one as wide as it is flat"""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 12, 4, groups=4), nn.ConvTranspose1d(12, 5, 3), nn.Conv3d(2, 4, 2))


BUILD = {"resnet": lambda: NarrowResNet(layers=[1, 1, 1, 1], num_classes=10), "mobilenet_v2": lambda: SHORT["mobilenet_v2"](num_classes=10), "words": Words, "upsampler": upsampler}


@pytest.fixture(scope="module", params=BUILD)
def model(request):
    """Each of the models, with layers of different scales"""
    torch.manual_seed(0)
    net = BUILD[request.param]()
    for i, u in enumerate(all_units(net)[0]):
        u.weight.data.normal_(std=0.02 * (1 + i % 5))
    return net


def sizes(model):
    """Unit name -> number of weights, each tied weight once."""
    return {u.name: u.weight.numel() for u in all_units(model)[0]}


def mean_by_hand(model, targets):
    """The weighted mean, from sizes alone."""
    n = sizes(model)
    return math.fsum(n[k] * p for k, p in targets.items()) / sum(n[k] for k in targets)


# ---------------------------------------------------------------- what they are by definition


@every_plan
@pytest.mark.parametrize("target", [0, 0.3, 200 / 3, 99.9, 100])
def test_every_plan_has_the_budget(model, plan, target):
    """The mean is exact, every layer has a target, and the targets are percent."""
    targets = plan(model, target)
    assert isinstance(targets, LayerTargets) and targets.unit == "percent" and list(targets) == list(sizes(model))
    assert mean_by_hand(model, targets) == pytest.approx(target, abs=1e-6) and targets.mean(model) == pytest.approx(target, abs=1e-6)


def test_uniform_is_the_same_everywhere(model):
    assert list(uniform(model, 37.5).values()) == pytest.approx([37.5] * len(sizes(model)), abs=1e-9)


def erk_by_sets(model, target):
    """Densities as the authors' code finds them: make one layer after the other dense until none is above 1."""
    shapes = {u.name: u.filters.shape for u in all_units(model)[0]}
    n, raw = {k: math.prod(s) for k, s in shapes.items()}, {k: sum(s) / math.prod(s) for k, s in shapes.items()}
    dense = set()
    while True:
        left = sum(n.values()) * (1 - target / 100) - sum(n[k] for k in dense)
        eps = left / sum(n[k] * raw[k] for k in n if k not in dense)
        worst = max((k for k in n if k not in dense), key=raw.get)
        if eps * raw[worst] <= 1:
            return {k: 1.0 if k in dense else eps * raw[k] for k in n}
        dense.add(worst)


@pytest.mark.parametrize("target", [20, 50, 80, 95])
def test_erk_is_the_fixed_point(model, target):
    """Against clipping and rescaling one layer at a time; at 20 % some layers are clipped, at 95 % few or none."""
    expected = erk_by_sets(model, target)
    assert erk(model, target) == pytest.approx({k: 100 - 100 * d for k, d in expected.items()}, abs=1e-8)
    if target == 20:
        assert 0 < sum(d == 1 for d in expected.values()) < len(expected)


def test_erk_sees_the_groups_of_a_convolution():
    """A depthwise 3 x 3 kernel has sides 8, 1, 3 and 3; the transposed one stores 8 x 3 x 4 x 4 and has sides 12, 2, 4 and 4."""
    net = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Linear(40, 50), nn.ConvTranspose2d(8, 12, 4, groups=4))
    dense = {k: 1 - p / 100 for k, p in erk(net, 97).items()}
    assert dense["0"] / dense["1"] == pytest.approx((15 / 72) / (90 / 2000)) and dense["2"] / dense["1"] == pytest.approx((22 / 384) / (90 / 2000))


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("pct", [30, 80, 98])
def test_global_magnitude_is_what_pytorch_prunes(name, pct):
    """`global_unstructured` of the same number of weights leaves the same weights in each layer, but for ties at the threshold."""
    torch.manual_seed(1)
    net = BUILD[name]()
    theirs = deepcopy(net)
    pairs, before, n = list(zip(all_units(net)[0], all_units(theirs)[0], strict=True)), deepcopy(net.state_dict()), int(sum(sizes(net).values()) * pct / 100)
    prune.global_unstructured([(v.module, v.attr) for _, v in pairs], prune.L1Unstructured, amount=n)
    masks = {u: getattr(v.module, f"{v.attr}_mask").bool() & (before[u.path] != 0) for u, v in pairs}
    threshold = max(before[u.path][~m].abs().max() for u, m in masks.items() if not m.all())
    Sparsifier(net).sparsify_model(global_magnitude(net, pct))
    assert sum(int((u.weight == 0).sum()) for u in masks) == n
    for u, m in masks.items():
        assert not (((u.weight != 0) != m) & (before[u.path].abs() != threshold)).any(), u.name


def lamp_by_definition(rows):
    """`(score, layer)` of every weight: its square over that of all that are not before it in rising order, two loops."""
    out = []
    for i, row in enumerate(rows):
        order = sorted(abs(w) for w in row)
        out += [(w * w / math.fsum(v * v for v in order[j:]), i) for j, w in enumerate(order)]
    return out


numbers = st.one_of(st.floats(-9, 9, width=32), st.sampled_from([1.0, -1.0, 2.0])).filter(lambda w: abs(w) > 1e-3)


@st.composite
def nets(draw, values=numbers, max_layers=5):
    """Layers with one output and given weights, many of them equal."""
    rows = draw(st.lists(st.lists(values, min_size=1, max_size=12), min_size=1, max_size=max_layers))
    net = nn.Sequential(*[nn.Linear(len(r), 1, bias=False) for r in rows])
    for layer, row in zip(net, rows, strict=True):
        layer.weight.data = torch.tensor([row], dtype=torch.float32)
    return net


def rows_of(net):
    """The weights of each layer, as numbers."""
    return [layer.weight.flatten().tolist() for layer in net]


@many
@given(nets())
def test_lamp_scores_are_the_definition(net):
    for u, row in zip(all_units(net)[0], rows_of(net), strict=True):
        assert lamp_scores(u).tolist() == pytest.approx([s for s, _ in lamp_by_definition([row])], rel=1e-12)


def by_threshold(scored, n_layers, k):
    """Fewest and most of each layer among the `k` lowest; they differ only in scores that are equal up to rounding."""
    cut = sorted(s for s, _ in scored)[k - 1] if k else -math.inf
    slack = 1e-9 * abs(cut) if k else 0
    under = [sum(i == j and s < cut - slack for s, j in scored) for i in range(n_layers)]
    return under, [sum(i == j and s <= cut + slack for s, j in scored) for i in range(n_layers)]


@many
@given(nets(), st.integers(0, 60))
def test_lamp_and_global_magnitude_take_the_lowest(net, k):
    """A budget of whole weights: every layer gives what lies below the threshold, and ties are shared out to the last weight."""
    rows = rows_of(net)
    total = sum(map(len, rows))
    k = min(k, total)
    magnitudes = [(abs(w), i) for i, row in enumerate(rows) for w in row]
    for plan, scored in ((lamp, lamp_by_definition(rows)), (global_magnitude, magnitudes)):
        gone = [p * len(r) / 100 for p, r in zip(plan(net, 100 * k / total).values(), rows, strict=True)]
        least, most = by_threshold(scored, len(rows), k)
        assert sum(gone) == pytest.approx(k, abs=1e-9)
        assert all(a - 1e-9 <= g <= b + 1e-9 for a, g, b in zip(least, gone, most, strict=True)), (plan, gone, least, most)


def test_lamp_empties_no_layer(model):
    """The largest weight of each layer is the last to go."""
    n, spread = sizes(model), 100 - 100 * len(sizes(model)) / sum(sizes(model).values())
    left = {k: n[k] * (1 - p / 100) for k, p in lamp(model, spread).items()}
    assert left == pytest.approx(dict.fromkeys(n, 1.0), abs=1e-6)


def test_lamp_takes_equal_weights_one_by_one():
    """Were they all given one score, a layer of equal weights would go as a whole."""
    net = nn.Sequential(nn.Linear(4, 1), nn.Linear(4, 1))
    net[0].weight.data.fill_(5.0)
    net[1].weight.data = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    assert lamp(net, 75) == {"0": 75, "1": 75}


def test_lamp_does_not_care_about_the_scale_of_a_layer(model):
    """Eight is exact in floating point, so is the plan."""
    before = lamp(model, 80)
    some = all_units(model)[0][::2]
    for u in some:
        u.weight.data.mul_(8)
    after, magnitude = lamp(model, 80), global_magnitude(model, 80)
    for u in some:
        u.weight.data.div_(8)
    assert after == pytest.approx(before, abs=1e-9) and magnitude != pytest.approx(global_magnitude(model, 80), abs=0.1)


# ---------------------------------------------------------------- what Sparsifier makes of them


@ranked_plans
@pytest.mark.parametrize("pct", [33.3, 90])
def test_rounding_costs_one_weight_at_most(plan, pct):
    """Layers hold whole numbers of weights, but for the one that takes the rest; what is dropped in all is the budget, rounded down."""
    torch.manual_seed(2)
    net = SHORT["mobilenet_v2"](num_classes=10)
    targets, n = plan(net, pct), sizes(net)
    shares = {k: n[k] * p / 100 for k, p in targets.items()}
    assert sum(abs(s - round(s)) > 1e-6 for s in shares.values()) <= 1
    Sparsifier(net).sparsify_model(targets)
    zeros = {u.name: int((u.weight == 0).sum()) for u in all_units(net)[0]}
    assert all(-1e-6 <= shares[k] - zeros[k] < 1 for k in n) and sum(zeros.values()) == math.floor(sum(n.values()) * pct / 100)


@many
@given(nets(st.sampled_from([-1.0, 1.0, 2.0, 0.0])), st.floats(0, 100))
def test_the_plan_drops_what_one_ranking_drops(net, pct):
    """Weight by weight, with ties and zeros."""
    before, targets = [m.weight.detach().clone() for m in net], global_magnitude(net, pct)
    Sparsifier(net, context="global").sparsify_model(pct)
    together = [m.weight.detach().clone() for m in net]
    for m, w in zip(net, before, strict=True):
        m.weight.data = w
    Sparsifier(net).sparsify_model(targets)
    assert [m.weight.tolist() for m in net] == [w.tolist() for w in together]


def test_criteria_are_followed():
    torch.manual_seed(3)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), torch.randn(16, 6)
    net[1].weight.data.mul_(3)
    magnitude = global_magnitude(net, 40)
    assert magnitude["0"] > magnitude["1"] and global_magnitude(net, 40, small_final)["0"] < global_magnitude(net, 40, small_final)["1"]
    assert global_magnitude(net, 40, torch.abs) == magnitude and len({global_magnitude(net, 40, seeded(i))["0"] for i in range(9)}) > 1
    loud = global_magnitude(net, 40, wanda, calibration_data=1000 * x, sample=x[:1])
    assert loud.mean(net) == pytest.approx(40, abs=1e-9)
    Sparsifier(net, context="global", criteria=wanda, calibration_data=1000 * x, sample=x[:1]).sparsify_model(40)
    assert [int((m.weight == 0).sum()) for m in net] == [math.floor(48 * loud["0"] / 100 + 1e-6), math.floor(32 * loud["1"] / 100 + 1e-6)]


def test_zeros_and_half_precision_count_as_usual():
    """What is zero goes first, and 16 bits have as many ranks as they have."""
    net = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)).bfloat16()
    net[0].weight.data.fill_(0)
    assert all(plan(net, 50) == {"0": 100, "1": 0} for plan in (global_magnitude, lamp))
    net[1].weight.data.fill_(0)
    assert all(plan(net, 50).mean(net) == pytest.approx(50) for plan in baselines.values())


@every_plan
def test_the_model_is_left_as_it_was(model, plan):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plan(model, 60)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# ---------------------------------------------------------------- bounds and locked layers

percents = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 50.0, 90.0, 100.0]))


@st.composite
def cases(draw):
    """A net, bounds, locked layers, and a target somewhere in what they allow."""
    net = draw(nets())
    low, high = sorted((draw(percents), draw(percents)))
    names = draw(st.sets(st.sampled_from([str(i) for i in range(len(net))])))
    locked, n = {k: draw(percents) for k in sorted(names)}, sizes(net)
    least, most = (math.fsum(n[k] * locked.get(k, b) for k in n) / sum(n.values()) for b in (low, high))
    return net, draw(st.floats(0, 1)) * (most - least) + least, dict(locked=locked, min_pct=low, max_pct=high)


@every_plan
@many
@given(cases())
def test_bounds_hold_and_the_mean_is_exact(plan, case):
    net, target, options = case
    targets = plan(net, min(target, 100.0), **options)
    assert mean_by_hand(net, targets) == pytest.approx(target, abs=1e-6)
    for k, p in targets.items():
        assert p == options["locked"][k] if k in options["locked"] else options["min_pct"] <= p <= options["max_pct"]


@many
@given(cases())
def test_uniform_and_erk_scale_what_is_free(case):
    """Layers within their bounds share one factor; one at a bound is on the right side of it."""
    net, target, options = case
    raw = {u.name: sum(u.filters.shape) / u.weight.numel() for u in all_units(net)[0]}
    for plan, wish, sign in ((uniform, dict.fromkeys(raw, 1.0), 1), (erk, raw, -1)):
        got = {k: p if sign > 0 else 100 - p for k, p in plan(net, min(target, 100.0), **options).items() if k not in options["locked"]}
        bounds = sorted(b if sign > 0 else 100 - b for b in (options["min_pct"], options["max_pct"]))
        least = [got[k] / wish[k] for k in got if got[k] < bounds[1] - 1e-6]
        most = [got[k] / wish[k] for k in got if got[k] > bounds[0] + 1e-6]
        assert max(most, default=0) <= min(least, default=math.inf) * (1 + 1e-9) + 1e-6


@ranked_plans
@many
@given(cases())
def test_no_dropped_weight_is_above_a_kept_one(plan, case):
    """Between two layers that could both give way, the lower score went."""
    net, target, options = case
    low, high = options["min_pct"], options["max_pct"]
    targets = plan(net, min(target, 100.0), **options)
    gone, kept = [], []
    for i, row in enumerate(rows_of(net)):
        if str(i) in options["locked"]:
            continue
        scores = sorted(s for s, _ in lamp_by_definition([row])) if plan is lamp else sorted(map(abs, row))
        share, n = targets[str(i)] * len(row) / 100, len(row)
        if share > low * n / 100 + 1e-6:
            gone.append(scores[math.ceil(share - 1e-6) - 1])
        if share < high * n / 100 - 1e-6:
            kept.append(scores[math.floor(share + 1e-6)])
    assert max(gone, default=0) <= min(kept, default=math.inf) * (1 + 1e-9)


@every_plan
def test_layers_left_out_are_not_in_the_budget(model, plan):
    names = list(sizes(model))[1::2]
    targets = plan(model, 70, layers=names)
    assert list(targets) == names and mean_by_hand(model, targets) == pytest.approx(70, abs=1e-6)


@every_plan
def test_a_kind_of_layers(plan):
    net = SHORT["mobilenet_v2"](num_classes=10)
    targets = plan(net, 70, layer_types=nn.Conv2d, locked={"features.0.0": 0}, max_pct=90)
    assert list(targets) == [u.name for u in find_units(net, layer_types=nn.Conv2d)[0]] and targets["features.0.0"] == 0
    assert targets.mean(net) == pytest.approx(70, abs=1e-6) and max(targets.values()) <= 90


@every_plan
def test_tied_weights_are_one(plan):
    """The head is the embedding, and two layers share one weight: each counts once, and is locked by any of its names."""
    words = Words()
    assert "embed" not in plan(words, 50) and plan(words, 50, locked={"head": 5})["head"] == 5
    net = Net(None, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3))
    net.b.weight = net.a.weight
    assert plan(net, 60, locked=LayerTargets({"b": 75})) == pytest.approx({"a": 75, "c": 30})
    with pytest.raises(ValueError):
        plan(net, 60, locked={"a": 10, "b": 75})


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(("error", "message", "target", "options"), [
    (ValueError, "target_pct is in percent, a number from 0 to 100; got 101", 101, {}),
    (ValueError, "target_pct is in percent.*got nan", math.nan, {}),
    (ValueError, "target_pct is in percent.*got True", True, {}),
    (ValueError, "max_pct is in percent.*got 120", 50, dict(max_pct=120)),
    (ValueError, r"target_pct 95 is out of reach: outside \[10, 90\], which is min_pct and max_pct; between 10 and 90 is possible", 95, dict(min_pct=10, max_pct=90)),
    (ValueError, "target_pct 60 is out of reach: 0 is locked; between 0 and 50 is possible", 60, dict(locked={"0": 0})),
    (ValueError, "in bits", 50, dict(locked=LayerTargets({"0": 4}, unit="bits"))),
    (KeyError, "unknown layer '7'", 50, dict(layers=["7"])),
    (ValueError, "of type Conv2d", 50, dict(layer_types=nn.Conv2d)),
    (TypeError, "unexpected keyword argument 'lock'", 50, dict(lock={})),
])
@every_plan
def test_bad_input_is_an_error(plan, error, message, target, options):
    with pytest.raises(error, match=message):
        plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), target, **options)


@every_plan
def test_a_model_without_weights_is_an_error(plan):
    with pytest.raises(ValueError, match="it: its weight is empty"), pytest.warns(UserWarning, match="zero-element"):
        plan(nn.Linear(0, 3), 50)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(bad):
    """They cannot be ranked; plans that look at shapes alone do not mind, nor do layers that are left out."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data[2, :2] = bad
    for plan in (global_magnitude, lamp):
        with pytest.raises(ValueError, match="1: 2 of 16 weights are not finite numbers"):
            plan(net, 50)
        assert plan(net, 50, layers="0") == {"0": 50}
    assert uniform(net, 50) == erk(net, 50) == {"0": 50, "1": 50}


def test_scores_may_be_infinite():
    """A criterion of one's own can protect weights, or give no number for them: those go last, here those of the second layer."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data.fill_(7.0)
    for last in (math.inf, math.nan):
        assert global_magnitude(net, 60, lambda w, last=last: torch.where(w == 7, last, w.abs())) == pytest.approx({"0": 100, "1": 20})


def test_more_budget_never_means_less_of_a_layer(model):
    for plan in baselines.values():
        plans = [plan(model, p) for p in (5, 30, 60, 85, 99)]
        assert all(a[k] <= b[k] + 1e-9 for a, b in pairwise(plans) for k in a)


def test_one_layer_gets_all_of_it():
    net = nn.Linear(7, 3)
    assert all(plan(net, 33.3) == pytest.approx({"": 33.3}) for plan in baselines.values())
    assert below_threshold([torch.arange(3.0).numpy()], 0, 3, 1.5).tolist() == [1.5]
