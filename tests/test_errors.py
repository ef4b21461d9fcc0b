"""Every bad call, what it raises, and the words that help: nothing is evaluated before the error, and the model is as it was."""

import json
import math
import warnings

import fastai.callback.progress  # noqa: F401  gives Learner its `no_bar`
import numpy as np
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset
from torchvision.models import shufflenet_v2_x0_5

from fasterai_sens import (
    LayerSensitivity,
    LayerTargets,
    Pruned,
    Pruner,
    Quantized,
    SensitivityAnalyzer,
    SensitivityResult,
    Sparse,
    Sparsifier,
    SparsifyCallback,
    SweepResult,
    analyze_sensitivity,
    changes,
    dsd,
    fingerprint,
    large_final,
    leave_no_trace,
    movement,
    random,
    small_init,
    taylor,
    updating_movmag,
    wanda,
)
from fasterai_sens.measure.loop import Written

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf


class Net(nn.Module):
    """Two convolutions, batch norm, a normed layer, two tied layers and a head"""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)
        self.normed, self.tied1, self.tied2 = parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied2.weight = self.tied1.weight
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.conv2(self.bn(self.conv1(x)).relu()).mean((2, 3))
        return self.fc(self.tied2(self.tied1(self.normed(x)).relu()))


class Tokens(nn.Module):
    """Takes its inputs apart by name, as many models do"""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, batch):
        return self.fc(batch["x"])


class Two(nn.Module):
    """A model with two inputs"""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, a, b):
        return self.fc(a + b)


class Attention(nn.Module):
    """Attention, which checks the width of its input with `assert`"""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attn(x, x, x)[0]


def all_normed():
    """Layers enough, and not one that can be compressed in place"""
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), parametrizations.spectral_norm(nn.Linear(3, 3)))


def integer_weights():
    """A linear layer that is quantized already"""
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    return nn.Sequential(layer)


# made here, because making them draws random numbers, and no row may
TOKENS, TWO, ATTENTION, NORMED, INTEGERS = Tokens(), Two(), Attention(), all_normed(), integer_weights()
NO_LAYERS, LAZY, META = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), nn.Sequential(nn.LazyLinear(2)), nn.Sequential(nn.Linear(2, 2, device="meta"))
FLAT, HALF, FOREIGN = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), nn.Linear(3, 2).half(), nn.Sequential(nn.Linear(2, 2))
SHUFFLE, SHUFFLED, SMALL = shufflenet_v2_x0_5(num_classes=3), torch.randn(1, 3, 32, 32), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
PARAMS = {"conv1": 112, "conv2": 222, "tied1": 48, "fc": 35}
TYPES = {"conv1": "Conv2d", "conv2": "Conv2d", "tied1": "Linear", "fc": "Linear"}


def result(kind="sparsity", level=50, drops=(0.1, 0.2, 0.3, 0.4), **other):
    """A result for `Net`, or for a model that is nearly it"""
    sizes = {**PARAMS, **other}
    rows = [LayerSensitivity(n, TYPES.get(n, "Linear"), s, 0.9, 0.9 - d, d) for (n, s), d in zip(sizes.items(), drops, strict=False) if s]
    return SensitivityResult(kind, level, 0.9, rows)


def unmeasured():
    """A result in which nothing could be compressed"""
    r = result()
    for row in r.layers:
        row.prunable, row.delta = False, NAN
    return r


class World:
    """All that a bad call needs"""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model, self.x, self.y, self.calls, self.folder = Net(), torch.randn(4, 3, 6, 6), torch.arange(4), 0, folder

    def score(self, model):
        """A metric that counts how often it is asked"""
        self.calls += 1
        with torch.no_grad():
            return model(self.x).square().mean().item()

    def analyzer(self, model=None, sample=None, eval_fn=None, **kw):
        """An analyzer with one thing exchanged"""
        model, sample = self.model if model is None else model, self.x if sample is None else sample
        return SensitivityAnalyzer(model, sample, self.score if eval_fn is None else eval_fn, **kw)

    def analyze(self, *args, **kw):
        """`analyze` on the model"""
        return self.analyzer().analyze(*args, verbose=False, **kw)

    def sweep(self, *args, **kw):
        """`sweep` on the model"""
        return self.analyzer().sweep(*args, verbose=False, **kw)

    def with_eval(self, *values):
        """An analysis whose `eval_fn` returns these, one after the other"""
        left = list(values)
        return self.analyzer(eval_fn=lambda m: left.pop(0) if len(left) > 1 else left[0]).analyze(verbose=False)

    def with_data(self, criteria, data, *args, **kw):
        """An analysis with calibration data"""
        return self.analyzer(criteria=criteria, calibration_data=data).analyze(*args, verbose=False, **kw)

    def learner(self, n_valid=4, **kw):
        """A Learner of the model; to make one draws random numbers, which is not what is tested"""
        with leave_no_trace(self.model):
            dls = DataLoaders.from_dsets(TensorDataset(self.x, self.y), TensorDataset(self.x[:n_valid], self.y[:n_valid]), bs=2, num_workers=0)
            return Learner(dls, self.model, loss_func=CrossEntropyLossFlat(), path=self.folder, **kw)

    def targets(self, found=None, model=None, **kw):
        """Targets from a result for the model"""
        return (found or result()).to_layer_targets(self.model if model is None else model, **kw)

    def file(self, text):
        """A file with this in it"""
        path = self.folder / "found.json"
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    def saved(self, what, kind="json"):
        """A file that the library wrote"""
        path = self.folder / f"saved.{kind}"
        getattr(what, f"to_{kind}")(path)
        return path


def no_grad_zero(model):
    """An `eval_fn` that spoils the weights"""
    with torch.no_grad():
        model.fc.weight.zero_()
    return 0.5


def train_step(model):
    """An `eval_fn` that trains"""
    model(torch.ones(2, 3, 6, 6)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return 0.5


def reload(model):
    """An `eval_fn` that loads a checkpoint"""
    model.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in model.state_dict().items()})
    return 0.5


PCT, BITS = ["percent", "0 to 100"], ["bits", "2 to 16"]
SCORES = ["eval_fn returns", "number", "1-D tensor"]
CHANGED = ["eval_fn changed the weights"]
NO_LAYER = ["no compressible", "Conv1d/2d/3d", "Linear"]
BIT_PLAN = ["quantized", "bits"]
SAME_SAMPLES = ["same samples"]
BITS_TARGETS = {"conv1": 4, "fc": 8}

ERRORS = [
    # levels: sparsity is in percent
    ("pct 150", lambda w: w.analyze("sparsity", 150), ValueError, [*PCT, "level", "150"]),
    ("pct -1", lambda w: w.analyze("sparsity", -1), ValueError, [*PCT, "-1"]),
    ("pct True", lambda w: w.analyze("sparsity", True), ValueError, [*PCT, "True"]),
    ("pct NaN", lambda w: w.analyze("sparsity", NAN), ValueError, [*PCT, "nan"]),
    ("pct infinite", lambda w: w.analyze("sparsity", INF), ValueError, [*PCT, "inf"]),
    ("pct text", lambda w: w.analyze("sparsity", "50"), ValueError, [*PCT, "'50'"]),
    ("pct list", lambda w: w.analyze("sparsity", [50]), ValueError, [*PCT, "[50]"]),
    ("pct function", lambda w: analyze_sensitivity(w.model, w.x, w.score, "sparsity", 150, verbose=False), ValueError, [*PCT, "150"]),
    ("pct perturbation", lambda w: Sparse(101), ValueError, [*PCT, "101"]),
    ("pct perturbation True", lambda w: Sparse(True), ValueError, [*PCT, "True"]),
    # levels: quantization is in bits
    ("bits 50", lambda w: w.analyze("quantization", 50), ValueError, [*BITS, "level", "50"]),
    ("bits 0.5", lambda w: w.analyze("quantization", 0.5), ValueError, [*BITS, "0.5"]),
    ("bits 1", lambda w: w.analyze("quantization", 1), ValueError, [*BITS, "1"]),
    ("bits 17", lambda w: w.analyze("quantization", 17), ValueError, [*BITS, "17"]),
    ("bits -4", lambda w: w.analyze("quantization", -4), ValueError, [*BITS, "-4"]),
    ("bits 8.0", lambda w: w.analyze("quantization", 8.0), ValueError, [*BITS, "whole number", "8.0"]),
    ("bits True", lambda w: w.analyze("quantization", True), ValueError, [*BITS, "True"]),
    ("bits NaN", lambda w: w.analyze("quantization", NAN), ValueError, [*BITS, "nan"]),
    ("bits text", lambda w: w.analyze("quantization", "8"), ValueError, [*BITS, "'8'"]),
    ("bits perturbation", lambda w: Quantized(32), ValueError, [*BITS, "32"]),
    ("bits perturbation pct", lambda w: Quantized(50), ValueError, [*BITS, "50"]),
    # levels: n:m patterns have their own
    ("n:m other level", lambda w: w.analyze("sparsity", 30, granularity="2:4"), ValueError, ["2:4", "50 %", "30 %"]),
    ("n:m sweep", lambda w: w.sweep("sparsity", [25, 50], granularity="2:4"), ValueError, ["2:4", "50 %", "25 %"]),
    ("n:m perturbation", lambda w: Sparse(50, "1:4"), ValueError, ["1:4", "75 %", "50 %"]),
    # sweeps
    ("levels number", lambda w: w.sweep("sparsity", 50), ValueError, ["levels is a list", "50"]),
    ("levels text", lambda w: w.sweep("sparsity", "50"), ValueError, ["levels is a list", "'50'"]),
    ("levels empty generator", lambda w: w.sweep("sparsity", (x for x in ())), ValueError, ["levels is empty"]),
    ("levels one bad", lambda w: w.sweep("sparsity", [25, 150]), ValueError, [*PCT, "150"]),
    ("levels one text", lambda w: w.sweep("sparsity", [25, "50"]), ValueError, [*PCT, "'50'"]),
    ("levels pct as bits", lambda w: w.sweep("quantization", [8, 50]), ValueError, [*BITS, "50"]),
    ("levels of a perturbation", lambda w: w.sweep(Sparse(50), [25]), ValueError, ["its level"]),
    ("stop mode", lambda w: w.sweep(early_stop_mode="min", early_stop_value=0.5), ValueError, ["minimize", "maximize", "dropped", "raised", "'min'"]),
    ("stop value without mode", lambda w: w.sweep(early_stop_value=0.5), ValueError, ["early_stop_mode", "minimize", "None"]),
    ("stop mode without value", lambda w: w.sweep(early_stop_mode="dropped"), ValueError, ["early_stop_value", "None"]),
    ("stop value text", lambda w: w.sweep(early_stop_mode="minimize", early_stop_value="0.5"), ValueError, ["early_stop_value", "'0.5'"]),
    ("stop value NaN", lambda w: w.sweep(early_stop_mode="minimize", early_stop_value=NAN), ValueError, ["early_stop_value", "nan"]),
    ("stop value True", lambda w: w.sweep(early_stop_mode="raised", early_stop_value=True), ValueError, ["early_stop_value", "True"]),
    ("stop dropped negative", lambda w: w.sweep(early_stop_mode="dropped", early_stop_value=-0.1), ValueError, ["0 or more", "-0.1"]),
    ("stop raised negative", lambda w: w.sweep(early_stop_mode="raised", early_stop_value=-1), ValueError, ["0 or more", "-1"]),
    # what to do
    ("compression near", lambda w: w.analyze("sparcity"), ValueError, ["unknown compression 'sparcity'", "did you mean 'sparsity'"]),
    ("compression near bits", lambda w: w.analyze("quantisation"), ValueError, ["unknown compression", "did you mean 'quantization'"]),
    ("compression far", lambda w: w.sweep("xyz"), ValueError, ["unknown compression 'xyz'", "'sparsity'", "'quantization'"]),
    ("compression None", lambda w: w.analyze(None), ValueError, ["unknown compression None", "'sparsity'"]),
    ("compression number", lambda w: w.analyze(50), ValueError, ["unknown compression 50", "'sparsity'"]),
    ("compression list", lambda w: w.analyze(["sparsity", "quantization"]), ValueError, ["unknown compression", "'sparsity'"]),
    ("compression class", lambda w: w.analyze(Sparse), ValueError, ["unknown compression", "'sparsity'"]),
    # pruning: what cannot be traced, and what may not be cut
    ("pruning 100", lambda w: w.analyze("pruning", 100), ValueError, ["100 %", "no channel"]),
    ("pruning 150", lambda w: w.analyze("pruning", 150), ValueError, [*PCT, "level", "150"]),
    ("pruning -1", lambda w: w.analyze("pruning", -1), ValueError, [*PCT, "-1"]),
    ("pruning True", lambda w: w.analyze("pruning", True), ValueError, [*PCT, "True"]),
    ("pruning NaN", lambda w: w.analyze("pruning", NAN), ValueError, [*PCT, "nan"]),
    ("pruning text", lambda w: w.analyze("pruning", "50"), ValueError, [*PCT, "'50'"]),
    ("pruning list", lambda w: w.analyze("pruning", [50]), ValueError, [*PCT, "[50]"]),
    ("pruning sweep", lambda w: w.sweep("pruning", [25, 100]), ValueError, ["100 %", "no channel"]),
    ("pruning sweep 150", lambda w: w.sweep("pruning", [25, 150]), ValueError, [*PCT, "150"]),
    ("pruning function", lambda w: analyze_sensitivity(w.model, w.x, w.score, "pruning", 150, verbose=False), ValueError, [*PCT, "150"]),
    ("pruning near", lambda w: w.analyze("prunning"), ValueError, ["unknown compression 'prunning'", "did you mean 'pruning'"]),
    ("pruning shuffled", lambda w: w.analyzer(SHUFFLE, SHUFFLED).analyze("pruning"), ValueError, ["ShuffleNetV2", "sparsity and quantization can do without"]),
    ("pruning unknown layer", lambda w: w.analyze("pruning", layers=["conv3"]), KeyError, ["unknown layer 'conv3'", "did you mean", "'conv1'"]),
    ("pruning not compressible", lambda w: w.analyze("pruning", layers=["bn"]), KeyError, ["'bn'", "BatchNorm2d"]),
    ("pruning bad baseline", lambda w: w.analyzer(eval_fn=lambda m: NAN).analyze("pruning", verbose=False), ValueError, ["is nan"]),
    ("pruning infinite baseline", lambda w: w.analyzer(eval_fn=lambda m: INF).sweep("pruning", verbose=False), ValueError, ["is inf"]),
    ("pruning wanda without data", lambda w: w.analyzer(criteria=wanda).analyze("pruning"), ValueError, ["wanda", "calibration_data"]),
    ("pruning movement", lambda w: w.analyzer(criteria=movement).analyze("pruning"), ValueError, ["movement", "initial weights"]),
    ("pruned 100", lambda w: Pruned(100), ValueError, ["100 %", "no channel"]),
    ("pruned 101", lambda w: Pruned(101), ValueError, [*PCT, "101"]),
    ("pruned True", lambda w: Pruned(True), ValueError, [*PCT, "True"]),
    ("pruned text", lambda w: Pruned("50"), ValueError, [*PCT, "'50'"]),
    ("pruned criteria", lambda w: Pruned(50, "l1"), TypeError, ["criteria is one of", "'l1'"]),
    ("pruned criteria name", lambda w: Pruned(50, "large_final"), TypeError, ["large_final", "not its name"]),
    ("pruned round_to 0", lambda w: Pruned(50, round_to=0), ValueError, ["round_to", "1 or more", "0"]),
    ("pruned round_to True", lambda w: Pruned(50, round_to=True), ValueError, ["round_to", "True"]),
    ("pruned round_to fraction", lambda w: Pruned(50, round_to=1.5), ValueError, ["round_to", "1.5"]),
    # Pruner
    ("pruner 100", lambda w: Pruner(w.model, 100, example_inputs=w.x), ValueError, ["pruning_ratio", "100 %", "no channel"]),
    ("pruner 150", lambda w: Pruner(w.model, 150, example_inputs=w.x), ValueError, [*PCT, "pruning_ratio", "150"]),
    ("pruner text", lambda w: Pruner(w.model, "50", example_inputs=w.x), ValueError, [*PCT, "'50'"]),
    ("pruner context", lambda w: Pruner(w.model, 50, "both", example_inputs=w.x), ValueError, ["'local' or 'global'", "'both'"]),
    ("pruner global targets", lambda w: Pruner(w.model, {"conv1": 50}, "global", example_inputs=w.x), ValueError, ["global", "context='local'"]),
    ("pruner one bad", lambda w: Pruner(w.model, {"conv1": 150}, example_inputs=w.x), ValueError, [*PCT, "'conv1'", "150"]),
    ("pruner bits", lambda w: Pruner(w.model, LayerTargets(BITS_TARGETS, "bits"), example_inputs=w.x), ValueError, ["percent", "bits"]),
    ("pruner unknown", lambda w: Pruner(w.model, {"conv3": 50}, example_inputs=w.x), KeyError, ["unknown layer 'conv3'", "'conv1'"]),
    ("pruner output", lambda w: Pruner(w.model, {"fc": 50}, example_inputs=w.x), ValueError, ["fc cannot be pruned", "output of the model"]),
    ("pruner tied", lambda w: Pruner(w.model, {"tied2": 50}, example_inputs=w.x), ValueError, ["tied1 cannot be pruned", "share one weight"]),
    ("pruner nothing", lambda w: Pruner(w.model, {"conv1": 10}, example_inputs=w.x), ValueError, ["nothing to prune", "10 % of 4 channels is none"]),
    ("pruner schedule falls", lambda w: Pruner(w.model, 50, schedule=dsd, example_inputs=w.x), ValueError, ["schedule falls", "cannot come back"]),
    ("pruner schedule name", lambda w: Pruner(w.model, 50, schedule="agp", example_inputs=w.x), TypeError, ["schedule is", "'agp'"]),
    ("pruner steps 0", lambda w: Pruner(w.model, 50, steps=0, example_inputs=w.x), ValueError, ["steps", "1 or more", "0"]),
    ("pruner steps True", lambda w: Pruner(w.model, 50, steps=True, example_inputs=w.x), ValueError, ["steps", "True"]),
    ("pruner steps fraction", lambda w: Pruner(w.model, 50, steps=2.5, example_inputs=w.x), ValueError, ["steps", "2.5"]),
    ("pruner round_to", lambda w: Pruner(w.model, 50, round_to=0, example_inputs=w.x), ValueError, ["round_to", "0"]),
    ("pruner ignored unknown", lambda w: Pruner(w.model, 50, ignored_layers=["conv3"], example_inputs=w.x), KeyError, ["unknown layer 'conv3'", "'conv1'"]),
    ("pruner ignored foreign", lambda w: Pruner(w.model, 50, ignored_layers=[FOREIGN[0]], example_inputs=w.x), KeyError, ["Linear", "not in the model"]),
    ("pruner ignored all", lambda w: Pruner(w.model, 50, ignored_layers=[w.model], example_inputs=w.x), ValueError, ["nothing to prune", "ignored_layers"]),
    ("pruner example too small", lambda w: Pruner(w.model, 50, example_inputs=torch.ones(1, 3, 2, 2)), ValueError, ["Net does not run"]),
    ("pruner example channels", lambda w: Pruner(w.model, 50, example_inputs=torch.ones(1, 5, 6, 6)), ValueError, ["Net does not run", "5 channels"]),
    ("pruner criteria", lambda w: Pruner(w.model, 50, criteria="l1", example_inputs=w.x), TypeError, ["criteria is one of", "'l1'"]),
    ("pruner wanda", lambda w: Pruner(w.model, 50, criteria=wanda, example_inputs=w.x), ValueError, ["wanda", "calibration_data"]),
    ("granularity near", lambda w: w.analyze(granularity="filters"), ValueError, ["unknown granularity 'filters'", "'filter'"]),
    ("granularity far", lambda w: w.analyze(granularity="zz"), ValueError, ["unknown granularity 'zz'", "known are", "'weight'"]),
    ("granularity for pruning", lambda w: w.analyze("pruning", granularity="filter"), TypeError, ["takes no option", "of sparsity"]),
    ("granularity number", lambda w: w.analyze(granularity=4), ValueError, ["unknown granularity 4"]),
    ("granularity 4:2", lambda w: w.analyze(granularity="4:2"), ValueError, ["0 < n < m", "'4:2'"]),
    ("granularity 0:4", lambda w: w.analyze(granularity="0:4"), ValueError, ["0 < n < m", "'0:4'"]),
    ("granularity 4:4", lambda w: w.sweep(granularity="4:4"), ValueError, ["0 < n < m", "'4:4'"]),
    ("granularity 2:4:8", lambda w: w.analyze(granularity="2:4:8"), ValueError, ["unknown granularity '2:4:8'", "'2:4'"]),
    ("granularity perturbation", lambda w: Sparse(50, "rows"), ValueError, ["unknown granularity 'rows'", "did you mean 'row'"]),
    # criteria
    ("criteria unknown name", lambda w: w.analyzer(criteria="magnitude"), TypeError, ["criteria is one of", "large_final", "function", "'magnitude'"]),
    ("criteria known name", lambda w: w.analyzer(criteria="large_final"), TypeError, ["large_final", "not its name"]),
    ("criteria number", lambda w: w.analyzer(criteria=5), TypeError, ["criteria is one of", "5"]),
    ("criteria None", lambda w: w.analyzer(criteria=None), TypeError, ["criteria is one of", "None"]),
    ("criteria perturbation", lambda w: Sparse(50, criteria="l1"), TypeError, ["criteria is one of", "'l1'"]),
    ("criteria wanda without data", lambda w: w.analyzer(criteria=wanda).analyze(), ValueError, ["wanda", "input norms", "calibration_data"]),
    ("criteria taylor without data", lambda w: w.analyzer(criteria=taylor).sweep(), ValueError, ["taylor", "gradients", "calibration_data"]),
    ("criteria movement", lambda w: w.analyzer(criteria=movement).analyze(), ValueError, ["movement", "initial weights", "movement.since"]),
    ("criteria small_init", lambda w: w.analyzer(criteria=small_init).analyze(), ValueError, ["small_init", "initial weights", "since(state_dict)"]),
    ("criteria updating", lambda w: w.analyzer(criteria=updating_movmag).analyze(), ValueError, ["updating_movmag", "previous weights", "since"]),
    ("criteria since a path", lambda w: movement.since("weights.pt"), TypeError, ["since takes", "str"]),
    (
        "criteria since another model",
        lambda w: w.analyzer(criteria=movement.since({"conv1.weight": torch.ones(2, 2)})).analyze(layers="conv1", verbose=False),
        ValueError,
        ["initial weights", "conv1", "(2, 2)", "(4, 3, 3, 3)"],
    ),
    ("criteria of another shape", lambda w: w.analyzer(criteria=lambda x: x.flatten(1).sum(1)).analyze(verbose=False), ValueError, ["shape", "(4,)"]),
    ("criteria one number", lambda w: w.analyzer(criteria=torch.sum).analyze(verbose=False), ValueError, ["shape", "()"]),
    ("criteria not a tensor", lambda w: w.analyzer(criteria=lambda x: x.tolist()).analyze(verbose=False), TypeError, ["scores", "list"]),
    # calibration data
    ("data number", lambda w: w.with_data(wanda, 5), TypeError, ["a list of batches", "int"]),
    ("data without targets", lambda w: w.with_data(taylor, [w.x]), ValueError, ["taylor needs", "(input, target)"]),
    ("data empty taylor", lambda w: w.with_data(taylor, []), ValueError, ["calibration_data is empty"]),
    ("data empty wanda", lambda w: w.with_data(wanda, []), ValueError, ["calibration_data is empty"]),
    ("data empty ranges", lambda w: w.with_data(large_final, [], "quantization", quant_activations=True), ValueError, ["calibration_data is empty"]),
    (
        "data too few inputs",
        lambda w: SensitivityAnalyzer(TWO, (torch.ones(1, 2),) * 2, w.score, criteria=wanda, calibration_data=[[torch.ones(1, 2)]]).analyze(),
        ValueError,
        ["the model takes 2 inputs", "has 1"],
    ),
    # layers
    ("layer near", lambda w: w.analyze(layers=["conv3"]), KeyError, ["unknown layer 'conv3'", "did you mean", "'conv1'", "'conv2'"]),
    ("layer near one of two", lambda w: w.analyze(layers=["conv1", "fcc"]), KeyError, ["unknown layer 'fcc'", "did you mean 'fc'"]),
    ("layer far", lambda w: w.sweep(layers=["zzz"]), KeyError, ["unknown layer 'zzz'", "known are", "'conv1'"]),
    ("layer as text", lambda w: w.analyze(layers="conv"), KeyError, ["unknown layer 'conv'", "'conv1'"]),
    ("layer not compressible", lambda w: w.analyze(layers=["bn"]), KeyError, ["'bn'", "BatchNorm2d", "not a compressible layer", "conv1"]),
    ("layer parametrized", lambda w: w.analyze(layers=["normed"]), KeyError, ["'normed'", "parametrization"]),
    ("layer of another type", lambda w: w.analyze(layers=["fc"], layer_types=nn.Conv2d), KeyError, ["'fc'", "Linear", "layer_types"]),
    ("layer number", lambda w: w.analyze(layers=[3]), KeyError, ["unknown layer 3"]),
    ("layers number", lambda w: w.analyze(layers=3), TypeError, ["layers", "names", "3"]),
    ("layers empty", lambda w: w.analyze(layers=[]), ValueError, ["layers is empty"]),
    ("layer types list", lambda w: w.analyze(layer_types=["Conv2d"]), TypeError, ["layer_types is a module class", "'Conv2d'"]),
    ("layer types text", lambda w: w.analyze(layer_types="Conv2d"), TypeError, ["layer_types is a module class", "'Conv2d'"]),
    ("layer types module", lambda w: w.analyze(layer_types=w.model.fc), TypeError, ["layer_types is a module class", "did you mean Linear"]),
    ("layer types mixed", lambda w: w.analyze(layer_types=(nn.Conv2d, "Linear")), TypeError, ["layer_types is a module class", "'Linear'"]),
    ("layer types none there", lambda w: w.analyze(layer_types=nn.Conv3d), ValueError, ["of type", "Conv3d"]),
    ("layer types empty", lambda w: w.analyze(layer_types=()), ValueError, ["layer_types is empty"]),
    # model
    ("model number", lambda w: w.analyzer(model=5), TypeError, ["nn.Module", "int"]),
    ("model class", lambda w: w.analyzer(model=Net), TypeError, ["nn.Module", "type"]),
    ("model state_dict", lambda w: w.analyzer(model=w.model.state_dict()), TypeError, ["nn.Module", "OrderedDict"]),
    ("model Learner", lambda w: w.analyzer(model=w.learner()), TypeError, ["nn.Module", "Learner", "from_learner"]),
    ("model Learner function", lambda w: analyze_sensitivity(w.learner(), w.x, w.score), TypeError, ["Learner", "from_learner"]),
    ("model no layers", lambda w: w.analyzer(model=NO_LAYERS), ValueError, ["Sequential", *NO_LAYER]),
    ("model all parametrized", lambda w: w.analyzer(model=NORMED), ValueError, ["no compressible", "parametrization"]),
    ("model integer weights", lambda w: w.analyzer(model=INTEGERS), ValueError, ["no compressible", "int8, not floating point"]),
    ("model on meta", lambda w: w.analyzer(model=META), ValueError, ["meta device", "load its weights"]),
    ("model lazy", lambda w: w.analyzer(model=LAZY), ValueError, ["LazyLinear has no weight yet", "run the model once"]),
    # sample
    ("sample array", lambda w: w.analyzer(sample=w.x.numpy()), TypeError, ["sample is a tensor", "ndarray"]),
    ("sample text", lambda w: w.analyzer(sample="image"), TypeError, ["sample is a tensor", "str"]),
    ("sample None", lambda w: SensitivityAnalyzer(w.model, None, w.score), TypeError, ["sample is a tensor", "NoneType"]),
    ("sample shape tuple", lambda w: w.analyzer(sample=(4, 3, 6, 6)), ValueError, ["Net does not run"]),
    ("sample numbers", lambda w: w.analyzer(sample=([1.0, 2.0],)), ValueError, ["Net does not run"]),
    ("sample empty tuple", lambda w: w.analyzer(sample=()), ValueError, ["Net does not run"]),
    ("sample double", lambda w: w.analyzer(sample=w.x.double()), ValueError, ["Net does not run", "torch.float64", "torch.float32"]),
    ("sample half model", lambda w: w.analyzer(model=HALF, sample=torch.ones(1, 3)), ValueError, ["torch.float32", "torch.float16"]),
    ("sample integers", lambda w: w.analyzer(sample=w.x.long()), ValueError, ["Net does not run"]),
    ("sample shape", lambda w: w.analyzer(sample=torch.ones(4, 5, 6, 6)), ValueError, ["Net does not run", "5 channels"]),
    ("sample too small", lambda w: w.analyzer(sample=torch.ones(4, 3, 2, 2)), ValueError, ["Net does not run"]),
    ("sample without batch", lambda w: w.analyzer(model=FLAT, sample=torch.ones(3, 2, 2)), ValueError, ["sample"]),
    ("sample on meta", lambda w: w.analyzer(sample=w.x.to("meta")), ValueError, ["on meta", "the model on cpu", "move"]),
    ("sample too many", lambda w: w.analyzer(sample=(w.x, w.x)), ValueError, ["Net does not run", "positional argument"]),
    ("sample wrong key", lambda w: w.analyzer(sample={"image": w.x}), ValueError, ["Net does not run", "'image'"]),
    ("sample key missing", lambda w: w.analyzer(model=TOKENS, sample=({"y": w.x},)), ValueError, ["Tokens does not run", "'x'"]),
    ("sample attention", lambda w: w.analyzer(model=ATTENTION, sample=torch.ones(2, 5, 7)), ValueError, ["Attention does not run", "7"]),
    ("sample has no method", lambda w: w.analyzer(model=FLAT, sample=([1, 2],)), ValueError, ["on the sample"]),
    ("device of the model", lambda w: w.analyzer(device="cuda"), ValueError, ["the model is on cpu", "device is cuda"]),
    # eval_fn
    ("eval_fn number", lambda w: w.analyzer(eval_fn=0.9), TypeError, ["eval_fn is", "float"]),
    ("eval_fn name", lambda w: w.analyzer(eval_fn="accuracy"), TypeError, ["eval_fn is", "str"]),
    ("eval_fn None", lambda w: SensitivityAnalyzer(w.model, w.x, None), TypeError, ["eval_fn is", "NoneType"]),
    ("eval_fn and sample swapped", lambda w: SensitivityAnalyzer(w.model, w.score, w.x), TypeError, ["eval_fn is", "Tensor"]),
    ("eval_fn gives text", lambda w: w.with_eval("0.9"), TypeError, [*SCORES, "str", "0.9"]),
    ("eval_fn gives None", lambda w: w.with_eval(None), TypeError, [*SCORES, "NoneType"]),
    ("eval_fn gives list", lambda w: w.with_eval([0.9, 0.8]), TypeError, [*SCORES, "list"]),
    ("eval_fn gives tuple", lambda w: w.with_eval((0.3, 0.9, 0.1)), TypeError, [*SCORES, "(metric, objective)", "tuple of 3"]),
    ("eval_fn gives dict", lambda w: w.with_eval({"acc": 0.9}), TypeError, [*SCORES, "dict"]),
    ("eval_fn gives True", lambda w: w.with_eval(True), TypeError, [*SCORES, "bool"]),
    ("eval_fn gives complex", lambda w: w.with_eval(1 + 2j), TypeError, [*SCORES, "complex"]),
    ("eval_fn gives complex tensor", lambda w: w.with_eval(torch.tensor([1 + 2j])), TypeError, [*SCORES, "complex"]),
    ("eval_fn gives array of text", lambda w: w.with_eval(np.array(["0.9"])), TypeError, SCORES),
    ("eval_fn gives 3-D", lambda w: w.with_eval(torch.ones(4, 5, 6)), ValueError, [*SCORES, "(4, 5, 6)"]),
    ("eval_fn gives padding", lambda w: w.with_eval(torch.tensor([[1.0, 0.0], [1.0, NAN]])), ValueError, ["is nan", "NaN is no padding", "list"]),
    ("eval_fn gives other tokens", lambda w: w.with_eval(torch.ones(4, 5), torch.ones(4, 6)), ValueError, [*SAME_SAMPLES, "20 scores", "24 scores"]),
    ("eval_fn gives list of numbers", lambda w: w.with_eval([1.0, 0.5]), TypeError, [*SCORES, "list"]),
    ("eval_fn gives empty sequence", lambda w: w.with_eval([torch.ones(2), torch.ones(0)]), ValueError, [*SCORES, "(0,)", "list"]),
    ("eval_fn gives empty", lambda w: w.with_eval(torch.ones(0)), ValueError, [*SCORES, "(0,)"]),
    ("eval_fn gives NaN", lambda w: w.with_eval(NAN), ValueError, ["is nan"]),
    ("eval_fn gives NaN tensor", lambda w: w.with_eval(torch.tensor(NAN)), ValueError, ["accuracy", "is nan"]),
    ("eval_fn gives NaN vector", lambda w: w.with_eval(torch.full((4,), NAN)), ValueError, ["is nan"]),
    ("eval_fn gives one NaN", lambda w: w.with_eval(torch.tensor([1.0, NAN])), ValueError, ["is nan"]),
    ("eval_fn gives infinity", lambda w: w.with_eval(INF), ValueError, ["is inf"]),
    ("eval_fn gives -infinity", lambda w: w.with_eval(-INF), ValueError, ["untouched model is -inf"]),
    ("eval_fn changes length", lambda w: w.with_eval(torch.ones(4), torch.ones(3)), ValueError, [*SAME_SAMPLES, "4 scores", "3 scores"]),
    ("eval_fn changes length later", lambda w: w.with_eval(*[torch.ones(4)] * 3, torch.ones(5)), ValueError, [*SAME_SAMPLES, "4 scores", "5 scores"]),
    ("eval_fn vector then number", lambda w: w.with_eval(torch.ones(4), 1.0), ValueError, [*SAME_SAMPLES, "4 scores", "one number"]),
    ("eval_fn number then vector", lambda w: w.with_eval(1.0, torch.ones(4)), ValueError, [*SAME_SAMPLES, "one number", "4 scores"]),
    ("eval_fn later text", lambda w: w.with_eval(1.0, 1.0, "1"), TypeError, SCORES),
    ("eval_fn zeroes weights", lambda w: w.analyzer(eval_fn=no_grad_zero).analyze(verbose=False), Written, CHANGED),
    ("eval_fn trains", lambda w: w.analyzer(eval_fn=train_step).analyze("quantization", verbose=False), Written, CHANGED),
    ("eval_fn loads weights", lambda w: w.analyzer(eval_fn=reload).sweep(verbose=False), Written, CHANGED),
    # results
    ("top negative", lambda w: result().top(-1), ValueError, ["n is a whole number, 0 or more", "-1"]),
    ("top fraction", lambda w: result().top(2.5), ValueError, ["n is a whole number, 0 or more", "2.5"]),
    ("top True", lambda w: result().top(True), ValueError, ["n is a whole number, 0 or more", "True"]),
    ("summary negative", lambda w: result().summary(top=-1), ValueError, ["0 or more", "-1"]),
    ("curve unknown", lambda w: SweepResult([result()]).curve("conv3"), KeyError, ["unknown layer 'conv3'", "'conv1'"]),
    # targets
    ("target above max", lambda w: w.targets(target_pct=95), ValueError, ["target_pct 95", "[0, 90]", "max_pct"]),
    ("target below min", lambda w: w.targets(target_pct=5, min_pct=10), ValueError, ["target_pct 5", "[10, 90]", "min_pct"]),
    ("target above sweep max", lambda w: w.targets(SweepResult([result()]), target_pct=95), ValueError, ["target_pct 95", "[0, 90]"]),
    ("target min above max", lambda w: w.targets(min_pct=60, max_pct=40), ValueError, ["min_pct 60", "max_pct 40"]),
    ("target 150", lambda w: w.targets(target_pct=150), ValueError, [*PCT, "target_pct", "150"]),
    ("target text", lambda w: w.targets(target_pct="50"), ValueError, [*PCT, "target_pct", "'50'"]),
    ("target NaN", lambda w: w.targets(target_pct=NAN), ValueError, [*PCT, "target_pct", "nan"]),
    ("target True", lambda w: w.targets(target_pct=True), ValueError, [*PCT, "target_pct", "True"]),
    ("target None", lambda w: w.targets(target_pct=None), ValueError, [*PCT, "target_pct", "None"]),
    ("target min negative", lambda w: w.targets(min_pct=-1), ValueError, [*PCT, "min_pct", "-1"]),
    ("target max 101", lambda w: w.targets(max_pct=101), ValueError, [*PCT, "max_pct", "101"]),
    ("target gamma NaN", lambda w: w.targets(gamma=NAN), ValueError, ["gamma is a number", "nan"]),
    ("target of bits", lambda w: w.targets(result("quantization", 8)), ValueError, ["quantization", "no percent targets", "to_bit_plan"]),
    ("target of a sweep of bits", lambda w: w.targets(SweepResult([result("quantization", 8)])), ValueError, ["bits", "to_bit_plan"]),
    ("target nothing measured", lambda w: w.targets(unmeasured()), ValueError, ["no layer of this result can be compressed"]),
    ("target nothing measured in a sweep", lambda w: w.targets(SweepResult([unmeasured()])), ValueError, ["no layer of this", "can be compressed"]),
    # conv2 has 216 of 390 weights (108 + 216 + 36 + 30) and must stay at 0: at most 90 % of 174 weights
    ("target out of reach", lambda w: w.targets(result(drops=(0, NAN, 0, 0)), target_pct=50), ValueError, ["conv2", "between 0 and 40.15"]),
    ("target out of reach min", lambda w: w.targets(result(drops=(0, NAN, 0, 0)), target_pct=60, min_pct=20), ValueError, ["conv2", "between 20 and 51.23"]),
    ("target beyond the sweep", lambda w: w.targets(SweepResult([result(level=40)]), target_pct=60), ValueError, ["out of reach", "between 0 and 40"]),
    ("target unknown layer", lambda w: w.targets(result(tied1=0, fcs=35, drops=(0,) * 9)), KeyError, ["unknown layer 'fcs'", "'fc'"]),
    ("target other model", lambda w: w.targets(model=FOREIGN), KeyError, ["unknown layer 'conv1'", "'0'"]),
    ("target other size", lambda w: w.targets(result(conv2=150)), ValueError, ["conv2", "150", "222"]),
    ("target other size in a sweep", lambda w: w.targets(SweepResult([result(conv2=150)])), ValueError, ["conv2", "150", "222"]),
    ("target model forgotten", lambda w: result().to_layer_targets(50), TypeError, ["nn.Module", "int"]),
    ("targets 150", lambda w: LayerTargets({"fc": 150}), ValueError, [*PCT, "'fc'", "150"]),
    ("targets text", lambda w: LayerTargets({"fc": "50"}), ValueError, [*PCT, "'fc'", "'50'"]),
    ("targets unit", lambda w: LayerTargets({"fc": 0.5}, unit="fraction"), ValueError, ["'percent' or 'bits'", "'fraction'"]),
    ("targets bits", lambda w: LayerTargets({"fc": 50}, unit="bits"), ValueError, [*BITS, "'fc'", "50"]),
    ("targets bits as fractions", lambda w: LayerTargets({"fc": 8}, unit="bits").as_fractions(), ValueError, ["percent", "bits"]),
    ("targets mean unknown", lambda w: LayerTargets({"fcc": 8}).mean(w.model), KeyError, ["unknown layer 'fcc'", "'fc'"]),
    ("targets mean of none", lambda w: LayerTargets().mean(w.model), ValueError, ["no targets"]),
    ("targets mean of tied", lambda w: LayerTargets({"tied1": 8, "tied2": 9}).mean(w.model), ValueError, ["tied1", "tied2", "shares its weight"]),
    # files
    ("file of targets", lambda w: SensitivityResult.from_json(w.saved(LayerTargets({"fc": 5}))), ValueError, ["holds LayerTargets", "SensitivityResult"]),
    ("file of a result", lambda w: LayerTargets.from_json(w.saved(result())), ValueError, ["holds SensitivityResult", "LayerTargets", "saved.json"]),
    ("file of one level", lambda w: SweepResult.from_json(w.saved(result())), ValueError, ["holds SensitivityResult", "SweepResult"]),
    ("file of a sweep", lambda w: SensitivityResult.from_json(w.saved(SweepResult([result()]))), ValueError, ["holds SweepResult", "SensitivityResult"]),
    ("file of a plain dict", lambda w: LayerTargets.from_json(w.file({"fc": 50})), ValueError, ["found.json", "something else", "LayerTargets"]),
    ("file of a list", lambda w: SweepResult.from_json(w.file([1, 2])), ValueError, ["found.json", "something else", "SweepResult"]),
    ("file of CSV", lambda w: SensitivityResult.from_json(w.saved(result(), "csv")), ValueError, ["saved.csv", "SensitivityResult"]),
    ("file cut short", lambda w: SensitivityResult.from_json(w.file('{"kind": "Sensi')), ValueError, ["found.json", "SensitivityResult"]),
    ("file empty", lambda w: LayerTargets.from_json(w.file("")), ValueError, ["found.json", "not a LayerTargets"]),
    ("file of bytes", lambda w: LayerTargets.from_json(w.file(b"\x80\x02\xff")), ValueError, ["found.json", "not a LayerTargets"]),
    ("file incomplete", lambda w: SensitivityResult.from_json(w.file({"kind": "SensitivityResult"})), ValueError, ["found.json", "SensitivityResult"]),
    ("file incomplete targets", lambda w: LayerTargets.from_json(w.file({"kind": "LayerTargets"})), ValueError, ["found.json", "LayerTargets"]),
    (
        "file with a bad target",
        lambda w: LayerTargets.from_json(w.file({"kind": "LayerTargets", "unit": "percent", "targets": {"fc": 150}})),
        ValueError,
        [*PCT, "'fc'", "150"],
    ),
    # Sparsifier
    ("sparsifier context", lambda w: Sparsifier(w.model, context="both"), ValueError, ["'local' or 'global'", "'both'"]),
    ("sparsifier granularity", lambda w: Sparsifier(w.model, "filters"), ValueError, ["unknown granularity", "'filter'"]),
    ("sparsifier global n:m", lambda w: Sparsifier(w.model, "2:4", "global"), ValueError, ["2:4", "context='local'"]),
    ("sparsifier criteria", lambda w: Sparsifier(w.model, criteria="l1"), TypeError, ["criteria is one of", "'l1'"]),
    ("sparsifier criteria data", lambda w: Sparsifier(w.model, criteria=taylor), ValueError, ["taylor", "calibration_data"]),
    ("sparsifier layer type", lambda w: Sparsifier(w.model, layer_type=["Conv2d"]), TypeError, ["layer_type", "a module class", "'Conv2d'"]),
    ("sparsifier no layers", lambda w: Sparsifier(nn.ReLU()), ValueError, NO_LAYER),
    ("sparsifier 150", lambda w: Sparsifier(w.model).sparsify_model(150), ValueError, [*PCT, "150"]),
    ("sparsifier text", lambda w: Sparsifier(w.model).sparsify_model("50"), ValueError, [*PCT, "'50'"]),
    ("sparsifier list", lambda w: Sparsifier(w.model).sparsify_model([50, 50]), ValueError, [*PCT, "[50, 50]"]),
    ("sparsifier NaN", lambda w: Sparsifier(w.model).sparsify_model(NAN), ValueError, [*PCT, "nan"]),
    ("sparsifier unknown", lambda w: Sparsifier(w.model).sparsify_model({"conv1": 50, "fcc": 50}), KeyError, ["unknown layer 'fcc'", "'fc'"]),
    ("sparsifier not compressible", lambda w: Sparsifier(w.model).sparsify_model({"bn": 50}), KeyError, ["'bn'", "BatchNorm2d"]),
    ("sparsifier one bad", lambda w: Sparsifier(w.model).sparsify_model({"conv1": 50, "fc": 150}), ValueError, [*PCT, "'fc'", "150"]),
    ("sparsifier tied", lambda w: Sparsifier(w.model).sparsify_model({"tied1": 50, "tied2": 60}), ValueError, ["tied1", "tied2", "differ"]),
    ("sparsifier bits", lambda w: Sparsifier(w.model).sparsify_model(LayerTargets(BITS_TARGETS, "bits")), ValueError, ["percent", "bits"]),
    ("sparsifier global targets", lambda w: Sparsifier(w.model, context="global").sparsify_model({"fc": 50}), ValueError, ["global", "context='local'"]),
    ("sparsifier other type", lambda w: Sparsifier(w.model, layer_type=nn.Conv2d).sparsify_model({"fc": 50}), KeyError, ["'fc'", "Linear", "layer_type"]),
    ("sparsifier n:m too much", lambda w: Sparsifier(w.model, "2:4").sparsify_model(60), ValueError, ["2:4", "50 %", "60 %"]),
    ("sparsifier n:m inputs", lambda w: Sparsifier(w.model, "2:4").sparsify_model({"conv1": 50}), ValueError, ["conv1", "multiples of 4", "3"]),
    ("sparsifier layer unknown", lambda w: Sparsifier(w.model).sparsify_layer("fcc", 50), KeyError, ["unknown layer 'fcc'", "'fc'"]),
    ("sparsifier layer bn", lambda w: Sparsifier(w.model).sparsify_layer(w.model.bn, 50), KeyError, ["BatchNorm2d", "compressible"]),
    ("sparsifier layer 150", lambda w: Sparsifier(w.model).sparsify_layer(w.model.fc, 150), ValueError, [*PCT, "150"]),
    # SparsifyCallback and schedules
    ("callback 150", lambda w: SparsifyCallback(150), ValueError, [*PCT, "sparsity", "150"]),
    ("callback text", lambda w: SparsifyCallback("50"), ValueError, [*PCT, "'50'"]),
    ("callback list", lambda w: SparsifyCallback([50]), ValueError, [*PCT, "[50]"]),
    ("callback one bad", lambda w: SparsifyCallback({"fc": 150}), ValueError, [*PCT, "'fc'", "150"]),
    ("callback bits", lambda w: SparsifyCallback(LayerTargets(BITS_TARGETS, "bits")), ValueError, ["percent", "bits"]),
    ("callback granularity", lambda w: SparsifyCallback(50, "filters"), ValueError, ["unknown granularity", "'filter'"]),
    ("callback context", lambda w: SparsifyCallback(50, context="both"), ValueError, ["'local' or 'global'", "'both'"]),
    ("callback global n:m", lambda w: SparsifyCallback(50, "2:4", "global"), ValueError, ["2:4", "context='local'"]),
    ("callback global targets", lambda w: SparsifyCallback({"fc": 50}, context="global"), ValueError, ["global", "context='local'"]),
    ("callback n:m too much", lambda w: SparsifyCallback(60, "2:4"), ValueError, ["2:4", "50 %", "60 %"]),
    ("callback criteria", lambda w: SparsifyCallback(50, criteria="l1"), TypeError, ["criteria is one of", "'l1'"]),
    ("callback layer type", lambda w: SparsifyCallback(50, layer_type=["Conv2d"]), TypeError, ["layer_type", "a module class", "'Conv2d'"]),
    # from_learner
    ("learner model", lambda w: SensitivityAnalyzer.from_learner(w.model), TypeError, ["Learner", "Net"]),
    ("learner metric", lambda w: SensitivityAnalyzer.from_learner(w.learner(), metric=5), TypeError, ["metric is", "int"]),
    ("learner criteria", lambda w: SensitivityAnalyzer.from_learner(w.learner(), criteria="l1"), TypeError, ["criteria is one of", "'l1'"]),
    ("learner no data", lambda w: SensitivityAnalyzer.from_learner(w.learner(n_valid=0)), ValueError, ["no validation data", "dl"]),
]


@pytest.mark.parametrize("name,act,error,words", ERRORS, ids=[row[0] for row in ERRORS])
def test_bad_call(name, act, error, words, tmp_path):
    """The right kind of error, the words that help, no evaluation wasted, no trace left"""
    w, needs_baseline = World(tmp_path), name.startswith("criteria")  # a function of the user's is first called for the first unit
    before = fingerprint(w.model)
    with pytest.raises(error) as caught:
        act(w)
    assert caught.type is error
    message = caught.value.args[0]
    assert [word for word in words if word not in message] == [], message
    assert w.calls <= needs_baseline
    assert changes(before, fingerprint(w.model)) == []


def test_table_has_no_row_twice():
    """Ids are names"""
    assert len({row[0] for row in ERRORS}) == len(ERRORS)


@pytest.mark.parametrize("targets,error,word", [({"fcc": 50}, KeyError, "unknown layer 'fcc'"), ({"bn": 50}, KeyError, "BatchNorm2d")])
def test_callback_with_wrong_names_stops_before_training(targets, error, word, tmp_path):
    """Names can only be checked once there is a model: before the first batch"""
    w = World(tmp_path)
    learn, before = w.learner(cbs=SparsifyCallback(targets)), fingerprint(w.model)
    with pytest.raises(error) as caught, learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert word in caught.value.args[0]
    found = fingerprint(w.model)
    for section in ("modules", "parameters", "buffers", "hooks", "state_dict"):
        assert before[section] == found[section]


@pytest.mark.parametrize(
    "act,value",
    [
        (lambda w, v: Sparse(v), 0.4301),
        (lambda w, v: w.analyze("sparsity", v, layers="conv2"), 0.7302),
        (lambda w, v: w.sweep("sparsity", [v, 50], layers="conv2"), 0.7303),
        (lambda w, v: w.targets(target_pct=v), 0.4304),
        (lambda w, v: Sparsifier(w.model).sparsify_model(v), 0.4305),
        (lambda w, v: SparsifyCallback({"fc": v}), 0.4306),
        (lambda w, v: Pruned(v), 0.4308),
        (lambda w, v: w.analyze("pruning", v, layers="conv1"), 0.4309),
    ],
    ids=["perturbation", "analyze", "sweep", "targets", "sparsifier", "callback", "pruned", "pruning"],
)
def test_a_fraction_is_taken_as_percent_and_warns_once(act, value, tmp_path):
    """Half a percent is what `0.5` says, but hardly what was meant"""
    w = World(tmp_path)
    with pytest.warns(UserWarning, match=f"levels are percent: {value} is {value} percent"):
        act(w, value)
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        act(w, value)
    assert not [str(a.message) for a in again if "percent" in str(a.message)]


def test_computed_fractions_do_not_warn(tmp_path):
    """Targets that a formula gave may well be half a percent: on their way into a callback and into a fit as well"""
    w = World(tmp_path)
    targets = LayerTargets({"fc": 0.4307, "conv2": 30})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Sparsifier(w.model).sparsify_model(targets)
        learn = w.learner(cbs=SparsifyCallback(targets))
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    assert not [str(f.message) for f in found if "percent" in str(f.message)]


def test_failed_sparsify_keeps_masks_and_weights(tmp_path):
    """A bad request changes nothing of a good one before it"""
    w = World(tmp_path)
    sp = Sparsifier(w.model)
    sp.sparsify_model({"conv1": 50})
    before, masks = fingerprint(w.model), {n: m.clone() for n, m in sp.masks.items()}
    for bad in ({"fc": 50, "fcc": 50}, {"fc": 50, "conv2": 150}, 150, "50"):
        with pytest.raises((KeyError, ValueError)):
            sp.sparsify_model(bad)
    with pytest.raises(ValueError):
        sp.sparsify_layer("fc", -1)
    assert sp.context == "local"
    assert changes(before, fingerprint(w.model)) == []
    assert list(sp.masks) == list(masks) == ["conv1"] and torch.equal(sp.masks["conv1"], masks["conv1"])


def test_good_calls_beside_the_bad_ones(tmp_path):
    """The table would prove nothing if `World` were refused anyway"""
    w = World(tmp_path)
    plain = w.analyzer(reuse=False)   # reusing saves more than it costs or not, as the clock says
    assert [r.name for r in plain.analyze("sparsity", 50, verbose=False).layers] == list(PARAMS)
    assert {r.name: r.params for r in plain.analyze("quantization", 2, verbose=False).layers} == {**PARAMS, "tied1": 48}
    assert w.calls == 10
    assert w.targets(target_pct=30).mean(w.model) == pytest.approx(30)
    assert w.with_eval(1.0).layers[0].delta == 0 == w.with_data(wanda, w.x).layers[0].delta * 0
    assert SensitivityResult.from_json(w.saved(result())) == result()
    assert w.analyzer(criteria=random, device="cpu").analyze(verbose=False, layers=["tied2"]).layers[0].name == "tied1"
    assert SensitivityAnalyzer.from_learner(w.learner()).analyze(verbose=False).metric_name == "accuracy"


def test_pruning_of_what_is_left_out_is_a_result(tmp_path):
    """The output layer alone, or a level of which nothing is removed: not measured, not ranked, and the reason is there"""
    w = World(tmp_path)
    found = w.analyze("pruning", layers="fc")
    assert [(r.name, r.prunable, math.isnan(r.delta)) for r in found.layers] == [("fc", False, True)] and found.top() == []
    assert "output of the model" in dict(found.skipped)["fc"] and w.calls == 1
    found = w.analyze("pruning", 8, layers="conv1")
    assert not found.layers[0].prunable and "8 % of 4 channels is none" in dict(found.skipped)["conv1"]
    with pytest.raises(ValueError, match="no layer of this result can be compressed"):
        found.to_layer_targets(w.model)
