"""A method that a user writes in twenty lines outside the package works wherever one of ours does."""
from dataclasses import dataclass, replace

import pytest
import torch
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn
from torch.utils.data import TensorDataset
from toys import rows, three_layers, unchanged

from fasterai_sens import (
    Perturbation,
    Plan,
    SensitivityAnalyzer,
    allocate,
    analyze_degradation,
    changes,
    compress_to_size,
    compress_with_layer_sensitivity,
    cost_table,
    fingerprint,
    gradual_degradation_recovery,
    method,
    recommend_compression_target,
    search_plan,
)
from fasterai_sens.core.layers import target_units
from fasterai_sens.core.protocol import methods

x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
score = rows(x)


@pytest.fixture(autouse=True)
def table():
    """The table of methods is after each test what it was before"""
    before = dict(methods)
    yield
    assert methods == before


@pytest.fixture
def rounding(table):
    """The fifth method: it drops the last bits of each number's mantissa"""
    class Held:
        def __init__(self, levels):
            self.levels = levels
        def hold(self):
            for unit, level in self.levels.items():
                Rounded(level).change(None, unit)

    @method("rounding")
    @dataclass(frozen=True)
    class Rounded(Perturbation):
        level: float = 50   # percent of the 23 bits
        ranks = False
        @property
        def n_bits(self):
            return round(23*self.level/100)
        def change(self, model, unit):
            bits = unit.weight.data.view(torch.int32)
            bits &= -2**self.n_bits
        def shrink(self, unit, footprint, n_biases=0):
            return replace(footprint, bits=footprint.bits - self.n_bits)
        @classmethod
        def apply(cls, model, targets, **_):
            held = Held(target_units(model, targets))
            held.hold()
            return held

    yield Rounded
    del methods["rounding"]


@pytest.fixture
def net():
    return three_layers()


@pytest.fixture
def sweep(rounding, net):
    """Sensitivities to rounding, in a net that comes back as it was"""
    with unchanged(net):
        return SensitivityAnalyzer(net, x[:1], score).sweep("rounding", [30, 60, 80, 100], verbose=False)


def lost_bits(w):
    """How many of the last bits are 0 in all numbers"""
    bits = w.detach().contiguous().view(torch.int32)
    return next((n for n in range(23, 0, -1) if not (bits & (2**n - 1)).any()), 0)


def test_measured(rounding, net, sweep):
    one = SensitivityAnalyzer(net, x[:1], score).analyze("rounding", 60, verbose=False)
    assert one.compression_type == "rounding"
    assert [r.delta for r in one.layers] == [r.delta for r in sweep[1].layers]
    targets = sweep.to_layer_targets(net, 70)
    assert targets.mean(net) == pytest.approx(70) and targets.method == "rounding"


@pytest.mark.parametrize("budget, cost", [("60%", "bytes"), (1200, "bytes"), ({"bytes": "50%"}, None)])
def test_planned(net, sweep, budget, cost, tmp_path):
    """Bytes are counted as the footprint says; the plan is saved, read back, tried and kept"""
    with unchanged(net):
        plan = allocate(sweep, budget, cost, model=net, sample=x[:1])
    assert plan.costs["bytes"] <= plan.budgets["bytes"]
    assert any(plan.rounding.values())
    plan.to_json(tmp_path/"plan.json")
    again = Plan.from_json(tmp_path/"plan.json")
    assert again == plan and again.rounding == plan.rounding
    held = again.apply(net, x[:1])
    assert list(held) == ["rounding"]
    for name, level in plan.rounding.items():
        assert lost_bits(net[int(name)].weight) >= round(23*level/100)


def test_a_budget_that_it_cannot_lower(net, sweep):
    with pytest.raises(ValueError):
        allocate(sweep, "60%", "params", model=net, sample=x[:1])


def test_costs_and_search(net, sweep):
    with unchanged(net):
        table = cost_table(sweep, net, x[:1])
        found = search_plan(net, x[:1], score, sweep, "60%", "bytes", evaluations=20, verbose=False)
    key = next(k for k in table.saved if k.endswith("rounding 100"))
    assert table.saved[key]["bytes"] > 0 == table.saved[key]["params"]
    assert found.plan.costs["bytes"] <= .6*table.whole["bytes"]


@pytest.mark.parametrize("kind", ["alike", "a plan", "one level", "a sweep"])
def test_sizes(net, sweep, kind):
    """Just within the budget: with less rounding in any layer it would be too large"""
    plan = {"alike": None, "a plan": {"0": 80, "2": 40}, "one level": sweep[1], "a sweep": sweep}[kind]
    with unchanged(net):
        small = compress_to_size(net, x[:1], 70, "rounding", plan=plan)
    assert 68 < small.size_pct <= 70
    assert small.compression == small.plan.method == "rounding"
    for name, level in small.plan.items():
        assert lost_bits(small.model[int(name)].weight) >= round(23*level/100)
    with pytest.raises(ValueError):
        compress_to_size(net, x[:1], 5, "rounding", plan=plan)
    with pytest.raises(TypeError, match="rounding takes no option 'criteria'"):
        compress_to_size(net, x[:1], 70, "rounding", criteria="large_final")


def test_less_for_the_sensitive(net, sweep):
    for result in (sweep, sweep[1]):
        with unchanged(net):
            small = compress_with_layer_sensitivity(net, x[:1], result, 60)
        assert small.plan.mean(net) == pytest.approx(60)


def test_degradation(net, sweep, tmp_path):
    with unchanged(net):
        curve = analyze_degradation(net, x[:1], score, [100, 70, 40], "rounding", plan=sweep, runs=1, verbose=False)
    assert [p.size_pct <= asked for p, asked in zip(curve, (100, 70, 40), strict=True)] == [True, True, True]
    small = compress_to_size(net, x[:1], 40, "rounding", plan=sweep)
    assert curve[2].plan == small.plan
    assert curve[2].metric == pytest.approx(score(small.model).mean().item())
    curve.to_json(tmp_path/"curve.json")
    assert type(curve).from_json(tmp_path/"curve.json") == curve
    target = recommend_compression_target(max_drop=10, curve=curve, baseline=20.)
    assert target.point is curve[2]


def test_a_ladder_of_ones_own(table, net):
    """A method in bits without steps of its own: the rungs are its default levels, and curves are solved by `allocate`"""
    @method("powers")
    @dataclass(frozen=True)
    class Powers(Perturbation):
        bits: int = 8
        unit, column, ranks, default_level = "bits", "bits", False, 8
        @classmethod
        def default_levels(cls, **_):
            return 4, 8, 2
        @property
        def level(self):
            return self.bits
        @property
        def strength(self):
            return -self.bits
        def change(self, model, unit):
            w = unit.weight.data
            least = w.abs().max().log2().ceil() - 2**(self.bits - 1) + 2
            w.copy_(w.sign()*w.abs().log2().round().clamp(min=least).exp2())
        def shrink(self, unit, footprint, n_biases=0):
            return replace(footprint, bits=self.bits)
        @classmethod
        def apply(cls, model, targets, **_):
            for unit, bits in target_units(model, targets).items():
                cls(bits).change(model, unit)

    try:
        with unchanged(net):
            sweep = SensitivityAnalyzer(net, x[:1], score).sweep("powers", verbose=False)
            alike = compress_to_size(net, x[:1], 30, "powers")
            best = compress_to_size(net, x[:1], 30, "powers", plan=sweep)
            curve = analyze_degradation(net, x[:1], score, [100, 30], "powers", plan=sweep, runs=0, verbose=False)
        assert set(alike.plan.values()) <= {8, 4, 2} and alike.plan.unit == "bits"
        assert max(alike.size_pct, best.size_pct) <= 30
        assert curve[1].plan == best.plan == allocate(sweep, "30%", "bytes", model=net, sample=x[:1]).powers
        with pytest.raises(ValueError, match="compression is"):
            gradual_degradation_recovery(Learner(DataLoaders([], []), net, loss_func=nn.MSELoss()), compression="powers")
    finally:
        del methods["powers"]


def test_recovery(rounding):
    """Every stage is held through the training, and too harsh a stage is taken back"""
    torch.manual_seed(0)
    data = TensorDataset(x, x[:, 0].gt(0).long())
    dls = DataLoaders.from_dsets(data, data, bs=8, device="cpu", num_workers=0)

    def accuracy(preds, targets):
        return (preds.argmax(1) == targets).float().mean()

    learn = Learner(dls, three_layers().train(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    before = fingerprint(learn.model)
    found = gradual_degradation_recovery(learn, (40, 80), compression="rounding", lr=1e-3, verbose=False)
    assert (found.best, found.compression) == (80, "rounding")
    assert changes(before, fingerprint(learn.model))
    for i in (0, 2, 4):
        assert lost_bits(learn.model[i].weight) >= 18
    before = fingerprint(learn.model)

    def fine_enough(preds, targets):
        return torch.tensor(float(lost_bits(learn.model[0].weight) < 20))

    harsh = gradual_degradation_recovery(
        learn, (100,), compression="rounding", metric=fine_enough, higher_is_better=True, max_drop=.5, verbose=False)
    assert harsh.best is None and changes(before, fingerprint(learn.model)) == []
    plan = gradual_degradation_recovery(learn, (30,), compression="rounding", plan={"0": 60, "2": 30}, epochs=0, verbose=False)
    assert plan.targets[0].method == "rounding"


def test_what_is_missing_is_said(table, net):
    """A method that only measures cannot be sized, and says so"""
    @method("noise")
    @dataclass(frozen=True)
    class Noisy(Perturbation):
        level: float = 50
        def change(self, model, unit):
            unit.weight.data.mul_(1 - self.level/200)

    try:
        with pytest.raises(ValueError, match="known are"):
            compress_to_size(net, x[:1], 50, "noise")
        with pytest.raises(ValueError, match="what a level of noise saves is not known"):
            allocate(SensitivityAnalyzer(net, x[:1], score).sweep("noise", verbose=False), "50%", model=net)
        with pytest.raises(NotImplementedError, match="Noisy has no apply"):
            Plan(noise={"0": 50}).apply(net, x[:1])
    finally:
        del methods["noise"]
