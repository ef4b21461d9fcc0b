"""What several test files build on: a small network from a function, and the versions of fasterai to compare with."""
import sys
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fasterai_sens.core.fingerprint import changes, fingerprint

peers = Path(__file__).parent.parent / ".venv" / "peers"


class Net(nn.Module):
    """Layers by name, and a function that calls them"""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = forward

    def forward(self, *args, **kwargs):
        """Whatever the function says"""
        return self.run(self, *args, **kwargs)


class NarrowResNet(ResNet):
    """torchvision's ResNet, layer by layer, with a quarter of the channels: a sixteenth of the numbers"""

    def __init__(self, block=BasicBlock, layers=(2, 2, 2, 2), **options):
        super().__init__(block, layers, **options)
        self.fc = nn.Linear(self.inplanes, self.fc.out_features)

    def _make_layer(self, block, planes, *args, **options):
        if planes == 64:
            self.inplanes = 16
            self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        return super()._make_layer(block, planes // 4, *args, **options)


# families of torchvision by their own classes: the same kinds of blocks, fewer and narrower
SHORT = dict(
    resnet18=NarrowResNet, mobilenet_v2=partial(models.mobilenet_v2, width_mult=0.35),
    densenet=partial(models.DenseNet, 16, (3, 3, 3, 3), 32), vit=partial(models.VisionTransformer, 32, 16, 3, 4, 64, 128),
    convnext=partial(models.ConvNeXt, [CNBlockConfig(24, 48, 2), CNBlockConfig(48, 96, 2), CNBlockConfig(96, None, 2)]),
    resnext=partial(ResNet, Bottleneck, [1, 1, 1, 1], groups=32, width_per_group=4),
    regnet_y=partial(models.RegNet, BlockParams.from_init_params(depth=6, w_0=16, w_a=24.0, w_m=2.0, group_width=8, se_ratio=0.25)),
    efficientnet=partial(models.EfficientNet, [MBConvConfig(*b) for b in ((1, 3, 1, 16, 16, 1), (6, 3, 2, 16, 16, 2), (6, 5, 2, 16, 24, 2))], 0.2, last_channel=64))


def three_layers():
    """Three linear layers from 8 inputs to 4 outputs, the same at each call"""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def rows(x):
    """An eval_fn that gives each row of x its first output as score"""
    def score(model):
        with torch.no_grad():
            return model(x)[:, 0]
    return score


def all_pairs(*values):
    """Rows with one value of each list: not every combination, but so many that every two values of two lists meet in a row"""
    rows = list(product(*(range(len(v)) for v in values)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    left, chosen = set().union(*pairs.values()), []
    while left:
        best = max(rows, key=lambda row: len(pairs[row] & left))
        left -= pairs[best]
        chosen.append(tuple(v[i] for v, i in zip(values, best, strict=True)))
    return chosen


def lively(model):
    """The model with statistics, scales and biases that are not 0 and 1"""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
            m.weight.data.uniform_(0.5, 1.5)
            m.bias.data.uniform_(-0.3, 0.3)
        elif isinstance(getattr(m, "bias", None), torch.Tensor):
            m.bias.data.uniform_(-0.1, 0.1)
    return model.eval()


@contextmanager
def unchanged(model):
    """Fails if the block leaves a trace on the model"""
    before = fingerprint(model)
    yield
    assert not changes(before, fingerprint(model))


def folder_of(version):
    """Where one version of fasterai was installed; the test fails if it was not."""
    folder = peers / f"fasterai-{version}"
    if not (folder / "fasterai" / "__init__.py").exists():
        pytest.fail(f"fasterai {version} is not in .venv/peers; run `make peers`", pytrace=False)
    return folder


def forget_fasterai():
    """Take every module of `fasterai` out of `sys.modules`."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "fasterai"}


@contextmanager
def peer(version):
    """In the block, the function given imports modules of one version of fasterai; after it, imports find what they found before."""
    folder, path, held = folder_of(version), sys.path.copy(), forget_fasterai()
    sys.path.insert(0, str(folder))
    try:
        yield lambda name: import_module(f"fasterai.{name}")
    finally:
        sys.path[:] = path
        forget_fasterai()
        sys.modules.update(held)
