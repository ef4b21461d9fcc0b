"""Every plan for sparsity side by side, in one shot, on images that no plan has seen.

    .venv/bin/python benchmarks/plans.py [--seeds 0 1 2] [--sparsities 80] [--recalibrate] [--images 300] [--evaluations N]

ResNet-18 is trained on scikit-learn's digits, once for each seed. Plans that need measuring see the loss on `--images` training images: `classic` is the inverse-sensitivity rule
from one level (the last below the target), `curves` lets every layer go to one common damage, `knapsack` is the best choice of measured levels (14 levels a layer), and
`search` is `search_targets`. The score is accuracy on 597 held-out images, right after the weights are dropped. With `--recalibrate`, batch-norm statistics are
estimated anew on 300 other training images: before each evaluation of the search, and before every score.
"""
import argparse
import warnings
from time import perf_counter

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from fasterai_sens import LayerTargets, SensitivityAnalyzer, Sparsifier, erk, global_magnitude, lamp, leave_no_trace, search_targets, uniform
from fasterai_sens.demo import digits, digits_learner
from fasterai_sens.layers import find_units
from fasterai_sens.results import damage
from fasterai_sens.search import reestimate_norms
from fasterai_sens.targets import choose, shift_to_mean

levels = (10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 95, 97, 99)


def data(n):
    """`n` training images with labels to measure on, 300 others to recalibrate with, 597 held-out ones with labels."""
    train, *held_out = (d.tensors for d in digits())
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(1))
    return [t[order[-n:]] for t in train], train[0][order[:300]], [torch.cat(t) for t in zip(*held_out, strict=True)]


def knapsack(model, sweep, pct):
    """The choice of measured levels with the least sum of damages, shifted up to the exact mean."""
    units = find_units(model)[0]
    weights = np.array([u.weight.numel() for u in units], float)
    rows = [{0: 0.} | {level: damage(r) for level, r in sweep.rows(u.name).items()} for u in units]
    picked = choose([list(r.values()) for r in rows], {"kept": [[w*(100 - p) for p in r] for r, w in zip(rows, weights, strict=True)]}, {"kept": weights.sum()*(100 - pct)}, gap=1e-4)
    raw = np.array([list(r)[i] for r, i in zip(rows, picked, strict=True)], float)
    return LayerTargets({u.name: float(p) for u, p in zip(units, shift_to_mean(raw, weights, pct, 0, 100), strict=True)})


def all_plans(model, sweep, searched, pct):
    """Name -> targets with the mean `pct`."""
    one = max((r for r in sweep if r.compression_level < pct), key=lambda r: r.compression_level)
    return {"uniform": uniform(model, pct), "global magnitude": global_magnitude(model, pct), "classic": one.to_layer_targets(model, pct, max_pct=99), "erk": erk(model, pct), "lamp": lamp(model, pct),
            "curves": sweep.to_layer_targets(model, pct, max_pct=99), "knapsack": knapsack(model, sweep, pct), "search": searched.plans["search"]}  # fmt: skip


def compare(seed, sparsities, recalibrate, images, evaluations):
    """Rows of the table for one training."""
    model = digits_learner(5, seed).model.eval()
    (x, y), calibration, (held_x, held_y) = data(images)

    @torch.inference_mode()
    def loss(m): return F.cross_entropy(m(x), y, reduction="none").clone()

    @torch.inference_mode()
    def score(m): return (m.eval()(held_x).argmax(1) == held_y).float().mean().item()

    start = perf_counter()
    sweep = SensitivityAnalyzer(model, x[:1], loss, higher_is_better=False, metric_name="loss").sweep("sparsity", levels, verbose=False)
    print(f"seed {seed}: accuracy {score(model):.4f}; sweep {perf_counter() - start:.0f} s", flush=True)
    for pct in sparsities:
        start = perf_counter()
        found = search_targets(model, x[:1], loss, pct, higher_is_better=False, metric_name="loss", recalibrate=calibration if recalibrate else None, evaluations=evaluations, verbose=False)
        print(f"seed {seed}, {pct:g} %: {found.evaluations} evaluations, {perf_counter() - start:.0f} s; loss predicted {found.predicted_metric:.4f}, measured {found.measured_metric:.4f}", flush=True)
        for name, plan in all_plans(model, sweep, found, pct).items():
            with leave_no_trace(model):
                Sparsifier(model).sparsify_model(plan)
                if recalibrate: reestimate_norms(model, calibration)
                yield {"sparsity": pct, "plan": name, "seed": seed, "accuracy": score(model)}


def table(rows):
    """A row a plan: mean, standard deviation and least over the seeds, then each seed."""
    t = pd.DataFrame(rows).pivot(index=["sparsity", "plan"], columns="seed", values="accuracy")
    stats = pd.DataFrame({"mean": t.mean(1), "std": t.std(1), "least": t.min(1)})
    return pd.concat([stats, t.add_prefix("seed ")], axis=1).sort_values(["sparsity", "mean"])


def main():
    """Train, search, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[80.], help="percent of all compressible weights")
    parser.add_argument("--recalibrate", action="store_true", help="estimate batch-norm statistics anew, in the search and for every score")
    parser.add_argument("--images", type=int, default=300, help="training images to measure on, at most 900")
    parser.add_argument("--evaluations", type=int, help="most evaluations of one search; by default enough for eight rounds")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [r for seed in args.seeds for r in compare(seed, args.sparsities, args.recalibrate, args.images, args.evaluations)]
    print(f"\naccuracy on held-out images, {'recalibrated' if args.recalibrate else 'not recalibrated'}\n\n{table(rows).to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
