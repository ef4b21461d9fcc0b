"""Every classification family of torchvision: what is measured, what can be pruned, and what is refused for which reason.

`python tests/test_families.py` prints what was found as a Markdown table.
"""

import math
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
from torchvision.models.maxvit import MaxVit
from torchvision.models.resnet import Bottleneck

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.core.fingerprint import changes, fingerprint

# words of the reasons, and what they mean in a table
OUTPUT = "are the output of the model"
UNFOLLOWED = "cannot be followed"
STUCK = "the model does not run"
ENDLESS = "does not come to an end"
MOVED = "are moved or mixed"
TIED = "tied to each other in no regular pattern"
TOO_FEW = "the smallest set that can go is all of them"
BROKEN = "torch-pruning breaks on"
MORE, UNREAD = "follows more channels", "read by no layer"
UNTRACEABLE = "torch-pruning cannot trace"
SHORT = {
    OUTPUT: "the output layer",
    UNFOLLOWED: "used as a bare weight, or not used",
    STUCK: "the model does not run with fewer channels there",
    ENDLESS: "torch-pruning's search for coupled layers has no end",
    MOVED: "channels change places on the way",
    TIED: "channels tied in no regular pattern",
    TOO_FEW: "all channels or none",
    MORE: "torch-pruning loses track of them",
    UNREAD: "torch-pruning loses track of them",
    BROKEN: "torch-pruning breaks on it",
    UNTRACEABLE: "torch-pruning cannot trace the model",
}


@dataclass(frozen=True)
class Family:
    """The smallest member of a family, and what is known about it"""

    member: str
    layers: int  # compressible ones
    prunable: int  # of these, those of which channels can be removed
    refused: dict = field(default_factory=lambda: {OUTPUT: 1})  # reason -> layers, for all the others
    size: int = 32  # of the input
    options: dict = field(default_factory=dict)
    make: object = None  # instead of the builder, for a member that cannot be built for small inputs
    narrow: object = None  # the same layers with fewer channels, for a member whose weights take most of the time


def small_maxvit(**kwargs):
    """`maxvit_t` layer by layer, with windows of 2 x 2 instead of 7 x 7: only so it runs on less than 224 pixels"""
    sizes = dict(stem_channels=64, block_channels=[64, 128, 256, 512], block_layers=[2, 2, 5, 2], head_dim=32, stochastic_depth_prob=0.2)
    return MaxVit(input_size=(64, 64), partition_size=2, **sizes, **kwargs)


def small_classifier(builder, hidden=64):
    """A builder of the same network with fewer hidden units in its classifier, which has nine tenths of the weights"""

    def make(num_classes, **options):
        with torch.device("meta"):
            model = builder(num_classes=num_classes, **options)
        places = [i for i, m in enumerate(model.classifier) if isinstance(m, nn.Linear)]
        sizes = [model.classifier[places[0]].in_features, hidden, hidden, num_classes]
        for i, n_in, n_out in zip(places, sizes, sizes[1:], strict=False):
            model.classifier[i] = nn.Linear(n_in, n_out, device="meta")
        model.to_empty(device="cpu")
        for m in model.modules():
            if hasattr(m, "reset_parameters"):
                m.reset_parameters()
        return model

    return make


def narrow_vit(num_classes, image_size):
    """`vit_b_16` with 64 instead of 768 channels"""
    return models.VisionTransformer(image_size, 16, 12, 4, 64, 128, num_classes=num_classes)


def narrow_efficientnet_v2(num_classes):
    """`efficientnet_v2_s` with a third of the channels"""
    fused = [(1, 3, 1, 8, 8, 2), (4, 3, 2, 8, 16, 4), (4, 3, 2, 16, 24, 4)]
    plain = [(4, 3, 2, 24, 40, 6), (6, 3, 1, 40, 56, 9), (6, 3, 2, 56, 88, 15)]
    blocks = [FusedMBConvConfig(*b) for b in fused] + [MBConvConfig(*b) for b in plain]
    return EfficientNet(blocks, 0.2, num_classes=num_classes, norm_layer=partial(nn.BatchNorm2d, eps=1e-3), last_channel=320)


def narrow_convnext(num_classes):
    """`convnext_tiny` with a quarter of the channels"""
    blocks = [CNBlockConfig(24, 48, 3), CNBlockConfig(48, 96, 3), CNBlockConfig(96, 192, 9), CNBlockConfig(192, None, 3)]
    return models.ConvNeXt(blocks, 0.1, num_classes=num_classes)


# other members by their own classes, with a quarter of the channels
narrow_swin = partial(models.SwinTransformer, patch_size=[4, 4], embed_dim=24, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=[7, 7])
narrow_densenet = partial(models.DenseNet, 8, (6, 12, 24, 16), 16)
narrow_wide_resnet = partial(models.ResNet, Bottleneck, [3, 4, 6, 3], width_per_group=32)


FAST_START = dict(init_weights=False)  # torch's own initial weights, which are drawn faster
FAMILIES = {
    "alexnet": Family("alexnet", 8, 7, size=63, narrow=small_classifier(models.alexnet)),
    "convnext": Family("convnext_tiny", 59, 58, narrow=narrow_convnext),
    "densenet": Family("densenet121", 121, 120, narrow=narrow_densenet),
    "efficientnet": Family("efficientnet_b0", 82, 81),
    "efficientnet_v2": Family("efficientnet_v2_s", 171, 170, narrow=narrow_efficientnet_v2),
    "googlenet": Family("googlenet", 64, 49, {OUTPUT: 1, UNFOLLOWED: 6, STUCK: 8}, options=FAST_START),
    "inception": Family("inception_v3", 98, 94, {OUTPUT: 1, UNFOLLOWED: 3}, size=75, options=FAST_START),
    "maxvit": Family("maxvit_t", 151, 69, {OUTPUT: 1, STUCK: 59, MORE: 22}, size=64, make=small_maxvit),
    "mnasnet": Family("mnasnet0_5", 53, 52),
    "mobilenet_v2": Family("mobilenet_v2", 53, 52),
    "mobilenet_v3": Family("mobilenet_v3_small", 54, 53),
    "regnet_x": Family("regnet_x_400mf", 72, 71),
    "regnet_y": Family("regnet_y_400mf", 86, 85),
    "resnet": Family("resnet18", 21, 20),
    "resnext": Family("resnext50_32x4d", 54, 53),
    "shufflenet_v2": Family("shufflenet_v2_x0_5", 57, 0, {UNTRACEABLE: 57}),
    "squeezenet": Family("squeezenet1_1", 26, 25),
    "swin": Family("swin_t", 53, 12, {OUTPUT: 1, UNFOLLOWED: 24, MORE: 16}, narrow=narrow_swin),
    "swin_v2": Family("swin_v2_t", 77, 24, {OUTPUT: 1, UNFOLLOWED: 24, MORE: 23, ENDLESS: 5}),
    "vgg": Family("vgg11", 11, 10, options=FAST_START, narrow=small_classifier(models.vgg11)),
    "vgg_bn": Family("vgg11_bn", 11, 10, options=FAST_START, narrow=small_classifier(models.vgg11_bn)),
    "vit": Family("vit_b_16", 50, 12, {OUTPUT: 1, STUCK: 37}, options=dict(image_size=32), narrow=narrow_vit),
    "wide_resnet": Family("wide_resnet50_2", 54, 53, narrow=narrow_wide_resnet),
}


def family_of(name):
    """The family in the table that a model of torchvision is of, or None"""
    if name.startswith("vgg") and name.endswith("_bn"):
        return "vgg_bn"
    return max((f for f in FAMILIES if name.startswith(f)), key=len, default=None)


def build(family, as_published=False):
    """The member, or its narrow version, with random weights, statistics that are not 0 and 1, and two inputs"""
    torch.manual_seed(0)
    make = family.make or models.get_model_builder(family.member)
    if family.narrow and not as_published:
        make = family.narrow
    model = make(num_classes=10, **family.options).eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
            m.weight.data.uniform_(0.5, 1.5)
        elif isinstance(getattr(m, "layer_scale", None), nn.Parameter):
            m.layer_scale.data.uniform_(0.5, 1.5)  # an untrained ConvNeXt starts with almost nothing, so that hardly a layer would matter
        elif isinstance(m, nn.Linear) and not m.weight.any():
            nn.init.normal_(m.weight, std=0.1)  # an untrained vision transformer says 0 to everything
    return model, torch.randn(2, 3, family.size, family.size)


def analyzer(model, x):
    """Scores each of two inputs by all the outputs"""

    @torch.no_grad()
    def scores(m):
        return m(x).double() @ torch.linspace(-1, 1, 10).double()

    return SensitivityAnalyzer(model, x, scores)


def spread(names, n=8):
    """At most `n` of the names, first and last among them"""
    n = min(n, len(names))
    return [names[round(i * (len(names) - 1) / (n - 1))] for i in range(n)]


def pruned(a):
    """Layers and prunable layers, number of layers by reason, result"""
    n = len(a.units)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Maximum recursive depth reached", UserWarning)  # torch-pruning's, about Swin
            r = a.analyze("pruning", 50, verbose=False)
    except ValueError as e:
        return n, 0, Counter({word_of(str(e)): n}), None
    reasons = dict(r.skipped)
    refused = Counter(word_of(reasons[row.name]) for row in r.layers if not row.prunable)
    return n, n - refused.total(), refused, r


def word_of(reason):
    """What is said in the reason; the reason itself if it is a new one"""
    return next((w for w in SHORT if w in reason), reason)


# ---- no family is forgotten


def test_no_family_is_missing():
    """Every classification model that torchvision has belongs to a family here"""
    known = {name: family_of(name) for name in models.list_models(module=models)}
    assert [name for name, f in known.items() if f is None] == []
    assert set(known.values()) == set(FAMILIES)


def test_no_module_is_missing():
    """A new architecture has a file of its own, whatever its name starts with"""
    modules = {models.get_model_builder(n).__module__ for n in models.list_models(module=models)}
    assert modules == {models.get_model_builder(f.member).__module__ for f in FAMILIES.values()}


def test_members_are_the_smallest():
    """By parameters, as torchvision counts them"""
    sizes = {n: models.get_model_weights(n).DEFAULT.meta["num_params"] for n in models.list_models(module=models)}
    smallest = {f: min((n for n in sizes if family_of(n) == f), key=sizes.get) for f in FAMILIES}
    assert smallest == {f: case.member for f, case in FAMILIES.items()}


# ---- what happens to them


QUICK = "resnet", "squeezenet"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FAMILIES])
def test_family(name):
    """All three methods work or say why not, and the model is bit for bit as it was"""
    family = FAMILIES[name]
    model, x = build(family)
    before = fingerprint(model)
    a = analyzer(model, x)
    names = [u.name for u in a.units]
    assert len(names) == family.layers

    for method, level in (("sparsity", 50), ("quantization", 4)):
        r = a.analyze(method, level, layers=spread(names), verbose=False)
        assert [row.name for row in r.layers] == spread(names)
        assert all(row.prunable and math.isfinite(row.delta) for row in r.layers)
        assert all(row.stderr is not None and math.isfinite(row.stderr) for row in r.layers)
        assert any(row.delta for row in r.layers)

    _, n_prunable, refused, r = pruned(a)
    if r is None:
        assert family.refused == refused
    else:
        rows, reasons = {row.name: row for row in r.layers}, dict(r.skipped)
        assert list(rows) == names, "a row for every layer, in model order"
        for n, row in rows.items():
            assert row.prunable == (n not in reasons)
            assert math.isfinite(row.delta) if row.prunable else math.isnan(row.delta) and reasons[n].strip()
            assert n in row.group_members or not row.group_members
            assert {(rows[m].group_id, rows[m].delta) for m in row.group_members if row.prunable} <= {(row.group_id, row.delta)}
        assert any(row.delta for row in r.layers if row.prunable)
        assert names[-1] in reasons, "the last layer is the output"
        assert (n_prunable, refused) == (family.prunable, family.refused)
    assert changes(before, fingerprint(model)) == []


# ---- for the documentation


def table(families=FAMILIES):
    """Measure, and print the rows as they come"""
    print("| family | member | layers | prunable layers | what is refused, and why |", "|---|---|---|---|---|", sep="\n")
    for name in families:
        n, n_prunable, refused, _ = pruned(analyzer(*build(FAMILIES[name], as_published=True)))
        why = "; ".join(f"{count}: {SHORT.get(w, w)}" for w, count in refused.most_common())
        print(f"| {name} | `{FAMILIES[name].member}`{' †' * bool(FAMILIES[name].make)} | {n} | {n_prunable} | {why} |", flush=True)
    print("", "† With windows of 2 x 2, to run on 64 pixels; the layers are the same.", sep="\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    table()
