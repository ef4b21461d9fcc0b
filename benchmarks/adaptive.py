"""Adaptive measurements beside full ones: how many times fewer sample evaluations, and whether the decisions are the same.

    .venv/bin/python benchmarks/adaptive.py [--tasks mlp transformer resnet18 mobilenet] [--methods sparsity quantization] [--seeds 0] [--samples 900] [--csv FILE]

Each unit at each level is measured on all samples, and then only until its side of a threshold, or its place among the top quarter of all units, is settled at an error rate of 5 %. Images and the table are scored by accuracy and by their loss, text by bits a
byte. Thresholds of accuracy are points, those of a loss shares of the untouched model's. The untouched model is counted on both sides, every sample once. `same` is the share of equal decisions, of a top quarter that of equal sets.
`--samples` joins what a task measures on with what it holds out, up to so many, since how much is saved grows with the number of samples there are. With `--levels N` the curves of `Refine(per_unit=N)` are compared with as many evenly
spaced levels, by their mean distance from all levels.
"""
import argparse
import itertools
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tasks import losses, tasks

from fasterai_sens import Refine, SensitivityAnalyzer, Settle, evaluation

levels = {"sparsity": [30, 50, 70, 80, 90], "quantization": [6, 5, 4, 3, 2], "pruning": [10, 30, 50, 70], "low_rank": [30, 50, 70, 85]}
grids = {"sparsity": list(range(5, 95, 5)), "quantization": [8, 7, 6, 5, 4, 3, 2]}


def is_right(preds, targs):
    """Whether each image is recognized"""
    return (preds.argmax(1) == targs).float()


def analyzers_of(task, n):
    """For each metric: an analyzer on up to `n` samples, and the questions; thresholds of a loss are shares of the baseline"""
    x, y = (torch.cat(parts)[:n] for parts in zip(task.measure, task.held_out, strict=True))
    data = [(x[i:i + 150], y[i:i + 150]) for i in range(0, len(x), 150)]
    with torch.no_grad(): base = float(losses(task.model(x), y).mean())
    by_loss = SensitivityAnalyzer(task.model, x[:1], evaluation(data, losses), higher_is_better=False, metric_name="loss")
    yield "loss", by_loss, len(x), {f"threshold {share:.0%}": Settle(threshold=share*base) for share in (.02, .05, .2)}
    if task.text: return
    by_accuracy = SensitivityAnalyzer(task.model, x[:1], evaluation(data, is_right))
    yield "accuracy", by_accuracy, len(x), {f"threshold {points} points": Settle(threshold=points/100) for points in (1, 2, 5, 10)}


def same_decisions(settled, full, settle):
    """Share of the decisions that are those of all samples"""
    same = []
    for some, every in zip(settled, full, strict=True):
        if settle.top:
            same.append({r.name for r in some.ranked if r.side == "top"} == {r.name for r in every.top(settle.top)})
            continue
        for a, b in zip(some.layers, every.layers, strict=True):
            if b.prunable: same.append((a.side == "above") == (b.delta > settle.threshold + 1e-12))
    return float(np.mean(same))


def settle_rows(name, seed, methods, n):
    """Rows of the table for one training"""
    for metric, analyzer, n_all, asked in analyzers_of(tasks[name](seed), n):
        for method in methods:
            full = analyzer.sweep(method, levels[method], verbose=False)
            quarter = max(1, round(len(full.ranked)/4))
            for question, settle in {**asked, "top quarter": Settle(top=quarter)}.items():
                settled = analyzer.sweep(method, levels[method], adaptive=settle, verbose=False)
                rows = [r for result in settled for r in result.ranked]
                taken = n_all + sum(r.n for r in rows)
                row = dict(task=name, seed=seed, metric=metric, method=method, samples=n_all, asked=question, units=len(rows),
                           fewer=n_all*(len(rows) + 1)/taken, same=same_decisions(settled, full, settle))
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                yield row


def distance(sweep, full):
    """How far the curves, straight between their levels, are from those on all levels, in the mean"""
    found = []
    for name in full.names:
        truth, known = full.rows(name), sweep.rows(name)
        if len(truth) < 3: continue
        place = {level: k for k, level in enumerate(truth)}
        guess = np.interp(range(len(truth)), [place[level] for level in known], [r.delta for r in known.values()])
        found.append(np.abs(guess - [r.delta for r in truth.values()]).mean())
    return float(np.mean(found))


def refine_rows(name, seed, methods, n, per_unit):
    """Rows of the table for one training"""
    _, analyzer, _, _ = next(iter(analyzers_of(tasks[name](seed), n)))
    for method in methods:
        grid = grids[method]
        places = np.linspace(0, len(grid) - 1, per_unit).round().astype(int)
        full = analyzer.sweep(method, grid, verbose=False)
        spaced = analyzer.sweep(method, [grid[k] for k in places], verbose=False)
        refined = analyzer.sweep(method, grid, adaptive=Refine(per_unit=per_unit), verbose=False)
        row = dict(task=name, seed=seed, method=method, evenly=distance(spaced, full), refined=distance(refined, full))
        row["closer"] = row["evenly"]/row["refined"]
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        yield row


def main():
    """Train, measure both ways, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=list(tasks))
    parser.add_argument("--methods", nargs="+", default=["sparsity", "quantization"], choices=list(levels))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training each")
    parser.add_argument("--samples", type=int, default=900, help="at most")
    parser.add_argument("--levels", type=int, help="compare curves with so many levels instead")
    parser.add_argument("--csv", type=Path, help="file to write the rows to, as they are found")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, seed in itertools.product(args.tasks, args.seeds):
        of_task = refine_rows(name, seed, args.methods, args.samples, args.levels) if args.levels else settle_rows(name, seed, args.methods, args.samples)
        for row in of_task:
            rows.append(row)
            if args.csv: pd.DataFrame(rows).to_csv(args.csv, index=False)
    table = pd.DataFrame(rows)
    if args.levels: return print(table.round(4).to_string(index=False))
    print(table.pivot_table(index=["metric", "asked"], columns="task", values=["fewer", "same"], sort=False).round(2).to_string())


if __name__ == "__main__": main()
