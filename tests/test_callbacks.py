"""Fine-tuning with `SparsifyCallback`, and `SensitivityAnalyzer.from_learner`, on real fastai training."""

import math
import pickle
import random
from copy import deepcopy
from fractions import Fraction
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastai.callback import progress, schedule
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException, CancelTrainException
from fastai.callback.fp16 import AMPMode, MixedPrecision
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders, Datasets
from fastai.learner import Learner, load_learner
from fastai.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat
from fastai.metrics import F1Score, Perplexity, accuracy, accuracy_multi, error_rate
from fastai.optimizer import SGD, Adam, OptimWrapper, RMSProp
from fastai.torch_core import params, set_seed
from fastcore.basics import noop
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset

from fasterai_sens import LayerTargets, PruneCallback, QuantizeCallback, Schedule, SensitivityAnalyzer, Sparsifier, SparsifyCallback, to_torchao_config
from fasterai_sens.core.layers import all_units, filters_first
from fasterai_sens.measure.intervals import paired_interval
from fasterai_sens.measure.learner import learner_eval
from fasterai_sens.methods.criteria import criteria, taylor, wanda
from fasterai_sens.methods.grids import fake_quantize_weight
from fasterai_sens.train.schedules import agp, lin, schedules

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*CUDA.*"),  # mixed precision on a machine without a GPU
    pytest.mark.filterwarnings("ignore:load_learner"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
]


# ---------------------------------------------------------------- digits, a small network, a learner


@cache
def digits():
    """Shuffled digits: images `[1797, 1, 8, 8]` and classes."""
    d = load_digits()
    order = torch.randperm(len(d.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(d.images / 16, dtype=torch.float32)[order, None], torch.tensor(d.target)[order]


def image(i):
    """Image number `i`."""
    return digits()[0][i]


def label(i):
    """Class number `i`."""
    return digits()[1][i]


class Net(nn.Module):
    """Two convolutions with batch norm, and a head."""

    def __init__(self, n_out=10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, n_out))

    def forward(self, x):
        return self.head(self.body(x))


SIZES = {"body.0": 144, "body.3": 4608, "head.2": 1280}


def halves(model):
    """Parameter groups of body and head."""
    return [params(model.body), params(model.head)]


def loaders(*, n=320, bs=64, targets=None, **kwargs):
    """Training, validation and test data."""
    x, y = digits()
    y = y if targets is None else targets
    sets = [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, n), (1200, 1500), (1500, 1797))]
    return DataLoaders.from_dsets(*sets, bs=bs, device="cpu", num_workers=0, **kwargs)


def learner(path, *, dls=loaders, model=Net, state=None, seed=0, **kwargs):
    """A quiet Learner for the digits; data and model are made after the seed is set."""
    set_seed(seed)
    learn = Learner(dls(), model(), **{"loss_func": CrossEntropyLossFlat(), "metrics": accuracy, "path": path, **kwargs})
    if state:
        learn.model.load_state_dict(state)
    learn.remove_cb(progress.ProgressCallback)
    learn.logger = noop
    return learn


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights of a network that knows the digits."""
    learn = learner(tmp_path_factory.mktemp("trained"), dls=partial(loaders, n=1200))
    learn.fit_one_cycle(6, 2e-2)
    return deepcopy(learn.model.state_dict())


def weights(model):
    """Layer name -> weight."""
    return {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


def zeros(model):
    """Layer name -> number of weights that are zero."""
    return {n: int((w == 0).sum()) for n, w in weights(model).items()}


def part(n, pct):
    """How many of `n` are `pct` percent, rounded down."""
    return math.floor(n * Fraction(str(pct)) / 100)


def wanted(pct):
    """Zeros of every layer at `pct` percent, or at a percentage each."""
    return {n: part(size, pct.get(n, 0) if isinstance(pct, dict) else pct) for n, size in SIZES.items()}


def structure(model):
    """All that a model has besides numbers: attributes, tensors, hooks."""
    own = {n: (type(m), sorted(vars(m)), *(sorted(d) for k, d in vars(m).items() if isinstance(d, dict))) for n, m in model.named_modules()}
    return own, list(model.state_dict()), [n for n, _ in model.named_buffers()], [(bool(p._backward_hooks), p.requires_grad) for p in model.parameters()]


def snapshot(model):
    """A copy of all numbers of a model."""
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    """Whether two snapshots are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Probe(Callback):
    """Runs after everything else: a weight that was zero after one step is zero after the next."""

    order, run_valid = 90, False

    def __init__(self, revive=False):
        self.revive, self.trace = revive, []

    def before_fit(self):
        self.last = {n: (w == 0).clone() for n, w in weights(self.learn.model).items()}

    def after_step(self):
        now = {n: (w == 0).clone() for n, w in weights(self.learn.model).items()}
        for n, z in self.last.items():
            assert self.revive or not (z & ~now[n]).any(), f"{n}: dropped weights came back"
        self.last = now
        self.trace.append({n: int(z.sum()) for n, z in now.items()})


class Stop(Callback):
    """Raises `error` after so many training batches."""

    run_valid = False

    def __init__(self, at, error):
        self.at, self.error = at, error

    def after_batch(self):
        if self.train_iter >= self.at:
            raise self.error


def check_report(cb, model):
    """The report is what one counts."""
    found = zeros(model)
    assert {r["layer"]: r["zeros"] for r in cb.report} == found
    assert all(r["weights"] == SIZES[r["layer"]] and r["percent"] == pytest.approx(100 * r["zeros"] / r["weights"]) for r in cb.report)


# ---------------------------------------------------------------- masks hold

optimizers = {
    "sgd": partial(SGD, mom=0.9, wd=0.1),
    "adam": partial(Adam, wd=0.1),
    "adam with l2": partial(Adam, wd=0.1, decouple_wd=False),
    "rmsprop": partial(RMSProp, mom=0.9, wd=0.1),
    "torch adamw": partial(OptimWrapper, opt=partial(torch.optim.AdamW, weight_decay=0.1)),
    "torch sgd": partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1)),
}


@pytest.mark.parametrize("opt", optimizers)
@pytest.mark.parametrize("sparsity", [80, {"body.3": 90.5, "head.2": 33}], ids=["number", "dict"])
def test_masks_hold_after_every_step(tmp_path, trained, opt, sparsity):
    learn, probe, cb = learner(tmp_path, state=trained, opt_func=optimizers[opt]), Probe(), SparsifyCallback(sparsity)
    before = structure(learn.model)
    learn.fit(2, 1e-3, cbs=[cb, probe])
    assert len(probe.trace) == 10
    assert zeros(learn.model) == wanted(sparsity)
    assert structure(learn.model) == before
    check_report(cb, learn.model)


@pytest.mark.parametrize("opt", optimizers)
def test_without_the_callback_weights_come_back(tmp_path, trained, opt):
    """The probe sees what it is there for."""
    learn = learner(tmp_path, state=trained, opt_func=optimizers[opt])
    Sparsifier(learn.model).sparsify_model(80)
    learn.fit(1, 1e-3, cbs=[probe := Probe(revive=True)])
    assert sum(probe.trace[-1].values()) < sum(wanted(80).values()) / 2
    with pytest.raises(AssertionError, match="came back"):
        Sparsifier(learn.model).sparsify_model(80)
        learn.fit(1, 1e-3, cbs=Probe())


class CpuMixedPrecision(MixedPrecision):
    """fastai's mixed precision, but on the CPU."""

    def before_fit(self):
        super().before_fit()
        fp16 = self.amp_mode == AMPMode.FP16
        self.autocast, self.learn.scaler = autocast("cpu", dtype=torch.float16 if fp16 else torch.bfloat16), GradScaler("cpu", enabled=fp16)


precisions = {
    "to_fp16": lambda learn: learn.to_fp16(),
    "to_bf16": lambda learn: learn.to_bf16(),
    "fp16": lambda learn: learn.add_cb(CpuMixedPrecision()),
    "bf16": lambda learn: learn.add_cb(CpuMixedPrecision(amp_mode="bf16")),
    "channels last": lambda learn: learn.add_cb(ChannelsLast()),
}


@pytest.mark.parametrize("precision", precisions)
@pytest.mark.parametrize("criterion", ["large_final", "movement", "wanda", "taylor"])
def test_masks_hold_in_mixed_precision(tmp_path, trained, precision, criterion):
    learn = precisions[precision](learner(tmp_path, state=trained))
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(80, criteria=criteria[criterion]), probe := Probe()])
    assert len(probe.trace) == 10 and zeros(learn.model) == wanted(80)
    assert all(w.dtype == torch.float32 for w in weights(learn.model).values())


def test_masks_hold_with_accumulated_and_clipped_gradients(tmp_path, trained):
    learn = learner(tmp_path, state=trained, opt_func=optimizers["sgd"])
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(80), GradientAccumulation(128), GradientClip(0.5), probe := Probe()])
    assert 0 < len(probe.trace) < 10
    assert zeros(learn.model) == wanted(80)


fits = {
    "fit": lambda learn, cbs: learn.fit(2, 1e-3, cbs=cbs),
    "fit_one_cycle": lambda learn, cbs: learn.fit_one_cycle(2, 1e-2, cbs=cbs),
    "fit_flat_cos": lambda learn, cbs: learn.fit_flat_cos(2, 1e-2, cbs=cbs),
    "fit_sgdr": lambda learn, cbs: learn.fit_sgdr(1, 2, 1e-2, cbs=cbs),
    "fine_tune": lambda learn, cbs: learn.fine_tune(1, 1e-2, cbs=cbs),
    "resumed fit": lambda learn, cbs: learn.fit(3, 1e-3, cbs=cbs, start_epoch=1),
}


@pytest.mark.parametrize("fit", fits)
def test_every_way_to_fit(tmp_path, trained, fit):
    learn, cb = learner(tmp_path, state=trained, splitter=halves, opt_func=optimizers["sgd"]), SparsifyCallback(80)
    callbacks, before = list(learn.cbs), structure(learn.model)
    fits[fit](learn, [cb, probe := Probe()])
    assert len(probe.trace) == 10 and zeros(learn.model) == wanted(80)
    assert structure(learn.model) == before and list(learn.cbs) == callbacks
    check_report(cb, learn.model)


def test_a_frozen_body_becomes_sparse_too(tmp_path, trained):
    learn = learner(tmp_path, state=trained, splitter=halves)
    learn.freeze()
    before = learn.model.body[3].weight.detach().clone()
    learn.fit(1, 1e-3, cbs=[SparsifyCallback(80), Probe()])
    after = learn.model.body[3].weight.detach()
    assert zeros(learn.model) == wanted(80) and torch.equal(after[after != 0], before[after != 0])
    assert not learn.model.body[3].weight.requires_grad


# ---------------------------------------------------------------- how sparsity grows


def late(start, f):
    """A schedule that begins later."""
    return lambda p: 0.0 if p < start else f((p - start) / (1 - start))


formulas = {
    "one_shot": late(0.5, lambda t: 1.0),
    "iterative": late(0.2, lambda t: math.ceil(3 * t) / 3),
    "agp": late(0.2, lambda t: 1 - (1 - t) ** 3),
    "one_cycle": lambda t: (1 + math.exp(6 - 14)) / (1 + math.exp(6 - 14 * t)),
    "cos": lambda t: (1 - math.cos(math.pi * t)) / 2,
    "lin": lambda t: t,
    "dsd": lambda t: (1 - math.cos(2 * math.pi * t)) / 2,
}


def test_every_schedule_is_tested():
    assert formulas.keys() == schedules.keys()


@pytest.mark.parametrize("start", [0, 40])
@pytest.mark.parametrize("name", formulas)
def test_sparsity_follows_the_schedule(tmp_path, trained, name, start):
    """After batch i of n: the share (i + 1)/n of the way from where it began to the target, to one hundredth."""
    learn, dense_again = learner(tmp_path, state=trained), name == "dsd"
    Sparsifier(learn.model).sparsify_model(start)
    learn.fit(3, 1e-3, cbs=[cb := SparsifyCallback(90, schedule=schedules[name]), probe := Probe(revive=dense_again)])
    assert len(probe.trace) == 15
    begin = wanted(start)
    for i, found in enumerate(probe.trace):
        low, high = sorted(formulas[name](min(1, max(0, (i + 1) / 15 + e))) for e in (-1e-6, 1e-6))
        for n, size in SIZES.items():
            least, most = (begin[n] + (size * 0.9 - begin[n]) * f for f in (max(0, low - 0.01), min(1, high + 0.01)))
            assert math.floor(least) <= found[n] <= (size if dense_again else most + 1e-6), (i, n)
    if dense_again:
        assert sum(probe.trace[-1].values()) < max(sum(begin.values()), 0.05 * sum(SIZES.values())) + 1
    else:
        assert zeros(learn.model) == wanted(90)
    check_report(cb, learn.model)


@pytest.mark.parametrize("name", ["agp", "one_cycle", "cos"])
def test_the_last_batch_is_no_cliff(tmp_path, trained, name):
    """A schedule that levels off has all but reached its target before the end, so that there is time to recover."""
    learn = learner(tmp_path, state=trained)
    learn.fit(8, 1e-3, cbs=[SparsifyCallback(90, schedule=schedules[name]), probe := Probe()])
    assert len(probe.trace) == 40
    last = formulas[name](1) - formulas[name](39 / 40)
    for n, size in SIZES.items():
        assert probe.trace[-1][n] - probe.trace[-2][n] <= 0.9 * size * last + 1, n


def test_a_second_fit_starts_from_the_sparsity_there_is(tmp_path, trained):
    learn, first = learner(tmp_path, state=trained), Probe()
    learn.fit(1, 1e-3, cbs=[SparsifyCallback(50), first])
    kept = {n: w != 0 for n, w in weights(learn.model).items()}
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(80, schedule=lin), second := Probe()])
    assert all(second.trace[0][n] >= wanted(50)[n] for n in SIZES) and second.trace[0] != wanted(80)
    assert zeros(learn.model) == wanted(80)
    assert not any((~kept[n] & (w != 0)).any() for n, w in weights(learn.model).items())


def test_the_same_callback_keeps_the_sparsity_in_a_second_fit(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained), SparsifyCallback(80)
    learn.add_cb(cb)
    learn.fit(1, 1e-3)
    learn.fit(1, 1e-3, cbs=(probe := Probe()))
    assert probe.trace == [wanted(80)] * 5
    check_report(cb, learn.model)


def test_a_lower_target_lets_weights_come_back(tmp_path, trained):
    """From 70 % to 50 %: what was zero and is not dropped any more trains again, where a gradient reaches it."""
    learn = learner(tmp_path, state=trained)
    Sparsifier(learn.model).sparsify_model(70)
    learn.fit(2, 1e-3, cbs=SparsifyCallback(50, schedule=schedules["one_shot"]))
    assert all(wanted(50)[n] <= z < wanted(65)[n] for n, z in zeros(learn.model).items()), zeros(learn.model)


def test_zero_percent_leaves_the_training_as_it_is(tmp_path, trained):
    """With nothing to drop, the callback must not even change the order of the data."""
    ends = []
    for cbs in (None, SparsifyCallback(0)):
        learn = learner(tmp_path, state=trained, seed=3)
        learn.fit(1, 1e-2, cbs=cbs)
        ends.append(snapshot(learn.model))
    assert same(*ends)


# ---------------------------------------------------------------- contexts, granularities, layers


@pytest.mark.parametrize("pct", [50, 83.3])
def test_global_context_is_exact_overall(tmp_path, trained, pct):
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[cb := SparsifyCallback(pct, context="global"), Probe()])
    found = zeros(learn.model)
    assert sum(found.values()) == part(sum(SIZES.values()), pct) and found != wanted(pct)
    check_report(cb, learn.model)
    learn.fit(1, 1e-3, cbs=[SparsifyCallback(90, context="global"), probe := Probe()])
    assert sum(probe.trace[0].values()) >= sum(found.values())
    assert sum(zeros(learn.model).values()) == part(sum(SIZES.values()), 90)


n_blocks = {
    "weight": dict(SIZES),
    "kernel": {"body.0": 16, "body.3": 512, "head.2": 1280},
    "filter": {"body.0": 16, "body.3": 32, "head.2": 10},
    "channel": {"body.0": 144, "body.3": 288, "head.2": 10},
    "row": {"body.0": 48, "body.3": 1536, "head.2": 10},
    "column": {"body.0": 48, "body.3": 1536, "head.2": 128},
    "layer": {"body.0": 1, "body.3": 1, "head.2": 1},
}


@pytest.mark.parametrize("context", ["local", "global"])
@pytest.mark.parametrize("granularity", n_blocks)
def test_blocks_are_dropped_whole(tmp_path, trained, granularity, context):
    learn, counts = learner(tmp_path, state=trained), n_blocks[granularity]
    learn.fit(1, 1e-3, cbs=[SparsifyCallback(60, granularity, context), Probe()])
    dropped = {n: z * counts[n] / SIZES[n] for n, z in zeros(learn.model).items()}
    assert all(d == int(d) for d in dropped.values())
    if context == "local":
        assert dropped == {n: part(c, 60) for n, c in counts.items()}
    else:
        assert sum(dropped.values()) == part(sum(counts.values()), 60)


def test_two_of_four(tmp_path, trained):
    """Two of every four inputs; the layer with one input is left out and said so."""
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[cb := SparsifyCallback(50, "2:4"), Probe()])
    w = weights(learn.model)
    for n in ("body.3", "head.2"):
        assert ((w[n].unflatten(1, (-1, 4)) != 0).sum(2) == 2).all()
    assert zeros(learn.model)["body.0"] == 0 and [n for n, _ in cb.skipped] == ["body.0"]


@pytest.mark.parametrize("pct", [25, 40, 50])
def test_two_of_four_grows_from_none_to_two(tmp_path, trained, pct):
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[SparsifyCallback({"body.3": pct}, "2:4", schedule=lin), probe := Probe()])
    assert {t["body.3"] / SIZES["body.3"] for t in probe.trace} == ({0.0, 0.25, 0.5} if pct == 50 else {0.0, 0.25})


def test_layer_type_limits_the_layers(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(1, 1e-3, cbs=[cb := SparsifyCallback(80, layer_type=nn.Linear), Probe()])
    assert zeros(learn.model) == wanted({"head.2": 80})
    assert [(r["layer"], r["target"]) for r in cb.report] == [("head.2", 80)]
    with pytest.raises(KeyError, match="body.0"):
        learn.fit(1, 1e-3, cbs=SparsifyCallback({"body.0": 80}, layer_type=nn.Linear))


def test_targets_of_an_analysis(tmp_path, trained):
    """The whole way: measure, set targets, fine-tune, and have the mean that was asked for."""
    learn = learner(tmp_path, state=trained)
    targets = SensitivityAnalyzer.from_learner(learn).sweep(levels=[50, 70, 90, 97], verbose=False).to_layer_targets(learn.model, 80, max_pct=97)
    learn.fit(2, 1e-3, cbs=[cb := SparsifyCallback(targets), Probe()])
    assert all(0 <= SIZES[n] * targets[n] / 100 - z < 1 for n, z in zeros(learn.model).items())
    assert [r["target"] for r in cb.report] == list(targets.values())


bad = [
    (dict(sparsity={"body.1": 50}), KeyError, "body.1"),
    (dict(sparsity={"body.33": 50}), KeyError, "body.3"),
    (dict(sparsity=150), ValueError, "percent"),
    (dict(sparsity=True), ValueError, "percent"),
    (dict(sparsity=math.nan), ValueError, "percent"),
    (dict(sparsity={"body.3": -1}), ValueError, "body.3"),
    (dict(sparsity=LayerTargets({"body.3": 4}, "bits")), ValueError, "bits"),
    (dict(sparsity=50, context="globl"), ValueError, "globl"),
    (dict(sparsity={"body.3": 50}, context="global"), ValueError, "exclude"),
    (dict(sparsity=50, granularity="weigth"), ValueError, "weigth"),
    (dict(sparsity=80, granularity="2:4"), ValueError, "50 %"),
    (dict(sparsity={"body.0": 50}, granularity="2:4"), ValueError, "body.0"),
    (dict(sparsity=50, schedule="agp"), TypeError, "agp"),
    (dict(sparsity=50, criteria="large_final"), TypeError, "large_final"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), bad, ids=[str(b[0]) for b in bad])
def test_mistakes_are_said_and_change_nothing(tmp_path, trained, kwargs, error, message):
    learn = learner(tmp_path, state=trained)
    callbacks, before, numbers = list(learn.cbs), structure(learn.model), snapshot(learn.model)
    with pytest.raises(error, match=message):
        learn.fit(1, 1e-3, cbs=SparsifyCallback(**kwargs))
    assert list(learn.cbs) == callbacks and structure(learn.model) == before and same(snapshot(learn.model), numbers)


def test_no_report_before_the_first_fit(capsys, tmp_path, trained):
    cb, learn = SparsifyCallback(80), learner(tmp_path, state=trained)
    with pytest.raises(ValueError, match="fit"):
        cb.print_sparsity()
    learn.fit(1, 1e-3, cbs=cb)
    capsys.readouterr()
    cb.print_sparsity()
    out = capsys.readouterr().out
    assert all(n in out for n in SIZES) and f"{sum(zeros(learn.model).values()):,}" in out


# ---------------------------------------------------------------- criteria


def at_once(position):
    """All of the target from the first batch on."""
    return 1.0


def at_the_end(position):
    """Nothing until the last batch."""
    return float(position >= 1)


@pytest.mark.parametrize("name", criteria)
def test_every_criterion_reaches_the_target(tmp_path, trained, name):
    learn = learner(tmp_path, state=trained)
    before = structure(learn.model)
    learn.fit(2, 1e-3, cbs=[cb := SparsifyCallback(80, criteria=criteria[name]), probe := Probe()])
    assert len(probe.trace) == 10 and zeros(learn.model) == wanted(80)
    assert structure(learn.model) == before
    check_report(cb, learn.model)


def check_lowest_dropped(model, scores, pct=80):
    """Exactly `pct` percent are gone, and none of them scores higher than what was kept."""
    assert zeros(model) == wanted(pct)
    for n, w in weights(model).items():
        gone, kept = scores[n][w == 0], scores[n][w != 0]
        assert gone.max() <= kept.min() + 1e-3 * kept.min().abs(), n


class Spy(Callback):
    """Copies the weights at the start of the fit, and before the last batch is fed."""

    order, run_valid = 60, False  # before the callback that drops weights

    def before_fit(self):
        self.start = {n: w.detach().clone() for n, w in weights(self.learn.model).items()}

    def before_batch(self):
        self.now = {n: w.detach().clone() for n, w in weights(self.learn.model).items()}


of_change = {
    "large_final": lambda w, w0: w.abs(),
    "small_final": lambda w, w0: -w.abs(),
    "large_init": lambda w, w0: w0.abs(),
    "small_init": lambda w, w0: -w0.abs(),
    "large_init_large_final": lambda w, w0: torch.minimum(w.abs(), w0.abs()),
    "small_init_small_final": lambda w, w0: -torch.maximum(w.abs(), w0.abs()),
    "magnitude_increase": lambda w, w0: w.abs() - w0.abs(),
    "movement": lambda w, w0: (w - w0).abs(),
    "updating_magnitude_increase": lambda w, w0: w.abs() - w0.abs(),
    "updating_movement": lambda w, w0: (w - w0).abs(),
    "updating_movmag": lambda w, w0: (w * (w - w0)).abs(),
}


@pytest.mark.parametrize("name", of_change)
def test_earlier_weights_are_those_at_the_start_of_the_fit(tmp_path, trained, name):
    learn, spy = learner(tmp_path, state=trained), Spy()
    learn.fit(1, 1e-2, cbs=[SparsifyCallback(80, criteria=criteria[name], schedule=Schedule(at_the_end)), spy])
    check_lowest_dropped(learn.model, {n: of_change[name](spy.now[n], spy.start[n]) for n in SIZES})


class SpyTwice(Callback):
    """Copies the weights right before and right after every change of the sparsity."""

    run_valid = False

    def __init__(self, order, into):
        self.order, self.into = order, into

    def before_batch(self):
        self.into.append({n: w.detach().clone() for n, w in weights(self.learn.model).items()})


@pytest.mark.parametrize("name", ["updating_movement", "updating_magnitude_increase", "updating_movmag"])
def test_updating_criteria_compare_with_the_last_change(tmp_path, trained, name):
    """Two steps of sparsity; the second looks at the movement since the first."""
    learn, before, after = learner(tmp_path, state=trained), [], []
    two_steps = Schedule(lambda t: 1.0 if t >= 1 else 0.5 if t >= 0.5 else 0.0)
    learn.fit(2, 1e-2, cbs=[SparsifyCallback(80, criteria=criteria[name], schedule=two_steps), SpyTwice(60, before), SpyTwice(70, after)])
    first = next(i for i, w in enumerate(after) if (w["head.2"] == 0).any())
    assert first in (4, 5)
    scores = {n: of_change[name](before[-1][n], after[first][n]).masked_fill(after[first][n] == 0, -math.inf) for n in SIZES}
    check_lowest_dropped(learn.model, scores)


def input_norms(model, x):
    """Norm of every input channel of every layer, shaped to multiply its weight."""
    seen, model = {}, deepcopy(model).eval()
    for n, m in model.named_modules():
        if n in SIZES:
            m.register_forward_pre_hook(lambda m, args, n=n: seen.update({n: args[0]}))
    with torch.no_grad():
        model(x)
    return {n: v.transpose(0, 1).flatten(1).norm(dim=1).view(1, -1, *[1] * (v.dim() - 2)) for n, v in seen.items()}


def squared_gradients(model, loss_func, x, y):
    """Squared gradient of every weight."""
    model = deepcopy(model).eval()
    loss_func(model(x), y).backward()
    return {n: w.grad.square() for n, w in weights(model).items()}


def test_wanda_takes_the_data_of_the_learner(tmp_path, trained):
    learn = learner(tmp_path, dls=partial(loaders, n=256, bs=256), state=trained)
    norms = input_norms(learn.model, digits()[0][:256])
    scores = {n: w.detach().abs() * norms[n] for n, w in weights(learn.model).items()}
    learn.fit(1, 0.0, cbs=SparsifyCallback(80, criteria=wanda, schedule=Schedule(at_once)))
    check_lowest_dropped(learn.model, scores)


EVEN_LARGE_PRIME = torch.tensor([[d % 2 == 0, d > 4, d in (2, 3, 5, 7)] for d in range(10)]).float()


tasks = {
    "classes": (lambda y: y, 10, CrossEntropyLossFlat(), accuracy),
    "labels": (lambda y: EVEN_LARGE_PRIME[y], 3, BCEWithLogitsLossFlat(), accuracy_multi),
}


@pytest.mark.parametrize("task", tasks)
def test_taylor_takes_data_and_loss_of_the_learner(tmp_path, task):
    """Loss and data are the learner's own, and the analysis drops the same weights as the fit."""
    (encode, n_out, loss_func, metric), (x, y) = tasks[task], digits()
    y = encode(y)
    learn = learner(tmp_path, dls=partial(loaders, n=256, bs=256, targets=y), model=partial(Net, n_out), loss_func=loss_func, metrics=metric)
    learn.fit(5, 1e-2)
    dense, g2 = deepcopy(learn.model).eval(), squared_gradients(learn.model, loss_func, x[:256], y[:256])
    analyzed = SensitivityAnalyzer.from_learner(learn, criteria=taylor).analyze(level=80, verbose=False)
    learn.fit(1, 0.0, cbs=SparsifyCallback(80, criteria=taylor, schedule=Schedule(at_once)))
    for r in analyzed.layers:
        w, dropped_ = weights(dense)[r.name].detach(), weights(learn.model)[r.name] == 0
        scores = w.square() * g2[r.name]
        assert int(dropped_.sum()) == part(w.numel(), 80) and scores[dropped_].max() <= scores[~dropped_].min() * 1.001
        one = deepcopy(dense)
        weights(one)[r.name].data[dropped_] = 0
        assert r.compressed_metric == pytest.approx(float(metric(predictions(one, x[1200:1500]), y[1200:1500])), abs=1e-6)


def squares(weight):
    """A criterion of one's own."""
    return weight.square()


def test_a_function_is_a_criterion(tmp_path, trained):
    learn, spy = learner(tmp_path, state=trained), Spy()
    learn.fit(1, 1e-2, cbs=[SparsifyCallback(80, criteria=squares, schedule=Schedule(at_the_end)), spy])
    check_lowest_dropped(learn.model, {n: w.square() for n, w in spy.now.items()})


@pytest.mark.parametrize("x", [*criteria.values(), *schedules.values()], ids=[*criteria, *schedules])
def test_criteria_and_schedules_can_be_pickled(x):
    assert pickle.loads(pickle.dumps(x)) == x


@pytest.mark.parametrize("name", criteria)
def test_a_callback_can_be_pickled_before_and_after_a_fit(tmp_path, trained, name):
    learn = learner(tmp_path, state=trained)
    cb = pickle.loads(pickle.dumps(SparsifyCallback(80, criteria=criteria[name], schedule=lin)))
    learn.fit(1, 1e-3, cbs=cb)
    assert zeros(learn.model) == wanted(80)
    cb.learn = None
    assert pickle.loads(pickle.dumps(cb)).report == cb.report
    assert len(pickle.dumps(cb)) < 10_000, "masks or weights stay behind"


# ---------------------------------------------------------------- with the rest of fastai


def test_lr_find_does_not_sparsify(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained), SparsifyCallback(80)
    learn.add_cbs([cb, probe := Probe()])
    before = structure(learn.model)
    learn.lr_find(num_it=12, show_plot=False)
    assert same(snapshot(learn.model), trained) and structure(learn.model) == before
    assert len(probe.trace) > 5 and all(t == wanted(0) for t in probe.trace)
    assert not any(isinstance(c, schedule.LRFinder) for c in learn.cbs) and cb.report == []
    learn.fit(1, 1e-3)
    assert zeros(learn.model) == wanted(80)


def test_lr_find_on_a_sparse_model_brings_the_zeros_back(tmp_path, trained):
    learn = learner(tmp_path, state=trained, cbs=SparsifyCallback(80))
    learn.fit(1, 1e-3)
    sparse = snapshot(learn.model)
    learn.lr_find(num_it=12, show_plot=False)
    assert same(snapshot(learn.model), sparse) and zeros(learn.model) == wanted(80)


class Saver(Callback):
    """Saves after every epoch."""

    def after_epoch(self):
        self.learn.save(f"epoch{self.epoch}")


def test_what_is_saved_during_a_fit_loads_into_a_fresh_model(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(80), Saver()])
    learn.save("end")
    counts = []
    for name in ("epoch0", "epoch1", "end"):
        saved = torch.load(tmp_path / "models" / f"{name}.pth", weights_only=False)["model"]
        assert list(saved) == list(Net().state_dict())
        fresh = learner(tmp_path, seed=7).load(name)
        assert same(snapshot(fresh.model), saved)
        counts.append(zeros(fresh.model))
    assert wanted(0) != counts[0] != counts[1] == counts[2] == wanted(80)
    fresh.fit(1, 1e-3, cbs=[SparsifyCallback(90), probe := Probe()])
    assert all(probe.trace[0][n] >= counts[2][n] for n in SIZES) and zeros(fresh.model) == wanted(90)


def test_the_best_model_comes_back_sparse(tmp_path, trained):
    """With a learning rate of 0 early epochs are the best; only the last is sparse enough to count. `test_beside.py` has more."""
    learn = learner(tmp_path, state=trained)
    learn.fit(3, 0.0, cbs=[cb := SparsifyCallback(95), SaveModelCallback()])
    saved = torch.load(tmp_path / "models" / "model.pth")
    assert same(snapshot(learn.model), saved) and zeros(learn.model) == wanted(95)
    check_report(cb, learn.model)


def test_a_model_saved_at_the_end_is_sparse(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(80), SaveModelCallback(at_end=True)])
    fresh = learner(tmp_path, seed=7).load("model")
    assert zeros(fresh.model) == wanted(80)


stops = {
    "early stopping": lambda: EarlyStoppingCallback(min_delta=100.0, patience=1),
    "cancelled fit": lambda: Stop(7, CancelFitException()),
}


@pytest.mark.parametrize("stop", stops)
def test_a_fit_that_stops_early_reports_what_is_there(tmp_path, trained, stop):
    learn, cb = learner(tmp_path, state=trained), SparsifyCallback(80, schedule=lin)
    before = structure(learn.model)
    learn.fit(4, 1e-3, cbs=[cb, stops[stop](), probe := Probe()])
    assert 0 < len(probe.trace) < 20
    assert wanted(0) != zeros(learn.model) == probe.trace[-1] != wanted(80)
    assert structure(learn.model) == before
    check_report(cb, learn.model)


@pytest.mark.parametrize("criterion", ["large_final", "updating_movement", "taylor"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_fit_leaves_a_plain_model(tmp_path, trained, error, criterion):
    learn = learner(tmp_path, state=trained)
    before, callbacks = structure(learn.model), list(learn.cbs)
    with pytest.raises(error):
        learn.fit(4, 1e-3, cbs=[SparsifyCallback(80, criteria=criteria[criterion], schedule=lin), probe := Probe(), Stop(7, error("stop"))])
    assert structure(learn.model) == before and list(learn.cbs) == callbacks
    assert zeros(learn.model) == probe.trace[-1]
    Net().load_state_dict(learn.model.state_dict())
    learn.fit(1, 1e-3, cbs=(free := Probe(revive=True)))
    assert sum(free.trace[-1].values()) < sum(probe.trace[-1].values()), "the masks are still there"
    learn.fit(1, 1e-3, cbs=SparsifyCallback(80))
    assert zeros(learn.model) == wanted(80)


def test_an_interrupted_callback_that_stays_attached_is_ready_again(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained), SparsifyCallback(80)
    learn.add_cb(cb)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(4, 1e-3, cbs=Stop(7, KeyboardInterrupt()))
    learn.lr_find(num_it=6, show_plot=False)
    learn.validate()
    learn.fit(1, 1e-3, cbs=Probe())
    assert zeros(learn.model) == wanted(80)
    check_report(cb, learn.model)


def test_validation_and_prediction_leave_model_data_and_report_alone(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained), SparsifyCallback(80, criteria=taylor)
    learn.add_cb(cb)
    learn.fit(1, 1e-3)
    report, numbers, order = cb.report, snapshot(learn.model), learn.dls.train.rng.getstate()
    learn.validate()
    learn.get_preds()
    assert cb.report == report and same(snapshot(learn.model), numbers)
    assert learn.dls.train.rng.getstate() == order, "validation went through the training data"


class Predicts(Callback):
    """Predicts after every epoch, inside the fit."""

    run_valid = False

    def after_epoch(self):
        self.learn.get_preds(dl=self.dls[2], inner=True)


def test_predictions_inside_a_fit_do_not_disturb(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(80), Predicts(), probe := Probe()])
    assert len(probe.trace) == 10 and zeros(learn.model) == wanted(80)


def exportable(path, **kwargs):
    """A learner whose data can be emptied for `export`."""
    sets = [Datasets(list(r), [[image], [label]]) for r in (range(320), range(1200, 1300))]
    return learner(path, dls=lambda: DataLoaders.from_dsets(*sets, bs=64, device="cpu", num_workers=0), **kwargs)


@pytest.mark.parametrize("criterion", ["large_final", "movement", "taylor"])
def test_export_with_the_callback_attached(tmp_path, trained, criterion):
    learn = exportable(tmp_path, state=trained, cbs=SparsifyCallback(80, criteria=criteria[criterion]))
    learn.fit(1, 1e-3)
    learn.export("model.pkl")
    loaded = load_learner(tmp_path / "model.pkl")
    assert zeros(loaded.model) == wanted(80) and structure(loaded.model) == structure(Net())
    items = list(range(1200, 1300))
    expected, _ = learn.get_preds()
    assert torch.equal(loaded.get_preds(dl=loaded.dls.test_dl(items))[0], expected)
    torch.testing.assert_close(loaded.predict(1200)[2], expected[0])


def test_an_exported_learner_can_validate(tmp_path, trained):
    """It has no training data any more, and needs none."""
    learn = exportable(tmp_path, state=trained, cbs=SparsifyCallback(80))
    learn.fit(1, 1e-3)
    learn.export("model.pkl")
    loaded = load_learner(tmp_path / "model.pkl")
    assert list(loaded.validate(dl=learn.dls.valid)) == pytest.approx(list(learn.validate()))


def torch_loaders():
    """Plain PyTorch loaders, which fastai trains on as they are."""
    x, y = digits()
    sets = TensorDataset(x[:320], y[:320]), TensorDataset(x[1200:1500], y[1200:1500])
    return DataLoaders(*[DataLoader(s, batch_size=64) for s in sets])


@pytest.mark.parametrize("criterion", ["large_final", "taylor"])
def test_plain_torch_loaders(tmp_path, trained, criterion):
    learn = learner(tmp_path, dls=torch_loaders, state=trained)
    learn.fit(1, 1e-3)
    learn.fit(1, 1e-3, cbs=[SparsifyCallback(80, criteria=criteria[criterion]), Probe()])
    assert zeros(learn.model) == wanted(80)


def test_accuracy_survives_eighty_percent(tmp_path, trained):
    learn = learner(tmp_path, dls=partial(loaders, n=1200), state=trained)
    dense = learn.validate()[1]
    Sparsifier(learn.model).sparsify_model(80)
    at_one_blow = learn.validate()[1]
    learn.model.load_state_dict(trained)
    learn.fit(8, 5e-3, cbs=SparsifyCallback(80, schedule=agp))
    assert zeros(learn.model) == wanted(80)
    assert dense > 0.95 and learn.validate()[1] > max(0.85, at_one_blow + 0.3)


# ---------------------------------------------------------------- quantization-aware fine-tuning


def most_values(model):
    """Layer name -> the largest number of different weights in an output channel."""
    return {u.name: max(len(r.unique()) for r in u.filters.flatten(1)) for u in all_units(model)[0]}


def is_rounded(model, plan=3):
    """Whether every layer of the plan is on a symmetric grid of so many bits, and not on a coarser one by accident of being constant."""
    found = most_values(model)
    plan = plan if isinstance(plan, dict) else dict.fromkeys(found, plan)
    return all(1 < found[n] <= 2**b - 1 for n, b in plan.items())


class Rounded(Callback):
    """Runs after everything else: weights are rounded at all times but during the step."""

    order = 90

    def __init__(self, plan=3):
        self.plan, self.steps, self.batches, self.epochs = plan, 0, 0, 0

    def look(self, stepping=False):
        assert is_rounded(self.learn.model, self.plan) != stepping

    def before_batch(self):
        self.look()
        self.batches += 1

    def before_step(self):
        self.look(stepping=True)
        self.steps += 1

    def after_step(self):
        self.look()

    def after_pred(self):
        self.look()

    def after_epoch(self):
        if self.batches:  # not in an epoch that a resumed fit skips
            self.look()
        self.epochs += 1


def check_ends_quantized(model, cb, **how):
    """The weights are those that fake quantization makes of the float weights, which are others."""
    assert {u.name for u in all_units(model)[0]} >= set(cb.bits) == set(cb.floats)
    for u in all_units(model)[0]:
        if u.name in cb.bits:
            filters = filters_first(u.module, cb.floats[u.name])
            assert torch.equal(u.filters, fake_quantize_weight(filters, cb.bits[u.name], **how)) and not torch.equal(u.filters, filters)


class Batches(Callback):
    """Remembers what was trained on."""

    order, run_valid = 70, False

    def before_fit(self):
        self.seen = []

    def before_batch(self):
        self.seen.append((self.xb[0].clone(), self.yb[0].clone()))


hows = {"plain": {}, "one scale": {"per_channel": False}, "asymmetric": {"symmetric": False}, "groups": {"group_size": 4}}


@pytest.mark.parametrize("how", hows)
@pytest.mark.parametrize("plan", [{"body.3": 3, "head.2": 4}, {"head.2": 2}], ids=str)
def test_straight_through_by_hand(tmp_path, trained, plan, how):
    """Forward and backward at the rounded weights, a step of SGD with momentum and decay at the float ones."""
    learn = learner(tmp_path, state=trained, opt_func=optimizers["torch sgd"])
    learn.fit(2, 1e-2, wd=0.1, cbs=[cb := QuantizeCallback(plan, **hows[how]), batches := Batches()])
    model = Net().train()
    model.load_state_dict(trained)
    bn = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    decayed = [p for p in model.parameters() if not any(p is q for m in bn for q in m.parameters())]
    opt = torch.optim.SGD(decayed + [p for m in bn for p in m.parameters()], 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)

    def rounded():
        """A copy of the layers of the plan, then the same rounded in place."""
        floats = {n: weights(model)[n].detach().clone() for n in plan}
        for n, bits in plan.items():
            weights(model)[n].data.copy_(fake_quantize_weight(floats[n], bits, **hows[how]))
        return floats

    for x, y in batches.seen:
        floats = rounded()
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for n, w in floats.items():
            weights(model)[n].data.copy_(w)
        opt.step()
    floats = rounded()
    assert len(batches.seen) == 10
    for n in plan:
        torch.testing.assert_close(cb.floats[n], floats[n], rtol=1e-3, atol=1e-5)
    for n, w in model.state_dict().items():
        if w.is_floating_point() and n.removesuffix(".weight") not in plan:
            torch.testing.assert_close(learn.model.state_dict()[n], w, rtol=1e-3, atol=1e-5)
    check_ends_quantized(learn.model, cb, **hows[how])


@pytest.mark.parametrize("opt", optimizers)
def test_rounded_at_all_times_but_the_step(tmp_path, trained, opt):
    learn, plan = learner(tmp_path, state=trained, opt_func=optimizers[opt]), {"body.3": 3, "head.2": 2}
    before = structure(learn.model)
    learn.fit(2, 1e-3, cbs=[cb := QuantizeCallback(plan), probe := Rounded(plan)])
    assert (probe.steps, probe.batches, probe.epochs) == (10, 20, 2)
    assert structure(learn.model) == before and cb.bits == plan and cb.bits.unit == "bits"
    check_ends_quantized(learn.model, cb)
    assert not is_rounded(learn.model, {"body.0": 3})


@pytest.mark.parametrize("precision", precisions)
def test_rounded_in_mixed_precision(tmp_path, trained, precision):
    learn = precisions[precision](learner(tmp_path, state=trained))
    learn.fit(2, 1e-3, cbs=[cb := QuantizeCallback(3), probe := Rounded()])
    assert probe.steps == 10 and all(w.dtype == torch.float32 for w in weights(learn.model).values())
    check_ends_quantized(learn.model, cb)


def test_steps_that_the_scaler_skips_move_nothing(tmp_path, trained):
    """A scale that overflows half precision: no step is taken, and nothing is rounded twice."""
    learn = learner(tmp_path, state=trained, cbs=Overflows())
    learn.fit(1, 1e-3, cbs=[cb := QuantizeCallback(3), probe := Rounded()])
    assert probe.steps == 0
    assert all(torch.equal(cb.floats[n], trained[f"{n}.weight"]) for n in SIZES)
    check_ends_quantized(learn.model, cb)


class Overflows(Callback):
    """What mixed precision does when gradients overflow."""

    order = 10

    def before_step(self):
        raise CancelStepException


def test_accumulated_and_clipped_gradients(tmp_path, trained):
    learn = learner(tmp_path, state=trained, opt_func=optimizers["sgd"])
    learn.fit(2, 1e-3, cbs=[cb := QuantizeCallback(3), GradientAccumulation(128), GradientClip(0.5), probe := Rounded()])
    assert 0 < probe.steps < 10
    check_ends_quantized(learn.model, cb)


@pytest.mark.parametrize("fit", fits)
def test_every_way_to_fit_quantized(tmp_path, trained, fit):
    learn, cb = learner(tmp_path, state=trained, splitter=halves, opt_func=optimizers["sgd"]), QuantizeCallback(3)
    callbacks, before = list(learn.cbs), structure(learn.model)
    fits[fit](learn, [cb, probe := Rounded()])
    assert probe.steps == 10 and structure(learn.model) == before and list(learn.cbs) == callbacks
    check_ends_quantized(learn.model, cb)


def test_a_frozen_body_is_rounded_too(tmp_path, trained):
    learn = learner(tmp_path, state=trained, splitter=halves)
    learn.freeze()
    learn.fit(1, 1e-3, cbs=[cb := QuantizeCallback(3), Rounded()])
    assert torch.equal(cb.floats["body.3"], trained["body.3.weight"]) and not torch.equal(cb.floats["head.2"], trained["head.2.weight"])
    assert not learn.model.body[3].weight.requires_grad
    check_ends_quantized(learn.model, cb)


def test_a_second_fit_goes_on_from_the_float_weights(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained), QuantizeCallback(3)
    learn.fit(1, 1e-3, cbs=cb)
    floats, model = {n: w.clone() for n, w in cb.floats.items()}, snapshot(learn.model)
    learn.fit(1, 0.0, wd=0, cbs=cb)
    assert all(torch.equal(cb.floats[n], w) for n, w in floats.items())
    assert all(torch.equal(w, model[f"{n}.weight"]) for n, w in weights(learn.model).items())
    learn.model.load_state_dict(trained)
    learn.fit(1, 0.0, wd=0, cbs=cb)
    assert all(torch.equal(w, trained[f"{n}.weight"]) for n, w in cb.floats.items()), "a model that was loaded starts from what it has"


def test_another_callback_starts_from_the_rounded_weights(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(1, 1e-3, cbs=QuantizeCallback(3))
    model = snapshot(learn.model)
    learn.fit(1, 0.0, wd=0, cbs=[cb := QuantizeCallback(8)])
    assert all(torch.equal(w, model[f"{n}.weight"]) for n, w in cb.floats.items())


def test_lr_find_trains_float_weights(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained), QuantizeCallback(3)
    learn.add_cb(cb)
    before = structure(learn.model)
    learn.lr_find(num_it=12, show_plot=False)
    assert same(snapshot(learn.model), trained) and structure(learn.model) == before and cb.bits is None
    learn.fit_one_cycle(1, 1e-3)
    model, floats = snapshot(learn.model), dict(cb.floats)
    learn.lr_find(num_it=12, show_plot=False)
    learn.validate()
    learn.get_preds()
    assert same(snapshot(learn.model), model) and cb.floats == floats
    learn.fit(1, 1e-3, cbs=Rounded())
    check_ends_quantized(learn.model, cb)


@pytest.mark.parametrize("at_end", [False, True])
def test_what_is_saved_is_rounded(tmp_path, trained, at_end):
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-2, cbs=[QuantizeCallback(3), SaveModelCallback(at_end=at_end), Saver()])
    assert is_rounded(learn.model)
    for name in ("model", "epoch0", "epoch1"):
        saved = torch.load(tmp_path / "models" / f"{name}.pth", weights_only=False)
        fresh = Net()
        fresh.load_state_dict(saved.get("model", saved))
        assert is_rounded(fresh), name


def test_the_best_model_that_comes_back_is_rounded(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(3, 0.3, cbs=[cb := QuantizeCallback(3), SaveModelCallback(), Saver()])
    best = torch.load(tmp_path / "models" / "model.pth")
    assert same(snapshot(learn.model), best) and is_rounded(learn.model)
    epochs = [torch.load(tmp_path / "models" / f"epoch{i}.pth", weights_only=False)["model"] for i in range(3)]
    assert [same(best, e) for e in epochs].count(True) == 1 and not same(best, epochs[2])
    learn.fit(1, 0.0, wd=0, cbs=cb)
    assert all(torch.equal(w, best[f"{n}.weight"]) for n, w in cb.floats.items()), "the float weights of another epoch"


class CancelIn(Callback):
    """Raises in one event of the fourth batch."""

    run_valid = False

    def __init__(self, event, error, order):
        self.order = order
        setattr(self, event, lambda: self.strike(error))

    def strike(self, error):
        if self.train_iter == 3:
            raise error


moments = ["before_batch", "after_loss", "before_step", "after_step", "after_batch"]
cancels = [CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException]
# each moment with each exception, by turns before and after the callback; a step is cancelled only around a step, a batch not behind itself
cancel_cases = [(m, c, (5, 90)[(i + j) % 2]) for i, m in enumerate(moments) for j, c in enumerate(cancels) if (m, c) != ("after_batch", CancelBatchException)]
cancel_cases += [(m, CancelStepException, order) for m in ("before_step", "after_step") for order in (5, 90)]


@pytest.mark.parametrize(("event", "error", "order"), cancel_cases)
def test_whatever_is_cancelled_ends_rounded(tmp_path, trained, event, error, order):
    learn = learner(tmp_path, state=trained)
    before, failed = structure(learn.model), False
    saves = [SaveModelCallback(at_end=True)] * (error is not CancelEpochException)  # fastai's own fails without the metric of an epoch
    try:
        learn.fit(2, 1e-3, cbs=[cb := QuantizeCallback(3), CancelIn(event, error, order), Rounded(), *saves])
    except CancelStepException:  # fastai does not expect it after the step
        failed = event == "after_step"
        assert failed
    assert is_rounded(learn.model) or failed and order == 5
    assert structure(learn.model) == before
    if not failed:
        check_ends_quantized(learn.model, cb)
        if saves:
            saved = Net()
            saved.load_state_dict(torch.load(tmp_path / "models" / "model.pth"))
            assert is_rounded(saved)


def test_early_stopping(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(4, 1e-3, cbs=[cb := QuantizeCallback(3), EarlyStoppingCallback(min_delta=100.0, patience=1), probe := Rounded()])
    assert 0 < probe.steps < 20
    check_ends_quantized(learn.model, cb)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_between_steps_leaves_rounded_weights(tmp_path, trained, error):
    learn, cb = learner(tmp_path, state=trained), QuantizeCallback(3)
    before, callbacks = structure(learn.model), list(learn.cbs)
    with pytest.raises(error):
        learn.fit(4, 1e-3, cbs=[cb, Rounded(), Stop(7, error("stop"))])
    assert structure(learn.model) == before and list(learn.cbs) == callbacks
    check_ends_quantized(learn.model, cb)
    floats = {n: w.clone() for n, w in cb.floats.items()}
    learn.fit(1, 0.0, wd=0, cbs=cb)
    assert all(torch.equal(cb.floats[n], w) for n, w in floats.items()), "training that was done is lost"


def test_an_error_in_the_step_leaves_float_weights(tmp_path, trained):
    learn, cb = learner(tmp_path, state=trained, opt_func=optimizers["sgd"]), QuantizeCallback(3)
    learn.create_opt()
    before, step, done = structure(learn.model), learn.opt.step, []

    def interrupted(**kwargs):
        step(**kwargs)
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt

    learn.opt.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 1e-3, cbs=cb)
    assert structure(learn.model) == before and not is_rounded(learn.model)
    left = snapshot(learn.model)
    learn.fit(1, 0.0, wd=0, cbs=cb)
    assert all(torch.equal(cb.floats[n], left[f"{n}.weight"]) for n in SIZES)
    check_ends_quantized(learn.model, cb)


def test_a_quantize_callback_can_be_pickled(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    cb = pickle.loads(pickle.dumps(QuantizeCallback({"body.3": 3}, symmetric=False)))
    learn.fit(1, 1e-3, cbs=cb)
    check_ends_quantized(learn.model, cb, symmetric=False)
    cb.learn = None
    saved = pickle.dumps(cb)
    assert len(saved) < 10_000, "weights stay behind"
    again = pickle.loads(saved)
    assert again.bits == {"body.3": 3} and again.floats == {}
    learn.fit(1, 1e-3, cbs=again)
    check_ends_quantized(learn.model, again, symmetric=False)


def test_export_with_quantize_callback_attached(tmp_path, trained):
    learn = exportable(tmp_path, state=trained, cbs=QuantizeCallback(3))
    learn.fit(1, 1e-3)
    learn.export("model.pkl")
    loaded = load_learner(tmp_path / "model.pkl")
    assert same(snapshot(loaded.model), snapshot(learn.model)) and is_rounded(loaded.model) and structure(loaded.model) == structure(Net())
    assert loaded.quantize.floats == {}


def test_an_analysis_after_the_fit_needs_nothing_of_ours(tmp_path, trained):
    """Rounding once more to the same grid changes nothing, so 3 bits cost nothing now."""
    learn = learner(tmp_path, state=trained)
    learn.fit(1, 1e-3, cbs=QuantizeCallback(3))
    res = SensitivityAnalyzer.from_learner(learn).sweep("quantization", [8, 3, 2], verbose=False)
    assert all(abs(r.delta) < 1e-6 for r in res[1].layers) and any(r.delta > 0.01 for r in res[2].layers)


class EveryKind(nn.Module):
    """Tied layers, attention, Hugging Face's Conv1D and a transposed convolution."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.up, self.a, self.b = nn.ConvTranspose1d(8, 12, 2, stride=2, groups=2), nn.Linear(16, 16), nn.Linear(16, 16)
        self.attn, self.hf, self.head = nn.MultiheadAttention(16, 2, batch_first=True), Conv1D(24, 16), nn.Linear(24, 10)
        self.b.weight = self.a.weight

    def forward(self, x):
        h = self.b(self.a(self.up(x[:, 0])).relu()).relu()
        return self.head(self.hf(h + self.attn(h, h, h, need_weights=False)[0]).relu().mean(1))


def test_every_kind_of_layer_on_its_own_axis(tmp_path):
    learn, plan = learner(tmp_path, model=EveryKind), {"up": 3, "b": 4, "attn.in_proj_weight": 3, "attn.out_proj": 2, "hf": 3, "head": 4}
    before, tied = structure(learn.model), learn.model.a.weight
    learn.fit(2, 1e-2, cbs=[cb := QuantizeCallback(plan), probe := Rounded({"a" if n == "b" else n: b for n, b in plan.items()})])
    assert probe.steps == 10 and structure(learn.model) == before
    assert learn.model.a.weight is learn.model.b.weight is tied and set(cb.bits) == set(plan) - {"b"} | {"a"}
    check_ends_quantized(learn.model, cb)


def test_groups_that_do_not_fit_are_skipped_or_an_error(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    learn.fit(1, 1e-3, cbs=[cb := QuantizeCallback(3, group_size=16)])
    assert set(cb.bits) == {"body.3", "head.2"} and "9 weights" in dict(cb.skipped)["body.0"]
    assert "BatchNorm2d" in dict(cb.skipped)["body.1"]
    check_ends_quantized(learn.model, cb, group_size=16)


def test_sparse_and_quantized_at_once(tmp_path, trained):
    """Zero is on the grid: what is dropped stays zero, the rest is rounded."""
    learn = learner(tmp_path, state=trained)
    learn.fit(2, 1e-3, cbs=[cb := QuantizeCallback(8), SparsifyCallback(80)])
    assert all(found >= wanted(80)[n] for n, found in zeros(learn.model).items())
    assert {n: int((w == 0).sum()) for n, w in cb.floats.items()} == wanted(80)
    check_ends_quantized(learn.model, cb)


bad_plans = [
    (dict(plan=50), ValueError, "got 50"),
    (dict(plan=True), ValueError, "in bits"),
    (dict(plan=1), ValueError, "in bits"),
    (dict(plan=17), ValueError, "in bits"),
    (dict(plan={"body.3": 50}), ValueError, "'body.3' is in bits"),
    (dict(plan=LayerTargets({"body.3": 50})), ValueError, "percent"),
    (dict(plan={}), ValueError, "empty"),
    (dict(plan=["body.3"]), TypeError, "layer name -> bits"),
    (dict(plan={"body.33": 4}), KeyError, "did you mean 'body.3'"),
    (dict(plan={"body.1": 4}), KeyError, "BatchNorm2d"),
    (dict(plan=4, group_size=0), ValueError, "group_size"),
    (dict(plan=4, group_size=2, per_channel=False), ValueError, "per_channel"),
    (dict(plan={"body.0": 4, "head.2": 4}, group_size=4), ValueError, "'body.0' cannot be quantized like this"),
    (dict(plan=4, group_size=7), ValueError, "no layer can be quantized like this"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), bad_plans, ids=[str(b[0]) for b in bad_plans])
def test_bad_plans_are_said_and_change_nothing(tmp_path, trained, kwargs, error, message):
    learn = learner(tmp_path, state=trained)
    callbacks, before = list(learn.cbs), structure(learn.model)
    with pytest.raises(error, match=message):
        learn.fit(1, 1e-3, cbs=QuantizeCallback(**kwargs))
    assert list(learn.cbs) == callbacks and structure(learn.model) == before and same(snapshot(learn.model), trained)


def test_tied_layers_with_different_bits(tmp_path):
    with pytest.raises(ValueError):
        learner(tmp_path, model=EveryKind).fit(1, 1e-3, cbs=QuantizeCallback({"a": 3, "b": 4}))


def test_not_beside_pruning(tmp_path, trained):
    learn = learner(tmp_path, state=trained)
    with pytest.raises(ValueError, match="prune in one fit"):
        learn.fit(1, 1e-3, cbs=[QuantizeCallback(3), PruneCallback(50)])
    assert same(snapshot(learn.model), trained)


def test_torchao_runs_what_was_trained(tmp_path, trained):
    """On the asymmetric grid both round alike, so that integers give the predictions of the fine-tuned model."""
    from torchao.quantization import quantize_

    learn = learner(tmp_path, state=trained)
    learn.fit(1, 1e-3, cbs=[cb := QuantizeCallback({"head.2": 3}, symmetric=False)])
    x, _ = valid()
    expected, net = predictions(learn.model, x), deepcopy(learn.model).eval()
    quantize_(net, to_torchao_config(cb.bits, net, symmetric=False), filter_fn=None)
    assert type(net.head[2].weight).__name__ == "IntxUnpackedToInt8Tensor"
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_recovers_what_two_bits_lose(tmp_path, trained):
    """The same epochs without the callback, and rounded afterwards, do not."""

    def tuned(cbs, epochs=4):
        learn = learner(tmp_path, dls=partial(loaders, n=1200), state=trained)
        if epochs:
            learn.fit_one_cycle(epochs, 5e-3, cbs=cbs)
        if not cbs:
            for w in weights(learn.model).values():
                w.data = fake_quantize_weight(w, 2)
        assert is_rounded(learn.model, 2)
        return learn.validate()[1]

    one_shot, without, with_it = tuned(None, 0), tuned(None), tuned(QuantizeCallback(2))
    assert with_it > 0.9 and max(one_shot, without) < with_it - 0.1


# ---------------------------------------------------------------- from_learner


def dropped(model, name, pct):
    """A copy of `model` in evaluation mode, with the smallest weights of one layer set to zero."""
    model = deepcopy(model).eval()
    w = weights(model)[name]
    w.data.view(-1)[w.detach().abs().flatten().argsort(stable=True)[: part(w.numel(), pct)]] = 0
    return model


@torch.no_grad()
def predictions(model, *x):
    """What `model` says in evaluation mode."""
    return deepcopy(model).eval()(*x)


def valid(targets=None):
    """Validation images and targets."""
    x, y = digits()
    return x[1200:1500], (y if targets is None else targets)[1200:1500]


def check_samples(res, model, score, sign, *x, level=80):
    """Every row agrees with `score` (predictions -> a number for each sample), computed on a copy without fastai."""
    base = score(predictions(model, *x)).double().numpy()
    assert res.baseline_metric == pytest.approx(base.mean(), abs=1e-6)
    assert [r.name for r in res.layers] == list(weights(model))
    for r in res.layers:
        each = score(predictions(dropped(model, r.name, level), *x)).double().numpy()
        worse = sign * (base - each)
        stderr = worse.std(ddof=1) / math.sqrt(len(worse))
        ci, _ = paired_interval(*((base, each) if sign > 0 else (each, base)))   # tests/test_intervals.py has what that is
        assert r.compressed_metric == pytest.approx(each.mean(), abs=1e-6) and r.delta == pytest.approx(worse.mean(), abs=1e-6)
        assert r.stderr == pytest.approx(stderr, abs=1e-6) and r.ci == pytest.approx(ci, abs=1e-6)
    assert any(r.delta > 0 for r in res.layers)


def right(y):
    """Scores of single samples: whether the class is right."""
    return lambda p: (p.argmax(1) == y).float()


@pytest.mark.parametrize("metric", [None, accuracy], ids=["the learner's", "given"])
def test_accuracy_of_every_sample(tmp_path, trained, metric):
    learn, (x, y) = learner(tmp_path, state=trained), valid()
    res = SensitivityAnalyzer.from_learner(learn, metric).analyze(level=80, verbose=False)
    check_samples(res, learn.model, right(y), 1, x)
    assert res.baseline_metric == pytest.approx(learn.validate()[1]) and (res.metric_name, res.higher_is_better) == ("accuracy", True)


def test_a_learner_without_metrics_is_judged_by_accuracy(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained, metrics=[]), valid()
    check_samples(SensitivityAnalyzer.from_learner(learn).analyze(level=80, verbose=False), learn.model, right(y), 1, x)


def test_loss_of_every_sample(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained), valid()
    res = SensitivityAnalyzer.from_learner(learn, learn.loss_func).analyze(level=80, verbose=False)
    check_samples(res, learn.model, lambda p: F.cross_entropy(p, y, reduction="none"), -1, x)
    assert res.baseline_metric == pytest.approx(learn.validate()[0], abs=1e-5) and not res.higher_is_better


def multi_label(path):
    """A learner with three labels for each digit."""
    y = EVEN_LARGE_PRIME[digits()[1]]
    learn = learner(path, dls=partial(loaders, targets=y), model=partial(Net, 3), loss_func=BCEWithLogitsLossFlat(), metrics=accuracy_multi)
    learn.fit(4, 1e-2)
    return learn, *valid(y)


def test_labels_of_every_sample(tmp_path):
    learn, x, y = multi_label(tmp_path)
    res = SensitivityAnalyzer.from_learner(learn).analyze(level=80, verbose=False)
    check_samples(res, learn.model, lambda p: ((p.sigmoid() > 0.5) == y.bool()).float().mean(1), 1, x)
    assert res.baseline_metric == pytest.approx(learn.validate()[1])


def test_loss_of_labels_of_every_sample(tmp_path):
    learn, x, y = multi_label(tmp_path)
    res = SensitivityAnalyzer.from_learner(learn, learn.loss_func).analyze(level=80, verbose=False)
    check_samples(res, learn.model, lambda p: F.binary_cross_entropy_with_logits(p, y, reduction="none").mean(1), -1, x)


def check_numbers(res, model, score, sign, x, level=80):
    """Every row agrees with `score` (predictions -> one number); there is no standard error."""
    base = score(predictions(model, x))
    assert res.baseline_metric == pytest.approx(base, rel=1e-5)
    for r in res.layers:
        found = score(predictions(dropped(model, r.name, level), x))
        assert r.compressed_metric == pytest.approx(found, rel=1e-5) and r.delta == pytest.approx(sign * (base - found), rel=1e-4, abs=1e-6)
        assert (r.stderr, r.ci) == (None, None)


def test_f1_is_no_mean_over_samples(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained, metrics=F1Score(average="macro")), valid()
    res = SensitivityAnalyzer.from_learner(learn).analyze(level=80, verbose=False)
    check_numbers(res, learn.model, lambda p: f1_score(y, p.argmax(1), average="macro"), 1, x)
    assert res.baseline_metric == pytest.approx(learn.validate()[1])


def test_perplexity(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained, metrics=Perplexity()), valid()
    res = SensitivityAnalyzer.from_learner(learn, higher_is_better=False).analyze(level=80, verbose=False)
    check_numbers(res, learn.model, lambda p: float(F.cross_entropy(p, y).exp()), -1, x)
    assert res.baseline_metric == pytest.approx(learn.validate()[1], rel=1e-5)


def macro_f1(preds, targs):
    """A metric as people write it: a function that hands arrays to scikit-learn."""
    return f1_score(targs, preds.argmax(-1), average="macro")


def test_a_function_that_is_no_mean_over_samples(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained), valid()
    check_numbers(SensitivityAnalyzer.from_learner(learn, macro_f1).analyze(level=80, verbose=False), learn.model, lambda p: macro_f1(p, y), 1, x)


def test_a_metric_that_is_a_mean_only_of_the_baseline(tmp_path, trained):
    """All right makes F1 = 1 for every sample and for all of them; with mistakes it is a mean no more."""
    learn, (x, y) = learner(tmp_path, state=trained), valid()
    ok = right(y)(predictions(learn.model, x)).bool()
    dl = learn.dls.valid.new(TensorDataset(x[ok], y[ok]))
    res = SensitivityAnalyzer.from_learner(learn, macro_f1, dl=dl).analyze(level=80, verbose=False)
    assert res.baseline_metric == 1 and max(r.delta for r in res.layers) > 0
    for r in res.layers:
        assert r.compressed_metric == pytest.approx(macro_f1(predictions(dropped(learn.model, r.name, 80), x[ok]), y[ok]))


falling = {"error_rate": error_rate, "Perplexity": Perplexity(), "loss object": CrossEntropyLossFlat(), "loss function": F.cross_entropy}


@pytest.mark.parametrize("name", falling)
def test_delta_is_positive_for_damage_whichever_way_the_metric_goes(tmp_path, trained, name):
    """Dropping 95 % of a layer harms; a metric that rises with the harm must not make it look like a gain."""
    res = SensitivityAnalyzer.from_learner(learner(tmp_path, state=trained), falling[name]).analyze(level=95, verbose=False)
    assert all(r.delta > 0 for r in res.layers), [(r.name, r.delta) for r in res.layers]


class Normed(nn.Module):
    """Divides by the sum of its hidden values, which is 0 when the first layer is gone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 32, bias=False), nn.Linear(32, 10)

    def forward(self, x):
        h = self.first(x.flatten(1)).relu()
        return self.second(h / h.sum(1, keepdim=True))


def test_a_layer_that_breaks_the_loss_is_the_most_sensitive(tmp_path):
    learn = learner(tmp_path, model=Normed)
    res = SensitivityAnalyzer.from_learner(learn, learn.loss_func).analyze(level=100, verbose=False)
    assert [math.isfinite(r.delta) for r in res.layers] == [False, True]
    assert res.top(1)[0].name == "first" and math.isnan(res.layers[0].compressed_metric)


@pytest.mark.parametrize("precision", precisions)
def test_mixed_precision_is_kept_while_measuring(tmp_path, trained, precision):
    learn, (x, y) = precisions[precision](learner(tmp_path, state=trained)), valid()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    res = SensitivityAnalyzer.from_learner(learn, learn.loss_func).analyze(level=80, verbose=False)
    with autocast("cpu", dtype=dtype if precision in ("fp16", "bf16") else torch.bfloat16, enabled=precision in ("fp16", "bf16")):
        preds = torch.cat([predictions(learn.model, part) for part in x.split(64)])
    assert preds.dtype == dtype
    assert res.baseline_metric == pytest.approx(float(F.cross_entropy(preds.float(), y)), rel=1e-4)
    assert res.baseline_metric == pytest.approx(learn.validate()[0], rel=1e-4)
    assert all(math.isfinite(r.delta) and r.stderr > 0 for r in res.layers)


class TwoInputs(nn.Module):
    """Looks at the two halves of an image apart."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, a, b):
        return self.head((self.left(a.flatten(1)) + self.right(b.flatten(1))).relu())


def two_input_loaders(kind):
    """Loaders of (left half, right half, class)."""
    x, y = digits()
    sets = [TensorDataset(x[a:b, ..., :4], x[a:b, ..., 4:], y[a:b]) for a, b in ((0, 320), (1200, 1500))]
    if kind == "torch":
        return DataLoaders(*[DataLoader(s, batch_size=64) for s in sets])
    dls = DataLoaders.from_dsets(*sets, bs=64, device="cpu", num_workers=0)
    if kind == "said":
        dls.n_inp = 2
    return dls


@pytest.mark.parametrize("criterion", ["large_final", "wanda", "taylor"])
@pytest.mark.parametrize("kind", ["said", "found"])
def test_a_model_with_two_inputs(tmp_path, kind, criterion):
    learn = learner(tmp_path, dls=partial(two_input_loaders, kind), model=TwoInputs)
    learn.fit(3, 1e-2)
    x, y = valid()
    res = SensitivityAnalyzer.from_learner(learn, criteria=criteria[criterion]).analyze(level=80, verbose=False)
    assert res.baseline_metric == pytest.approx(learn.validate()[1]) and [r.name for r in res.layers] == ["left", "right", "head"]
    if criterion == "large_final":
        check_samples(res, learn.model, right(y), 1, x[..., :4], x[..., 4:])
    learn.fit(1, 1e-3, cbs=SparsifyCallback(80, criteria=criteria[criterion]))
    assert zeros(learn.model) == {"left": part(1024, 80), "right": part(1024, 80), "head": part(320, 80)}


@pytest.mark.parametrize("loaders_", [torch_loaders, partial(two_input_loaders, "torch")], ids=["one input", "two inputs"])
def test_plain_torch_loaders_can_be_measured(tmp_path, loaders_):
    learn = learner(tmp_path, dls=loaders_, model=Net if loaders_ is torch_loaders else TwoInputs)
    learn.fit(2, 1e-2)
    res = SensitivityAnalyzer.from_learner(learn).analyze(level=80, verbose=False)
    assert res.baseline_metric == pytest.approx(learn.validate()[1])


def test_the_batch_size_does_not_matter(tmp_path, trained):
    """Per-sample scores and standard errors are those of the data set, also with a ragged last batch."""
    found = []
    for bs in (7, 64, 300, 512):
        learn = learner(tmp_path, dls=partial(loaders, bs=bs, n=600), state=trained)
        found.append([SensitivityAnalyzer.from_learner(learn, m).analyze(level=80, verbose=False) for m in (accuracy, learn.loss_func)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.baseline_metric == pytest.approx(b.baseline_metric, abs=1e-5)
            for r, s in zip(a.layers, b.layers, strict=True):
                assert (r.delta, r.stderr) == pytest.approx((s.delta, s.stderr), abs=1e-5)


@pytest.mark.parametrize("kind", ["fastai", "torch"])
def test_other_data_can_be_given(tmp_path, trained, kind):
    learn, (x, y) = learner(tmp_path, state=trained), (t[1500:1797] for t in digits())
    dl = learn.dls[2] if kind == "fastai" else DataLoader(TensorDataset(x, y), batch_size=50)
    check_samples(SensitivityAnalyzer.from_learner(learn, dl=dl).analyze(level=80, verbose=False), learn.model, right(y), 1, x)


def rng():
    """States of the global random generators."""
    return random.getstate(), [a.tolist() if isinstance(a, np.ndarray) else a for a in np.random.get_state()], torch.get_rng_state().tolist()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("criterion", ["large_final", "wanda", "taylor"])
def test_the_learner_is_as_before(tmp_path, trained, training, criterion):
    learn = Learner(loaders(), Net(), loss_func=CrossEntropyLossFlat(), metrics=[accuracy, F1Score(average="macro")], path=tmp_path)  # with its progress bar
    learn.model.load_state_dict(trained)
    learn.validate()
    learn.model.train(training)
    learn.model.body[1].eval()
    model, before, numbers, state = learn.model, structure(learn.model), list(learn.validate()), rng()
    modes = [m.training for m in model.modules()]
    analyzer = SensitivityAnalyzer.from_learner(learn, criteria=criteria[criterion])
    analyzer.analyze(level=80, verbose=False)
    analyzer.sweep("quantization", verbose=False)
    assert rng() == state
    assert learn.model is model and structure(model) == before and [m.training for m in model.modules()] == modes
    assert same(snapshot(model), trained) and list(learn.validate()) == numbers
    learn.remove_cb(progress.ProgressCallback)
    learn.logger = noop
    learn.fit(1, 1e-3)
    assert not same(snapshot(model), trained)


@pytest.mark.parametrize("criterion", ["large_final", "taylor"])
def test_an_analysis_does_not_change_the_training_after_it(tmp_path, trained, criterion):
    """Not even the order of the data."""
    ends = []
    for first in (False, True):
        learn = learner(tmp_path, state=trained, seed=3)
        if first:
            SensitivityAnalyzer.from_learner(learn, criteria=criteria[criterion]).analyze(level=80, verbose=False)
        learn.fit(1, 1e-2)
        ends.append(snapshot(learn.model))
    assert same(*ends)


def fail_at(n, error):
    """Accuracy that raises at its n-th call."""
    calls = []

    def metric(preds, targs):
        calls.append(1)
        if len(calls) == n:
            raise error
        return accuracy(preds, targs)

    return metric


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no data")], ids=["interrupted", "failed"])
def test_an_interrupted_analysis_leaves_the_learner_usable(tmp_path, trained, error):
    learn = learner(tmp_path, state=trained)
    model, before, callbacks, numbers = learn.model, structure(learn.model), list(learn.cbs), list(learn.validate())
    with pytest.raises(type(error)):
        SensitivityAnalyzer.from_learner(learn, fail_at(3, error), higher_is_better=True).analyze(level=80, verbose=False)
    assert learn.model is model and structure(model) == before and list(learn.cbs) == callbacks
    assert same(snapshot(model), trained) and list(learn.validate()) == numbers


def test_the_learner_keeps_its_own_callbacks(tmp_path, trained):
    learn = learner(tmp_path, state=trained).add_cbs([progress.ProgressCallback(), SparsifyCallback(80), EarlyStoppingCallback()])
    callbacks = set(map(id, learn.cbs))
    SensitivityAnalyzer.from_learner(learn).analyze(level=80, verbose=False)
    assert set(map(id, learn.cbs)) == callbacks


def test_a_callback_of_the_learner_may_be_attached_while_measuring(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained, cbs=SparsifyCallback(80)), valid()
    check_samples(SensitivityAnalyzer.from_learner(learn).analyze(level=80, verbose=False), learn.model, right(y), 1, x)
    assert zeros(learn.model) == wanted(0)


def test_another_model_can_be_evaluated_with_the_learner(tmp_path, trained):
    learn, (x, y) = learner(tmp_path, state=trained), valid()
    own, other = learn.model, dropped(learn.model, "body.3", 80)
    assert torch.equal(learner_eval(learn)(other), right(y)(predictions(other, x))) and learn.model is own
    with pytest.raises(OSError):
        learner_eval(learn, fail_at(1, OSError("no data")))(other)
    with pytest.raises(RuntimeError, match="shapes"):
        learner_eval(learn)(nn.Sequential(other, nn.Linear(3, 3)))
    assert learn.model is own


def test_what_is_no_metric_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="metric"):
        SensitivityAnalyzer.from_learner(learner(tmp_path), "accuracy")
