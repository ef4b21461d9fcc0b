"""fasterai 0.3.2's analysis and ours on one model with one metric, in one process, in turns.

    make peers && .venv/bin/python benchmarks/vs_fasterai.py [--rounds 5] [--images 297] [--threads 1]

The model is ResNet-18, trained on the digits; the metric is the mean square of its outputs for validation images (a loss would not do: fasterai
prunes the output layer too, and the classes run out). Both analyze sparsity at 50 %, weights in 8 bits,
pruning at 50 %, and sweep three levels of sparsity; who goes first changes from round to round. `overhead` is what a run takes beyond its evaluations,
set-up included, for each of them. Times are CPU times, so that other work on the machine matters little; the ratios are what to look at.
"""
import argparse
import gc
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from statistics import median
from time import process_time

import torch

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.show.demo import digits_learner

peer = Path(__file__).parent.parent / ".venv" / "peers" / "fasterai-0.3.2"
jobs = {  # name -> what to call
    "sparsity 50 %": lambda analyzer: analyzer.analyze("sparsity", 50, verbose=False),
    "quantization 8 bits": lambda analyzer: analyzer.analyze("quantization", 8, verbose=False),
    "pruning 50 %": lambda analyzer: analyzer.analyze("pruning", 50, verbose=False),
    "sweep 25, 50, 75 %": lambda analyzer: analyzer.sweep("sparsity", [25, 50, 75], verbose=False),
}


# Without these glibc hands memory back after an evaluation or keeps it, as the heap happens to lie: 20 % of an evaluation, for either library.
keep_memory = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}


@contextmanager
def importable(folder):
    """Let imports find what is in `folder`."""
    if not (folder / "fasterai").is_dir(): sys.exit(f"{folder.name} is not in .venv/peers; run `make peers`")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


class Timed:
    """An `eval_fn`, the mean square of the outputs for some images, that remembers how long each call took."""
    def __init__(self, x):
        self.x, self.seconds = x, []

    @torch.no_grad()
    def __call__(self, model):
        start = process_time()
        score = model(self.x).square().mean().item()
        self.seconds.append(process_time() - start)
        return score


def run(cls, model, x, job):
    """Seconds of one job in all, seconds of its evaluations."""
    metric = Timed(x)
    warnings.simplefilter("ignore")
    gc.collect()   # no job pays for what the one before it left behind
    with redirect_stdout(StringIO()):
        start = process_time()
        job(cls(model, x[:1], metric, higher_is_better=False))
        return process_time() - start, metric.seconds


def compare(classes, model, x, rounds):
    """(job, name) -> one (seconds in all, seconds of its evaluations) a round; who goes first changes."""
    runs = {(job, name): [] for job in jobs for name in classes}
    for i in range(rounds):
        for job, call in jobs.items():
            for name in list(classes)[::1 if i % 2 == 0 else -1]: runs[job, name].append(run(classes[name], model, x, call))
    return runs


def print_table(runs, names):
    """One line for each job and library, with the ratio of totals to the first library's."""
    print(f"{'job':20}  {'library':16} {'evaluations':>11} {'CPU s':>8} {'one evaluation ms':>18} {'overhead ms':>12} {'CPU, ratio':>13}")
    for job in jobs:
        first = [total for total, _ in runs[job, names[0]]]
        for name in names:
            rounds = runs[job, name]
            overhead = median((total - sum(evals))/len(evals) for total, evals in rounds)
            ratio = median(total/before for (total, _), before in zip(rounds, first, strict=True))
            print(f"{job:20}  {name:16} {len(rounds[0][1]):>11} {median(t for t, _ in rounds):>8.3f} {1000*median(median(e) for _, e in rounds):>18.2f} "
                  f"{1000*overhead:>12.2f} {ratio:>13.3f}")


def main():
    """Train, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each job is run by each library")
    parser.add_argument("--images", type=int, default=297, help="validation images in the metric, up to 297; fewer show the overhead better")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with importable(peer): theirs = import_module("fasterai.analyze.sensitivity").SensitivityAnalyzer
    learn = digits_learner(1)
    x = learn.dls.valid_ds.tensors[0][:args.images]
    classes = {"fasterai 0.3.2": theirs, "fasterai_sens": SensitivityAnalyzer}
    runs = compare(classes, learn.model, x, args.rounds)
    print(f"ResNet-18, {len(x)} images, {args.rounds} rounds, {args.threads} threads; medians\n")
    print_table(runs, list(classes))


if __name__ == "__main__":
    if not keep_memory.items() <= os.environ.items():
        os.environ.update(keep_memory)  # read when a process starts, so start again
        os.execv(sys.executable, sys.orig_argv)
    main()
