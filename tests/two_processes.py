"""One of two processes that train the same model on the CPU, for `test_beside.py`."""

import os
import sys
import warnings
from pathlib import Path

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from test_beside import three
from test_callbacks import Net, digits, learner, snapshot
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from fasterai_sens.methods.criteria import taylor

warnings.simplefilter("ignore")
out, ways, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
torch.set_num_threads(1)


class Wrapped(Callback):
    """Wraps the model for the fit, as accelerate does."""

    order = 11

    def before_fit(self):
        self.learn.model = DistributedDataParallel(self.learn.model)

    def after_fit(self):
        self.learn.model = self.learn.model.module


class Watch(Callback):
    """Sees this process's own data, and whether gradients are those of both processes."""

    order, run_valid = 70, False

    def before_fit(self):
        self.mine, self.averaged = 0.0, []

    def before_batch(self):
        self.mine += self.x.double().sum().item()

    def before_step(self):
        for p in self.learn.model.parameters():
            both = [torch.empty_like(p.grad) for _ in range(2)]
            torch.distributed.all_gather(both, p.grad.contiguous())
            self.averaged.append(torch.equal(*both) and bool(both[0].any()))


def halves_of_the_data():
    """Training images of this process; the same ones to validate on."""
    x, y = digits()
    own = slice(rank * 160, rank * 160 + 160)
    return DataLoaders.from_dsets(TensorDataset(x[own], y[own]), TensorDataset(x[1200:1300], y[1200:1300]), bs=32, device="cpu", num_workers=0)


def all_of_the_data():
    """Images that fastai divides between the processes."""
    x, y = digits()
    return DataLoaders.from_dsets(TensorDataset(x[:320], y[:320]), TensorDataset(x[1200:1300], y[1200:1300]), bs=32, device="cpu", num_workers=0)


def fit(name, how):
    """Train with one of the callbacks, in one of the ways; what is left."""
    cb, watch = three[name](), Watch()
    if name != "quantized":
        cb.criteria = taylor
    if how == "wrapped":
        learn = learner(out, dls=halves_of_the_data, model=Net, seed=rank)
        learn.fit(2, 1e-2, cbs=[Wrapped(), cb, watch])
    else:
        learn = learner(out, dls=all_of_the_data)
        with learn.distrib_ctx(sync_bn=False, cpu=True):
            learn.fit(2, 1e-2, cbs=[cb, watch])
    return dict(state=snapshot(learn.model), kind=type(learn.model).__name__, report=cb.report, mine=watch.mine, averaged=bool(watch.averaged) and all(watch.averaged))


def broadcast(self, t, source):
    """fastai's own does the same on a GPU only."""
    t = torch.tensor(t)
    torch.distributed.broadcast(t, source)
    return t.tolist()


if ways[0] == "accelerate":  # it makes the group of processes itself
    from fastai.distributed import DistributedDL

    DistributedDL._broadcast = broadcast
else:
    torch.distributed.init_process_group("gloo")
torch.save({(how, name): fit(name, how) for how in ways for name in three}, out / f"{rank}.pth")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
