"""Weights that stay make up for those that go: against least squares, for a while and for good, from data of every form."""
import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Net, unchanged

from fasterai_sens import (
    Plan,
    SensitivityAnalyzer,
    Sparse,
    Sparsifier,
    SweepResult,
    allocate,
    analyze_degradation,
    changes,
    compress_to_size,
    compress_with_layer_sensitivity,
    evaluation,
    fingerprint,
    gradual_degradation_recovery,
    quantize_model,
    search_targets,
)
from fasterai_sens.core.calibration import Calibration, columns, gather
from fasterai_sens.core.layers import filters_first, find_units
from fasterai_sens.methods.sparsify import sparsity_mask
from fasterai_sens.plans.applier import Applier


def smooth(n, *shape, seed=0):
    """Inputs whose neighbours hang together, as those of pictures and of hidden layers do"""
    g = torch.Generator().manual_seed(seed)
    few = torch.randn(n, 5, generator=g)@torch.randn(5, torch.Size(shape).numel(), generator=g)
    found = (few + .3*torch.randn(few.shape, generator=g)).view(n, *shape)
    for axis in range(2, found.dim()): found = found.cumsum(axis)/2
    return found


def pictures():
    """A small convolutional network with every kind of group"""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, groups=2), nn.ReLU(), nn.ConvTranspose2d(12, 6, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6*16, 5),
    ).eval()


x = smooth(60, 3, 8, 8)
LAYERS = {
    "linear": (nn.Linear(24, 10), (24,)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=2, dilation=2), (4, 9)),
    "grouped": (nn.Conv2d(6, 8, 3, groups=2, padding=1, padding_mode="reflect"), (6, 5, 5)),
    "depthwise": (nn.Conv2d(6, 12, 3, groups=6), (6, 6, 6)),
    "conv3d": (nn.Conv3d(2, 4, 2), (2, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 4, 4)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_fitted_as_least_squares_fits_it(kind):
    """The error of the outputs is nearly that of the oracle with the same mask, never less, and below that of a plain cut"""
    layer, shape = LAYERS[kind]
    model = nn.Sequential(layer)
    unit = find_units(model)[0][0]
    data = smooth(400, *shape)
    keep = sparsity_mask(unit, 50)
    wanted = model(data).detach()
    def error(): return float((model(data).detach() - wanted).square().sum())
    with Sparse(50)(model, unit): cut = error()
    with unchanged(model), Sparse(50, reconstruct=[data[:250], data[250:]])(model, unit):
        assert torch.equal(layer.weight != 0, keep)
        fitted = error()
    rows = torch.cat(list(columns(layer, data)), 1)
    filters, kept = (filters_first(layer, t.detach()).reshape(len(rows), -1, rows.shape[-1]) for t in (layer.weight, keep))
    best = 0.
    for g, r in ((g, r) for g in range(len(rows)) for r in range(filters.shape[1])):
        some, y = rows[g][:, kept[g, r]].double(), (rows[g]@filters[g, r]).double()
        best += float((some@torch.linalg.lstsq(some, y).solution - y).square().sum())
    assert best <= fitted*(1 + 1e-4) and fitted < 1.15*best + .02*cut
    assert fitted < .9*cut


def test_for_a_while_and_for_good_are_one():
    """An Applier, a plan and a Sparsifier do the same to the bit, and do it again; what was dense stays untouched"""
    model = pictures()
    plan = Plan(sparsity={"0": 40, "3": 30, "5": 70, "7": 60, "10": 80})
    with unchanged(model), Applier(model, x[:1], settings={"sparsity": {"reconstruct": True}}, calibration_data=x)(plan):
        inside = {name: t.clone() for name, t in model.state_dict().items()}
    for act in (lambda m: plan.apply(m, x[:1], reconstruct=x), lambda m: Sparsifier(m, reconstruct=x, sample=x[:1]).sparsify_model(dict(plan["sparsity"]))):
        done = copy.deepcopy(model)
        act(done)
        assert all(torch.equal(t, inside[name]) for name, t in done.state_dict().items())
    wanted = model(x).detach()
    cut = copy.deepcopy(model)
    plan.apply(cut, x[:1])
    assert (done(x) - wanted).square().sum() < .3*(cut(x) - wanted).square().sum()


def test_layers_behind_make_up_for_those_before():
    """Layers that are fitted one after the other to what the untouched model had come nearer to it than layers that are fitted alone"""
    model = pictures()
    levels = {"0": 50, "5": 60, "7": 60, "10": 60}
    wanted, units = model(x).detach(), {u.name: u for u in find_units(model)[0]}
    alone, together = copy.deepcopy(model), copy.deepcopy(model)
    for name, pct in levels.items():
        with Sparse(pct, reconstruct=x)(model, units[name]): alone.get_submodule(name).weight.data.copy_(units[name].weight)
    Plan(sparsity=levels).apply(together, x[:1], reconstruct=x)
    assert (together(x) - wanted).square().sum() < .8*(alone(x) - wanted).square().sum()


def test_patterns_and_filters_stay_what_they_are():
    """2:4 is still 2:4, a filter that went is gone with its bias"""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)), smooth(200, 16)
    for granularity, pct in (("2:4", None), ("filter", 50)):
        unit = find_units(model)[0][0]
        with Sparse(pct, granularity)(model, unit): plain, bias = unit.weight.detach().clone(), model[0].bias.detach().clone()
        with unchanged(model), Sparse(pct, granularity, reconstruct=data)(model, unit):
            assert torch.equal(unit.weight == 0, plain == 0) and torch.equal(model[0].bias == 0, bias == 0)


def test_every_form_of_data_says_the_same():
    """A tensor, a tuple with targets, a list of batches, a DataLoader; inside an autocast, in training mode, and in another process's copy"""
    model = pictures()
    unit = find_units(model)[0][2]
    y = torch.zeros(60)
    forms = [x, (x, y), [x[:20], x[20:]], [(x[:20], y[:20]), (x[20:], y[20:])], DataLoader(TensorDataset(x, y), 20, shuffle=True), pickle.loads(pickle.dumps(Calibration(x, keeps=True)))]
    found = []
    for data in forms:
        with Sparse(60, reconstruct=data)(model, unit): found.append(unit.weight.detach().clone())
    model.train()
    with unchanged(model), torch.autocast("cpu"), Sparse(60, reconstruct=x)(model, unit):
        torch.testing.assert_close(unit.weight.detach(), found[0], rtol=.2, atol=.02)
    for w in found[1:]: torch.testing.assert_close(w, found[0], rtol=1e-2, atol=1e-3)
    once = iter([x])
    with pytest.raises(TypeError): Sparse(50, reconstruct=once)


def test_attention_and_shared_layers():
    """Query, key and value have inputs of their own; a layer that is called twice is fitted to both calls"""
    torch.manual_seed(0)
    attention, shared = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
    model = Net(lambda net, a: net.shared(net.attention(net.shared(a), a, a)[0]), attention=attention, shared=shared).eval()
    data, units = smooth(100, 6, 8), {u.name: u for u in find_units(model)[0]}
    wanted, name = model(data).detach(), units["attention.in_proj_weight"]
    with Sparse(40)(model, name): cut = (model(data).detach() - wanted).square().sum()
    with unchanged(model), Sparse(40, reconstruct=data)(model, name): assert (model(data).detach() - wanted).square().sum() < .9*cut
    first = data.flatten(0, 1)
    second = model.attention(shared(data), data, data)[0].detach().flatten(0, 1)
    both = first.T@first + second.T@second
    torch.testing.assert_close(gather(model, units["shared"], data).own[0], both + .01*both.diagonal().mean()*torch.eye(8), rtol=1e-3, atol=1e-2)
    assert gather(model, units["attention.in_proj_weight"], data).own.shape == (3, 8, 8)


def test_who_is_not_fitted_is_named_and_only_cut():
    """A head that is an embedding, too, and a layer that is not called are cut as without the option; inputs that are not finite are an error"""
    torch.manual_seed(0)
    model = Net(lambda net, a: net.head(net.body(net.emb(a)).relu()), emb=nn.Embedding(12, 8), body=nn.Linear(8, 8), head=nn.Linear(8, 12), unused=nn.Linear(4, 4))
    model.head.weight = model.emb.weight
    data, units = torch.randint(12, (50, 7)), {u.name: u for u in find_units(model)[0]}
    names = [name for name in ("head", "emb", "unused") if name in units]
    for name in names:
        with Sparse(50)(model, units[name]): plain = units[name].weight.detach().clone()
        with pytest.warns(UserWarning, match=f"{name} is compressed without being refitted"), Sparse(50, reconstruct=data)(model, units[name]):
            assert torch.equal(units[name].weight, plain)
    done = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Plan(sparsity=dict.fromkeys([*names, "body"], 50)).apply(done, data[:1], reconstruct=data)
    assert (done.body.weight == 0).sum() == 32
    broken = pictures()
    with unchanged(broken), pytest.raises(ValueError, match="'0' are not finite"), Sparse(50, reconstruct=x/0)(broken, find_units(broken)[0][0]): pass


def test_an_analysis_measures_what_will_be_done(tmp_path):
    """A sweep refits, with and without reuse; the curves are lower; its result and its plan remember that, but not the data"""
    model = pictures()
    y = model(x).argmax(1).detach()
    state = fingerprint(model)
    curves = {}
    for reuse in (True, False):
        analyzer = SensitivityAnalyzer(model, x[:1], (x, y), calibration_data=x, reuse=reuse)
        curves[reuse] = analyzer.sweep("sparsity", [30, 50, 70], reconstruct=True, verbose=False)
    for one, other in zip(curves[True], curves[False], strict=True): assert one.layers == other.layers
    mine, plain = curves[True], analyzer.sweep("sparsity", [30, 50, 70], verbose=False)
    damage = [sum(layer.objective - r.baseline_objective for r in sweep for layer in r.layers) for sweep in (mine, plain)]
    assert damage[0] < .5*damage[1]
    mine.to_json(tmp_path/"sweep.json")
    back = SweepResult.from_json(tmp_path/"sweep.json")
    assert back[0].settings["reconstruct"] is True
    plan = allocate(back, {"params": 700}, model=model, sample=x[:1])
    assert Plan.from_dict(plan.as_dict()).settings["sparsity"]["reconstruct"] is True
    with pytest.raises(ValueError): plan.apply(model, x[:1])
    assert changes(state, fingerprint(model)) == []
    with Applier(model, x[:1], settings=plan.settings, calibration_data=x)(plan): kept = F.mse_loss(model(x), pictures()(x))
    plan.apply(model, x[:1], reconstruct=False)
    assert kept < .5*F.mse_loss(model(x), pictures()(x))


@pytest.mark.parametrize("options", [{}, {"quant_symmetric": False}, {"quant_group_size": 3}, {"quant_per_channel": False}, {"quant_activations": "both"}], ids=str)
def test_bits_for_a_while_and_for_good(options):
    """Grids of every kind: as few numbers as the bits allow, nearer to the dense model, the same from an Applier and `quantize_model`, and taken back"""
    model, x = pictures(), smooth(60, 3, 8, 8)
    wanted, bits = model(x).detach(), dict.fromkeys(["0", "3", "5", "7", "10"], 4)
    if options.get("quant_group_size"): bits.pop("7")
    def error(): return float((model(x).detach() - wanted).square().mean())
    with quantize_model(model, bits, calibration_data=x, **options): plain = error()
    with unchanged(model), quantize_model(model, bits, calibration_data=x, reconstruct=True, **options) as applied:
        assert error() < .8*plain
        inside = {name: t.clone() for name, t in model.state_dict().items()}
        if not options: assert max(len(row.unique()) for row in model[0].weight.flatten(1)) <= 15
        assert applied.plan.settings["reconstruct"] is True and not applied.round()
    settings = {"quantization": applied.plan.settings | {"reconstruct": x}}
    with unchanged(model), Applier(model, x[:1], settings=settings, calibration_data=x)(Plan(quantization=bits)):
        assert all(torch.equal(t, inside[name]) for name, t in model.state_dict().items())


def test_zeros_stay_zeros_on_their_grids():
    """A plan of both methods, each refitted: what sparsity dropped is still zero in four bits, and weights that were trained since are noticed"""
    model = pictures()
    plan = Plan(sparsity={"5": 60}, quantization={"0": 4, "5": 4})
    done = copy.deepcopy(model)
    held = plan.apply(done, x[:1], reconstruct=x)
    assert int((done[5].weight == 0).sum()) >= int(.6*done[5].weight.numel())
    assert torch.equal(done[5].weight == 0, held["sparsity"].masks["5"].logical_not() | (done[5].weight == 0))
    done[0].weight.data += .01
    with pytest.warns(UserWarning): held["quantization"].remove()
    cut = copy.deepcopy(model)
    plan.apply(cut, x[:1])
    wanted = model(x)
    again = copy.deepcopy(model)
    plan.apply(again, x[:1], reconstruct=x)
    assert F.mse_loss(again(x), wanted) < .5*F.mse_loss(cut(x), wanted)


def test_readers_make_up_for_channels_that_went():
    """A group alone, an Applier and a Pruner: the same as each other to the bit, and nearer to what was than channels that are only cut"""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, groups=12), nn.ReLU(), nn.Conv2d(12, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8*16, 5),
    ).eval()
    wanted, plan = model(x).detach(), Plan(pruning={"0": 50, "5": 25})
    def error(net): return float((net(x).detach() - wanted).square().mean())
    cut, small = copy.deepcopy(model), copy.deepcopy(model)
    plan.apply(cut, x[:1])
    plan.apply(small, x[:1], reconstruct=x)
    assert error(small) < .6*error(cut)
    assert [tuple(p.shape) for p in small.parameters()] == [tuple(p.shape) for p in cut.parameters()]
    with unchanged(model), Applier(model, x[:1], reconstruct=x)(plan):
        assert all(torch.equal(t, model.state_dict()[name]) for name, t in small.state_dict().items())
    y = model(x).argmax(1)
    analyzer = SensitivityAnalyzer(model, x[:1], (x, y), calibration_data=x)
    plain, fitted = (analyzer.analyze("pruning", 50, reconstruct=data, verbose=False) for data in (None, True))
    damage = [[l.objective for l in res.layers if l.objective == l.objective] for res in (fitted, plain)]   # some have none
    assert len(damage[0]) == len(damage[1]) > 1 and sum(damage[0]) < .8*sum(damage[1])
    assert fitted.settings["reconstruct"] is True


def test_rank_is_spent_on_what_layers_see():
    """In a block and as two layers the outputs are the same, and nearer to what was than those of the plain approximation"""
    model = pictures()
    wanted, plan = model(x).detach(), Plan(low_rank={"0": 20, "5": 40, "10": 60})
    plain, done = copy.deepcopy(model), copy.deepcopy(model)
    plan.apply(plain, x[:1])
    held = plan.apply(done, x[:1], reconstruct=x)["low_rank"]
    assert F.mse_loss(done(x), wanted) < .5*F.mse_loss(plain(x), wanted)
    with unchanged(model), Applier(model, x[:1], reconstruct=x)(plan): torch.testing.assert_close(model(x), done(x), rtol=1e-2, atol=1e-3)
    held.remove()
    assert type(done[10]) is nn.Linear


@pytest.mark.filterwarnings("ignore:7 is factorized without")
@pytest.mark.parametrize(("how", "size"), [("sparsity", 50), ("pruning", 60), ("quantization", 20), ("low_rank", 70)])
def test_sizes_are_refitted(how, size):
    """As many bytes as without, nearer to the dense model; a curve over sizes measures what a model of a size computes, to the bit if no layer becomes two"""
    model = pictures()
    wanted = model(x).detach()
    def error(net): return float((net(x).detach() - wanted).square().mean())
    with unchanged(model):
        cut, done, plain = (compress_to_size(model, x[:1], size, how, reconstruct=data, calibration_data=x, verbose=False) for data in (None, True, False))
        curve = analyze_degradation(model, x[:1], error, [90, size], how, reconstruct=x, higher_is_better=False, runs=0, verbose=False)
    assert error(done.model) < .1*error(cut.model) and error(plain.model) == error(cut.model)
    assert (done.size, done.plan) == (cut.size, cut.plan)
    assert curve[-1].metric == (pytest.approx(error(done.model), 1e-4) if how == "low_rank" else error(done.model))
    assert curve.settings["reconstruct"] is True and "refitted" in curve.title


def test_sizes_refit_as_they_were_measured():
    """Sensitivities that were measured refitted ask for data again; a mean percentage is refitted too, and zeros of before stay zeros"""
    model = pictures()
    sweep = SensitivityAnalyzer(model, x[:1], (x, model(x).argmax(1)), calibration_data=x).sweep("sparsity", [30, 60], reconstruct=True, verbose=False)
    for act in (partial(compress_to_size, model, x[:1], 60, "sparsity", plan=sweep), partial(compress_with_layer_sensitivity, model, x[:1], sweep)):
        with pytest.raises(ValueError): act(verbose=False)
        done, cut = act(calibration_data=x, verbose=False), act(reconstruct=False, verbose=False)
        assert F.mse_loss(done.model(x), model(x)) < .3*F.mse_loss(cut.model(x), model(x)) and done.plan == cut.plan
    plan = Plan(sparsity=dict.fromkeys(done.plan, 20))
    before = {name: t == 0 for name, t in done.model.named_parameters()}
    held = plan.apply(done.model, x[:1], reconstruct=x)
    assert held and all((t == 0)[before[name]].all() for name, t in done.model.named_parameters())


@pytest.mark.parametrize("how", ["sparsity", "pruning"])
def test_stages_are_refitted(how):
    """Each stage of a recovery loses less before it is trained; sensitivities that were measured refitted say so"""
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    lost = {}
    for data in (None, True, [x[:20], x[20:]]):
        model = pictures()
        y = model(x).detach()
        batches = DataLoader(TensorDataset(x, y), 30)
        learn = Learner(DataLoaders(batches, batches), model, F.mse_loss, metrics=F.mse_loss)
        found = gradual_degradation_recovery(learn, (25, 50), compression=how, epochs=0, higher_is_better=False, reconstruct=data, verbose=False)
        lost[str(data)[:4]] = [row["metric_compressed"] for row in found.history]
        assert found.settings.get("reconstruct", False) is (data is not None)
    assert all(mine < .3*plain for name in ("True", "[ten") for mine, plain in zip(lost[name], lost["None"], strict=True))


@pytest.mark.parametrize("in_parts", [pytest.param(True, marks=pytest.mark.slow), False])
def test_searched_plans_are_measured_refitted(in_parts):
    """What a search reports of its plan is what the plan does when it is applied with the same data; the model comes back"""
    model = pictures()
    wanted = model(x).detach()
    y = wanted.argmax(1)
    def error(net): return (net(x).detach() - wanted).square().mean(1)
    def loss(net): return F.cross_entropy(net(x).detach(), y, reduction="none")
    score = loss if in_parts else error
    on = evaluation((x, y), partial(F.cross_entropy, reduction="none")) if in_parts else error
    how = dict(higher_is_better=False, metric_name="error", evaluations=60, verbose=False)
    with unchanged(model): found, cut = (search_targets(model, x[:1], on, 70, reconstruct=data, **how) for data in (x, None))
    assert found.settings["reconstruct"] is True and "reconstruct" not in cut.settings
    done = copy.deepcopy(model)
    Sparsifier(done, reconstruct=x).sparsify_model(found.plan)
    assert score(done).mean() == pytest.approx(found.measured_metric, 1e-4)
    if not in_parts: assert found.measured_metric < .3*cut.measured_metric
    with pytest.raises(ValueError): search_targets(model, x[:1], on, 70, reconstruct=True, **how)
