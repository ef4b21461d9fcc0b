"""One analysis four ways, in one process and in turns: a plain loop, with reuse, fasterai 0.3.2, and the bound that the architecture sets.

    make peers && .venv/bin/python benchmarks/reuse.py [--rounds 1] [--models resnet18 ...] [--images 8] [--px 128] [--threads 1]

Sparsity at 50 % of every layer; the score is the mean square of the outputs. `bound` is the cost of all evaluations over the cost of what comes behind the
compressed layer in each, in multiply-adds; `of bound` is what reuse reaches of it, set-up included. Scores of the plain loop and with reuse are compared to the
bit. fasterai leaves out the layers of some kinds; its time is
scaled to as many evaluations as the plain loop makes. Times are CPU times, so that other work on the machine matters little. `kept` is the most that reuse held, `peak` the most memory of the process so far.
"""
import argparse
import gc
import os
import resource
import sys
import warnings
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from statistics import mean, median
from time import process_time

import torch
import torchvision
from torch import nn
from vs_fasterai import importable, keep_memory, peer

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.core.layers import all_units

vision = "resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "vgg16", "vit_b_16", "convnext_tiny"


def gpt2():
    """A GPT-2 of the smallest size, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def make(name, images, px):
    """Model, and inputs."""
    torch.manual_seed(0)
    if name == "gpt2": return gpt2().eval(), torch.randint(50257, (max(1, images//4), 64))
    sized = {"image_size": px} if name == "vit_b_16" else {}
    model = getattr(torchvision.models, name)(weights=None, **sized).eval()
    if name == "vit_b_16": nn.init.normal_(model.heads.head.weight, std=.02)   # torchvision starts from zeros: outputs that nothing changes
    return model, torch.randn(images, 3, px, px)


def costs(model, x):
    """Layers in the order of their calls, each with its multiply-adds."""
    calls, handles = [], []
    def note(m, args, out):
        y = out[0] if isinstance(out, tuple) else out
        if isinstance(m, nn.Embedding): calls.append((m, 0))   # looks up; GPT-2's head, which has the same weight, multiplies
        elif isinstance(m, nn.MultiheadAttention): calls.append((m, y.numel()*3*m.embed_dim + 2*y.numel()*y.shape[1]))
        else: calls.append((m, m.weight.numel()*y.numel()//y.shape[1 if y.dim() == 4 and isinstance(m, nn.Conv2d) else -1]))
    holders = {m for unit in all_units(model)[0] for m in unit.modules}
    for m in holders: handles.append(m.register_forward_hook(note))
    with torch.no_grad(): model(x)
    for handle in handles: handle.remove()
    return calls


def bound(model, x):
    """How many times less there is to compute: all evaluations, over what comes behind the compressed layer in each."""
    calls = costs(model, x)
    total, shares = sum(macs for _, macs in calls), []
    for unit in all_units(model)[0]:
        first = next((i for i, (m, _) in enumerate(calls) if set(m.modules()) & set(unit.modules)), len(calls))   # attention calls its output layer itself
        shares.append(sum(macs for _, macs in calls[first:])/total)
    return 1/mean(shares)


class Score:
    """Mean square of the outputs."""
    def __init__(self, x):
        self.x, self.n = x, 0

    @torch.no_grad()
    def __call__(self, model):
        self.n += 1
        out = model(self.x)
        return getattr(out, "logits", out).square().mean().item()


def run(cls, model, x, **options):
    """Seconds of a whole analysis, its scores, the analyzer."""
    warnings.simplefilter("ignore")
    gc.collect()
    score = Score(x)
    with redirect_stdout(StringIO()):
        start = process_time()
        analyzer = cls(model, x[:1], score, higher_is_better=False, **options)
        result = analyzer.analyze("sparsity", 50, verbose=False)
        return process_time() - start, result, analyzer, score.n


def compare(name, theirs, args):
    """One line of the table."""
    model, x = make(name, args.images, args.px)
    best, times = bound(model, x), {"plain": [], "reuse": [], "fasterai": []}
    for _ in range(args.rounds):
        seconds, plain, _, _ = run(SensitivityAnalyzer, model, x, reuse=False)
        times["plain"].append(seconds)
        seconds, reused, analyzer, n = run(SensitivityAnalyzer, model, x)
        times["reuse"].append(seconds)
        try:
            seconds, _, _, n_theirs = run(theirs, model, x)
            times["fasterai"].append(seconds*(len(plain.layers) + 1)/n_theirs)   # it knows fewer kinds of layers: per evaluation
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as e: print(f"  fasterai: {type(e).__name__}: {str(e)[:80]}")
    same = [row.compressed_metric for row in plain.layers] == [row.compressed_metric for row in reused.layers]
    gain = median(a/b for a, b in zip(times["plain"], times["reuse"], strict=True))
    versus = median(a/b for a, b in zip(times["fasterai"], times["reuse"], strict=True)) if times["fasterai"] else float("nan")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024
    print(f"{name:16} {n:>5} {median(times['plain']):>8.2f} {median(times['reuse']):>8.2f} {gain:>7.2f} {best:>7.2f} {100*gain/best:>8.0f} % {versus:>9.2f} "
          f"{'equal' if same else 'DIFFERENT':>9} {analyzer.reuse_report.most_bytes/2**20:>7.0f} {peak:>7.0f}   {analyzer.reuse_report}", flush=True)
    return gain, best, versus


def main():
    """Compare all, print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="how often each analysis is run each way")
    parser.add_argument("--models", nargs="*", default=[*vision, "gpt2"], help="names in torchvision, or gpt2")
    parser.add_argument("--images", type=int, default=8, help="in an evaluation; GPT-2 gets a quarter as many sequences of 64 tokens")
    parser.add_argument("--px", type=int, default=128, help="their size")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with importable(peer): theirs = import_module("fasterai.analyze.sensitivity").SensitivityAnalyzer
    print(f"{'model':16} {'evals':>5} {'plain s':>8} {'reuse s':>8} {'ratio':>7} {'bound':>7} {'of bound':>10} {'fasterai/':>9} {'scores':>9} {'kept MB':>7} {'peak MB':>7}")
    found = [compare(name, theirs, args) for name in args.models]
    print(f"median: {100*median(gain/best for gain, best, _ in found):.0f} % of the bound; at least {min(v for *_, v in found):.2f}x faster than fasterai, "
          f"{min(gain for gain, *_ in found):.2f}x the plain loop")


if __name__ == "__main__":
    if not keep_memory.items() <= os.environ.items():
        os.environ.update(keep_memory)  # read when a process starts, so start again
        os.execv(sys.executable, sys.orig_argv)
    main()
