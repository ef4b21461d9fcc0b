"""Searches that compute once what plans near one plan have in common: the same numbers to the bit whatever is searched for, proof that less was computed, and nothing spent where it does not pay."""
import logging
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasterai_sens import FineTuned, SensitivityAnalyzer, changes, evaluation, fingerprint, search_plan, search_targets
from fasterai_sens.core.layers import find_units
from fasterai_sens.measure.neighbours import Neighbours
from fasterai_sens.measure.norms import reestimate_norms
from fasterai_sens.methods.criteria import bind, large_final
from fasterai_sens.plans import meter as meters
from fasterai_sens.plans.search import Masker

g = torch.Generator().manual_seed(0)
x = torch.randn(48, 3, 8, 8, generator=g)
y = torch.randint(5, (48,), generator=g)


def residual_net():
    """Five convolutions with batch norm and a sum, and a linear layer"""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            return x + self.norm(self.b(F.relu(self.a(x))))

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), Block(), Block(), nn.Flatten(), nn.Linear(288, 5))
    reestimate_norms(net, x)
    return net.eval()


def chain_net():
    """Convolutions one after the other, each with batch norm, none coupled to another"""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 8), (8, 12), (12, 12), (12, 16), (16, 8))]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
    reestimate_norms(net, x)
    return net.eval()


def text_net():
    """A small transformer on numbers, whose layers hand on tuples"""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(48, 5)).eval()


@torch.no_grad()
def scored(model):
    """Accuracy and loss as numbers: nothing that a search could take parts or gradients of"""
    out = model(x)
    return (out.argmax(1) == y).float().mean().item(), F.cross_entropy(out, y).item()


@torch.no_grad()
def in_batches(model):
    """Loss of each image, in three calls"""
    return torch.cat([F.cross_entropy(model(xs), ys, reduction="none") for xs, ys in zip(x.split(20), y.split(20), strict=True)])


def no_gradients(preds, targs):
    """An objective of data that hides its gradients"""
    return F.cross_entropy(preds.detach(), targs, reduction="none")


def told(caplog):
    """What the log says of plans near one plan"""
    return [r.getMessage() for r in caplog.records if "plans near one plan" in r.getMessage()][-1]


def both(caplog, run):
    """The result without reuse, after it was found to be that with reuse; and what the log says of the latter"""
    caplog.set_level(logging.INFO, "fasterai_sens")
    plain = run(reuse=False)
    assert "reuse=False" in told(caplog)
    found = run(reuse=True)
    assert found.as_dict() == plain.as_dict() and str(found.as_dict()) == str(plain.as_dict())
    return plain, told(caplog)


@pytest.mark.parametrize(("make", "options"), [
    (residual_net, {}), (residual_net, {"granularity": "filter"}), (residual_net, {"recalibrate": x}), pytest.param(residual_net, {"reconstruct": x}, marks=pytest.mark.slow),
    (residual_net, {"layers": ["0", "3.b", "6"]}), (text_net, {}), (text_net, {"reconstruct": x}),
])
def test_zeros(make, options, caplog):
    """Searches for zeros, with blocks, with statistics that are estimated anew, with refitted layers: what is reused changes no number."""
    net = make()
    before = fingerprint(net)
    def run(reuse): return search_targets(net, x[:1], scored, 60, evaluations=90, verbose=False, reuse=reuse, **options)
    _, said = both(caplog, run)
    assert "evaluations reused results" in said and "switched off" not in said
    assert not changes(before, fingerprint(net))


def test_metrics_of_several_calls(caplog):
    """Each image a score, in three calls of the model; and data whose objective has no gradients, of which parts are evaluated."""
    net = residual_net()
    def run(reuse): return search_targets(net, x[:1], in_batches, 70, higher_is_better=False, evaluations=90, verbose=False, reuse=reuse)
    assert "evaluations reused results" in both(caplog, run)[1]
    data = evaluation((x, y), no_gradients)
    def run(reuse): return search_targets(net, x[:1], data, 70, higher_is_better=False, evaluations=30, verbose=False, reuse=reuse)
    assert "evaluations reused results" in both(caplog, run)[1]


@pytest.mark.parametrize("make", [pytest.param(residual_net, marks=pytest.mark.slow), chain_net])
@pytest.mark.parametrize(("method", "levels", "budget"), [
    ("quantization", [8, 4, 3], "18%"), ("sparsity", [30, 60, 90], "60%"), ("pruning", [25, 50], "70%"), ("low_rank", [30, 60], "80%"),
])
def test_plans_of_each_method(make, method, levels, budget, caplog):
    """Searches for plans of a budget, also where compressed layers are other tensors for each plan: what is the same in them is known."""
    net = make()
    cost = "bytes" if method == "quantization" else "params"
    sweep = SensitivityAnalyzer(net, x[:1], scored).sweep(method, levels, verbose=False)
    before = fingerprint(net)
    def run(reuse): return search_plan(net, x[:1], scored, sweep, budget, cost, evaluations=60, verbose=False, reuse=reuse)
    _, said = both(caplog, run)
    n_reused, n = re.search(r"(\d+) of (\d+) evaluations reused results", said).groups()
    if make is chain_net or method != "pruning": assert int(n_reused) > int(n)/2   # the residual stream is one group, and begins at the first layer
    assert not changes(before, fingerprint(net))


@pytest.mark.parametrize("activations", [False, "both"])
def test_two_methods_and_rounded_activations(activations, caplog):
    """Zeros and bits in one plan; with activations rounded by hooks nothing is reused behind the first of them."""
    net = residual_net()
    analyzer = SensitivityAnalyzer(net, x[:1], scored, calibration_data=x[:16])
    sweeps = [analyzer.sweep("sparsity", [40, 80], verbose=False), analyzer.sweep("quantization", [8, 4], quant_activations=activations, verbose=False)]
    def run(reuse):
        return search_plan(net, x[:1], scored, sweeps, "12%", "bytes", combine=("sparsity", "quantization"), calibration_data=x[:16], evaluations=60, verbose=False, reuse=reuse)
    _, said = both(caplog, run)
    assert ("there is a hook" if activations else "evaluations reused results") in said


def test_less_is_computed():
    """Around a plan the first convolution is computed for the plan in the middle, for the comparison, and where it differs itself."""
    net = residual_net()
    meter = meters.Meter(net, masker(net), scored, neighbours=Neighbours(net, True))
    meter.dense()
    calls = []
    op = torch.ops.aten.convolution.default
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op and args[0].shape[1] == 3: calls.append(1)
            return func(*args, **(kwargs or {}))
    middle = {name: 40. for name in meter.neighbours.homes}
    near = [middle | {name: pct} for name in middle for pct in (30., 55.)]
    alone = [meter.measure(plan).value for plan in near]
    with Watch(): found = [score.value for score in meter.scores(near, middle=middle)]
    assert found == alone
    assert len(calls) == 4 and len(near) == 12   # in the middle, to compare, and two of its own


def masker(net):
    """What carries out plans of zeros"""
    units = find_units(net)[0]
    return Masker(units, "weight", bind(large_final, net, units, None, x[:1]))


def test_nothing_is_spent_where_it_does_not_pay():
    """By itself a search of a tiny network evaluates as often as without; so does one whose evaluation trains a copy, and calls the model not at all."""
    net, n = residual_net(), []
    def counted(model):
        n.append(1)
        return scored(model)
    def train(model): n.append(1)
    for eval_fn in (counted, FineTuned(train, scored)):
        counts = []
        for reuse in (False, "auto"):
            n.clear()
            search_targets(net, x[:1], eval_fn, 60, evaluations=90, verbose=False, reuse=reuse)
            counts.append(len(n))
        assert counts[0] == counts[1] > 50


def test_evaluations_that_lie_are_found_out(caplog):
    """An evaluation that gives another number each time is not trusted: all is measured as it comes, as much as without."""
    net, n = residual_net(), []
    def drifting(model):
        n.append(1)
        score, loss = scored(model)
        return score, loss + 1e-6*len(n)
    caplog.set_level(logging.INFO, "fasterai_sens")
    found, plain = (search_targets(net, x[:1], drifting, 60, evaluations=90, verbose=False, reuse=reuse) for reuse in (True, False))
    assert "something reused was not what a plain evaluation gives" in caplog.text
    assert abs(found.evaluations - plain.evaluations) <= 3   # the numbers drift, so the ways differ


def write(net):
    """Past PyTorch's count of changes"""
    net[0].weight.data[0] += 1


def put_another(net):
    """A parameter in the place of one"""
    net[0].weight = nn.Parameter(net[0].weight.detach() + 1)


def interrupt(_):
    """What Ctrl-C does"""
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [write, put_another, interrupt])
@pytest.mark.parametrize("at", [1, 2, 9, 25, 40, 60])
def test_misdeeds_among_neighbours(kind, at):
    """An evaluation that changes the model or breaks off, at whichever call: an error, and the model as it was."""
    net, n = residual_net(), []
    def eval_fn(model):
        n.append(1)
        if len(n) == at: kind(model)
        return scored(model)
    before = fingerprint(net)
    with pytest.raises(KeyboardInterrupt if kind is interrupt else ValueError): search_targets(net, x[:1], eval_fn, 60, evaluations=90, verbose=False, reuse=True)
    assert not changes(before, fingerprint(net)) and len(n) >= at
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_shuffling_is_reported():
    """Other inputs in each evaluation: a warning, and nothing is reused."""
    order = torch.Generator().manual_seed(0)
    def shuffling(model):
        picked = torch.randperm(len(x), generator=order)
        with torch.no_grad(): return F.cross_entropy(model(x[picked]), y[picked]).item()
    with pytest.warns(UserWarning, match="shuffles, augments"):
        search_targets(residual_net(), x[:1], shuffling, 60, higher_is_better=False, evaluations=90, verbose=False, reuse=True)


@pytest.mark.parametrize("then", [True, False])
def test_a_journal_is_taken_up(then, tmp_path):
    """A search that broke off among neighbours goes on from its journal, with reuse or without, to the same result."""
    net, path, n = residual_net(), tmp_path/"j.jsonl", []
    def breaking(model):
        n.append(1)
        if len(n) == 60: raise RuntimeError("power cut")
        return scored(model)
    whole = search_targets(net, x[:1], scored, 60, evaluations=90, verbose=False, reuse=False)
    options = dict(evaluations=90, verbose=False, journal=str(path))
    before = fingerprint(net)
    with pytest.raises(RuntimeError, match="power cut"): search_targets(net, x[:1], breaking, 60, reuse=True, **options)
    assert not changes(before, fingerprint(net))
    n_before = len(path.read_text().splitlines())
    assert n_before > 20
    again = search_targets(net, x[:1], breaking, 60, reuse=then, **options)
    assert again.as_dict() == whole.as_dict()


def test_bad_options_are_refused_at_the_door():
    """Before anything is evaluated."""
    def never(model): raise AssertionError("evaluated")
    for wrong in (dict(reuse="always"), dict(reuse_memory=-1)):
        with pytest.raises(ValueError, match="reuse"): search_targets(residual_net(), x[:1], never, 60, verbose=False, **wrong)
        with pytest.raises(ValueError, match="reuse"): search_plan(residual_net(), x[:1], never, None, "50%", verbose=False, **wrong)


class TwoHeads(nn.Module):
    """Two heads on a body; one of them hands its predictions out as Python has them, or as NumPy changes them"""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second, self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x, predict=False):
        """Logits of one head, or probabilities of the other"""
        z = F.relu(self.first(x))
        if self.kind == "clipped":
            memory = z.numpy()
            memory[memory > .5] = .5
        if self.kind == "largest": largest = float(z.numpy().max())
        z = F.relu(self.second(z)).mean((2, 3))
        if self.kind == "pieces": z = torch.cat([part*i for i, part in enumerate(z.split(torch.bincount(y).tolist()), 1)])
        if self.kind == "largest": z = z*largest
        if not predict: return self.a(z)
        chances = self.b(z).softmax(1)
        return chances.tolist() if self.kind == "list" else chances.numpy()


@torch.no_grad()
def by_both(model):
    """The loss of one head, and how sure the other is, from memory that NumPy overwrites"""
    loss, chances = F.cross_entropy(model(x), y).item(), np.asarray(model(x, predict=True))
    np.log(chances, out=chances)
    return loss - float(chances[np.arange(len(y)), y.numpy()].mean())


@pytest.mark.parametrize("memory", [None, 180_000])
@pytest.mark.parametrize("kind", ["list", "array", "clipped", "largest", "pieces"])
def test_what_is_read_past_the_operations(kind, memory):
    """Lists and arrays of what was computed, in a call and behind it, and arrays that are written to: the same numbers with everything kept and with little memory, in a search and in a sweep."""
    found, before = [], {name: vars(torch.Tensor).get(name) for name in ("numpy", "tolist", "__dlpack__")}
    for reuse in (False, True):
        search = search_targets(TwoHeads(kind).eval(), x[:1], by_both, 60, higher_is_better=False, evaluations=60, verbose=False, reuse=reuse, reuse_memory=memory) \
            if kind != "pieces" else None   # which needs the whole batch
        analyzer = SensitivityAnalyzer(TwoHeads(kind).eval(), x, by_both, higher_is_better=False, reuse=reuse, reuse_memory=memory)
        found.append(str(search and search.as_dict()) + str(analyzer.sweep("sparsity", [30, 60, 90], verbose=False).as_dict()))
    assert found[0] == found[1]
    assert {name: vars(torch.Tensor).get(name) for name in before} == before


@pytest.mark.parametrize("every", [9, 13])
def test_a_call_that_was_given_up_counts_for_nothing(every):
    """An evaluation that catches everything also catches what ends a call that went another way, and its score is not taken."""
    class Logging(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.n = chain_net(), 0

        def forward(self, x):
            self.n += 1
            z = self.net[:2](x)
            if self.n % every == 0: z.abs().mean().item()   # one more operation than was written down
            return self.net[2:](z)

    def careless(model):
        try: return scored(model)
        except: return 0., 99.   # noqa: E722
    found = [search_targets(Logging().eval(), x[:1], careless, 60, evaluations=90, verbose=False, reuse=reuse).as_dict() for reuse in (False, True)]
    assert str(found[0]) == str(found[1])
