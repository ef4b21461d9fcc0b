"""Plans within budgets: the choice against all choices, costs counted by hand, and models that are what was counted."""
import importlib.util
import itertools
import math
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from toys import NarrowResNet

from fasterai_sens import (
    Applier,
    CostTable,
    LayerTargets,
    Plan,
    SensitivityAnalyzer,
    SweepResult,
    allocate,
    changes,
    cost_table,
    count_flops_params,
    fingerprint,
    n_bytes,
    quantize_model,
)
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.limits import LayerLimits
from fasterai_sens.core.plans import BitPlan
from fasterai_sens.core.results import LayerSensitivity, SensitivityResult
from fasterai_sens.methods import widths
from fasterai_sens.methods.criteria import large_final
from fasterai_sens.plans import allocate as plans
from fasterai_sens.plans.allocate import by_method
from fasterai_sens.plans.applier import unit_macs
from fasterai_sens.plans.choices import choices, planned

g = torch.Generator().manual_seed(0)
x = torch.randn(4, 6, generator=g)
levels = {"sparsity": [50, 80], "quantization": [8, 4], "pruning": [25, 50]}
both = frozenset(("sparsity", "quantization"))


def toy(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def made_up(model, method, rng, names=None):
    """A sweep with random damages."""
    units = {u.name: u.params for u in all_units(model)[0]}
    damages = {n: np.sort(rng.random(len(levels[method]))) for n in names or units}
    rows = lambda i: [LayerSensitivity(n, "Linear", units[n], .9, .9 - d[i], float(d[i])) for n, d in damages.items()]
    return SweepResult([SensitivityResult(method, level, .9, rows(i)) for i, level in enumerate(levels[method])])


def best_of_all(model, sweeps, budgets, pairs=frozenset()):
    """The least damage of all choices within the budgets, counted one by one."""
    applier, every = Applier(model, x), choices(by_method(sweeps)[0], LayerLimits(), pairs, "metric")
    best = math.inf
    for picked in itertools.product(*(range(len(c.levels)) for c in every)):
        chosen = [(c, c.levels[i]) for c, i in zip(every, picked, strict=True)]
        pruned = {n for c, at in chosen if "pruning" in at for n in c.members}
        if any(n in pruned and frozenset(("pruning", m)) not in pairs for c, at in chosen for m in at if m != "pruning" for n in c.members):
            continue
        harm = sum(c.damage[i] for c, i in zip(every, picked, strict=True))
        if harm < best:
            costs = applier.costs(planned(chosen), tuple(budgets))
            if all(costs[n] <= b for n, b in budgets.items()):
                best = harm
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("combine", [(), ("sparsity", "quantization")])
def test_best_of_all_where_savings_add_up(seed, combine):
    """Zeros and bits: exactly the least damage, with one budget and with two."""
    model, rng = toy(), np.random.default_rng(seed)
    sweeps = [made_up(model, m, rng) for m in ("sparsity", "quantization")]
    for budget in ({"bytes": f"{rng.integers(35, 80)}%"}, {"bytes": f"{rng.integers(40, 80)}%", "params": f"{rng.integers(50, 90)}%"}):
        plan = allocate(sweeps, budget, model=model, combine=combine)
        assert plan.damage == pytest.approx(best_of_all(model, sweeps, plan.budgets, {both} if combine else set()), abs=1e-9)
        assert all(plan.costs[n] <= b for n, b in plan.budgets.items())


@pytest.mark.parametrize("seed", range(8))
def test_close_to_the_best_of_all_with_channels(seed):
    """Savings of channels overlap; beside zeros the plan keeps to the budget, and is at most a little worse than the best."""
    model, rng = toy(), np.random.default_rng(seed)
    sweeps = [made_up(model, "pruning", rng, ["0", "2"]), made_up(model, "sparsity", rng)]
    plan = allocate(sweeps, {"params": f"{rng.integers(45, 80)}%", "flops": f"{rng.integers(45, 80)}%"}, model=model, sample=x)
    best = best_of_all(model, sweeps, plan.budgets)
    assert all(plan.costs[n] <= b for n, b in plan.budgets.items())
    assert best - 1e-9 <= plan.damage <= 1.25*best + 1e-9


@pytest.fixture(scope="module")
def resnet():
    """A narrow ResNet with sweeps over all three methods by a quantity that needs no data: how far the logits of random images move."""
    torch.manual_seed(0)
    model, images = NarrowResNet(layers=[1, 1, 1, 1], num_classes=10).eval(), torch.randn(8, 3, 32, 32, generator=g)
    with torch.no_grad():
        start = model(images)
    moved = torch.inference_mode()(lambda m: (m(images) - start).square().mean(1).clone())
    analyzer = SensitivityAnalyzer(model, images[:1], moved, higher_is_better=False, metric_name="moved")
    return model, images, [analyzer.sweep("pruning", [25, 50, 75], verbose=False), analyzer.sweep("sparsity", [50, 80, 90], verbose=False), analyzer.sweep("quantization", [8, 4, 3], verbose=False)]


def test_all_methods_on_resnet(resnet):
    """Costs of a plan for a real network are those of the compressed network; it comes back bit for bit; applied for good it computes the same."""
    model, images, sweeps = resnet
    before = fingerprint(model)
    plan = allocate(sweeps, {"bytes": "12%", "flops": "50%"}, model=model, sample=images[:1], combine=list(itertools.combinations(levels, 2)))
    assert changes(before, fingerprint(model)) == []
    assert plan.costs["bytes"] <= .12*n_bytes(model) and plan.costs["flops"] <= .5*count_flops_params(model, images[:1], verbose=False)[0]
    assert any(plan.pruning.values()) and plan.quantization
    with Applier(model, images[:1], settings=plan.settings)(plan), torch.no_grad():
        measured = model(images)
    assert changes(before, fingerprint(model)) == []
    small = deepcopy(model)
    done = plan.apply(small, images[:1])
    with torch.no_grad():
        assert torch.equal(small(images), measured)
    zeros = sum(int((u.weight == 0).sum()) for u in all_units(small)[0] if plan.sparsity.get(u.name))
    assert done["quantization"].plan == plan.quantization
    if any(plan.sparsity.values()):
        assert zeros > 0


def test_a_group_is_pruned_as_one(resnet):
    """Coupled layers get one level; none of their members is pruned and sparse unless that is said."""
    model, images, (pruning, sparsity, _) = resnet
    plan = allocate([pruning, sparsity], {"params": "30%"}, model=model, sample=images[:1])
    for row in (r for r in pruning[0].layers if r.prunable):
        assert len({plan.pruning[n] for n in row.group_members or [row.name]}) == 1
    assert not [n for n, pct in plan.pruning.items() if pct and plan.sparsity.get(n)]


def test_budget_in_numbers_and_percent(resnet):
    """A share of the untouched model is the same budget as the number."""
    model, images, (_, sparsity, _) = resnet
    total = sum(p.numel() for p in model.parameters())
    assert allocate(sparsity, "40%", model=model).sparsity == allocate(sparsity, .4*total, model=model).sparsity


def test_exact_where_nothing_is_lost():
    """A budget of everything leaves everything alone."""
    model = toy()
    plan = allocate(made_up(model, "sparsity", np.random.default_rng(0)), "100%", model=model)
    assert plan.sparsity == {"0": 0, "2": 0, "4": 0} and plan.damage == 0 and plan.predicted_metric == .9


def test_bounds_and_locked():
    """Levels outside the bounds are never chosen, locked layers are left out, a lower bound rules out nothing at all."""
    model, rng = toy(), np.random.default_rng(0)
    sparsity, bits = made_up(model, "sparsity", rng), made_up(model, "quantization", rng)
    assert allocate(sparsity, "80%", model=model, locked="2", bounds={"0": (0, 60)}).sparsity["0"] <= 60
    assert "2" not in allocate(sparsity, "80%", model=model, locked=["2"]).sparsity
    assert allocate(sparsity, "100%", model=model, bounds={"0": (40, 100)}).sparsity["0"] == 50
    assert min(allocate(sparsity, "100%", model=model, bounds=(60, 100)).sparsity.values()) == 80
    assert allocate(bits, "100%", "bytes", model=model, bounds=(2, 16)).quantization == dict.fromkeys(("0", "2", "4"), 8)
    with pytest.raises(ValueError, match="out of reach.*within bounds and locked"):
        allocate(sparsity, "40%", model=model, locked=["2"])


@pytest.mark.parametrize(("change", "error", "text"), [
    (dict(budget="0%"), ValueError, "number above 0"), (dict(budget={}), ValueError, "empty"), (dict(cost="macs"), KeyError, "unknown cost"),
    (dict(combine=[("sparsity",)]), ValueError, "pairs of methods"), (dict(combine=("sparsity", "pruning")), KeyError, "unknown method"),
    (dict(bounds={"0": (1, 2, 3)}), ValueError, r"\(low, high\)"), (dict(bounds={"0": (0, 150)}), ValueError, "percent"),
    (dict(bounds={"0": (10, 20)}), ValueError, "leave no level"), (dict(by="objective"), ValueError, "no objective"), (dict(by="loss"), ValueError, "by is"),
    (dict(cost="flops"), ValueError, "give a sample"), (dict(cost="latency"), ValueError, "give a sample"),
    (dict(budget=1), ValueError, "params of 1 is out of reach"), (dict(sweeps=[]), ValueError, "no sweep"), (dict(sweeps=5), TypeError, "got int")])
def test_refused_at_the_door(change, error, text):
    """Clear errors, and the model as it was."""
    model = toy()
    before = fingerprint(model)
    options = dict(sweeps=made_up(model, "sparsity", np.random.default_rng(0)), budget="50%", model=model) | change
    with pytest.raises(error, match=text):
        allocate(options.pop("sweeps"), options.pop("budget"), **options)
    assert changes(before, fingerprint(model)) == []


def test_a_table_needs_no_model(tmp_path):
    """The sweep and the table, read from files, give the same plan for any budget."""
    model = toy()
    sweeps = [made_up(model, m, np.random.default_rng(1)) for m in ("sparsity", "quantization")]
    cost_table(sweeps, model, x, ("params", "flops", "bytes")).to_json(tmp_path/"costs.json")
    for s in sweeps:
        s.to_json(tmp_path/f"{s[0].compression_type}.json")
    again = [SweepResult.from_json(tmp_path/f"{m}.json") for m in ("sparsity", "quantization")]
    table = CostTable.from_json(tmp_path/"costs.json")
    for pct in (90, 70, 50, 35):
        old, new = allocate(sweeps, {"bytes": f"{pct}%"}, model=model), allocate(again, {"bytes": f"{pct}%"}, table=table)
        assert old == new
        new.to_json(tmp_path/"plan.json")
        assert Plan.from_json(tmp_path/"plan.json") == new
    with pytest.raises(ValueError, match="no latency"):
        allocate(again, {"latency": 1}, table=table)
    with pytest.raises(ValueError, match="make it from the same sweeps"):
        allocate(again, {"bytes": "50%"}, table=CostTable(table.whole, {}))


def test_broken_levels_are_no_options():
    """A curve ends where the metric was not a number; a layer that breaks at once is left alone."""
    model = toy()
    sparsity = made_up(model, "sparsity", np.random.default_rng(0))
    for r in sparsity:
        r.layers[1].delta = r.layers[1].compressed_metric = math.nan
    plan = allocate(sparsity, "75%", model=model)
    assert plan.sparsity.get("2", 0) == 0 and any(plan.sparsity.values())


@pytest.mark.parametrize("granularity", ["weight", "filter", "2:4"])
def test_dropped_weights_are_counted_as_they_are(granularity):
    """Blocks and patterns: what is counted is what is zero."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8*16, 4))
    image = torch.randn(1, 4, 6, 6, generator=g)
    applier = Applier(model, image, ("sparsity",), settings={"sparsity": {"granularity": granularity}})
    plan = Plan(sparsity=LayerTargets({"0": 40, "2": 50}))
    with applier(plan):
        left = sum(int((p != 0).sum()) for p in model.parameters())
        macs = int((model[0].weight != 0).sum())*16 + int((model[2].weight != 0).sum())
    assert applier.costs(plan, ("params", "flops")) == {"params": left, "flops": macs}


@pytest.mark.parametrize("bits", [{}, {"0": 4}, {"0": 4, "2": 4, "4": 4}], ids=["no bits", "bits in one", "bits in all"])
def test_zeros_of_before_save_only_bytes(bits):
    """Channels and bits of a model that was sparse before: its multiply-accumulates are those of a dense one with as many channels, its bytes those of the file."""
    dense, sparse = toy(), toy()
    Plan(sparsity=dict.fromkeys("024", 80)).apply(sparse, x)
    plan = Plan(pruning={"0": 50}, quantization=bits)
    applier = Applier(sparse, x)
    costs = applier.costs(plan, ("flops", "params", "bytes"))
    assert costs == applier.costs(plan, ("flops", "params", "bytes"), really=True)
    assert applier.costs(Plan(), ("flops",)) == Applier(dense, x).costs(Plan(), ("flops",))
    done = plan.apply(sparse, x)
    assert count_flops_params(sparse, x, verbose=False)[:2] == (costs["flops"], costs["params"])
    assert costs["bytes"] == pytest.approx(done.file_bytes, rel=.1)   # how many zeros went with the channels is not looked up


def test_bytes_are_those_of_quantize_model():
    """Bits alone: the bytes that `quantize_model` says."""
    model = toy()
    bits = {"0": 4, "2": 3, "4": 8}
    with quantize_model(model, bits) as applied:
        assert Applier(model, x).costs(Plan(quantization=BitPlan(bits)), ("bytes",)) == {"bytes": applied.size_bytes}


def test_left_alone_after_an_exception():
    """Whatever happens inside the block, the model comes back."""
    model = toy()
    before, applier = fingerprint(model), Applier(model, x)
    plan = Plan(pruning={"0": 50}, sparsity={"2": 50}, quantization={"4": 4})
    with pytest.raises(KeyboardInterrupt), applier(plan):
        raise KeyboardInterrupt
    for bad in (Plan(pruning={"4": 50}), Plan(sparsity=LayerTargets({"nope": 5}))):
        with pytest.raises(KeyError), applier(bad):
            pass
    assert changes(before, fingerprint(model)) == []


class Residual(nn.Module):
    """`a` and `c` lose channels together."""

    def __init__(self, n=8):
        super().__init__()
        self.a, self.b, self.c, self.fc = nn.Conv2d(3, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1), nn.Linear(n, 4)

    def forward(self, x):
        x = self.a(x).relu()
        return self.fc((x + self.c(self.b(x).relu())).relu().mean((2, 3)))


def measured(model, images, method, at):
    """A sweep by how far the outputs move."""
    with torch.no_grad():
        start = model(images)
    moved = torch.inference_mode()(lambda m: (m(images) - start).square().mean(1).clone())
    return SensitivityAnalyzer(model, images[:1], moved, higher_is_better=False, metric_name="moved").sweep(method, at, verbose=False)


@pytest.fixture(scope="module")
def residual():
    """A small network with a residual connection, images, and a sweep over channels."""
    torch.manual_seed(0)
    model, images = Residual().eval(), torch.randn(16, 3, 6, 6, generator=g)
    return model, images, measured(model, images, "pruning", [25, 50, 75])


def test_all_layers_of_a_group_must_allow_a_level(residual):
    """A lock or bound of one coupled layer holds for the others."""
    model, images, pruning = residual
    options = dict(model=model, sample=images[:1])
    plan = allocate(pruning, "70%", bounds={"b": (0, 75), "c": (0, 75)}, locked=["a"], **options)
    assert not plan.pruning.get("a") and not plan.pruning.get("c") and plan.pruning["b"]
    assert allocate(pruning, "60%", bounds={"a": (0, 25)}, **options).pruning["c"] <= 25


def test_another_model_is_refused(residual):
    """Neither the sweep nor the table of one model is used for another."""
    model, images, pruning = residual
    table = cost_table(pruning, model, images[:1], "params")
    other = Residual(16).eval()
    with pytest.raises(ValueError, match="had .* parameters when it was measured"):
        allocate(pruning, "70%", model=other, sample=images[:1])
    with pytest.raises(ValueError, match="table is of"):
        allocate(measured(other, images, "pruning", [50]), "90%", model=other, sample=images[:1], table=table)


def test_all_the_time_there_is(residual):
    """A latency budget of what the model takes now prunes nothing, however the clock jitters."""
    model, images, pruning = residual
    for _ in range(5):
        plan = allocate(pruning, "100%", "latency", model=model, sample=images[:1])
        assert not any(plan.pruning.values()) and plan.costs == plan.budgets


def test_patterns_and_channels_do_not_mix(residual):
    """n:m patterns and groups of weights need numbers of inputs that pruning changes."""
    model, images, pruning = residual
    settings = {"sparsity": {"granularity": "2:4"}, "quantization": {"group_size": 8}}
    for m in settings:
        with pytest.raises(ValueError, match="plan for pruning without it"):
            Applier(model, images[:1], ("pruning", m), settings={m: settings[m]})


def test_attention_between_tokens_of_other_numbers():
    """Each projection has the multiply-accumulates of its own tokens; all of them together are those of the module."""
    for kdim in (None, 8):
        attention = nn.MultiheadAttention(16, 2, kdim=kdim, vdim=kdim, batch_first=True)
        query, key = torch.randn(2, 1, 16), torch.randn(2, 100, kdim or 16)
        macs, total = unit_macs(attention, (query, key, key))
        assert macs["out_proj"] == 16*16 and sum(macs.values()) == total
        assert (macs["in_proj_weight"] if kdim is None else macs["k_proj_weight"]) == (16*16 + 2*100*256 if kdim is None else 100*8*16)


def test_tied_layers_by_any_name():
    """Plans name all tied layers; so may bounds, locked and predictions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)).eval()
    model[2].weight = model[0].weight
    sweep = measured(model, x, "sparsity", [50, 80])
    plan = allocate(sweep, "60%", model=model)
    assert plan.sparsity["0"] == plan.sparsity["2"]
    assert sweep.predict(plan.sparsity) == pytest.approx(plan.predicted_metric)
    assert "0" not in allocate(sweep, "95%", model=model, locked=["2"]).sparsity


def test_nothing_is_done_before_all_is_there():
    """A plan that cannot be carried out in full changes nothing; ranges of activations are those of the compressed network in both ways."""
    model = toy()
    sweep = SensitivityAnalyzer(model, x, lambda m: float(m(x).detach().abs().mean()), calibration_data=x).sweep("quantization", [4], quant_activations=True, verbose=False)
    plan = Plan(sparsity=LayerTargets({"0": 75, "2": 75}), quantization=BitPlan({"0": 4, "2": 4}, settings={k: v for k, v in sweep[0].settings.items() if k != "bits"}))
    before = fingerprint(model)
    with pytest.raises(ValueError):
        plan.apply(model)
    assert changes(before, fingerprint(model)) == []
    with Applier(model, x, ("sparsity", "quantization"), settings={"quantization": plan.quantization.settings}, calibration_data=x)(plan), torch.no_grad():
        expected = model(x)
    plan.apply(model, x, calibration_data=x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_nothing_locked_and_nothing_combined():
    """`None` says so as well as an empty tuple."""
    model = toy()
    assert allocate(made_up(model, "sparsity", np.random.default_rng(0)), "50%", model=model, locked=None, combine=None).sparsity


def test_compiled_model():
    """Multiply-accumulates of a model in the shell of `torch.compile`."""
    model = toy()
    compiled = torch.compile(model)
    assert {n.removeprefix("_orig_mod."): v for n, v in unit_macs(compiled, x)[0].items()} == unit_macs(model, x)[0]


def test_tables_of_what_does_not_add_up():
    """A table alone is no basis for pruning, and zeros and bits save no time in it, to the last digit."""
    model = toy()
    sweeps = [made_up(model, m, np.random.default_rng(1), names) for m, names in (("sparsity", None), ("quantization", None), ("pruning", ["0", "2"]))]
    table = cost_table(sweeps, model, x, ("params", "latency"))
    assert all(of["latency"] == 0 for name, of in table.saved.items() if "pruning" not in name) and any(of["latency"] for of in table.saved.values())
    with pytest.raises(ValueError, match="latency of .* out of reach"):
        allocate(sweeps[:2], "99%", "latency", table=table)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_predicted_is_what_was_measured(seed):
    """Choice and prediction take gains for noise, and for any plan the prediction is that of the sweep."""
    model, rng = toy(), np.random.default_rng(seed)
    rows = {n: rng.normal(0, .02, 4) for n in ("0", "2", "4")}
    sweep = SweepResult([SensitivityResult("sparsity", level, .9, [LayerSensitivity(n, "Linear", sum(p.numel() for p in model[int(n)].parameters()), .9, .9 - d[i], d[i]) for n, d in rows.items()])
                         for i, level in enumerate((20, 40, 60, 80))])
    for pct in (80, 60, 40):
        plan = allocate(sweep, f"{pct}%", model=model)
        assert plan.predicted_metric == pytest.approx(sweep.predict(plan.sparsity), abs=1e-12)
        assert plan.damage == pytest.approx(sum(max([0, *rows[n][: (0, 20, 40, 60, 80).index(p)]]) for n, p in plan.sparsity.items()))


def test_smaller_steps_where_large_ones_find_no_way(monkeypatch):
    """A step that cannot be taken is halved, and steps grow again; the budget is met, or None is returned after an eighth."""
    model, images = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)), x
    sweep = made_up(model, "pruning", np.random.default_rng(0), ["0", "2"])
    problem, budgets, applier, *_ = plans.set_up(sweep, "55%", "params", (), None, (), None, model, images[:1], None, large_final, None)
    really, asked = plans.choose_around, []
    def steep(damage, choices, picked, ask, *rest, **kwargs):
        asked.append(ask["params"])
        now = applier.costs(planned([(c, c.levels[i]) for c, i in zip(choices, picked, strict=True)]), ("params",))["params"]
        return None if ask["params"] < limit*now else really(damage, choices, picked, ask, *rest, **kwargs)
    monkeypatch.setattr(plans, "choose_around", steep)
    limit = .8   # of the cost, in one step
    picked = plans.stepwise(problem, budgets, applier)
    assert applier.costs(planned(problem.options(picked)), ("params",))["params"] <= budgets["params"] and len(asked) > 2
    limit, asked[:] = .999, []
    assert plans.stepwise(problem, budgets, applier) is None and len(asked) == 4


@pytest.mark.parametrize("higher", [True, False])
def test_no_prediction_is_better_than_untouched(higher):
    """A layer that got better by noise promises nothing, in metric and objective, at measured levels and between them, in one plan and in several."""
    model, sign = toy(), 1 if higher else -1
    def swept(method, at):
        rows = lambda d: [LayerSensitivity(n, "Linear", sum(p.numel() for p in model[int(n)].parameters()), .5, .5 - sign*v, v, objective=.1 + v, objective_delta=v) for n, v in zip(("0", "2", "4"), d, strict=True)]
        return SweepResult([SensitivityResult(method, level, .5, rows(d), higher_is_better=higher, objective_name="loss", baseline_objective=.1) for level, d in at.items()])
    sparse, bits = swept("sparsity", {50: (-.1, -.2, -.05), 80: (-.3, .1, -.02)}), swept("quantization", {8: (-.01, -.02, -.03), 4: (-.1, -.2, .2)})
    assert sparse.predict({"0": 50, "2": 50, "4": 80}) == .5 and sparse.predict({"0": 30, "2": 60}) == pytest.approx(.5 - sign*.1/3)
    assert sparse.predict({"0": 50, "2": 80}) == pytest.approx(.5 - sign*.1)
    assert sparse.predict({"0": 80, "2": 50}, "objective") == 0 and sparse.predict({"0": 80, "2": 80}, "objective") == pytest.approx(.1)
    assert bits.to_bit_plan(model, 8).predicted_metric == .5
    for by in ("metric", "objective"):
        for combine in ((), ("sparsity", "quantization")):
            plan = allocate([sparse, bits], {"bytes": "40%"}, model=model, combine=combine, by=by)
            assert sign*(.5 - plan.predicted_metric) >= 0 and plan.damage >= 0


def benchmark():
    """The benchmark of plans for channels, as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_of_allocate", Path(__file__).parent.parent/"benchmarks"/"allocate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(12))
def test_best_of_all_with_channels(seed):
    """Five layers of random kinds with five options each: no plan within the multiply-accumulates, the parameters or both has less damage; what it costs is worked out apart from the library."""
    assert [row["worse"] for row in benchmark().compare(5, 1000 + seed)] == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_near_the_best_of_more_plans_than_are_looked_at(seed, monkeypatch):
    """Steps and exchanges alone, which is what large networks get."""
    monkeypatch.setattr(plans, "most_plans", 0)
    assert max(row["worse"] for row in benchmark().compare(6, 2000 + seed)) < .05


def test_channels_are_computed_and_the_plan_is_counted():
    """Hundreds of plans are compared, and channels are really taken out for the trial and for the answer only; with wrong widths all is counted, and the plan is the same."""
    model, x, sweep, _, _ = benchmark().problem(5, 3)
    applier = Applier(model, x, ("pruning",))
    removed, really = [], type(next(iter(applier.groups.values())).graph).remove
    def counted(graph, parts):
        removed.append(len(parts))
        return really(graph, parts)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(type(next(iter(applier.groups.values())).graph), "remove", counted)
        plan = allocate(sweep, "50%", "flops", model=model, sample=x)
        proof = len(removed)
        Applier(model, x, ("pruning",))
        assert proof - (len(removed) - proof) <= 3   # beyond those of finding the groups
        m.setattr(widths, "find_widths", lambda *args: (None, set()))
        slow = allocate(sweep, "50%", "flops", model=model, sample=x)
    assert slow.costs == plan.costs or slow.damage >= plan.damage
    with applier(plan): assert plan.costs == {"flops": count_flops_params(model, x, verbose=False)[0]}


def test_multiply_accumulates_saved_by_zeros_are_marked(capsys):
    """In one line, by whatever way the plan was made; channels, and zeros under another budget, need no word."""
    model, rng, word = toy(), np.random.default_rng(0), "only a device that skips zeros saves them"
    by_zeros, by_channels = made_up(model, "sparsity", rng), made_up(model, "pruning", rng, ["0", "2"])
    for sweeps, cost, marks in ((by_zeros, "flops", 1), ([by_zeros, by_channels], "flops", 1), (by_channels, "flops", 0), (by_zeros, "bytes", 0)):
        allocate(sweeps, "70%", cost, model=model, sample=x, verbose=False).summary()
        assert capsys.readouterr().out.count(word) == marks, cost
    assert "only a device that skips zeros" in " ".join(allocate.__doc__.split())
