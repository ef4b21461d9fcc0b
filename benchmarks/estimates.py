"""Estimates beside measurements: how far the order of layers and levels is the same, and what each costs.

    .venv/bin/python benchmarks/estimates.py [--tasks mlp resnet18 mobilenet transformer] [--methods sparsity quantization pruning low_rank] [--seeds 0] [--csv FILE]

For each task and method, `sweep` measures every unit at every level by the objective (the divergence of 300 images' outputs, or bits a byte of a text), and each estimator predicts the same. Printed are Spearman's rank correlation over
all units and levels, the same over the units by their mean over the levels, and how many times longer the sweep took, processor time of one thread, with `reuse` as it is by default: nothing is
computed twice where that saves time. Which channels go together is found before both.
"""
import argparse
import itertools
import warnings
from pathlib import Path
from time import process_time

import pandas as pd
import torch
from scipy.stats import spearmanr
from tasks import losses, tasks

from fasterai_sens import SensitivityAnalyzer, evaluation
from fasterai_sens.measure.estimates import estimators, mean_rises

levels = {"sparsity": [30, 50, 70, 80, 90], "quantization": [6, 5, 4, 3, 2], "pruning": [10, 30, 50, 70], "low_rank": [30, 50, 70, 85]}


def is_right(preds, targs):
    """Whether each image is recognized"""
    return (preds.argmax(1) == targs).float()


def analyzer_of(task):
    """Measures 300 images by their divergence, or pieces of text by their loss"""
    x, y = (t[:300] for t in task.measure)
    if not task.text: return SensitivityAnalyzer(task.model, x[:1], evaluation((x, y), is_right, "kl"))
    by_loss = evaluation([(x[i:i + 30], y[i:i + 30]) for i in range(0, len(x), 30)], losses)
    return SensitivityAnalyzer(task.model, x[:1], by_loss, higher_is_better=False, metric_name="loss")


def pairs_of(estimate, sweep):
    """Estimated and measured damage of every unit at every level"""
    found = []
    for name in sweep.names:
        guesses = estimate.rows(name)
        for level, row in sweep.rows(name).items():
            measured = row.delta if row.objective_delta is None else row.objective_delta
            found.append((guesses[level].delta, measured))
    return zip(*found, strict=True)


def rows_of(name, seed, methods):
    """Rows of the table for one training"""
    analyzer = analyzer_of(tasks[name](seed))
    for method in methods:
        analyzer.estimate(method, levels[method][:1], by="output_error", verbose=False)   # which channels go together is found once
        start = process_time()
        sweep = analyzer.sweep(method, levels[method], verbose=False)
        of_sweep = process_time() - start
        measured = mean_rises(sweep, "objective" if sweep[0].baseline_objective is not None else "metric")
        for by in estimators:
            start = process_time()
            estimate = analyzer.estimate(method, levels[method], by=by, verbose=False)
            seconds = process_time() - start
            guessed = mean_rises(estimate, "metric")
            units = [(guessed[unit], measured[unit]) for unit in measured]
            row = dict(task=name, seed=seed, method=method, by=by, units=len(units), all=float(spearmanr(*pairs_of(estimate, sweep)).statistic),
                       means=float(spearmanr(*zip(*units, strict=True)).statistic), sweep_s=of_sweep, estimate_s=seconds, faster=of_sweep/seconds)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            yield row


def main():
    """Train, sweep, estimate, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=list(tasks))
    parser.add_argument("--methods", nargs="+", default=list(levels), choices=list(levels))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training each")
    parser.add_argument("--csv", type=Path, help="file to write the rows to, as they are found")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, seed in itertools.product(args.tasks, args.seeds):
        for row in rows_of(name, seed, args.methods):
            rows.append(row)
            if args.csv: pd.DataFrame(rows).to_csv(args.csv, index=False)
    table = pd.DataFrame(rows)
    print(table.groupby(["task", "method", "by"], sort=False)[["all", "means", "faster"]].mean().round(3).to_string())
    print(f"\nmeans over all tasks and methods\n\n{table.groupby('by', sort=False)[['all', 'means', 'faster']].mean().round(3).to_string()}")


if __name__ == "__main__": main()
