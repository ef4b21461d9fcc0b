"""Two interrupts at random moments, while a model is analyzed, searched, quantized or pruned: is the model as it was?

    .venv/bin/python benchmarks/interrupts.py [--tries 2000] [--seed 0] [--signal SIGINT] [--plain] [--jobs sparsity pruning ...]

Each try runs a job on a small network. Another process sends the first signal at a random moment of the job, and the second one 0.1 to 5 ms later, so that it falls on the exception's way out, where the model is put back. Then the `fingerprint` is compared with that of before. Printed are, for
each job, tries, signals that arrived, tries in which the job was ended by one, and models that came back changed: none may. `--plain` takes the protection
away (handlers run at once, as they do without `PutBack`), to see that the tries find what they look for.
"""
import argparse
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter

import torch
from torch import nn

from fasterai_sens import (
    FineTuned,
    Pruner,
    Recalibrated,
    SensitivityAnalyzer,
    Sparse,
    analyze_degradation,
    analyze_sensitivity,
    changes,
    count_flops_params,
    evaluation,
    fingerprint,
    leave_no_trace,
    quantize_model,
    search_targets,
    taylor,
)
from fasterai_sens.core import signals
from fasterai_sens.core.layers import all_units
from fasterai_sens.measure.loop import evaluate
from fasterai_sens.methods.proof import channel_groups


class Net(nn.Module):
    """Batch norm, and a layer with state in attributes."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.head = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.membrane, self.past = torch.zeros(3), []

    def forward(self, x):
        """[n, 6] -> [n, 3]"""
        out = self.head(self.bn(self.stem(x)).relu())
        self.membrane = .5*self.membrane + out.detach().mean(0)
        self.past.append(float(self.membrane.mean()))
        return out + self.membrane


x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
data = [(x, y)]


@torch.no_grad()
def score(model):
    """A number that depends on every weight."""
    return -(model(x).square().mean().item())


def score_in_training(model):
    """The same, and modes, statistics and gradients change."""
    model.train()
    model(x).square().mean().backward()
    return score(model)


def with_quantized(model):
    """Bits in force in a block."""
    with quantize_model(model, 4, quant_activations=True, calibration_data=data): evaluate(model, score)


def with_sparse(model):
    """A perturbation used by hand."""
    for unit in all_units(model)[0]:
        with Sparse(50)(model, unit), Recalibrated([x])(model): score(model)


def change_all(model):
    """A block that changes everything."""
    with leave_no_trace(model):
        for p in model.parameters(): p.data.zero_()
        model.half().train()
        model.past.clear()


def fine_tuned(model):
    """Training on a copy."""
    def train(m):
        opt = torch.optim.SGD(m.parameters(), .1)
        m(x).square().mean().backward()
        opt.step()
    analyze_sensitivity(model, x, FineTuned(train, score), verbose=False)


def learner_of(model):
    """A fastai Learner of the same data."""
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    pairs = list(zip(x, y, strict=True))
    return Learner(DataLoaders(DataLoader(pairs, 8), DataLoader(pairs, 8)), model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)


jobs = {
    "sparsity": lambda m: analyze_sensitivity(m, x, score, verbose=False),
    "training mode": lambda m: analyze_sensitivity(m, x, score_in_training, verbose=False),
    "taylor": lambda m: analyze_sensitivity(m, x, score, criteria=taylor, calibration_data=data, verbose=False),
    "quantization": lambda m: analyze_sensitivity(m, x, score, "quantization", 4, quant_activations=True, calibration_data=data, verbose=False),
    "pruning": lambda m: analyze_sensitivity(m, x, score, "pruning", verbose=False),
    "sweep": lambda m: SensitivityAnalyzer(m, x, score).sweep("sparsity", [50, 90], verbose=False),
    "search": lambda m: search_targets(m, x, score, 50, recalibrate=[x], evaluations=18, verbose=False),
    "degradation": lambda m: analyze_degradation(m, x, score, [80, 50], verbose=False),
    "quantize_model": with_quantized,
    "Sparse by hand": with_sparse,
    "fine-tuned": fine_tuned,
    "evaluation": lambda m: evaluation(data, lambda p, t: p.mean())(m),
    "groups": lambda m: channel_groups(m, x),
    "Pruner": lambda m: Pruner(m, 50, example_inputs=x),
    "counts": lambda m: count_flops_params(m, x, verbose=False),
    "leave_no_trace": lambda m: [change_all(m) for _ in range(5)],
    "Learner": lambda a: lambda m: a.analyze(verbose=False),
}


class Sender:
    """Another process, which sends this one two signals when it is told to."""
    code = """if True:
    import os, sys, time
    for line in sys.stdin:
        for seconds in map(float, line.split()):
            time.sleep(seconds)
            os.kill(os.getppid(), SIGNAL)
    """

    def __init__(self, number):
        code = self.code.replace("SIGNAL", str(int(number)))
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True, start_new_session=True)

    def send(self, first, gap):
        """After `first` seconds, and again `gap` later."""
        print(first, gap, file=self.process.stdin, flush=True)


class Stop(BaseException):
    """What the handler raises, as a time-out's would."""


arrived = []


def handler(signum, frame):
    """Ends whatever runs."""
    arrived.append(signum)
    raise Stop


def attempt(job, model):
    """Run a job; the exception that ended it, or None."""
    try:
        job(model)
    except Stop as e:
        return e


def disturbed(job, model, sender, first, gap):
    """Run a job with two signals; the exception that ended it, or None."""
    arrived.clear()
    ended, until = None, time.monotonic() + first + gap + 1
    try:
        sender.send(first, gap)
        ended = attempt(job, model)
    except Stop as e:
        ended = e
    while True:   # until both have arrived
        try:
            while len(arrived) < 2 and time.monotonic() < until: time.sleep(1e-3)
            return ended
        except Stop: pass


def look(model):
    """Everything that has to be the same, before and after."""
    here = dict(handlers=signal.getsignal(signal.SIGINT), grad=torch.is_grad_enabled(), fast=torch.backends.mha.get_fastpath_enabled())
    return fingerprint(model) | dict(switches=here)


def timed(job, model):
    """Seconds that a job takes."""
    start = time.perf_counter()
    job(model)
    return time.perf_counter() - start


def try_out(name, job, sender, tries, rng):
    """Tries, signals that arrived, jobs that were ended by one, names of what came back changed."""
    model = Net()
    score(model)
    if name == "Learner":
        learn = learner_of(model)
        with learn.no_logging(): learn.fit(1)
        job = job(SensitivityAnalyzer.from_learner(learn))
    job(model)
    seconds = min(timed(job, model) for _ in range(5))
    before, came, ended, n_corrupt, corrupt = look(model), 0, 0, 0, Counter()
    for _ in range(tries):
        last = disturbed(job, model, sender, rng.uniform(0, seconds), rng.uniform(1e-4, 5e-3))   # held, as a notebook holds its last exception
        came, ended = came + len(arrived), ended + (last is not None)
        found = changes(before, look(model))
        if not found: continue
        n_corrupt += 1
        corrupt.update(found[:3])
        if name != "Learner": model = Net()
        score(model)
        before = look(model)
    return seconds, came, ended, n_corrupt, corrupt


def main():
    """Try, print, and fail if a model was changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=2000, help="of all jobs together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--jobs", nargs="+", choices=list(jobs), default=list(jobs), help="which ones; all, if left out")
    parser.add_argument("--signal", default="SIGINT", choices=["SIGINT", "SIGTERM", "SIGALRM"], help="what is sent")
    parser.add_argument("--plain", action="store_true", help="without the protection")
    args = parser.parse_args()
    number = getattr(signal, args.signal)
    if args.plain: signals.in_the_middle = lambda frame: False
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(number, handler)
    sender, rng, all_corrupt = Sender(number), random.Random(args.seed), 0
    tries = -(-args.tries//len(args.jobs))
    print(f"{'job':16} {'seconds':>8} {'tries':>6} {args.signal:>8} {'ended':>6} {'corrupt':>8}")
    for name in args.jobs:
        seconds, came, ended, corrupt, what = try_out(name, jobs[name], sender, tries, rng)
        print(f"{name:16} {seconds:>8.3f} {tries:>6} {came:>8} {ended:>6} {corrupt:>8}  {', '.join(f'{k} ({n})' for k, n in what.most_common(3))}", flush=True)
        all_corrupt += corrupt
    sender.process.kill()
    print(f"{tries*len(args.jobs)} tries, {all_corrupt} corrupt")
    sys.exit(bool(all_corrupt))


if __name__ == "__main__": main()
