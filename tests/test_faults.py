"""What an evaluation may do wrong, at each of its calls in turn: the model comes back, and the error says what was measured."""
import json
import signal
import threading
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from fasterai_sens import Refine, SensitivityAnalyzer, Settle, analyze_degradation, evaluation, search_plan, search_targets
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.signals import limited
from fasterai_sens.measure.loop import Written

LEVELS = {"sparsity": [50, 90], "pruning": [25, 50], "quantization": [8, 4], "low_rank": [25, 50]}
has_alarm = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="nothing interrupts an evaluation here")


def network():
    """A small classifier with a past: statistics, gradients, a hook, mixed modes; and data on which it is right"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(64, 8)
    net(x).square().mean().backward()
    net.eval()
    y = net(x).argmax(1)
    net[0].register_forward_hook(lambda m, args, out: None)
    net[3].weight.requires_grad_(False)
    net[1].train()
    return net, x, y


def endless():
    """Real work of PyTorch, with no end"""
    x = torch.ones(32, 32)
    while True:
        x = x @ x / 32


def no_memory():
    """As PyTorch says it on a GPU"""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def throw(kind, *text):
    """Raise it"""
    raise kind(*text)


FAULTS = {
    "raises": partial(throw, RuntimeError, "no data"), "interrupted": partial(throw, KeyboardInterrupt), "MemoryError": partial(throw, MemoryError),
    "OutOfMemoryError": no_memory, "too slow": endless, "None": lambda: None, "a text": lambda: "0.9", "three values": lambda: (1., 2., 3.),
    "wrong shape": lambda: torch.ones(2, 3, 4), "nothing": lambda: torch.ones(0), "NaN": lambda: float("nan"), "infinity": lambda: float("inf")}
RAISES = {"raises": RuntimeError, "interrupted": KeyboardInterrupt, "MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError,
          "too slow": TimeoutError, "None": TypeError, "a text": TypeError, "three values": TypeError, "wrong shape": ValueError, "nothing": ValueError}


class Faulty:
    """An evaluation that counts its calls, leaves the model in disorder, and goes wrong at one of them"""

    def __init__(self, kind=None, at=None):
        _, self.x, self.y = network()
        self.kind, self.at, self.n = kind, at, 0

    def __call__(self, model):
        self.n += 1
        with torch.no_grad():
            out = model(self.x)
        if self.n == self.at:
            model.train().requires_grad_(True)
            model(self.x).square().mean().backward()
            model.register_forward_hook(lambda m, args, out: None)
            return FAULTS[self.kind]()
        return -nn.functional.cross_entropy(out, self.y).item()


def analyze(method, net, x, eval_fn, **options):
    """Each layer at one level"""
    return SensitivityAnalyzer(net, x[:4], eval_fn, reuse=options.pop("reuse", False)).analyze(method, LEVELS[method][1], verbose=False, **options)


def sweep(method, net, x, eval_fn, **options):
    """Each layer at several levels"""
    return SensitivityAnalyzer(net, x[:4], eval_fn, reuse=options.pop("reuse", False)).sweep(method, LEVELS[method], verbose=False, **options)


def refine(method, net, x, eval_fn, **options):
    """Levels where curves bend"""
    levels = [8, 6, 4, 3] if method == "quantization" else [25, 40, 50, 60]
    analyzer = SensitivityAnalyzer(net, x[:4], eval_fn, reuse=False)
    return analyzer.sweep(method, levels, adaptive=Refine(per_unit=3), verbose=False, **options)


def reconstruct(method, net, x, eval_fn, **options):
    """What stays of a layer is refitted"""
    return analyze(method, net, x, eval_fn, reconstruct=x, **options)


def degradation(method, net, x, eval_fn, **options):
    """Two sizes"""
    return analyze_degradation(net, x[:4], eval_fn, (80, 60), method, runs=0, verbose=False, **options)


def search(method, net, x, eval_fn, **options):
    """A search for one method's levels, or for zeros"""
    if method == "sparsity":
        return search_targets(net, x[:4], eval_fn, 60, evaluations=24, verbose=False, **options)
    curves = SensitivityAnalyzer(net, x[:4], Faulty()).sweep(method, LEVELS[method], verbose=False)
    return search_plan(net, x[:4], eval_fn, curves, "80%", "params" if method != "quantization" else "bytes", evaluations=8, verbose=False, **options)


ENTRIES = {
    "analyze": analyze, "sweep": sweep, "sweep, reuse": partial(sweep, reuse=True), "recalibrate": "recalibrate", "journal": "journal",
    "refine": refine, "reconstruct": reconstruct, "degradation": degradation, "search": search, "workers": partial(sweep, n_jobs=2)}


def run(entry, method, net, x, eval_fn, folder, **options):
    """One call of an entry point"""
    if entry == "recalibrate":
        return sweep(method, net, x, eval_fn, recalibrate=x, **options)
    if entry == "journal":
        return sweep(method, net, x, eval_fn, journal=folder / f"{time.monotonic_ns()}", **options)
    return ENTRIES[entry](method, net, x, eval_fn, **options)


def try_out(entry, method, kind, at, folder):
    """What came of a fault at one call: "raised", "finished"; fails if the model is another, or the error does not say where"""
    on_interrupt = signal.getsignal(signal.SIGINT)   # ignored by a process that was started in the background
    net, x, _ = network()
    before, eval_fn = fingerprint(net), Faulty(kind, at)
    options = {"timeout": .1} if kind == "too slow" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(entry, method, net, x, eval_fn, folder, **options)
            outcome = "finished"
        except (*RAISES.values(), ValueError) as e:
            outcome = "raised"
            assert kind not in RAISES or isinstance(e, RAISES[kind]), (entry, method, kind, at, e)
            if kind in RAISES:
                where = [note for note in getattr(e, "__notes__", []) if note.startswith("while ")]
                assert where and ("untouched" in where[0] or any(f"{name}" in where[0] for name in ("0", "3", "5"))), (entry, method, kind, at, where)
    found = changes(before, fingerprint(net))
    assert not found, (entry, method, kind, at, found)
    assert outcome == "raised" or kind not in RAISES or eval_fn.n < at or entry == "workers", (entry, method, kind, at)
    assert signal.getsignal(signal.SIGINT) is on_interrupt
    return outcome


def n_calls(entry, method, folder):
    """How often an undisturbed run evaluates; 0: the method takes no part"""
    net, x, _ = network()
    eval_fn = Faulty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run(entry, method, net, x, eval_fn, folder)
        except (TypeError, ValueError) as e:
            assert "reconstruct" in str(e), (entry, method, e)
            return 0
    return 3 if entry == "workers" else eval_fn.n   # each worker counts for itself: the untouched model, then its units


def survived(entry, method, kind, folder, stops=None):
    """A fault at every call in turn, or at some: how often it was raised, and how often the run ended well (NaN is a broken layer)"""
    n = n_calls(entry, method, folder)
    calls = range(1, n + 1) if stops is None else sorted({min(n, max(1, round(stop * n))) for stop in stops} if n else ())
    return Counter(try_out(entry, method, kind, at, folder) for at in calls)


pairs = [(entry, method) for entry, method in product(ENTRIES, LEVELS) if entry not in ("workers", "journal")]
DIAGONAL = [(entry, method, list(FAULTS)[i % len(FAULTS)]) for i, (entry, method) in enumerate(pairs)]


@has_alarm
@pytest.mark.parametrize("entry,method,kind", DIAGONAL)
def test_a_fault_leaves_no_trace(entry, method, kind, tmp_path):
    """At the untouched model, in the middle and at the end; each entry point with each method, and each kind of fault with several of them"""
    found = survived(entry, method, kind, tmp_path, stops=(0, .5, 1))
    assert kind not in RAISES or not found["finished"]


def rows_of(result):
    """What was measured, to compare"""
    return {row.name: row.compressed_metric for row in result.layers if row.prunable}


@pytest.mark.parametrize("method", LEVELS)
def test_skipped_is_only_what_failed(method, tmp_path):
    """Each layer in turn is listed with the error instead, and the others are measured as if nothing had been"""
    net, x, _ = network()
    before, expected = fingerprint(net), analyze(method, net, x, Faulty())
    for k, kind in enumerate(("OutOfMemoryError", "raises", "wrong shape")[:len(rows_of(expected))]):
        found = analyze(method, net, x, Faulty(kind, 2 + k), on_error="skip")
        assert changes(before, fingerprint(net)) == []
        gone = {name: why for name, why in found.skipped if "could not be evaluated" in why}
        assert set(rows_of(expected)) - set(rows_of(found)) <= set(gone) and RAISES[kind].__name__ in next(iter(gone.values()))
        assert rows_of(found) == {name: metric for name, metric in rows_of(expected).items() if name not in gone}
        assert all(row.rank for row in found.top()) and not {row.name for row in found.top()} & set(gone)
    with pytest.raises(KeyboardInterrupt):
        analyze(method, net, x, Faulty("interrupted", 2), on_error="skip")
    with pytest.raises(RuntimeError):   # nothing can be compared with a baseline that is not there
        analyze(method, net, x, Faulty("raises", 1), on_error="skip")


class Picky:
    """An evaluation that cannot take a layer with so many zeros, in whichever process it is called"""

    def __init__(self, kind):
        self.kind, self.inner = kind, Faulty()

    def __call__(self, model):
        if (model[3].weight == 0).float().mean() > .6:
            return FAULTS[self.kind]()
        return self.inner(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "OutOfMemoryError", pytest.param("too slow", marks=has_alarm)])
def test_workers_skip_what_failed(kind):
    """Two processes leave out the same layer at the same level as one does, for the same reason, and the rest is the same to the bit; none of them leaves a trace"""
    net, x, _ = network()
    before, options = fingerprint(net), {"timeout": .5} if kind == "too slow" else {}
    alone = sweep("sparsity", net, x, Picky(kind), on_error="skip", **options)
    found = sweep("sparsity", net, x, Picky(kind), on_error="skip", n_jobs=2, **options)
    assert repr([result.as_dict() for result in found]) == repr([result.as_dict() for result in alone])
    gone = [[name for name, why in result.skipped if RAISES[kind].__name__ in why] for result in found]
    assert gone == [[], ["3"]] and [len(rows_of(result)) for result in found] == [3, 2]
    with pytest.raises(RAISES[kind]) as e:
        sweep("sparsity", net, x, Picky(kind), n_jobs=2, **options)
    assert any("while 3 was measured" in note for note in e.value.__notes__) and changes(before, fingerprint(net)) == []


@pytest.mark.parametrize("where", ["metric", "objective"])
@pytest.mark.parametrize("kind", ["raises", "interrupted", "OutOfMemoryError"])
def test_faults_in_an_estimate(kind, where):
    """At each call in turn: of the untouched model, of the pieces that gradients are taken of, and of what is measured to check the estimate"""
    net, x, y = network()
    before = fingerprint(net)

    def calls(at):
        n = 0

        def counted(name, f):
            def call(out, y):
                nonlocal n
                n += name == where
                return FAULTS[kind]() if n == at and name == where else f(out, y)
            return call
        loss = partial(nn.functional.cross_entropy, reduction="none")
        data = evaluation((x, y), counted("metric", lambda out, y: (out.argmax(1) == y).float()), counted("objective", loss))
        SensitivityAnalyzer(net, x[:4], data, reuse=False).estimate("sparsity", [25, 50, 75], check=2, size=16, verbose=False)
        return n
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # so small a network is not estimated well
        n = calls(None)
        assert n > (3 if where == "metric" else 6)
        assert changes(before, fingerprint(net)) == []
        for at in range(1, n + 1):
            with pytest.raises(RAISES[kind]):
                calls(at)
            assert changes(before, fingerprint(net)) == [], at


OTHERS = {
    "other samples": lambda found: tuple(t[:40] for t in found), "one number": lambda found: found[0].mean(), "no objective": lambda found: found[0],
    "other samples of the objective": lambda found: (found[0], found[1][:40]), "sequences": lambda found: tuple(t.view(8, 8) for t in found)}


def per_sample(of=None, at=None):
    """Right and wrong with the cross-entropy of each sample; at one of its calls something of another shape"""
    _, x, y = network()
    calls = []

    def eval_fn(model):
        calls.append(1)
        with torch.no_grad():
            out = model(x)
        found = (out.argmax(1) == y).float(), nn.functional.cross_entropy(out, y, reduction="none")
        return OTHERS[of](found) if len(calls) == at else found
    eval_fn.calls, eval_fn.known_as = calls, "accuracy and loss"   # which call goes wrong is no part of what it says
    return eval_fn


@pytest.mark.parametrize("method,of", zip([*LEVELS, "sparsity"], OTHERS, strict=True))
def test_other_scores_than_the_baseline_has(method, of, tmp_path):
    """They are the fault of the layer that was measured, which the error names or `skipped` lists; and no journal keeps them"""
    net, x, _ = network()
    before = fingerprint(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = repr([result.as_dict() for result in sweep(method, net, x, per_sample())])
        for at in (2, 4):
            journal = tmp_path / f"{at}"
            with pytest.raises(ValueError) as e:
                sweep(method, net, x, per_sample(of, at), journal=journal)
            assert any(note.startswith("while ") and "untouched" not in note for note in e.value.__notes__)
            found = sweep(method, net, x, per_sample(of, at), on_error="skip")
            assert any("could not be evaluated: ValueError" in why for result in found for _, why in result.skipped)
            assert repr([result.as_dict() for result in sweep(method, net, x, per_sample(), journal=journal)]) == expected
    assert changes(before, fingerprint(net)) == []


@pytest.mark.parametrize("entry", ["degradation", "search"])
def test_other_scores_in_searches_and_sizes(entry, tmp_path):
    """A plan whose score is that of other samples is an error that names the plan, and no journal keeps it"""
    net, x, _ = network()
    expected, whole = run(entry, "sparsity", net, x, per_sample(), tmp_path), per_sample()
    run(entry, "sparsity", net, x, whole, tmp_path)
    for at in (2, max(3, len(whole.calls)//2)):   # the last plans of a search are in its journal already
        journal = tmp_path / f"{at}"
        with pytest.raises(ValueError) as e:
            run(entry, "sparsity", net, x, per_sample("other samples", at), tmp_path, journal=journal)
        assert any(note.startswith("while ") and "untouched" not in note for note in e.value.__notes__)
        assert repr(run(entry, "sparsity", net, x, per_sample(), tmp_path, journal=journal).as_dict()) == repr(expected.as_dict())


class Trains:
    """An evaluation that takes a step of training, which makes all that follows wrong"""

    def __call__(self, model):
        with torch.no_grad():
            model[5].weight.mul_(.9)
        return 1.


@has_alarm
def test_what_is_never_skipped_and_what_a_limit_costs():
    """An evaluation that trains is an error in any case; a limit is refused where nothing could keep to it; handlers and clock come back"""
    net, x, _ = network()
    with pytest.raises(ValueError):
        analyze("sparsity", net, x, Trains(), on_error="skip")
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, .2)
        found = analyze("sparsity", net, x, Faulty("too slow", 2), on_error="skip", timeout=.4)
        assert [name for name, why in found.skipped if "TimeoutError" in why] == ["0"] and len(rang) == 1
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        mine = signal.signal(signal.SIGALRM, before)
    assert mine(0, None) is None and len(rang) == 2   # the same handler as before
    refused = []

    def in_a_thread():
        try:
            analyze("sparsity", net, x, Faulty(), timeout=5)
        except ValueError as e:
            refused.append(e)
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert len(refused) == 1


@pytest.mark.parametrize("entry", ["degradation", "search"])
@pytest.mark.parametrize("method", ["sparsity", "quantization"])
def test_what_was_measured_is_handed_over(entry, method, tmp_path):
    """A search and a size curve that end early say what they found, all of it measured"""
    net, x, _ = network()
    whole, n = run(entry, method, net, x, Faulty(), tmp_path), n_calls(entry, method, tmp_path)
    with pytest.raises(KeyboardInterrupt) as e:
        run(entry, method, net, x, Faulty("interrupted", n), tmp_path)
    found = e.value.partial
    if entry == "degradation":
        assert found.points == whole.points[:-1]
        return
    scores = {row["plan"]: row["metric"] for row in whole.ranking}
    assert found.ranking and all(scores[row["plan"]] == row["metric"] for row in found.ranking) and found.predicted_metric != found.predicted_metric
    with pytest.raises(KeyboardInterrupt) as e, limited(60):
        run(entry, method, net, x, Faulty("interrupted", 1), tmp_path)
    assert getattr(e.value, "partial", None) is None


ASKED = Settle(top=1, first=8)   # looks at 8, 12, 18, 27, 41, 62 and 64 samples


def settled(at=None, kind="interrupted", asked=ASKED, **options):
    """An analyzer with scores of samples, what it found with `Settle`, and how often the metric was called; at one of its calls a fault"""
    net, x, y = network()
    calls = []

    def metric(out, y):
        calls.append(1)
        return FAULTS[kind]() if len(calls) == at else (out.argmax(1) == y).float()
    analyzer = SensitivityAnalyzer(net, x[:4], evaluation((x, y), metric), reuse=False)
    before = fingerprint(net)
    try:
        found = analyzer.sweep("sparsity", [50, 90], adaptive=asked, verbose=False, **options)
    except (*RAISES.values(), ValueError) as e:
        found = e.partial
        assert analyzer.last is found
    assert changes(before, fingerprint(net)) == []
    return found, len(calls)


@pytest.mark.parametrize("kind", ["interrupted", "raises", "wrong shape"])
def test_settling_hands_over_what_was_measured(kind):
    """At each call in turn, or some: every unit with the samples that it got by then, scored as by whom looks at no more"""
    whole, n = settled()
    assert n > 20 and all(row.n for result in whole for row in result.layers)
    by_samples = {}
    for most in (8, 12, 18):
        found, _ = settled(asked=replace(ASKED, most=most))
        by_samples |= {(result.compression_level, row.name, row.n): row.delta for result in found for row in result.layers if row.n == most}
    n_before, compared = -1, 0
    for at in range(1, n + 1) if kind == "interrupted" else (1, 2, 3, 10, n):
        found, _ = settled(at, kind)
        rows = [(result.compression_level, row.name, row) for result in found or () for row in result.layers]
        n_now = sum(row.n for _, _, row in rows)
        assert (found is None) == (at <= 2) and n_now >= n_before, at   # the untouched model comes first
        n_before = n_now
        for level, name, row in rows:
            compared += (level, name, row.n) in by_samples
            assert by_samples.get((level, name, row.n), row.delta) == row.delta and row.baseline_metric == found[0].baseline_metric
    assert compared > (20 if kind == "interrupted" else 5)
    assert repr([result.as_dict() for result in settled()[0]]) == repr([result.as_dict() for result in whole])


def test_estimates_hand_over_what_was_predicted():
    """Ended while a unit is compressed, an estimate has the units before it; ended in its gradients, nothing; ended in its check, all"""
    net, x, y = network()
    before = fingerprint(net)

    def estimated(at_score=None, at_metric=None, at_loss=None):
        n = Counter()

        def counted(name, at, f):
            def call(*given):
                n[name] += 1
                return throw(KeyboardInterrupt) if n[name] == at else f(*given)
            return call
        data = evaluation((x, y), counted("metric", at_metric, lambda out, y: (out.argmax(1) == y).float()),
                          counted("loss", at_loss, partial(nn.functional.cross_entropy, reduction="none")))
        analyzer = SensitivityAnalyzer(net, x[:4], data, criteria=counted("score", at_score, torch.abs), reuse=False)
        try:
            found = analyzer.estimate("sparsity", [25, 50, 75], check=2, size=16, verbose=False)
        except KeyboardInterrupt as e:
            found = e.partial
        assert analyzer.last is found and changes(before, fingerprint(net)) == []
        return found and [result.as_dict() for result in found], n
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # so small a network is not estimated well
        whole, n = estimated()
        assert estimated(at_metric=1)[0] is None and estimated(at_loss=3)[0] is None
        assert repr(estimated(at_metric=n["metric"])[0]) == repr(whole)
        sizes = []
        for at in range(1, n["score"] + 1):
            found, _ = estimated(at_score=at)
            sizes.append(sum(len(result["layers"]) for result in found or ()))
            for part, every in zip(found or (), whole, strict=False):
                assert repr(part["layers"]) == repr(every["layers"][:len(part["layers"])])
        assert sizes == sorted(sizes) and sizes[0] == 0 and {3, 6, 9} <= set(sizes)


class Writes:
    """An evaluation that changes a weight at one of its calls, behind PyTorch's back or not, and is interrupted at another"""

    def __init__(self, at, stop=None, in_data=True):
        self.at, self.stop, self.in_data, self.n = at, stop, in_data, 0
        _, self.x, self.y = network()

    def __call__(self, model):
        self.n += 1
        if self.n == self.stop:
            raise KeyboardInterrupt
        with torch.no_grad():
            weight = model[5].weight
            if self.n == self.at:
                (weight.data if self.in_data else weight).mul_(.5)
            return -nn.functional.cross_entropy(model(self.x), self.y, reduction="none")


@pytest.mark.parametrize("in_data", [True, False])
@pytest.mark.parametrize("reuse", [False, "auto"])
def test_numbers_of_changed_weights_are_not_handed_over(reuse, in_data, tmp_path):
    """Not in `partial`, also if an interrupt comes first; and none of them gets into a journal"""
    net, x, _ = network()
    before = fingerprint(net)

    def measured(eval_fn, journal=None):
        analyzer = SensitivityAnalyzer(net, x[:4], eval_fn, reuse=reuse)
        try:
            found = analyzer.sweep("sparsity", [20, 50, 80], verbose=False, journal=journal)
        except (ValueError, KeyboardInterrupt) as e:
            found = e.partial
        assert analyzer.last is found and changes(before, fingerprint(net)) == []
        return {(result.compression_level, row.name): row.compressed_metric for result in found or () for row in result.layers}
    whole = measured(Writes(None))
    assert len(whole) == 9
    for at in range(2, 11):
        for stop in (None, at + 1, at + 3):
            assert measured(Writes(at, stop, in_data)).items() <= whole.items()
            journal = tmp_path / f"{at} {stop}"
            assert measured(Writes(at, stop, in_data), journal).items() <= whole.items()
            kept = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
            kept = {tuple(json.loads(line["key"])): line["data"]["value"] for line in kept if line["key"] != "baseline"}
            assert kept.items() <= whole.items() and len(kept) >= min(at, stop or at) - 2
    assert measured(Writes(None, 6)) and measured(Writes(None, 6)).items() <= whole.items()   # what can be used is handed over


LEFT_BEHIND = {
    "numbers of a buffer": lambda norm: norm.running_mean.data.add_(.5),
    "another buffer": lambda norm: setattr(norm, "running_var", 2*norm.running_var),
    "a mode": lambda norm: norm.train(),
    "an attribute": lambda norm: setattr(norm, "eps", .5),
    "a hook": lambda norm: norm.register_forward_hook(lambda m, args, out: 2*out),
}


@pytest.mark.parametrize("method", ["sparsity", "pruning"])
@pytest.mark.parametrize("kind", ["numbers of a buffer", "a hook", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(LEFT_BEHIND)[1:4])])
@pytest.mark.parametrize("asked", [None, Settle(top=1, first=8)])
def test_numbers_of_a_changed_model_are_not_handed_over(asked, kind, method):
    """What an evaluation leaves on the model behind it, and an interrupt soon after: no later number is handed over, and none that can be is lost"""
    net, x, y = network()
    before = fingerprint(net)

    def measured(at=None, stop=None):
        n = []

        def metric(out, y):
            n.append(1)
            if len(n) == at:
                LEFT_BEHIND[kind](net[1])
            if len(n) == stop:
                raise KeyboardInterrupt
            return -nn.functional.cross_entropy(out, y, reduction="none")
        analyzer = SensitivityAnalyzer(net, x[:4], evaluation((x, y), metric), reuse=False)
        try:
            found = analyzer.sweep(method, [20, 50, 80], adaptive=asked, verbose=False)
        except KeyboardInterrupt as e:
            found = e.partial
        assert analyzer.last is found and changes(before, fingerprint(net)) == []
        return {(row.name, result.compression_level, row.n): row.delta for result in found or () for row in result.layers if row.prunable}, len(n)
    whole, n = measured()
    assert measured(at=5)[0] == whole   # without an interrupt all is measured again
    assert asked or [len(measured(stop=stop)[0]) for stop in range(2, n)] == list(range(n - 2))
    for at in (6, 22) if asked else range(2, n):   # the 22nd is of the untouched model, in a later block
        known = dict(whole)
        for stop in range(at - 3, at + 5) if asked else ():   # with as many samples as there are then
            known |= measured(stop=stop)[0]
        for stop in (at + 1, at + 2, at + 4):
            assert measured(at, stop)[0].items() <= known.items(), (at, stop)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("place", [0, 5])
def test_another_parameter_in_place_of_a_weight_is_refused(place, reuse):
    """Put there at any call: said as what it is, also where the next unit finds it, or none does, and the model has its own again"""
    net, x, y = network()
    before, whole = fingerprint(net), {}
    for at in (99, *range(1, 8)):
        n = []

        def eval_fn(model, n=n, at=at):
            n.append(1)
            if len(n) == at:
                model[place].weight = nn.Parameter(torch.zeros_like(model[place].weight))
            with torch.no_grad():
                return (model(x).argmax(1) == y).float()
        analyzer = SensitivityAnalyzer(net, x[:4], eval_fn, reuse=reuse)
        if at == 99:
            analyzer.sweep("sparsity", [50, 90], verbose=False)
        else:
            with pytest.raises(Written):
                analyzer.sweep("sparsity", [50, 90], verbose=False)
        found = {(result.compression_level, row.name): row.compressed_metric for result in analyzer.last or () for row in result.layers}
        whole = whole or found
        assert found.items() <= whole.items() and changes(before, fingerprint(net)) == []
