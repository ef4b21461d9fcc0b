"""The callbacks beside others: those that keep the best epoch, stop the fit, average weights, wrap the model; and optimizers that wrap others."""

import math
import os
import socket
import subprocess
import sys
import warnings
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from fastai.callback import schedule as fastai_schedule  # noqa: F401
from fastai.callback.core import Callback, CancelEpochException, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.rnn import ModelResetter
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback, TrackerCallback
from fastai.callback.training import GradientAccumulation, GradientClip, ShortEpochCallback
from fastai.optimizer import Adam, Lookahead, OptimWrapper, RAdam, ranger
from test_callbacks import (
    SIZES,
    CpuMixedPrecision,
    Net,
    Probe,
    Stop,
    check_ends_quantized,
    digits,
    halves,
    is_rounded,
    learner,
    loaders,
    same,
    snapshot,
    structure,
    trained,  # noqa: F401
    wanted,
    zeros,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel
from toys import all_pairs

from fasterai_sens import LayerTargets, PruneCallback, Pruner, QuantizeCallback, Schedule, SensitivityAnalyzer, Sparsifier, SparsifyCallback
from fasterai_sens.methods.criteria import taylor, wanda
from fasterai_sens.train.schedules import agp, lin, one_shot, schedules
from fasterai_sens.train.wrappers import distributed, inner_model, inner_targets, rewrapped

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*CUDA.*"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Saved file doesn't contain an optimizer state"),
]

early = Schedule(agp.f, 0.1, 0.5)  # the second half of the fit is at the target


class Epochs(Callback):
    """After each epoch: the zeros of the model that was measured, what was measured, and its weights."""

    order = 59

    def before_fit(self):
        self.zeros, self.values, self.weights = [], [], []

    def after_epoch(self):
        self.zeros.append(zeros(inner_model(self.learn.model)))
        self.values.append(list(self.recorder.values[-1]))
        self.weights.append(snapshot(inner_model(self.learn.model)))


def index(epochs, column, best):
    """Which epoch has the best value in `column`, among those at the target."""
    final = [i for i, z in enumerate(epochs.zeros) if z == epochs.zeros[-1]]
    return best(final, key=lambda i: epochs.values[i][column])


# ---------------------------------------------------------------- the best epoch


monitors = {"valid_loss": (1, min), "accuracy": (2, max)}


@pytest.mark.parametrize("monitor", monitors)
@pytest.mark.parametrize("name", [*schedules, "early"])
def test_the_best_epoch_is_one_at_the_final_sparsity(tmp_path, trained, name, monitor):  # noqa: F811
    """Weights of an early epoch score better, and are worth nothing once they are cut."""
    schedule_ = early if name == "early" else schedules[name]
    learn, (column, best) = learner(tmp_path, state=trained), monitors[monitor]
    cb, epochs = SparsifyCallback(90, schedule=schedule_), Epochs()
    learn.fit(6, 3e-3, cbs=[cb, epochs, SaveModelCallback(monitor=monitor)])
    if name in ("early", "one_shot", "iterative"):
        assert sum(z == wanted(90) for z in epochs.zeros) > 1
    if name == "dsd":
        chosen = 5
    else:
        chosen = index(epochs, column, best)
        assert zeros(learn.model) == wanted(90) and epochs.zeros[0] != wanted(90)
    assert same(snapshot(learn.model), epochs.weights[chosen])
    assert list(learn.validate()) == pytest.approx(epochs.values[chosen][1:])
    assert same(torch.load(tmp_path / "models" / "model.pth"), snapshot(learn.model))
    assert [r["reached"] for r in cb.report] == [True] * 3


def test_what_it_was_before(tmp_path, trained):  # noqa: F811
    """The dense epoch of the defect is there, scores best, and is not what comes back."""
    learn = learner(tmp_path, dls=partial(loaders, n=1200), state=trained)
    learn.fit_one_cycle(6, 1e-2, cbs=[SparsifyCallback(95, schedule=early), epochs := Epochs(), SaveModelCallback(monitor="accuracy")])
    dense = max(v[2] for v, z in zip(epochs.values, epochs.zeros, strict=True) if z != wanted(95))
    first = deepcopy(learn.model)
    first.load_state_dict(epochs.weights[0])
    Sparsifier(first).sparsify_model(95)
    cut = (first.eval()(digits()[0][1200:1500]).argmax(1) == digits()[1][1200:1500]).float().mean().item()
    ended = learn.validate()[1]
    assert zeros(learn.model) == wanted(95) and dense > ended > cut + 0.1


@pytest.mark.parametrize("options", [dict(with_opt=True), dict(at_end=True), dict(every_epoch=True), dict(reset_on_fit=False), dict(every_epoch=2)], ids=str)
def test_options_of_the_saver(tmp_path, trained, options):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.fit(6, 3e-3, cbs=[SparsifyCallback(90, schedule=early), epochs := Epochs(), SaveModelCallback(**options)])
    assert zeros(learn.model) == wanted(90)
    last = 5 if {"at_end", "every_epoch"} & set(options) else index(epochs, 1, min)
    assert same(snapshot(learn.model), epochs.weights[last])
    every = options.get("every_epoch")
    for i in range(0, 6, int(every)) if every else ():
        assert same(torch.load(tmp_path / "models" / f"model_{i}.pth"), epochs.weights[i])
    if not every:
        saved = torch.load(tmp_path / "models" / "model.pth", weights_only=False)
        assert same(saved.get("model", saved), snapshot(learn.model))


def test_a_best_of_an_earlier_dense_fit_is_not_loaded(tmp_path, trained):  # noqa: F811
    """With `reset_on_fit=False` the tracker remembers a dense epoch that no sparse one beats."""
    learn, saver = learner(tmp_path, state=trained), SaveModelCallback(reset_on_fit=False)
    learn.fit(1, 1e-3, cbs=saver)
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(95), epochs := Epochs(), saver])
    assert same(snapshot(learn.model), epochs.weights[1]) and zeros(learn.model) == wanted(95)
    best = saver.best
    learn.fit(1, 5.0, cbs=[SparsifyCallback(95), worse := Epochs(), saver])   # what is sparse already may keep its best
    assert worse.values[0][1] > best == saver.best and same(snapshot(learn.model), epochs.weights[1])


@pytest.mark.parametrize("cb", [lambda: SparsifyCallback(95), lambda: QuantizeCallback(3)], ids=["sparse", "quantized"])
def test_a_dense_file_is_taken_out_again(tmp_path, trained, cb):  # noqa: F811
    """Made sparse by hand, so that every epoch is at the target; none beats the dense best that the tracker remembers."""
    learn, saver = learner(tmp_path, state=trained), SaveModelCallback(reset_on_fit=False)
    learn.fit(1, 1e-3, cbs=saver)
    Sparsifier(learn.model).sparsify_model(95)
    saver.best = -1.0
    with pytest.warns(UserWarning, match="they were not taken"):
        learn.fit(1, 1e-3, cbs=[cb(), epochs := Epochs(), saver])
    assert same(snapshot(learn.model), epochs.weights[0]) and zeros(learn.model)["body.3"] >= wanted(95)["body.3"]


def test_both_fits_of_fine_tune(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained, splitter=halves)
    learn.fine_tune(3, 3e-3, freeze_epochs=2, cbs=[SparsifyCallback(90, schedule=early), epochs := Epochs(), SaveModelCallback()])
    assert zeros(learn.model) == wanted(90) and epochs.zeros == [wanted(90)] * 3
    assert same(snapshot(learn.model), epochs.weights[index(epochs, 1, min)])


@pytest.mark.parametrize("attached", [False, True])
def test_a_tracker_is_as_before_when_the_fit_is_over(tmp_path, trained, attached):  # noqa: F811
    learn, saver = learner(tmp_path, state=trained), SaveModelCallback()
    learn.add_cb(saver)
    cb = SparsifyCallback(90)
    for error in (KeyboardInterrupt(), CancelFitException(), None):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                learn.fit(2, 1e-3, cbs=[cb, *([Stop(3, error)] if error else [])])
        except KeyboardInterrupt:
            pass
        assert saver.run and cb.order == 65 and "order" not in vars(cb)
    learn.fit(2, 1e-3, cbs=(epochs := Epochs()))
    assert saver.best == min(v[1] for v in epochs.values), "the tracker is off"


def test_a_stale_file_is_not_loaded_by_a_fit_that_stops_early(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.save("model", with_opt=False)
    with pytest.warns(UserWarning, match="no epoch was at the final compression, so none was kept as the best"):
        learn.fit(4, 1e-3, cbs=[SparsifyCallback(80, schedule=lin), SaveModelCallback(), probe := Probe(), Stop(12, CancelFitException())])
    assert zeros(learn.model) == probe.trace[-1] != wanted(0)


def test_early_stopping_after_the_best_epoch(tmp_path, trained):  # noqa: F811
    """It ends the epoch before our own turn; what the tracker saved in an epoch at the target counts all the same."""
    learn = learner(tmp_path, state=trained)
    stop = EarlyStoppingCallback(patience=2, min_delta=100.0)
    learn.fit(9, 3e-3, cbs=[cb := SparsifyCallback(80, schedule=Schedule(agp.f, 0, 1 / 9)), epochs := Epochs(), SaveModelCallback(), stop])
    assert len(epochs.zeros) < 9 and zeros(learn.model) == wanted(80) and all(r["reached"] for r in cb.report)
    assert same(snapshot(learn.model), epochs.weights[index(epochs, 1, min)])


class RestoresTheBest(TrackerCallback):
    """A tracker of one's own that keeps the best weights in memory."""

    order = 61

    def after_epoch(self):
        super().after_epoch()
        if self.new_best:
            self.kept = deepcopy(self.learn.model.state_dict())

    def after_fit(self):
        super().after_fit()
        self.learn.model.load_state_dict(self.kept)


class RestoresAnEpoch(Callback):
    """No tracker: nothing tells that it loads an early epoch."""

    order = 61

    def after_epoch(self):
        if self.epoch == 0:
            self.kept = deepcopy(self.learn.model.state_dict())

    def after_fit(self):
        self.learn.model.load_state_dict(self.kept)


def test_a_tracker_of_ones_own(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.fit(6, 3e-3, cbs=[SparsifyCallback(90, schedule=early), epochs := Epochs(), RestoresTheBest()])
    assert same(snapshot(learn.model), epochs.weights[index(epochs, 1, min)]) and zeros(learn.model) == wanted(90)


@pytest.mark.parametrize("cb", [lambda: SparsifyCallback(90, schedule=early), lambda: QuantizeCallback(3)], ids=["sparse", "quantized"])
def test_a_model_that_is_wrapped_keeps_its_wrapper(tmp_path, trained, cb):  # noqa: F811
    """When weights of another callback are taken out again, too."""
    net = Net()
    net.load_state_dict(trained)
    learn = learner(tmp_path, model=lambda: nn.DataParallel(net))

    class Loads(TrackerCallback):
        def after_fit(self):
            net.load_state_dict(trained)

    with pytest.warns(UserWarning, match="they were not taken"):
        learn.fit(3, 3e-3, cbs=[cb(), epochs := Epochs(), Loads()])
    assert isinstance(learn.model, nn.DataParallel) and learn.model.module is net and same(snapshot(net), epochs.weights[-1])


def test_the_best_of_a_sparse_and_rounded_model(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.fit(6, 3e-3, cbs=[QuantizeCallback(4), SparsifyCallback(80, schedule=early), epochs := Epochs(), SaveModelCallback()])
    final = [i for i, z in enumerate(epochs.zeros) if all(z[n] >= wanted(80)[n] for n in SIZES)]
    best = min(final, key=lambda i: epochs.values[i][1])
    assert 1 < len(final) < 6 and same(snapshot(learn.model), epochs.weights[best]) and is_rounded(learn.model, 4)


@pytest.mark.parametrize("order", [11, 61, 80])
def test_an_early_epoch_that_comes_back_is_not_taken(tmp_path, trained, order):  # noqa: F811
    learn, restores = learner(tmp_path, state=trained), RestoresAnEpoch()
    restores.order = order
    with pytest.warns(UserWarning, match="they were not taken"):
        learn.fit(3, 3e-3, cbs=[SparsifyCallback(90), epochs := Epochs(), restores])
    assert same(snapshot(learn.model), epochs.weights[2]) and zeros(learn.model) == wanted(90)


def test_trackers_begin_anew_at_the_target(tmp_path, trained):  # noqa: F811
    """An epoch that is better than those at the target, but less sparse, neither stops the fit nor lowers the learning rate for ever."""
    learn = learner(tmp_path, state=trained)
    trackers = [TrackerCallback(), EarlyStoppingCallback(patience=100), ReduceLROnPlateau(patience=100)]
    learn.fit(6, 3e-3, cbs=[SparsifyCallback(95, schedule=early), epochs := Epochs(), *trackers])
    at = epochs.values[index(epochs, 1, min)][1]
    assert min(v[1] for v in epochs.values) < at and [t.best for t in trackers] == [at] * 3
    assert all(t.wait < 6 - epochs.zeros.index(wanted(95)) for t in trackers[1:])


def test_not_the_best_while_channels_go(tmp_path, trained):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained), PruneCallback(50)
    for saver in (SaveModelCallback(), RestoresTheBest()):
        with pytest.raises(ValueError):
            learn.fit(1, 1e-3, cbs=[cb, saver])
    learn.fit(2, 1e-3, cbs=[cb, SaveModelCallback(every_epoch=True)])
    learn.fit(2, 1e-3, cbs=[cb, epochs := Epochs(), SaveModelCallback()])
    assert same(snapshot(learn.model), epochs.weights[index(epochs, 1, min)]) and learn.model.body[0].out_channels == 8


# ---------------------------------------------------------------- reached and missed


makers = {
    "sparse": lambda: SparsifyCallback({"body.3": 80, "head.2": 50}, schedule=lin),
    "pruned": lambda: PruneCallback({"body.0": 50, "body.3": 75}, schedule=lin),
    "global": lambda: SparsifyCallback(80, context="global", schedule=lin),
    "pruned globally": lambda: PruneCallback(50, context="global", schedule=lin),
}

endings = {
    "early stopping": lambda: EarlyStoppingCallback(min_delta=100.0, patience=1),
    "cancelled fit": lambda: Stop(7, CancelFitException()),
    "interrupted": lambda: Stop(7, KeyboardInterrupt()),
    "failed": lambda: Stop(7, OSError("no data")),
    "short epochs": lambda: ShortEpochCallback(0.3),
}


def reached(cb):
    """What the report says."""
    return {r["layer"]: r["reached"] for r in cb.report if r["reached"] is not None}


@pytest.mark.parametrize(("make", "ending", "attached"), [(m, e, (i + j) % 2 == 1) for i, m in enumerate(makers) for j, e in enumerate(endings)])
def test_what_was_missed_is_said(tmp_path, trained, make, ending, attached, capsys):  # noqa: F811
    learn, cb, stop = learner(tmp_path, state=trained), makers[make](), endings[ending]()
    breaks = ending in ("interrupted", "failed")
    if attached:
        learn.add_cb(cb)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            learn.fit(3, 1e-3, cbs=[*([] if attached else [cb]), stop])
        except (KeyboardInterrupt, OSError):
            assert breaks
        assert reached(cb) and not any(reached(cb).values())
        if attached and breaks:
            learn.validate()   # the first event after an error, if the callback stays
    said = [str(w.message) for w in said if "targets were reached" in str(w.message)]
    assert len(said) == 1 and type(cb).__name__ in said[0]
    together = "global" in make
    for r in cb.report:
        if r["reached"] is not None and not together:
            assert 0 < r["percent"] < r["target"] and f"{r['layer']!r} has {r['percent']:.4g} % of {r['target']:.4g} %" in said[0]
    assert ("the layers together have" in said[0]) == together
    capsys.readouterr()
    cb.print_sparsity()
    assert capsys.readouterr().out.count("missed: ") == (1 if together else len(reached(cb)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        learn.fit(2, 1e-3, cbs=[] if attached else cb)
    assert all(reached(cb).values())
    cb.print_sparsity()
    assert "missed" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [*makers, "quantized"])
def test_fits_without_training(tmp_path, trained, make):  # noqa: F811
    """No epoch, or none that trains: said, and nothing changes, not even by a tracker that loads an old file."""
    learn = learner(tmp_path, state=trained)
    learn.save("model", with_opt=False)
    make = makers.get(make, lambda: QuantizeCallback({"body.3": 3}))
    learn.model.load_state_dict(dict(trained, **{"head.2.bias": torch.ones(10)}))
    before = snapshot(learn.model)
    saver = [] if isinstance(make(), PruneCallback) else [SaveModelCallback()]
    for epochs, extra in ((0, []), (2, [Stop(0, CancelFitException())]), (2, [CancelAll()])):
        cb = make()
        if isinstance(extra[0] if extra else None, Stop):
            extra[0].before_epoch, extra = partial(_strike, CancelFitException()), extra
        with pytest.warns(UserWarning, match="before its targets"):
            learn.fit(epochs, 1e-3, cbs=[cb, *saver, *extra])
        assert reached(cb) and not any(reached(cb).values())
        assert same(snapshot(learn.model), before)


def _strike(error):
    raise error


class CancelAll(Callback):
    """Skips every epoch, as a resumed fit skips its first ones."""

    order = 70

    def before_epoch(self):
        raise CancelEpochException


def test_unknown_layers_are_said_without_an_epoch(tmp_path, trained):  # noqa: F811
    with pytest.raises(KeyError, match="body.33"):
        learner(tmp_path, state=trained).fit(0, cbs=SparsifyCallback({"body.33": 50}))


def test_nothing_is_said_of_what_is_no_fit(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.add_cbs([SparsifyCallback(80), QuantizeCallback(3)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        learn.validate()
        learn.get_preds()
        learn.lr_find(num_it=8, show_plot=False)
        learn.fit(1, 1e-3)
        learn.validate()
    assert not [w for w in said if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize("make", [*makers, "quantized"])
def test_an_interrupted_learning_rate_finder_does_not_turn_the_callback_off(tmp_path, trained, make):  # noqa: F811
    cb = makers.get(make, lambda: QuantizeCallback(3))()
    learn = learner(tmp_path, state=trained, cbs=cb)
    learn.add_cb(stop := Stop(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        learn.lr_find(num_it=12, show_plot=False)
    learn.remove_cbs([stop, *[c for c in learn.cbs if type(c).__name__ == "LRFinder"]])
    learn.fit(1, 1e-3)
    assert all(reached(cb).values())


def test_the_schedule_that_comes_back_misses_nothing(tmp_path, trained):  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        learner(tmp_path, state=trained).fit(2, 1e-3, cbs=(cb := SparsifyCallback(80, schedule=schedules["dsd"])))
    assert [r["target"] for r in cb.report] == [0, 0, 0] and all(reached(cb).values())


class FewerBatches(Callback):
    """Says that there are more batches than come, as fastai's distributed loader does."""

    order = -5

    def before_batch(self):
        self.learn.n_iter = 8


@pytest.mark.parametrize("make", makers)
def test_fewer_batches_than_the_data_says(tmp_path, trained, make):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained), makers[make]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        learn.fit(2, 1e-3, cbs=[cb, FewerBatches()])
    assert all(reached(cb).values())


# ---------------------------------------------------------------- averages


class Average(Callback):
    """An exponential moving average as people write it: weights are swapped in for validation, and for good at the end."""

    def __init__(self, order, decay=0.7, validates=True, by="copy"):
        self.order, self.decay, self.validates, self.by = order, decay, validates, by

    def before_fit(self):
        self.mean = {k: v.detach().clone() for k, v in inner_model(self.learn.model).state_dict().items()}

    def after_step(self):
        for k, v in inner_model(self.learn.model).state_dict().items():
            if v.is_floating_point():
                self.mean[k].mul_(self.decay).add_(v, alpha=1 - self.decay)

    def put_in(self):
        model = inner_model(self.learn.model)
        if self.by == "copy":
            model.load_state_dict(self.mean)
            return
        for k, p in model.named_parameters():
            p.data = self.mean[k]

    def before_validate(self):
        if self.validates:
            self.own = deepcopy(inner_model(self.learn.model).state_dict())
            self.put_in()

    def after_validate(self):
        if self.validates:
            for k, p in inner_model(self.learn.model).named_parameters():
                p.data = self.own[k]
            inner_model(self.learn.model).load_state_dict(self.own)

    def after_fit(self):
        self.put_in()


class SWA(Callback):
    """`torch.optim.swa_utils.AveragedModel`, copied into the model or put in its place at the end."""

    def __init__(self, order, how):
        self.order, self.how = order, how

    def before_fit(self):
        self.swa = AveragedModel(inner_model(self.learn.model))

    def after_train(self):
        self.swa.update_parameters(inner_model(self.learn.model))

    def after_fit(self):
        if self.how == "copied":
            self.learn.model.load_state_dict(self.swa.module.state_dict())
        else:
            self.learn.model = self.swa.module if self.how == "replaced" else self.swa


class OfTimm(Callback):
    """timm's average, which is a wrapper around a copy: put in the model's place for validation, and left there."""

    def __init__(self, order):
        self.order = order

    def before_fit(self):
        from timm.utils import ModelEmaV3

        self.own, self.mean = self.learn.model, ModelEmaV3(self.learn.model, decay=0.7)

    def after_step(self):
        self.mean.update(self.own)

    def before_validate(self):
        self.learn.model = self.mean.eval()

    def after_validate(self):
        self.learn.model = self.own

    def after_fit(self):
        self.learn.model = self.mean


averages = {
    **{f"timm at {order}, validated": partial(OfTimm, order) for order in (11, 80)},
    **{f"{by} at {order}, {'validated' if v else 'not validated'}": partial(Average, order, validates=v, by=by) for by in ("copy", "data") for order in (11, 80) for v in (True, False)},
    **{f"SWA {how} at {order}": partial(SWA, order, how) for how in ("copied", "replaced", "wrapped") for order in (11, 80)},
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("average", averages)
def test_averages_end_up_sparse(tmp_path, trained, average, attached):  # noqa: F811
    learn, cb, mean = learner(tmp_path, state=trained), SparsifyCallback(90, schedule=lin), averages[average]()
    if attached:
        learn.add_cbs([cb, mean])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        learn.fit(3, 1e-2, cbs=[] if attached else [cb, mean])
    left = learn.model.module if isinstance(mean, OfTimm) else inner_model(learn.model)
    assert zeros(left) == wanted(90) and [r["percent"] for r in cb.report] == pytest.approx([100 * z / SIZES[n] for n, z in zeros(left).items()])
    told = [str(w.message) for w in said if "measured them like that" in str(w.message)]
    measured = ", validated" in average
    assert len(told) == (not measured), told
    w, own = left.body[3].weight, mean.swa.module if isinstance(mean, SWA) else None
    if own is not None:
        kept = w != 0
        assert torch.allclose(w[kept], own.body[3].weight[kept]), "not the averages"


@pytest.mark.parametrize("order", [11, 80])
@pytest.mark.parametrize("by", ["copy", "data"])
def test_what_is_measured_of_averages_is_what_is_left(tmp_path, trained, order, by):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.fit(3, 1e-2, cbs=[SparsifyCallback(90), Average(order, by=by), epochs := Epochs()])
    assert epochs.values[-1][1:] == pytest.approx(list(learn.validate()))


@pytest.mark.parametrize("average", averages)
def test_averages_end_up_rounded(tmp_path, trained, average):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained), QuantizeCallback(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn.fit(3, 1e-2, cbs=[cb, averages[average]()])
    left = learn.model.module if "timm" in average else inner_model(learn.model)
    assert is_rounded(left) and all(reached(cb).values())


def test_sparse_rounded_and_averaged(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn.fit(3, 1e-2, cbs=[SparsifyCallback(80), QuantizeCallback(8), Average(80)])
    assert is_rounded(learn.model, 8) and all(z >= wanted(80)[n] for n, z in zeros(learn.model).items())


def test_what_is_saved_at_the_end_is_sparse_beside_averages(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learn.fit(3, 1e-2, cbs=[SparsifyCallback(90), Average(11), SaveModelCallback(at_end=True)])
    assert same(torch.load(tmp_path / "models" / "model.pth"), snapshot(learn.model)) and zeros(learn.model) == wanted(90)


@pytest.mark.parametrize("average", [partial(Average, 11), partial(Average, 80), partial(SWA, 11, "copied"), partial(SWA, 80, "replaced")])
def test_averages_do_not_shrink(tmp_path, trained, average):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained), PruneCallback(50)
    with pytest.raises(ValueError):
        learn.fit(2, 1e-2, cbs=[cb, average()])
    assert same(snapshot(learn.model), trained)
    learn.fit(1, 1e-2, cbs=cb)
    learn.fit(1, 1e-2, cbs=[cb, average()])
    assert inner_model(learn.model).body[0].out_channels == 8


# ---------------------------------------------------------------- zeros and bits


hows = {"plain": {}, "one scale": {"per_channel": False}, "asymmetric": {"symmetric": False}, "groups": {"group_size": 4}}


@pytest.mark.parametrize("how,same_one,granularity", all_pairs(list(hows), [True, False], ["weight", "2:4", "filter"]))
def test_zeros_stay_through_fits_in_few_bits(tmp_path, trained, granularity, same_one, how):  # noqa: F811
    learn, plan = learner(tmp_path, state=trained), {"body.3": 4, "head.2": 8}
    learn.fit(1, 1e-2, cbs=SparsifyCallback({"body.3": 50, "head.2": 50}, granularity))
    gone = {n: learn.model.get_submodule(n).weight == 0 for n in plan}
    cb = QuantizeCallback(plan, **hows[how])
    for _ in range(3):
        learn.fit(1, 1e-2, cbs=cb)
        for n, zero in gone.items():
            assert (learn.model.get_submodule(n).weight[zero] == 0).all() and (cb.floats[n][zero] == 0).all(), n
        check_ends_quantized(learn.model, cb, **hows[how])
        cb = cb if same_one else QuantizeCallback(plan, **hows[how])


def test_zeros_of_one_fit_with_both(tmp_path, trained):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained), QuantizeCallback(4)
    learn.fit(2, 1e-2, cbs=[SparsifyCallback(80), cb])
    gone = {n: w == 0 for n, w in cb.floats.items()}
    assert {n: int(g.sum()) for n, g in gone.items()} == wanted(80)
    for again in ([cb], [cb], [QuantizeCallback(4)], [QuantizeCallback(8), SparsifyCallback({"body.0": 80})]):
        learn.fit(1, 1e-2, cbs=again)
        assert all((learn.model.get_submodule(n).weight[g] == 0).all() for n, g in gone.items())


def test_zeros_that_rounding_made_train_on(tmp_path, trained):  # noqa: F811
    """Two bits round half of the weights to zero; the callback that did it knows that those are none of the user's."""
    learn, cb = learner(tmp_path, state=trained), QuantizeCallback(2)
    learn.fit(2, 1e-2, cbs=[cb, SaveModelCallback()])
    assert cb.zeros == {} and zeros(learn.model)["body.3"] > SIZES["body.3"] / 4
    learn.fit(1, 1e-2, cbs=cb)
    assert cb.zeros == {}


def test_zeros_may_be_let_go(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    Sparsifier(learn.model).sparsify_model(80)
    learn.fit(1, 1e-2, cbs=(cb := QuantizeCallback(8, keep_zeros=False)))
    assert all(int((w == 0).sum()) < wanted(80)[n] / 2 for n, w in cb.floats.items())


def test_a_lower_target_lets_weights_come_back_in_few_bits(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    Sparsifier(learn.model).sparsify_model(70)
    learn.fit(2, 1e-3, cbs=[SparsifyCallback(50, schedule=one_shot), cb := QuantizeCallback(8)])
    assert all(int((w == 0).sum()) < wanted(65)[n] for n, w in cb.floats.items())


# ---------------------------------------------------------------- wrappers


class Wrapped(Callback):
    """Wraps the model for the fit."""

    def __init__(self, wrap, order):
        self.wrap, self.order = wrap, order

    def before_fit(self):
        self.learn.model = self.wrap(self.learn.model)

    def after_fit(self):
        self.learn.model = inner_model(self.learn.model)


wraps = {
    "parallel": nn.DataParallel,
    "compiled": partial(torch.compile, backend="eager"),
    "both": lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
    "all of it": lambda m: torch.compile(m, backend="eager", fullgraph=True),
}
three = {
    "sparse": lambda prefix="": SparsifyCallback({f"{prefix}body.3": 80, f"{prefix}head.2": 50}),
    "pruned": lambda prefix="": PruneCallback({f"{prefix}body.0": 50, f"{prefix}body.3": 25}, steps=3),
    "quantized": lambda prefix="": QuantizeCallback({f"{prefix}body.3": 3, f"{prefix}head.2": 4}),
}


def case(name, wrap, *rest):
    """Parameters of a test; two wrappers at once are slow."""
    return pytest.param(name, wrap, *rest, marks=[pytest.mark.slow]*(wrap == "both"))


def check_three(name, model, cb):
    """What `three` asks for is there, under the names of the model itself."""
    assert all(reached(cb).values()) and set(reached(cb)) == {"sparse": {"body.3", "head.2"}, "pruned": {"body.0", "body.3"}, "quantized": {"body.3", "head.2"}}[name]
    if name == "sparse":
        assert zeros(model) == wanted({"body.3": 80, "head.2": 50})
    if name == "pruned":
        assert (model.body[0].out_channels, model.body[3].out_channels, model.head[2].in_features) == (8, 24, 96)
    if name == "quantized":
        assert is_rounded(model, {"body.3": 3, "head.2": 4})


@pytest.mark.parametrize(("name", "wrap", "order"), [case(n, w, (11, 80)[(i + j) % 2]) for i, n in enumerate(three) for j, w in enumerate(wraps)])
def test_wrapped_in_before_fit(tmp_path, trained, name, wrap, order):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained), three[name]()
    own = learn.model
    learn.fit(2, 1e-3, cbs=[cb, Wrapped(wraps[wrap], order)])
    assert learn.model is own
    check_three(name, own, cb)
    learn.fit(1, 1e-3, cbs=[cb, Wrapped(wraps[wrap], order)])
    check_three(name, own, cb)


prefixes = ["", "module.", "_orig_mod.", "_orig_mod.module."]
# each pair of two of the three once, in place of all 48
wrapped_cases = [case(list(three)[(i + j) % 3], wrap, prefix) for i, wrap in enumerate(wraps) for j, prefix in enumerate(prefixes)]


@pytest.mark.parametrize(("name", "wrap", "prefix"), wrapped_cases)
def test_wrapped_before_the_learner(tmp_path, trained, name, wrap, prefix):  # noqa: F811
    net = Net()
    net.load_state_dict(trained)
    learn, cb = learner(tmp_path, model=lambda: wraps[wrap](net)), three[name](prefix)
    learn.fit(2, 1e-3, cbs=cb)
    check_three(name, net, cb)
    learn.validate()


def test_targets_of_an_analysis_with_its_wrapper(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, model=lambda: nn.DataParallel(Net()))
    targets = SensitivityAnalyzer.from_learner(learn).sweep(levels=[50, 80], verbose=False).to_layer_targets(learn.model, 60)
    assert set(targets) == {f"module.{n}" for n in SIZES}
    learn.fit(1, 1e-3, cbs=(cb := SparsifyCallback(targets)))
    assert [r["target"] for r in cb.report] == list(targets.values()) and all(reached(cb).values())
    plan = inner_targets(LayerTargets({"module.body.3": 4}, "bits"), inner_model(learn.model))
    assert plan == {"body.3": 4} and plan.unit == "bits"
    with pytest.raises(ValueError, match="differ"):
        inner_targets({"module.body.3": 4, "body.3": 5}, inner_model(learn.model))


def test_names_that_only_look_like_a_wrapper(tmp_path):
    """A model whose own parts are called so."""
    net = nn.ModuleDict({"module": nn.Linear(4, 4), "other": nn.ModuleDict({"module": nn.Linear(4, 4)})})
    targets = {"module": 50, "other.module": 80}
    assert inner_targets(targets, net) is targets


def test_a_submodule_that_is_compiled(tmp_path, trained):  # noqa: F811
    learn = learner(tmp_path, state=trained)
    learn.model.body.compile(backend="eager")
    learn.fit(1, 1e-3, cbs=(cb := three["pruned"]()))
    check_three("pruned", learn.model, cb)
    net = Net()
    net.body = torch.compile(net.body, backend="eager")
    learn = learner(tmp_path, model=lambda: net)
    learn.fit(1, 1e-3, cbs=SparsifyCallback({"body.3": 80}))
    assert int((net.body._orig_mod[3].weight == 0).sum()) == wanted(80)["body.3"]


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def seen_by_hook(state, bucket):
    """A communication hook that notes what it is given."""
    state.append(bucket.buffer().numel())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("wrap", ["plain", "compiled outside", "compiled inside"])
def test_distributed_training_learns_of_new_parameters(one_process, wrap):
    """Each gradient goes through the new wrapper, once; what the old one was told to do still holds."""
    torch.manual_seed(0)
    net, (x, y), sent = Net(), digits(), []
    inside = torch.compile(net, backend="eager") if wrap == "compiled inside" else net
    ddp = nn.parallel.DistributedDataParallel(inside, broadcast_buffers=False, find_unused_parameters=True, bucket_cap_mb=7)
    ddp.register_comm_hook(sent, seen_by_hook)
    model = torch.compile(ddp, backend="eager") if wrap == "compiled outside" else ddp
    nn.functional.cross_entropy(model(x[:8]), y[:8]).backward()
    assert sum(sent) == sum(p.numel() for p in net.parameters())
    Pruner(net, 50, example_inputs=x[:1]).prune_model()
    new = rewrapped(model)
    again = distributed(new)
    assert again is not ddp and inner_model(new) is net and type(new) is type(model)
    assert not again.broadcast_buffers and again.find_unused_parameters and again.bucket_bytes_cap == 7 * 2**20
    for _ in range(2):
        sent.clear()
        net.zero_grad()
        nn.functional.cross_entropy(new(x[:8]), y[:8]).backward()
        assert sum(sent) == sum(p.numel() for p in net.parameters()) and all(p.grad is not None for p in net.parameters())


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def in_two_processes(tmp_path, *args):
    """Run `two_processes.py`; what each of them ended with."""
    here, port = Path(__file__).parent, str(free_port())
    running = []
    for rank in "01":
        env = dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
        env["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
        running.append(subprocess.Popen([sys.executable, here / "two_processes.py", tmp_path, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [p.communicate(timeout=120)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    assert [p.returncode for p in running] == [0, 0], "\n".join(said)
    return [torch.load(tmp_path / f"{rank}.pth", weights_only=False) for rank in "01"]


@pytest.mark.slow
def test_two_processes_end_with_the_same_model(tmp_path):
    """`DistributedDataParallel` on gloo, by hand and by accelerate, each process with data of its own, and a criterion that looks at it."""
    ways = (["accelerate"] if find_spec("accelerate") else []) + ["wrapped"]
    ends = in_two_processes(tmp_path, *ways)
    for how, name in product(ways, three):
        first, second = (e[how, name] for e in ends)
        assert first["kind"] == "Net" and first["mine"] != second["mine"], "both saw the same data"
        assert same(first["state"], second["state"]) and first["report"] == second["report"]
        assert first["averaged"] and all(r["reached"] for r in first["report"] if r["reached"] is not None)
        shapes = {k: tuple(v.shape) for k, v in first["state"].items() if k.endswith("weight") and v.dim() > 1}
        if name == "pruned":
            assert shapes == {"body.0.weight": (8, 1, 3, 3), "body.3.weight": (24, 8, 3, 3), "head.2.weight": (10, 96)}
        if name == "sparse":
            assert int((first["state"]["body.3.weight"] == 0).sum()) == wanted(80)["body.3"]
        if name == "quantized":
            assert max(len(r.unique()) for r in first["state"]["body.3.weight"].flatten(1)) <= 7


# ---------------------------------------------------------------- optimizers


class TimmLike(torch.optim.Optimizer):
    """Wraps an optimizer as many packages do: shares its groups, and keeps slow weights in its state."""

    def __init__(self, base):
        self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state, self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = base.state, {}, {}

    def step(self, closure=None):
        self._base_optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.data.copy_(slow.add_(p.data - slow, alpha=0.5))


def fastai_adamw(ps, lr, **kwargs):
    """fastai's wrapper around PyTorch's AdamW."""
    return OptimWrapper(ps, torch.optim.AdamW, lr=lr, **kwargs)


wrapping = {
    "ranger": ranger,
    "ranger, k=1": partial(ranger, k=1),
    "Lookahead of Adam": lambda ps, lr: Lookahead(Adam(ps, lr), k=2),
    "Lookahead twice": lambda ps, lr: Lookahead(Lookahead(RAdam(ps, lr), k=2), k=3),
    "Lookahead of a wrapper": lambda ps, lr: Lookahead(fastai_adamw(ps, lr), k=2),
    "fused": partial(fastai_adamw, fused=True),
    "foreach": partial(fastai_adamw, foreach=True),
    "amsgrad": partial(fastai_adamw, amsgrad=True),
    "slow in its state": lambda ps, lr: OptimWrapper(opt=TimmLike(torch.optim.AdamW(list(ps[0]) if isinstance(ps[0], list) else list(ps), lr=lr))),
}


def lists(opt):
    """Parameters and slow weights of an optimizer and of those inside."""
    while opt is not None:
        yield opt
        opt = vars(opt).get("opt")


@pytest.mark.parametrize("attr", wrapping)
@pytest.mark.parametrize("name", three)
def test_optimizers_that_wrap_others(tmp_path, trained, name, attr):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained, opt_func=wrapping[attr]), three[name]()
    learn.fit(2, 1e-3, cbs=cb)
    check_three(name, learn.model, cb)
    before = snapshot(learn.model)
    learn.fit(1, 1e-3)
    mine = {id(p) for p in learn.model.parameters()}
    for opt in lists(learn.opt):
        if not isinstance(opt, torch.optim.Optimizer):
            assert {id(p) for pg in opt.param_lists for p in pg} == mine
        for slow, params in zip(getattr(opt, "slow_weights", None) or [], opt.param_lists if "slow_weights" in vars(opt) else [], strict=True):
            assert [s.shape for s in slow] == [p.shape for p in params]
    assert not any(torch.equal(before[k], v) for k, v in learn.model.state_dict().items() if k.endswith("weight"))


@pytest.mark.parametrize("attr", ["ranger", "Lookahead twice", "Lookahead of a wrapper", "slow in its state"])
def test_a_pruner_with_a_wrapping_optimizer(tmp_path, attr):
    """Slow weights that stay are those of before, so that training goes on as it was."""
    torch.manual_seed(0)
    model, (x, y) = Net(), digits()
    opt = wrapping[attr]([list(model.parameters())], 1e-2)

    def train(n):
        for i in range(n):
            nn.functional.cross_entropy(model(x[i * 32 : i * 32 + 32]), y[i * 32 : i * 32 + 32]).backward()
            opt.step()
            opt.zero_grad()

    train(4)
    slow = None if attr == "slow in its state" else [s.clone() for s in opt.slow_weights[0]]
    Pruner(model, {"body.3": 50}, example_inputs=x[:1]).prune_model(opt)
    params = [p for pg in opt.param_lists for p in pg]
    assert {id(p) for p in params} == {id(p) for p in model.parameters()} and model.body[3].out_channels == 16
    for old, new in zip(slow or [], opt.slow_weights[0] if slow else [], strict=True):
        if new.shape != old.shape:
            axis = next(d for d in range(new.dim()) if new.shape[d] < old.shape[d])   # of the channels that went
            assert all(any(torch.equal(n, o) for o in old.unbind(axis)) for n in new.unbind(axis))
        else:
            assert torch.equal(new, old)
    before = snapshot(model)
    train(8)
    assert all(torch.isfinite(v).all() for v in model.state_dict().values()) and not torch.equal(before["body.3.weight"], model.body[3].weight)


# ---------------------------------------------------------------- everything else


class Recurrent(Net):
    """With a state that fastai resets."""

    def reset(self):
        self.resets = getattr(self, "resets", 0) + 1


others = {
    "fp16": lambda p: [CpuMixedPrecision()],
    "bf16": lambda p: [CpuMixedPrecision(amp_mode="bf16")],
    "accumulated": lambda p: [GradientAccumulation(128)],
    "clipped": lambda p: [GradientClip(0.5)],
    "mixup": lambda p: [MixUp()],
    "cutmix": lambda p: [CutMix()],
    "csv": lambda p: [CSVLogger(p / "log.csv")],
    "resets": lambda p: [ModelResetter()],
    "all": lambda p: [CpuMixedPrecision(), GradientAccumulation(128), GradientClip(0.5), MixUp(), CSVLogger(p / "log.csv"), ReduceLROnPlateau()],
}


criteria = ["large_final", "taylor", "wanda"]
# each other callback with each criterion, by turns in a sparse and in a smaller network
beside_cases = [(("sparse", "pruned")[(i + j) % 2], other, c) for i, other in enumerate(others) for j, c in enumerate(criteria)]


@pytest.mark.parametrize(("name", "other", "criterion"), [*beside_cases, *(("quantized", other, "large_final") for other in others)])
def test_beside_the_rest_of_fastai(tmp_path, trained, name, other, criterion):  # noqa: F811
    learn, cb = learner(tmp_path, state=trained, model=Recurrent), three[name]()
    if criterion != "large_final":
        cb.criteria = dict(taylor=taylor, wanda=wanda)[criterion]
    loss = learn.loss_func
    before = structure(learn.model)[2:]
    learn.fit(2, 1e-3, cbs=[cb, *others[other](tmp_path)])
    check_three(name, learn.model, cb)
    assert learn.loss_func is loss and structure(learn.model)[2:] == before and len(learn.recorder.values) == 2
    assert all(math.isfinite(v) for v in learn.recorder.values[-1])
