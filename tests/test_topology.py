"""What the topology tools say is what holds: sets written down by hand, removal against muted readers, masks that can be cut."""

import copy
import csv
import math
import random
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
import torchvision.models as tv
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from toys import Net, lively
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from fasterai_sens import ChannelDependency, Pruner, analyze_sensitivity, cut_by_masks, fix_mask_conflict, not_safe_to_prune
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.inputs import call, tensors_in
from fasterai_sens.core.layers import all_units, filters_first
from fasterai_sens.core.state import leave_no_trace
from fasterai_sens.methods.channels import Graph, n_outputs
from fasterai_sens.methods.proof import channel_groups
from fasterai_sens.topology.masks import channel_of

Conv, Linear = nn.Conv2d, nn.Linear
bn_types = nn.modules.batchnorm._BatchNorm


def image(size=64, n=1):
    """A batch of noise"""
    return torch.randn(n, 3, size, size)


def compressible(model):
    """Names of the layers that each have to stand in one set"""
    return [n for n, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd | nn.Linear)]


# ---- dependency sets, written down from the architectures


def resnet_sets(depths, last):
    """The stem and the first stage share the residual stream; every other stage starts with a downsampling of its own"""
    sets = []
    for stage, depth in enumerate(depths, 1):
        names = {f"layer{stage}.{i}.{last}" for i in range(depth)}
        first = {"conv1"} if stage == 1 and last == "conv2" else {f"layer{stage}.0.downsample.0"}
        sets.append(names | first)
    return sets


def mobilenet_sets():
    """Each depthwise convolution with the one before it, and the projections that residual connections add up"""
    pairs = [{"features.0.0", "features.1.conv.0.0"}] + [{f"features.{i}.conv.0.0", f"features.{i}.conv.1.0"} for i in range(2, 18)]
    stages = [(2, 3), (4, 5, 6), (7, 8, 9, 10), (11, 12, 13), (14, 15, 16)]
    return pairs + [{f"features.{i}.conv.2" for i in stage} for stage in stages]


SETS = {
    "resnet18": resnet_sets((2, 2, 2, 2), "conv2"),
    "resnet26": resnet_sets((2, 2, 3, 2), "conv3"),
    "mobilenet_v2": mobilenet_sets(),
    "alexnet": [],
    "squeezenet1_1": [],
    "googlenet": [],
    "densenet": [],
}
# the blocks of larger members, fewer of them
SHORT = dict(
    resnet26=partial(tv.ResNet, tv.resnet.Bottleneck, [2, 2, 3, 2]),
    densenet=partial(tv.DenseNet, 16, (3, 3, 3, 3), 32),
    googlenet=partial(tv.googlenet, aux_logits=False, init_weights=False),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow]*(n != "resnet18")) for n in SETS])
def test_dependency_sets(name, tmp_path):
    """Coupled layers as the architecture couples them, every layer in one set, and the file says the same"""
    torch.manual_seed(0)
    model = (SHORT.get(name) or getattr(tv, name))(num_classes=5)
    sets = (dependency := ChannelDependency(model, image(64 if name == "alexnet" else 32))).dependency_sets
    by_first = sorted(s for s in map(sorted, sets) if len(s) > 1)
    assert by_first == sorted(map(sorted, SETS[name]))
    assert sorted(n for s in sets for n in s) == sorted(compressible(model))
    assert all(isinstance(s, set) for s in sets)
    path = tmp_path / "sets.csv"
    dependency.export(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "Dependency Set,Layers" and lines[1].startswith("Set 1,")
    with path.open(newline="", encoding="utf-8") as f:
        header, *rows = csv.reader(f)
    assert header == ["Dependency Set", "Layers"]
    assert [r[0] for r in rows] == [f"Set {i}" for i in range(1, len(sets) + 1)]
    assert [set(r[1:]) for r in rows] == sets


def test_export_takes_a_string_and_odd_names(tmp_path):
    """A comma or a quote in a name survives"""
    model = nn.Sequential()
    model.add_module('a,"b"', Linear(3, 4))
    model.add_module("c", Linear(4, 2))
    dependency = ChannelDependency(model, torch.randn(2, 3))
    dependency.export(str(tmp_path / "sets.csv"))
    with (tmp_path / "sets.csv").open(newline="", encoding="utf-8") as f:
        assert [r[1:] for r in list(csv.reader(f))[1:]] == [['a,"b"'], ["c"]]


# ---- what is not safe


def unsafe_of(model, sample):
    """The answer, with what every answer has to fulfil"""
    before = fingerprint(model)
    unsafe = not_safe_to_prune(model, sample)
    assert changes(before, fingerprint(model)) == []
    assert isinstance(unsafe, list) and all(isinstance(n, str) for n in unsafe)
    assert set(unsafe.reasons) == set(unsafe) and len(set(unsafe)) == len(unsafe)
    for n, why in unsafe.reasons.items():
        assert len(why) > 30 and ("give it no target" in why or "passes it by" in why or "all of them" in why), f"{n}: {why}"
    return unsafe


def test_only_the_output_of_a_resnet_is_unsafe():
    """Nothing else stands in the way, in training mode and with frozen weights too"""
    torch.manual_seed(0)
    model = tv.resnet18(num_classes=5).train().requires_grad_(False)
    unsafe = unsafe_of(model, image(32, 2))
    assert unsafe == ["fc"]
    assert "output of the model" in unsafe.reasons["fc"]


def test_residual_stream_of_a_vit_is_unsafe():
    """torchvision writes the width into a reshape; the reason quotes it. The hidden layers of the MLPs can shrink"""
    torch.manual_seed(0)
    unsafe = unsafe_of(model := tv.VisionTransformer(32, 16, 12, 4, 64, 128, num_classes=3), image(32))
    hidden = {f"encoder.layers.encoder_layer_{i}.mlp.0" for i in range(12)}
    assert not hidden & set(unsafe)
    stream = {"conv_proj", "encoder.layers.encoder_layer_0.mlp.3", "encoder.layers.encoder_layer_11.self_attention.out_proj"}
    assert stream <= set(unsafe) and "heads.head" in unsafe
    assert all("reshape(n, self.hidden_dim" in unsafe.reasons[n] for n in stream)
    assert hidden | set(unsafe) >= {n for n in compressible(model)}


def test_swin_ends():
    """The search for coupled layers would not end on its own"""
    torch.manual_seed(0)
    model = tv.SwinTransformer([4, 4], 24, [2, 2, 6, 2], [1, 2, 4, 8], [7, 7], num_classes=3)   # swin_t, narrower
    unsafe = unsafe_of(model, image())
    hidden = {n for n in compressible(model) if n.endswith("mlp.0")}
    assert len(hidden) == 12 and not hidden & set(unsafe)
    assert "head" in unsafe


def test_what_cannot_be_traced_says_so():
    """An error that names the tool it broke in, and leaves nothing behind"""
    torch.manual_seed(0)
    model, x = tv.shufflenet_v2_x0_5(num_classes=3), image()
    before = fingerprint(model)
    with pytest.raises(ValueError, match="ShuffleNetV2"):
        not_safe_to_prune(model, x)
    assert changes(before, fingerprint(model)) == []


# ---- the proof: a zoo in which every answer is known


@dataclass
class Case:
    """One animal. `safe`: first layer of a group -> its readers, each with a function from a channel to the columns it is read at"""

    model: nn.Module
    sample: object
    safe: dict = field(default_factory=dict)  # None instead of readers: a norm mixes the channels, so only shapes can agree
    refused: dict = field(default_factory=dict)  # layer -> word of the reason
    source: tuple = ()  # groups whose channels are zero already where they come from, not only where they are read


def same(c):
    """A channel is read at its own number"""
    return [c]


ZOO = {}


def case(build):
    """Enter a builder into the zoo"""
    ZOO[build.__name__] = build
    return build


def fresh(name):
    """One animal, with statistics and scales that are not 0 and 1"""
    torch.manual_seed(0)
    found = ZOO[name]()
    for m in found.model.modules():
        if isinstance(m, bn_types):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
        if isinstance(m, bn_types | nn.GroupNorm | nn.LayerNorm | nn.InstanceNorm2d) and m.weight is not None:
            m.weight.data.uniform_(0.5, 1.5)
            m.bias.data.uniform_(-0.5, 0.5)
        if isinstance(m, nn.PReLU):
            m.weight.data.uniform_(0.1, 0.6)
    return found


def noise(*shape):
    """Sample input"""
    return torch.randn(*shape)


def chain(between, width, read=None, sample=None, **more):
    """`a`, something done to its channels, `b`, relu, `head`"""
    layers = dict(a=Conv(3, width, 1), b=Conv(read or width, 7, 1), head=Conv(7, 2, 1), **more)
    return Net(lambda m, x: m.head(m.b(between(m, m.a(x))).relu()), **layers), noise(2, 3, 4, 4) if sample is None else sample


def chained(between, width, read=None, safe=None, why=None, **more):
    """The case of such a chain: `b` is safe in any case; `a` is if `safe` says how `b` reads it"""
    net, x = chain(between, width, read, **more)
    return Case(net, x, {"b": {"head": same}} | ({"a": {"b": safe}} if safe else {}), {"a": why} if why else {})


@case
def residual():
    """Two layers are added"""
    net = Net(lambda m, x: (lambda h: m.head(h + m.c(m.b(h).relu())))(m.a(x)), a=Conv(3, 8, 1), b=Conv(8, 6, 1), c=Conv(6, 8, 1), head=Conv(8, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"b": same, "head": same}, "b": {"c": same}})


@case
def concat():
    """The later layer stands first"""
    net = Net(lambda m, x: m.head(torch.cat([m.b(x), m.a(x)], 1).relu()), a=Conv(3, 5, 1), b=Conv(3, 6, 1), head=Conv(11, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [6 + c]}, "b": {"head": same}})


@case
def concat_then_add():
    """Channels of a group are those of two others; its granules are numbered from the layer that has them all"""
    net = Net(lambda m, x: m.head(torch.cat([m.a(x), m.b(x)], 1) + m.c(x)), a=Conv(3, 4, 1), b=Conv(3, 6, 1), c=Conv(3, 10, 1), head=Conv(10, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": same}})


@case
def concat_with_a_reader_inside():
    """One of four layers under the sum is read alone too: only its two channels reach that reader"""

    def forward(m, x):
        q = m.q(x)
        return m.head(torch.cat([m.p(x), q, m.r(x)], 1) + m.c(x)) + m.f(q)

    net = Net(forward, p=Conv(3, 2, 1), q=Conv(3, 2, 1), r=Conv(3, 4, 1), c=Conv(3, 8, 1), head=Conv(8, 2, 1), f=Conv(2, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"p": {"head": same, "f": lambda c: [c - 2] if c in (2, 3) else []}})


@case
def concat_with_itself():
    """Every channel is read twice"""
    net = Net(lambda m, x: (lambda h: m.head(torch.cat([h, h], 1)))(m.a(x)), a=Conv(3, 8, 1), head=Conv(16, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [c, 8 + c]}})


@case
def concat_with_the_input():
    """The graph does not see that the input comes first, so its numbers are wrong though the shapes fit"""
    net = Net(lambda m, x: m.head(torch.cat([x, m.a(x)], 1)), a=Conv(3, 9, 1), head=Conv(12, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {}, {"a": "Cat"})


@case
def stacked_behind():
    """Channels of two layers alternate"""
    net = Net(lambda m, x: m.head(torch.stack([m.a(x), m.b(x)], 2).flatten(1, 2)), a=Conv(3, 6, 1), b=Conv(3, 6, 1), head=Conv(12, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [2 * c, 2 * c + 1]}})


@case
def stacked_before():
    """The graph takes this for the other one"""
    net = Net(lambda m, x: m.head(torch.stack([m.a(x), m.b(x)], 1).flatten(1, 2)), a=Conv(3, 6, 1), b=Conv(3, 6, 1), head=Conv(12, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {}, {"a": "Stack"})


@case
def glu():
    """A value goes with its gate, so channels go in pairs"""
    net = Net(lambda m, x: (lambda v, g: m.head(v * g.sigmoid()))(*m.a(x).chunk(2, 1)), a=Conv(3, 12, 1), head=Conv(6, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [c % 6]}})


@case
def interleaved_gate():
    """The same with neighbours"""
    net = Net(lambda m, x: (lambda h: m.head(h[:, ::2] * h[:, 1::2].sigmoid()))(m.a(x)), a=Conv(3, 12, 1), head=Conv(6, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [c // 2]}})


@case
def halves_with_a_reader_each():
    """No gate ties the halves, yet they are found by dividing what is left: pairs could go, single channels cannot"""
    net = Net(lambda m, x: (lambda v, w: m.head(m.f(v) + m.g(w)))(*m.a(x).chunk(2, 1)), a=Conv(3, 12, 1), f=Conv(6, 4, 1), g=Conv(6, 4, 1), head=Conv(4, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"f": {"head": same}}, {"a": ""})


@case
def half_read():
    """Only the first half is read, where the half is counted from what is left"""
    net = Net(lambda m, x: (lambda h: m.b(h[:, : h.shape[1] // 2]))(m.a(x)), a=Conv(3, 12, 1), b=Conv(6, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {}, {"a": ""})


@case
def channel_shuffle():
    """Two grouped convolutions with a shuffle between"""
    layers = dict(a=Conv(4, 8, 1, groups=2), b=Conv(8, 6, 1, groups=2), head=Conv(6, 2, 1))
    return Case(Net(lambda m, x: m.head(m.b(F.channel_shuffle(m.a(x), 2)).relu()), **layers), noise(2, 4, 4, 4), {"b": {"head": same}}, {"a": "Shuffle"})


@case
def shuffle_by_view():
    """The same, written with views"""
    layers = dict(a=Conv(4, 12, 1, groups=2), b=Conv(12, 6, 1, groups=2), head=Conv(6, 2, 1))
    net = Net(lambda m, x: m.head(m.b(m.a(x).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)).relu()), **layers)
    return Case(net, noise(2, 4, 4, 4), {"b": {"head": same}}, {"a": "moved or mixed"})


def flip_case(width):
    """Channels in the other order"""
    return chained(lambda m, h: h.flip(1), width, why="Flip")


# widths at which regular choices of channels are their own mirror image
for width in (8, 9, 12, 15, 16, 48):
    ZOO[f"flip_{width}"] = lambda w=width: flip_case(w)


@case
def added_to_its_flip():
    """Shapes fit, and the sum pairs a channel with another one's number"""
    net = Net(lambda m, x: m.head(m.a(x) + m.b(x).flip(1)), a=Linear(4, 12), b=Linear(4, 12), head=Linear(12, 2))
    return Case(net, noise(5, 4), {}, {"a": "Flip"})


@case
def concat_with_its_flip():
    """Each channel is read at two places, and the graph is wrong about one"""
    net = Net(lambda m, x: (lambda h: m.head(torch.cat([h, h.flip(1)], 1)))(m.a(x)), a=Conv(3, 9, 1), head=Conv(18, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {}, {"a": "Flip"})


@case
def read_twice_once_flipped():
    """One reader, two orders"""
    layers = dict(a=Linear(4, 9), b=Linear(9, 6), head=Linear(6, 2))
    net = Net(lambda m, x: (lambda h: m.head(m.b(h).relu() + m.b(h.flip(1)).relu()))(m.a(x)), **layers)
    return Case(net, noise(5, 4), {"b": {"head": same}}, {"a": "Flip"})


@case
def roll():
    """Channels one further"""
    return chained(lambda m, h: h.roll(1, 1), 8, why="Roll")


@case
def sort():
    """Channels by size"""
    return chained(lambda m, h: h.sort(1).values, 9, why="Sort")


@case
def flip_behind_group_norm():
    """A norm hides nothing: the readers still get the wrong channels"""
    return chained(lambda m, h: m.norm(h).flip(1), 8, why="", norm=nn.GroupNorm(2, 8))


@case
def shuffle_behind_group_norm():
    """As in a ShuffleNet with group norm"""
    return chained(lambda m, h: F.channel_shuffle(m.norm(h), 2), 8, why="", norm=nn.GroupNorm(2, 8))


@case
def flip_behind_layer_norm():
    """The same for layer norm"""
    layers = dict(a=Linear(4, 8), norm=nn.LayerNorm(8), b=Linear(8, 6), head=Linear(6, 2))
    return Case(Net(lambda m, x: m.head(m.b(m.norm(m.a(x)).flip(-1)).relu()), **layers), noise(5, 4), {"b": {"head": same}}, {"a": ""})


@case
def flip_on_a_faint_branch():
    """A branch with layer scale, as ConvNeXt and CaiT start it"""
    layers = dict(stem=Conv(3, 8, 1), b=Conv(8, 8, 1), c=Conv(8, 8, 1), head=Conv(8, 2, 1))
    net = Net(lambda m, x: (lambda h: m.head(h + 1e-6 * m.c(m.b(h).relu().flip(1))))(m.stem(x)), **layers)
    return Case(net, noise(2, 3, 4, 4), {"stem": {"b": same, "head": same}}, {"b": "Flip"})


@case
def flip_on_a_branch_that_starts_at_zero():
    """A layer initialised with zeros says nothing yet about what it reads"""
    layers = dict(stem=Conv(3, 8, 1), b=Conv(8, 8, 1), c=Conv(8, 8, 1), head=Conv(8, 2, 1))
    net = Net(lambda m, x: (lambda h: m.head(h + m.c(m.b(h).relu().flip(1))))(m.stem(x)), **layers)
    nn.init.zeros_(net.c.weight)
    nn.init.zeros_(net.c.bias)
    return Case(net, noise(2, 3, 4, 4), {"stem": {"b": same, "head": same}}, {"b": "Flip"})


@case
def flip_seen_on_a_sample_of_zeros():
    """Nothing can be proven on an input that silences everything"""
    net, x = chain(lambda m, h: h.flip(1), 8)
    net.a.bias = net.b.bias = net.head.bias = None
    return Case(net, x * 0, None, {"a": ""})


def masked_logits(value):
    """Logits of which one class is ruled out by a huge number"""
    layers = dict(a=Conv(3, 8, 1), b=Conv(8, 6, 1), head=Linear(6, 3))
    mask = torch.tensor([False, True, False])
    net = Net(lambda m, x: m.head(m.b(m.a(x).flip(1)).relu().mean((2, 3))).masked_fill(mask, value), **layers)
    return Case(net, noise(2, 3, 4, 4), {"b": {"head": same}}, {"a": "Flip"})


for value in (float("-inf"), torch.finfo(torch.float32).min, -1e9):
    ZOO[f"flip_with_logits_at_{value:.0e}"] = lambda v=value: masked_logits(v)


@case
def flip_with_complex_output():
    """A model that returns complex numbers"""
    layers = dict(a=Linear(4, 8), b=Linear(8, 6), head=Linear(6, 4))
    net = Net(lambda m, x: torch.view_as_complex(m.head(m.b(m.a(x).flip(-1)).relu()).unflatten(1, (2, 2))), **layers)
    return Case(net, noise(5, 4), {"b": {"head": same}}, {"a": "Flip"})


@case
def nan_output():
    """Nothing can be proven on numbers that are none"""
    net, x = chain(lambda m, h: h.flip(1) * torch.nan, 8)
    return Case(net, x, None, {"a": ""})


@case
def squeeze_and_excite_flipped():
    """The mistake is only in the gate"""
    layers = dict(a=Conv(3, 8, 1), d=Conv(8, 9, 1), u=Conv(9, 8, 1), head=Conv(8, 2, 1))
    net = Net(lambda m, x: (lambda h: m.head(h * m.u(m.d(h.mean((2, 3), keepdim=True)).relu().flip(1)).sigmoid()))(m.a(x)), **layers)
    return Case(net, noise(2, 3, 4, 4), {"a": {"d": same, "head": same}}, {"d": "Flip"})


@case
def squeeze_and_excite():
    """The gate has the channels that it gates"""
    layers = dict(a=Conv(3, 8, 1), d=Conv(8, 4, 1), u=Conv(4, 8, 1), head=Conv(8, 2, 1))
    net = Net(lambda m, x: (lambda h: m.head(h * m.u(m.d(h.mean((2, 3), keepdim=True)).relu()).sigmoid()))(m.a(x)), **layers)
    return Case(net, noise(2, 3, 4, 4), {"a": {"d": same, "head": same}, "d": {"u": same}})


@case
def channels_last_flatten():
    """Positions first, channels last; the graph thinks the other way round"""
    net = Net(lambda m, x: m.head(m.a(x).permute(0, 2, 3, 1).flatten(1)), a=Conv(3, 4, 1), head=Linear(16, 2))
    return Case(net, noise(2, 3, 2, 2), {}, {"a": "Permute"})


@case
def fixed_sizes():
    """The number of channels stands in the code; the reason quotes the line"""

    def forward(m, x):
        return m.head(m.a(x).permute(0, 2, 3, 1).reshape(-1, 4 * 6))

    return Case(Net(forward, a=Conv(3, 6, 1), head=Linear(24, 2)), noise(2, 3, 2, 2), {}, {"a": "reshape(-1, 4 * 6)"})


@case
def flatten_with_stride():
    """Four inputs of the linear layer for each channel"""
    net = Net(lambda m, x: m.head(m.a(x).relu().flatten(1)), a=Conv(3, 6, 2, stride=2), head=Linear(24, 2))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: range(4 * c, 4 * c + 4)}})


@case
def unflatten():
    """Four outputs of the linear layer make one channel"""
    net = Net(lambda m, x: m.head(m.a(x).relu().unflatten(1, (-1, 2, 2))), a=Linear(3, 24), head=Conv(6, 2, 1))
    return Case(net, noise(2, 3), {"a": {"head": lambda c: [c // 4]}})


@case
def unflatten_channels_last():
    """The same with channels last"""
    net = Net(lambda m, x: m.head(m.a(x).relu().unflatten(1, (2, 2, -1)).permute(0, 3, 1, 2)), a=Linear(3, 24), head=Conv(6, 2, 1))
    return Case(net, noise(2, 3), {}, {"a": "moved or mixed"})


@case
def grouped():
    """A grouped convolution reads, and a grouped convolution is read"""
    layers = dict(a=Conv(3, 8, 1), g=Conv(8, 8, 3, groups=2, padding=1), b=Conv(8, 6, 1), head=Conv(6, 2, 1))
    net = Net(lambda m, x: m.head(m.b(m.g(m.a(x).relu())).relu()), **layers)
    return Case(net, noise(2, 3, 4, 4), {"a": {"g": same}, "g": {"b": same}, "b": {"head": same}})


@case
def depthwise():
    """A depthwise convolution loses what its input loses"""
    return chained(lambda m, h: m.d(h.relu()), 8, safe=same, d=Conv(8, 8, 3, groups=8, padding=1))


@case
def depthwise_multiplier():
    """Two filters for each channel: all three go together"""
    return chained(lambda m, h: m.d(h.relu()), 6, 12, safe=lambda c: [2 * c, 2 * c + 1], d=Conv(6, 12, 3, groups=6, padding=1))


@case
def depthwise_multiplier_on_the_input():
    """The input of the model stays, so one filter of each pair can go, and nothing else"""
    net = Net(lambda m, x: m.head(m.d(x).relu()), d=Conv(4, 8, 3, groups=4), head=Conv(8, 2, 1))
    return Case(net, noise(2, 4, 4, 4), {"d": {"head": same}})


@case
def two_multipliers():
    """Two for one, then three for each of those"""
    layers = dict(a=Conv(3, 4, 1), d=Conv(4, 8, 1, groups=4), e=Conv(8, 24, 1, groups=8), head=Conv(24, 2, 1))
    net = Net(lambda m, x: m.head(m.e(m.d(m.a(x)).relu()).relu()), **layers)
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: range(6 * c, 6 * c + 6)}})


@case
def multiplier_behind_a_concat():
    """Channels of two layers, each with its own filters"""
    layers = dict(a=Conv(3, 4, 1), c=Conv(3, 5, 1), d=Conv(9, 18, 3, padding=1, groups=9), head=Conv(18, 2, 1))
    net = Net(lambda m, x: m.head(m.d(torch.cat([m.a(x), m.c(x)], 1)).relu()), **layers)
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": same}})


@case
def multiplier_beside_its_input():
    """Both are read"""
    net = Net(lambda m, x: (lambda h: m.head(torch.cat([h, m.d(h)], 1).relu()))(m.a(x)), a=Conv(3, 4, 1), d=Conv(4, 8, 3, padding=1, groups=4), head=Conv(12, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [c, 4 + 2 * c, 5 + 2 * c]}})


@case
def multiplier_added_to_another_layer():
    """So that one loses two channels for one of the first"""
    net = Net(lambda m, x: (lambda h: m.head(m.d(h) + m.e(h)))(m.a(x)), a=Conv(3, 4, 1), d=Conv(4, 8, 3, padding=1, groups=4), e=Conv(4, 8, 1), head=Conv(8, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"e": same, "head": lambda c: [2 * c, 2 * c + 1]}})


@case
def multiplier_then_flatten():
    """Four inputs of the linear layer for each of two filters of a channel"""
    net = nn.Sequential(Conv(3, 6, 1), nn.ReLU(), Conv(6, 12, 3, groups=6), nn.Flatten(), Linear(48, 2))
    return Case(net, noise(2, 3, 4, 4), {"0": {"4": lambda c: range(8 * c, 8 * c + 8)}})


@case
def multiplier_called_twice():
    """One module, two inputs"""
    net = Net(lambda m, x: m.head(m.d(m.a(x)).relu() + m.d(m.b(x)).relu()), a=Conv(3, 4, 1), b=Conv(3, 4, 1), d=Conv(4, 8, 3, groups=4), head=Conv(8, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"a": {"head": lambda c: [2 * c, 2 * c + 1]}})


@case
def two_inputs_for_one_output():
    """The other way round: each filter reads two channels, which go together"""
    return chained(lambda m, h: m.d(h.relu()), 12, 6, safe=lambda c: [c // 2], d=Conv(12, 6, 3, groups=6, padding=1))


@case
def transposed_multiplier():
    """Whose weight has its inputs first"""
    layers = dict(a=nn.ConvTranspose2d(3, 4, 2), d=nn.ConvTranspose2d(4, 12, 2, groups=4), head=Conv(12, 2, 1))
    return Case(Net(lambda m, x: m.head(m.d(m.a(x)).relu()), **layers), noise(2, 3, 3, 3), {"a": {"head": lambda c: range(3 * c, 3 * c + 3)}})


@case
def transposed():
    """Transposed convolutions keep their outputs on the second axis"""
    layers = dict(a=nn.ConvTranspose2d(3, 6, 2), b=nn.ConvTranspose2d(6, 8, 2, stride=2), head=Conv(8, 2, 1))
    return Case(Net(lambda m, x: m.head(m.b(m.a(x)).relu()), **layers), noise(2, 3, 3, 3), {"a": {"b": same}, "b": {"head": same}})


@case
def transposed_depthwise():
    """One kernel for each channel"""
    layers = dict(a=nn.ConvTranspose2d(3, 8, 2), b=nn.ConvTranspose2d(8, 8, 2, groups=8), head=Conv(8, 2, 1))
    return Case(Net(lambda m, x: m.head(m.b(m.a(x)).relu()), **layers), noise(2, 3, 3, 3), {"a": {"head": same}})


@case
def transposed_grouped():
    """torch-pruning's rule mistakes the axis of the groups; ours does not"""
    layers = dict(a=nn.ConvTranspose2d(3, 8, 2), b=nn.ConvTranspose2d(8, 12, 2, groups=2), head=Conv(12, 2, 1))
    return Case(Net(lambda m, x: m.head(m.b(m.a(x)).relu()), **layers), noise(2, 3, 3, 3), {"a": {"b": same}, "b": {"head": same}})


def sequence(dims):
    """Convolution, batch norm, convolution, in one or three dimensions"""
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    return Case(nn.Sequential(conv(3, 8, 3), norm(8), conv(8, 6, 1), nn.ReLU(), conv(6, 2, 1)), noise(2, 3, *[5] * dims), {"0": {"2": same}, "2": {"4": same}})


ZOO["conv1d"], ZOO["conv3d"] = lambda: sequence(1), lambda: sequence(3)


@case
def group_norm():
    """One channel from each of the groups"""
    net, x = chain(lambda m, h: m.norm(h), 8, norm=nn.GroupNorm(4, 8))
    return Case(net, x, {"a": None, "b": {"head": same}})


@case
def instance_norm():
    """Each channel for itself, so the numbers agree"""
    return chained(lambda m, h: m.norm(h), 8, safe=same, norm=nn.InstanceNorm2d(8, affine=True))


@case
def layer_norm():
    """Fewer channels to average over"""
    return Case(Net(lambda m, x: m.head(m.norm(m.a(x))), a=Linear(4, 8), norm=nn.LayerNorm(8), head=Linear(8, 2)), noise(5, 4), {"a": None})


class ToyRMSNorm(nn.Module):
    """What language models use"""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        """Divide by the size"""
        return self.weight * x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


class Scaler(ToyRMSNorm):
    """The same under a name that does not tell"""


@case
def rms_norm():
    """The name says what it is"""
    return Case(Net(lambda m, x: m.head(m.norm(m.a(x))), a=Linear(4, 8), norm=ToyRMSNorm(8), head=Linear(8, 2)), noise(5, 4), {"a": None})


@case
def rms_norm_in_disguise():
    """Nobody knows that it is a norm, so its mixing is a fault"""
    return Case(Net(lambda m, x: m.head(m.norm(m.a(x))), a=Linear(4, 8), norm=Scaler(8), head=Linear(8, 2)), noise(5, 4), {}, {"a": "Rsqrt"})


@case
def flip_behind_rms_norm():
    """And it must not hide a flip"""
    net = Net(lambda m, x: m.head(m.norm(m.a(x)).flip(-1)), a=Linear(4, 8), norm=ToyRMSNorm(8), head=Linear(8, 2))
    return Case(net, noise(5, 4), {}, {"a": ""})


@case
def prelu():
    """A slope for each channel"""
    return chained(lambda m, h: m.act(h), 8, safe=same, act=nn.PReLU(8))


@case
def frozen_batch_norm():
    """Frozen and in eval mode while the model trains"""
    return chained(lambda m, h: m.norm(h), 8, safe=same, norm=nn.BatchNorm2d(8).eval().requires_grad_(False))


@case
def bare_scale():
    """A parameter without a module"""
    return chained(lambda m, h: h * m.scale, 8, safe=same, scale=nn.Parameter(torch.rand(8, 1, 1) + 0.5))


@case
def square_positions():
    """As many positions as channels: which axis goes?"""
    net = Net(lambda m, x: m.head(m.a(x) * m.pos), a=Linear(4, 8), pos=nn.Parameter(torch.rand(1, 8, 8) + 0.5), head=Linear(8, 2))
    return Case(net, noise(2, 8, 4), {"a": {"head": same}})


@case
def bare_matrix():
    """Multiplied as a matrix, square: the graph takes it for a scale"""
    net = Net(lambda m, x: m.head(m.a(x) @ m.matrix), a=Linear(4, 8), matrix=nn.Parameter(torch.randn(8, 8)), head=Linear(8, 2))
    return Case(net, noise(5, 4), {}, {"a": "does not run"})


@case
def softmax():
    """Over channels, each knows the others"""
    return chained(lambda m, h: h.softmax(1), 8, why="Softmax")


@case
def centered():
    """The mean over channels is not the same without some"""
    return chained(lambda m, h: h - h.mean(1, keepdim=True), 8, why="Mean")


@case
def normalized():
    """Length one, which a zero does not change"""
    return replace(chained(lambda m, h: F.normalize(h, dim=1), 9, safe=same), source=("a",))


@case
def normalized_by_hand():
    """The same without PyTorch's function"""
    return replace(chained(lambda m, h: h / h.pow(2).sum(1, keepdim=True).sqrt(), 9, safe=same), source=("a",))


@case
def normalized_embedding():
    """A linear layer behind the mean over positions, its vector of length one, a classifier"""
    layers = dict(a=Conv(3, 8, 1), embed=Linear(8, 9), head=Linear(9, 3))
    net = Net(lambda m, x: m.head(F.normalize(m.embed(m.a(x).relu().mean((2, 3))))), **layers)
    return Case(net, noise(5, 3, 4, 4), {"a": {"embed": same}, "embed": {"head": same}}, source=("embed",))


@case
def normalized_embedding_returned():
    """The vector is what the model is for, so it keeps its length"""
    net = Net(lambda m, x: F.normalize(m.embed(m.a(x).relu())), a=Linear(4, 8), embed=Linear(8, 9))
    return Case(net, noise(5, 4), {"a": {"embed": same}}, {"embed": "output of the model"})


@case
def two_towers():
    """How alike two embeddings are: zeros in both change nothing"""
    net = Net(lambda m, p, q: m.scale.exp() * F.normalize(m.a(p)) @ F.normalize(m.b(q)).t(), a=Linear(4, 9), b=Linear(3, 9), scale=nn.Parameter(torch.tensor(1.0)))
    return Case(net, (noise(5, 4), noise(5, 3)), {"a": {}}, source=("a",))


class CosineClassifier(nn.Module):
    """Angles between an embedding and a vector for each class, a bare parameter"""

    def __init__(self, n, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, n))

    def forward(self, x):
        """Both of length one"""
        return F.linear(F.normalize(x), F.normalize(self.weight))


@case
def cosine_classifier():
    """The classes' vectors lose the same numbers"""
    net = Net(lambda m, x: m.cos(m.a(x)), a=Linear(4, 9), cos=CosineClassifier(9, 3))
    return Case(net, noise(5, 4), None, {})


class CosineLinear(nn.Linear):
    """The same as a layer, whose rows have length one whatever is silenced in front of it"""

    def forward(self, x):
        """Both of length one"""
        return F.linear(F.normalize(x), F.normalize(self.weight))


@case
def cosine_layer():
    """So fewer numbers in a row are other numbers"""
    return Case(Net(lambda m, x: m.cos(m.a(x)), a=Linear(4, 9), cos=CosineLinear(9, 3)), noise(5, 4), {}, {"a": "LinalgVectorNorm"})


def spatial(m, h, *ways):
    """CBAM's map of positions, from one or two numbers over all channels"""
    return h * m.gate(torch.cat([way(h) for way in ways], 1)).sigmoid()


def over_mean(h):
    """One number for each position"""
    return h.mean(1, keepdim=True)


def over_max(h):
    """Another one"""
    return h.amax(1, keepdim=True)


@case
def spatial_attention():
    """The mean of fewer channels is another one; the map has one channel, whatever goes"""
    found = chained(lambda m, h: spatial(m, h, over_mean, over_max), 8, why="Mean over all of them", gate=Conv(2, 1, 3, padding=1))
    found.refused["gate"] = "all of them"
    return found


@case
def spatial_attention_of_the_maximum():
    """The maximum of positive numbers does not see a zero"""
    return replace(chained(lambda m, h: spatial(m, h.relu(), over_max), 8, safe=same, gate=Conv(1, 1, 3, padding=1)), source=("a",))


@case
def attention_over_channels():
    """A convolution along the channels (ECA): each knows its neighbours"""
    layers = dict(eca=nn.Conv1d(1, 1, 3, padding=1, bias=False))
    return chained(lambda m, h: h * m.eca(h.mean((2, 3)).unsqueeze(1)).squeeze(1).sigmoid()[:, :, None, None], 8, why="reach eca as something else", **layers)


class GlobalResponseNorm(nn.Module):
    """ConvNeXt-V2's norm, by the mean size of all channels"""

    def __init__(self, n):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(n) + 0.5), nn.Parameter(torch.rand(n))

    def forward(self, x):
        """Channels last"""
        size = x.norm(dim=(1, 2), keepdim=True)
        return x + self.weight * (x * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.bias


class Contrast(GlobalResponseNorm):
    """The same under a name that does not tell"""


def response(norm):
    """A norm between two linear layers, channels last"""
    return Net(lambda m, x: m.head(m.norm(m.a(x))), a=Linear(4, 8), norm=norm(8), head=Linear(8, 2)), noise(2, 3, 3, 4)


@case
def global_response_norm():
    """Fewer channels to average over, like any norm over channels"""
    net, x = response(GlobalResponseNorm)
    return Case(net, x, {"a": None})


@case
def global_response_norm_in_disguise():
    """An average changes a little with a few channels: a little is not nothing"""
    net, x = response(Contrast)
    return Case(net, x, {}, {"a": "Mean"})


@case
def cumulated():
    """Sums over all channels before, to which a zero adds nothing"""
    return replace(chained(lambda m, h: h.cumsum(1), 8, safe=same), source=("a",))


@case
def padded_in_front():
    """As in the shortcuts of the first ResNets for CIFAR"""
    return chained(lambda m, h: F.pad(h, (0, 0, 0, 0, 3, 0)), 9, 12, why="Pad")


@case
def padded_behind():
    """Here the numbers stay"""
    return chained(lambda m, h: F.pad(h, (0, 0, 0, 0, 0, 3)), 9, 12, safe=same)


@case
def repeated():
    """Twice as many channels"""
    return chained(lambda m, h: h.repeat(1, 2, 1, 1), 8, 16, why="does not run")


@case
def pixel_shuffle():
    """Four channels make one"""
    return chained(lambda m, h: F.pixel_shuffle(h, 2), 16, 4, why="more channels")


@case
def shared_module():
    """One module called twice, its outputs are its inputs"""
    net = Net(lambda m, x: m.head(m.b(m.b(m.a(x)).relu())), a=Linear(4, 8), b=Linear(8, 8), head=Linear(8, 2))
    return Case(net, noise(5, 4), {"a": {"b": same, "head": same}})


@case
def shared_reader():
    """Two layers read by one"""
    net = Net(lambda m, x: m.head(m.r(m.a(x)).relu() + m.r(m.b(x)).relu()), a=Linear(4, 8), b=Linear(4, 8), r=Linear(8, 6), head=Linear(6, 2))
    return Case(net, noise(5, 4), {"a": {"r": same}, "r": {"head": same}})


@case
def tied_linears():
    """One weight cannot lose an output here and an input there"""
    net = Net(lambda m, x: m.head(m.c(m.b(m.a(x).relu()).relu())), a=Linear(4, 8), b=Linear(8, 8), c=Linear(8, 8), head=Linear(8, 2))
    net.c.weight = net.b.weight
    return Case(net, noise(5, 4), {}, {"a": "share one weight", "b": "share one weight"})


@case
def tied_embedding():
    """Nor can the head lose inputs that the embedding keeps"""
    net = Net(lambda m, ids: m.head(m.mid(m.embed(ids)).relu()), embed=nn.Embedding(11, 6), mid=Linear(6, 6), head=Linear(6, 11, bias=False))
    net.head.weight = net.embed.weight
    return Case(net, torch.randint(11, (2, 3)), {}, {"mid": "share one weight"})


@case
def attention():
    """One channel from each head, together with the stream"""
    layers = dict(a=Linear(4, 8), att=nn.MultiheadAttention(8, 2, batch_first=True), head=Linear(8, 2))
    return Case(Net(lambda m, x: (lambda h: m.head(h + m.att(h, h, h, need_weights=False)[0]))(m.a(x)), **layers), noise(2, 3, 4), {"a": None})


@case
def encoder_layer():
    """PyTorch's own transformer; its hidden layer is free"""
    layers = dict(a=Linear(4, 8), enc=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), head=Linear(8, 2))
    net = Net(lambda m, x: m.head(m.enc(m.a(x))), **layers)
    return Case(net, noise(2, 3, 4), {"a": None, "enc.linear1": {"enc.linear2": same}})


@case
def lstm():
    """A recurrent layer reads channels"""
    layers = dict(a=Linear(4, 8), rnn=nn.LSTM(8, 6, batch_first=True), head=Linear(6, 2))
    return Case(Net(lambda m, x: m.head(m.rnn(m.a(x))[0]), **layers), noise(2, 3, 4), {"a": {"rnn": same}})


@case
def no_bias():
    """Weights alone"""
    net = nn.Sequential(Conv(3, 8, 1, bias=False), nn.ReLU(), Conv(8, 6, 1, bias=False), Conv(6, 2, 1, bias=False))
    return Case(net, noise(2, 3, 4, 4), {"0": {"2": same}, "2": {"3": same}})


@case
def intermediate_output():
    """What the model returns keeps its shape"""
    net = Net(lambda m, x: (lambda h: (h, m.head(m.b(h).relu())))(m.a(x)), a=Conv(3, 8, 1), b=Conv(8, 6, 1), head=Conv(6, 2, 1))
    return Case(net, noise(2, 3, 4, 4), {"b": {"head": same}}, {"a": "output of the model"})


@case
def mean_returned_too():
    """A number over all channels is an output as well"""
    net = Net(lambda m, x: (lambda h: dict(out=m.head(h), size=h.abs().mean()))(m.a(x)), a=Linear(4, 9), head=Linear(9, 2))
    return Case(net, noise(5, 4), {}, {"a": "moved or mixed"})


@case
def tuple_input():
    """Two inputs in order"""
    return Case(Net(lambda m, p, q: m.head(m.a(p) + m.b(q)), a=Linear(4, 8), b=Linear(3, 8), head=Linear(8, 2)), (noise(5, 4), noise(5, 3)), {"a": {"head": same}})


@case
def dict_input():
    """Two inputs by name"""
    net = Net(lambda m, p, q: m.head(m.a(p) * m.b(q)), a=Linear(4, 8), b=Linear(3, 8), head=Linear(8, 2))
    return Case(net, dict(q=noise(5, 3), p=noise(5, 4)), {"a": {"head": same}})


@case
def called_by_keyword():
    """Layers that get their input by its name"""
    net = Net(lambda m, x: m.head(input=m.b(input=m.a(x)).relu()), a=Linear(4, 8), b=Linear(8, 6), head=Linear(6, 2))
    return Case(net, noise(5, 4), {"a": {"b": same}, "b": {"head": same}})


@case
def unused():
    """Nothing is known of a layer that does not run"""
    net = Net(lambda m, x: m.head(m.a(x)), a=Linear(4, 8), spare=Linear(8, 8), head=Linear(8, 2))
    return Case(net, noise(5, 4), {"a": {"head": same}}, {"spare": "cannot be followed"})


@case
def functional():
    """A weight that is used without its module"""
    net = Net(lambda m, x: m.head(F.linear(m.a(x), m.b.weight, m.b.bias)), a=Linear(4, 8), b=Linear(8, 8), head=Linear(8, 2))
    return Case(net, noise(5, 4), {}, {"a": "does not run", "b": "call it as a module"})


@case
def dropout():
    """Off while it is asked"""
    net = nn.Sequential(Linear(4, 8), nn.Dropout(0.5), Linear(8, 6), nn.Dropout(0.2), Linear(6, 2)).train()
    return Case(net, noise(5, 4), {"0": {"2": same}, "2": {"4": same}})


@case
def half_precision():
    """Rounding is no mistake"""
    return Case(nn.Sequential(Conv(3, 8, 1), nn.ReLU(), Conv(8, 6, 1), Conv(6, 2, 1)).bfloat16(), noise(2, 3, 4, 4).bfloat16(), {"0": {"2": same}, "2": {"3": same}})


@case
def half_precision_flipped():
    """But a flip is one"""
    net, x = chain(lambda m, h: h.flip(1), 12)
    return Case(net.bfloat16(), x.bfloat16(), {"b": {"head": same}}, {"a": "Flip"})


def mute(module, columns):
    """Zero the weights through which a layer reads some of its inputs"""
    w, groups = (module.weight_ih_l0 if isinstance(module, nn.LSTM) else module.weight).data, getattr(module, "groups", 1)
    for c in columns:
        if isinstance(module, nn.modules.conv._ConvTransposeNd):
            w[c] = 0
            continue
        n_in, n_out = w.shape[1], w.shape[0] // groups
        w[c // n_in * n_out : (c // n_in + 1) * n_out, c % n_in] = 0


def zero(model, name, rows):
    """Make a layer or norm return zeros for some of its channels"""
    module = model.get_submodule(name)
    module.weight.data[rows] = 0
    if module.bias is not None:
        module.bias.data[rows] = 0


@torch.no_grad()
def run(model, sample):
    """All tensors the model returns"""
    return list(tensors_in(call(model.eval(), sample)))


@torch.no_grad()
def without(graph, parts):
    """All tensors the model returns while some channels are taken out"""
    with leave_no_trace(graph.model, weights=()):
        graph.remove(parts)
        return [t.clone() for t in run(graph.model, graph.sample)]


def choices(granules, n=6):
    """Some sets of granules, never all: single ones, neighbours, random ones"""
    rng = random.Random(0)
    fixed = [granules[:1], granules[-1:], granules[: len(granules) // 2], granules[1::2]]
    return [s for s in fixed + [rng.sample(granules, rng.randint(1, len(granules) - 1)) for _ in range(n)] if 0 < len(s) < len(granules)]


@pytest.mark.parametrize("name", ZOO)
def test_accepted_is_what_holds(name):
    """Each group is accepted or refused as the case says, with a reason; removing equals muting, and the model is as it was"""
    c = fresh(name)
    before = fingerprint(c.model)
    groups = {g.name: g for g in channel_groups(c.model, c.sample)}
    assert changes(before, fingerprint(c.model)) == []
    refused = {n: g.reason for g in groups.values() if g.reason for n in g.members}
    for n, word in c.refused.items():
        assert n in refused, f"{n} is accepted, and what it would give is made up"
        assert word in refused[n], refused[n]
        assert len(refused[n]) > 30
    if c.safe is None:
        return
    assert {n for n, g in groups.items() if not g.reason} == set(c.safe)
    for n, readers in c.safe.items():
        g = groups[n]
        assert sorted(i for granule in g.granules for i in granule) == list(range(n_outputs(g.root)))
        outs = [set(p.roots) for p in g.parts if p.out]
        for some in choices(g.granules):
            if any(roots <= {i for granule in some for i in granule} for roots in outs):
                continue  # nothing would be left of a layer
            taken = without(g.graph, g.parts_of(some))
            muted = copy.deepcopy(c.model)
            for part in g.parts_of(some) if n in c.source else ():
                if part.out:
                    zero(muted, g.graph.name_of(part), part.idxs)
            for reader, columns in (readers or {}).items():
                mute(muted.get_submodule(reader), {i for granule in some for ch in granule for i in columns(ch)})
            told = run(muted, c.sample)
            assert [t.shape for t in taken] == [t.shape for t in told]
            if readers is None:
                assert all(t.isfinite().all() for t in taken)
                continue
            loose = told[0].dtype == torch.bfloat16
            for t, o in zip(taken, told, strict=True):
                torch.testing.assert_close(t, o, rtol=0.1 if loose else 1e-4, atol=0.05 if loose else 1e-5)
    assert changes(before, fingerprint(c.model)) == []


def test_something_is_left_of_every_layer():
    """The weakest channels of a group are all those of one layer: it is measured without an error, or skipped with a reason"""
    c = fresh("concat_then_add")
    for w in (c.model.a.weight, c.model.c.weight[:4]):
        w.data *= 1e-3
    c.model.head.weight.data[:, :4] *= 1e-3
    base = run(c.model, c.sample)[0]
    before = fingerprint(c.model)
    result = analyze_sensitivity(c.model, c.sample, lambda m: -float((run(m, c.sample)[0] - base).norm()), "pruning", 40, verbose=False)
    assert changes(before, fingerprint(c.model)) == []
    assert {layer.name for layer in result.layers} | {n for n, _ in result.skipped} >= {"a", "head"}


@pytest.mark.parametrize("seed", range(2))
def test_all_groups_at_once(seed):
    """A third of every group of a residual network with gates, at random, in one go"""
    torch.manual_seed(seed)
    model, x = tv.mobilenet_v3_small(num_classes=4), image(32)
    for m in model.modules():
        if isinstance(m, bn_types):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
            m.weight.data.uniform_(0.5, 1.5)
    groups = [g for g in channel_groups(model, x) if not g.reason]
    assert len(groups) > 15
    rng = random.Random(seed)
    parts = [p for g in groups for p in g.parts_of(rng.sample(g.granules, max(1, len(g.granules) // 3)))]
    muted = copy.deepcopy(model)
    names = {m: n for n, m in model.named_modules()}
    for p in parts:
        if not p.out:
            mute(muted.get_submodule(names[p.module]), p.idxs)
    (taken,), (told,), (base,) = without(groups[0].graph, parts), run(muted, x), run(model.eval(), x)
    assert (told - base).norm() > 1e-3
    torch.testing.assert_close(taken, told, rtol=1e-3, atol=1e-4)


# ---- depthwise convolutions with a multiplier, in the networks that have them


class MaxNorm(nn.Conv2d):
    """A convolution whose filters are kept at length one, as EEGNet's authors do after each step"""

    def forward(self, x):
        """Bounded in place"""
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(x)


def eegnet(depthwise=nn.Conv2d, channels=6, samples=64, classes=4, f1=8, d=2, f2=16):
    """EEGNet (Lawhern et al. 2018, table 2): temporal filters, `d` spatial ones for each of them, a separable convolution"""
    layers = [
        Conv(1, f1, (1, 33), padding=(0, 16), bias=False),
        nn.BatchNorm2d(f1),
        depthwise(f1, d * f1, (channels, 1), groups=f1, bias=False),
        *(nn.BatchNorm2d(d * f1), nn.ELU(), nn.AvgPool2d((1, 4)), nn.Dropout(0.5)),
        Conv(d * f1, d * f1, (1, 17), padding=(0, 8), groups=d * f1, bias=False),
        Conv(d * f1, f2, 1, bias=False),
        *(nn.BatchNorm2d(f2), nn.ELU(), nn.AvgPool2d((1, 8)), nn.Dropout(0.5), nn.Flatten()),
        Linear(f2 * (samples // 32), classes),
    ]
    return nn.Sequential(*layers), noise(3, 1, channels, samples)


@pytest.mark.parametrize("depthwise", [nn.Conv2d, MaxNorm])
def test_eegnet_loses_filters(depthwise):
    """A temporal filter goes with its two spatial ones: as if they were silenced, in evaluation and in training mode"""
    torch.manual_seed(0)
    model, x = eegnet(depthwise)
    model.eval()(x)
    for m in model:
        if isinstance(m, bn_types):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
            m.bias.data.uniform_(-0.3, 0.3)
    before = fingerprint(model)
    groups = {g.name: g for g in channel_groups(model, x)}
    assert changes(before, fingerprint(model)) == []
    assert {n: (g.members, g.reason is None) for n, g in groups.items()} == {"0": (("0", "2", "7"), True), "8": (("8",), True), "14": (("14",), False)}
    group = groups["0"]
    assert group.granules == [[i] for i in range(8)]
    muted = copy.deepcopy(model)
    mute(muted[8], [2, 3, 10, 11])
    (told,) = run(muted, x)
    torch.testing.assert_close(without(group.graph, group.parts_of([[1], [5]]))[0], told, rtol=1e-4, atol=1e-5)
    pruner = Pruner(model, {"2": 50, "8": 25}, example_inputs=x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model.train()(x).square().mean().backward()
    optimizer.step()
    pruner.prune_model(optimizer)
    assert (model[0].out_channels, model[2].in_channels, model[2].groups, model[2].out_channels, model[7].groups, model[8].out_channels) == (4, 4, 4, 8, 8, 12)
    optimizer.zero_grad()
    model.train()(x).square().mean().backward()
    optimizer.step()
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_fastvit_loses_channels():
    """Between its stages are depthwise convolutions with two filters for a channel; only the output is refused"""
    torch.manual_seed(0)
    model, x = timm.create_model("fastvit_t8", pretrained=False, num_classes=3).eval(), image(64)
    for m in model.modules():
        if isinstance(m, bn_types):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
    wider = [n for n, m in model.named_modules() if isinstance(m, Conv) and 1 < m.groups == m.in_channels < m.out_channels]
    assert len(wider) > 5
    before = fingerprint(model)
    groups = channel_groups(model, x)
    assert changes(before, fingerprint(model)) == []
    reasons = {n: g.reason for g in groups if g.reason for n in g.members}
    assert set(reasons) == {"head.fc"}, reasons
    g = next(g for g in groups if wider[0] in g.members)
    with leave_no_trace(model, weights=()):
        g.graph.cut(g.parts_of(g.granules[::2]))
        conv = model.get_submodule(wider[0])
        assert conv.groups == conv.in_channels and conv.out_channels == 2 * conv.in_channels
        assert run(model, x)[0].shape == (1, 3)


# ---- attention


def seeded(build):
    """A model with known numbers"""
    torch.manual_seed(0)
    return build().eval()


TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
IDS = torch.randint(1, 30, (2, 5), generator=torch.Generator().manual_seed(0))


def bert():
    """BERT"""
    return BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=16, **TINY)), dict(input_ids=IDS)


def distilbert():
    """DistilBERT"""
    config = DistilBertConfig(vocab_size=30, max_position_embeddings=16, dim=16, n_layers=2, n_heads=4, hidden_dim=24)
    return DistilBertForSequenceClassification(config), dict(input_ids=IDS)


def hf_vit():
    """Hugging Face's ViT"""
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **TINY)), image(16, 2)


def gpt2(**more):
    """GPT-2, whose head is its embedding"""
    return GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, **more)), dict(input_ids=IDS)


def timm_vit():
    """timm's ViT, query, key and value in one layer"""
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=3), image(32)


def timm_swin():
    """Windows and merged patches"""
    config = dict(img_size=56, window_size=7, depths=(1, 1), num_heads=(2, 4), embed_dim=16, num_classes=3)
    return timm.create_model("swin_tiny_patch4_window7_224", **config), image(56)


def timm_convnext():
    """Depthwise convolutions, layer norms, layer scale"""
    return timm.create_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=3), image(64)


@dataclass
class Attention:
    """What is known of a model"""

    build: object
    heads: tuple = ()  # first layers of groups that lose whole heads
    hidden: tuple = ()  # layers that can be thinned out alone
    streams: tuple = ()  # first layers of residual streams that can be thinned out
    refused: tuple = ()


ATTENTION = {
    "bert": Attention(
        bert,
        tuple(f"bert.encoder.layer.{i}.attention.self.query" for i in (0, 1)),
        (*(f"bert.encoder.layer.{i}.intermediate.dense" for i in (0, 1)), "bert.pooler.dense"),
        ("bert.encoder.layer.0.attention.output.dense",),
        ("classifier",),
    ),
    "distilbert": Attention(
        distilbert,
        tuple(f"distilbert.transformer.layer.{i}.attention.q_lin" for i in (0, 1)),
        (*(f"distilbert.transformer.layer.{i}.ffn.lin1" for i in (0, 1)), "pre_classifier"),
        ("distilbert.transformer.layer.0.attention.out_lin",),
        ("classifier",),
    ),
    "timm_vit": Attention(timm_vit, (), ("blocks.0.mlp.fc1", "blocks.1.mlp.fc1"), ("patch_embed.proj",), ("blocks.0.attn.qkv", "blocks.1.attn.qkv", "head")),
    "timm_swin": Attention(
        timm_swin,
        (),
        ("layers.0.blocks.0.mlp.fc1", "layers.1.blocks.0.mlp.fc1"),
        ("layers.1.downsample.reduction",),
        ("patch_embed.proj", "layers.0.blocks.0.attn.qkv", "head.fc"),
    ),
    "timm_convnext": Attention(
        timm_convnext,
        (),
        tuple(f"stages.{i}.blocks.0.mlp.fc1" for i in range(4)),
        ("stem.0", *(f"stages.{i}.downsample.1" for i in (1, 2, 3))),
        ("head.fc",),
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_models(name):
    """Which groups can go, in what granules; every accepted one runs with any choice and leaves no trace"""
    known = ATTENTION[name]
    torch.manual_seed(0)
    model, sample = known.build()
    model.eval()
    before = fingerprint(model)
    groups = {g.name: g for g in channel_groups(model, sample)}
    ok = {n for n, g in groups.items() if not g.reason}
    assert set(known.heads) | set(known.hidden) | set(known.streams) <= ok, {n: g.reason for n, g in groups.items()}
    assert not set(known.refused) & ok
    for n in known.heads:
        assert groups[n].granules == [list(range(i, i + 4)) for i in range(0, 16, 4)] and len(groups[n].members) == 3
    for n in known.hidden:
        assert len(groups[n].members) == 1 and len(groups[n].granules) == n_outputs(groups[n].root)
    for n in known.streams:
        assert len(groups[n].members) > 1
    base = run(model, sample)
    for n in ok:
        for some in choices(groups[n].granules, 1)[-2:]:
            taken = without(groups[n].graph, groups[n].parts_of(some))
            assert [t.shape for t in taken] == [t.shape for t in base] and all(t.isfinite().all() for t in taken)
    assert changes(before, fingerprint(model)) == []


HEADS = {
    "bert": (bert, "bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.1.attention.output.dense"),
    "distilbert": (distilbert, "distilbert.transformer.layer.0.attention.q_lin", "distilbert.transformer.layer.0.attention.out_lin"),
    "vit": (hf_vit, "vit.layers.0.attention.q_proj", "vit.layers.0.attention.o_proj"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_leave_as_if_masked(name):
    """Without some heads the output is that with nothing read from them"""
    build, query, out = HEADS[name]
    torch.manual_seed(0)
    model, sample = build()
    model.eval()
    group = next(g for g in channel_groups(model, sample) if g.name == query)
    assert group.reason is None and len(group.granules) == 4
    for heads in ([0], [3], [1, 2], [0, 2, 3]):
        muted = copy.deepcopy(model)
        mute(muted.get_submodule(out), [4 * h + i for h in heads for i in range(4)])
        taken = without(group.graph, group.parts_of([group.granules[h] for h in heads]))
        told = run(muted, sample)
        assert not torch.allclose(told[0], run(model, sample)[0], atol=1e-7)
        torch.testing.assert_close(taken[0], told[0], rtol=1e-4, atol=1e-6)


def test_gpt2_stays_tied():
    """The stream goes through embedding and head, which are one parameter before and after"""
    torch.manual_seed(0)
    model, sample = gpt2(use_cache=False)
    model.eval()
    before = fingerprint(model)
    groups = {g.name: g for g in channel_groups(model, sample)}
    fc, stream = groups["transformer.h.0.mlp.c_fc"], groups["transformer.h.0.attn.c_proj"]
    assert fc.reason is None and fc.members == ("transformer.h.0.mlp.c_fc",)
    assert stream.reason is None and "transformer.h.1.mlp.c_proj" in stream.members
    assert groups["transformer.h.0.attn.c_attn"].reason is not None
    muted = copy.deepcopy(model)
    muted.transformer.h[0].mlp.c_proj.weight.data[[2, 5]] = 0
    taken = without(fc.graph, fc.parts_of([fc.granules[2], fc.granules[5]]))
    torch.testing.assert_close(taken[0], run(muted, sample)[0], rtol=1e-4, atol=1e-6)
    with leave_no_trace(model, weights=()):
        stream.graph.remove(stream.parts_of(stream.granules[:2]))
        assert model.lm_head.weight is model.transformer.wte.weight
        assert model.lm_head.weight.shape == (30, 14)
        assert run(model, sample)[0].shape == (2, 5, 30)
    assert model.lm_head.weight is model.transformer.wte.weight and model.lm_head.weight.shape == (30, 16)
    assert changes(before, fingerprint(model)) == []


def test_gpt2_with_its_cache():
    """As it comes it returns a cache of keys and values: that is followed, or the error says how to switch it off"""
    torch.manual_seed(0)
    model, sample = gpt2()
    try:
        groups = {g.name: g for g in channel_groups(model.eval(), sample)}
    except ValueError as e:
        assert "use_cache" in str(e), str(e)
    else:
        assert groups["transformer.h.0.mlp.c_fc"].reason is None


# ---- masks


def rows_mask(weight, keep, axis=0):
    """A mask like `weight` with whole filters"""
    shape = [1] * weight.dim()
    shape[axis] = -1
    return torch.as_tensor(keep).view(shape).expand_as(weight).float().clone()


def random_masks(model, names, pct=50):
    """Masks with some of the filters of each layer gone, and their biases"""
    masks = {}
    for n in names:
        m = model.get_submodule(n)
        keep = torch.ones(len(m.weight), dtype=torch.bool)
        keep[torch.randperm(len(keep))[: len(keep) * pct // 100]] = False
        masks[n] = {"weight": rows_mask(m.weight, keep)} | ({} if m.bias is None else {"bias": keep.float()})
    return masks


def kept(mask):
    """Filters that a mask keeps"""
    return (mask["weight"] if isinstance(mask, dict) else mask).flatten(1).any(1)


class Sum(nn.Module):
    """Two layers are added, a third is between"""

    def __init__(self):
        super().__init__()
        self.a, self.inner, self.back, self.head = Linear(3, 6), Linear(6, 5), Linear(5, 6), Linear(6, 2)

    def forward(self, x):
        """A residual block"""
        x = self.a(x)
        return self.head(x + self.back(self.inner(x).relu()))


def deep(masks, f):
    """Every tensor in dicts of dicts"""
    return {n: deep(m, f) if isinstance(m, dict) else f(m) for n, m in masks.items()}


def assert_equal(a, b):
    """The same masks, of the same kind"""
    assert a.keys() == b.keys()
    for n in a:
        if isinstance(a[n], dict):
            assert_equal(a[n], b[n])
        else:
            assert a[n].dtype == b[n].dtype and torch.equal(a[n], b[n])


KINDS = {
    "tensors": lambda masks: {n: m["weight"] for n, m in masks.items()},
    "with biases": lambda masks: masks,
    "weight only": lambda masks: {n: {"weight": m["weight"]} for n, m in masks.items()},
    "bias None": lambda masks: {n: {"weight": m["weight"], "bias": None} for n, m in masks.items()},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_in_every_form(kind, dtype, tmp_path):
    """The form, dtype and order come back, the masks that came are as they were, and a file says the same"""
    torch.manual_seed(0)
    net, x = Sum(), noise(4, 3)
    masks = KINDS[kind](random_masks(net, ["back", "a", "inner"]))
    if kind == "bias None":
        masks = {n: {"weight": m["weight"].to(dtype), "bias": None} for n, m in masks.items()}
    else:
        masks = deep(masks, lambda t: t.to(dtype))
    copied, before = copy.deepcopy(masks), fingerprint(net)
    fixed = fix_mask_conflict(masks, net, x)
    assert changes(before, fingerprint(net)) == []
    assert list(fixed) == ["back", "a", "inner"]
    union = kept(copied["a"]) | kept(copied["back"])
    assert not torch.equal(kept(copied["a"]), kept(copied["back"]))
    for n, keep in (("a", union), ("back", union), ("inner", kept(copied["inner"]))):
        weight = fixed[n]["weight"] if kind != "tensors" else fixed[n]
        assert weight.dtype == dtype and weight.shape == net.get_submodule(n).weight.shape
        assert torch.equal(kept(fixed[n]), keep)
        if kind == "with biases":
            assert fixed[n]["bias"].dtype == dtype and torch.equal(fixed[n]["bias"].bool(), keep)
        if kind == "bias None":
            assert fixed[n]["bias"] is None
        if kind == "weight only":
            assert set(fixed[n]) == {"weight"}
    if kind != "bias None":
        assert_equal(masks, copied)
        torch.save(masks, tmp_path / "masks.pt")
        assert_equal(fix_mask_conflict(tmp_path / "masks.pt", net, x), fixed)
        assert_equal(fix_mask_conflict(str(tmp_path / "masks.pt"), net, x), fixed)
        assert_equal(fix_mask_conflict(fixed, net, x), fixed)


def test_results_share_no_memory_with_what_came():
    """Writing to the new masks does not reach the old ones"""
    torch.manual_seed(0)
    net = Sum()
    masks = {"inner": torch.ones_like(net.inner.weight)}
    fix_mask_conflict(masks, net, noise(4, 3))["inner"].zero_()
    assert masks["inner"].all()


def batch_norm_of(model):
    """The batch norm behind each convolution, where models are written in order"""
    found, last = {}, None
    for n, m in model.named_modules():
        if isinstance(m, nn.Conv2d):
            last = n
        elif isinstance(m, bn_types):
            found[last] = m
    return found


resnext = partial(tv.ResNet, tv.resnet.Bottleneck, [1, 1, 1, 1], groups=32, width_per_group=4)   # one block in each stage
NETS = {"resnet18": (tv.resnet18, 50), "mobilenet_v2": (tv.mobilenet_v2, 50), "resnext": (resnext, 75)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow]*(n != "resnet18")) for n in NETS])
def test_fixed_masks_can_be_cut(name):
    """Coupled layers agree, grouped ones lose as many from each group, and cutting gives what masking gives"""
    build, pct = NETS[name]
    torch.manual_seed(0)
    model, x = lively(build(num_classes=4)), image(32)
    convs = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    masks = random_masks(model, convs, pct)
    copied = copy.deepcopy(masks)
    fixed = fix_mask_conflict(masks, model, x)
    assert_equal(masks, copied)
    assert list(fixed) == convs
    groups = channel_groups(model, x)
    for g in (g for g in groups if g.name in fixed):
        union = torch.stack([kept(masks[n]) for n in g.members]).any(0)
        for n in g.members:
            assert torch.equal(kept(fixed[n]), kept(fixed[g.name]))
            assert kept(fixed[n])[union].all()
        if len(g.granules[0]) == 1:
            assert torch.equal(kept(fixed[g.name]), union)
    for n in convs:
        conv = model.get_submodule(n)
        if 1 < conv.groups < conv.out_channels:
            assert len(set(kept(fixed[n]).view(conv.groups, -1).sum(1).tolist())) == 1
    assert sum(int((~kept(m)).sum()) for m in fixed.values()) > 50, "something has to go, or this shows nothing"
    masked, norms = copy.deepcopy(model), batch_norm_of(model)
    places = {id(m): n for n, m in model.named_modules()}
    for n, m in fixed.items():
        masked.get_submodule(n).weight.data *= m["weight"]
        norm = masked.get_submodule(places[id(norms[n])])
        norm.weight.data *= kept(m)
        norm.bias.data *= kept(m)
    (told,) = run(masked, x)
    gone = {g: [c for c, k in enumerate(kept(fixed[g.name]).tolist()) if not k] for g in groups if g.name in fixed}
    groups[0].graph.cut([p for g, channels in gone.items() for p in g.parts_of([channels])])
    for n in convs:
        assert model.get_submodule(n).out_channels == int(kept(fixed[n]).sum())
    (cut,) = run(model, x)
    torch.testing.assert_close(cut, told, rtol=1e-3, atol=1e-4)


def test_pattern_inside_a_filter_stays():
    """Fine masks are not widened: only a filter that was gone and has to come back is full again"""
    torch.manual_seed(0)
    net, x = Sum(), noise(4, 3)
    a = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 1]])
    back = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0] * 5, [0] * 5, [1] * 5, [0] * 5])
    fixed = fix_mask_conflict({"a": a, "back": back}, net, x)
    assert fixed["a"].tolist() == [[1, 0, 1], [1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 1]]
    assert fixed["back"].tolist() == [[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [1] * 5, [0] * 5, [1] * 5, [1] * 5]


def test_a_layer_without_a_mask_keeps_all():
    """So its partners do too"""
    net = Sum()
    fixed = fix_mask_conflict({"a": rows_mask(net.a.weight, [1, 0, 1, 0, 1, 0]), "inner": rows_mask(net.inner.weight, [1, 0, 0, 1, 1])}, net, noise(4, 3))
    assert fixed["a"].all() and kept(fixed["inner"]).tolist() == [True, False, False, True, True]


def test_other_layouts():
    """Transposed convolutions and Hugging Face's Conv1D keep their outputs on the second axis"""
    torch.manual_seed(0)
    layers = dict(a=nn.ConvTranspose2d(3, 6, 2), b=nn.ConvTranspose2d(3, 6, 2, bias=False), head=nn.ConvTranspose2d(6, 2, 2))
    net = Net(lambda m, x: m.head(m.a(x) + m.b(x)), **layers)
    one, two, both = [1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0]
    masks = {"a": {"weight": rows_mask(net.a.weight, one, 1), "bias": torch.tensor(one)}, "b": rows_mask(net.b.weight, two, 1)}
    fixed = fix_mask_conflict(masks, net, noise(2, 3, 3, 3))
    assert torch.equal(fixed["a"]["weight"], rows_mask(net.a.weight, both, 1)) and fixed["a"]["bias"].tolist() == both
    assert torch.equal(fixed["b"], rows_mask(net.b.weight, both, 1))

    net = Net(lambda m, x: m.head(m.a(x) + m.b(x)), a=Conv1D(6, 4), b=Conv1D(6, 4), head=Conv1D(2, 6))
    masks = {"a": rows_mask(net.a.weight, one, 1), "b": {"weight": rows_mask(net.b.weight, two, 1), "bias": torch.tensor(two)}}
    fixed = fix_mask_conflict(masks, net, noise(2, 5, 4))
    assert torch.equal(fixed["a"], rows_mask(net.a.weight, both, 1))
    assert torch.equal(fixed["b"]["weight"], rows_mask(net.b.weight, both, 1)) and fixed["b"]["bias"].tolist() == both


def test_channels_under_a_concatenation_have_other_numbers():
    """Two layers side by side are added to a third: each answers for its own part of it"""
    net = Net(lambda m, x: m.head(torch.cat([m.a(x), m.b(x)], 1) + m.c(x)), a=Linear(3, 2), b=Linear(3, 4), c=Linear(3, 6), head=Linear(6, 2))
    masks = {n: rows_mask(net.get_submodule(n).weight, k) for n, k in dict(a=[0, 1], b=[0, 0, 1, 0], c=[0, 0, 0, 1, 0, 0]).items()}
    fixed = fix_mask_conflict(masks, net, noise(4, 3))
    assert {n: kept(m).int().tolist() for n, m in fixed.items()} == dict(a=[0, 1], b=[0, 1, 1, 0], c=[0, 1, 0, 1, 1, 0])


def test_a_gate_goes_with_its_value():
    """If one half of a pair is kept, so is the other"""
    net = Net(lambda m, x: (lambda v, g: m.head(v * g.sigmoid()))(*m.a(x).chunk(2, 1)), a=Linear(3, 8), head=Linear(4, 2))
    fixed = fix_mask_conflict({"a": rows_mask(net.a.weight, [0, 1, 0, 0, 0, 0, 1, 0])}, net, noise(4, 3))
    assert kept(fixed["a"]).int().tolist() == [0, 1, 1, 0, 0, 1, 1, 0]


def test_what_is_wrong_with_masks_is_said():
    """At the door"""
    net, x = Sum(), noise(4, 3)
    with pytest.raises(KeyError, match="unknown layer 'innner'.*inner"):
        fix_mask_conflict({"innner": torch.ones(5, 6)}, net, x)
    with pytest.raises(ValueError, match=r"'inner' has shape \(6, 5\), its weight \(5, 6\)"):
        fix_mask_conflict({"inner": torch.ones(6, 5)}, net, x)
    for wrong in ([torch.ones(5, 6)], 3, None, torch.ones(5, 6)):
        with pytest.raises(TypeError, match="masks is a dict"):
            fix_mask_conflict(wrong, net, x)
    for wrong in (3, None, [[1.0] * 6] * 5, "no mask"):
        with pytest.raises(TypeError):
            fix_mask_conflict({"inner": wrong}, net, x)
    with pytest.raises((ValueError, KeyError), match="weight"):
        fix_mask_conflict({"inner": {"bias": torch.ones(5)}}, net, x)
    with pytest.raises(ValueError, match="bias"):
        fix_mask_conflict({"inner": {"weight": torch.ones(5, 6), "bias": torch.ones(4)}}, net, x)
    assert fix_mask_conflict({}, net, x) == {}


def test_a_file_with_something_else(tmp_path):
    """A path that is there but holds no masks, and one that is not there"""
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(TypeError):
        fix_mask_conflict(Path(tmp_path / "list.pt"), Sum(), noise(4, 3))
    with pytest.raises(FileNotFoundError):
        fix_mask_conflict(tmp_path / "none.pt", Sum(), noise(4, 3))


def bits(n):
    """Which filters are kept"""
    return st.lists(st.booleans(), min_size=n, max_size=n)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(a=bits(6), inner=bits(5), back=bits(6))
def test_only_what_is_needed_comes_back(a, inner, back):
    """On a residual net the kept channels are the union, the free layer is as it was, and fixing twice is fixing once"""
    torch.manual_seed(0)
    net, x = Sum(), noise(4, 3)
    assume(any(a) and any(inner) and any(back))  # one filter of a layer stays in any case
    masks = {n: {"weight": rows_mask(net.get_submodule(n).weight, k), "bias": torch.tensor(k)} for n, k in (("a", a), ("inner", inner), ("back", back))}
    fixed = fix_mask_conflict(masks, net, x)
    union = [p or q for p, q in zip(a, back, strict=True)]
    for n, keep in (("a", union), ("inner", inner), ("back", union)):
        assert kept(fixed[n]).tolist() == keep and fixed[n]["bias"].tolist() == keep
        assert (fixed[n]["weight"] >= masks[n]["weight"]).all()
    assert_equal(fix_mask_conflict(fixed, net, x), fixed)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(keep=bits(12), groups=st.sampled_from([2, 3, 4, 6]))
def test_grouped_masks_lose_as_many_everywhere(keep, groups):
    """The fullest group says how many stay; what was kept stays; the strongest of the others come back"""
    assume(any(keep))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(12, 12, 1, groups=groups), nn.Conv1d(12, 2, 1))
    mask = {"weight": rows_mask(net[0].weight, keep), "bias": torch.tensor(keep)}
    fixed = fix_mask_conflict({"0": mask}, net, noise(2, 12, 3))["0"]
    was, now = torch.tensor(keep).view(groups, -1), kept(fixed).view(groups, -1)
    assert now[was].all() and (now.sum(1) == was.sum(1).max()).all()
    assert torch.equal(fixed["bias"], kept(fixed))
    size = net[0].weight.detach().flatten(1).norm(dim=1).view(groups, -1)
    for g in range(groups):
        back, gone = size[g][now[g] & ~was[g]], size[g][~now[g]]
        assert not len(back) or not len(gone) or back.min() >= gone.max()


def test_graph_can_be_asked_twice():
    """Trials do not wear the graph out"""
    torch.manual_seed(0)
    net, x = Sum(), noise(4, 3)
    graph = Graph(net, x)
    first = without(graph, graph.parts(net.a, [1, 4]))
    without(graph, graph.parts(net.inner, [0]))
    assert torch.equal(without(graph, graph.parts(net.a, [1, 4]))[0], first[0])


def test_something_of_every_layer_and_all_of_the_output_stays():
    """Masks that drop everything keep the largest filter, a bias that is kept keeps its channel, and the output layer keeps all"""
    net = Sum()
    dropped = {n: {"weight": torch.zeros_like(net.get_submodule(n).weight), "bias": torch.zeros(net.get_submodule(n).out_features)} for n in ("a", "inner", "back", "head")}
    fixed = fix_mask_conflict(dropped, net, noise(4, 3))
    assert int(fixed["inner"]["bias"].sum()) == 1 and fixed["inner"]["bias"].argmax() == net.inner.weight.norm(dim=1).argmax()
    assert fixed["a"]["bias"].any() and torch.equal(fixed["a"]["bias"], fixed["back"]["bias"])
    assert fixed["head"]["weight"].all() and fixed["head"]["bias"].all()
    dropped["inner"]["bias"][3] = 1
    assert fix_mask_conflict({"inner": dropped["inner"]}, net, noise(4, 3))["inner"]["bias"].tolist() == [0, 0, 0, 1, 0]


class InTraining(nn.Module):
    """A head that only training sees"""

    def __init__(self, returned):
        super().__init__()
        self.a, self.bn, self.o, self.aux, self.returned = Linear(4, 8), nn.BatchNorm1d(8), Linear(8, 3), Linear(8, 2), returned

    def forward(self, x):
        y = self.bn(self.a(x)).relu()
        if not self.training:
            return self.o(y)
        return self.o(y), y if self.returned else self.aux(y)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("returned", [True, False])
def test_what_only_training_reads_is_seen(returned, n):
    """Channels that a head reads, or the model returns, in training mode alone"""
    model, x = InTraining(returned), noise(n, 4)
    before = fingerprint(model)
    reasons = not_safe_to_prune(model, x).reasons
    assert ("output of the model" if returned else "does not run") in reasons["a"]
    assert changes(before, fingerprint(model)) == []


def test_a_parametrized_reader_is_named():
    """With the way out"""
    net = nn.Sequential(Linear(4, 6), nn.ReLU(), nn.utils.parametrizations.weight_norm(Linear(6, 3)))
    assert "weight of 2, which goes with it, is computed by a parametrization" in not_safe_to_prune(net, noise(2, 4)).reasons["0"]


def test_layers_whose_dependence_is_unknown_are_listed():
    """A set of one that says nothing"""
    dependency = ChannelDependency(Net(lambda m, x: m.b(F.linear(x, m.a.weight)), a=Linear(4, 6), b=Linear(6, 2)), noise(2, 4))
    assert list(dependency.unknown) == ["a"] and "cannot be followed" in dependency.unknown["a"]


def test_frozen_batch_norm_and_rms_norm_lose_channels():
    """Norms that torch-pruning has no rule for; everything is put back"""
    torch.manual_seed(0)
    backbone = tv.resnet18(num_classes=4, norm_layer=torchvision.ops.FrozenBatchNorm2d).eval()
    for m in backbone.modules():
        if isinstance(m, torchvision.ops.FrozenBatchNorm2d):
            m.running_var.uniform_(0.5, 1.5)
    rms = nn.Sequential(Linear(4, 8), nn.RMSNorm(8), Linear(8, 6), nn.ReLU(), Linear(6, 2))
    for model, x, safe in ((backbone, image(32, 2), 20), (rms, noise(3, 4), 2)):
        before, groups = fingerprint(model), channel_groups(model, x)
        assert sum(len(g.units) for g in groups if not g.reason) == safe
        assert changes(before, fingerprint(model)) == []
        g = groups[0]
        with leave_no_trace(model, weights=()):
            g.graph.remove(g.parts_of(g.granules[:3]))
            assert run(model, x)[0].isfinite().all()
        assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("how", ["wrapped", "in_place"])
def test_a_compiled_model_is_followed_as_it_was_written(how):
    """Its layers are seen, though a compiler stands between"""
    net = nn.Sequential(Conv(3, 8, 1), nn.ReLU(), Conv(8, 6, 1), nn.ReLU(), Conv(6, 2, 1)).eval()
    model = torch.compile(net, backend="eager") if how == "wrapped" else net
    if how == "in_place":
        net.compile(backend="eager")
    assert [not g.reason for g in channel_groups(model, image(4, 2))] == [True, True, False]


# ---- masks: no more than must be kept, and inputs that are dropped


def dropped(groups, masks):
    """For each group the channels of its root that all its layers drop, each layer on its own"""
    found = {}
    for g in groups:
        for u in g.units:
            if u.name in masks:
                rows = filters_first(u.module, masks[u.name] if isinstance(masks[u.name], torch.Tensor) else masks[u.name]["weight"])
                gone = ~rows.flatten(1).bool().any(1)
                found.setdefault(g.name, {})[u.name] = {int(c) for c in channel_of(g, u)[gone]}
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_resnext_keeps_three_quarters(seed):
    """Masks that leave at most three of four channels in each of 32 groups, anywhere in them: three stay, not four"""
    torch.manual_seed(seed)
    model, x = resnext(num_classes=3), image(32)
    masks = {}
    for n, m in model.named_modules():
        if n.startswith("layer1") and n.endswith(("conv1", "conv2")):
            keep = torch.rand(32, 4).argsort(1) < torch.randint(2, 4, (32, 1))
            keep[0] = torch.tensor([True, True, True, False])
            masks[n] = rows_mask(m.weight, keep.flatten())
    fixed = fix_mask_conflict(masks, model, x)
    assert len(fixed) == 2
    for n, mask in fixed.items():
        assert kept(mask)[kept(masks[n])].all()
        assert kept(mask).view(32, 4).sum(1).tolist() == [3] * 32
        assert not torch.equal(kept(mask), torch.tensor([True, True, True, False]).repeat(32)), "no other pattern than the masks'"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(keep=bits(12), reader=st.sampled_from([2, 3, 4, 6]), norm=st.sampled_from([1, 2]), transposed=st.booleans())
def test_grouped_readers_lose_as_many_everywhere(keep, reader, norm, transposed):
    """What a grouped convolution reads, behind a group norm: as few as possible stay, all ranges lose as many, and it can be cut"""
    assume(any(keep))
    torch.manual_seed(0)
    conv = nn.ConvTranspose1d if transposed else nn.Conv1d
    net = nn.Sequential(nn.Conv1d(3, 12, 1), nn.GroupNorm(norm, 12), conv(12, 12, 1, groups=reader), nn.Conv1d(12, 2, 1))
    fixed = fix_mask_conflict({"0": rows_mask(net[0].weight, keep)}, net, noise(2, 3, 5))
    was, now = torch.tensor(keep), kept(fixed["0"])
    assert now[was].all()
    ranges = math.lcm(reader, norm)
    assert now.view(ranges, -1).sum(1).tolist() == [int(was.view(ranges, -1).sum(1).max())] * ranges
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the norm, which has fewer to average over
        cut_by_masks(net, fixed, noise(2, 3, 5))
    assert net[0].out_channels == net[2].in_channels == int(now.sum())
    assert net(noise(2, 3, 5)).shape == (2, 2, 5)


class Fork(nn.Module):
    """One layer, two that read it, one that reads the input too"""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.head = Linear(3, 6), Linear(6, 4), Linear(6, 4), Linear(3, 4), Linear(4, 2)

    def forward(self, x):
        """A sum of three"""
        h = self.a(x).relu()
        return self.head((self.b(h) * self.c(h) + self.d(x)).relu())


def columns_mask(weight, keep):
    """A mask with whole inputs"""
    return torch.as_tensor(keep).view(1, -1).expand_as(weight).float().clone()


def test_readers_that_disagree_are_mended():
    """An input goes if all its readers have dropped it; the others come back, also those of the model's own input"""
    torch.manual_seed(0)
    net, x = Fork(), noise(5, 3)
    masks = {"b": columns_mask(net.b.weight, [1, 0, 0, 1, 1, 0]), "c": columns_mask(net.c.weight, [1, 1, 0, 0, 1, 0]), "d": columns_mask(net.d.weight, [1, 0, 1])}
    copied = copy.deepcopy(masks)
    fixed = fix_mask_conflict(masks, net, x)
    assert_equal(masks, copied)
    for n in "bc":
        assert torch.equal(fixed[n], columns_mask(net.b.weight, [1, 1, 0, 1, 1, 0]))
    assert fixed["d"].all()
    assert_equal(fix_mask_conflict(fixed, net, x), fixed)
    alone = fix_mask_conflict({"b": masks["b"]}, net, x)
    assert alone["b"].all(), "the other reader drops nothing"
    makers = fix_mask_conflict({"a": torch.ones(6, 3), "b": masks["b"], "c": masks["c"]}, net, x)
    assert kept(makers["a"]).tolist() == [True, True, False, True, True, False]
    masked = copy.deepcopy(net)
    for n, m in fixed.items():
        masked.get_submodule(n).weight.data *= m
    (told,) = run(masked, x)
    cut_by_masks(net, fixed, x)
    assert (net.a.out_features, net.b.in_features, net.c.in_features, net.d.in_features) == (4, 4, 4, 3)
    torch.testing.assert_close(run(net, x)[0], told)


def test_inputs_of_grouped_and_flattened_readers():
    """A grouped convolution loses an input in each of its groups or none; a flattened channel goes with all its positions or not at all"""
    torch.manual_seed(0)
    net, x = nn.Sequential(Conv(3, 8, 1), nn.ReLU(), Conv(8, 8, 1, groups=2), nn.Flatten(), Linear(32, 2)), noise(2, 3, 2, 2)
    inputs = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1]).bool()
    mask = inputs.view(2, 1, 4).expand(2, 4, 4).reshape(8, 4, 1, 1).float()
    assert fix_mask_conflict({"2": mask}, net, x)["2"].all(), "one group loses nothing"
    both = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0]).bool().view(2, 1, 4).expand(2, 4, 4).reshape(8, 4, 1, 1).float()
    assert torch.equal(fix_mask_conflict({"2": both}, net, x)["2"], both)
    read = torch.ones(32, dtype=torch.bool)
    read[4:8] = read[16:20] = False
    read[9] = False
    fixed = fix_mask_conflict({"4": columns_mask(net[4].weight, read)}, net, x)["4"]
    assert [i for i, k in enumerate(fixed[0].tolist()) if not k] == [4, 5, 6, 7, 16, 17, 18, 19]


def test_two_names_of_one_weight_have_one_mask():
    """What one of them drops, the other cannot keep"""
    net = Net(lambda m, x: m.head(m.a(x) + m.b(x)), a=Linear(3, 6), b=Linear(3, 6), head=Linear(6, 2))
    net.b.weight = net.a.weight
    mask = rows_mask(net.a.weight, [1, 0, 1, 1, 0, 1])
    with pytest.raises(ValueError, match="but their masks differ"):
        fix_mask_conflict({"a": mask, "b": torch.ones(6, 3)}, net, noise(4, 3))
    assert_equal(fix_mask_conflict({"a": mask, "b": mask}, net, noise(4, 3)), {"a": mask, "b": mask})


def test_a_norm_with_a_mask_takes_part():
    """What it keeps, stays; what goes, goes there as well"""
    torch.manual_seed(0)
    net, x = nn.Sequential(Conv(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), Conv(6, 2, 1)), noise(2, 3, 4, 4)
    conv, norm = rows_mask(net[0].weight, [1, 0, 0, 1, 1, 0]), torch.tensor([0.0, 0, 1, 1, 1, 0])
    fixed = fix_mask_conflict({"0": conv, "1": {"weight": norm, "bias": norm}}, net, x)
    assert kept(fixed["0"]).int().tolist() == fixed["1"]["weight"].tolist() == fixed["1"]["bias"].tolist() == [1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("name", [n for n in ZOO if ZOO[n]().safe is not None and not any(r is None for r in ZOO[n]().safe.values())])
def test_random_masks_can_be_cut_out(name):
    """Coupled layers drop the same channels, and cutting equals masking with what goes muted where it is read"""
    c = fresh(name)
    groups = channel_groups(c.model, c.sample)
    torch.manual_seed(1)
    masks = {}
    for u in (u for g in groups for u in g.units):
        keep = torch.rand(len(u.filters)) < 0.6
        masks[u.name] = filters_first(u.module, rows_mask(u.filters, keep)).contiguous()
    fixed = fix_mask_conflict(masks, c.model, c.sample)
    assert_equal(fix_mask_conflict(fixed, c.model, c.sample), fixed)
    by_layer = dropped(groups, fixed)
    masked = copy.deepcopy(c.model)
    weights = {u.name: u.weight for u in all_units(masked)[0]}
    for n, mask in fixed.items():
        weights[n].data *= mask
    for n, g in {g.name: g for g in groups}.items():
        if n not in c.safe:
            assert not any(by_layer[n].values()), "a layer that cannot lose channels keeps all"
            continue
        gone = set().union(*by_layer[n].values())
        for u in g.units:
            assert by_layer[n][u.name] == gone & set(channel_of(g, u).tolist()), "coupled layers have dropped the same channels"
        for part in g.parts_of([sorted(gone)]) if n in c.source else ():
            if part.out:
                zero(masked, g.graph.name_of(part), part.idxs)
        for reader, columns in c.safe[n].items():
            mute(masked.get_submodule(reader), {i for ch in gone for i in columns(ch)})
    told = run(masked, c.sample)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what norms and biases sent
        cut_by_masks(c.model, fixed, c.sample)
    loose = told[0].dtype == torch.bfloat16
    for t, o in zip(run(c.model, c.sample), told, strict=True):
        torch.testing.assert_close(t, o, rtol=0.1 if loose else 1e-4, atol=0.05 if loose else 1e-5)
