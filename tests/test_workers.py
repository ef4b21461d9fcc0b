"""Work done by other processes, on one machine or a cluster: the same results to the bit, and those of killed workers again."""
import copy
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import cloudpickle
import joblib
import pytest
import torch
from torch import nn
from toys import lively, unchanged

from fasterai_sens import Perturbation, SensitivityAnalyzer, Settle, analyze_degradation, large_final, leave_no_trace, search_targets
from fasterai_sens.core import workers
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.protocol import methods
from fasterai_sens.core.workers import count_workers, spread
from fasterai_sens.measure.data import as_eval_fn
from fasterai_sens.measure.effects import same_score
from fasterai_sens.plans.meter import Meter
from fasterai_sens.plans.search import Masker

two = dict(n_jobs=2, verbose=False)


def in_threads():
    """Workers that are threads of this process, and have copies all the same: they need not start anew after an error"""
    return joblib.parallel_config(backend="threading", n_jobs=2)


def where():
    """A function for whether it is called in this process and thread, so in no worker"""
    here = os.getpid(), threading.get_ident()

    def is_here(): return here == (os.getpid(), threading.get_ident())
    return is_here


def small_net():
    """Convolutions that are coupled, batch norm, and linear layers; never the same object"""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU())
    return lively(nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))).eval()


x = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 4


@pytest.fixture(scope="module")
def analyzer():
    """Accuracy, with KL divergence as objective"""
    return SensitivityAnalyzer(small_net(), x[:1], (x, y))


def plain(result):
    """All that is in a result, to the bit, NaN included"""
    several = result if isinstance(result, list) else [result]
    return repr([one.as_dict() for one in several])


# what tells the switches, warnings, deaths and errors of tasks

def killed_once(mark, item):
    """At item 2 the process kills itself, the first time that any gets there."""
    if item == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item, os.getpid()


def inverse(item):
    """An error for 0."""
    return 1/item


def inverse_of_a_late_one(item):
    """An error for 0; others have moved the generator of their process while they wait."""
    torch.rand(1)
    if item:
        time.sleep(0.3)
    return 1/item


def one_sweep(**options):
    """The same each time, in this process or under what is active"""
    return plain(SensitivityAnalyzer(small_net(), x[:1], (x, y)).sweep("sparsity", [50, 80], verbose=False, **options))


def swept_by_workers(folder):
    """A sweep, after a worker was killed and nothing was lost, and after an error that came as here"""
    mark = Path(folder)/"killed"
    found = dict(spread(lambda item: killed_once(mark, item), range(6)))
    assert [found[i][0] for i in range(6)] == list(range(6))
    assert mark.exists() and os.getpid() not in {pid for _, pid in found.values()}
    with pytest.raises(ZeroDivisionError): list(spread(inverse, [1, 0]))
    return one_sweep()


def under_what(_):
    """What a task computes under."""
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), *casts, torch.rand(1).item()


@pytest.mark.parametrize("how", [dict(n_jobs=2), dict(backend="threading", n_jobs=2)], ids=["loky", "threading"])
def test_same_switches_and_draws(how):
    """Threads, dtype, gradients, casts and random numbers of the process that asked; and that process keeps its own"""
    with torch.no_grad(), torch.autocast("cpu"), joblib.parallel_config(**how):
        before = torch.get_rng_state()
        expected = under_what(0)
        torch.set_rng_state(before)
        found = dict(spread(under_what, range(3)))
    assert all(found[i] == expected for i in range(3))
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_threads_take_turns():
    """A model that is in use by one thread of a worker is not given to another"""
    busy = []

    def alone(_):
        busy.append(1)
        assert len(busy) == 1
        time.sleep(1e-3)
        busy.clear()

    with joblib.parallel_config(backend="threading", n_jobs=4): assert len(list(spread(alone, range(20)))) == 20


def test_what_cannot_be_sent(analyzer):
    """Said with what would do, and the model is what it was"""
    with pytest.raises(TypeError, match="keep open files, locks, .* n_jobs=1"): list(spread(threading.Lock(), [1], n_jobs=2))
    lock = threading.Lock()

    def locked(model):
        with lock: return model(x).mean().item()

    net = small_net()
    with unchanged(net), pytest.raises(TypeError): SensitivityAnalyzer(net, x[:1], locked).sweep("sparsity", [50], **two)


@pytest.mark.parametrize("wrong", [0, 1.5, "2", True])
def test_n_jobs_at_the_door(wrong, analyzer):
    """A whole number, not 0; before anything is evaluated"""
    calls = (
        lambda: count_workers(wrong),
        lambda: analyzer.analyze(n_jobs=wrong),
        lambda: analyzer.sweep(n_jobs=wrong),
        lambda: analyzer.estimate(check=2, n_jobs=wrong),
        lambda: analyze_degradation(analyzer.model, x[:1], (x, y), n_jobs=wrong),
    )
    for call in calls:
        with pytest.raises(ValueError, match="or -1 for all cores; got"): call()


@pytest.mark.parametrize("compression", list(methods))
def test_every_method_to_the_bit(compression, analyzer):
    """Rows, intervals, objectives, what was skipped; the model untouched"""
    levels = [8, 3] if compression == "quantization" else [20, 70]
    with unchanged(analyzer.model):
        here = analyzer.sweep(compression, levels, verbose=False)
        there = analyzer.sweep(compression, levels, **two)
    assert plain(here) == plain(there)
    assert there[0].layers[0].objective is not None


variants = {
    "stops early": dict(levels=[50, 90, 99], early_stop_mode="dropped", early_stop_value=.01),
    "levels of layers": dict(levels={"0": [50], "7": [20, 80]}),
    "recalibrated": dict(levels=[60], recalibrate=x),
    "reshuffled": dict(levels=[90, 10], layers=["9", "0", "7"]),
    "what is refused": dict(levels=[1, 50], granularity="filter"),
    "by data": dict(compression="quantization", levels=[4], quant_activations="both"),
}


@pytest.mark.parametrize("name", list(variants))
def test_options_to_the_bit(name, analyzer):
    """Early stops and what is left out, levels of their own, statistics estimated anew, activations"""
    analyzer.calibration_data = x
    options = dict(compression="sparsity") | variants[name]
    assert plain(analyzer.sweep(verbose=False, **options)) == plain(analyzer.sweep(**two, **options))


def test_single_level_and_config(analyzer):
    """`analyze`, and an active configuration of joblib instead of `n_jobs`; here it is n_jobs that wins"""
    seen = []

    def noting(model):
        seen.append(os.getpid())
        return model(x).std().item(), model(x).mean().item()

    one = SensitivityAnalyzer(small_net(), x[:1], noting, reuse=False)
    here = one.analyze("sparsity", 70, verbose=False)
    seen.clear()
    with joblib.parallel_config(n_jobs=2):
        assert plain(one.analyze("sparsity", 70, verbose=False)) == plain(here)
        assert seen == [os.getpid()]   # the untouched model alone: what copies of `noting` note stays with them
        one.analyze("sparsity", 70, verbose=False, n_jobs=1)
    assert len(seen) == 1 + 1 + len(here.layers)


def test_adaptive_to_the_bit():
    """Samples are drawn here, and their scores come back"""
    analyzer, settle = SensitivityAnalyzer(small_net(), x[:1], (x, y)), Settle(top=2, first=12)
    here = analyzer.sweep("sparsity", [60, 90], adaptive=settle, verbose=False)
    assert plain(here) == plain(analyzer.sweep("sparsity", [60, 90], adaptive=settle, **two))


def test_reuse_of_each_worker():
    """What is computed once is so in each worker, within its share of memory, and the report adds up"""
    analyzer = SensitivityAnalyzer(small_net(), x[:1], (x, y), reuse=True, reuse_memory=2_000_000)
    here = analyzer.sweep("quantization", [8, 4, 3], verbose=False)
    alone = analyzer.reuse_report.n_reused
    there = analyzer.sweep("quantization", [8, 4, 3], **two)
    report = analyzer.reuse_report
    assert plain(here) == plain(there)
    assert alone <= report.n_reused <= alone + 2   # each worker tries one first
    assert "evaluations reused results" in repr(report) and 0 < report.most_bytes <= 2_000_000


def test_perturbation_and_random_evaluation_of_a_notebook():
    """Classes and closures that no file has; each evaluation draws what it draws here"""
    class Noisy(Perturbation):
        stays_in_unit = True

        def __init__(self, level): self.amount = level
        @property
        def level(self): return self.amount
        def change(self, model, unit): unit.weight.data.add_(self.amount*torch.randn(unit.weight.shape))

    class Doubled(nn.Linear):
        def forward(self, x): return 2*super().forward(x)

    net = nn.Sequential(*small_net()[:-1], Doubled(16, 4))
    drawing = SensitivityAnalyzer(net, x[:1], lambda model: model(x[torch.randperm(40)[:20]])[:, 0], reuse=False)
    with unchanged(net):
        for level in (.1, 1.): assert plain(drawing.analyze(Noisy(level), verbose=False)) == plain(drawing.analyze(Noisy(level), **two))


@pytest.mark.slow
def test_a_killed_worker_in_a_sweep(tmp_path):
    """Its unit is measured again, by another process"""
    is_here = where()
    mark, expected = tmp_path/"killed", (x, y)

    def dies(model):
        if not is_here() and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return (model(expected[0]).argmax(1) == expected[1]).float()

    net = small_net()
    with unchanged(net), warnings.catch_warnings():
        warnings.simplefilter("ignore")   # joblib says that a worker has stopped
        analyzer = SensitivityAnalyzer(net, x[:1], dies)
        there = analyzer.sweep("sparsity", [50, 80], **two)
        assert mark.exists() and int(mark.read_text()) != os.getpid()
        assert plain(there) == plain(analyzer.sweep("sparsity", [50, 80], verbose=False))


@pytest.mark.slow
def test_killed_again_and_again():
    """Then it is an error that says how far it got, and what may be the reason"""
    def dies(_): os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="killed 2 times in a row, and 3 of 3 tasks are left; maybe there is not enough memory"):
        list(spread(dies, range(3), n_jobs=2, n_tries=2))


class Odd(Exception):
    """Cannot be made again from its text"""

    def __init__(self, what, why): super().__init__(f"{what}: {why}")


@pytest.mark.parametrize("kind, args, raised", [(ValueError, ["too thin"], ValueError), (Odd, ["conv", "too thin"], RuntimeError)])
def test_errors_as_here(kind, args, raised):
    """The same error with the same text; one that cannot be sent is told in words"""
    def picky(model):
        if (model[0].weight == 0).any(): raise kind(*args)
        return model(x).mean().item()

    net = small_net()
    with unchanged(net), in_threads(), pytest.raises(raised, match="too thin"):
        SensitivityAnalyzer(net, x[:1], picky).sweep("sparsity", [50], verbose=False)


def test_an_error_is_told_when_no_thread_is_at_work():
    """joblib does not wait for them; what they set for their item, such as the state of the generator, is put back first"""
    before = torch.get_rng_state()
    with in_threads(), pytest.raises(ZeroDivisionError):
        list(spread(inverse_of_a_late_one, [0, 1, 1, 1]))
    assert torch.equal(torch.get_rng_state(), before)
    time.sleep(0.1)   # no thread takes another item
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_that_writes_late():
    """Weights that only a worker's evaluation changes are an error there as here; an attribute is put back, and measured again"""
    is_here = where()
    def writes(model):
        if not is_here() and (model[7].weight == 0).any(): model[9].weight.data[0, 0] = 3.
        return model(x).mean().item()

    net = small_net()
    with unchanged(net), in_threads(), pytest.raises(ValueError, match=".9.weight.; it must only"):
        SensitivityAnalyzer(net, x[:1], writes, reuse=False).sweep("sparsity", [50], verbose=False)

    def puts_another(model):   # at the last call for a unit, and no unit after it would find it
        if not is_here() and (model[7].weight == 0).float().mean() > .7: model[9].weight = nn.Parameter(2*model[9].weight.detach())
        return model(x).mean().item()

    with unchanged(net), in_threads(), pytest.raises(ValueError, match=".9.weight.; it must only"):
        SensitivityAnalyzer(net, x[:1], puts_another, reuse=False).sweep("sparsity", [50, 80], layers=["3", "7"], verbose=False)

    def leaves_a_mark(model):
        if (model[7].weight == 0).any(): model[2].inplace = True
        return model(x).mean().item() + model[2].inplace

    with unchanged(net):
        analyzer = SensitivityAnalyzer(net, x[:1], leaves_a_mark)
        assert plain(analyzer.sweep("sparsity", [50, 80], verbose=False)) == plain(analyzer.sweep("sparsity", [50, 80], **two))


def test_warnings_as_here():
    """Each is given here, once, though every worker says it"""
    def chatty(model):
        warnings.warn("this takes a while", UserWarning, stacklevel=1)
        return model(x).mean().item()

    analyzer = SensitivityAnalyzer(small_net(), x[:1], chatty)
    for n_jobs in (1, 2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            analyzer.sweep("sparsity", [50, 80], n_jobs=n_jobs, verbose=False)
        assert {str(w.message) for w in said} == {"this takes a while"}
    assert len(said) == 2   # of the untouched model here, and of all workers together


def test_a_worker_that_computes_otherwise():
    """Its baseline is compared to the bit, objective included, and the difference is said with both numbers"""
    is_here = where()
    metric = SensitivityAnalyzer(small_net(), x[:1], lambda model: 1. + is_here() + model(x).mean().item(), reuse=False)
    with in_threads(), pytest.warns(UserWarning, match="a worker on .* scores the untouched model 0.* and here it is 1.*n_jobs=1"):
        metric.sweep("sparsity", [50, 80], verbose=False)

    def pair(model): return 1., (model(x).mean()*(1 if is_here() else 1 + 1e-6)).item()
    with in_threads(), pytest.warns(UserWarning, match="scores the untouched model 1.0 .objective"):
        SensitivityAnalyzer(small_net(), x[:1], pair, reuse=False).sweep("sparsity", [50, 80], verbose=False)


def test_interrupt(tmp_path):
    """The model is what it was, and the workers end"""
    is_here = where()
    def slow(model):
        if not is_here():
            (tmp_path/str(os.getpid())).touch()
            time.sleep(.2)
        return model(x).mean().item()

    def interrupt():
        while not any(tmp_path.iterdir()): time.sleep(.05)   # one may be at work before the other has started
        os.kill(parent, signal.SIGINT)

    net, parent = small_net(), os.getpid()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a process that was started in the background ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with unchanged(net), pytest.raises(KeyboardInterrupt): SensitivityAnalyzer(net, x[:1], slow).sweep("sparsity", list(range(5, 95)), **two)
    finally: signal.signal(signal.SIGINT, before)
    workers, until = [int(f.name) for f in tmp_path.iterdir()], time.time() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.time() < until: time.sleep(.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.slow
def test_estimate_is_checked_by_workers(analyzer):
    """The agreement with what was measured is the same number"""
    here = analyzer.estimate("sparsity", [30, 80], check=3, verbose=False)
    there = analyzer.estimate("sparsity", [30, 80], check=3, **two)
    assert repr(here.agreement) == repr(there.agreement) and plain(here) == plain(there)


class BreaksLast:
    """In a worker, ends with an error at the smallest size, once a file says that the other sizes were measured"""

    def __init__(self, journal, n_lines):
        self.journal, self.n_lines, self.home = journal, n_lines, os.getpid()

    def n_known(self): return self.journal.read_bytes().count(b'"size ') if self.journal.exists() else 0

    @torch.no_grad()
    def __call__(self, model):
        if os.getpid() != self.home and (model[0].weight == 0).float().mean() > .7:
            until = time.monotonic() + 60
            while self.n_known() < self.n_lines and time.monotonic() < until: time.sleep(.02)
            raise RuntimeError("broke at last")
        return -nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("kept", [False, True], ids=["handed over", "in a journal"])
def test_sizes_are_kept_as_they_are_ready(kept, tmp_path):
    """What some workers measured is on disk while others are at work, and in `partial` after an error"""
    net, sizes, more = small_net(), ["100 %", "80 %", "60 %", "20 %"], dict(runs=0, verbose=False)
    other = dict(journal=tmp_path / "kept" if kept else None)
    evaluate = BreaksLast(tmp_path / "kept", 2 if kept else 0)
    expected = analyze_degradation(net, x[:1], evaluate, sizes, "sparsity", **more)
    with unchanged(net), pytest.raises(RuntimeError, match="broke at last") as caught:
        analyze_degradation(net, x[:1], evaluate, sizes, "sparsity", n_jobs=2, **more, **other)
    partial = {point.target_size: point for point in caught.value.partial.points}
    assert all(repr(point) == repr(partial.get(point.target_size, point)) for point in expected.points)
    assert expected.points[0].target_size in partial   # as it is
    if kept: assert [*partial.values()] == expected.points[:3] and evaluate.n_known() == 2


@pytest.mark.parametrize("compression", ["pruning", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sparsity", "quantization", "low_rank"))])
def test_degradation_to_the_bit(compression):
    """Sizes side by side; only the latency, which is timed here, is another number"""
    net = small_net()
    sizes = ["90 %", "60 %", "35 %"]
    with unchanged(net):
        curves = [analyze_degradation(net, x[:1], (x, y), sizes, compression, runs=1, n_jobs=n, verbose=False) for n in (1, 2)]
    for curve in curves:
        for point in curve.points: assert point.latency_ms > 0
    here, there = (copy.deepcopy(curve.as_dict()) for curve in curves)
    for point in (*here["points"], *there["points"]): point["latency_ms"] = None
    assert repr(here) == repr(there)


@pytest.mark.slow
def test_search_to_the_bit():
    """Candidates of a stage side by side, if joblib's configuration names processes: the same plan, ranking and count"""
    net, many = small_net(), torch.randn(400, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    data = many, torch.arange(400) % 4
    with unchanged(net):
        here = search_targets(net, x[:1], data, 70, verbose=False)
        with joblib.parallel_config(n_jobs=2): there = search_targets(net, x[:1], data, 70, verbose=False)
    assert repr(here.as_dict()) == repr(there.as_dict())


def test_candidates_by_workers():
    """The scores are those of each plan alone, each on its share of the samples, and are counted as such"""
    net = small_net()
    units, seen = all_units(net)[0], []
    meter = Meter(net, Masker(units, "weight", large_final), as_eval_fn((x, y), sample=x[:1]), on_call=seen.append)
    with leave_no_trace(net):
        meter.dense()
        plans = [{units[0].name: pct} for pct in (10, 50, 90)]
        alone, before = [meter.score(plan, share=.5) for plan in plans], meter.n
        with in_threads(): together = meter.scores(plans, .5)
    assert all(map(same_score, alone, together)) and meter.crew is not None
    assert meter.n - before == pytest.approx(1.5) and len(seen) == 4


def short_search():
    """A search whose rounds ask the workers many times"""
    return repr(search_targets(small_net(), x[:1], (x, y), 70, evaluations=60, verbose=False).as_dict())


def test_workers_stay_for_a_search(monkeypatch):
    """They are started once, and let go at the end, also after an error"""
    opened, closed = [], []
    class Noted(workers._Pool):
        def __init__(self, n_jobs):
            super().__init__(n_jobs)
            opened.append(1)
        def close(self):
            super().close()
            closed.append(1)
    monkeypatch.setattr(workers, "_Pool", Noted)
    here = short_search()
    assert not opened
    with joblib.parallel_config("threading", n_jobs=2):
        assert short_search() == here and (len(opened), len(closed)) == (1, 1)
        is_here = where()
        def breaks(model):
            if not is_here(): raise ZeroDivisionError
            with torch.no_grad(): return model(x).square().mean(1)
        with pytest.raises(ZeroDivisionError): search_targets(small_net(), x[:1], breaks, 70, evaluations=60, verbose=False)
    assert len(opened) == len(closed) == 2


@pytest.mark.slow
def test_dask(tmp_path):
    """Two worker processes of a Dask cluster, with two threads each: a sweep, and a search"""
    pytest.importorskip("distributed", reason="Dask is not installed")
    from dask.distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster, Client(cluster):
        with joblib.parallel_config(backend="dask"):
            assert swept_by_workers(tmp_path) == one_sweep(n_jobs=1)
            there = short_search()
    assert there == short_search()


@pytest.mark.slow
def test_ray(tmp_path):
    """Two worker processes of a Ray cluster: a sweep, and a search"""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.util.joblib import register_ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])   # Ray's processes do not find this file
    try:
        register_ray()
        with joblib.parallel_config(backend="ray", n_jobs=2):
            assert swept_by_workers(tmp_path) == one_sweep(n_jobs=1)
            there = short_search()
        assert there == short_search()
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        ray.shutdown()
