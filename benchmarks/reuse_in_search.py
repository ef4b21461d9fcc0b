"""How much of a search's work could be skipped if plans that were measured left their activations behind: a bound, by counting.

    .venv/bin/python benchmarks/reuse_in_search.py [--cells resnet18/sparsity/80 resnet18/bits/4 transformer/sparsity/80 mlp/sparsity/80] [--kept 1 4 16 10000] [--cache FOLDER]

Every plan that a search measures is noted, with its share of the samples. What lies before the first layer in which it differs from a plan that is kept, of as many samples or more (samples are nested), would not have to be computed again. Printed is the
share of all multiply-accumulates that this saves with so many plans kept, the least used of which makes room. Finding out, keeping and comparing cost nothing here, so it is the most that reuse between the steps of a search could do.
"""
import argparse
import warnings

import torch
from search import bits_cell, macs_cell, trained, zeros_cell
from torch import nn

from fasterai_sens import Plan
from fasterai_sens.plans.meter import Meter

cells = {"sparsity": zeros_cell, "bits": bits_cell, "MACs": macs_cell}


def costs_in_order(model, x):
    """Multiply-accumulates of each layer for a sample, in the order of the first calls"""
    costs, hooks = {}, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear): continue
        def note(module, args, out, name=name): costs[name] = costs.get(name, 0) + out.numel()//len(x)*module.weight[0].numel()
        hooks.append(module.register_forward_hook(note))
    with torch.no_grad(): model.eval()(x)
    for hook in hooks: hook.remove()
    return costs


def noted(run):
    """Plans that are measured while `run` runs, each with its share of the samples"""
    plans, measure = [], Meter.measure
    def note(self, plan, around=None, share=1.):
        plans.append((plan, share))
        return measure(self, plan, around, share)
    Meter.measure = note
    try: run()
    finally: Meter.measure = measure
    return plans


def levels(plan, layers):
    """What happens to each layer: targets, or those of each method of a plan"""
    of_methods = list(plan.values()) if isinstance(plan, Plan) else [plan]
    return [tuple(at.get(name) for at in of_methods) for name in layers]


def same_before(one, other, costs):
    """The work of the layers before the first in which two plans differ"""
    work = 0
    for a, b, cost in zip(one, other, costs, strict=True):
        if a != b: break
        work += cost
    return work


def saved(plans, costs, n_kept):
    """Share of the work that need not be done with so many plans kept"""
    kept, skipped, done, whole = [], 0, 0, sum(costs.values())
    for plan, share in plans:
        now = levels(plan, costs)
        gains = [same_before(now, old, costs.values()) if of >= share else 0 for old, of in kept]
        best = max(range(len(kept)), key=gains.__getitem__, default=None)
        if best is not None:
            skipped += share*gains[best]/whole
            kept.append(kept.pop(best))
        kept = [*kept, (now, share)][-n_kept:]
        done += share
    return skipped/done


def main():
    """A line for each search"""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["resnet18/sparsity/80", "resnet18/bits/4", "transformer/sparsity/80", "mlp/sparsity/80"], help="network/what/how much, as in search.py")
    parser.add_argument("--kept", type=int, nargs="+", default=[1, 4, 16, 10_000], help="plans whose activations are there")
    parser.add_argument("--evaluations", type=int, default=120, help="of all samples, for each search")
    parser.add_argument("--images", type=int, default=300, help="most samples to search with")
    parser.add_argument("--cache", help="folder in which trained networks are kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for cell in args.cells:
        name, what, amount = cell.split("/")
        task = trained(name, 0, args.cache)
        costs = costs_in_order(task.model, task.measure[0][:2])
        plans = noted(lambda task=task, what=what, amount=amount: cells[what](task, float(amount), args))
        shares = ", ".join(f"{n} kept {100*saved(plans, costs, n):.0f} %" for n in args.kept)
        print(f"{cell}: {len(plans)} plans measured; {shares}", flush=True)


if __name__ == "__main__":
    main()
