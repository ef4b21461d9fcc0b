"""Channels at equal multiply-accumulates, and channels, zeros and bits together at equal bytes: every plan side by side, on data that no plan has seen.

    .venv/bin/python benchmarks/joint.py [--tasks mobilenet resnet18] [--seeds 0 1 2] [--flops 50 30] [--bytes 8 5] [--as-is] [--images 300] [--csv FILE]

The networks of `tasks.py` are trained once for each seed. Sweeps over the three methods see accuracy and, as objective, how far predictions move from the network's own (KL divergence), on
`--images` training images. `uniform` is the mildest level for all layers that fits the budget, `global` one ranking of all channels, `allocate` the best choice of measured
levels, by one method or (without a method's name) by all that are given, `search` is `search_plan`. The score is accuracy on 597 held-out images, in one shot and, for channels, after 30 batches
of training; for that, `tuned search` is `search_plan` again, for about a round, by what 15 batches leave (`FineTuned`). Batch-norm statistics are estimated anew on 300 other training images, before each evaluation of the search and before every score; with `--as-is` they are not.
Budgets are percent of the untouched network. A method that alone cannot reach the budget has no row.
"""
import argparse
import copy
import itertools
import warnings
from functools import partial
from pathlib import Path
from time import perf_counter

import pandas as pd
import torch
from tasks import fit, scores, tasks

from fasterai_sens import Applier, FineTuned, SensitivityAnalyzer, evaluation, leave_no_trace, reestimate_norms, search_plan

levels = {"pruning": (10, 20, 30, 40, 50, 60, 70, 80, 90), "sparsity": (30, 50, 70, 80, 90, 95, 98), "quantization": (8, 6, 5, 4, 3, 2)}
every = list(itertools.combinations(levels, 2))


@torch.inference_mode()
def score(model, task):
    """Accuracy on the held-out images."""
    return scores(model.eval()(task.held_out[0]), task.held_out[1], False).mean().item()


def train(task, model, steps=15):
    """A little fine-tuning."""
    fit(model, *task.train, steps, 1e-3)


def fine_tuned(task, plan, sample, seed, spare):
    """Accuracy of a smaller copy after 30 batches."""
    small = copy.deepcopy(task.model)
    plan.apply(small, sample)
    torch.manual_seed(100 + seed)
    train(task, small, 30)
    if spare is not None: reestimate_norms(small, spare)
    return score(small, task)


def rows_of(name, seed, args):
    """Rows of the table for one training."""
    task = tasks[name](seed)
    x, y = (t[:args.images] for t in task.measure)
    eval_fn, spare = evaluation((x, y), lambda p, t: (p.argmax(1) == t).float(), "kl"), None if args.as_is else task.spare
    start = perf_counter()
    analyzer = SensitivityAnalyzer(task.model, x[:1], eval_fn, objective_name="KL")
    sweeps = {m: analyzer.sweep(m, of, verbose=False) for m, of in levels.items() if args.bytes or m == "pruning"}
    print(f"{name}, seed {seed}: accuracy {score(task.model, task):.4f}; sweeps {perf_counter() - start:.0f} s", flush=True)
    for cost, methods, pcts in (("flops", ["pruning"], args.flops), ("bytes", list(levels), args.bytes)):
        for pct in pcts:
            start = perf_counter()
            search = partial(search_plan, task.model, x[:1], sweeps=[sweeps[m] for m in methods], budget=f"{pct}%", cost=cost, combine=every if len(methods) > 1 else (), recalibrate=spare, verbose=False)
            r = search(eval_fn)
            plans = dict(r.plans)
            if cost == "flops": plans["tuned search"] = search(FineTuned(partial(train, task), eval_fn), evaluations=2*len(sweeps["pruning"].names) + 3).plans["search"]
            print(f"  {cost} {pct:g} %: {r.evaluations} evaluations, {perf_counter() - start:.0f} s; accuracy predicted {r.predicted_metric:.4f}, measured {r.measured_metric:.4f}", flush=True)
            applier = Applier(task.model, x[:1], methods, settings=r.settings)
            for plan_name, plan in plans.items():
                with leave_no_trace(task.model), applier(plan):
                    if spare is not None: reestimate_norms(task.model, spare)
                    row = dict(task=name, seed=seed, budget=f"{pct:g} % of {cost}", plan=plan_name, accuracy=score(task.model, task))
                yield row | (dict(tuned=fine_tuned(task, plan, x[:1], seed, spare)) if cost == "flops" else {}) | {f"{cost} %": 100*plan.costs[cost]/plan.whole[cost]}


def table(rows):
    """A row a plan: mean, standard deviation and least over the seeds, and the mean after fine-tuning."""
    by = pd.DataFrame(rows, columns=["task", "seed", "budget", "plan", "accuracy", "tuned"]).groupby(["task", "budget", "plan"])
    out = pd.DataFrame({"mean": by.accuracy.mean(), "std": by.accuracy.std(), "worst": by.accuracy.min(), "fine-tuned": by.tuned.mean(), "its worst": by.tuned.min(), "seeds": by.accuracy.count()})
    return out.sort_values(["task", "budget", "mean"])


def main():
    """Train, search, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["mobilenet", "resnet18"], choices=["mobilenet", "resnet18"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--flops", type=float, nargs="*", default=[50, 30], help="multiply-accumulates left, percent")
    parser.add_argument("--bytes", type=float, nargs="*", default=[8, 5], help="bytes left, percent")
    parser.add_argument("--as-is", action="store_true", help="keep the batch-norm statistics of the untouched network")
    parser.add_argument("--images", type=int, default=300, help="training images to measure on, at most 900")
    parser.add_argument("--csv", type=Path, help="file to write the rows to, as they are measured")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, seed in itertools.product(args.tasks, args.seeds):
        for row in rows_of(name, seed, args):
            rows.append(row)
            if args.csv:
                pd.DataFrame(rows).to_csv(args.csv, index=False)
    print(f"\naccuracy on held-out images, batch norm {'as it was' if args.as_is else 'estimated anew'}\n\n{table(rows).to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
