"""What a sweep takes with one process and with several, side by side in one run.

    .venv/bin/python benchmarks/workers.py [--jobs 2] [--images 64] [--rounds 3] [--reuse]

Sparsity of every layer of ResNet-18 at three levels; each process computes with one thread. The results are compared to the bit. Printed are, for each round, seconds with one process and with several, and their ratio, and at
the end the median ratio, the time that it takes to start the processes (they import PyTorch), and the load of the machine: with other work on it, processes share the cores that are left, and the ratio says little.
"""
import argparse
import os
import statistics
import time

import torch
from torchvision.models import resnet18

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.core.workers import spread


def timed(call):
    """Seconds, and what the call returned"""
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


def main():
    """All rounds, one line for each"""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reuse", action="store_true", help="with prefixes reused; each process reuses on its own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, images = resnet18(num_classes=10).eval(), torch.randn(args.images, 3, 64, 64)
    labels = torch.randint(0, 10, (args.images,))
    analyzer = SensitivityAnalyzer(model, images[:1], (images, labels), reuse="auto" if args.reuse else False)

    def sweep(n_jobs): return analyzer.sweep("sparsity", [50, 80, 95], n_jobs=n_jobs, verbose=False)
    starting, _ = timed(lambda: list(spread(float, range(2*args.jobs), args.jobs)))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; {args.jobs} processes are ready after {starting:.1f} s")
    ratios = []
    for i in range(args.rounds):
        one, here = timed(lambda: sweep(1))
        several, there = timed(lambda: sweep(args.jobs))
        same = repr([r.as_dict() for r in here]) == repr([r.as_dict() for r in there])
        ratios.append(one/several)
        print(f"round {i + 1}: {one:.1f} s with 1, {several:.1f} s with {args.jobs}, {ratios[-1]:.2f}x as fast; {'equal to the bit' if same else 'DIFFERENT RESULTS'}")
    print(f"median: {statistics.median(ratios):.2f}x as fast with {args.jobs} processes; load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__": main()
