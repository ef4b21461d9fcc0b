"""`gradual_degradation_recovery` on real fastai training: what is recorded, where the model is left, and that the learner can go on."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy, error_rate
from fastai.optimizer import OptimWrapper
from fastai.torch_core import params, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from fasterai_sens import (
    LayerTargets,
    PruneCallback,
    RecoveryResult,
    SensitivityAnalyzer,
    SparsifyCallback,
    changes,
    fingerprint,
    gradual_degradation_recovery,
    movement,
    taylor,
)
from fasterai_sens.measure.intervals import tango_interval
from fasterai_sens.methods.criteria import updating_movement
from fasterai_sens.methods.pruner import model_size
from fasterai_sens.train.recovery import scaled_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")


@cache
def parts():
    """Digits for training, validation and test."""
    d = load_digits()
    order = torch.randperm(len(d.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(d.images / 16, dtype=torch.float32)[order, None], torch.tensor(d.target)[order]
    return [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 512), (1200, 1500), (1500, 1797))]


class Block(nn.Module):
    """A residual block and a head: two of the convolutions must lose the same channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.conv1, self.norm1 = nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.conv2, self.norm2 = nn.Conv2d(24, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()
        return self.head(x.mean((2, 3)))


SIZES = {"stem": 144, "conv1": 3456, "conv2": 3456, "head": 160}


@cache
def trained():
    """Weights of a network that knows the digits."""
    learn = learner(state=None)
    learn.fit_one_cycle(10, 2e-2)
    return learn.model.state_dict()


def learner(state=trained, **kwargs):
    """A quiet Learner, the same at every call."""
    set_seed(0)
    dls = DataLoaders.from_dsets(*parts(), bs=64, device="cpu", num_workers=0)
    learn = Learner(dls, Block(), **{"loss_func": CrossEntropyLossFlat(), "metrics": accuracy, **kwargs})
    if state:
        learn.model.load_state_dict(state())
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *args: None
    return learn


def recover(learn, *args, **kwargs):
    """Quietly, at a rate that brings accuracy back."""
    return gradual_degradation_recovery(learn, *args, **{"lr": 1e-2, "verbose": False} | kwargs)


def correct(model, data=1):
    """Right or wrong for each image, by hand."""
    x, y = parts()[data].tensors
    training = model.training
    with torch.no_grad():
        right = (model.eval()(x).argmax(1) == y).double()
    model.train(training)
    return right


def zeros(model):
    """Layer name -> number of weights that are zero."""
    return {n: int((getattr(model, n).weight == 0).sum()) for n in SIZES}


def widths(model):
    """Output channels of every layer."""
    return {n: len(getattr(model, n).weight) for n in SIZES}


def held_by(opt):
    """Parameters in an optimizer."""
    return {id(p) for p in opt.all_params().itemgot(0)}


class Spy(Callback):
    """Keeps something of the model at the start and the end of every fit."""

    order = 90

    def __init__(self, look):
        self.look, self.seen = look, []

    def before_fit(self):
        self.seen.append(self.look(self.learn.model))

    def after_fit(self):
        self.seen.append(self.look(self.learn.model))


class Fail(Callback):
    """Raises in the middle of fit number `fit`."""

    def __init__(self, error, fit):
        self.error, self.fit, self.fits = error, fit, 0

    def before_fit(self):
        self.fits += 1

    def after_backward(self):
        if self.fits == self.fit and self.learn.train_iter == 3:
            raise self.error


def check_usable(learn):
    """The learner validates and trains, with an optimizer for the parameters that the model has."""
    model, before = learn.model, {n: p.clone() for n, p in learn.model.named_parameters()}
    assert math.isclose(learn.validate()[1], correct(model).mean(), abs_tol=1e-6)
    learn.fit(1, 1e-3)
    assert learn.model is model
    assert held_by(learn.opt) == {id(p) for p in model.parameters()}
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())


# ---------------------------------------------------------------- what is recorded


def test_history_by_hand():
    """Every number of a row is what the model gives at that moment."""
    learn = learner()
    base, spy = correct(learn.model), Spy(lambda m: (correct(m), zeros(m)))
    found = recover(learn, (30, 60), epochs=[1, 2], cbs=spy)
    before = base
    for i, (row, pct) in enumerate(zip(found.history, (30, 60), strict=True)):
        (compressed, n), (tuned, m) = spy.seen[2 * i : 2 * i + 2]
        drop = base - tuned
        assert (row["stage"], row["level"], row["epochs"]) == (i + 1, pct, i + 1)
        assert [row["metric_before"], row["metric_compressed"], row["metric"]] == pytest.approx([x.mean().item() for x in (before, compressed, tuned)], abs=1e-6)
        assert row["drop"] == pytest.approx(drop.mean().item(), abs=1e-6)
        assert row["stderr"] == pytest.approx(drop.std().item() / 300**0.5, abs=1e-6)
        assert (row["low"], row["high"]) == pytest.approx(tango_interval(int((drop > 0).sum()), int((drop < 0).sum()), 300))
        assert n == m == {name: size * pct // 100 for name, size in SIZES.items()}
        assert row["zeros_pct"] == pytest.approx(100 * sum(n.values()) / sum(SIZES.values()))
        assert row["params"] == sum(p.numel() for p in learn.model.parameters()) and row["seconds"] > 0
        before = tuned
    assert found.baseline_metric == pytest.approx(base.mean().item(), abs=1e-6)
    assert (found.best, found.stopped, found.metric) == (60, None, found.history[-1]["metric"])
    assert found.metric > found.history[-1]["metric_compressed"]


def test_pruned_history_by_hand():
    """Stages are percent of the channels that the model came with; parameters and multiply-accumulates are counted in the model."""
    learn = learner()
    model, spy = learn.model, Spy(lambda m: (widths(m), sum(p.numel() for p in m.parameters())))
    found = recover(learn, (25, 50, 75), compression="pruning", cbs=spy)
    assert learn.model is model and found.best == 75
    assert [w for w, _ in spy.seen[::2]] == [{"stem": a, "conv1": b, "conv2": a, "head": 10} for a, b in ((12, 18), (8, 12), (4, 6))]
    assert [r["params"] for r in found.history] == [n for _, n in spy.seen[::2]]
    x = parts()[0].tensors[0][:1]
    assert found.history[-1]["macs"] == model_size(model, x)["macs"] == 16 * (9 * 4 + 2 * 9 * 4 * 6) + 40
    assert [name for name, _ in found.skipped] == ["head"]
    check_usable(learn)


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_recalibrated(compression):
    """Batch-norm statistics at the end of a stage are those of the data given, and the metric was measured with them."""

    def off(model):
        with torch.no_grad():
            return (model.norm.running_mean - model.stem(parts()[0].tensors[0]).mean((0, 2, 3))).abs().max().item()

    plain, learn = learner(), learner()
    recover(plain, (30, 60), compression=compression)
    found = recover(learn, (30, 60), compression=compression, recalibrate=learn.dls.train)
    assert off(learn.model) < 1e-4 < 1e-2 < off(plain.model) and found.settings["recalibrated"]
    assert found.metric == pytest.approx(correct(learn.model).mean().item(), abs=1e-6)
    check_usable(learn)


def test_json_and_table(tmp_path):
    """A result read back is equal to the one that was saved, with targets for each layer and without an interval."""
    plan = LayerTargets({"conv1": 80, "conv2": 40})
    for found in (recover(learner(), (20, 50), epochs=0), recover(learner(metrics=None), (30,), plan=plan, max_drop=0.0), recover(learner(), (30,), metric=lambda p, t: p.std(), higher_is_better=True, epochs=0)):
        found.to_json(tmp_path / "r.json")
        again = RecoveryResult.from_json(tmp_path / "r.json")
        assert vars(again) == vars(found) and [type(t) for t in again.targets] == [type(t) for t in found.targets]
        assert list(again.to_dataframe().index) == [r["level"] for r in found.history]
        assert len(again.plot().lines) >= 3
    assert found.history[0]["low"] is None
    with pytest.raises(ValueError, match="not a RecoveryResult"):
        plan.to_json(tmp_path / "r.json")
        RecoveryResult.from_json(tmp_path / "r.json")


def test_summary(capsys):
    """It says where the model was left and why; with `verbose` there is a bar, without there is nothing."""
    found = recover(learner(), (20, 90), epochs=1, max_drop=0.05)
    assert capsys.readouterr().out == ""
    found.summary()
    out = capsys.readouterr().out
    assert "left at 20 %" in out and found.stopped in out and out.count("\n") == 7
    recover(learner(), (20,), verbose=True)
    assert "100.00%" in capsys.readouterr().out


# ---------------------------------------------------------------- where the model is left


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_last_good_stage_is_restored(compression):
    """After a stage that lost too much, the model is what it was after the stage before: numbers, shapes, modes."""
    kept = recover(good := learner(), (30,), compression=compression)
    found = recover(learn := learner(), (30, 95, 99), compression=compression, max_drop=0.4)
    assert (found.best, len(found.history), kept.best) == (30, 2, 30)
    assert not found.history[-1]["passed"] and "at 95 % accuracy is worse by" in found.stopped and found.stopped.endswith("the model is at 30 %")
    a, b = good.model.state_dict(), learn.model.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert widths(good.model) == widths(learn.model) and learn.model.stem.out_channels == len(learn.model.stem.weight)
    assert found.metric == pytest.approx(correct(learn.model).mean().item(), abs=1e-6)
    check_usable(learn)


def test_two_layers_of_the_last_good_stage_are_restored():
    """Low rank puts other modules into the model; those of the stage before come back, and train on."""
    kept = recover(good := learner(), (30,), compression="low_rank")
    found = recover(learn := learner(), (30, 95), compression="low_rank", max_drop=kept.history[0]["drop"] + 0.01)
    assert (found.best, len(found.history)) == (30, 2) and found.stopped
    a, b = good.model.state_dict(), learn.model.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert "conv1.1.weight" in b
    check_usable(learn)


@pytest.mark.parametrize("compression", ["sparsity", "pruning", "low_rank"])
@pytest.mark.parametrize("used", [True, False])
def test_no_stage_passes(compression, used):
    """Then nothing has happened, to the model or the optimizer."""
    learn = learner()
    if used:
        learn.fit(1, 1e-4)
    before, opt, state = fingerprint(learn.model), learn.opt, learn.opt and [s for *_, s, _ in learn.opt.all_params()]
    found = recover(learn, (95,), compression=compression, max_drop=0.0)
    assert changes(before, fingerprint(learn.model)) == []
    assert learn.opt is opt and (not used or [s for *_, s, _ in opt.all_params()] == state)
    assert found.best is None and found.stopped.endswith("the model is as it was") and found.metric == found.baseline_metric
    check_usable(learn)


def test_unchanged_answers_are_not_certain():
    """300 answers that all stayed: the drop is 0, and may be more than that in truth."""
    found = recover(learner(), (0,), epochs=0, max_drop=np.float32(0.1))
    assert type(found.max_drop) is float
    row = found.history[0]
    assert row["drop"] == 0 and (row["low"], row["high"]) == pytest.approx(tango_interval(0, 0, 300)) and row["high"] > 0.01


def test_without_a_limit_the_last_stage_stays():
    """Whatever is lost, unless it is no number any more."""
    assert recover(learner(), (50, 99), epochs=0).best == 99
    learn = learner()
    found = recover(learn, (50, 99), epochs=0, higher_is_better=True, metric=lambda p, t: torch.tensor(math.nan if zeros(learn.model)["conv1"] > 3000 else 0.9))
    assert (found.best, len(found.history)) == (50, 2) and "is nan" in found.stopped


def test_lower_is_better():
    """An error rate that rises is a drop."""
    found = recover(learner(metrics=error_rate), (30, 95), max_drop=0.1)
    assert not found.higher_is_better and found.best == 30
    assert found.history[-1]["drop"] == pytest.approx(found.history[-1]["metric"] - found.baseline_metric) and found.history[-1]["drop"] > 0.1
    assert recover(learner(), (30,), metric=nn.CrossEntropyLoss(), max_drop=5, epochs=0).best == 30


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted(compression, error):
    """In the first stage: as it was. In the second: the first one stays, and the learner can be used."""
    learn = learner(cbs=GradientAccumulation(1))
    before, opt, cbs = fingerprint(learn.model), learn.opt, list(learn.cbs)
    with pytest.raises(error):
        recover(learn, (30, 60), compression=compression, cbs=Fail(error("halfway"), 1))
    assert changes(before, fingerprint(learn.model)) == [] and learn.opt is opt and list(learn.cbs) == cbs
    good = learner(cbs=GradientAccumulation(1))
    recover(good, (30,), compression=compression)
    learn = learner(cbs=GradientAccumulation(1))
    cbs = list(learn.cbs)
    with pytest.raises(error):
        recover(learn, (30, 60), compression=compression, cbs=Fail(error("halfway"), 2))
    assert list(learn.cbs) == cbs and not hasattr(learn, "hold_stage")
    a, b = good.model.state_dict(), learn.model.state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    check_usable(learn)


# ---------------------------------------------------------------- zeros that hold, and the learner afterwards


def test_masks_rise_and_hold():
    """A zero of one stage is a zero after every later step."""

    class Watch(Callback):
        order, last, steps = 90, None, 0

        def after_step(self):
            now = torch.cat([p.flatten() == 0 for n, p in self.learn.model.named_parameters() if p.dim() > 1])
            assert Watch.last is None or not (Watch.last & ~now).any()
            Watch.last, Watch.steps = now, Watch.steps + 1

    learn = learner(wd=0.1)
    recover(learn, (30, 60, 80), cbs=Watch(), granularity="kernel")
    assert Watch.steps == 3 * 8 and int(Watch.last.sum()) == sum(zeros(learn.model).values())
    kernels = learn.model.conv1.weight.flatten(2)
    assert ((kernels == 0).all(2) | (kernels != 0).any(2)).all() and int((kernels == 0).all(2).sum()) == 16 * 24 * 80 // 100


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_learner_afterwards(compression):
    """Callbacks in their order, a new optimizer for the parameters that there are, frozen groups still frozen."""
    learn = learner(cbs=[GradientAccumulation(1), Spy(id)], splitter=lambda m: [params(m.stem), params(nn.ModuleList([m.conv1, m.norm1, m.conv2, m.norm2, m.norm, m.head]))])
    learn.add_cb(ProgressCallback())
    learn.freeze()
    cbs, opt, logger = list(learn.cbs), learn.opt, learn.logger
    recover(learn, (25,), compression=compression)
    assert list(learn.cbs) == cbs and learn.progress is cbs[-1] and learn.logger is logger and all(cb.learn is learn for cb in cbs)
    assert learn.opt is not opt and held_by(learn.opt) == {id(p) for p in learn.model.parameters()}
    assert learn.opt.frozen_idx == 1 and not learn.model.stem.weight.requires_grad and learn.model.conv1.weight.requires_grad
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in learn.model.modules())


def test_a_saved_model_does_not_bring_weights_back(tmp_path):
    """Zeros are there also after a callback that loads the best epoch."""
    learn = learner(path=tmp_path)
    recover(learn, (60,), epochs=3, cbs=SaveModelCallback(monitor="accuracy"))
    assert zeros(learn.model) == {n: size * 60 // 100 for n, size in SIZES.items()}


def test_a_second_call_goes_on():
    """Higher stages on a model that is sparse already."""
    learn = learner()
    recover(learn, (30,))
    first = learn.model.conv1.weight == 0
    recover(learn, (60,))
    assert (learn.model.conv1.weight[first] == 0).all() and zeros(learn.model)["conv1"] == 3456 * 60 // 100


# ---------------------------------------------------------------- plans and criteria


def test_plan_is_stretched():
    """To the mean of each stage, with its shape, and counted in the model."""
    learn, spy = learner(), Spy(zeros)
    plan = {"conv1": 80, "conv2": 40, "head": 0}
    found = recover(learn, (30, 50), plan=plan, cbs=spy)
    assert [t.mean(learn.model) for t in found.targets] == pytest.approx([30, 50])
    for t, n in zip(found.targets, spy.seen[::2], strict=True):
        assert t["conv1"] == pytest.approx(2 * t["conv2"]) and t["head"] == 0
        assert n == {"stem": 0, "head": 0, **{k: int(3456 * t[k] / 100) for k in ("conv1", "conv2")}}
    assert found.history[-1]["zeros_pct"] == pytest.approx(100 * sum(spy.seen[-1].values()) / sum(SIZES.values()))


def test_scaled_plan_keeps_its_own_extremes():
    """A target beyond 99 % that was asked for may stay, others stop there."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    assert list(scaled_plan(model, {"0": 100, "1": 50}, 75).values()) == pytest.approx([100, 50])
    assert list(scaled_plan(model, {"0": 80, "1": 40}, 90).values()) == pytest.approx([99, 81])
    assert list(scaled_plan(model, {"0": 80, "1": 40}, 0).values()) == [0, 0]
    with pytest.raises(ValueError, match="between 0 and 0 is possible"):
        scaled_plan(model, {"0": 0}, 10)
    with pytest.raises(ValueError):
        scaled_plan(model, {}, 10)


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_plan_from_a_sweep(compression):
    """Solved for each stage on the untouched model; coupled layers lose the same channels."""
    learn = learner()
    sweep = SensitivityAnalyzer.from_learner(learn).sweep(compression, [25, 50, 75], verbose=False)
    expected = [sweep.to_layer_targets(learn.model, pct, max_pct=99) for pct in (30, 60)]
    found = recover(learn, (30, 60), compression=compression, plan=sweep, epochs=1)
    assert found.targets == expected
    if compression == "pruning":
        t = expected[-1]
        assert widths(learn.model) == {"stem": 16 - int(16 * t["stem"] / 100), "conv1": 24 - int(24 * t["conv1"] / 100), "conv2": 16 - int(16 * t["stem"] / 100), "head": 10}
    else:
        assert zeros(learn.model) == {n: int(SIZES[n] * pct / 100 + 1e-9) for n, pct in expected[-1].items()}
    with pytest.raises(ValueError, match="and criteria is taylor here"):
        recover(learner(), (30,), compression=compression, plan=sweep, criteria=taylor)
    one = recover(learner(), (30,), compression=compression, plan=sweep[1], epochs=0)
    assert one.targets[0].mean(learner().model) == pytest.approx(30)


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_criteria(compression):
    """Those that use data see the training set anew in each stage; those that compare with earlier weights must be given them."""
    assert recover(learner(), (30, 60), compression=compression, criteria=taylor).settings["criteria"] == "taylor"
    with pytest.raises(ValueError):
        recover(learner(), compression=compression, criteria=movement)
    start = learner(state=None).model.state_dict()
    for c in (movement, updating_movement):
        learn = learner()
        assert recover(learn, (30, 60), compression=compression, criteria=c.since(start)).best == 60
        check_usable(learn)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        (dict(stages="50"), TypeError, "stages is"),
        (dict(stages=[True]), ValueError, "in percent"),
        (dict(epochs=1.5), ValueError, "whole number"),
        (dict(compression=["sparsity"]), ValueError, "'pruning'"),
        (dict(max_drop=math.nan), ValueError, "0 or more"),
        (dict(max_drop=5, metric=error_rate), ValueError, "two points are 0.02"),
        (dict(plan={"conv9": 50}), KeyError, "did you mean 'conv"),
        (dict(plan=LayerTargets({"conv1": 8}, "bits")), ValueError, "in bits"),
        (dict(plan={"conv1": 50}, compression="pruning", stages=[20, 100]), ValueError, "out of reach"),
        (dict(compression="pruning", stages=[1, 50]), ValueError, "there is nothing to prune"),
        (dict(granularity="2:4", stages=[50, 60]), ValueError, "2:4 comes to 50 %"),
        (dict(criteria="large_final"), TypeError, "criteria is one of"),
        (dict(cbs=PruneCallback(50)), ValueError, "PruneCallback"),
        (dict(metric="accuracy"), TypeError, "metric is"),
        (dict(metric=lambda p, t: p.sum() * math.nan, higher_is_better=True), ValueError, "nothing can be compared"),
        (dict(epoch=3), TypeError, "epoch"),
        (dict(recalibrate=[]), ValueError, "is empty"),
    ],
)
def test_errors_leave_no_trace(kwargs, error, match):
    """Whatever is wrong, the model is as it was."""
    learn = learner()
    before, cbs = fingerprint(learn.model), list(learn.cbs)
    with pytest.raises(error, match=match):
        recover(learn, **kwargs)
    assert changes(before, fingerprint(learn.model)) == [] and learn.opt is None and list(learn.cbs) == cbs


def test_more_errors():
    """A callback that compresses on the learner, a ready-made optimizer, a fraction for percent."""
    with pytest.raises(ValueError):
        recover(learner(cbs=SparsifyCallback(50)))
    learn = learner()
    learn.opt_func = OptimWrapper(opt=torch.optim.SGD(learn.model.parameters(), 0.1))
    with pytest.raises(ValueError, match="pruning replaces them"):
        recover(learn, compression="pruning")
    assert recover(learn, (20,)).best == 20
    bare = learner(state=None)
    bare.model.norm = bare.model.norm1 = bare.model.norm2 = nn.Identity()
    with pytest.raises(ValueError, match="has no batch norm"):
        recover(bare, recalibrate=bare.dls.train)
    with pytest.warns(UserWarning, match="0.5 is 0.5 percent"):
        recover(learner(), (0.5, 20), epochs=0)


@pytest.mark.parametrize(("limits", "pct"), [
    (dict(locked="head", bounds={"conv1": (0, 30)}), {"stem": 80, "conv1": 30, "conv2": 80, "head": 0}),
    (dict(locked={"conv2": 50}, layers=["conv1", "conv2"]), {"stem": 0, "conv1": 80, "conv2": 50, "head": 0}),
    (dict(layer_types=nn.Linear), {"stem": 0, "conv1": 0, "conv2": 0, "head": 80}),
    (dict(bounds=(20, 60)), {"stem": 60, "conv1": 60, "conv2": 60, "head": 60}),
], ids=["locked and bounds", "layers", "types", "all"])
def test_what_was_decided_holds_in_every_stage(limits, pct):
    """Each layer has the percent of the stage, within what was decided for it, before and after fine-tuning."""
    learn = learner()
    spy = Spy(zeros)
    recover(learn, (40, 80), cbs=spy, **limits)
    for name, n in SIZES.items(): assert abs(zeros(learn.model)[name] - n*pct[name]/100) <= 1   # half a weight goes either way
    start, end, last_start, last_end = spy.seen
    assert start == end and last_start == last_end == zeros(learn.model)
    assert all(start[name] <= last_end[name] for name in SIZES)


def test_channels_that_are_locked_stay():
    learn = learner()
    recover(learn, (25, 50), compression="pruning", locked="conv1")
    assert widths(learn.model)["conv1"] == 24 and widths(learn.model)["stem"] == widths(learn.model)["conv2"] == 8


def test_curves_within_what_was_decided():
    """Sensitivities are solved around what is locked, at the mean of each stage."""
    learn = learner()
    sweep = SensitivityAnalyzer.from_learner(learn).sweep(levels=[25, 50, 75, 90, 97], verbose=False)
    recover(learn, (30, 60), plan=sweep, locked={"conv1": 50, "head": 0})
    found = zeros(learn.model)
    assert found["head"] == 0 and found["conv1"] == SIZES["conv1"] // 2
    assert sum(found.values()) == pytest.approx(.6 * sum(SIZES.values()), abs=4)
    with pytest.raises(ValueError, match="plan says what each layer gets; leave bounds out"):
        recover(learn, (60,), plan={"conv1": 50}, bounds=(0, 60))
