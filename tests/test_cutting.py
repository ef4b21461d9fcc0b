"""`cut_by_masks` takes out what masks drop, and the network computes what the masked one does."""

import copy
import warnings

import pytest
import torch
import torchvision.models as tv
from torch import nn
from toys import SHORT, Net, lively

from fasterai_sens import Sparsifier, cut_by_masks, fix_mask_conflict
from fasterai_sens.core.fingerprint import changes, fingerprint

bn_types = nn.modules.batchnorm._BatchNorm


def random_masks(model, share=0.6, norms=True):
    """Whole filters of every layer at random, with their biases; norms directly behind a convolution have its mask"""
    masks, last = {}, None
    for n, m in model.named_modules():
        if isinstance(m, nn.Conv2d | nn.Linear):
            last = torch.rand(len(m.weight)) < share
            masks[n] = {"weight": last.view(-1, *[1] * (m.weight.dim() - 1)).expand_as(m.weight).float()}
        elif norms and isinstance(m, bn_types) and last is not None and len(last) == m.num_features:
            masks[n] = {"weight": last.float()}
        else:
            continue
        if m.bias is not None:
            masks[n]["bias"] = last.float()
    return masks


def masked(model, masks):
    """A copy of the model, multiplied by the masks"""
    other = copy.deepcopy(model)
    for n, mask in masks.items():
        module, parts = other.get_submodule(n), mask if isinstance(mask, dict) else {"weight": mask}
        for attr, t in parts.items():
            getattr(module, attr).data *= t
    return other


@torch.no_grad()
def outputs(model, x):
    """What the model says, in evaluation mode"""
    return model.eval()(x)


NETS = {
    **{name: (SHORT[name], 32) for name in ("resnet18", "mobilenet_v2", "densenet", "resnext")},
    "squeezenet": (tv.squeezenet1_1, 64),
}


@pytest.mark.parametrize("seed,name", [pytest.param(i, n, marks=[pytest.mark.slow]*(i > 1)) for i, n in enumerate(NETS)])
def test_the_cut_network_is_the_masked_one(name, seed):
    """Filters of all layers and their norms at random, made to agree, and as they come, so that coupled layers disagree"""
    build, size = NETS[name]
    torch.manual_seed(seed)
    model, x = lively(build(num_classes=5)), torch.randn(2, 3, size, size)
    norms = name != "densenet"  # there, a norm reads many layers
    if not norms:
        for m in model.modules():
            if isinstance(m, bn_types):
                m.bias.data.zero_()
                m.running_mean.zero_()
    masks = random_masks(model, norms=norms)
    fixed = fix_mask_conflict(masks, model, x)
    for given in (fixed, masks):
        small, copied = copy.deepcopy(model), copy.deepcopy(given)
        told = outputs(masked(model, given), x)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert cut_by_masks(small, given, x) is small
        torch.testing.assert_close(outputs(small, x), told, rtol=1e-3, atol=1e-4 * float(told.abs().max()))
        assert (told - outputs(model, x)).norm() > 1e-3 * told.norm()
        assert sum(p.numel() for p in small.parameters()) < 0.9 * sum(p.numel() for p in model.parameters())
        assert not any("from those of the masked model" in str(w.message) for w in said)
        assert any("are zero and stay" in str(w.message) for w in said) == (given is masks)
        assert all(torch.equal(a["weight"], b["weight"]) for a, b in zip(given.values(), copied.values(), strict=True))


def two_layers():
    """A small network, and masks that keep 3 of 6 and 2 of 5 filters"""
    torch.manual_seed(0)
    net = lively(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, 1)))
    keep = {"0": [1, 0, 1, 0, 0, 1], "3": [0, 1, 0, 1, 0]}
    masks = {n: torch.tensor(k).view(-1, 1, 1, 1).expand_as(net.get_submodule(n).weight).float() for n, k in keep.items()}
    return net, torch.randn(2, 3, 4, 4), masks


@pytest.mark.parametrize("form", ["tensors", "bool", "dicts", "file"])
def test_every_form_of_masks(form, tmp_path):
    """A channel goes with its bias and its norm, whether or not the masks say so"""
    net, x, masks = two_layers()
    readers = copy.deepcopy(net)
    readers[3].weight.data[:, [1, 3, 4]] = 0
    readers[5].weight.data[:, [0, 2, 4]] = 0
    given = {"tensors": masks, "bool": {n: m.bool() for n, m in masks.items()}, "dicts": {n: {"weight": m, "bias": None} for n, m in masks.items()}}.get(form)
    if form == "file":
        torch.save(masks, given := tmp_path / "masks.pt")
    with pytest.warns(UserWarning, match="from those of the masked model: norms over channels"):
        cut_by_masks(net, given, x)
    assert (net[0].out_channels, net[1].num_features, net[3].in_channels, net[3].out_channels, net[5].in_channels) == (3, 3, 3, 2, 2)
    torch.testing.assert_close(outputs(net, x), outputs(readers, x))


def test_zeros_inside_filters_stay_zeros():
    """What is dropped of a filter that stays is zero, and so are filters that cannot go"""
    net, x, masks = two_layers()
    masks["3"] = torch.ones_like(net[3].weight)
    masks["3"][1, :3] = 0
    masks["5"] = torch.ones_like(net[5].weight)
    masks["5"][0] = 0
    told = masked(net, {n: masks[n] for n in ("3", "5")})
    with pytest.warns(UserWarning, match=r"are zero and stay: 5 \(1\); fix_mask_conflict brings them back"):
        cut_by_masks(net, {n: masks[n] for n in ("3", "5")}, x)
    torch.testing.assert_close(outputs(net, x), outputs(told, x))
    assert not net[3].weight[1, :3].any() and not net[5].weight[0].any() and net[5].out_channels == 2


def test_masks_of_a_sparsifier():
    """Its filters, cut for good"""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).eval(), torch.randn(2, 3, 6, 6)
    sparsifier = Sparsifier(net, granularity="filter")
    sparsifier.sparsify_model({"0": 50, "2": 50})
    for n in ("0", "2"):
        gone = ~sparsifier.masks[n].flatten(1).any(1)
        net.get_submodule(n).bias.data[gone] = 0
    told = outputs(net, x)
    cut_by_masks(net, sparsifier.masks, x)
    torch.testing.assert_close(outputs(net, x), told)
    assert (net[0].out_channels, net[2].out_channels, net[5].in_features) == (4, 3, 12)


def test_dropped_inputs():
    """A channel that nobody reads any more, and exactly the masked model"""
    net, x, _ = two_layers()
    mask = torch.ones_like(net[3].weight)
    mask[:, [0, 4]] = 0
    told = outputs(masked(net, {"3": mask}), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_by_masks(net, {"3": mask}, x)
    assert (net[0].out_channels, net[1].num_features, net[3].in_channels) == (4, 4, 4)
    torch.testing.assert_close(outputs(net, x), told)


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, 1e-2), lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)])
def test_training_goes_on(make):
    """The optimizer keeps what is left of its state, in training mode too; modes and flags stay"""
    net, x, masks = two_layers()
    net.train()
    net[5].bias.requires_grad_(False)
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    net(x).square().mean().backward()
    optimizer.step()
    state = {k: v.clone() for k, v in optimizer.state[net[3].weight].items() if isinstance(v, torch.Tensor) and v.dim()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut_by_masks(net, masks, x, optimizer=optimizer)
    for k, v in state.items():
        assert torch.equal(optimizer.state[net[3].weight][k], v[[1, 3]][:, [0, 2, 5]])
    assert net.training and not net[5].bias.requires_grad and net[3].weight.requires_grad
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in net.parameters() if p.requires_grad}
    before = net[0].weight.detach().clone()
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(net[0].weight, before)


def grouped_and_different():
    """Inputs of a grouped convolution, others in each of its groups"""
    torch.manual_seed(0)
    net = lively(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1)))
    keep = {"0": [1, 0, 1, 1, 0, 1, 1, 1], "2": [1, 1, 0, 1, 1, 1, 1, 0]}
    masks = {n: {"weight": torch.tensor(k).view(-1, 1, 1, 1).expand_as(net.get_submodule(n).weight).float(), "bias": torch.tensor(k).float()} for n, k in keep.items()}
    return net, torch.randn(2, 3, 4, 4), masks


def test_groups_lose_different_channels():
    """Also where an optimizer's state has to follow"""
    net, x, masks = grouped_and_different()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    net(x).square().mean().backward()
    optimizer.step()
    told, state, weight = outputs(masked(net, masks), x), optimizer.state[net[2].weight]["exp_avg"].clone(), net[2].weight.detach().clone()
    cut_by_masks(net, masks, x, optimizer=optimizer)
    torch.testing.assert_close(outputs(net, x), told)
    assert tuple(net[2].weight.shape) == (6, 3, 3, 3)
    for old, new in ((weight, net[2].weight), (state, optimizer.state[net[2].weight]["exp_avg"])):
        assert torch.equal(new, torch.cat([old[[0, 1, 3]][:, [0, 2, 3]], old[[4, 5, 6]][:, [1, 2, 3]]]))


REFUSED = {
    "unknown layer": (KeyError, "unknown layer '7'", lambda masks: masks | {"7": torch.ones(2)}),
    "wrong shape": (ValueError, "the mask of '3' has shape", lambda masks: masks | {"3": torch.ones(5, 6)}),
    "no mask": (TypeError, "the mask of '3' is a tensor", lambda masks: masks | {"3": 0.5}),
    "no weight": (ValueError, "has no 'weight'", lambda masks: masks | {"3": {"bias": torch.ones(5)}}),
    "norm": (ValueError, "the mask of '1' has shape", lambda masks: masks | {"1": torch.ones(5)}),
    "no dict": (TypeError, "masks is a dict", lambda masks: list(masks.items())),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_leave_the_model(what):
    """Bit for bit"""
    net, x, masks = two_layers()
    error, message, spoil = REFUSED[what]
    before = fingerprint(net)
    with pytest.raises(error, match=message):
        cut_by_masks(net, spoil(masks), x)
    assert changes(before, fingerprint(net)) == []


def test_an_optimizer_that_cannot_follow_is_refused():
    """Before anything happens"""
    net, x, masks = two_layers()
    before = fingerprint(net)
    with pytest.raises(ValueError):
        cut_by_masks(net, masks, x, optimizer=torch.optim.LBFGS(net.parameters()))
    assert changes(before, fingerprint(net)) == []


def test_no_masks_no_cut():
    """Nor if all is kept, and a layer of which everything is dropped keeps its largest filter"""
    net, x, masks = two_layers()
    before = fingerprint(net)
    cut_by_masks(net, {}, x)
    cut_by_masks(net, {n: torch.ones_like(m) for n, m in masks.items()}, x)
    assert changes(before, fingerprint(net)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut_by_masks(net, {"0": torch.zeros_like(masks["0"])}, x)
    assert net[0].out_channels == 1 and not net[0].weight.any()


def test_a_residual_pair_that_disagrees():
    """What one keeps, stays; the other one is zero there: the masked model to the last digit or so"""
    torch.manual_seed(0)
    net = Net(lambda m, x: m.head(m.a(x) + m.b(x)), a=nn.Linear(3, 6), b=nn.Linear(3, 6), head=nn.Linear(6, 2))
    a, b = torch.tensor([1.0, 0, 0, 1, 0, 1]), torch.tensor([1.0, 1, 0, 0, 0, 1])
    masks = {n: {"weight": k[:, None].expand(6, 3).clone(), "bias": k} for n, k in (("a", a), ("b", b))}
    x = torch.randn(4, 3)
    told = outputs(masked(net, masks), x)
    with pytest.warns(UserWarning, match=r"a \(1\), b \(1\)"):
        cut_by_masks(net, masks, x)
    assert net.a.out_features == net.b.out_features == net.head.in_features == 4
    torch.testing.assert_close(outputs(net, x), told)
