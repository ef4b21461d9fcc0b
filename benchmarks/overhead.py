"""What an analysis costs beyond its evaluations, for each unit, beside one copy of the unit's weight; and the memory that it takes.

    python benchmarks/overhead.py                                  # four models, four methods
    python benchmarks/overhead.py --models resnet18 --methods sparsity --each
    python benchmarks/overhead.py --memory                         # peak memory beyond a model of 2 GB

The evaluation is free: it notes the time and returns how often it was called. What lies between two evaluations of units is what one unit costs: the
one before is put back, this one is compressed. Times are CPU time of the one thread there is, so that a busy machine counts little. `limit` is
2 ms and three copies of the unit's weight (for pruning 10 ms), and `within` the share of units that keep to it. Copies are timed unit after unit, as
an analysis comes by them, and not one weight again and again. `whole` is the time of `analyze` from beginning to end, for each unit, with the look at
all weights after the baseline and at the end. Units are at the default level; the analyzer is made before. Each analysis runs `--rounds` times, and a
unit's time is the median of them.
"""
import argparse
import resource
import subprocess
import sys
import time
import warnings

import numpy as np
import torch
import torchvision.models as zoo
from torch import nn

from fasterai_sens import SensitivityAnalyzer

torch.set_num_threads(1)
warnings.filterwarnings("ignore")


def chain(n=1200):
    """Small linear layers, one after the other"""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(n)))


def large(n=32, width=4096):
    """2.1 GB of weights; the largest unit has 67 MB"""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(n)))


models = {
    "resnet18": (lambda: zoo.resnet18(num_classes=10), (1, 3, 32, 32)),
    "resnet152": (lambda: zoo.resnet152(num_classes=10), (1, 3, 32, 32)),
    "densenet121": (lambda: zoo.densenet121(num_classes=10), (1, 3, 32, 32)),
    "chain": (chain, (1, 16)),
    "large": (large, (1, 4096)),
}
methods = "sparsity", "quantization", "pruning", "low_rank"


class Free:
    """An evaluation that costs nothing, and knows when it was called"""

    def __init__(self):
        self.times = []

    def __call__(self, model):
        """Another number each time"""
        self.times.append(time.thread_time())
        return float(len(self.times))


def copies(analyzer, result):
    """One number for each evaluation: the milliseconds in which the weights of that unit are copied, the median of five rounds"""
    weights, groups = {u.name: u.weight for u in analyzer.units}, {}
    for row in result.layers:
        if row.prunable:
            key = row.name if result.compression_type != "pruning" else row.group_id or row.name
            groups.setdefault(key, []).append(weights[row.name])
    found = np.zeros([5, len(groups)])
    for times in found:
        for i, tensors in enumerate(groups.values()):
            start = time.thread_time()
            for t in tensors:
                t.detach().clone()
            times[i] = time.thread_time() - start
    return 1e3*np.median(found, 0)


def overhead(name, method, n_layers=None, each=False, rounds=3):
    """A row of the table"""
    torch.manual_seed(0)
    make, shape = models[name]
    model, free = make().eval(), Free()
    analyzer = SensitivityAnalyzer(model, torch.randn(shape), free)
    layers = [u.name for u in analyzer.units][:n_layers]
    found, wholes, all_copies = [], [], []
    for _ in range(rounds):
        start = time.thread_time()
        result = analyzer.analyze(method, layers=layers, verbose=False)
        wholes.append(time.thread_time() - start)
        found.append(1e3*np.diff(free.times)[1:])   # without what comes after the baseline
        free.times.clear()
        all_copies.append(copies(analyzer, result)[1:])
    whole, between, each_copy = np.median(wholes), np.median(found, 0), np.median(all_copies, 0)
    limits = np.full(len(between), 10.) if method == "pruning" else 2 + 3*each_copy
    if each:
        for i in np.argsort(limits - between)[:20]:
            print(f"    {between[i]:.2f} ms of {limits[i]:.2f}, copy {each_copy[i]:.2f}")
    cells = [np.median(between), between.mean(), between.max(), np.median(each_copy), np.median(limits), 100*(between <= limits).mean()]
    print(f"{name:12} {method:13} {len(between):5} " + " ".join(f"{c:9.2f}" for c in cells) + f" {1e3*whole/len(between):9.2f} {whole:9.2f}", flush=True)


def peak():
    """Most memory that this process has had, in MB"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024


def memory(method):
    """Peak memory of an analysis beyond the model, in a process of its own"""
    model, free = large().eval(), Free()
    model(torch.randn(1, 4096))
    before = peak()
    analyzer = SensitivityAnalyzer(model, torch.randn(1, 4096), free)
    made, start = peak(), time.perf_counter()
    analyzer.analyze(method, layers=[u.name for u in analyzer.units][:4], verbose=False)
    seconds, unit = time.perf_counter() - start, 4096*4096*4/2**20
    size = sum(p.numel() for p in model.parameters())*4/2**20
    print(f"{method:13} weights {size:.0f} MB, largest unit {unit:.0f} MB; peak: model {before:.0f} MB, analyzer made +{made - before:.0f} MB, "
          f"analysis +{peak() - before:.0f} MB = {(peak() - before)/unit:.2f} units; 4 units in {seconds:.1f} s", flush=True)


def main():
    """All that was asked for"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "densenet121", "resnet152", "chain"], choices=models)
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", action="store_true", help="the units furthest beyond their limit, too")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        memory(args.memory_of)
    elif args.memory:
        for method in ("sparsity", "quantization"):
            subprocess.run([sys.executable, __file__, "--memory-of", method], check=True)
    else:
        print("ms for each unit                   units    median      mean      most      copy     limit    within %   whole   seconds")
        for name in args.models:
            for method in args.methods:
                overhead(name, method, args.layers, args.each, args.rounds)


if __name__ == "__main__":
    main()
