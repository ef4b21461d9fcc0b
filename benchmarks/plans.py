"""Every plan for sparsity side by side, in one shot and after a short fine-tuning, on data that no plan has seen.

    .venv/bin/python benchmarks/plans.py [--tasks mlp transformer mobilenet resnet18] [--seeds 0 1 2] [--sparsities 50 70 80 90 95] [--one-shot] [--recalibrate]
        [--images N] [--evaluations N] [--objective loss|kl] [--csv FILE]

The networks of `tasks.py` are trained once for each seed: a multilayer perceptron on the breast cancer table, a small transformer on text, a small MobileNetV2 and ResNet-18
on scikit-learn's digits. Plans that need measuring see the loss, or with `--objective kl` how far predictions move from the model's own, on the part of the data that is for it:
`classic` is the inverse-sensitivity rule from one level (the last below the target), `curves` is `to_layer_targets` of a sweep over 14 levels, `knapsack` the best choice of the
measured levels, and `search` is `search_targets`. The score is accuracy or, for text, bits a byte, on held-out data: right after the weights are dropped, and after training
on for a few batches with the dropped weights held at zero, the same batches for every plan. For that `tuned search` is `search_targets` again, from all the other plans and for one round (the least there is), with the
loss (or divergence) that is left after half as many batches (`FineTuned`). With `--one-shot` there is no training. With `--recalibrate`, networks with batch norm get their statistics
estimated anew on 300 training images: before each evaluation of the search, and before every score.

For each plan the tables give mean, standard deviation and worst over the seeds. Then, for the search (in one shot `search`, fine-tuned `tuned search`): its gain over the best of the plans that are
not searched, by mean (positive is better), the standard error of that gain over the seeds, the standard error of one score from the number of held-out samples, and whether it is best, within
noise (a loss within the 95 % t interval over the seeds, or of at most twice the standard error of one score), or worse. With `--csv` rows are added to a file as they are measured, and those that are in it already are not measured again, so a long run can be split.
"""
import argparse
import copy
import warnings
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch
from scipy.stats import t
from tasks import fit, losses, scores, tasks

from fasterai_sens import LayerTargets, SensitivityAnalyzer, Sparsifier, erk, global_magnitude, lamp, search_targets, uniform
from fasterai_sens.core.layers import find_units
from fasterai_sens.core.results import damage
from fasterai_sens.measure.finetuned import FineTuned
from fasterai_sens.measure.norms import reestimate_norms
from fasterai_sens.measure.objectives import kl_from
from fasterai_sens.plans.knapsack import choose
from fasterai_sens.plans.targets import shift_to_mean

levels = (10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 95, 97, 99)
steps = 30   # batches of fine-tuning


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


def measurement(task, images, objective):
    """What the plans go by: the metric, and the objective beside it, on at most so many samples."""
    x, y = (t[:images] for t in task.measure)
    away = kl_from(task.model, x) if objective == "kl" else None

    @torch.no_grad()
    def eval_fn(model):
        out = model(x)
        return scores(out, y, task.text), away(model) if away else losses(out, y)

    return eval_fn


@torch.no_grad()
def held_out(task, model):
    """Scores on held-out data, sample by sample."""
    x, y = task.held_out
    return scores(model(x), y, task.text)


def train_on(task, model, n=steps, after_step=lambda: None):
    """A short fine-tuning."""
    fit(model, *task.train, n, 1e-3, 64, after_step)


def measured(task, plan, recalibrate, phases):
    """Mean score on held-out data and its standard error, in one shot and fine-tuned, on a copy of the model."""
    model = copy.deepcopy(task.model)
    sparsifier = Sparsifier(model)
    sparsifier.sparsify_model(plan)
    for phase in phases:
        if phase == "fine-tuned":
            torch.manual_seed(1)
            train_on(task, model, after_step=sparsifier.apply_masks)
        if recalibrate: reestimate_norms(model, task.spare)
        s = held_out(task, model)
        yield {"phase": phase, "score": s.mean().item(), "stderr": s.std().item()/len(s)**.5}


def compare(name, seed, sparsities, args):
    """Rows for one training, a list for each sparsity."""
    task, phases = tasks[name](seed), ["one-shot"] if args.one_shot else ["one-shot", "fine-tuned"]
    eval_fn, x, recalibrate = measurement(task, args.images, args.objective), task.measure[0][:1], args.recalibrate and task.spare is not None
    how, start = dict(higher_is_better=not task.text, metric_name="bits/byte" if task.text else "accuracy"), perf_counter()
    sweep = SensitivityAnalyzer(task.model, x, eval_fn, **how).sweep("sparsity", levels, verbose=False)
    print(f"{name}, seed {seed}: {how['metric_name']} {held_out(task, task.model).mean():.4f}; sweep {perf_counter() - start:.0f} s", flush=True)
    searching = how | dict(recalibrate=task.spare if recalibrate else None, verbose=False)
    for pct in sparsities:
        start = perf_counter()
        found = search_targets(task.model, x, eval_fn, pct, evaluations=args.evaluations, **searching)
        plans, took = all_plans(task.model, sweep, found, pct), [perf_counter() - start]
        if not args.one_shot:
            others = {n: plans[n] for n in ("curves", "knapsack")} | {"one-shot search": plans["search"]}
            tuned = search_targets(task.model, x, FineTuned(partial(train_on, task, n=steps//2), eval_fn), pct, plans=others, evaluations=14 + 4*len(found.plan), **searching)
            plans["tuned search"] = tuned.plans["search"]
            took.append(perf_counter() - start - took[0])
        rows = [{"task": name, "sparsity": pct, "seed": seed, "plan": plan} | row for plan, targets in plans.items() for row in measured(task, targets, recalibrate, phases)]
        scored = ", ".join(f"{r['plan']} {r['score']:.4f}" for r in rows if r["phase"] == phases[-1])
        print(f"{name}, seed {seed}, {pct:g} %: {found.evaluations} evaluations, searches {', '.join(f'{t:.0f} s' for t in took)}; {phases[-1]} {scored}", flush=True)
        yield rows


def verdict(scores, stderr, rising, own):
    """The searched plan `own` against the best of those that are not searched: names and numbers for the table; `scores` has a column a seed"""
    others, sign = scores[~scores.index.str.endswith("search")], 1 if rising else -1
    other = (sign*others.mean(axis=1)).idxmax()
    gain = (sign*(scores.loc[own] - scores.loc[other])).dropna()
    over_seeds = gain.std()/len(gain)**.5
    noise = np.nanmax([t.ppf(.975, max(len(gain) - 1, 1))*over_seeds, 2*stderr])
    return {"best other": other, "gain": gain.mean(), "stderr, seeds": over_seeds, "stderr, held-out": stderr, "search is": "best" if gain.mean() > -1e-6 else "within noise" if gain.mean() >= -noise else "worse"}


def print_tables(rows):
    """For each task, a table of all plans and one of what the search gains."""
    for name, of_task in rows.groupby("task", sort=False):
        rising, verdicts = name != "transformer", {}
        print(f"\n\n{name}: {'accuracy' if rising else 'bits a byte, lower is better'}, held-out data; mean, standard deviation and worst over the seeds\n")
        stats = of_task.groupby(["sparsity", "phase", "plan"], sort=False).score.agg(["mean", "std", "min" if rising else "max"]).set_axis(["mean", "std", "worst"], axis=1)
        print(stats.unstack("phase").swaplevel(axis=1).sort_index(axis=1, level=0, sort_remaining=False, ascending=False).to_string(float_format=lambda v: f"{v:.4f}"))
        for key, group in of_task.groupby(["sparsity", "phase"], sort=False):
            table = group.pivot(index="plan", columns="seed", values="score")
            own = "search" if key[1] == "one-shot" else "tuned search"
            verdicts[key] = verdict(table, group[group.plan == own].stderr.mean(), rising, own)
        print(f"\nsearch against the best other plan\n\n{pd.DataFrame(verdicts).T.to_string(float_format=lambda v: f'{v:.4f}')}")


def main():
    """Train, search, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=list(tasks), help="what to train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[50., 70., 80., 90., 95.], help="percent of all compressible weights")
    parser.add_argument("--one-shot", action="store_true", help="no fine-tuning")
    parser.add_argument("--recalibrate", action="store_true", help="estimate batch-norm statistics anew, in the search and for every score")
    parser.add_argument("--images", type=int, default=300, help="most samples to measure on: of the digits at most 900, of the text 150, of the table 120")
    parser.add_argument("--evaluations", type=int, help="most evaluations of one search; by default enough for twelve rounds")
    parser.add_argument("--objective", default="loss", choices=["loss", "kl"], help="what sweeps and searches go by")
    parser.add_argument("--csv", type=Path, help="file that rows are added to; use another one for other settings")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = [pd.read_csv(args.csv)] if args.csv and args.csv.exists() else []
    done = {key for p in parts for key in zip(p.task, p.seed, p.sparsity, strict=True)}
    for name in args.tasks:
        for seed in args.seeds:
            left = [pct for pct in args.sparsities if (name, seed, pct) not in done]
            for rows in compare(name, seed, left, args) if left else ():
                parts.append(pd.DataFrame(rows))
                if args.csv: parts[-1].to_csv(args.csv, mode="a", header=not args.csv.exists(), index=False)
    print_tables(pd.concat(parts))


if __name__ == "__main__":
    main()
