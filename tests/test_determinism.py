"""Determinism: the same inputs give the same result to the bit, and the caller's random numbers go on as if nothing had been called.

`python tests/test_determinism.py --threads` prints what differs between one thread and two.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fasterai_sens import (
    Refine,
    SensitivityAnalyzer,
    Settle,
    allocate,
    analyze_degradation,
    compress_to_size,
    search_plan,
    search_targets,
)

QUIET = dict(verbose=False)


def network(width=8):
    """A small classifier with batch norm, dropout and attention, and data; the same in each process"""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
    front = nn.Conv2d(1, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(2)
    net = nn.Sequential(*front, nn.Unflatten(1, (1, width)), nn.Flatten(0, 1), nn.Linear(9, width), block, nn.Flatten(), nn.Dropout(), nn.Linear(width**2, 3))
    return net.eval(), torch.randn(64, 1, 8, 8), torch.randint(3, (64,))


def generators():
    """Where the random numbers of PyTorch, NumPy and Python stand"""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), (name, keys.tolist(), *rest), random.getstate()


def plain(found):
    """A result as text in which each number has all its digits"""
    if isinstance(found, nn.Module):
        return {name: t.tolist() for name, t in found.state_dict().items()}
    if isinstance(found, list | tuple) or hasattr(found, "curve"):
        return [plain(one) for one in found]
    text = json.dumps(found.as_dict(), default=repr)
    return json.loads(text, object_hook=lambda d: {k: v for k, v in d.items() if k not in ("seconds", "latency", "speedup")})


def calls(workers=None, reuse="auto", journal=None, width=8):
    """Every function that measures, by name; each is called with nothing that another one returned"""
    net, x, y = network(width)
    a = SensitivityAnalyzer(net, x[:2], (x, y), reuse=reuse)
    b = dict(n_jobs=workers) if workers else {}

    def kept(name):
        return dict(journal=Path(journal) / f"{name}.jsonl") if journal else {}

    sweep = a.sweep("sparsity", [30, 60, 80], **QUIET)
    more = {m: lambda m=m: a.analyze(m, 4 if m == "quantization" else 50, **QUIET, **b, **kept(m)) for m in ("sparsity", "quantization", "pruning", "low_rank")}
    more["sweep"] = lambda: a.sweep("quantization", [3, 5, 8], **QUIET, **b, **kept("sweep"))
    more["estimate"] = lambda: a.estimate("sparsity", [40, 80], by="fisher", **QUIET)
    more["search_targets"] = lambda: search_targets(net, x[:2], (x, y), 60, evaluations=30, **QUIET, **kept("targets"))
    more["search_plan"] = lambda: search_plan(net, x[:2], (x, y), sweep, "60%", evaluations=20, **QUIET, **kept("plan"))
    more["compress_to_size"] = lambda: compress_to_size(net, x[:2], "70%", "sparsity", **QUIET).model
    bits = a.sweep("quantization", [3, 5, 8], **QUIET)
    more["settle"] = lambda: a.sweep("sparsity", [30, 60], adaptive=Settle(threshold=0.05), **QUIET, **b)
    more["refine"] = lambda: a.sweep("sparsity", adaptive=Refine(per_unit=3), **QUIET, **b)
    more["allocate"] = lambda: allocate([sweep, bits], "50%", cost="bytes", model=net, sample=x[:2])
    more["joint"] = lambda: search_plan(net, x[:2], (x, y), [sweep, bits], "60%", "bytes", evaluations=15, **QUIET)
    more["to_bit_plan"] = lambda: bits.to_bit_plan(net, target_bits=5)
    more["degradation"] = lambda: analyze_degradation(net, x[:2], a.eval_fn, (100, 80, 60), "quantization", runs=0, **QUIET, **b, **kept("degradation"))
    return more


def run(only=None, **options):
    """What every function returns, or those named"""
    return {name: plain(f()) for name, f in calls(**options).items() if only is None or name in only}


@pytest.fixture(scope="module")
def first():
    """The results that all others have to equal"""
    return run()


def test_twice_in_one_process(first):
    """From other random numbers, which go on as if nothing had been called"""
    torch.manual_seed(5)
    np.random.seed(6)  # noqa: NPY002 (the one that everybody shares)
    random.seed(7)
    for name, f in calls().items():
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
        before = generators()
        assert plain(f()) == first[name], name
        assert generators() == before, name


def test_with_and_without_reuse(first):
    """What is not computed twice has the numbers that it would have had"""
    analyses = "sparsity", "quantization", "pruning", "low_rank", "sweep", "estimate"
    expected = {name: first[name] for name in analyses}
    assert run(analyses, reuse=True) == run(analyses, reuse=False) == expected


def test_resumed_from_half_a_journal(first, tmp_path):
    """The lines of the second half are gone, as after a kill"""
    assert run(journal=tmp_path) == first
    files = sorted(tmp_path.glob("*.jsonl"))
    for file in files:
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[: (len(lines) + 1) // 2]))
    assert len(files) == 8
    assert run(journal=tmp_path) == first


def chance(x):
    """An evaluation on samples that PyTorch draws, with numbers that NumPy and Python draw"""

    @torch.no_grad()
    def score(model):
        some = x[torch.randint(len(x), (16,))]
        return model(some).sum().item() + np.random.rand() + random.random()  # noqa: NPY002

    return score


@pytest.mark.filterwarnings("ignore:eval_fn gives the model other inputs")
@pytest.mark.parametrize("options", [{}, dict(reuse=True), pytest.param(dict(n_jobs=2), marks=pytest.mark.slow)])
def test_chance_from_the_same_seed(options):
    """An evaluation that draws random numbers draws them from where the caller's stand: the same from there, others from elsewhere"""
    net, x, _ = network()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        about = dict(reuse=options.get("reuse", False))
        jobs = {name: n for name, n in options.items() if name != "reuse"}
        found.append(plain(SensitivityAnalyzer(net, x[:2], chance(x), **about).analyze("sparsity", 50, repeats=3, **QUIET, **jobs)))
    assert found[0] == found[1] != found[2]


def elsewhere(hash_seed, *options):
    """The results of another process"""
    env = os.environ | dict(PYTHONHASHSEED=hash_seed, OMP_NUM_THREADS=str(torch.get_num_threads()))
    done = subprocess.run([sys.executable, __file__, *options], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", ["1", "2"])
@pytest.mark.slow
def test_in_another_process(first, seed):
    """One in which sets and dictionaries of text are hashed otherwise"""
    assert elsewhere(seed) == json.loads(json.dumps(first))


@pytest.mark.slow
def test_recovery_from_the_same_seed():
    """Training draws random numbers, so it takes a seed; then stages, accuracies and weights are the same"""
    from test_recovery import learner, recover

    def once():
        learn = learner(state=None)  # sets the seed
        found = recover(learn, [30, 60], epochs=1)
        return plain(found), plain(learn.model)

    assert once() == once()


@pytest.mark.slow
def test_over_two_workers(first):
    """Layers are measured by two processes, and come back in their order"""
    assert run(workers=2) == first


def numbers_in(a, b):
    """Pairs of numbers at the same place; raises AssertionError where anything else differs"""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return [pair for k in a for pair in numbers_in(a[k], b[k])]
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        return [pair for one, other in zip(a, b, strict=True) for pair in numbers_in(one, other)]
    if isinstance(a, float):
        return [(a, b)]
    assert a == b
    return []


def differences(width):
    """Function -> largest difference between one thread and two, or what differs besides numbers"""
    found = []
    for n in (1, 2, 2):
        torch.set_num_threads(n)
        found.append(run(width=width))
    assert found[1] == found[2], "with as many threads the same"
    out = {}
    for name in found[0]:
        try:
            pairs = numbers_in(found[0][name], found[1][name])
            out[name] = max((abs(a - b) for a, b in pairs if a == a), default=0.0)
        except AssertionError:
            out[name] = "another plan or order"
    return out


if __name__ == "__main__":
    if "--threads" in sys.argv:
        for width in (8, 64):
            print(width, differences(width))
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        print(json.dumps(run()))
