"""One measurement with a journal, in a process that may be killed: `python journal_script.py sweep|search|estimate JOURNAL CALLS RESULT [SECONDS]`; of a part of a sweep `part:LAYERS:LEVELS`."""
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from fasterai_sens import SensitivityAnalyzer, evaluation, search_targets

levels = range(4, 96, 4)   # more than a process gets done before it is killed


def network():
    """A small classifier, the same in each process, and data on which it is right"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    x = torch.randn(200, 8)
    return net, x, net(x).argmax(1)


def pause():
    """As long as an evaluation of a larger network takes"""
    time.sleep(float(os.environ.get("JOURNAL_SCRIPT_SECONDS", 0)))


def run(kind, journal, calls):
    """The sweep or the search, as plain data; a line of the file `calls` for each evaluation that really was made"""
    net, x, y = network()

    def eval_fn(model):
        pause()
        with torch.no_grad():
            found = (model(x).argmax(1) == y).float(), nn.functional.cross_entropy(model(x), y, reduction="none")
        with open(calls, "a") as f:
            f.write(f"{found[1].double().mean().item()!r}\n")
        return found
    def loss(out, y):
        pause()
        found = nn.functional.cross_entropy(out, y, reduction="none")
        with open(calls, "a") as f:
            f.write("gradients\n" if found.requires_grad else f"{found.mean().item()!r}\n")
        return found
    if kind == "estimate":
        data = evaluation((x, y), lambda out, y: (out.argmax(1) == y).float(), loss)
        analyzer = SensitivityAnalyzer(net, x[:1], data, reuse=False)
        found = analyzer.estimate("sparsity", levels, check=3, verbose=False, journal=journal)
        return [result.as_dict() for result in found], str(found.agreement)
    if kind.startswith("part:"):
        _, layers, some = kind.split(":")
        analyzer = SensitivityAnalyzer(net, x[:1], eval_fn, reuse=False)
        found = analyzer.sweep("sparsity", list(map(int, some.split(","))), layers=layers.split(","), verbose=False, journal=journal)
        return [result.as_dict() for result in found]
    if kind == "sweep":
        sweep = SensitivityAnalyzer(net, x[:1], eval_fn, reuse=False).sweep("sparsity", levels, verbose=False, journal=journal)
        return [result.as_dict() for result in sweep]
    return search_targets(net, x[:1], eval_fn, 60, evaluations=100, verbose=False, journal=journal).as_dict()


if __name__ == "__main__":
    kind, journal, calls, result = sys.argv[1:5]
    os.environ["JOURNAL_SCRIPT_SECONDS"] = sys.argv[5] if len(sys.argv) > 5 else "0"
    found = run(kind, journal, calls)
    Path(result).write_text(repr(found))
