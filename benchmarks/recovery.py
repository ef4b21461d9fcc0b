"""Sparsity in stages against one shot with the same total number of epochs, on images that no plan has seen.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/recovery.py [--models small resnet18] [--seeds 0 1 2] [--stages 40 60 80 90 95] [--at 90 95] [--epochs 2] [--lr 1e-3] [--plans uniform sweep]

Each model is trained on scikit-learn's digits, once for each seed; `small` has four convolutions, other names are torchvision's. `stages` makes it sparse in all stages, with `--epochs` of fine-tuning after each; `one shot` makes the
same trained model as sparse as a stage in `--at` at once, and fine-tunes it in one cycle for as many epochs as the stages took up to there. Both are `gradual_degradation_recovery`, the second with one stage. The plan is the
same for all layers, or solved from a sweep by KL divergence on 297 images. The score is accuracy on 300 other images: `as it is`, and `recalibrated`, with batch-norm statistics estimated anew on the training images.
"""
import argparse
import warnings
from time import perf_counter

import pandas as pd
import torch
import torchvision
from fastai.callback.core import Callback
from fastai.torch_core import set_seed
from torch import nn

from fasterai_sens import Recalibrated, SensitivityAnalyzer, gradual_degradation_recovery, leave_no_trace
from fasterai_sens.show.demo import digits_learner


def small(num_classes):
    """Four convolutions with batch norm and a linear layer, 241 thousand weights."""
    layers = [m for a, b, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 2)) for m in (nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


def trained(name, seed, epochs):
    """A Learner that reads its data without worker processes, which cost more than the data."""
    learn = digits_learner(0, seed, small if name == "small" else getattr(torchvision.models, name))
    for dl in learn.dls.loaders: dl.fake_l.num_workers = 0
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, 5e-3)
    return learn


class Rescore(Callback):
    """Keeps the accuracy with batch-norm statistics estimated anew, at the end of each fit."""

    def __init__(self):
        self.scores = []

    def after_fit(self):
        if hasattr(self.learn, "gather_preds"): return
        x, y = self.dls[2].dataset.tensors
        with Recalibrated([b[0] for b in self.dls.train])(self.learn.model), torch.no_grad():
            self.scores.append((self.learn.model.eval()(x).argmax(1) == y).float().mean().item())


def accuracies(learn, stages, epochs, seed, **options):
    """Percent -> accuracy on the test images after fine-tuning, as it is and recalibrated; the learner comes back as it was."""
    with leave_no_trace(learn.model):
        set_seed(seed)
        learn.opt, cb = None, Rescore()
        found = gradual_degradation_recovery(learn, stages, epochs=epochs, dl=learn.dls[2], verbose=False, cbs=cb, **options)
    return {r["level"]: (r["metric"], again) for r, again in zip(found.history, cb.scores, strict=True)}


def compare(name, seed, args):
    """Rows of the table for one training."""
    start, learn = perf_counter(), trained(name, seed, args.training)
    plans = {"uniform": None}
    if "sweep" in args.plans: plans["sweep"] = SensitivityAnalyzer.from_learner(learn).sweep("sparsity", (50, 75, 90, 95, 99), verbose=False)
    each = args.epochs*len(args.stages) if len(args.epochs) == 1 else args.epochs
    spent = {at: sum(each[:args.stages.index(at) + 1]) for at in args.at}
    for plan in args.plans:
        found = {"stages": accuracies(learn, args.stages, each, seed, lr=args.lr, plan=plans[plan]), "one shot": {}}
        for at in args.at: found["one shot"] |= accuracies(learn, [at], spent[at], seed, lr=args.lr, plan=plans[plan])
        print(f"{name}, seed {seed}, {plan}, {perf_counter() - start:.0f} s: {found}", flush=True)
        for how, at in ((h, a) for h in found for a in args.at):
            plain, again = found[how][at]
            yield {"model": name, "plan": plan, "sparsity": at, "epochs": spent[at], "how": how, "seed": seed, "as it is": plain, "recalibrated": again}


def table(rows):
    """A row for stages and one for one shot: mean and standard deviation over the seeds, then each seed."""
    scores = ["as it is", "recalibrated"]
    t = pd.DataFrame(rows).pivot(index=["model", "plan", "sparsity", "epochs", "how"], columns="seed", values=scores)
    return pd.concat({k: pd.concat([pd.DataFrame({"mean": t[k].mean(axis=1), "std": t[k].std(axis=1)}), t[k].add_prefix("seed ")], axis=1) for k in scores}, axis=1)


def main():
    """Train, make sparse both ways, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["small", "resnet18"], help="`small`, or of torchvision, called with num_classes=10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--training", type=int, default=5, help="epochs of training before")
    parser.add_argument("--stages", type=float, nargs="+", default=[40., 60., 80., 90., 95.], help="percent")
    parser.add_argument("--at", type=float, nargs="+", default=[90., 95.], help="the stages to compare at, percent")
    parser.add_argument("--epochs", type=int, nargs="+", default=[2], help="of fine-tuning after each stage: one number, or one a stage")
    parser.add_argument("--lr", type=float, default=1e-3, help="largest learning rate of each one-cycle")
    parser.add_argument("--plans", nargs="+", default=["uniform", "sweep"], choices=["uniform", "sweep"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [r for name in args.models for seed in args.seeds for r in compare(name, seed, args)]
    print(f"\naccuracy on 300 held-out images, {' '.join(map(str, args.epochs))} epochs a stage, lr {args.lr:g}\n\n{table(rows).to_string(float_format=lambda v: f'{v:.3f}')}")


if __name__ == "__main__":
    main()
