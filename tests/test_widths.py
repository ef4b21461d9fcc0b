"""What channels cost, computed: the numbers of networks that are really cut, whatever their layers are."""
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models
from toys import SHORT

from fasterai_sens import Applier, LayerTargets, Plan, changes, compress_to_size, count_flops_params, fingerprint, n_bytes
from fasterai_sens.core.plans import BitPlan
from fasterai_sens.methods.proof import channel_groups
from fasterai_sens.methods.widths import find_widths
from fasterai_sens.plans.sizes import find_steps

costs = ("params", "flops", "bytes")


def compressor_of(model, x):
    """A applier of a model in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Applier(model.eval(), x)


def check_random_plans(applier, n=3):
    """Random levels for channels, alone and with zeros and bits everywhere: what is computed is what is counted."""
    assert applier.groups and applier.widths(costs), "nothing is computed"
    for seed in range(n):
        rng = np.random.default_rng(seed)
        pruning = LayerTargets({g: float(rng.choice([0, 10, 30, 50, 70, 90])) for g in applier.groups})
        sparsity, bits = (kind({u: number(rng.choice(of)) for u in applier.units}) for kind, number, of in ((LayerTargets, float, [0, 50, 90]), (BitPlan, int, [2, 3, 4, 8])))
        for plan in (Plan(pruning=pruning), Plan(pruning=pruning, sparsity=sparsity, quantization=bits)):
            computed, counted = applier.costs(plan, costs), applier.costs(plan, costs, really=True)
            assert computed == pytest.approx(counted, rel=1e-9), plan


families = {**{name: make for name, make in SHORT.items() if name != "vit"}, "squeezenet": models.squeezenet1_1, "mobilenet_v3": models.mobilenet_v3_small}


quick = ("resnet18", "mobilenet_v3")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow]*(name not in quick)) for name in families])
def test_computed_is_counted_on_families(name):
    """Residual, depthwise, grouped, joined, squeezed and scaled layers."""
    torch.manual_seed(0)
    size = 64 if name == "squeezenet" else 32
    check_random_plans(compressor_of(families[name](num_classes=10), torch.randn(1, 3, size, size)), 2)


def test_flattened_positions():
    """As in VGG: each channel is read at every position by the linear layer behind it."""
    torch.manual_seed(0)
    model = models.VGG(models.vgg.make_layers([8, "M", 16, 16, "M"], batch_norm=True), num_classes=10)
    model.classifier = nn.Sequential(nn.Linear(16*49, 20), nn.ReLU(), nn.Linear(20, 10))
    check_random_plans(compressor_of(model, torch.randn(2, 3, 16, 16)))


def test_attention():
    """As in ViT: an embedding all blocks share, with class token and positions that are bare parameters."""
    torch.manual_seed(0)
    check_random_plans(compressor_of(models.VisionTransformer(16, 4, 2, 4, 32, 48, num_classes=10), torch.randn(2, 3, 16, 16)))


class Twice(nn.Module):
    """A layer that is called twice at different sizes, one whose weight another shares, and a transposed one in groups."""

    def __init__(self):
        super().__init__()
        self.a, self.again, self.c, self.tied, self.act = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 8, 1), nn.Conv2d(12, 8, 1), nn.PReLU(8)
        self.up, self.norm, self.head = nn.ConvTranspose2d(8, 6, 2, 2), nn.GroupNorm(3, 6), nn.Conv2d(6, 4, 1)
        self.tied.weight = self.c.weight

    def forward(self, x):
        x = self.again(self.a(x)).relu()
        x = self.again(nn.functional.max_pool2d(x, 2)).relu()
        return self.head(self.norm(self.up(self.act(self.c(x) + self.tied(x)))))


@pytest.mark.parametrize("model", [
    Twice(), nn.Sequential(nn.Conv1d(4, 12, 3), nn.BatchNorm1d(12), nn.ReLU(), nn.ConvTranspose1d(12, 12, 3, groups=12), nn.ConvTranspose1d(12, 8, 3), nn.Conv1d(8, 3, 1)),
    nn.Sequential(nn.Linear(9, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 12, bias=False), nn.ReLU(), nn.Linear(12, 4)).double()], ids=["shared", "transposed", "linear"])
def test_other_layers(model):
    """Tensors that are shared count once, modules that are called twice cost twice, grouped and depthwise ones shrink in their own way."""
    torch.manual_seed(0)
    x = {Twice: lambda: torch.randn(2, 3, 8, 8), nn.Sequential: lambda: torch.randn(2, 4, 9) if isinstance(model[0], nn.Conv1d) else torch.randn(2, 5, 9).double()}[type(model)]()
    check_random_plans(compressor_of(model, x))


class AlongChannels(nn.Module):
    """A convolution along the channels (ECA): their number is the number of its positions."""

    def __init__(self):
        super().__init__()
        self.a, self.along, self.b = nn.Conv2d(3, 16, 3), nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.a(x)
        return self.b(x*self.along(x.mean((2, 3)).unsqueeze(1)).transpose(1, 2).unsqueeze(3).sigmoid())


def cut_by_hand(applier, plan, x):
    """Costs of the network that is really cut, with the counters that users have."""
    with applier(plan):
        return dict(params=sum(p.numel() for p in applier.model.parameters()), flops=count_flops_params(applier.model, x, verbose=False)[0], bytes=n_bytes(applier.model))


def test_what_cannot_be_computed_is_counted():
    """A rule of widths that is wrong is found out by one trial, or in the end, and costs are those of the cut network either way."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.randn(1, 3, 8, 8)
    applier, plan = compressor_of(model, x), Plan(pruning={"0": 50, "2": 25})
    before, real = fingerprint(model), cut_by_hand(applier, plan, x)
    assert applier.costs(plan, costs) == real and applier.holds(plan, costs)
    widths, _ = applier.actor("pruning").computer
    widths.each["flops"] *= 1.01   # as if the rule were wrong
    assert "flops" not in widths.agreed(list(applier.groups.values()), x)
    assert applier.costs(plan, costs) != real and not applier.holds(plan, costs)
    assert applier.costs(plan, costs) == real and applier.widths(("params",)) is None
    assert changes(before, fingerprint(model)) == []


def test_positions_that_are_channels():
    """Where the number of positions depends on channels, multiply-accumulates are counted, and all costs are true."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    groups = [g for g in channel_groups(AlongChannels().eval(), x) if not g.reason]
    applier = compressor_of(AlongChannels(), x)
    for pct in (0, 25, 75):
        plan = Plan(pruning=dict.fromkeys(applier.groups, pct))
        assert applier.costs(plan, costs) == cut_by_hand(applier, plan, x)
    if groups: assert find_widths(groups[0].graph.model, x, groups)[1] >= {"params", "bytes"}


@pytest.mark.parametrize("cost", costs)
def test_sizes_are_those_of_the_smaller_model(cost):
    """`compress_to_size` computes its tries, and its result is as large as it says."""
    torch.manual_seed(0)
    model, x = SHORT["resnet18"](num_classes=10).eval(), torch.randn(1, 3, 32, 32)
    small = compress_to_size(model, x, 40, cost=cost)
    real = dict(params=sum(p.numel() for p in small.model.parameters()), flops=count_flops_params(small.model, x, verbose=False)[0], bytes=n_bytes(small.model))
    assert small.size == real[cost] <= .4*small.dense_size
    steps = find_steps(model, x, "pruning")
    counted = steps.applier.costs(Plan(pruning=small.plan), (cost,), really=True)[cost]
    widths, right = steps.channels.computer
    assert steps.size(small.plan, cost) == counted == small.size and cost in right
    widths.each[cost] = widths.each[cost]*1.01
    assert not steps.holds(small.plan, cost) and steps.size(small.plan, cost) == small.size
