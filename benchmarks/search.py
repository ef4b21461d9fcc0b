"""The searches against an evolution and a search of coefficients, from the same starts, at equal sample evaluations, on data that none of them has seen.

    .venv/bin/python benchmarks/search.py [--tasks mlp transformer mobilenet resnet18 pitch sentences] [--seeds 0 1 2] [--sparsities 80 90] [--bits 4 3] [--macs 50 30] [--evaluations 120] [--images 300] [--only evolution coefficients] [--cache FOLDER]

The networks of `tasks.py` are trained once for each seed. All go by the loss on `--images` samples, in one shot, without training and without new batch-norm statistics. One evaluation is all of these samples once; a part of them
counts its share, and a backward pass counts as two forward passes. `ours` is `search_targets` for zeros, with everything it measures (the classic rule, each layer alone at the end), and `search_plan` for bits and multiply-accumulates: so many bits
in the mean are a budget of the bytes that all layers take at that many, and multiply-accumulates are lowered by taking channels out. Its sweeps (bits 8 to 2, channels in eighths) are not counted: the plan of `allocate`, from which all start, comes of them.

`evolution` is EvoPress (arXiv 2410.14649): each generation has 16 children, of one to three switches between layers each, of which 4 are left after a tenth of the samples, 1 after a third, and that one is measured on all and taken if it is better.
For zeros a switch takes weights from one layer to another one; for levels one layer goes a measured level to the milder side and others, by chance, to the harsher side until the budget holds. `coefficients` is SPDY (arXiv 2201.13096): each layer's error is a
coefficient times the square of its place on its ladder (sparsities that each drop a tenth of what is left, or the measured levels), the best mix of these is found, and the coefficients are searched: at random for a tenth of the evaluations, then
in a tenth of the layers anew, the share of layers shrinking. Both get the plans that ours starts from (measured by them at their cost), and as many evaluations as ours took.

The two networks that packages carry (`--tasks pitch sentences`, in `pretrained.py`) were trained by others; a seed draws their data.

The score is accuracy on held-out data, for the transformer bits a byte (lower is better), for the sentences the cosine to the untouched vectors. The table gives it for each seed, the mean, and the loss on the samples that were searched with.

What it has printed so far is in docs/results.md.
"""
import argparse
import math
import warnings
from dataclasses import replace
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import torch
from pretrained import pretrained
from tasks import tasks

from fasterai_sens import Applier, Plan, SensitivityAnalyzer, evaluation, leave_no_trace, search_plan, search_targets
from fasterai_sens.methods.criteria import large_final
from fasterai_sens.plans.allocate import set_up
from fasterai_sens.plans.baselines import budget
from fasterai_sens.plans.joint import Limits, sure_starts
from fasterai_sens.plans.meter import Meter
from fasterai_sens.plans.search import Masker
from fasterai_sens.plans.targets import least_total


def eval_on(task, images):
    """The evaluation that all searches go by: the score, and the loss."""
    x, y = (t[:images] for t in task.measure)
    return evaluation((x, y), task.score, task.loss)


class Zeros:
    """Losses of plans on nested parts of the samples, and what they cost; a plan is what each layer keeps."""

    def __init__(self, task, pct, images):
        x, y = (t[:images] for t in task.measure)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self.task, self.x, self.y, self.b, self.spent = task, x[order], y[order], budget(task.model, pct), 0.
        self.masker, self.weights, self.mean = Masker(self.b.units, "weight", large_final), self.b.weights.astype(float), 1 - pct/100
        self.n_layers, self.kept = len(self.weights), .9**np.arange(61)[::-1]

    def set(self, kept):
        """Put a plan into force."""
        self.masker.set([float(p) for p in 100*(1 - kept)])

    @torch.no_grad()
    def loss(self, kept, share=1.):
        """Mean loss on the first of the samples."""
        n = math.ceil(share*len(self.x))
        self.spent += n/len(self.x)
        self.set(kept)
        return self.task.loss(self.task.model(self.x[:n]), self.y[:n]).mean().item()

    @torch.no_grad()
    def held_out(self, kept):
        """Score on data that no search has seen."""
        self.set(kept)
        x, y = self.task.held_out
        return self.task.score(self.task.model(x), y).mean().item()

    def child(self, kept, chance):
        """One to three switches: weights go from one layer to another one."""
        kept, weights = kept.copy(), self.weights
        for _ in range(1 + min(chance.integers(3), chance.integers(3))):
            one, other = chance.choice(len(kept), 2, replace=False)
            factor = math.exp(chance.uniform(.1, .5))
            amount = min(kept[one]*(1 - 1/factor)*weights[one], (1 - kept[other])*weights[other], 2*kept[other]*(factor - 1)*weights[other] + 1)
            kept[one] -= amount/weights[one]
            kept[other] += amount/weights[other]
        return kept

    def mix(self, coefficients):
        """The plan with the least sum of errors."""
        errors = (np.arange(61)[::-1]/60)**2
        return np.clip(least_total([(self.kept, k*errors) for k in coefficients], self.weights, self.mean), 0, 1)


class Levels:
    """The same for levels of one method within a budget; a plan is a list of {method: level}."""

    def __init__(self, task, sweep, limit, cost, images):
        x = task.measure[0][:1]
        problem, budgets, applier, *_ = set_up(sweep, limit, cost, (), None, (), None, task.model, x, None, None, None)
        self.task, self.limits = task, Limits(problem, applier, budgets)
        self.meter = Meter(task.model, applier, eval_on(task, images), higher_is_better=not task.text, by="objective")
        self.n_layers, self.choices = len(problem.choices), problem.choices

    @property
    def spent(self): return self.meter.n

    def loss(self, levels, share=1.):
        """Mean loss on a part of the samples."""
        return self.meter.damage(self.limits.plan(levels), share)

    @torch.no_grad()
    def held_out(self, levels):
        """Score on data that no search has seen."""
        x, y = self.task.held_out
        with self.limits.applier(self.limits.plan(levels)): return self.task.score(self.task.model.eval()(x), y).mean().item()

    def step(self, levels, k, way):
        """A choice goes to the measured level next to its own; whether there is one."""
        ladder = [str(sorted(at.items())) for at in self.choices[k].levels]
        place = self.place(k, levels[k], ladder) + way
        if 0 <= place < len(ladder): levels[k] = self.choices[k].levels[place]
        return 0 <= place < len(ladder)

    def place(self, k, levels, ladder):
        """On which measured level a choice stands, or next to which (a start may stand between two)."""
        if str(sorted(levels.items())) in ladder: return ladder.index(str(sorted(levels.items())))
        (level,) = levels.values() or (0,)
        return min(range(len(ladder)), key=lambda i: abs(next(iter(self.choices[k].levels[i].values()), 0) - level))

    def child(self, levels, chance):
        """One to three switches: one choice goes to the milder side, others to the harsher side until the budget holds."""
        new = list(levels)
        for _ in range(1 + min(chance.integers(3), chance.integers(3))):
            milder = next((k for k in chance.permutation(self.n_layers) if self.step(new, k, -1)), None)
            rest = [k for k in range(self.n_layers) if k != milder]
            while rest and not self.limits.allow(new):
                k = rest[chance.integers(len(rest))]
                if not self.step(new, k, 1): rest.remove(k)
        return new if self.limits.allow(new) else levels

    def mix(self, coefficients):
        """The plan with the least sum of errors that `allocate` finds."""
        problem = self.limits.problem.only(*{m for c in self.choices for m in c.methods})
        problem.choices = [replace(c, damage=[k*(i/max(1, len(c.levels) - 1))**2 for i in range(len(c.levels))]) for k, c in zip(coefficients, self.choices, strict=True)]
        return self.limits.allocated(problem)


def evolution(judge, starts, evaluations, chance):
    """EvoPress, from the best of the starts."""
    now, first = min((judge.loss(plan), i) for i, plan in enumerate(starts))
    plan = starts[first]
    while judge.spent + 16*.1 + 4/3 + 1.1 <= evaluations:
        left = [judge.child(plan, chance) for _ in range(16)]
        for share, n in ((.1, 4), (1/3, 1)):
            of = [judge.loss(trial, share) for trial in left]
            left = [left[i] for i in np.argsort(of)[:n]]
        loss = judge.loss(left[0])
        if loss < now: now, plan = loss, left[0]
    return plan, now


def coefficients(judge, starts, evaluations, chance):
    """SPDY: the mix by errors that are squares of the place on a ladder, times a coefficient for each layer."""
    now, first = min((judge.loss(plan), i) for i, plan in enumerate(starts))
    plan, best, least, n, begin = starts[first], None, math.inf, judge.n_layers, judge.spent
    while judge.spent + 1 <= evaluations:
        used = (judge.spent - begin)/(evaluations - begin)
        c = chance.random(n)
        if used > .1 and best is not None:
            stays = chance.permutation(n) >= max(1, round(.1*n*(1 - used)))
            c[stays] = best[stays]
        trial = judge.mix(c)
        loss = judge.loss(trial)
        if loss < least: best, least = c, loss
        if loss < now: plan, now = trial, loss
    return plan, now


def zeros_cell(task, pct, args):
    """What our search found for zeros: the result, plans of the starts, the plan; and what makes a judge."""
    found = search_targets(task.model, task.measure[0][:1], eval_on(task, args.images), pct, evaluations=args.evaluations, higher_is_better=not task.text, verbose=False)
    kept = {name: 1 - np.array(list(plan.values()))/100 for name, plan in found.plans.items()}
    ours = kept.pop("search")
    return found, list(kept.values()), ours, lambda: Zeros(task, pct, args.images)


def levels_cell(task, method, levels, limit, cost, args):
    """The same for levels of one method."""
    x, eval_fn = task.measure[0][:1], eval_on(task, args.images)
    sweep = SensitivityAnalyzer(task.model, x, eval_fn, higher_is_better=not task.text, objective_name="loss").sweep(method, levels, verbose=False)
    if callable(limit): limit = limit(sweep)
    found = search_plan(task.model, x, eval_fn, sweep, limit, cost, evaluations=args.evaluations, verbose=False)
    def make(): return Levels(task, sweep, limit, cost, args.images)
    limits = make().limits
    at = found.plans["search"][method]
    ours = [{method: level} if (level := at.get(c.name, 0)) else {} for c in limits.choices]
    return found, list(sure_starts(limits).values()), ours, make


def bits_cell(task, bits, args):
    """Bits, at the bytes of so many for all layers."""
    def limit(sweep):
        plan = Plan(quantization={row.name: int(bits) for row in sweep[0].layers})
        return Applier(task.model, task.measure[0][:1], ["quantization"], settings={"quantization": sweep[0].settings}).costs(plan, ("bytes",))["bytes"]
    return levels_cell(task, "quantization", [8, 7, 6, 5, 4, 3, 2], limit, "bytes", args)


def macs_cell(task, pct, args):
    """Channels, at a share of the multiply-accumulates."""
    return levels_cell(task, "pruning", [12.5, 25, 37.5, 50, 62.5, 75, 87.5], f"{pct}%", "flops", args)


def rows_of(name, seed, cell, amount, args):
    """One row for each search."""
    task = trained(name, seed, args.cache)
    start = process_time()
    found, starts, plan, make = {"sparsity": zeros_cell, "bits": bits_cell, "MACs": macs_cell}[cell](task, amount, args)
    took, rows = process_time() - start, []
    def add(search, judge, plan, loss, **more):
        rows.append(dict(task=name, cell=f"{cell} {amount:g}", seed=seed, search=search, held_out=judge.held_out(plan), loss=loss) | more)
    with leave_no_trace(task.model):
        judge = make()
        of_starts = [judge.loss(start) for start in starts]
        best = int(np.argmin(of_starts))
        add("best start", judge, starts[best], of_starts[best], evaluations=len(starts), seconds=0.)
        add("ours", judge, plan, judge.loss(plan), evaluations=found.evaluations, seconds=took)
    for search in (evolution, coefficients):
        if search.__name__ not in args.only: continue
        with leave_no_trace(task.model):
            judge, start = make(), process_time()
            trial, loss = search(judge, starts, found.evaluations, np.random.default_rng(seed))
            add(search.__name__, judge, trial, loss, evaluations=judge.spent, seconds=process_time() - start)
    return rows


def trained(name, seed, folder):
    """The task, trained now or read from a folder."""
    if name in pretrained: return pretrained[name](seed)
    path = Path(folder)/f"{name}_{seed}.pt" if folder else None
    if path and path.exists(): return torch.load(path, weights_only=False)
    task = tasks[name](seed)
    if path: torch.save(task, path)
    return task


def main():
    """Train, search, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=[*tasks, *pretrained])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training each")
    parser.add_argument("--sparsities", type=float, nargs="*", default=[80., 90.], help="percent of all compressible weights")
    parser.add_argument("--bits", type=float, nargs="*", default=[4., 3.], help="in the mean over the weights")
    parser.add_argument("--macs", type=float, nargs="*", default=[50., 30.], help="percent of the multiply-accumulates that are left")
    parser.add_argument("--evaluations", type=int, default=120, help="of all samples, for each search")
    parser.add_argument("--images", type=int, default=300, help="most samples to search with: of the text 150, of the table 120")
    parser.add_argument("--only", nargs="*", default=["evolution", "coefficients"], help="what to compare with")
    parser.add_argument("--cache", help="folder in which trained networks are kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    cells = [("sparsity", v) for v in args.sparsities] + [("bits", v) for v in args.bits] + [("MACs", v) for v in args.macs]
    for name in args.tasks:
        for cell, amount in cells:
            for seed in args.seeds:
                try: new = rows_of(name, seed, cell, amount, args)
                except ValueError as e:   # such a budget cannot be reached
                    print(f"{name}, {cell} {amount:g}, seed {seed}: {e}", flush=True)
                    continue
                rows += new
                print(pd.DataFrame(new).to_string(index=False, float_format=lambda v: f"{v:.4f}"), flush=True)
    table = pd.DataFrame(rows).pivot_table(index=["task", "cell", "search"], columns="seed", values="held_out", sort=False)
    table.insert(0, "mean", table.mean(axis=1))
    print(f"\nheld-out score (accuracy; bits a byte for the transformer)\n\n{table.to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
