"""What several test files build on: a small network from a function, and the versions of fasterai to compare with."""
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

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


def lively(model):
    """The model with statistics, scales and biases that are not 0 and 1"""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean.uniform_(-0.2, 0.2)
            m.running_var.uniform_(0.5, 1.5)
            m.weight.data.uniform_(0.5, 1.5)
            m.bias.data.uniform_(-0.3, 0.3)
        elif getattr(m, "bias", None) is not None:
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
