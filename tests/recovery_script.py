"""Compression in stages with a journal, in a process that may be killed: `python recovery_script.py METHOD JOURNAL FITS RESULT SEED`."""
import sys
from pathlib import Path

import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import TensorDataset

from fasterai_sens import gradual_degradation_recovery
from fasterai_sens.core.journal import digest_of


def network():
    """A network with batch norm and dropout, so that statistics and random numbers count"""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(.2), nn.Linear(8, 3))


def learner(seed=0, n=64):
    """A quiet Learner: weights and data are always the same, the random numbers that follow are not"""
    set_seed(0)
    x, y = torch.randn(96, 1, 8, 8), torch.randint(3, (96,))
    x += y[:, None, None, None]
    model = network()
    set_seed(seed)
    sets = TensorDataset(x[:n], y[:n]), TensorDataset(x[64:], y[64:])
    dls = DataLoaders.from_dsets(*sets, bs=16, device="cpu", num_workers=0)
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    return learn


class Marks(Callback):
    """A byte in a file for each batch that is trained on"""
    def __init__(self, path): self.path = path
    def after_batch(self):
        if self.training:
            with open(self.path, "a") as f: f.write(".")


def run(method, journal, fits, seed=0, cbs=(), **options):
    """The stages; what was recorded but for the seconds, and the weights that the model was left with"""
    learn = learner(seed)
    options = dict(stages=(25, 50, 60, 75), epochs=2, lr=1e-2) | options
    found = gradual_degradation_recovery(learn, compression=method, verbose=False, journal=journal, cbs=[Marks(fits), *cbs], **options).as_dict()
    for row in found["history"]: del row["seconds"]
    return repr((found, digest_of(learn.model.state_dict()), digest_of([torch.rand(3)])))


if __name__ == "__main__":
    method, journal, fits, result, seed = sys.argv[1:6]
    found = run(method, journal, fits, int(seed))
    Path(result).write_text(found)
