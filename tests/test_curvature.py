"""One backward pass: gradients as autograd has them, for every kind of `eval_fn` that is data, any method, and no trace after it."""
import pytest
import torch
import torch.nn.functional as F
from fastcore.test import test_close as close
from torch import nn

from fasterai_sens import changes, evaluation, fingerprint, leave_no_trace
from fasterai_sens.core.layers import find_units
from fasterai_sens.core.protocol import Perturbation
from fasterai_sens.measure.curvature import curvature, has_gradients, pieces_of
from fasterai_sens.measure.data import as_eval_fn
from fasterai_sens.methods.prune import Pruned
from fasterai_sens.methods.sparsify import Sparse

x, y = torch.randn(70, 6, generator=torch.Generator().manual_seed(0)), torch.randint(3, (70,), generator=torch.Generator().manual_seed(1))


def each(preds, targs):
    """Loss of each sample."""
    return F.cross_entropy(preds, targs, reduction="none")


def hit(preds, targs):
    """Whether each sample is right."""
    return preds.argmax(1) == targs


def net_of(seed=0):
    """A small network with everything that could be disturbed: batch norm, dropout, frozen weights, gradients that are there already."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(.5), nn.Linear(8, 3))
    F.cross_entropy(net(x), y).backward()
    net[0].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize("by", ["loss", "metric", "mean"])
def test_slope_is_the_gradient(by):
    """Whether the loss is objective or metric, by sample or one number; in train mode the network is looked at as in eval mode, and is as it was after that."""
    net = net_of()
    eval_fn = {"loss": evaluation((x, y), hit, each), "metric": evaluation([(x[:50], y[:50]), (x[50:], y[50:])], each), "mean": evaluation((x, y), hit, F.cross_entropy)}[by]
    before = fingerprint(net)
    at = curvature(net, pieces_of(eval_fn, higher_is_better=by != "metric"), find_units(net)[0], size=16)
    assert changes(before, fingerprint(net)) == [] and net.training
    with leave_no_trace(net):
        net.eval().requires_grad_(True)
        right = torch.autograd.grad(F.cross_entropy(net(x), y), [net[0].weight, net[4].bias])
    close(at.slopes[net[0].weight], right[0], 1e-6)
    close(at.slopes[net[4].bias], right[1], 1e-6)
    assert at.n == 70 and at.cost == 210


@pytest.mark.parametrize("make", [lambda: evaluation((x, y), hit, "kl"), lambda: as_eval_fn((x, y)), lambda: as_eval_fn([{"input": x[:33], "labels": y[:33]}, {"input": x[33:], "labels": y[33:]}])])
def test_a_divergence_is_flat_where_it_starts_and_has_a_curvature_there(make):
    """The slope at the untouched model is nothing, the curvature is not; under a change the slope is that of the measured divergence."""
    net, eval_fn = net_of().eval(), make()
    eval_fn(net)
    assert has_gradients(net, pieces_of(eval_fn))
    at = curvature(net, pieces_of(eval_fn), find_units(net)[0])
    assert at.slopes[net[4].weight].abs().max() < 1e-7 < 1e-4 < at.fishers[net[4].weight].max()
    with leave_no_trace(net), torch.no_grad():
        net[4].weight += .3
        at, steps = curvature(net, pieces_of(eval_fn), find_units(net)[0]), []
        for step in (1e-3, -1e-3):
            net[4].weight[0, 0] += step
            steps.append(eval_fn(net)[1].mean().item())
            net[4].weight[0, 0] -= step
    close(at.slopes[net[4].weight][0, 0].item(), (steps[0] - steps[1])/2e-3, 1e-3)
    assert at.cost == 5*70


def test_what_has_no_gradients():
    """A count, a function that says nothing of its data, one that is computed without a graph, and an evaluation made by hand."""
    net = net_of()
    without = evaluation((x, y), torch.no_grad()(each))
    by_hand = evaluation((x, y), each)
    by_hand.data = None
    for eval_fn in (evaluation((x, y), hit), lambda m: 1., without, by_hand): assert not has_gradients(net, pieces_of(eval_fn, higher_is_better=False))
    with pytest.raises(ValueError): curvature(net, pieces_of(without), find_units(net)[0])


def test_tokens_count_as_many():
    """A text's loss is a mean over its tokens, so its gradient is smaller than one token's: the curvature is that of tokens, not of texts."""
    torch.manual_seed(0)
    head = nn.Linear(4, 5)
    h, t = torch.randn(200, 16, 4), torch.randint(5, (200, 16))

    def of_text(preds, targs): return F.cross_entropy(preds.transpose(1, 2), targs, reduction="none").mean(1)

    texts = curvature(head, pieces_of(evaluation((h, t), of_text)), find_units(head)[0], size=1)
    tokens = curvature(head, pieces_of(evaluation((h.flatten(0, 1), t.flatten()), each)), find_units(head)[0], size=1)
    close(texts.slopes[head.weight], tokens.slopes[head.weight], 1e-5)
    assert .8 < (texts.fishers[head.weight].sum()/tokens.fishers[head.weight].sum()).item() < 1.5


class Half(Perturbation):
    """A method of one's own: it replaces the parameter by another one."""

    def change(self, model, unit): unit.module.weight = nn.Parameter(unit.weight.detach()/2)


def test_any_method_that_writes_weights():
    """Also one that the library does not know, under a plan that is in force; and nothing is left of it."""
    net, eval_fn = net_of().eval(), evaluation((x, y), hit, each)
    unit = find_units(net)[0][1]
    with leave_no_trace(net):
        net[0].weight.data[:, ::2] = 0
        before = fingerprint(net)
        at = curvature(net, pieces_of(eval_fn), [unit])
        got = at.rises(net, unit, [Half(), Sparse(50), Half()])
        assert changes(before, fingerprint(net)) == []
        w = net[4].weight.detach()
        close(got[0], (-at.slopes[net[4].weight]*w/2 + at.fishers[net[4].weight]*w*w/8).sum().item(), 1e-5)
        assert got[0] == got[2] != got[1]


def test_channels_close_like_the_weights_that_read_them():
    """The slope of a gate is that of the loss as the channel fades."""
    net, eval_fn = net_of().eval(), evaluation((x, y), hit, each)
    group = next(g for g in Pruned.find_units(net, find_units(net)[0], x[:1]) if not g.reason)
    at = curvature(net, pieces_of(eval_fn), [], [group], size=1)
    with leave_no_trace(net), torch.no_grad():
        losses = []
        for fade in (1.001, .999):
            net[4].weight[:, 2] *= fade
            losses.append(each(net(x), y).double().mean().item())
            net[4].weight[:, 2] /= fade
    assert at.gates[group.name][0][2].item() == pytest.approx((losses[0] - losses[1])/2e-3, abs=1e-3)
    p = Pruned(50)
    gone = [c for granule in p.goes(group) for c in granule]
    slope, fisher = at.gates[group.name]
    assert at.rises(net, group, [p])[0] == pytest.approx((fisher/2 - slope)[gone].sum().item(), abs=1e-6)
