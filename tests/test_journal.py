"""Journals: whatever ends a measurement, the next call goes on where it stopped, and finds what an undisturbed one finds."""
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from joblib import parallel_config
from journal_script import network
from torch import nn

from fasterai_sens import (
    Refine,
    SensitivityAnalyzer,
    Settle,
    Sparse,
    analyze_degradation,
    evaluation,
    large_final,
    movement,
    search_plan,
    search_targets,
    taylor,
    wanda,
)
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.journal import Journal, merge_journals
from fasterai_sens.methods.criteria import seeded
from fasterai_sens.methods.observers import Percentile

script = Path(__file__).with_name("journal_script.py")
levels = [20, 50, 80]
the_worst = Settle(top=1, first=8)


class Ends(BaseException):
    """What no code of ours catches"""


def per_sample(fail_at=None, log=None):
    """An evaluation that counts its calls, and ends at one of them"""
    _, x, y = network()
    log = [] if log is None else log

    def eval_fn(model):
        log.append(1)
        if len(log) == fail_at:
            raise Ends
        with torch.no_grad():
            return (model(x).argmax(1) == y).float(), nn.functional.cross_entropy(model(x), y, reduction="none")
    eval_fn.log, eval_fn.known_as = log, "accuracy and loss"   # where it ends is no part of what it says
    return eval_fn


def sweep(eval_fn, journal=None, method="sparsity", reuse=False, **options):
    """A sweep of a fresh copy of the network; with reuse, each process makes one evaluation more, to see whether it can be trusted"""
    net, x, _ = network()
    options.setdefault("levels", [4, 3] if method == "quantization" else levels)
    found = SensitivityAnalyzer(net, x[:1], eval_fn, reuse=reuse).sweep(method, verbose=False, journal=journal, **options)
    return [result.as_dict() for result in found]


def search(eval_fn, journal=None):
    """A search for zeros"""
    net, x, _ = network()
    return search_targets(net, x[:1], eval_fn, 60, evaluations=25, verbose=False, journal=journal).as_dict()


def joint(eval_fn, journal=None):
    """A search for channels and bits, from sweeps that are no part of it"""
    net, x, _ = network()
    analyzer = SensitivityAnalyzer(net, x[:1], per_sample())
    sweeps = [analyzer.sweep(*of, verbose=False) for of in (("pruning", [25, 50]), ("quantization", [8, 4, 3]))]
    return search_plan(net, x[:1], eval_fn, sweeps, {"bytes": "30%"}, evaluations=12, verbose=False, journal=journal).as_dict()


def degradation(eval_fn, journal=None):
    """Three sizes"""
    net, x, _ = network()
    found = analyze_degradation(net, x[:1], eval_fn, (80, 50, 30), "sparsity", runs=0, verbose=False, journal=journal)
    return found.as_dict()


def keys_of(path):
    """What a journal has measurements of"""
    return sorted(json.loads(line)["key"] for line in path.read_text().splitlines()[1:])


slow = pytest.mark.slow
every_way = {"sparsity": sweep, "quantization": partial(sweep, method="quantization"), "search": search, "degradation": degradation}
slow_ways = {"pruning": partial(sweep, method="pruning"), "joint search": joint}
ways = [pytest.param(f, id=name) for name, f in every_way.items()] + [pytest.param(f, id=name, marks=slow) for name, f in slow_ways.items()]


@pytest.mark.parametrize("measure", ways)
def test_ended_anywhere(measure, tmp_path):
    """Ended at several calls in turn: the same result, to the bit, and beside the baseline nothing is measured twice but what was in flight"""
    whole = per_sample()
    expected = measure(whole)
    n = len(whole.log)
    path, made = tmp_path / "journal", 0
    stops = sorted({2, 3, max(3, n // 3), max(3, n // 2), n})
    for k, stop in enumerate(stops):
        # of those before it, all but the baseline of this process are in the journal
        eval_fn = per_sample(fail_at=max(2, stop - made))
        try:
            measure(eval_fn, journal=path)
        except Ends:
            made -= 1   # the one in flight
        made += len(eval_fn.log) - 1   # without its baseline
        assert k == 0 or made > 0
    last = per_sample()
    assert repr(measure(last, journal=path)) == repr(expected)
    assert made + len(last.log) <= n
    again = per_sample()
    assert repr(measure(again, journal=path)) == repr(expected) and len(again.log) == 1
    measure(per_sample(), journal=tmp_path / "undisturbed")
    assert keys_of(path) == keys_of(tmp_path / "undisturbed")   # a search went the same way


def test_refining_ended_anywhere(tmp_path):
    """Levels are chosen again from what is known, so they are the same ones; and no model is evaluated twice but the untouched one and what was in flight"""
    seen, in_flight = Counter(), set()

    def refine(end_at=None, journal=None):
        scored, n = per_sample(), 0

        def eval_fn(model):
            nonlocal n
            n, state = n + 1, tuple(int((p == 0).sum()) for p in model.parameters())
            if sum(state):
                seen[state] += 1
            if n == end_at:
                in_flight.add(state)
                raise Ends
            return scored(model)
        eval_fn.known_as = "accuracy and loss"
        return repr(sweep(eval_fn, journal, levels=[20, 30, 40, 50, 60, 70, 80], adaptive=Refine(per_unit=5))), n
    expected, n = refine()
    path = tmp_path / "refined"
    seen.clear()
    for end_at in (2, 4, 7, n // 2):
        with pytest.raises(Ends):
            refine(end_at, path)
    assert refine(journal=path)[0] == expected
    assert len(seen) == 15 and {state for state, times in seen.items() if times > 1} <= in_flight
    seen.clear()
    assert refine(journal=path)[0] == expected and not seen
    ends = per_sample()
    sweep(ends, path, levels=[20, 80])
    assert len(ends.log) == 1   # a plain sweep finds the ends of the curves there


def settle(asked=the_worst, end_at=None, journal=None, seen=None, reuse=False, layers=None):
    """What is settled, as text, and the number of calls; `seen` counts the models that were evaluated, each with its number of samples"""
    net, x, y = network()
    n, now = 0, []

    def metric(out, y):
        nonlocal n
        n, state = n + 1, (*now, len(out))
        if seen is not None and sum(now):
            seen[state] += 1
        if n == end_at:
            raise Ends
        return (out.argmax(1) == y).float()
    metric.known_as = "accuracy"
    if seen is not None:
        net.register_forward_pre_hook(lambda m, args: now.__setitem__(slice(None), [int((p == 0).sum()) for p in m.parameters()]))
    analyzer = SensitivityAnalyzer(net, x[:1], evaluation((x, y), metric), reuse=reuse)
    found = analyzer.sweep("sparsity", levels, adaptive=asked, layers=layers, journal=journal, verbose=False)
    return repr([result.as_dict() for result in found]), n


def test_settling_ended_anywhere(tmp_path):
    """The same samples are looked at again: what was measured on them is not measured again, and the answers are those of an undisturbed run"""
    seen, in_flight = Counter(), 0
    expected, n = settle(seen=seen)
    assert set(seen.values()) == {1}
    n_blocks = n - len(seen)   # in each the untouched model comes first
    path, ended, found = tmp_path / "settled", Counter(), None
    for end_at in (2, 5, *[n_blocks + 3]*n):
        try:
            found, _ = settle(end_at=end_at, journal=path, seen=ended)
            break
        except Ends:
            in_flight += 1
    assert found == expected and in_flight > 5
    assert set(ended) == set(seen) and ended.total() <= seen.total() + in_flight
    ended.clear()
    assert settle(journal=path, seen=ended) == (expected, n_blocks) and not ended
    assert settle(journal=path, reuse="auto")[0] == settle(reuse="auto")[0] == expected


def test_settling_over_workers_and_in_parts(tmp_path):
    """Journals of some layers make that of all; workers find it, and fill it; another question about the same samples is answered from it as far as it goes"""
    asked = Settle(threshold=.1, first=8)
    expected, n = settle(asked)
    whole, parts = tmp_path / "whole", [tmp_path / "a", tmp_path / "b"]
    for part, layers in zip(parts, (["0", "2"], ["2", "4"]), strict=True):
        settle(asked, journal=part, layers=layers)
    merge_journals(parts, whole)
    found, n_now = settle(asked, journal=whole)
    assert found == expected and n_now < n/2
    elsewhere = tmp_path / "elsewhere"
    with parallel_config(backend="threading", n_jobs=2):
        assert settle(asked, journal=elsewhere)[0] == expected
    assert settle(asked, journal=elsewhere) == (expected, n_now)
    other, n_other = settle(replace(asked, threshold=.02))
    found, n_more = settle(replace(asked, threshold=.02), journal=whole)
    assert found == other and n_now <= n_more < n_other
    for option, said in (("first", "sampling first was 8 and is 12"), ("seed", "sampling seed was 0 and is 12"), ("most", "sampling most was None and is 12")):
        with pytest.raises(ValueError, match=said):
            settle(replace(asked, **{option: 12}), journal=whole)
    with pytest.raises(ValueError, match="sampling was"):
        sweep(per_sample(), whole)   # a plain one takes all samples at once


def test_torn_anywhere(tmp_path):
    """Cut off at any byte, a journal holds what was whole"""
    path, expected = tmp_path / "journal", sweep(per_sample())
    sweep(per_sample(), journal=path)
    content = path.read_bytes()
    n_lines = content.count(b"\n")
    for cut in random.Random(0).sample(range(len(content)), 12):
        path.write_bytes(content[:cut])
        eval_fn = per_sample()
        assert repr(sweep(eval_fn, journal=path)) == repr(expected)
        assert len(eval_fn.log) == 1 + n_lines - max(2, content[:cut].count(b"\n"))
        assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())
    damaged = content.splitlines(keepends=True)
    path.write_bytes(b"".join([*damaged[:3], b"{\n", *damaged[3:]]))
    with pytest.raises(ValueError, match="line 4 of .* is damaged"):
        sweep(per_sample(), journal=path)


def damaged(content, chance):
    """Some bytes changed, left out or put in"""
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 20])):
        k, kind = chance.randrange(len(found)), chance.randrange(3)
        if kind == 0:
            found[k] ^= chance.randrange(1, 256)
        elif kind == 1:
            del found[k:k + chance.choice([1, 10, 200])]
        else:
            found[k:k] = chance.randbytes(chance.choice([1, 5]))
    return bytes(found)


@pytest.mark.parametrize("n", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_journals(n, tmp_path):
    """A ValueError, or the numbers that were measured; a digit that has changed is no measurement"""
    path, chance, found = tmp_path / "journal", random.Random(n), Counter()
    expected = repr(sweep(per_sample(), journal=path))
    content = path.read_bytes()
    for _ in range(n):
        path.write_bytes(damaged(content, chance))
        try:
            assert repr(sweep(per_sample(), journal=path)) == expected
            found["the same numbers"] += 1
        except ValueError:
            found["ValueError"] += 1
    assert found["ValueError"] > n / 2 and found["the same numbers"], found


def test_journals_that_lie(tmp_path):
    """Whole lines that no build has written, with or without a checksum: a ValueError, and so to merge them"""
    path, other = tmp_path / "journal", tmp_path / "other"
    sweep(per_sample(), journal=other)
    header, *lines = other.read_bytes().splitlines(keepends=True)
    key, deep = json.loads(lines[1])["key"], b"[" * 100000 + b"\n"
    made = [dict(key=key, data=data) for data in ("x", 5, [], {}, {"value": "x"}, {"value": [1, 2]}, {"value": 1., "samples": [[1], 2]}, {"value": 1., "zzz": 1})]
    made += [dict(key=k, data={"value": 1.}) for k in ("zzz", "5", "[1, 2, 3]", "[[1], 2]")]
    for line in (5, None, [], {}, {"key": key}, {"key": [1], "data": 2}, {"journal": 1, "about": {}}, *made):
        path.write_bytes(b"".join([header, lines[0], json.dumps(line).encode() + b"\n", *lines[2:]]))
        with pytest.raises(ValueError):
            sweep(per_sample(), journal=path)
        if line not in made:
            with pytest.raises(ValueError):
                merge_journals([other, path], tmp_path / "whole")
    for start in (b'{"journal": 1}\n', b'{"journal": 1, "about": 5}\n', b'{"journal": 2, "about": {}}\n', deep, b"\xff\xfe{}\n"):
        path.write_bytes(b"".join([start, *lines]))
        for use in (lambda: sweep(per_sample(), journal=path), lambda: merge_journals([path], tmp_path / "whole")):
            with pytest.raises(ValueError):
                use()
    with open(path, "wb") as f:   # holes take no room on the disk
        f.truncate(2**40)
    began = time.monotonic()
    with pytest.raises(ValueError):
        sweep(per_sample(), journal=path)
    assert time.monotonic() - began < 20
    path.write_bytes(b"".join([header, *(json.dumps({k: v for k, v in json.loads(line).items() if k != "checksum"}).encode() + b"\n" for line in lines)]))
    eval_fn = per_sample()   # as an earlier build has written it
    assert repr(sweep(eval_fn, journal=path)) == repr(sweep(per_sample())) and len(eval_fn.log) == 1


def test_what_differs_is_named(tmp_path):
    """Weights, architecture, settings, sample, metric, baseline, versions: nothing is mixed, and the file stays as it is"""
    path = tmp_path / "journal"
    sweep(per_sample(), journal=path)
    content = path.read_bytes()
    net, x, y = network()

    def other(model=net, sample=x[:1], eval_fn=None, metric_name="accuracy", **options):
        analyzer = SensitivityAnalyzer(model, sample, eval_fn or per_sample(), metric_name=metric_name)
        return analyzer.sweep(**dict(compression="sparsity", levels=levels) | options, verbose=False, journal=path)
    bumped = network()[0]
    bumped[2].weight.data[0, 0] += 1e-6
    leaky = nn.Sequential(*(nn.LeakyReLU(0.) if isinstance(m, nn.ReLU) else m for m in net))
    half = lambda m: tuple(t[:100] for t in per_sample()(m))   # noqa: E731
    half.known_as = "accuracy and loss"   # it says so, and its baseline tells otherwise
    for options, word in ((dict(model=bumped), "weights 2.weight"), (dict(model=leaky), "architecture"), (dict(sample=x[:2]), "sample"),
                          (dict(granularity="row"), "settings granularity"), (dict(metric_name="hits"), "metric name was 'accuracy' and is 'hits'"),
                          (dict(compression="quantization", levels=[4]), "settings method"), (dict(eval_fn=half), "another baseline")):
        with pytest.raises(ValueError, match=word):
            other(**options)
        assert path.read_bytes() == content
    old = json.loads(content.splitlines()[0])
    old["about"]["versions"]["torch"] = "1.0"
    path.write_bytes(b"\n".join([json.dumps(old).encode(), *content.splitlines()[1:], b""]))
    with pytest.raises(ValueError, match="versions torch was '1.0'"):
        other()
    with pytest.raises(ValueError, match="settings sampling was None and is"):
        other(adaptive=Settle(threshold=.01))


def test_other_calibration_is_named(tmp_path):
    """What weights are ranked by, ranges are taken from, norms are estimated on and layers are refitted on, also in a loader: other numbers are refused, equal ones are not"""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(64, 8)
    y = net(x).argmax(1)

    def hits(model):
        with torch.no_grad():
            return (model(x).argmax(1) == y).float().mean().item()

    def analyzed(path, data=None, method="sparsity", criteria=large_final, **options):
        analyzer = SensitivityAnalyzer(net, x[:1], hits, criteria=criteria, calibration_data=data)
        return analyzer.analyze(method, verbose=False, journal=path, **options)

    def sized(path, **options):
        return analyze_degradation(net, x[:1], hits, (80,), "sparsity", runs=0, verbose=False, journal=path, **options)

    def searched(path, data):
        return search_targets(net, x[:1], hits, 50, evaluations=25, verbose=False, reconstruct=data, journal=path)
    old = {name: p.detach() + .1 for name, p in net.named_parameters()}
    ways = {
        "ranked": lambda path, data: analyzed(path, data, criteria=wanda), "ranges": lambda path, data: analyzed(path, data, "quantization", quant_activations=True),
        "norms": lambda path, data: analyzed(path, recalibrate=data), "refitted": lambda path, data: analyzed(path, reconstruct=data),
        "sizes, ranked": lambda path, data: sized(path, calibration_data=data, criteria=wanda), "sizes, norms": lambda path, data: sized(path, recalibrate=data),
        "sizes, refitted": lambda path, data: sized(path, reconstruct=data), "search": searched}
    kinds = (lambda x: x, lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 16))
    for way, measure in ways.items():
        for kind, make in enumerate(kinds):
            path = tmp_path / f"{way} {kind}"
            measure(path, make(x))
            content = path.read_bytes()
            with pytest.raises(ValueError):
                measure(path, make(3 * x + 1))
            assert path.read_bytes() == content, (way, kind)
            measure(path, make(x.clone()))
    analyzed(tmp_path / "moved", criteria=movement.since(old))
    analyzed(tmp_path / "moved", criteria=movement.since(dict(old)))
    with pytest.raises(ValueError):
        analyzed(tmp_path / "moved", criteria=movement.since({name: 2 * p for name, p in old.items()}))


def test_other_data_are_named(tmp_path):
    """Any number of a pair of tensors, of a list of batches or of a loader that is another one, before anything is evaluated"""
    net, x, y = network()
    more, end = torch.cat([x, x[:9]]), x.clone()
    end[-1] += 1

    def pair(x): return x, net(x).argmax(1)
    def batches(x): return [pair(part) for part in x.split(40)]
    def loader(x): return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pair(x)), 40)

    def measure(kind, journal, data):
        if kind == "sweep":
            return SensitivityAnalyzer(net, x[:1], data, reuse=False).sweep(levels=levels, verbose=False, journal=journal)
        if kind == "search":
            return search_targets(net, x[:1], data, 60, evaluations=15, verbose=False, journal=journal)
        if kind == "degradation":
            return analyze_degradation(net, x[:1], data, (80, 50), "sparsity", runs=0, verbose=False, journal=journal)
        curves = SensitivityAnalyzer(net, x[:1], pair(x)).sweep("quantization", [8, 4], verbose=False)
        return search_plan(net, x[:1], data, curves, {"bytes": "30%"}, evaluations=8, verbose=False, journal=journal)
    evaluations = lambda data: evaluation(data, lambda out, y: out.argmax(1) == y)   # noqa: E731
    ways = {"sweep": (pair, batches, loader, lambda x: evaluations(loader(x))), "search": (pair,), "degradation": (loader,), "joint": (pair,)}
    for kind, makers in ways.items():
        for place, make in enumerate(makers):
            path = tmp_path / f"{kind} {place}"
            expected = measure(kind, path, make(x)).as_dict() if kind != "sweep" else repr(list(measure(kind, path, make(x))))
            content = path.read_bytes()
            for other in (more, x + 1, end):
                with pytest.raises(ValueError, match="evaluated_on"):
                    measure(kind, path, make(other))
                assert path.read_bytes() == content
            again = measure(kind, path, make(x))
            assert repr(expected) == (repr(repr(list(again))) if kind == "sweep" else repr(again.as_dict()))


def test_parts_make_the_whole(tmp_path):
    """Journals of other layers and of other levels, put together, leave nothing to measure; early stops fall where they would"""
    stop = dict(early_stop_mode="dropped", early_stop_value=.2)
    expected = sweep(per_sample(), **stop)
    parts = [tmp_path / f"{i}" for i in range(3)]
    sweep(per_sample(), journal=parts[0], layers=["0"])
    sweep(per_sample(), journal=parts[1], layers=["2", "4"], levels=[80])
    sweep(per_sample(), journal=parts[2], layers=["2", "4"], levels=[50, 20])
    assert merge_journals(parts, tmp_path / "whole") == 1 + 9
    eval_fn = per_sample()
    assert repr(sweep(eval_fn, journal=tmp_path / "whole", **stop)) == repr(expected) and len(eval_fn.log) == 1
    sweep(per_sample(fail_at=99), journal=tmp_path / "reused", reuse=True)
    assert repr(sweep(per_sample(), journal=tmp_path / "reused", reuse=True)) == repr(sweep(per_sample()))
    eval_fn = per_sample()   # of the later levels only: the milder ones decide first
    assert repr(sweep(eval_fn, journal=parts[1], **stop)) == repr(expected)
    search(per_sample(), journal=tmp_path / "other")
    with pytest.raises(ValueError, match="settings"):
        merge_journals([parts[0], tmp_path / "other"], tmp_path / "none")


@pytest.mark.slow
def test_workers_write_through_this_process(tmp_path):
    """In workers nothing is written; what one journal has, they do not measure"""
    expected = sweep(per_sample())
    with pytest.raises(Ends):
        sweep(per_sample(fail_at=5), journal=tmp_path / "journal")
    assert repr(sweep(per_sample(), journal=tmp_path / "journal", n_jobs=2)) == repr(expected)
    eval_fn = per_sample()
    assert repr(sweep(eval_fn, journal=tmp_path / "journal")) == repr(expected) and len(eval_fn.log) == 1


def test_without_a_journal_what_was_measured_is_handed_over():
    """In `partial` of the error, and in `last`"""
    net, x, _ = network()
    before = fingerprint(net)
    expected = sweep(per_sample())
    analyzer = SensitivityAnalyzer(net, x[:1], per_sample(fail_at=6), reuse=False)
    with pytest.raises(Ends) as e:
        analyzer.sweep("sparsity", levels, verbose=False)
    assert changes(before, fingerprint(net)) == []
    assert analyzer.last is e.value.partial and e.value.partial.levels == levels[:2]
    assert repr(e.value.partial[0].as_dict()) == repr(expected[0]) and len(e.value.partial[1].layers) == 1
    with pytest.raises(Ends) as e:
        SensitivityAnalyzer(net, x[:1], per_sample(fail_at=1)).sweep("sparsity", levels, verbose=False)
    assert e.value.partial is None
    analyzer = SensitivityAnalyzer(net, x[:1], per_sample())
    assert analyzer.analyze("sparsity", 50, verbose=False).layers == analyzer.last[0].layers
    for at in range(2, 14):   # the ends of the curves, and then rounds between them
        analyzer = SensitivityAnalyzer(net, x[:1], per_sample(fail_at=at), reuse=False)
        with pytest.raises(Ends) as e:
            analyzer.sweep("sparsity", [20, 30, 40, 50, 60, 70, 80], adaptive=Refine(per_unit=5), verbose=False)
        found = sum(len(result.layers) for result in e.value.partial or ())
        assert analyzer.last is e.value.partial and at - 2 >= found >= at - 2 - at // 3, at   # each round looks at the untouched model, too


def started(kind, folder, seconds):
    """A process that measures with the journal of the folder"""
    command = [sys.executable, str(script), kind, *(str(folder / name) for name in ("journal", "calls", "result")), str(seconds)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def test_a_second_process_is_refused(tmp_path):
    """While another one is at work, and no longer than that"""
    net, _, _ = network()
    first = started("sweep", tmp_path, 1.)
    try:
        while not (tmp_path / "calls").exists():
            time.sleep(.05)
            assert first.poll() is None, first.stderr.read()
        with pytest.raises(ValueError):
            Journal(tmp_path / "journal", {}).__enter__()
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    with pytest.raises(ValueError, match="weights"):   # the lock is gone with the process
        Journal(tmp_path / "journal", {}).__enter__()


def test_nothing_but_the_journal_is_left_behind(tmp_path):
    """The lock goes with it: after a whole run, one that was refused, one that ended, and one that took up a killed one"""
    path = tmp_path/"run.jsonl"
    def left(): return [p.name for p in tmp_path.iterdir()]
    sweep(per_sample(), path)
    assert left() == ["run.jsonl"]
    with pytest.raises(ValueError): Journal(path, {}).__enter__()   # of something else
    assert left() == ["run.jsonl"]
    path.unlink()
    with pytest.raises(Ends): sweep(per_sample(fail_at=3), path)
    assert left() == ["run.jsonl"]
    path.with_suffix(".jsonl.lock").touch()   # as a killed process leaves it
    sweep(per_sample(), path)
    assert left() == ["run.jsonl"]


def test_a_lock_that_went_while_it_was_taken_is_none(tmp_path):
    """Of many threads that open and close the same journal never two hold it at once"""
    path, inside, most, opened = tmp_path/"run.jsonl", [], [], []
    def open_and_close():
        for _ in range(200):
            try:
                with Journal(path, {}):
                    inside.append(1)
                    most.append(len(inside))
                    opened.append(1)
                    time.sleep(.0005)
                    inside.pop()
            except ValueError: pass   # another one holds it
    threads = [threading.Thread(target=open_and_close) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert max(most) == 1 and len(opened) > 10 and not path.with_suffix(".jsonl.lock").exists()


def lines_of(calls):
    """What the evaluations wrote down that were made"""
    return calls.read_text().splitlines() if calls.exists() else []


def killed(kind, folder, n_kills, seed=0):
    """A measurement that is killed at random moments, then left to end: its result, how many kills hit it, and the evaluations of all processes"""
    chance, calls, hits = random.Random(seed), folder / "calls", 0
    for _ in range(n_kills):
        wanted, process = len(lines_of(calls)) + chance.randint(1, 3), started(kind, folder, .03)
        while process.poll() is None and len(lines_of(calls)) < wanted:
            time.sleep(.002)
        time.sleep(chance.random() * .05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hits += process.returncode == -signal.SIGKILL
    process = started(kind, folder, 0)
    _, error = process.communicate()
    assert process.returncode == 0, error
    return (folder / "result").read_text(), hits, lines_of(calls)


def survived(kind, folder, n_kills):
    """Whether the result is that of an undisturbed process; kills that hit, its evaluations, baselines of all processes, what was measured twice, and passes with gradients beside those it takes"""
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    _, error = started(kind, folder / "whole", 0).communicate()
    expected, (baseline, *whole) = (folder / "whole" / "result").read_text(), lines_of(folder / "whole" / "calls")
    result, hits, calls = killed(kind, folder / "killed", n_kills)
    others = Counter(line for line in calls if line != baseline)
    assert not Counter(whole) - others - Counter([baseline])
    again = others - Counter(whole)
    gradients = again.pop("gradients", 0)
    return SimpleNamespace(is_same=result == expected, kills=hits, n=1 + len(whole), baselines=calls.count(baseline), twice=again.total(), gradients=gradients)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
@pytest.mark.parametrize("kind", ["sweep", "search"])
def test_killed(kind, tmp_path, n_kills=6):
    """Killed at random moments: what an undisturbed process finds, and nothing twice but baselines and what was in flight"""
    found = survived(kind, tmp_path, n_kills)
    assert found.is_same and found.kills == n_kills and found.twice <= n_kills


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_estimate_killed(tmp_path):
    """Killed while it is checked: the next process takes no gradients again, and says the same"""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    _, error = started("estimate", tmp_path / "whole", 0).communicate()
    calls, whole = tmp_path / "killed" / "calls", lines_of(tmp_path / "whole" / "calls")
    last_gradients = max(i for i, line in enumerate(whole) if line == "gradients")
    assert whole.count("gradients") > 3, error
    process = started("estimate", tmp_path / "killed", .05)
    while process.poll() is None and len(lines_of(calls)) < last_gradients + 4:
        time.sleep(.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = len(lines_of(calls))
    assert last_gradients + 4 <= before < len(whole)
    _, error = started("estimate", tmp_path / "killed", 0).communicate()
    assert (tmp_path / "killed" / "result").read_text() == (tmp_path / "whole" / "result").read_text(), error
    again = lines_of(calls)[before:]
    assert again.count("gradients") <= 1 and len(again) < len(whole) - last_gradients + 2   # one is a look whether there are gradients at all


def two_of_a_kind():
    """Pairs of what one name stands for, and what a user may take for the same: `kind -> (first, second, the first made again)`"""
    net, x, y = network()

    def margins(least):
        def eval_fn(model, most=9.):
            with torch.no_grad():
                return float((model(x).amax(1) > least).float().mean())
        return eval_fn

    def with_default(least):
        def eval_fn(model, least=least):
            with torch.no_grad():
                return float((model(x).amax(1) > least).float().mean())
        return eval_fn

    def calling(name):
        def helper(out): return getattr(out, name)(1).values
        def eval_fn(model):
            with torch.no_grad():
                return float((helper(model(x)) > .5).float().mean())
        return eval_fn

    class Hits:
        def __init__(self, k): self.k, self.n = k, 0

        def __call__(self, model):
            self.n += 1
            with torch.no_grad():
                return float((model(x).topk(self.k).indices == y[:, None]).any(1).float().mean())

    def half_of(of): return partial(margins(.5), most=of)
    def metrics(k): return evaluation((x, y), lambda out, y: (out.topk(k).indices == y[:, None]).any(1).float())
    return {"a number it closes over": tuple(margins(of) for of in (.5, .6, .5)), "a default": tuple(with_default(of) for of in (.5, .6, .5)),
            "what it calls": tuple(calling(of) for of in ("max", "min", "max")), "an attribute": tuple(Hits(of) for of in (1, 2, 1)),
            "partial": tuple(half_of(of) for of in (9., 8., 9.)), "a metric": tuple(metrics(of) for of in (1, 2, 1)),
            "a constant": (lambda m: float(m(x).mean() > .1), lambda m: float(m(x).mean() > .2), lambda m: float(m(x).mean() > .1))}


@pytest.mark.parametrize("kind", two_of_a_kind())
def test_an_eval_fn_is_known_by_what_it_does(kind, tmp_path):
    """One of the same name that does something else is refused before it is called, and the file stays; the same made again goes on"""
    net, x, _ = network()
    first, other, again = two_of_a_kind()[kind]
    path = tmp_path / "journal"
    expected = SensitivityAnalyzer(net, x[:1], first).sweep("sparsity", levels, verbose=False, journal=path)
    content = path.read_bytes()
    with pytest.raises(ValueError, match="evaluated_by"):
        SensitivityAnalyzer(net, x[:1], other).sweep("sparsity", levels, verbose=False, journal=path)
    assert path.read_bytes() == content and getattr(other, "n", 0) == 0
    found = SensitivityAnalyzer(net, x[:1], again).sweep("sparsity", levels, verbose=False, journal=path)
    assert repr(list(found)) == repr(list(expected)) and path.read_bytes() == content
    found = SensitivityAnalyzer(net, x[:1], first).sweep("sparsity", levels, verbose=False, journal=path)   # which has counted meanwhile
    assert repr(list(found)) == repr(list(expected))


class Halved(Sparse):
    """A method of one's own"""
    share = .5

    def change(self, model, unit):
        unit.weight.data.mul_(self.share)


def test_criteria_and_methods_are_known_by_what_they_do(tmp_path):
    """Two lambdas, two seeds, two losses, two ways to observe ranges, a method that was changed, another report: each refused, each goes on with its own"""
    net, x, y = network()

    def hits(model):
        with torch.no_grad():
            return (model(x).argmax(1) == y).float()

    def swept(path, criteria=large_final, method="sparsity", at=levels, **options):
        analyzer = SensitivityAnalyzer(net, x[:1], hits, criteria=criteria, calibration_data=[(x, y)])
        return [result.as_dict() for result in analyzer.sweep(method, at, verbose=False, journal=path, **options)]

    def sized(path, criteria):
        return analyze_degradation(net, x[:1], hits, (80,), "sparsity", criteria=criteria, runs=0, verbose=False, journal=path).as_dict()

    def searched(path, criteria, report_fn=None):
        return search_targets(net, x[:1], hits, 60, criteria=criteria, report_fn=report_fn, evaluations=25, verbose=False, journal=path).as_dict()

    def by(sign): return lambda w: sign * w.abs()
    def losing(scale): return replace(taylor, loss=lambda out, y: scale * nn.functional.cross_entropy(out, y))
    def within(share): return lambda: Percentile(share)
    def halved(share): return lambda path: swept(path, method=type("Halved", (Halved,), {"share": share})(50), at=None)
    pairs = {
        "lambdas": [lambda path, c=c: swept(path, by(c)) for c in (1, -1)], "seeds": [lambda path, k=k: swept(path, seeded(k)) for k in (1, 2)],
        "losses": [lambda path, k=k: swept(path, losing(k)) for k in (1., -1.)], "sizes": [lambda path, c=c: sized(path, by(c)) for c in (1, -1)],
        "searches": [lambda path, c=c: searched(path, by(c)) for c in (1, -1)], "methods": [halved(.5), halved(.9)],
        "ranges": [lambda path, p=p: swept(path, method="quantization", at=[4], quant_activations=True, quant_ranges=within(p)) for p in (99., 80.)],
        "reports": [lambda path, d=d: searched(path, large_final, (x + d, y)) for d in (0, 1)]}
    for kind, (first, other) in pairs.items():
        path = tmp_path / kind
        expected = first(path)
        content = path.read_bytes()
        with pytest.raises(ValueError, match="ranked_by|method_code|ranges_by|report_evaluated_on"):
            other(path)
        assert path.read_bytes() == content, kind
        assert repr(first(path)) == repr(expected), kind


ANOTHER = """
import sys
from fasterai_sens.core.journal import describe_code
words = {"a", "b", "c", "d", "e"}
class Scorer:
    kinds = frozenset(words)
    def __init__(self): self.by, self.seen = {"x": 1., "y": [2, 3]}, []
    def inner(self, w): return [v for v in (w, self.by["x"]) if v in {"p", "q", "r", "s"}]
    def __call__(self, model):
        self.seen.append(model)
        return self.inner(model), [lambda: self, sys.path]
n, scorer = 0, Scorer()
def eval_fn(model, *, most=words):
    global n
    n += 1
    try: return scorer(model), (lambda k: k in words)(n)
    except (KeyError, ValueError): raise
if len(sys.argv) > 1: eval_fn(1)
print(describe_code(eval_fn))
"""


def test_the_same_code_in_another_process(tmp_path):
    """At another place, behind other lines, with text hashed otherwise, and after it has counted: the same description"""
    found = set()
    for k, before in enumerate(("", "# a comment\\n\\n")):
        file = tmp_path / f"{k}.py"
        file.write_text(before + ANOTHER)
        command = [sys.executable, str(file), *(["called"] if k else [])]
        found.add(subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": str(k + 1)}, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1 and "scorer" in next(iter(found)) and "'n'" not in next(iter(found))


@pytest.mark.slow
def test_parts_of_other_processes_make_the_whole(tmp_path):
    """Layers and levels measured by processes of their own, one torn, two that overlap: exactly the whole, and another machine's versions are refused by name"""
    parts = {"a": "part:0:20,50,80", "b": "part:2,4:80,20", "c": "part:2:50,80", "d": "part:4:50"}
    calls = tmp_path / "calls"
    for name, kind in parts.items():
        command = [sys.executable, str(script), kind, *(str(tmp_path / file) for file in (name, "calls", "result"))]
        subprocess.run(command, check=True)
    n_evaluations = 4 + 3 + 4 + 2 + 1
    assert len(lines_of(calls)) == n_evaluations
    content = (tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(content + content.splitlines(keepends=True)[-1][:20])   # it was killed while it wrote
    assert merge_journals([tmp_path / name for name in parts], tmp_path / "whole") == 1 + 9
    command = [sys.executable, str(script), "part:0,2,4:20,50,80", *(str(tmp_path / file) for file in ("whole", "calls", "of parts"))]
    subprocess.run(command, check=True)
    assert len(lines_of(calls)) == n_evaluations + 1   # nothing but the untouched model
    command = [sys.executable, str(script), "part:0,2,4:20,50,80", *(str(tmp_path / file) for file in ("fresh", "calls", "at once"))]
    subprocess.run(command, check=True)
    assert (tmp_path / "of parts").read_text() == (tmp_path / "at once").read_text()
    assert keys_of(tmp_path / "whole") == keys_of(tmp_path / "fresh")
    first, *rest = (tmp_path / "c").read_text().splitlines(keepends=True)
    header = json.loads(first)
    header["about"]["versions"]["torch"] = "1.0"
    (tmp_path / "c").write_text("".join([json.dumps(header) + "\n", *rest]))
    whole = (tmp_path / "whole").read_bytes()
    with pytest.raises(ValueError, match="c was measured with something else: versions torch was '1.0'"):
        merge_journals([tmp_path / name for name in parts], tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == whole
