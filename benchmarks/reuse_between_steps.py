"""Searches with and without `reuse`, in one process and in turns: the same plans and numbers, to the bit, in less time.

    .venv/bin/python benchmarks/reuse_between_steps.py [--cells resnet18/zeros ...] [--rounds 1] [--evaluations 0] [--images 300] [--cache FOLDER]

The objective is a function of the model, so it has no gradients: the search measures each layer a little milder and a little harsher, around one plan after another. Times are CPU times of the whole search, with all that is no evaluation.
`reused` is the share of the evaluations that had something in common with a plan that was written down. `bound` is the cost of an evaluation over the mean cost of what comes from a layer on, in multiply-adds: what would be reached if every
evaluation were one of a plan that differs in one layer.
"""
import argparse
import logging
import re
import warnings
from functools import partial
from statistics import median
from time import process_time

import pandas as pd
import torch
from reuse_in_search import costs_in_order
from search import trained

from fasterai_sens import SensitivityAnalyzer, search_plan, search_targets


def function(task, images):
    """Score and loss, as numbers: a search has no parts of the samples and no gradients."""
    x, y = (t[:images] for t in task.measure)
    @torch.no_grad()
    def eval_fn(model):
        out = model(x)
        return task.score(out, y).float().mean().item(), task.loss(out, y).mean().item()
    return eval_fn


def zeros(task, images, evaluations):
    """A search for 80 % zeros."""
    return partial(search_targets, task.model, task.measure[0][:1], function(task, images), 80, evaluations=evaluations or None, verbose=False)


def channels(task, images, evaluations):
    """A search for channels, at half of the multiply-accumulates."""
    eval_fn, sample = function(task, images), task.measure[0][:1]
    sweep = SensitivityAnalyzer(task.model, sample, eval_fn).sweep("pruning", [25, 50, 75], verbose=False)
    return partial(search_plan, task.model, sample, eval_fn, sweep, "50%", "flops", evaluations=evaluations or None, verbose=False)


def bits(task, images, evaluations):
    """A search for plans of 4 bits in the mean."""
    eval_fn, sample = function(task, images), task.measure[0][:1]
    analyzer = SensitivityAnalyzer(task.model, sample, eval_fn)
    sweep = analyzer.sweep("quantization", [8, 6, 4, 3, 2], verbose=False)
    return partial(search_plan, task.model, sample, eval_fn, sweep, "15%", "bytes", evaluations=evaluations or None, verbose=False)


cells = {"zeros": zeros, "bits": bits, "channels": channels}


class Report(logging.Handler):
    """Keeps the last that a search says of plans near one plan."""
    said = ""

    def emit(self, record):
        """A message of the package."""
        if "near one plan" in record.getMessage(): self.said = record.getMessage()


def timed(run, **options):
    """What a search found, and the CPU seconds that it took."""
    started = process_time()
    found = run(**options).as_dict()
    return found, process_time() - started


def main():
    """A row for each search."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["resnet18/zeros", "resnet18/bits", "resnet18/channels", "transformer/zeros", "mobilenet/zeros"], help="network/what")
    parser.add_argument("--rounds", type=int, default=1, help="of both ways")
    parser.add_argument("--evaluations", type=int, default=0, help="for each search; 0: as many as it takes by itself")
    parser.add_argument("--images", type=int, default=300, help="most samples to search with: of the text 150, of the table 120")
    parser.add_argument("--cache", help="folder in which trained networks are kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    report, rows = Report(), []
    logging.getLogger("fasterai_sens").addHandler(report)
    logging.getLogger("fasterai_sens").setLevel(logging.INFO)
    for cell in args.cells:
        network, what = cell.split("/")
        task = trained(network, 0, args.cache)
        costs = list(costs_in_order(task.model, task.measure[0][:2]).values())
        behind = [sum(costs[i:]) for i in range(len(costs))]
        run, plains, reuses = cells[what](task, args.images, args.evaluations), [], []
        for _ in range(args.rounds):
            plain, seconds = timed(run, reuse=False)
            found, faster = timed(run, reuse="auto")
            assert str(found) == str(plain), f"REUSE CHANGED A NUMBER of {cell}"
            plains.append(seconds)
            reuses.append(faster)
        reused = re.search(r"(\d+) of", report.said)
        share = int(reused[1])/found["evaluations"] if reused else 0.
        rows.append({"search": cell, "evaluations": found["evaluations"], "reused": share, "plain, s": median(plains), "reuse, s": median(reuses), "ratio": median(plains)/median(reuses), "bound": len(costs)*sum(costs)/sum(behind)})
        print(pd.DataFrame(rows).round(2).to_string(index=False), flush=True)


if __name__ == "__main__": main()
