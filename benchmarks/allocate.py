"""Plans of `allocate` for channels against all plans there are, on small random networks, and its seconds on MobileNetV2.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/allocate.py [--networks 100] [--layers 5] [--steps] [--mobilenet] [--seed 0]

Each network has so many convolutions in a random order of kinds: plain, with a depthwise one before it, reading two earlier ones joined, or added to an earlier one (those lose channels together), then a linear layer behind a pool or,
with its positions, behind a flatten. Every layer has five options: untouched, 20, 40, 60 and 80 % of its channels, with damages made up. Budgets are a random share of the multiply-accumulates, of the parameters, or of both. What each
of the plans costs is worked out here from the description of the network, by arithmetic of its own. `not optimal` is the share of plans with more damage than the best of all, `mean` and `worst` how much more that is, `seconds` the
processor time of one call of `allocate`, which includes finding and proving the groups. With `--steps` the plans are not all looked at: what larger networks get, on networks where it can be judged.
"""
import argparse
import warnings
from time import process_time

import numpy as np
import pandas as pd
import torch
from torch import nn

from fasterai_sens import allocate
from fasterai_sens.core.results import LayerSensitivity, SensitivityResult
from fasterai_sens.core.sweeps import SweepResult
from fasterai_sens.methods.proof import channel_groups
from fasterai_sens.plans import allocate as plans

levels = (20, 40, 60, 80)
kinds = ("plain", "depthwise", "joined", "added")
budget_kinds = {"flops": ("flops",), "params": ("params",), "both": ("flops", "params")}


class RandomNet(nn.Module):
    """Convolutions in random order; `parts` says of each: kind, earlier values that it reads, the value that it is added to."""

    def __init__(self, n_layers, rng):
        super().__init__()
        self.flat, self.widths, self.parts, self.group = bool(rng.random() < .3), [], [], []
        self.convs, self.depthwise, self.norms = nn.ModuleList(), nn.ModuleDict(), nn.ModuleDict()
        for i in range(n_layers):
            kind = "plain" if i == 0 else str(rng.choice(kinds))
            source = i - 1
            reads = [source] if kind != "joined" or i == 1 else [source, int(rng.integers(0, i - 1))]
            onto = int(rng.integers(0, i)) if kind == "added" else None
            self.widths.append(int(rng.integers(2, 9))*5 if onto is None else self.widths[onto])
            self.group.append(i if onto is None else self.group[onto])
            self.parts.append((kind, reads, onto))
            n_in = 3 if i == 0 else sum(self.widths[j] for j in reads)
            if kind == "depthwise": self.depthwise[str(i)] = nn.Conv2d(n_in, n_in, 3, padding=1, groups=n_in)
            if rng.random() < .5: self.norms[str(i)] = nn.BatchNorm2d(self.widths[i])
            self.convs.append(nn.Conv2d(n_in, self.widths[i], 3, padding=1))
        self.head = nn.Linear(self.widths[-1]*(16 if self.flat else 1), 4)

    def forward(self, x):
        values = []
        for i, (conv, (_, reads, onto)) in enumerate(zip(self.convs, self.parts, strict=True)):
            if i: x = torch.cat([values[j] for j in reads], 1)
            if str(i) in self.depthwise: x = self.depthwise[str(i)](x)
            x = conv(x)
            if str(i) in self.norms: x = self.norms[str(i)](x)
            values.append((x if onto is None else x + values[onto]).relu())
        return self.head(values[-1].flatten(1) if self.flat else values[-1].mean((2, 3)))

    def cost_of(self, width):
        """Multiply-accumulates and parameters, from the number of channels of each layer (numbers or arrays)."""
        macs = params = 0
        for i, (kind, reads, _) in enumerate(self.parts):
            n_in, n_out = 3 if i == 0 else sum(width[j] for j in reads), width[i]
            if kind == "depthwise": macs, params = macs + 9*16*n_in, params + 10*n_in
            macs, params = macs + 9*16*n_in*n_out, params + 9*n_in*n_out + n_out*(3 if str(i) in self.norms else 1)
        last = width[-1]*(16 if self.flat else 1)
        return {"flops": macs + 4*last, "params": params + 4*last + 4}


def problem(n_layers, seed):
    """A network, an input, a sweep with damages made up, and the damages by group."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model, x = RandomNet(n_layers, rng).eval(), torch.randn(1, 3, 4, 4)
    found = [g for g in channel_groups(model, x) if not g.reason]
    assert len(found) == len(set(model.group)), "the library sees other groups than the network has"
    damages = {g.name: np.cumsum(rng.random(len(levels))**2)*rng.random() for g in found}
    def rows(i): return [LayerSensitivity(u.name, u.layer_type, u.params, .9, .9 - damages[g.name][i], damages[g.name][i], g.group_id, list(g.members) if g.group_id else []) for g in found for u in g.units]
    sweep = SweepResult([SensitivityResult("pruning", level, .9, rows(i)) for i, level in enumerate(levels)])
    by_layer = {int(n.split(".")[1]): [0., *damages[g.name]] for g in found for n in g.members if n.startswith("convs")}
    return model, x, sweep, by_layer, rng


def best_of_all(model, damages, budgets):
    """The least damage of all plans within the budgets; infinite if there is none."""
    groups = sorted(set(model.group))
    picked = np.stack(np.meshgrid(*[range(len(levels) + 1)]*len(groups), indexing="ij")).reshape(len(groups), -1)
    left = {g: np.array([model.widths[g] - model.widths[g]*level//100 for level in (0, *levels)])[at] for g, at in zip(groups, picked, strict=True)}
    costs = model.cost_of([left[g] for g in model.group])
    harm = sum(np.array(damages[g])[at] for g, at in zip(groups, picked, strict=True))
    inside = np.all([costs[n] <= b for n, b in budgets.items()], axis=0)
    return harm[inside].min() if inside.any() else np.inf


def compare(n_layers, seed):
    """Rows of the table for one network."""
    model, x, sweep, damages, rng = problem(n_layers, seed)
    whole = model.cost_of(model.widths)
    for name, costs in budget_kinds.items():
        best = np.inf
        while not np.isfinite(best):
            budgets = {n: int(whole[n]*rng.uniform(.2, .8)) for n in costs}
            best = best_of_all(model, damages, budgets)
        start = process_time()
        plan = allocate(sweep, budgets, model=model, sample=x, **quiet)
        seconds = process_time() - start
        assert all(plan.costs[n] <= b for n, b in budgets.items())
        yield dict(budget=name, worse=plan.damage/best - 1 if best else float(plan.damage > 0), seconds=seconds)


def mobilenet(seed):
    """Seconds on MobileNetV2 of torchvision, images of 32 x 32, nine levels, damages made up."""
    from torchvision.models import mobilenet_v2
    torch.manual_seed(seed)
    model, x, rng = mobilenet_v2(num_classes=10).eval(), torch.randn(1, 3, 32, 32), np.random.default_rng(seed)
    found, steps = [g for g in channel_groups(model, x) if not g.reason], range(10, 100, 10)
    damages = {g.name: np.sort(rng.random(len(steps)))*rng.random() for g in found}
    def rows(i): return [LayerSensitivity(u.name, u.layer_type, u.params, .9, .9 - damages[g.name][i], damages[g.name][i], g.group_id, list(g.members) if g.group_id else []) for g in found for u in g.units]
    sweep = SweepResult([SensitivityResult("pruning", level, .9, rows(i)) for i, level in enumerate(steps)])
    for budgets in ({"flops": "50%"}, {"params": "50%"}, {"flops": "50%", "params": "50%"}):
        start = process_time()
        plan = allocate(sweep, budgets, model=model, sample=x, **quiet)
        print(f"MobileNetV2, {budgets}: {process_time() - start:.1f} s, damage {plan.damage:.4f}, {plan.costs}", flush=True)


quiet = dict(verbose=False)

if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--networks", type=int, default=100)
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--steps", action="store_true")
    p.add_argument("--mobilenet", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.mobilenet: mobilenet(args.seed)
    if args.steps: plans.most_plans = 0
    table = pd.DataFrame([row for seed in range(args.networks) for row in compare(args.layers, args.seed + seed)])
    found = table.groupby("budget", sort=False).agg(plans=("worse", "size"), not_optimal=("worse", lambda w: (w > 1e-9).mean()), mean=("worse", "mean"), worst=("worse", "max"), seconds=("seconds", "mean"))
    print(found.to_string(formatters={n: "{:.2%}".format for n in ("not_optimal", "mean", "worst")} | {"seconds": "{:.2f}".format}))
