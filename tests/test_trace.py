"""No trace: state in attributes of modules, interrupts at any moment, evaluations that train, tensors that wrap others, what a Learner holds."""
import copy
import random as python_random
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fasterai_sens import (
    ChannelDependency,
    Pruner,
    SensitivityAnalyzer,
    Sparse,
    analyze_degradation,
    analyze_sensitivity,
    changes,
    count_flops_params,
    evaluation,
    fingerprint,
    kl_from,
    latency,
    leave_no_trace,
    quantize_model,
    search_targets,
)
from fasterai_sens.core.fingerprint import most_entries
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.signals import hold_signals, release_signals, uncut
from fasterai_sens.measure.loop import checksum, evaluate

torch.set_num_threads(1)
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


# ---- state in attributes


Pair = namedtuple("Pair", "first second")


@dataclass
class State:
    """As recurrent layers of one's own keep it"""

    potential: torch.Tensor
    history: list = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    """The same without a dictionary"""

    potential: torch.Tensor
    count: int = 0


class Box(dict):
    """A dictionary with an attribute, that does more than it should when it is written to"""

    def __setitem__(self, key, value):
        raise RuntimeError("not like this")


class Stateful(nn.Module):
    """A layer, and state of every kind beside it"""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.plain, self.counter, self.name = torch.zeros(3), 0, "fresh"
        self.leaf = torch.ones(3, requires_grad=True)
        self.grown = self.leaf * 2
        self.alias, self.row = self.layer.weight.data, self.layer.weight[0]
        self.table, self.past = {"a": [torch.ones(2), {"deep": torch.zeros(2)}], "b": 1}, [1.0, 2.0]
        self.seen, self.window = {1, 2}, deque([1, 2, 3], maxlen=3)
        self.ordered, self.default, self.counts = OrderedDict(a=1, b=2), defaultdict(list, a=[1]), Counter("aab")
        self.box = Box(a=1)
        self.box.note = [1]
        self.pair, self.names = Pair(torch.zeros(2), [1]), SimpleNamespace(v=torch.zeros(2), more=SimpleNamespace(w=[1]))
        self.state, self.slots = State(torch.zeros(2)), Slotted(torch.zeros(2))
        self.array, self.objects = np.zeros(3), np.array([1, "a", None], dtype=object)
        self.generators = [torch.Generator().manual_seed(1), np.random.default_rng(1), np.random.RandomState(1), python_random.Random(1)]
        self.ring = [self.past]
        self.ring.append(self.ring)
        self._private = [torch.zeros(2)]
        self.long = [0] * (most_entries + 1)
        self.children_again = [self.layer]

    def forward(self, x):
        """Whatever"""
        return self.layer(x)


def at(path, act):
    """`act` on what is at `path`"""

    def run(m):
        for name in path.split("."):
            m = getattr(m, name)
        act(m)

    return run


def put(name, value):
    """Another object in an attribute"""
    return lambda m: setattr(m, name, value(getattr(m, name)))


TOUCHES = {
    "plain in place": at("plain", lambda t: t.add_(1)),
    "plain replaced": put("plain", lambda t: t + 1),
    "plain data": lambda m: setattr(m.plain, "data", torch.ones(5)),
    "plain set_": at("plain", lambda t: t.set_(torch.ones(5))),
    "plain asks for gradients": at("plain", lambda t: t.requires_grad_()),
    "plain from NumPy": at("plain", lambda t: t.numpy().fill(3)),
    "counter": put("counter", lambda n: n + 1),
    "name": put("name", lambda n: "used"),
    "deleted": lambda m: delattr(m, "plain"),
    "leaf": at("leaf", lambda t: t.data.mul_(3)),
    "leaf detached": put("leaf", lambda t: t.detach()),
    "grown replaced": put("grown", lambda t: t.detach() * 2),
    "grown in place": lambda m: torch.no_grad()(lambda: m.grown.mul_(2))(),
    "alias replaced": put("alias", lambda t: t.clone()),
    "alias data": lambda m: setattr(m.alias, "data", torch.ones(2)),
    "weights by alias": at("alias", lambda t: t.mul_(2)),
    "row": lambda m: torch.no_grad()(lambda: m.row.mul_(2))(),
    "deep tensor": at("table", lambda d: d["a"][1]["deep"].add_(1)),
    "deep replaced": at("table", lambda d: d["a"][1].update(deep=torch.ones(2))),
    "deep list": at("table", lambda d: d["a"].append(1)),
    "key gone": at("table", lambda d: d.pop("b")),
    "keys in another order": at("table", lambda d: d.update(a=d.pop("a"))),
    "list": at("past", lambda a: a.append(3.0)),
    "list emptied": at("past", lambda a: a.clear()),
    "list replaced": put("past", list),
    "set": at("seen", lambda s: s.add(5)),
    "deque": at("window", lambda d: d.append(4)),
    "ordered": at("ordered", lambda d: d.move_to_end("a")),
    "default": at("default", lambda d: d["b"].append(2)),
    "default inside": at("default", lambda d: d["a"].append(2)),
    "counts": at("counts", lambda c: c.update("ab")),
    "box": at("box", lambda b: b.update(b=2)),
    "box attribute": at("box", lambda b: b.note.append(2)),
    "box attribute new": at("box", lambda b: setattr(b, "new", 2)),
    "namedtuple tensor": at("pair", lambda p: p.first.add_(1)),
    "namedtuple list": at("pair", lambda p: p.second.append(1)),
    "namespace": at("names", lambda n: n.v.add_(1)),
    "namespace deep": at("names.more", lambda n: n.w.append(1)),
    "namespace new": at("names", lambda n: setattr(n, "new", 1)),
    "dataclass": at("state", lambda s: s.potential.add_(1)),
    "dataclass replaced": at("state", lambda s: setattr(s, "potential", torch.ones(2))),
    "dataclass list": at("state", lambda s: s.history.append(1)),
    "slots": at("slots", lambda s: setattr(s, "count", 5)),
    "slots tensor": at("slots", lambda s: s.potential.add_(1)),
    "array": at("array", lambda a: a.fill(2)),
    "array of objects": at("objects", lambda a: a.__setitem__(0, 7)),
    "generator of torch": lambda m: torch.rand(1, generator=m.generators[0]),
    "generator of NumPy": lambda m: m.generators[1].random(),
    "old generator of NumPy": lambda m: m.generators[2].rand(),
    "generator of Python": lambda m: m.generators[3].random(),
    "ring": at("ring", lambda r: r.append(r)),
    "private": at("_private", lambda a: a[0].add_(1)),
    "long": at("long", lambda a: a.__setitem__(5, 1)),
    "children again": at("children_again", lambda a: a.clear()),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_state_in_attributes_goes_back(name):
    """The fingerprint notices it, and it is as before after the block, also if that raises"""
    model = Stateful()
    before = fingerprint(model)
    for error in (None, KeyboardInterrupt()):
        try:
            with leave_no_trace(model):
                TOUCHES[name](model)
                assert changes(before, fingerprint(model))
                if error:
                    raise error
        except KeyboardInterrupt as e:
            assert e is error
        assert changes(before, fingerprint(model)) == []


def test_what_is_not_promised_stays_the_same_object():
    """Objects of unknown classes are not looked into, neither by the block nor by the fingerprint; nor are entries of very long lists"""

    class Unknown:
        def __init__(self):
            self.values = [1]

    model = nn.Linear(2, 2)
    model.thing, model.many = Unknown(), [[0] for _ in range(most_entries + 1)]
    before, thing = fingerprint(model), model.thing
    with leave_no_trace(model):
        model.thing.values.append(2)
        model.many[3].append(1)
        assert changes(before, fingerprint(model)) == []
        model.thing = None
        model.many.pop()
        assert changes(before, fingerprint(model)) == ["attributes: "]
    assert model.thing is thing and thing.values == [1, 2] and model.many[3] == [0, 1]
    assert changes(before, fingerprint(model)) == []


class Spiking(nn.Module):
    """A leaky layer with a potential, which grows a graph in training"""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.potential, self.spikes = torch.zeros(5), []

    def forward(self, x):
        """The potential of the last batch goes on"""
        self.potential = 0.9 * self.potential + self.into(x).mean(0)
        self.spikes.append(self.potential.detach() > 0)
        return self.out(torch.sigmoid(self.into(x) + self.potential))


@pytest.mark.parametrize("method", ["sparsity", "quantization"])
def test_rows_of_a_spiking_model_do_not_depend_on_each_other(method):
    """Each layer alone gives what it gives among others, and the state with its history is the caller's afterwards"""
    torch.manual_seed(0)
    model = Spiking()
    model(x)
    before, graph = fingerprint(model), model.potential.grad_fn

    def eval_fn(m):
        with torch.no_grad():
            return m(x).square().mean().item()

    level = 3 if method == "quantization" else 50
    a = SensitivityAnalyzer(model, x, eval_fn)
    together = {r.name: r.compressed_metric for r in a.analyze(method, level, verbose=False).layers if r.prunable}
    alone = {n: a.analyze(method, level, layers=n, verbose=False).layers[0].compressed_metric for n in together}
    assert together == alone and together
    assert a.analyze(method, level, verbose=False).baseline_metric == a.analyze(method, level, verbose=False).baseline_metric
    assert changes(before, fingerprint(model)) == [] and model.potential.grad_fn is graph and len(model.spikes) == 1
    model.potential.sum().backward()


def test_state_made_under_inference_mode_goes_back():
    """An evaluation under `inference_mode` leaves such tensors behind, in attributes and in buffers"""
    model = Spiking()
    model.register_buffer("cache", torch.zeros(2))
    with torch.inference_mode():
        model(x)
        model.cache = torch.ones(2)
    before = fingerprint(model)
    score = torch.inference_mode()(lambda m: m(x).square().mean().item())
    assert analyze_sensitivity(model, x, score, verbose=False).layers
    with leave_no_trace(model), torch.inference_mode():
        model.cache.add_(1)
        model.potential.add_(1)
    assert changes(before, fingerprint(model)) == []


# ---- interrupts


@pytest.mark.slow
def test_two_interrupts_at_any_moment():
    """A hundred tries here; `benchmarks/interrupts.py` makes more"""
    script = Path(__file__).parent.parent / "benchmarks" / "interrupts.py"
    done = subprocess.run([sys.executable, str(script), "--tries", "102", "--seed", "1"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and ", 0 corrupt" in done.stdout, done.stdout + done.stderr


def test_several_signals_are_each_handled_once_at_the_end():
    """None is lost that came while something was half done, and none comes in the middle"""
    seen, numbers = [], [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGVTALRM") if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers}

    @uncut
    def half_done():
        held = hold_signals()
        for number in numbers: signal.raise_signal(number)
        time.sleep(.01)
        came = list(seen)
        release_signals(held)
        return came

    try: came = half_done()
    finally:
        for number, handler in before.items(): signal.signal(number, handler)
    assert came == [] and sorted(seen) == sorted(numbers)


# ---- evaluations that train


def trainer(make):
    """An `eval_fn` that makes a step with an optimizer"""

    def eval_fn(m):
        opt = make(m.parameters())
        m(x).square().mean().backward()
        opt.step()
        return m(x).square().mean().item()

    return eval_fn


def writer(write):
    """An `eval_fn` that writes to the last weight"""

    def eval_fn(m):
        with torch.no_grad():
            write(m, m[-1].weight)
            return m(x).square().mean().item()

    return eval_fn


class Doubled(torch.autograd.Function):
    """Writes past autograd's count, as a kernel of one's own does"""

    @staticmethod
    def forward(ctx, w):
        """In place, not said"""
        w.data.mul_(2)
        return w.clone()


def swap(m, w):
    """Two tensors in each other's place"""
    torch.utils.swap_tensors(w, nn.Parameter(torch.ones_like(w)))


def replace(m, w):
    """Another parameter"""
    m[-1].weight = nn.Parameter(w * 2)


TRAINERS = {
    "SGD": trainer(partial(torch.optim.SGD, lr=0.1)),
    "SGD fused": trainer(partial(torch.optim.SGD, lr=0.1, fused=True)),
    "SGD foreach": trainer(partial(torch.optim.SGD, lr=0.1, foreach=True)),
    "AdamW fused": trainer(partial(torch.optim.AdamW, lr=1e-4, fused=True)),
    "AdamW foreach": trainer(partial(torch.optim.AdamW, lr=1e-4, foreach=True)),
    "Adam fused": trainer(partial(torch.optim.Adam, lr=1e-4, fused=True)),
    "Adagrad fused": trainer(partial(torch.optim.Adagrad, lr=1e-4, fused=True)),
    "data": writer(lambda m, w: w.data.mul_(2)),
    "data copy_": writer(lambda m, w: w.data.copy_(w * 2)),
    "data replaced": writer(lambda m, w: setattr(w, "data", w.data * 2)),
    "set_": writer(lambda m, w: w.set_(w * 2)),
    "storage": writer(lambda m, w: w.untyped_storage().fill_(1)),
    "swap_tensors": writer(swap),
    "NumPy": writer(lambda m, w: w.detach().numpy().__imul__(2)),
    "one number": writer(lambda m, w: w.detach().numpy().__setitem__((1, 1), 7)),
    "rows change places": writer(lambda m, w: w.data.copy_(w.data.flip(0))),
    "kernel": writer(lambda m, w: Doubled.apply(w)),
    "parameter": writer(replace),
}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("large", [False, True])
def test_eval_fn_that_trains_is_refused(name, large):
    """Whichever way it writes; the model comes back, and numbers of a trained model are never returned"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512 if large else 8), nn.ReLU(), nn.Linear(512 if large else 8, 300 if large else 4))
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"changed the weights of the model \(.*2\.weight"):
        analyze_sensitivity(model, x, TRAINERS[name], verbose=False)
    assert changes(before, fingerprint(model)) == []
    tidy = SensitivityAnalyzer(model, x, lambda m: m(x).square().mean().item()).analyze(verbose=False)
    late = []

    def only_later(m):
        late.append(m)
        return TRAINERS[name](m) if len(late) > 1 else m(x).square().mean().item()

    with pytest.raises(ValueError):
        analyze_sensitivity(model, x, only_later, layers="2", verbose=False)
    assert changes(before, fingerprint(model)) == [] and len(late) == 2 and len(tidy.layers) == 2


@pytest.mark.parametrize("detour", [lambda m: m.half().float(), lambda m: m.double().float(), lambda m: m.bfloat16().float(), lambda m: m.half()])
def test_converting_the_model_is_not_training(detour):
    """An evaluation in another precision is one"""
    model = nn.Linear(6, 3)
    before = fingerprint(model)

    def eval_fn(m):
        value = m(x).square().mean().item()
        detour(m)
        return value

    assert analyze_sensitivity(model, x, eval_fn, verbose=False).layers
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("shape", [(3,), (700, 900), (1 << 16,), (509, 509, 2), (4, 4, 65, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_checksum_changes_with_any_number(shape, dtype):
    """One number anywhere, and two neighbours or rows that change places"""
    t = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    before = checksum(t)
    assert torch.equal(checksum(t.clone()), before)
    for place in (0, t.numel() // 2, t.numel() - 1):
        other = t.clone()
        flat = other.view(-1)
        flat[place] = ~flat[place] if dtype == torch.bool else flat[place] + 1 if dtype != torch.float16 else -7.5
        assert not torch.equal(checksum(other), before), place
    odd = torch.cat([t.flatten()[:1], t.flatten()])[1:].view(shape)
    assert torch.equal(checksum(odd), before), "the same numbers at another offset"


# ---- tensors that wrap others


def with_torchao(config):
    """A small model with weights of torchao"""
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    try:
        quantization.quantize_(model, getattr(quantization, config)())
    except Exception as e:  # noqa: BLE001 (a kernel that this machine lacks)
        pytest.skip(f"{config}: {e}")
    return model


def with_buffer(make):
    """A model with an odd buffer"""
    model = nn.Linear(2, 2)
    model.register_buffer("odd", make())
    return model


def first_inner(t):
    """The first plain tensor with numbers in `t`"""
    if hasattr(t, "__tensor_flatten__"):
        return first_inner(getattr(t, t.__tensor_flatten__()[0][0]))
    if t.layout == torch.sparse_coo:
        return t._values()
    if t.layout != torch.strided:
        return t.values()
    return t.unbind()[0] if t.is_nested else t


WRAPPED = {
    "int8": (partial(with_torchao, "Int8WeightOnlyConfig"), "0.weight"),
    "int8 dynamic": (partial(with_torchao, "Int8DynamicActivationInt8WeightConfig"), "0.weight"),
    "float8": (partial(with_torchao, "Float8WeightOnlyConfig"), "0.weight"),
    "sparse": (partial(with_buffer, lambda: torch.eye(3).to_sparse()), "odd"),
    "csr": (partial(with_buffer, lambda: torch.eye(3).to_sparse_csr()), "odd"),
    "csc": (partial(with_buffer, lambda: torch.eye(3).to_sparse_csc()), "odd"),
    "bsr": (partial(with_buffer, lambda: torch.eye(4).to_sparse_bsr((2, 2))), "odd"),
    "nested": (partial(with_buffer, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "odd"),
    "jagged": (partial(with_buffer, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)), "odd"),
    "conjugate": (partial(with_buffer, lambda: torch.ones(3, dtype=torch.complex64).conj()), "odd"),
    "float8 dtype": (partial(with_buffer, lambda: torch.ones(3).to(torch.float8_e4m3fn)), "odd"),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore")
def test_fingerprint_looks_into_tensors_that_wrap_others(name):
    """It notices one number inside, and the block puts it back"""
    make, path = WRAPPED[name]
    model = make()
    before = fingerprint(model)
    assert changes(before, fingerprint(model)) == []
    with leave_no_trace(model), torch.no_grad():
        inner = first_inner(dict([*model.named_parameters(), *model.named_buffers()])[path])
        flat = inner.view(torch.uint8).view(-1) if inner.dtype.itemsize == 1 else inner.view(-1)
        flat[0] = flat[0] + 1
        assert [c.partition(": ")[2] for c in changes(before, fingerprint(model))] == [path]
    assert changes(before, fingerprint(model)) == []


def test_meta_tensors_have_a_fingerprint():
    """There are no numbers to look at"""
    model = nn.Linear(2, 2, device="meta")
    before = fingerprint(model)
    assert changes(before, fingerprint(model)) == []


# ---- models made under inference_mode


def score(m):
    """A number"""
    return m(x).square().mean().item()


ENTRIES = {
    "analyze": lambda m: analyze_sensitivity(m, x, score, verbose=False),
    "search": lambda m: search_targets(m, x, score, 50, verbose=False),
    "degradation": lambda m: analyze_degradation(m, x, score, verbose=False),
    "Pruner": lambda m: Pruner(m, 50, example_inputs=x),
    "count_flops_params": lambda m: count_flops_params(m, x, verbose=False),
    "latency": lambda m: latency(m, x),
    "ChannelDependency": lambda m: ChannelDependency(m, x),
    "kl_from": lambda m: kl_from(m, x),
    "evaluation": lambda m: evaluation((x, torch.zeros(8)), lambda p, t: p.mean())(m),
    "evaluate": lambda m: evaluate(m, score),
    "Sparse": lambda m: Sparse(50)(m, all_units(m)[0][0]).__enter__(),
    "leave_no_trace": lambda m: leave_no_trace(m).__enter__(),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_model_made_under_inference_mode(name):
    """The message says so, and what it says helps"""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    before = fingerprint(model)
    with pytest.raises(ValueError, match="^4 parameters of this Sequential.*0.weight.* were made under torch.inference_mode.*deepcopy"):
        ENTRIES[name](model)
    assert changes(before, fingerprint(model)) == []
    ENTRIES[name](copy.deepcopy(model))


def test_quantize_model_made_under_inference_mode():
    """What needs neither gradients nor counts works as it is"""
    with torch.inference_mode():
        model = nn.Linear(6, 8)
    before = fingerprint(model)
    with quantize_model(model, 2):
        assert changes(before, fingerprint(model)) == ["parameters: weight"]
    assert changes(before, fingerprint(model)) == []


# ---- a Learner


def learner_state(learn):
    """What a Learner, its recorder and its callbacks hold, to compare"""
    from fastcore.foundation import L

    def plain(v):
        return [plain(o) for o in v] if isinstance(v, list | tuple | L) else v if isinstance(v, int | float | str) else id(v)

    owners = dict(learn=learn, smooth=learn.recorder.smooth_loss, loss=learn.recorder.loss) | {cb.name: cb for cb in learn.cbs} | {m.name: m for m in learn.metrics}
    return {f"{n}.{k}": plain(v) for n, o in owners.items() for k, v in vars(o).items()}


@pytest.mark.parametrize("extra", ["none", "mixup", "csv", "schedule", "stateful"])
def test_learner_is_as_it_was(extra, tmp_path):
    """Its record, counters, last batch, callbacks, metrics and files, after `from_learner` and after every evaluation"""
    from fastai.callback.all import CSVLogger, MixUp, SaveModelCallback
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import F1Score, accuracy

    pairs = [(x[i % 8], torch.tensor(i % 3)) for i in range(16)]
    loaders = DataLoaders(DataLoader(pairs, 8), DataLoader(pairs, 8))
    cbs = dict(none=[], mixup=[MixUp()], csv=[CSVLogger()], schedule=[SaveModelCallback()], stateful=[])[extra]
    metrics = [accuracy, F1Score(average="macro")] if extra == "stateful" else [accuracy]
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    learn = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), metrics=metrics, cbs=cbs, path=tmp_path)
    with learn.no_bar():
        learn.fit_one_cycle(2, 1e-2)
    before, weights, files = learner_state(learn), fingerprint(model), {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert before["recorder.values"] and before["recorder.losses"] and before["recorder.lrs"]
    a = SensitivityAnalyzer.from_learner(learn, metric=metrics[-1])
    assert learner_state(learn) == before
    found = a.analyze(verbose=False)
    assert learner_state(learn) == before and len(found.layers) == 2
    assert changes(weights, fingerprint(model)) == [] and {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files

    def broken(p, t):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SensitivityAnalyzer.from_learner(learn, metric=broken, objective=None, higher_is_better=True).analyze(verbose=False)
    assert learner_state(learn) == before
