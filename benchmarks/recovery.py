"""Compression in stages against one shot with the same total number of epochs, on images that no plan has seen.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/recovery.py [--models resnet18 mobilenet_v2] [--seeds 0 1 2] [--lr 1e-3] [--epochs 1] [--stages 20 40 60 80 90 95] [--plans uniform sweep]

Each model is trained on scikit-learn's digits, once for each seed. `stages` makes it sparse in all stages, with `--epochs` of fine-tuning after each; `one shot` makes the same trained model sparse at once, and
fine-tunes it for as many epochs as the stages took up to there, in one cycle. Both are `gradual_degradation_recovery`, the second with one stage; both hold the zeros. The plan is the same for all layers, or solved
from a sweep by KL divergence on 297 images. The score is accuracy on 300 other images, for the stages named in `--at`.
"""
import argparse
import warnings
from time import perf_counter

import pandas as pd
import torchvision
from fastai.torch_core import set_seed

from fasterai_sens import SensitivityAnalyzer, gradual_degradation_recovery, leave_no_trace
from fasterai_sens.demo import digits_learner


def accuracies(learn, stages, epochs, seed, **options):
    """Percent -> accuracy on the test images after fine-tuning; the learner comes back as it was."""
    with leave_no_trace(learn.model):
        set_seed(seed)
        learn.opt = None
        found = gradual_degradation_recovery(learn, stages, epochs=epochs, dl=learn.dls[2], verbose=False, **options)
    return {r["level"]: r["metric"] for r in found.history}


def compare(name, seed, args):
    """Rows of the table for one training."""
    start = perf_counter()
    learn = digits_learner(args.training, seed, getattr(torchvision.models, name))
    plans = {"uniform": None}
    if "sweep" in args.plans: plans["sweep"] = SensitivityAnalyzer.from_learner(learn).sweep("sparsity", (50, 75, 90, 95, 99), verbose=False)
    for plan in args.plans:
        options = dict(lr=args.lr, plan=plans[plan])
        found = {"stages": accuracies(learn, args.stages, args.epochs, seed, **options), "one shot": {}}
        for at in args.at: found["one shot"] |= accuracies(learn, [at], args.epochs*(args.stages.index(at) + 1), seed, **options)
        for how, of in found.items():
            for at in args.at: yield {"model": name, "plan": plan, "sparsity": at, "how": how, "epochs": args.epochs*(args.stages.index(at) + 1), "seed": seed, "accuracy": of[at]}
        print(f"{name}, seed {seed}, {plan}: {found}; {perf_counter() - start:.0f} s", flush=True)


def table(rows):
    """A row each for stages and one shot: mean, standard deviation and least over the seeds, then each seed."""
    t = pd.DataFrame(rows).pivot(index=["model", "plan", "sparsity", "epochs", "how"], columns="seed", values="accuracy")
    return pd.concat([pd.DataFrame({"mean": t.mean(axis=1), "std": t.std(axis=1), "least": t.min(axis=1)}), t.add_prefix("seed ")], axis=1)


def main():
    """Train, compress both ways, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet18", "mobilenet_v2"], help="of torchvision, called with num_classes=10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--training", type=int, default=5, help="epochs of training before")
    parser.add_argument("--stages", type=float, nargs="+", default=[20., 40., 60., 80., 90., 95.], help="percent")
    parser.add_argument("--at", type=float, nargs="+", default=[90., 95.], help="the stages to compare at, percent")
    parser.add_argument("--epochs", type=int, default=1, help="of fine-tuning after each stage")
    parser.add_argument("--lr", type=float, default=1e-3, help="largest learning rate of each one-cycle")
    parser.add_argument("--plans", nargs="+", default=["uniform", "sweep"], choices=["uniform", "sweep"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [r for name in args.models for seed in args.seeds for r in compare(name, seed, args)]
    print(f"\naccuracy on 300 held-out images, lr {args.lr:g}\n\n{table(rows).to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
