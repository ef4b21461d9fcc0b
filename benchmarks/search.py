"""The search for sparsity against an evolution and a search of coefficients, from the same starts, at equal sample evaluations, on data that none of them has seen.

    .venv/bin/python benchmarks/search.py [--tasks mlp transformer mobilenet resnet18] [--seeds 0 1 2] [--sparsities 80 90] [--evaluations 120] [--images 300] [--only ours evolution coefficients] [--cache FOLDER]

The networks of `tasks.py` are trained once for each seed. All go by the loss on `--images` samples, in one shot, without training and without new batch-norm statistics. One evaluation is all of these samples once; a part of them
counts its share, and a backward pass counts as two forward passes. `ours` is `search_targets`, with everything it measures (the classic rule, each layer alone at the end). `evolution` is EvoPress (arXiv 2410.14649): each generation has
16 children, of one to three switches of weights between two layers each, of which 4 are left after a tenth of the samples, 1 after a third, and that one is measured on all and taken if it is better. `coefficients` is SPDY (arXiv 2201.13096): each
layer's error is a coefficient times the square of its place among sparsities that each drop a tenth of what is left, the best mix of these is found exactly, and the coefficients are searched: at random for a tenth of the evaluations, then in a tenth of the layers anew, the share of layers shrinking. Both others get the plans that `search_targets` starts from (measured by them at their cost), and as many evaluations as ours took.

The score is accuracy on held-out data or, for the transformer, bits a byte (lower is better). The table gives it for each seed, the mean, and the loss on the samples that were searched with.

Run so far, 120 evaluations. ResNet-18, 80 %, accuracy, seeds 0, 1, 2: best start .839 .807 .683, evolution .967 .938 .889, ours .978 .956 .945. Transformer, 90 %, bits a byte, seed 0: best start (coefficients found nothing better) 5.322, evolution 4.958, ours
4.816. The other cells were not run yet, and bits and multiply-accumulates are not in it: `search_plan` still goes by exchange.
"""
import argparse
import math
import warnings
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import torch
from tasks import losses, scores, tasks

from fasterai_sens import evaluation, leave_no_trace, search_targets
from fasterai_sens.methods.criteria import large_final
from fasterai_sens.plans.baselines import budget
from fasterai_sens.plans.search import Masker
from fasterai_sens.plans.targets import least_total


class Judge:
    """Losses of plans on nested parts of the samples, and what they cost; a plan is what each layer keeps."""

    def __init__(self, task, pct, images):
        x, y = (t[:images] for t in task.measure)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self.task, self.x, self.y, self.b, self.spent = task, x[order], y[order], budget(task.model, pct), 0.
        self.masker, self.weights, self.mean = Masker(self.b.units, "weight", large_final), self.b.weights.astype(float), 1 - pct/100

    def set(self, kept):
        """Put a plan into force."""
        self.masker.set([float(p) for p in 100*(1 - kept)])

    @torch.no_grad()
    def loss(self, kept, share=1.):
        """Mean loss on the first of the samples."""
        n = math.ceil(share*len(self.x))
        self.spent += n/len(self.x)
        self.set(kept)
        return losses(self.task.model(self.x[:n]), self.y[:n]).mean().item()

    @torch.no_grad()
    def held_out(self, kept):
        """Score on data that no search has seen."""
        self.set(kept)
        x, y = self.task.held_out
        return scores(self.task.model(x), y, self.task.text).mean().item()


def child(judge, kept, chance):
    """One to three switches: weights go from one layer to another one."""
    kept, weights = kept.copy(), judge.weights
    for _ in range(1 + min(chance.integers(3), chance.integers(3))):
        one, other = chance.choice(len(kept), 2, replace=False)
        factor = math.exp(chance.uniform(.1, .5))
        amount = min(kept[one]*(1 - 1/factor)*weights[one], (1 - kept[other])*weights[other], 2*kept[other]*(factor - 1)*weights[other] + 1)
        kept[one] -= amount/weights[one]
        kept[other] += amount/weights[other]
    return kept


def evolution(judge, starts, evaluations, chance):
    """EvoPress, from the best of the starts."""
    now, first = min((judge.loss(kept), i) for i, kept in enumerate(starts))
    plan = starts[first]
    while judge.spent + 16*.1 + 4/3 + 1.1 <= evaluations:
        left = [child(judge, plan, chance) for _ in range(16)]
        for share, n in ((.1, 4), (1/3, 1)):
            of = [judge.loss(kept, share) for kept in left]
            left = [left[i] for i in np.argsort(of)[:n]]
        loss = judge.loss(left[0])
        if loss < now: now, plan = loss, left[0]
    return plan, now


def coefficients(judge, starts, evaluations, chance):
    """SPDY: the mix by errors that are squares of the place on a ladder of sparsities, times a coefficient for each layer."""
    kept = .9**np.arange(61)[::-1]
    errors = (np.arange(61)[::-1]/60)**2
    def mix(c): return np.clip(least_total([(kept, k*errors) for k in c], judge.weights, judge.mean), 0, 1)
    now, first = min((judge.loss(k), i) for i, k in enumerate(starts))
    plan, best, least, n, begin = starts[first], None, math.inf, len(judge.weights), judge.spent
    while judge.spent + 1 <= evaluations:
        used = (judge.spent - begin)/(evaluations - begin)
        c = chance.random(n)
        if used > .1:
            stays = chance.permutation(n) >= max(1, round(.1*n*(1 - used)))
            c[stays] = best[stays]
        trial = mix(c)
        loss = judge.loss(trial)
        if loss < least: best, least = c, loss
        if loss < now: plan, now = trial, loss
    return plan, now


def rows_of(name, seed, pct, args):
    """One row for each search."""
    task = trained(name, seed, args.cache)
    x, y = (t[:args.images] for t in task.measure)
    def score(preds, targs): return scores(preds, targs, task.text)
    start = process_time()
    found = search_targets(task.model, x[:1], evaluation((x, y), score, losses), pct, evaluations=args.evaluations, higher_is_better=not task.text, verbose=False)
    took = process_time() - start
    starts = [1 - np.array(list(plan.values()))/100 for n, plan in found.plans.items() if n != "search"]
    with leave_no_trace(task.model):
        ours, rows = Judge(task, pct, args.images), []
        kept = 1 - np.array(list(found.plans["search"].values()))/100
        best_start = min(starts, key=ours.loss)
        rows.append(dict(search="best start", held_out=ours.held_out(best_start), loss=ours.loss(best_start), evaluations=len(starts), seconds=0.))
        rows.append(dict(search="ours", held_out=ours.held_out(kept), loss=ours.loss(kept), evaluations=found.evaluations, seconds=took))
        for search in (evolution, coefficients):
            if search.__name__ not in args.only: continue
            ours.set(np.ones(len(kept)))
            judge, start = Judge(task, pct, args.images), process_time()
            plan, loss = search(judge, starts, found.evaluations, np.random.default_rng(seed))
            rows.append(dict(search=search.__name__, held_out=judge.held_out(plan), loss=loss, evaluations=judge.spent, seconds=process_time() - start))
            judge.set(np.ones(len(kept)))
    return [dict(task=name, sparsity=pct, seed=seed) | row for row in rows]


def trained(name, seed, folder):
    """The task, trained now or read from a folder."""
    path = Path(folder)/f"{name}_{seed}.pt" if folder else None
    if path and path.exists(): return torch.load(path, weights_only=False)
    task = tasks[name](seed)
    if path: torch.save(task, path)
    return task


def main():
    """Train, search, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=list(tasks))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[80., 90.], help="percent of all compressible weights")
    parser.add_argument("--evaluations", type=int, default=120, help="of all samples, for each search")
    parser.add_argument("--images", type=int, default=300, help="most samples to search with: of the text 150, of the table 120")
    parser.add_argument("--only", nargs="*", default=["evolution", "coefficients"], help="what to compare with")
    parser.add_argument("--cache", help="folder in which trained networks are kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in args.tasks:
        for pct in args.sparsities:
            for seed in args.seeds:
                rows += rows_of(name, seed, pct, args)
                print(pd.DataFrame(rows[-2 - len(args.only):]).to_string(index=False, header=seed == args.seeds[0], float_format=lambda v: f"{v:.4f}"), flush=True)
    table = pd.DataFrame(rows).pivot_table(index=["task", "sparsity", "search"], columns="seed", values="held_out", sort=False)
    table.insert(0, "mean", table.mean(axis=1))
    print(f"\nheld-out score (accuracy; bits a byte for the transformer)\n\n{table.to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
