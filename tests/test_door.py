"""What users hand in, in all its forms: kinds of layers, layers that are quantized already, metrics; what goes with what."""
import functools
import warnings

import fastai.callback.progress  # noqa: F401  gives Learner its `no_bar`
import fastai.losses
import fastai.metrics
import pytest
import sklearn.metrics as skm
import torch
import torch.nn.functional as F
from fastai.data.core import DataLoaders
from fastai.learner import AvgLoss, AvgMetric, AvgSmoothLoss, Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

from fasterai_sens import (
    FineTuned,
    SensitivityAnalyzer,
    Sparsifier,
    SparsifyCallback,
    allocate,
    analyze_degradation,
    changes,
    fingerprint,
    gradual_degradation_recovery,
    search_targets,
    uniform,
)
from fasterai_sens.core.layers import all_units, find_units
from fasterai_sens.measure.learner import falls, learner_metric
from fasterai_sens.methods.sparsify import sparsity_report
from fasterai_sens.plans.applier import Applier


class Small(nn.Module):
    """A convolution, two linear layers, three classes"""

    def __init__(self):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv1d(1, 4, 3), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.fc1(self.conv(x[:, None]).flatten(1)).relu())


def small():
    """The network, the same each time."""
    torch.manual_seed(0)
    return Small()


# Kinds of layers

kinds = {
    "class": nn.Linear,
    "tuple": (nn.Linear,),
    "list": [nn.Linear],
    "set": {nn.Linear},
    "dict keys": {nn.Linear: 1}.keys(),
    "list with two": [nn.Linear, nn.Conv3d],
}


@pytest.mark.parametrize("kind", kinds.values(), ids=kinds)
def test_layer_types_of_any_form(kind):
    """A class, or several in a tuple, list or set, mean the same everywhere."""
    model, x, linear = small(), torch.randn(2, 6), ["fc1", "fc2"]
    analyzer = SensitivityAnalyzer(model, x, lambda m: m(x).mean())
    assert [r.name for r in analyzer.analyze(layer_types=kind, verbose=False).layers] == linear
    assert [r.name for r in analyzer.sweep(levels=[50], layer_types=kind, verbose=False)[0].layers] == linear
    assert list(uniform(model, 50, layer_types=kind)) == linear
    assert [u.name for u in Sparsifier(model, layer_type=kind).units] == linear
    assert SparsifyCallback(50, layer_type=kind).layer_type in ((nn.Linear,), (nn.Linear, nn.Conv3d))
    assert list(search_targets(model, x, lambda m: m(x).square().mean(), 50, layer_types=kind, evaluations=40, verbose=False).plan) == linear


def test_layer_types_that_can_be_read_once():
    """A generator of classes is read once, and used throughout."""
    model, x = small(), torch.randn(2, 6)
    found = search_targets(model, x, lambda m: m(x).square().mean(), 50, layer_types=(k for k in [nn.Linear]), evaluations=40, verbose=False)
    assert list(found.plan) == ["fc1", "fc2"]


# Layers that are quantized already

@pytest.fixture
def quantize_dynamic():
    """torch.ao's function, where this torch has it."""
    found = getattr(getattr(torch.ao, "quantization", None), "quantize_dynamic", None)
    if found is None: pytest.skip("this torch has no torch.ao.quantization.quantize_dynamic")
    if not torch.backends.quantized.supported_engines: pytest.skip("this torch has no engine for quantized layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


def test_dynamically_quantized_layers_are_skipped_with_the_reason(quantize_dynamic):
    """What `quantize_dynamic` replaced is in `skipped`; the rest is measured, and the model comes back."""
    model, x = quantize_dynamic(small().eval(), {"fc1": torch.ao.quantization.default_dynamic_qconfig}), torch.randn(2, 6)
    before = fingerprint(model)
    result = SensitivityAnalyzer(model, x, lambda m: m(x).mean()).analyze(verbose=False)
    assert [r.name for r in result.layers] == ["conv", "fc2"]
    assert [n for n, _ in result.skipped] == ["fc1"] and "quantized already" in dict(result.skipped)["fc1"]
    assert not changes(before, fingerprint(model))
    with pytest.raises(KeyError, match="fc1.*quantized already"): find_units(model, layers=["fc1"])


def test_a_model_of_quantized_layers_says_so(quantize_dynamic):
    """Recurrent layers too; where nothing is left, the error names them."""
    model = quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.ReLU()).eval(), {nn.Linear, nn.LSTM})
    assert [n for n, _ in all_units(model)[1]] == ["0", "1"]
    with pytest.raises(ValueError, match="0: Linear keeps its weights in packed numbers"): find_units(model)


def test_statically_quantized_layers_are_skipped(quantize_dynamic):
    """Convolutions and linear layers that `convert` put in, each once."""
    ao = torch.ao.quantization
    model = nn.Sequential(ao.QuantStub(), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Linear(4, 2), ao.DeQuantStub()).eval()
    model.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    ao.prepare(model, inplace=True)(torch.randn(2, 1, 6))
    ao.convert(model, inplace=True)
    assert [n for n, _ in all_units(model)[1]] == ["1", "3"]


def test_other_packages_layers_of_integers_are_skipped():
    """A weight in a buffer of integers, as GPTQ's layers keep it; buffers that are no weights say nothing."""
    model = small()
    quantized = nn.Module()
    quantized.register_buffer("qweight", torch.zeros(2, 16, dtype=torch.int32))
    model.fc1, model.loss = quantized, nn.CrossEntropyLoss(weight=torch.ones(3))
    model.register_buffer("position_ids", torch.arange(6)[None])
    units, skipped = all_units(model)
    assert [u.name for u in units] == ["conv", "fc2"]
    assert [n for n, _ in skipped] == ["fc1"] and "'qweight' of int32" in skipped[0][1]


def test_torchao_layers_are_skipped():
    """A weight that torchao made of other tensors."""
    torchao = pytest.importorskip("torchao.quantization")
    model = small()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert [u.name for u in all_units(model)[0]] == ["conv"]
    assert {"fc1", "fc2"} == {n for n, why in all_units(model)[1] if "quantized" in why}


# Whether less of a metric is better

lower_fastai = {
    "rmse": fastai.metrics.rmse,
    "exp_rmspe": fastai.metrics.exp_rmspe,
    "perplexity": fastai.metrics.perplexity,
    "error_rate": fastai.metrics.error_rate,
    "BrierScore": fastai.metrics.BrierScore(),
    "HammingLoss": fastai.metrics.HammingLoss(),
    "BrierScoreMulti": fastai.metrics.BrierScoreMulti(),
    "HammingLossMulti": fastai.metrics.HammingLossMulti(),
    "mse": fastai.metrics.mse,
    "mae": fastai.metrics.mae,
    "msle": fastai.metrics.msle,
    "Perplexity": fastai.metrics.Perplexity(),
    "LossMetric": fastai.metrics.LossMetric("part"),
    "LossMetrics": fastai.metrics.LossMetrics("part")[0],
    "BaseLoss": fastai.losses.BaseLoss(nn.MSELoss),
    "CrossEntropyLossFlat": fastai.losses.CrossEntropyLossFlat(),
    "FocalLoss": fastai.losses.FocalLoss(),
    "FocalLossFlat": fastai.losses.FocalLossFlat(),
    "BCEWithLogitsLossFlat": fastai.losses.BCEWithLogitsLossFlat(),
    "BCELossFlat": fastai.losses.BCELossFlat(),
    "MSELossFlat": fastai.losses.MSELossFlat(),
    "L1LossFlat": fastai.losses.L1LossFlat(),
    "LabelSmoothingCrossEntropy": fastai.losses.LabelSmoothingCrossEntropy(),
    "LabelSmoothingCrossEntropyFlat": fastai.losses.LabelSmoothingCrossEntropyFlat(),
    "DiceLoss": fastai.losses.DiceLoss(),
}
higher_fastai = {
    "accuracy": fastai.metrics.accuracy,
    "top_k_accuracy": fastai.metrics.top_k_accuracy,
    "APScoreBinary": fastai.metrics.APScoreBinary(),
    "BalancedAccuracy": fastai.metrics.BalancedAccuracy(),
    "CohenKappa": fastai.metrics.CohenKappa(),
    "F1Score": fastai.metrics.F1Score(),
    "FBeta": fastai.metrics.FBeta(beta=2),
    "Jaccard": fastai.metrics.Jaccard(),
    "Precision": fastai.metrics.Precision(),
    "Recall": fastai.metrics.Recall(),
    "RocAuc": fastai.metrics.RocAuc(),
    "RocAucBinary": fastai.metrics.RocAucBinary(),
    "MatthewsCorrCoef": fastai.metrics.MatthewsCorrCoef(),
    "accuracy_multi": fastai.metrics.accuracy_multi,
    "APScoreMulti": fastai.metrics.APScoreMulti(),
    "F1ScoreMulti": fastai.metrics.F1ScoreMulti(),
    "FBetaMulti": fastai.metrics.FBetaMulti(beta=2),
    "JaccardMulti": fastai.metrics.JaccardMulti(),
    "MatthewsCorrCoefMulti": fastai.metrics.MatthewsCorrCoefMulti(),
    "PrecisionMulti": fastai.metrics.PrecisionMulti(),
    "RecallMulti": fastai.metrics.RecallMulti(),
    "RocAucMulti": fastai.metrics.RocAucMulti(),
    "ExplainedVariance": fastai.metrics.ExplainedVariance(),
    "R2Score": fastai.metrics.R2Score(),
    "PearsonCorrCoef": fastai.metrics.PearsonCorrCoef(),
    "SpearmanCorrCoef": fastai.metrics.SpearmanCorrCoef(),
    "foreground_acc": fastai.metrics.foreground_acc,
    "Dice": fastai.metrics.Dice(),
    "DiceMulti": fastai.metrics.DiceMulti(),
    "JaccardCoeff": fastai.metrics.JaccardCoeff(),
    "JaccardCoeffMulti": fastai.metrics.JaccardCoeffMulti(),
    "CorpusBLEUMetric": fastai.metrics.CorpusBLEUMetric(),
}
wrappers = {"AccumMetric", "skm_to_fastai", "optim_metric"}   # what they wrap is what counts: see below


class Quality:
    """A metric whose name says nothing"""

    def __call__(self, preds, targs):
        return (preds - targs).square().mean()


class WithWord(Quality):
    """The same, that says it"""

    higher_is_better = False


def squared_error(preds, targs):
    """A function of the user's"""
    return (preds - targs).square().mean()


@functools.wraps(squared_error)
def decorated(*args):
    """The same, decorated"""
    return squared_error(*args)


others = {   # name -> metric, whether lower is better; None: asks
    "partial of a loss": (functools.partial(F.mse_loss, reduction="mean"), True),
    "partial of accuracy": (functools.partial(fastai.metrics.accuracy, axis=1), False),
    "partial of a partial": (functools.partial(functools.partial(squared_error)), True),
    "AccumMetric of a loss": (fastai.metrics.AccumMetric(squared_error), True),
    "AccumMetric with a name": (fastai.metrics.AccumMetric(squared_error, name="q"), True),
    "AccumMetric of a lambda": (fastai.metrics.AccumMetric(lambda p, t: 0.), None),
    "AvgMetric": (AvgMetric(fastai.metrics.mse), True),
    "AvgMetric of a loss object": (AvgMetric(fastai.losses.CrossEntropyLossFlat()), True),
    "AvgMetric of accuracy": (AvgMetric(fastai.metrics.accuracy), False),
    "AvgLoss": (AvgLoss(), True),
    "AvgSmoothLoss": (AvgSmoothLoss(), True),
    "optim_metric up": (fastai.metrics.optim_metric(fastai.metrics.accuracy_multi, "thresh", (0, 1)), False),
    "optim_metric down": (fastai.metrics.optim_metric(squared_error, "thresh", (0, 1), do_neg=False), True),
    "decorated": (decorated, True),
    "object": (Quality(), None),
    "object that says so": (WithWord(), True),
    "lambda": (lambda p, t: 0., None),
    "unknown name": (Quality.__call__, None),
    "skm hamming": (fastai.metrics.skm_to_fastai(skm.hamming_loss), True),
    "skm max_error": (fastai.metrics.skm_to_fastai(skm.max_error, is_class=False), True),
    "skm mean_poisson_deviance": (fastai.metrics.skm_to_fastai(skm.mean_poisson_deviance, is_class=False), True),
    "skm median_absolute_error": (fastai.metrics.skm_to_fastai(skm.median_absolute_error, is_class=False), True),
    "skm d2_absolute_error_score": (fastai.metrics.skm_to_fastai(skm.d2_absolute_error_score, is_class=False), False),
    "skm top_k": (fastai.metrics.skm_to_fastai(skm.top_k_accuracy_score), False),
    "skm average precision": (fastai.metrics.skm_to_fastai(skm.average_precision_score), False),
    "skm zero one": (fastai.metrics.skm_to_fastai(skm.zero_one_loss), True),
    "skm renamed to the contrary": (fastai.metrics.skm_to_fastai(skm.hamming_loss, name="accuracy"), None),
    "cosine similarity": (F.cosine_similarity, False),
    "kl_div": (F.kl_div, True),
    "pairwise distance": (nn.PairwiseDistance(), True),
}


def test_the_table_has_all_of_fastai():
    """Every public name of `fastai.losses` and `fastai.metrics` is in one of the tables."""
    assert {*lower_fastai, *higher_fastai, *wrappers} == {*fastai.metrics.__all__, *fastai.losses.__all__}


@pytest.mark.parametrize("metric", lower_fastai.values(), ids=lower_fastai)
def test_falls_for_fastai(metric):
    """Losses and errors of fastai: as a Learner names them, by themselves, and as its first metric."""
    check_direction(metric, lower=True)


@pytest.mark.parametrize("metric", higher_fastai.values(), ids=higher_fastai)
def test_rises_for_fastai(metric):
    """Metrics of fastai of which more is better."""
    check_direction(metric, lower=False)


torch_losses = [name for name in vars(nn) if name.endswith("Loss")] + [name for name in vars(F) if name.endswith("loss") or "cross_entropy" in name]


@pytest.mark.parametrize("name", torch_losses)
def test_falls_for_torch(name):
    """Every loss of `torch.nn` and `torch.nn.functional`, given as it is made: a function, a class, or an object."""
    loss = getattr(nn, name, None) or getattr(F, name)
    assert falls(loss, name) and falls(loss, "metric") and falls(AvgMetric(loss), name)


@pytest.mark.parametrize(("metric", "lower"), others.values(), ids=others)
def test_falls_for_what_is_wrapped(metric, lower):
    """Wrapped functions count as what they wrap; what does not tell is asked for."""
    check_direction(metric, lower)


def learner(metrics=(), loss=None):
    """A Learner of two classes on random numbers"""
    torch.manual_seed(0)
    ds = TensorDataset(torch.randn(12, 3), torch.randint(0, 2, (12,)))
    return Learner(DataLoaders.from_dsets(ds, ds, bs=6, device="cpu", num_workers=0), nn.Linear(3, 2), loss_func=loss or nn.CrossEntropyLoss(), metrics=list(metrics))


any_learner = learner()


def check_direction(metric, lower):
    """What is taken for the direction, under the name that a Learner shows"""
    name, _ = learner_metric(any_learner, metric)
    if lower is None:
        with pytest.raises(ValueError, match="higher_is_better=True or higher_is_better=False"): falls(metric, name)
    else: assert falls(metric, name) is lower


@pytest.mark.parametrize("given", [True, False], ids=["given", "the Learner's own"])
def test_from_learner_takes_the_direction_or_asks(given):
    """By the metric that is given, or by the Learner's first, which is looked into as well."""
    def analyzer(metric, **more): return SensitivityAnalyzer.from_learner(*((learner(), metric) if given else (learner([metric]),)), **more)

    assert not analyzer(fastai.metrics.msle).higher_is_better
    assert not analyzer(AvgMetric(fastai.losses.CrossEntropyLossFlat())).higher_is_better
    assert analyzer(fastai.metrics.F1Score()).higher_is_better
    unknown = AvgMetric(lambda p, t: 0.)
    with pytest.raises(ValueError, match="lambda.*higher_is_better=True or higher_is_better=False"): analyzer(unknown)
    for told in (True, False): assert analyzer(unknown, higher_is_better=told).higher_is_better is told
    assert not analyzer(unknown, metric_name="pixel error").higher_is_better


def test_a_loss_metric_can_be_measured():
    """A part of the loss that the loss function keeps, as `LossMetric` reads it."""
    class Parts(nn.Module):
        """Cross entropy, kept under a name"""
        def forward(self, preds, targs):
            self.part = F.cross_entropy(preds, targs)
            return self.part

    learn = learner(loss=Parts())
    result = SensitivityAnalyzer.from_learner(learn, fastai.metrics.LossMetric("part"), objective=None).analyze(verbose=False)
    x, y = learn.dls.valid_ds.tensors
    assert result.baseline_metric == pytest.approx(float(F.cross_entropy(learn.model(x), y)), abs=1e-6) and not result.higher_is_better


def test_a_stranger_with_a_direction_of_its_own():
    """torchmetrics' classes say `higher_is_better`; that counts, whatever the name."""
    class Accuracy(nn.Module):
        """As torchmetrics has it, with the sign turned"""
        higher_is_better = False

    assert falls(Accuracy(), "accuracy")


def test_recovery_asks_too():
    """`gradual_degradation_recovery` with a lambda asks before it trains; with the answer it runs."""
    learn = learner()
    metric = lambda p, t: (p.argmax(1) == t).float().mean()  # noqa: E731
    before = fingerprint(learn.model)
    with pytest.raises(ValueError, match="higher_is_better="): gradual_degradation_recovery(learn, (20,), metric=metric, verbose=False)
    assert not changes(before, fingerprint(learn.model))
    assert gradual_degradation_recovery(learn, (20,), metric=metric, higher_is_better=True, verbose=False).higher_is_better


# Filters go with their bias

def conv1d(n_out, n_in):
    """Hugging Face's linear layer, with a bias that is not zero"""
    from transformers.pytorch_utils import Conv1D
    layer = Conv1D(n_out, n_in)
    nn.init.normal_(layer.bias)
    return layer


def attention(**kwargs):
    """Attention with a bias that is not zero"""
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **kwargs)
    nn.init.normal_(layer.in_proj_bias)
    return layer


with_filters = {   # layer, an input; filters are counted along axis 1 of the output, or the last one
    "conv": lambda: (nn.Conv2d(4, 8, 3), torch.ones(1, 4, 5, 5)),
    "grouped": lambda: (nn.Conv1d(4, 8, 3, groups=2), torch.ones(1, 4, 5)),
    "depthwise": lambda: (nn.Conv1d(4, 8, 3, groups=4), torch.ones(1, 4, 5)),
    "transposed": lambda: (nn.ConvTranspose2d(4, 8, 3), torch.ones(1, 4, 5, 5)),
    "transposed, grouped": lambda: (nn.ConvTranspose1d(4, 8, 3, groups=2), torch.ones(1, 4, 5)),
    "linear": lambda: (nn.Linear(4, 8), torch.ones(1, 4)),
    "Conv1D": lambda: (conv1d(8, 4), torch.ones(1, 4)),
}


def dead(layer, x):
    """Which outputs are 0 for inputs that are not: a filter without bias, but not one with it."""
    with torch.no_grad(): out = layer(x + torch.randn(x.shape))
    return (out == 0).transpose(0, 1).flatten(1).all(1)


@pytest.mark.parametrize("make", with_filters.values(), ids=with_filters)
def test_a_dropped_filter_says_nothing(make):
    """At 50 % half of the outputs are exactly 0 while it is measured, kept sparse, or carried out; smaller blocks leave the bias alone."""
    torch.manual_seed(0)
    layer, x = make()
    model = nn.Sequential(layer)
    before, seen = fingerprint(model), []

    def score(m):
        seen.append(int(dead(m[0], x).sum()))
        return 1.

    SensitivityAnalyzer(model, x, score).analyze(granularity="filter", verbose=False)
    SensitivityAnalyzer(model, x, score).analyze(granularity="weight", verbose=False)
    search_targets(model, x, score, 50, granularity="filter", evaluations=20, plans={"mine": {"0": 50}}, verbose=False)
    analyze_degradation(model, x, score, [60], "sparsity", cost="params", granularity="filter", runs=0, verbose=False)
    assert not changes(before, fingerprint(model))
    assert seen[:4] == [0, 4, 0, 0] and max(seen[4:]) >= 4
    sparsifier = Sparsifier(model, "filter")
    sparsifier.sparsify_model(50)
    assert int(dead(layer, x).sum()) == 4 and int((layer.bias == 0).sum()) == 4
    assert sparsity_report(sparsifier.units)[0]["weights"] == layer.weight.numel() and sparsity_report(sparsifier.units)[0]["percent"] == 50
    with torch.no_grad(): layer.bias.add_(1)
    sparsifier.apply_masks()
    assert int((layer.bias == 0).sum()) == 4
    sparsifier.remove()
    with torch.no_grad(): layer.bias.add_(1)
    sparsifier.apply_masks()
    assert int((layer.bias == 0).sum()) == 0


def test_plans_drop_filters_with_their_bias():
    """A plan that is tried and one that is carried out are the same model, bias by bias."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 6), torch.randint(3, (60,))
    model = small()
    sweep = SensitivityAnalyzer(model, x[:1], lambda m: F.cross_entropy(m(x), y, reduction="none"), higher_is_better=False).sweep(
        levels=[25, 50, 75], granularity="filter", verbose=False)
    plan = allocate(sweep, "60%", model=model, sample=x[:1])
    applier = Applier(model, x[:1], ("sparsity",), settings=plan.settings)
    with applier(plan), torch.no_grad(): tried, biases = model(x), [int((m.bias == 0).sum()) for m in (model.conv, model.fc1, model.fc2)]
    plan.apply(model)
    assert sum(biases) > 0 and torch.equal(model(x), tried)


@pytest.mark.parametrize("kdim", [None, 6], ids=["in one", "apart"])
def test_attention_drops_the_bias_of_its_rows(kdim):
    """Query, key and value share one bias; each weight takes along the part that is added to it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": attention(kdim=kdim)})
    before = model.attn.in_proj_bias.detach().clone()
    sparsifier = Sparsifier(model, "filter")
    sparsifier.sparsify_model({u.name: 50 for u in sparsifier.units if "out_proj" not in u.name})
    weights = [model.attn.in_proj_weight] if kdim is None else [getattr(model.attn, f"{n}_proj_weight") for n in "qkv"]
    gone = torch.cat([(w == 0).all(1) for w in weights])
    assert int(gone.sum()) == 12 and torch.equal(model.attn.in_proj_bias, before.masked_fill(gone, 0))


def test_tied_layers_drop_the_bias_of_those_that_hold_it_the_same_way():
    """Two layers with one weight lose the same entries of both biases; the one that holds it transposed has other outputs, and keeps its bias."""
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 6), plain=nn.Linear(6, 6, bias=False)))
    model.b.weight, model.plain.weight = model.a.weight, model.a.weight
    model.c.weight = nn.Parameter(model.a.weight.data.t())
    kept = model.c.bias.detach().clone()
    Sparsifier(model, "filter").sparsify_model(50)
    gone = (model.a.weight == 0).all(1)
    assert int(gone.sum()) == 3 and torch.equal(model.a.bias == 0, gone) and torch.equal(model.b.bias == 0, gone) and torch.equal(model.c.bias, kept)


def test_the_bias_of_dropped_filters_stays_zero_in_training():
    """`SparsifyCallback` with momentum and weight decay: half of the filters are gone with their bias; with weights as blocks biases learn on."""
    for granularity, zeros in (("filter", 4), ("weight", 0)):
        learn = learner()
        learn.model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        learn.opt_func = functools.partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, weight_decay=.1)
        with learn.no_bar(), learn.no_logging(): learn.fit(3, .1, cbs=SparsifyCallback({"0": 50}, granularity))
        layer = learn.model[0]
        assert int((layer.bias == 0).sum()) == zeros
        if zeros: assert torch.equal(layer.bias == 0, (layer.weight == 0).all(1))


def test_trained_copies_hold_the_bias_of_dropped_filters():
    """`FineTuned` scores what `SparsifyCallback` would leave: the bias of a filter that is gone does not come back, others learn, also from 0."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), torch.randn(20, 3)
    nn.init.zeros_(model[1].bias)

    def train(m):
        opt = torch.optim.Adam(m.parameters(), .1)
        for _ in range(5):
            opt.zero_grad()
            (m(x) - 1).square().mean().backward()
            opt.step()

    seen = []

    def score(m):
        seen.append((int((m[0].bias == 0).sum()), int((m[1].bias == 0).sum())))
        return (m(x) - 1).square().mean(1)

    SensitivityAnalyzer(model, x[:1], FineTuned(train, score), higher_is_better=False).analyze(granularity="filter", layers=["0"], verbose=False)
    assert seen == [(0, 0), (4, 0)]
