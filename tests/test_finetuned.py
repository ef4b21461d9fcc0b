"""The damage that is left after a little training is what training by hand leaves, for every method that makes zeros or takes channels out."""
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fasterai_sens import (
    FineTuned,
    Pruner,
    SensitivityAnalyzer,
    Sparsifier,
    allocate,
    analyze_degradation,
    changes,
    compress_to_size,
    fingerprint,
    leave_no_trace,
    search_plan,
    search_targets,
    validate_compression_target,
)
from fasterai_sens.core.layers import find_units

g = torch.Generator().manual_seed(0)
x = torch.randn(96, 3, 6, 6, generator=g)
y = torch.randint(5, (96,), generator=g)


def train(model, steps=5, make=torch.optim.Adam, after_step=lambda: None):
    """A few batches, drawn by the global generator."""
    model.train()
    opt = make(model.parameters(), 1e-2)
    for _ in range(steps):
        i = torch.randint(len(x), (32,))
        opt.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        opt.step()
        after_step()


def losses(model):
    """Loss of each sample."""
    assert not model.training
    with torch.no_grad(): return F.cross_entropy(model(x), y, reduction="none")


@pytest.fixture
def net():
    """A small network with batch norm, trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    train(model, 60)
    return model.eval()


def by_hand(net, compress, make=torch.optim.Adam):
    """The loss of a copy that `compress` made smaller for good and that was then trained, on the batches that the global generator gives now."""
    with leave_no_trace(net):       # for the random state
        model = copy.deepcopy(net)
        train(model, make=make, after_step=compress(model))
        return losses(model.eval()).mean().item()


def sparse(plan):
    """A function that makes a model sparse, and returns what keeps it so."""
    def compress(model):
        sparsifier = Sparsifier(model)
        sparsifier.sparsify_model(plan)
        return sparsifier.apply_masks
    return compress


def pruned(name, pct):
    """A function that takes channels out, which needs nothing afterwards."""
    def compress(model):
        Pruner(model, {name: pct}, example_inputs=x[:1]).prune_model()
        return lambda: None
    return compress


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr, momentum=.9, weight_decay=1e-3), torch.optim.AdamW])
def test_sparsity(net, make):
    """Each layer, sparse and trained on, loses what it loses with the masks of a `Sparsifier` applied after each step."""
    before = fingerprint(net)
    eval_fn = FineTuned(lambda m: train(m, make=make), losses)
    result = SensitivityAnalyzer(net, x[:1], eval_fn, higher_is_better=False, metric_name="loss").analyze("sparsity", 90, verbose=False)
    assert changes(before, fingerprint(net)) == []
    np.testing.assert_allclose(result.baseline_metric, by_hand(net, sparse({}), make), rtol=1e-6)
    assert len(result.layers) == 3
    for row in result.layers:
        np.testing.assert_allclose(row.compressed_metric, by_hand(net, sparse({row.name: 90}), make), rtol=1e-4)
    assert any(abs(row.delta) > 1e-3 for row in result.layers)


def test_channels(net):
    """Channels that are taken out are out of the network that is trained."""
    eval_fn = FineTuned(train, losses)
    before = fingerprint(net)
    sweep = SensitivityAnalyzer(net, x[:1], eval_fn, higher_is_better=False, metric_name="loss").sweep("pruning", [25, 50], verbose=False)
    assert changes(before, fingerprint(net)) == []
    row = sweep[1].layers[0]
    np.testing.assert_allclose(row.compressed_metric, by_hand(net, pruned(row.name, 50)), rtol=1e-4)
    plan = allocate(sweep, {"params": "80%"}, model=net, sample=x[:1])
    found = search_plan(net, x[:1], eval_fn, sweep, {"params": "80%"}, evaluations=30, verbose=False)
    assert changes(before, fingerprint(net)) == [] and plan.pruning and found.plan.costs["params"] <= .8*found.plan.whole["params"]
    assert found.measured_metric == min(r["search_metric"] for r in found.ranking)


def test_search(net):
    """A search by what training leaves: the metric of each plan in the ranking is that of training it by hand, and the budget is kept."""
    before = fingerprint(net)
    found = search_targets(net, x[:1], FineTuned(train, losses), 90, higher_is_better=False, metric_name="loss", evaluations=40, verbose=False)
    assert changes(before, fingerprint(net)) == []
    for row in found.ranking:
        np.testing.assert_allclose(row["metric"], by_hand(net, sparse(found.plans[row["plan"]])), rtol=1e-3)
        assert abs(found.plans[row["plan"]].mean(net) - 90) < 1e-6
    assert found.measured_metric == min(r["metric"] for r in found.ranking)


def test_zeros_stay_and_nothing_else_does(net):
    """Of all parameters, whatever the training does to them; frozen ones and those that are set by force as well."""
    seen = []
    def look(model):
        seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        return losses(model)
    def rough(model):
        train(model)
        with torch.no_grad():
            for p in model.parameters(): p.add_(1)
    with leave_no_trace(net):
        for u in find_units(net)[0]: u.weight.data.flatten()[::2] = 0
        net[7].weight.requires_grad = False
        kept = {n: p.detach().clone() for n, p in net.named_parameters()}
        for f in (train, rough): FineTuned(f, look)(net)
        assert all(torch.equal(p, kept[n]) for n, p in net.named_parameters())
    for trained in seen:
        for n, p in trained.items():
            assert not p[kept[n] == 0].any()
            if n != "7.weight": assert (p != kept[n])[kept[n] != 0].float().mean() > .9
    assert torch.equal(seen[0]["7.weight"], kept["7.weight"])


def test_tied_weights_stay_tied():
    """A copy has the ties of the model where one parameter has two names, and zeros of a tied weight are held once for both."""
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
        def forward(self, x): return self.b(self.a(x))
    torch.manual_seed(0)
    model = Tied()
    model.a.weight.data[0] = 0
    seen = []
    def fit(m):
        opt = torch.optim.Adam(m.parameters(), .1)
        for _ in range(3):
            opt.zero_grad()
            (m(torch.ones(2, 4)) - 1).square().mean().backward()
            opt.step()
    FineTuned(fit, lambda m: seen.append(m) or 0.)(model)
    assert seen[0].a.weight is seen[0].b.weight and not seen[0].a.weight[0].any() and not torch.equal(seen[0].a.weight, model.a.weight)


def test_under_no_grad_and_errors(net):
    """It trains where gradients are off, an error of the training comes through, and the model is what it was."""
    before = fingerprint(net)
    with torch.no_grad():
        tuned = FineTuned(train, losses)(net).mean()
    assert tuned != losses(net).mean()
    def broken(model):
        train(model)
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        SensitivityAnalyzer(net, x[:1], FineTuned(broken, losses)).analyze("sparsity", 50, verbose=False)
    for args, words in (((None, losses), "train is a function of the model; got NoneType"), ((train, .5), "eval_fn is a function of the model; got float")):
        with pytest.raises(TypeError, match=words): FineTuned(*args)
    after = fingerprint(net)
    assert [c for c in changes(before, after) if not c.startswith("rng")] == []


def test_bits_are_refused(net):
    """Training undoes rounding, so it is refused wherever bits are measured, before anything is."""
    eval_fn, calls = FineTuned(lambda m: calls.append(1), losses), []
    analyzer = SensitivityAnalyzer(net, x[:1], eval_fn, higher_is_better=False)
    with pytest.raises(ValueError): analyzer.analyze("quantization", 4, verbose=False)
    with pytest.raises(ValueError): analyze_degradation(net, x[:1], eval_fn, ["20 %"], "quantization", verbose=False)
    bits = SensitivityAnalyzer(net, x[:1], losses, higher_is_better=False).sweep("quantization", [8, 4], verbose=False)
    for fns in (dict(eval_fn=eval_fn), dict(eval_fn=losses, report_fn=eval_fn)):
        with pytest.raises(ValueError): search_plan(net, x[:1], sweeps=bits, budget="30%", cost="bytes", verbose=False, **fns)
    small = compress_to_size(net, x[:1], "40 %", "quantization")
    with pytest.raises(ValueError): validate_compression_target(small, net, eval_fn, .5)
    assert not calls


def test_thawed_weights_are_held_too(net):
    """Zeros of what is frozen stay zero while it is trained, not only afterwards; zero biases learn."""
    seen = []
    def thaw(model):
        for p in model.parameters(): p.requires_grad_(True)
        train(model, after_step=lambda: seen.append(int((model[7].weight == 0).sum())))
        seen.append(bool(model[7].bias.any()))
    with leave_no_trace(net):
        net.requires_grad_(False)
        net[7].weight.data[:, ::2], net[7].bias.data[:] = 0, 0
        with torch.inference_mode(): FineTuned(thaw, losses)(net)
        assert not any(p.requires_grad for p in net.parameters())
    assert seen == [5*24]*5 + [True]


def test_models_that_are_copied_or_not(net):
    """Integer parameters are no obstacle; what PyTorch cannot copy is said."""
    with leave_no_trace(net):
        net.register_parameter("table", nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False))
        assert FineTuned(train, losses)(net).isfinite().all()
    net.seen = net[0](x)
    with pytest.raises(ValueError, match="FineTuned trains a copy, and this Sequential cannot be copied"): FineTuned(train, losses)(net)


def test_refitted_before_it_is_trained(net):
    """With `reconstruct` a plan is refitted, then a copy is trained with its zeros held: the number of both done by hand, in a sweep and in a search"""
    def train_alike(model):
        torch.manual_seed(1)
        train(model)

    tuned = FineTuned(train_alike, losses)
    def of_plan(plan, data):
        done = copy.deepcopy(net)
        with leave_no_trace(done):
            Sparsifier(done, reconstruct=data).sparsify_model(plan)
            return tuned(done).mean().item()

    analyzer = SensitivityAnalyzer(net, x[:1], tuned, higher_is_better=False, metric_name="loss", calibration_data=x)
    for layer in analyzer.analyze("sparsity", 80, reconstruct=True, verbose=False).layers:
        refitted, cut = (of_plan({layer.name: 80}, data) for data in (x, None))
        assert layer.compressed_metric == pytest.approx(refitted, rel=1e-4) and refitted != pytest.approx(cut, rel=1e-4)
    before = fingerprint(net)
    found = search_targets(net, x[:1], tuned, 80, reconstruct=x, higher_is_better=False, metric_name="loss", evaluations=22, verbose=False)
    assert changes(before, fingerprint(net)) == []
    assert found.measured_metric == pytest.approx(of_plan(found.plan, x), rel=1e-4)
    with pytest.raises(ValueError): analyzer.analyze("quantization", 4, reconstruct=True, verbose=False)
