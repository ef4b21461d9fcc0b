"""What keeps a weight of before: `torch.autocast`, whose copies last until its outermost block ends, and models that hold weights of their own."""

import copy
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn
from toys import Net

from fasterai_sens import (
    FineTuned,
    PruneCallback,
    Pruner,
    QuantizeCallback,
    SensitivityAnalyzer,
    Sparse,
    Sparsifier,
    SparsifyCallback,
    analyze_degradation,
    changes,
    compress_to_size,
    compress_with_layer_sensitivity,
    evaluation,
    fingerprint,
    gradual_degradation_recovery,
    kl_from,
    large_final,
    leave_no_trace,
    quantize_model,
    reestimate_norms,
    search_plan,
    search_targets,
    taylor,
    validate_compression_target,
    wanda,
)  # fmt: skip
from fasterai_sens.core.layers import all_units
from fasterai_sens.measure.loop import measure
from fasterai_sens.methods.criteria import bind

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:.*does not require any gradients.*")


def network(times=2):
    """Two convolutions, batch norm, a layer that is called several times, and a head; every weight asks for gradients"""
    torch.manual_seed(0)

    def forward(m, x):
        x = m.b(m.norm(m.a(x)).relu()).relu().flatten(1)
        for _ in range(times):
            x = m.twice(x).relu()
        return m.head(x)

    net = Net(
        forward,
        a=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), b=nn.Conv2d(8, 4, 3, stride=2), twice=nn.Linear(16, 16), head=nn.Linear(16, 5),
    )  # fmt: skip
    net.norm.running_mean.uniform_(-0.2, 0.2)
    net.norm.running_var.uniform_(0.5, 1.5)
    return net.eval()


X = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 5
DATA = [(X[:12], Y[:12]), (X[12:], Y[12:])]


def low(**options):
    """Autocast as it can be run on a CPU"""
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def losses(model):
    """Cross-entropy of each sample, in whatever mode of gradients the caller has"""
    return F.cross_entropy(model(X).float(), Y, reduction="none").detach()


def without_gradients(model):
    """The same under `no_grad`"""
    with torch.no_grad():
        return losses(model)


def in_a_block_of_its_own(model):
    """The same in an inner autocast that insists on its cache"""
    with low(cache_enabled=True):
        return losses(model)


def pair(model):
    """Accuracy and loss"""
    out = model(X).float().detach()
    return (out.argmax(1) == Y).float(), F.cross_entropy(out, Y, reduction="none")


EVALS = dict(grad=losses, no_grad=without_gradients, nested=in_a_block_of_its_own)


def fill(model):
    """Copies of all weights in the cache, with gradients and without"""
    model(X)
    with torch.no_grad():
        model(X)


def in_both(do, make=network):
    """What `do(model)` returns inside an outer autocast with a full cache, and inside one without a cache; the outputs of the model after it"""
    found = []
    for kept in (True, False):
        model = make()
        torch.manual_seed(2)
        with low(cache_enabled=kept):
            fill(model)
            found.append((do(model), model(X).detach().float()))
    return found


def assert_same(a, b):
    """Equal to the bit, through tensors, tuples, lists and dicts"""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (a != a and b != b)


def rows(results):
    """All figures of a sweep or of one result"""
    results = results if isinstance(results, list | tuple) else [results]
    return [(r.compression_level, x.name, x.compressed_metric, x.delta, x.stderr, x.objective_delta) for r in results for x in r.layers]


def analyzer(model, eval_fn=losses, **options):
    """Losses, so that every bit counts"""
    return SensitivityAnalyzer(model, X[:2], eval_fn, higher_is_better=False, **options)


def check_analysis(do):
    """The figures agree, most of them are damages, and the model is the one of before afterwards"""
    (with_cache, after), (without, before) = in_both(do)
    assert_same(with_cache, without)
    assert_same(after, before)
    with low():
        assert_same(after, network()(X).detach().float())
    deltas = [delta for _, _, _, delta, _, _ in with_cache]
    assert sum(d != 0 and d == d for d in deltas) > len(deltas) / 2


# ---- analyses


@pytest.mark.parametrize("eval_fn", EVALS)
@pytest.mark.parametrize("granularity", ["weight", "row", "kernel", "filter", "channel", "layer", "2:4"])
def test_sparsity(granularity, eval_fn):
    """Every granularity, with and without gradients, and in an inner block"""
    level = {"layer": 100, "2:4": None}.get(granularity, 75)
    check_analysis(lambda m: rows(analyzer(m, EVALS[eval_fn]).analyze(level=level, granularity=granularity, verbose=False)))


@pytest.mark.parametrize("eval_fn", EVALS)
@pytest.mark.parametrize("options", [{}, dict(quant_per_channel=False), dict(quant_group_size=4), dict(quant_symmetric=False), dict(quant_activations="both")], ids=str)
def test_quantization(options, eval_fn):
    """Weights on every grid, and activations"""
    check_analysis(lambda m: rows(analyzer(m, EVALS[eval_fn], calibration_data=X).analyze("quantization", 3, verbose=False, **options)))


@pytest.mark.parametrize("eval_fn", EVALS)
def test_pruning(eval_fn):
    """The same groups as outside, and the same damage"""
    check_analysis(lambda m: rows(analyzer(m, EVALS[eval_fn]).analyze("pruning", verbose=False)))
    with low():
        inside = analyzer(network()).analyze("pruning", verbose=False)
    outside = analyzer(network()).analyze("pruning", verbose=False)
    assert [(x.name, x.prunable, x.group_members) for x in inside.layers] == [(x.name, x.prunable, x.group_members) for x in outside.layers]
    assert sum(x.prunable for x in inside.layers) == 3


@pytest.mark.parametrize("compression", ["sparsity", "quantization", "pruning"])
def test_sweep(compression):
    """One level after the other on the same layer, with an objective"""
    check_analysis(lambda m: rows(list(SensitivityAnalyzer(m, X[:2], pair).sweep(compression, [4, 3, 2] if compression == "quantization" else [75, 90], verbose=False))) + [(0, "", 0, 1, 0, 0)] * 40)


@pytest.mark.parametrize("criterion", [taylor, wanda, large_final])
@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_criteria(compression, criterion):
    """What calibration data says: gradients and norms"""
    check_analysis(lambda m: rows(analyzer(m, criteria=criterion, calibration_data=DATA).analyze(compression, 75, verbose=False)))


@pytest.mark.parametrize("criterion", [taylor, wanda])
def test_references(criterion):
    """Squared gradients and norms themselves, to the bit, also while a layer is compressed; no gradient is missing"""

    def refs(m):
        units = all_units(m)[0]
        found = [bind(criterion, m, units, DATA, X[:2]).refs]
        with Sparse(90)(m, units[0]):
            found.append(bind(criterion, m, units, DATA, X[:2]).refs)
        return [{k: v.float() for k, v in r.items()} for r in found]

    ((dense, sparse), _), (expected, _) = in_both(refs)
    assert_same([dense, sparse], expected)
    assert all(v.any() for v in dense.values())
    assert not all(torch.equal(dense[k], sparse[k]) for k in dense)


def test_perturbation_from_elsewhere():
    """A perturbation that knows nothing of casts: it only has the interface"""

    class Halved:
        """Halves a weight, by hand"""

        level, strength, settings, outlasts_training, method_name = 50, 50, {}, True, "halved"

        def refusal(self, unit):
            """Never"""

        @contextmanager
        def __call__(self, model, unit):
            """Halves it, and puts it back"""
            unit.weight.data.div_(2)
            yield model
            unit.weight.data.mul_(2)

    check_analysis(lambda m: rows(list(measure(m, all_units(m)[0], [Halved()], losses, higher_is_better=False))))


def test_eval_fn_from_data():
    """The library's own evaluations"""

    def do(m):
        away = kl_from(m, [X])
        accuracy = evaluation(DATA, lambda p, t: (p.argmax(1) == t).float(), "kl")
        kl = SensitivityAnalyzer(m, X[:2], away, higher_is_better=False).analyze(level=75, verbose=False)
        both = SensitivityAnalyzer(m, X[:2], accuracy).analyze(level=75, verbose=False)
        assert all(x.objective_delta for x in both.layers)
        return rows(kl) + rows(both)[:1]

    check_analysis(do)


def test_weights_changed_by_the_caller():
    """Inside the block the caller changes weights before the analysis: it measures the model as it is now"""

    def do(m):
        m.head.weight.data.mul_(3)
        found = rows(analyzer(m).analyze(level=75, verbose=False))
        m.head.weight.data.copy_(network().head.weight.data)
        torch.clear_autocast_cache()
        return found

    check_analysis(do)


def test_leave_no_trace_inside_autocast():
    """Whatever a block does, the model after it says what it said before, and the fingerprint agrees"""
    model = network()
    with low():
        fill(model)
        before, mark = model(X).detach(), fingerprint(model)
        with leave_no_trace(model):
            for p in model.parameters():
                p.data.mul_(2)
            torch.clear_autocast_cache()
            assert not torch.equal(model(X), before)
        assert torch.equal(model(X), before)
        assert not changes(mark, fingerprint(model))
        with pytest.raises(KeyboardInterrupt), Sparse(90)(model, all_units(model)[0][0]):
            assert not torch.equal(model(X), before)
            raise KeyboardInterrupt
        assert torch.equal(model(X), before)
        assert torch.is_autocast_cache_enabled()


# ---- for good


def outputs(model):
    """Of the model as it is now, with gradients and without"""
    with torch.no_grad():
        silent = model(X).float()
    return [model(X).detach().float(), silent]


def sparsified(m):
    """One level after another, one layer by itself, masks put back after a step"""
    s, found = Sparsifier(m), []
    for pct in (50, 90):
        s.sparsify_model(pct)
        found += outputs(m)
    s.sparsify_layer("head", 95)
    found += outputs(m)
    for p in m.parameters():
        p.data.add_(0.1)
    s.apply_masks()
    return found + outputs(m)


def quantized(m):
    """In force, taken back, in force once more"""
    found = []
    with quantize_model(m, 2):
        found += outputs(m)
    found += outputs(m)
    applied = quantize_model(m, 3, quant_activations="both", sample=X)
    found += outputs(m)
    applied.remove()
    return found + outputs(m)


def pruned(m):
    """In two steps"""
    p = Pruner(m, 50, example_inputs=X[:2], steps=2)
    p.prune_model()
    found = outputs(m)
    p.prune_model()
    return found + outputs(m)


def smaller(m):
    """Copies of all kinds, used in the same block"""
    found = []
    for compression, size in (("sparsity", 50), ("pruning", 60), ("quantization", 20)):
        found += outputs(compress_to_size(m, X[:2], size, compression, recalibrate=[X] if compression == "pruning" else None).model)
    r = analyzer(m).analyze(level=75, verbose=False)
    return found + outputs(compress_with_layer_sensitivity(m, X[:2], r, 60).model)


def recalibrated(m):
    """Statistics of batch norm behind a layer that has become sparse"""
    Sparsifier(m).sparsify_layer("a", 75)
    reestimate_norms(m, [X])
    return [m.norm.running_mean.clone(), m.norm.running_var.clone(), *outputs(m)]


def planned(m):
    """A plan of sparsity and bits, carried out"""
    from fasterai_sens import allocate

    a = SensitivityAnalyzer(m, X[:2], pair)
    sweeps = [a.sweep("sparsity", [50, 90], verbose=False), a.sweep("quantization", [8, 3], verbose=False)]
    plan = allocate(sweeps, "20%", "bytes", model=m, sample=X[:2])
    plan.apply(m, X[:2])
    return [dict(plan.sparsity), dict(plan.quantization), *outputs(m)]


@pytest.mark.parametrize("do", [sparsified, quantized, pruned, smaller, recalibrated, planned], ids=lambda f: f.__name__)
def test_changes_that_stay(do):
    """The model says at each step what it says without a cache"""
    (found, after), (expected, _) = in_both(do)
    assert_same(found, expected)
    tensors = [t for t in found if isinstance(t, torch.Tensor) and t.shape == after.shape]
    assert any(not torch.equal(t, after) for t in tensors) or not torch.equal(after, network()(X).detach())


# ---- searches, curves, verdicts


def searched(m):
    """Targets"""
    r = search_targets(m, X[:2], losses, 60, higher_is_better=False, evaluations=45, recalibrate=[X], verbose=False)
    return [dict(r.plan), r.baseline_metric, r.predicted_metric, r.measured_metric, [(x["plan"], x["metric"]) for x in r.ranking]]


def searched_plan(m):
    """A plan of several methods"""
    a = analyzer(m)
    sweeps = [a.sweep("sparsity", [50, 90], verbose=False), a.sweep("pruning", [25, 50], verbose=False), a.sweep("quantization", [8, 3], verbose=False)]
    r = search_plan(m, X[:2], losses, sweeps, "20%", "bytes", evaluations=30, verbose=False)
    return [r.baseline_metric, r.predicted_metric, r.measured_metric, [(x["plan"], x["metric"]) for x in r.ranking]]


def curves(m):
    """Metric over size, by all methods"""
    found = []
    for compression, sizes in (("sparsity", (100, 60, 30)), ("pruning", (100, 80, 60)), ("quantization", (100, 60, 35))):
        r = analyze_degradation(m, X[:2], losses, sizes, compression, higher_is_better=False, metric_name="loss", runs=0, recalibrate=[X], verbose=False)
        found.append([(p.size, p.metric, p.drop, p.stderr) for p in r.points])
        assert len({p.metric for p in r.points}) == 3
    return found


def verdict(m):
    """A compressed copy against the original"""
    small = compress_to_size(m, X[:2], 40, "sparsity").model
    v = validate_compression_target(small, m, losses, 0.5, higher_is_better=False, metric_name="loss")
    return [v.verdict, v.metric, v.baseline_metric, v.drop]


def tuned(m):
    """A copy that is trained before it is scored"""

    def train(copied):
        opt = torch.optim.SGD(copied.parameters(), lr=0.1)
        for x, y in DATA * 3:
            opt.zero_grad()
            F.cross_entropy(copied(x).float(), y).backward()
            opt.step()

    fn = FineTuned(train, losses)
    return [fn(m).mean().item(), rows(analyzer(m, fn).analyze(level=75, verbose=False))]


@pytest.mark.parametrize("do", [searched, searched_plan, curves, verdict, tuned], ids=lambda f: f.__name__)
def test_many_evaluations(do):
    """The same plans, curves and figures; the model is as it was"""
    (found, after), (expected, before) = in_both(do)
    assert_same(found, expected)
    assert_same(after, before)
    with low():
        assert_same(after, network()(X).detach().float())


# ---- training


def learner(model, cbs=()):
    """fastai's loop on the toy data"""
    dls = DataLoaders(DataLoader(list(zip(X, Y, strict=True)), bs=12), DataLoader(list(zip(X, Y, strict=True)), bs=12))
    return Learner(dls, model, loss_func=F.cross_entropy, opt_func=SGD, lr=0.1, cbs=cbs, train_bn=False)


CALLBACKS = dict(
    sparse=lambda: SparsifyCallback(75),
    sparse_filters=lambda: SparsifyCallback(50, "filter"),
    taylor=lambda: SparsifyCallback(75, criteria=taylor),
    pruned=lambda: PruneCallback(50, steps=2),
    rounded=lambda: QuantizeCallback(3),
)


class InnerBlock(Callback):
    """Autocast around each forward pass, as fastai's `MixedPrecision` has it on a GPU"""

    order = 10

    def before_fit(self):
        """One object for the whole fit"""
        self.autocast = low()

    def before_batch(self):
        """Before the forward pass"""
        self.autocast.__enter__()

    def after_loss(self):
        """After the loss"""
        self.autocast.__exit__(None, None, None)


@pytest.mark.parametrize("inner", [(), (InnerBlock,)], ids=["", "inner block"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_fit_inside_autocast(name, inner):
    """A whole fit inside an outer block trains as it does without a cache"""

    def do(m):
        learn = learner(m, [CALLBACKS[name](), *(cb() for cb in inner)])
        with learn.no_bar(), learn.no_logging():
            learn.fit(2)
        return [p.detach().clone() for p in m.parameters()] + outputs(m)

    (found, _), (expected, _) = in_both(do, lambda: network(1))
    assert_same(found, expected)


@pytest.mark.parametrize("compression", ["sparsity", "pruning"])
def test_recovery_inside_autocast(compression):
    """Stages with fine-tuning between them"""

    def do(m):
        learn = learner(m)
        with learn.no_bar(), learn.no_logging():
            r = gradual_degradation_recovery(learn, (30, 60), compression=compression, metric=lambda p, t: F.cross_entropy(p.float(), t), higher_is_better=False, verbose=False)
        return [[(h["metric_compressed"], h["metric"]) for h in r.history], [p.detach().clone() for p in m.parameters()], outputs(m)]

    (found, _), (expected, _) = in_both(do, lambda: network(1))
    assert_same(found, expected)


# ---- models and evaluations that hold weights of their own


class Holds(nn.Module):
    """Computes with something that it makes of its layers once"""

    def __init__(self, make, layers=None):
        super().__init__()
        self.layers, self.make, self.held = layers or mlp(), make, {}

    def forward(self, x):
        """What it holds, called"""
        if "held" not in self.held:
            self.held["held"] = self.make(self.layers)
        return self.held["held"](x)


def mlp(**options):
    """Two layers"""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, **options), nn.ReLU(), nn.Linear(16, 4, **options)).eval()


Z, T = torch.randn(40, 8, generator=torch.Generator().manual_seed(3)), torch.arange(40) % 4
SAMPLE = Z[:5]


def loss_of_each(model):
    """Cross-entropy of each sample"""
    with torch.no_grad():
        return F.cross_entropy(model(Z), T, reduction="none")


def loss(model):
    """The same as one number"""
    return loss_of_each(model).mean().item()


def hits(model):
    """Whether each sample is right"""
    with torch.no_grad():
        return (model(Z).argmax(1) == T).float()


def deltas(model, eval_fn=loss_of_each, compression="sparsity", level=None, **options):
    """Of all layers"""
    r = SensitivityAnalyzer(model, options.pop("sample", SAMPLE), eval_fn, higher_is_better=False, metric_name="loss").analyze(compression, level, verbose=False, **options)
    return [x.delta for x in r.layers]


def traced(net):
    """A copy of its own, as an exporter makes one"""
    return torch.jit.freeze(torch.jit.trace(copy.deepcopy(net), SAMPLE))


def frozen_arrays(net):
    """NumPy arrays, as a runtime behind another interface has them"""
    (w, b), (v, c) = [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in (net[0], net[2])]
    return lambda x: torch.from_numpy((x.numpy() @ w.T + b).clip(0) @ v.T + c)


DOORS = dict(
    analyze=lambda m: deltas(m),
    quantization=lambda m: deltas(m, compression="quantization"),
    sweep=lambda m: SensitivityAnalyzer(m, SAMPLE, loss_of_each).sweep(verbose=False),
    search=lambda m: search_targets(m, SAMPLE, loss_of_each, 50, higher_is_better=False, verbose=False),
    degradation=lambda m: analyze_degradation(m, SAMPLE, loss_of_each, (100, 50), "sparsity", higher_is_better=False, metric_name="loss", verbose=False),
    size=lambda m: compress_to_size(m, SAMPLE, 50, "sparsity"),
)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("make", [copy.deepcopy, traced, frozen_arrays])
@pytest.mark.parametrize("door", DOORS)
def test_models_that_compute_with_copies_are_refused(make, door):
    """Whoever asks; and the model is as it was"""
    model = Holds(make)
    model(SAMPLE)
    before = fingerprint(model)
    with pytest.raises(ValueError, match="its output on the sample is the same to the bit"):
        DOORS[door](model)
    assert not changes(before, fingerprint(model))


def test_search_plan_refuses_too():
    """With sweeps of the model as it was before"""
    net = mlp()
    model = Holds(copy.deepcopy, net)
    model(SAMPLE)
    twin = Net(lambda m, x: m.layers(x), layers=net)
    sweeps = SensitivityAnalyzer(twin, SAMPLE, loss_of_each, higher_is_better=False).sweep(verbose=False)
    with pytest.raises(ValueError):
        search_plan(model, SAMPLE, loss_of_each, sweeps, "60%", verbose=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*isinstance.*LeafSpec")
def test_scripted_and_exported_models():
    """No layers are left in them; the message says what to pass instead"""
    net = mlp()
    for m in (torch.jit.trace(net, SAMPLE), torch.jit.freeze(torch.jit.trace(net, SAMPLE)), torch.jit.script(net)):
        with pytest.raises(ValueError, match="scripted or traced.*pass the model as it was before"):
            deltas(m)
    program = torch.export.export(net, (SAMPLE,))
    with pytest.raises(ValueError, match="exported.*pass the model as it was before"):
        deltas(program.module())
    with pytest.raises(TypeError, match="ExportedProgram"):
        deltas(program)


def eval_fns_of_another(net):
    """Evaluations that do not look at the model they are given"""
    other, table = copy.deepcopy(net), loss_of_each(net)
    return dict(
        copy=lambda m: loss_of_each(other), number=lambda m: loss(other), table=lambda m: table,
        pair=lambda m: (hits(other), loss_of_each(other)), kl=evaluation([(Z, T)], lambda p, t: (other(Z).argmax(1) == t).float(), lambda p, t: F.cross_entropy(other(Z), t).detach()),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["copy", "table", "pair", "kl"])
def test_evaluations_of_another_model_are_refused(name):
    """Not one bit of any score changed, though the output did"""
    net = mlp()
    eval_fn, before = eval_fns_of_another(net)[name], fingerprint(net)
    with pytest.raises(ValueError, match="eval_fn does not"):
        deltas(net, eval_fn)
    assert not changes(before, fingerprint(net))
    with pytest.warns(UserWarning, match="eval_fn does not"):
        deltas(net, eval_fn, level=90, layers=["0"])  # one layer: the metric may not depend on it


@pytest.mark.parametrize("compression", ["sparsity", "quantization"])
def test_one_number_of_another_model_is_doubted(compression):
    """A single number may be coarse; a loss hardly is"""
    net = mlp()
    with pytest.warns(UserWarning, match="eval_fn does not"):
        deltas(net, eval_fns_of_another(net)["number"], compression)


def test_searches_and_curves_with_an_evaluation_of_another_model():
    """The same for plans"""
    net = mlp()
    eval_fn = eval_fns_of_another(net)["copy"]
    with pytest.raises(ValueError, match="no score changed by a bit"):
        search_targets(net, SAMPLE, eval_fn, 50, higher_is_better=False, verbose=False)
    with pytest.raises(ValueError, match="no score changed by a bit"):
        analyze_degradation(net, SAMPLE, eval_fn, (100, 60, 40), "sparsity", higher_is_better=False, metric_name="loss", runs=0, verbose=False)
    sweeps = SensitivityAnalyzer(net, SAMPLE, loss_of_each, higher_is_better=False).sweep(verbose=False)
    with pytest.warns(UserWarning, match="no score changed by a bit"):
        search_plan(net, SAMPLE, eval_fn, sweeps, "60%", verbose=False)


def test_accuracy_of_another_model_is_doubted():
    """Shares of few samples can be what they were; if the output moved far, it is said"""
    net = mlp()
    other = copy.deepcopy(net)
    with pytest.warns(UserWarning, match="the metric is too coarse to see it"):
        deltas(net, lambda m: hits(other), level=90)


def separable():
    """A classifier that is right by far: its accuracy does not notice much"""
    net = mlp(bias=False)
    net[0].weight.data = torch.cat([torch.eye(8), -torch.eye(8)])
    net[2].weight.data = torch.zeros(4, 16)
    for c in range(4):
        net[2].weight.data[c, c] = 10.0
    return net


RIGHT = F.one_hot(T, 8).float() * 5 + 0.01 * Z


@pytest.mark.filterwarnings("error")
def test_no_false_alarm_for_robust_models():
    """Accuracy that stays what it is; tiny levels; a model that is sparse or rounded already; perturbations that do nothing"""

    def right(model):
        with torch.no_grad():
            return (model(RIGHT).argmax(1) == T).float()

    assert deltas(separable(), right, sample=RIGHT[:2]) == [0, 0]
    assert deltas(separable(), right, "quantization", 8, sample=RIGHT[:2]) == [0, 0]
    assert deltas(separable(), lambda m: right(m).mean().item(), sample=RIGHT[:2]) == [0, 0]
    assert any(deltas(mlp(), level=1))
    sparse = mlp()
    Sparsifier(sparse).sparsify_model(60)
    assert deltas(sparse, level=50) == [0, 0]
    rounded = mlp()
    with quantize_model(rounded, 4):
        assert deltas(rounded, loss, "quantization", 4) == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.filterwarnings("error")
def test_no_false_alarm_for_odd_models():
    """Layers that the sample does not reach, first layers that are dead or zero, a new head, outputs that are classes, zeros or of no known kind"""
    unused = Net(lambda m, x: m.b(m.a(x).relu()), x1=nn.Linear(3, 3), x2=nn.Linear(3, 3), x3=nn.Linear(3, 3), a=nn.Linear(8, 16), b=nn.Linear(16, 4), x4=nn.Linear(9, 9))
    found = deltas(unused)
    assert found[:3] == [0, 0, 0] and found[-1] == 0 and any(found)
    assert deltas(unused, layers=["x4"]) == [0] and deltas(unused, layers="x1") == [0]
    dead = mlp()
    dead[0].bias.data.fill_(-100.0)
    assert deltas(dead) == [0, 0]
    new = mlp()
    nn.init.zeros_(new[2].weight)
    assert deltas(new, level=90) == [0, 0]
    zero = mlp()
    for p in zero.parameters():
        p.data.zero_()
    assert deltas(zero) == [0, 0]
    first_is_zero = mlp()
    nn.init.zeros_(first_is_zero[0].weight)
    assert any(deltas(first_is_zero, level=90))
    classes = Net(lambda m, x: m.net(x).argmax(1), net=mlp())
    assert len(deltas(classes, lambda m: (m(Z) == T).float())) == 2
    silent = Net(lambda m, x: (m.net(x) - 100).relu(), net=mlp())
    assert deltas(silent, lambda m: m(Z).sum(1).detach()) == [0, 0]
    sure = Net(lambda m, x: {"p": m.net(1e4 * x).softmax(1), "text": "sure"}, net=mlp())
    assert len(deltas(sure, lambda m: m(Z)["p"].amax(1).detach())) == 2
    two_heads = Net(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(8, 4), b=nn.Linear(8, 4))
    assert any(deltas(two_heads, lambda m: F.cross_entropy(m(Z)[0], T, reduction="none").detach()))
    noisy = Net(lambda m, x: m.net(x) + torch.randn(len(x), 4), net=mlp())
    assert any(deltas(noisy, level=90))
    strict = Net(lambda m, x: m.net(x) if m.net[0].weight.std() < 0.21 else {}["noise"], net=mlp())
    assert any(deltas(strict, level=30))


def test_passes_and_evaluations():
    """The question is asked once for each analyzer, with two passes over the sample; an analysis has as many evaluations and passes as before"""
    passes, calls = [], []
    net = Net(lambda m, x: passes.append(len(x)) or m.net(x), net=mlp())
    a = SensitivityAnalyzer(net, SAMPLE, lambda m: calls.append(1) or loss_of_each(m), higher_is_better=False)
    assert passes == [len(SAMPLE)] * 3 and not calls  # one is to see that it runs
    passes.clear()
    a.analyze(verbose=False)
    assert len(calls) == 1 + 2 and passes == [len(Z)] * len(calls)


# ---- compiled

inductor = pytest.importorskip("torch._inductor.config")


@cache
def no_compiler():
    """Why inductor does not work here, or None: it needs a compiler, and a Python that it knows"""
    try:
        with torch.no_grad():
            torch.compile(mlp())(SAMPLE)
    except Exception as e:  # noqa: BLE001  whatever it is, it is not what is tested
        return str(e) or type(e).__name__
    return None


@pytest.fixture
def compiler():
    """Fresh compilations, on which torch sets a limit for each function; skipped without a compiler"""
    if why := no_compiler():
        pytest.skip(f"torch.compile does not work here: {why.splitlines()[0]}")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_frozen_models_are_refused(compiler):
    """Weights folded into compiled code do not change"""
    with inductor.patch(freezing=True):
        net = mlp()
        model = torch.compile(net)
        before = fingerprint(net)
        for door in ("analyze", "quantization", "sweep", "search", "degradation"):
            with pytest.raises(ValueError, match=r"weights may be frozen into a compiled model \(torch._inductor.config.freezing\)"):
                DOORS[door](model)
            assert not changes(before, fingerprint(net)), door


def test_frozen_parts_are_refused(compiler):
    """Compiled in place, and a part of a model whose head is free"""
    with inductor.patch(freezing=True):
        net = mlp()
        right = deltas(net)
        net.compile()
        try:
            assert deltas(net) == pytest.approx(right, rel=1e-4)   # PyTorch up to 2.9 does not freeze what is compiled in place
        except ValueError as e:
            assert "whatever the weights of Sequential are" in str(e)
        net = mlp()
        part = nn.Sequential(nn.Linear(8, 8), torch.compile(net[:2]), net[2])
        with pytest.raises(ValueError, match="in its compiled part .'1._orig_mod.0'"):
            deltas(part)


def test_evaluations_of_a_frozen_twin_are_refused(compiler):
    """The model that is passed is free, and `eval_fn` runs its compiled twin"""
    with inductor.patch(freezing=True):
        net = mlp()
        twin = torch.compile(net)
        with pytest.raises(ValueError, match="eval_fn does not"):
            deltas(net, lambda m: loss_of_each(twin))
        with pytest.warns(UserWarning, match="eval_fn does not"):
            deltas(net, lambda m: loss(twin))


def test_compiled_models_that_are_not_frozen(compiler):
    """The same figures as without a compiler, also where `eval_fn` runs the compiled twin"""
    net = mlp()
    twin, part = torch.compile(net), nn.Sequential(torch.compile(net[:2]), net[2])
    for compression, level in (("sparsity", 75), ("quantization", 3), ("pruning", 50)):
        expected = deltas(net, compression=compression, level=level)
        assert any(d == d and d for d in expected)
        for model, eval_fn in ((twin, loss_of_each), (net, lambda m: loss_of_each(twin)), (part, loss_of_each)):
            assert deltas(model, eval_fn, compression, level) == pytest.approx(expected, abs=1e-6, nan_ok=True)
