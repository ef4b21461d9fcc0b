"""Nothing computed twice: the same numbers to the bit whatever a model does, proof that less was computed, and a reason where it was not."""
import copy
import ctypes
import pickle
import threading
import warnings
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import Net, lively, unchanged

from fasterai_sens import FineTuned, Perturbation, Pruned, Quantized, SensitivityAnalyzer, Sparse, evaluation
from fasterai_sens.core.layers import find_units
from fasterai_sens.core.protocol import methods
from fasterai_sens.measure.loop import AsItComes, measure
from fasterai_sens.measure.reuse import Reuse, why_plain

library = torch.library.Library("reuse_tests", "DEF")
library.define("linear(Tensor x, Tensor w, Tensor b) -> Tensor")
computed = []   # one entry for each time that a `Counted` layer is computed


def kernel(x, w, b):
    """What the operation does on the CPU"""
    computed.append(1)
    return F.linear(x, w, b)


library.impl("linear", kernel, "CompositeExplicitAutograd")


class Counted(nn.Linear):
    """A linear layer that counts how often its numbers are computed, however often it is called"""

    def forward(self, x):
        """As any linear layer"""
        return torch.ops.reuse_tests.linear(x, self.weight, self.bias)


def linears(n=5, width=8):
    """Layers by name"""
    return {f"l{i}": Counted(width, width) for i in range(n)}


def rows(sweep):
    """All that was measured, and what was left out"""
    return [result.layers for result in sweep], [result.skipped for result in sweep], sweep[0].baseline_metric


def both(model, eval_fn, perturbations=None, units=None, **kwargs):
    """Measure plainly and with reuse; how often layers were computed in each, and the report"""
    perturbations = perturbations or [Sparse(50), Sparse(80)]
    units = units or find_units(model)[0]
    with unchanged(model):
        computed.clear()
        plain = measure(model, units, perturbations, eval_fn)
        n_plain = len(computed)
        computed.clear()
        reuse = Reuse(True, **kwargs)
        reused = measure(model, units, perturbations, eval_fn, reuse=reuse)
    assert repr(rows(plain)) == repr(rows(reused))
    assert rows(plain) == rows(reused)
    return n_plain, len(computed), reuse


x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def outputs(model):
    """A score for each sample, from a plain call"""
    with torch.no_grad():
        return model(x).sum(1)


def skip_connections(m, x):
    """Functional addition, twice the same tensor"""
    a = F.relu(m.l0(x))
    b = a + m.l1(a)
    return m.l4(b * torch.sigmoid(m.l3(F.gelu(m.l2(b) - a))))


def in_place(m, x):
    """Tensors that change after they were computed, also through views"""
    a = m.l0(x).relu_()
    b = m.l1(a)
    b += a
    a[:, :2].zero_()
    c = m.l2(b.mul_(2)).clamp_(-1)
    c.view(-1)[::3].add_(1)
    out = torch.empty_like(c)
    torch.add(m.l3(c), a, out=out)
    return m.l4(out)


def several_calls(m, x):
    """Modules called more than once"""
    for _ in range(3):
        x = torch.tanh(m.l0(x)) + m.l1(x)
    return m.l4(m.l3(m.l2(m.l2(x))))


def branches(m, x):
    """Split, chunks, concatenation, another order than that of the modules"""
    a, b = m.l3(x).chunk(2, 1)
    c = m.l1(torch.cat([b, a], 1))
    d = torch.stack([m.l0(part) for part in c.split(2)]).flatten(0, 1)
    return m.l4(m.l2(d)[:, [1, 0, 3, 2, 5, 4, 7, 6]])


def constants(m, x):
    """Numbers that come from Python and from NumPy"""
    a = m.l0(x) * torch.tensor([1., 2., 1., 2., 1., 2., 1., 2.])
    a = a + torch.from_numpy(np.linspace(0, 1, 8, dtype=np.float32)) + torch.arange(8)
    mask = torch.triu(torch.ones(8, 8), 1).bool()
    return m.l4(m.l3(m.l2(m.l1(a)[:, None, :].expand(-1, 8, -1).masked_fill(mask, 0.).sum(1))))


def reads_numbers(m, x):
    """Python goes by numbers that were computed"""
    a = m.l0(x)
    if a.mean() > 0: a = a - a.mean().item()
    a = a / float(a.norm()) + len(a.nonzero())
    return m.l4(m.l3(m.l2(m.l1(a[:, a[0].argsort()]))))


def through_numpy(m, x):
    """A detour that PyTorch does not see"""
    a = torch.from_numpy(np.tanh(m.l0(x).detach().numpy()))
    b = torch.tensor(m.l1(a).tolist())
    return m.l4(m.l3(m.l2(b)))


def keeps_attributes(m, x):
    """State in attributes within a call, and a cache over calls"""
    m.last = m.l0(x)
    if not hasattr(m, "cache"): m.cache = torch.ones(8) * 3
    m.n = getattr(m, "n", 0) + 1
    return m.l4(m.l3(m.l2(m.l1(m.last * m.cache)) + m.last))


def recurses(m, x):
    """A model that calls itself"""
    if len(x) > 4: return torch.cat([m(x[:3]), m(x[3:])])
    return m.l4(m.l3(m.l2(m.l1(m.l0(x)))))


def complex_numbers(m, x):
    """Fourier transforms"""
    a = torch.fft.rfft(m.l0(x)).conj()
    b = torch.fft.irfft(a * 2, n=8) + a.imag.sum()
    return m.l4(m.l3(m.l2(m.l1(b))))


GRAPHS = dict(skip=skip_connections, in_place=in_place, several_calls=several_calls, branches=branches, constants=constants, numbers=reads_numbers,
              attributes=keeps_attributes, complex=complex_numbers)


@pytest.mark.parametrize("name", GRAPHS)
def test_whatever_is_between_layers(name):
    """Less than 85 % of the layers are computed, and every score is the same."""
    torch.manual_seed(1)
    n_plain, n_reused, reuse = both(Net(GRAPHS[name], **linears()), outputs)
    assert n_reused <= .85 * n_plain and reuse.on, reuse
    assert reuse.verified_on and reuse.n_strays == 0


@pytest.mark.parametrize("graph", [through_numpy, recurses])
def test_what_cannot_be_seen_is_computed(graph):
    """Detours outside of PyTorch, and calls inside of calls: right, whatever is gained."""
    torch.manual_seed(1)
    n_plain, n_reused, _ = both(Net(graph, **linears()), outputs)
    assert n_reused <= n_plain + 10   # at most the evaluations that look beside


def test_the_first_layers_cost_most():
    """How much is computed in a chain: the first stretch is skipped each time, the last one never."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Counted(8, 8) for _ in range(10)])
    n_plain, n_reused, reuse = both(model, outputs)
    suffixes = 2 * sum(range(1, 11))
    assert n_plain == 10 + 20 * 10
    assert n_reused == 10 + suffixes + 10   # the baseline, what comes behind, and one plain evaluation
    assert (reuse.n_evaluations, reuse.n_reused, reuse.verified_on) == (20, 18, "9")


# ---- what goes in and comes out


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    """As transformers return it"""

    logits: torch.Tensor
    hidden: tuple


def chain(m, x):
    """All layers, and what they returned"""
    hidden = []
    for i in range(5):
        x = F.relu(getattr(m, f"l{i}")(x))
        hidden.append(x)
    return x, hidden


def from_tuple(m, pair, *, scale):
    """A tuple and a keyword in, a named tuple out"""
    x, hidden = chain(m, pair[0] * scale + pair[1])
    return Pair(x, tuple(hidden))


def from_dict(m, batch):
    """A dict in, a dataclass out"""
    x, hidden = chain(m, batch["x"] + batch["more"][0])
    return Output(x, tuple(hidden))


def by_keyword(m, x=None, mask=None):
    """Keywords only in, a dict out"""
    x, hidden = chain(m, x.masked_fill(mask, 0.))
    return {"logits": x, "hidden": hidden}


def feed_tuple(model):
    """See `from_tuple`"""
    out = model((x, x.flip(0)), scale=torch.tensor(2.))
    return (out.first + out.second[1]).sum(1)


def feed_dict(model):
    """See `from_dict`; outputs are changed afterwards"""
    out = model({"x": x, "more": [x * 2, "text"]})
    out.hidden[2].add_(1)
    return (out.logits.mul_(3) + out.hidden[0] + out.hidden[2]).sum(1)


def feed_keywords(model):
    """See `by_keyword`"""
    out = model(x=x, mask=x > 1)
    return (out["logits"] + out["hidden"][3]).sum(1)


@pytest.mark.parametrize("graph, feed", [(from_tuple, feed_tuple), (from_dict, feed_dict), (by_keyword, feed_keywords)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_inputs_and_outputs(graph, feed, mode):
    """Tuples, dicts, keywords, dataclasses; with gradients, without and in inference mode."""
    torch.manual_seed(2)
    model = Net(graph, **linears())
    if mode is torch.enable_grad and graph is from_dict: model.requires_grad_(False)   # its outputs are changed in place
    def evaluate(m):
        with mode(): return feed(m).detach()
    n_plain, n_reused, reuse = both(model, evaluate)
    assert n_reused < .8 * n_plain and reuse.on


def test_several_batches():
    """Each batch has what it needs; the last one is smaller."""
    torch.manual_seed(3)
    model = Net(skip_connections, **linears())
    data = [torch.randn(n, 8) for n in (6, 6, 6, 2)]
    @torch.no_grad()
    def evaluate(m): return torch.cat([m(b.clone()).sum(1) for b in data])
    n_plain, n_reused, reuse = both(model, evaluate)
    assert n_reused < .8 * n_plain


def test_outputs_feed_the_next_call():
    """Later calls get what earlier ones returned: they are not those of before, and are computed."""
    torch.manual_seed(3)
    model = Net(skip_connections, **linears())
    @torch.no_grad()
    def evaluate(m):
        y = x
        for _ in range(3): y = m(y)
        return y.sum(1)
    n_plain, n_reused, reuse = both(model, evaluate)
    assert n_reused < n_plain and reuse.on


def test_pair_of_scores_and_evaluation():
    """Objectives that remember the untouched model."""
    torch.manual_seed(3)
    model, targs = Net(skip_connections, **linears()), torch.arange(6)
    score = evaluation([(x, targs)], lambda p, t: (p.argmax(1) == t).float(), "kl")
    plain = SensitivityAnalyzer(model, x, score, reuse=False).sweep(verbose=False)
    analyzer = SensitivityAnalyzer(model, x, score, reuse=True)
    assert rows(analyzer.sweep(verbose=False)) == rows(plain)
    assert analyzer.reuse_report.n_reused > 10


# ---- kinds of models


def images(n=4, px=16): return torch.randn(n, 3, px, px, generator=torch.Generator().manual_seed(1))


def conv_net():
    """Convolutions with norms, a shortcut, activations in place"""
    torch.manual_seed(4)
    def forward(m, x):
        x = m.act(m.n1(m.c1(x)))
        y = m.n2(m.c2(x))
        y += m.short(x)
        return m.head(m.act(y).mean((2, 3)))
    return lively(Net(forward, c1=nn.Conv2d(3, 8, 3, padding=1), n1=nn.BatchNorm2d(8), act=nn.ReLU(inplace=True), c2=nn.Conv2d(8, 8, 3, padding=1),
                      n2=nn.BatchNorm2d(8), short=nn.Conv2d(8, 8, 1), head=nn.Linear(8, 4)))


METHODS = dict(
    sparsity=lambda a: a.sweep("sparsity", verbose=False), two_four=lambda a: a.analyze("sparsity", 50, granularity="2:4", verbose=False),
    quantization=lambda a: a.sweep("quantization", verbose=False), low_rank=lambda a: a.sweep("low_rank", [30, 60], verbose=False),
    pruning=lambda a: a.sweep("pruning", [25, 50], verbose=False), stopping=lambda a: a.sweep(early_stop_mode="dropped", early_stop_value=.01, verbose=False),
    **{side: (lambda a, side=side: a.sweep("quantization", [4, 8], quant_activations=side, verbose=False)) for side in ("input", "output", "both")},
    uneven=lambda a: a.sweep("sparsity", {"c2": [20, 40], "head": [60]}, verbose=False))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("make", [conv_net, lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)).eval()])
def test_every_method(name, make):
    """Sparsity, quantization with activations, pruning, low rank, levels of their own, early stops."""
    if name == "uneven" and make is not conv_net: return
    model, data = make(), images()
    @torch.no_grad()
    def evaluate(m): return torch.cat([m(data), m(data.flip(0))]).softmax(1)[:, 0]
    results = []
    for reuse in (False, True):
        with unchanged(model):
            analyzer = SensitivityAnalyzer(model, data[:1], evaluate, calibration_data=data, reuse=reuse)
            results.append(METHODS[name](analyzer))
    first, second = ([r] if hasattr(r, "layers") else list(r) for r in results)
    assert rows(first) == rows(second)
    assert analyzer.reuse_report.n_reused > 0, analyzer.reuse_report


def attention():
    """A transformer of PyTorch's, whose layers have a fast path of their own"""
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)).eval()


def recurrent():
    """LSTM and GRU between linear layers"""
    torch.manual_seed(5)
    def forward(m, x): return m.out(m.gru(m.mid(m.lstm(m.first(x))[0]))[0])
    return Net(forward, first=nn.Linear(8, 8), lstm=nn.LSTM(8, 8, 2, batch_first=True, dropout=.5), mid=nn.Linear(8, 8),
               gru=nn.GRU(8, 8, batch_first=True), out=nn.Linear(8, 4)).eval()


def tied():
    """An embedding whose weight is the output's"""
    torch.manual_seed(5)
    model = Net(lambda m, x: m.out(m.l1(m.l0(m.emb(x.flatten(1).abs().long() % 9)))), emb=nn.Embedding(9, 8), l0=nn.Linear(8, 8), l1=nn.Linear(8, 8),
                out=nn.Linear(8, 9, bias=False))
    model.out.weight = model.emb.weight
    return model.eval()


def normed():
    """Weights that hooks of PyTorch's compute"""
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8),
                             nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("make", [attention, recurrent, tied, normed])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_kinds_of_models(make, mode):
    """Attention, recurrent layers, tied weights, norms of weights."""
    data = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2))
    @mode()
    def evaluate(m): return m(data).flatten(1).double().sum(1)
    _, _, reuse = both(make(), evaluate)
    assert reuse.n_reused > 0, reuse


@pytest.mark.parametrize("how", ["autocast", "cached autocast", "bfloat16", "channels_last", "double", "data parallel"])
def test_types_and_layouts(how):
    """Casts, half precision, other strides."""
    model, data = conv_net(), images()
    if how == "bfloat16": model, data = model.bfloat16(), data.bfloat16()
    if how == "double": model, data = model.double(), data.double()
    if how == "channels_last": model, data = model.to(memory_format=torch.channels_last), data.to(memory_format=torch.channels_last)
    if how == "data parallel": model = nn.DataParallel(model)
    @torch.no_grad()
    def evaluate(m):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how, cache_enabled="cached" in how):
            return torch.cat([m(data), m(data * 2)])[:, 0].double()
    _, _, reuse = both(model, evaluate)
    assert reuse.n_reused > 0 or reuse.why, reuse
    if how not in ("cached autocast", "data parallel"): assert reuse.n_reused >= 6 and reuse.n_strays == 0


def test_output_of_transformers():
    """A GPT-2 from a configuration, its `ModelOutput` with caches, and all hidden states."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), torch.arange(24).reshape(3, 8) % 50
    @torch.no_grad()
    def evaluate(m):
        out = m(input_ids=tokens, labels=tokens, output_hidden_states=True)
        return (out.logits.mean((1, 2)) + out.loss + out.hidden_states[1].mean((1, 2))).double()
    _, _, reuse = both(model, evaluate)
    assert reuse.on and reuse.n_reused > 10 and reuse.n_strays == 0, reuse


# ---- where it has to stop, and says so


def reused_until(graph, layers, why, evaluate=outputs):
    """Results that are reused, where both ways are equal and the report has the reason"""
    torch.manual_seed(7)
    _, _, reuse = both(Net(graph, **linears(), **layers).eval(), evaluate)
    assert why in repr(reuse), reuse
    return reuse.n_reused


def test_random_numbers():
    """Nothing is reused from dropout on."""
    def graph(m, x): return m.l4(m.l3(F.dropout(m.l2(m.l1(m.l0(x))), .3)))
    assert reused_until(graph, {}, "bernoulli_ draws random numbers") >= 1
    def noise(m, x): return m.l4(m.l3(m.l2(m.l1(m.l0(x)) + torch.randn(8))))
    assert reused_until(noise, {}, "randn draws random numbers") >= 1
    assert reused_until(lambda m, x: m.l1(m.l0(x + torch.rand(8))), {}, "rand draws random numbers") == 0


def test_training_mode_and_state():
    """Nothing is reused from a layer on that writes to its buffers."""
    def graph(m, x): return m.l4(m.l3(m.norm.train()(m.l2(m.l1(m.l0(x))))))
    assert reused_until(graph, dict(norm=nn.BatchNorm1d(8)), "writes to what was there before the call") >= 1
    assert reused_until(graph, dict(norm=nn.BatchNorm1d(8, track_running_stats=False)), "reused results") >= 1
    class Running(nn.Module):
        """Counts in a buffer"""
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(8))
        def forward(self, x):
            """Adds up"""
            self.total += x.mean(0)
            return x + self.total
    assert reused_until(lambda m, x: m.l4(m.l3(m.state(m.l2(m.l1(m.l0(x)))))), dict(state=Running()), "writes to what was there before the call") >= 1
    def functional(m, x):
        F.batch_norm(m.l1(m.l0(x)), m.norm.running_mean, m.norm.running_var, training=True)
        return m.l4(m.l3(m.l2(x)))
    assert reused_until(functional, dict(norm=nn.BatchNorm1d(8)), "is in training mode") >= 1


def test_inputs_written_to():
    """A model that changes its input."""
    def graph(m, x): return m.l4(m.l3(m.l2(m.l1(m.l0(x.mul_(1.))))))
    assert reused_until(graph, {}, "writes to what was there before the call") == 0


def test_hooks_of_the_user():
    """Nothing is reused from a module on that has hooks of the user's; they run each time."""
    seen = []
    torch.manual_seed(8)
    model = nn.Sequential(*[Counted(8, 8) for _ in range(6)]).eval()
    model[4].register_forward_hook(lambda m, i, o: seen.append(float(o.numpy().mean())))
    n_plain, n_reused, reuse = both(model, outputs)
    assert "a hook on a Counted" in repr(reuse) and n_reused < n_plain
    assert set(seen[:13]) == set(seen[13:]) and len(seen) == 13 + 13 + 1   # one evaluation is made twice
    def own(m, i): return None
    model.register_forward_pre_hook(own)
    _, _, reuse = both(model, outputs)
    assert not reuse.on and not reuse.n_reused


def test_global_hooks_and_compiled_models():
    """Those are left alone altogether."""
    model = nn.Sequential(*[Counted(8, 8) for _ in range(4)]).eval()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try: assert "global hooks" in both(model, outputs)[2].why
    finally: handle.remove()
    assert "is compiled" in why_plain(torch.compile(model))
    assert "is compiled" in why_plain(nn.Sequential(torch.jit.trace(nn.Linear(8, 8), x)))


def test_shuffled_and_augmented_inputs():
    """Noticed at the first score, and told once."""
    torch.manual_seed(9)
    model = Net(skip_connections, **linears()).eval()
    for change in (lambda g: x[torch.randperm(6, generator=g)], lambda g: x + torch.randn(x.shape, generator=g) / 100):
        results = []
        for reuse in (AsItComes(), Reuse(True)):
            generator = torch.Generator().manual_seed(0)
            def evaluate(m, change=change, generator=generator):
                with torch.no_grad(): return m(change(generator)).sum().item()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(rows(measure(model, find_units(model)[0], [Sparse(50), Sparse(70)], evaluate, reuse=reuse)))
        assert [str(w.message)[:44] for w in caught] == ["eval_fn gives the model other inputs each ti"]
        assert results[0][2] == results[1][2] and not reuse.on and "other inputs" in repr(reuse)


def test_evaluations_that_do_not_call_the_model():
    """They look at weights, call parts of it, or a copy."""
    torch.manual_seed(9)
    model = nn.Sequential(*[Counted(8, 8) for _ in range(4)]).eval()
    def weights(m): return sum(p.abs().sum() for p in m.parameters()).item()
    def parts(m): return float(m[1](m[0](x)).sum())
    def forward(m): return float(m.forward(x).sum())
    def copied(m): return float(copy.deepcopy(m)(x).sum())
    def pickled(m): return float(pickle.loads(pickle.dumps(m))(x).sum())
    def trained(m): m[0].weight.data.mul_(1.5)
    for evaluate in (weights, parts, forward, copied, pickled, FineTuned(trained, lambda m: float(m(x).sum()))):
        n_plain, n_reused, reuse = both(model, evaluate)
        assert n_plain == n_reused and "does not call the model" in reuse.why


def test_gradients_inside_the_evaluation():
    """A backward pass sees the numbers that a plain one sees."""
    torch.manual_seed(9)
    model = Net(skip_connections, **linears()).eval()
    def evaluate(m):
        data = x.clone().requires_grad_()
        loss = m(data).square().sum()
        grads = torch.autograd.grad(loss, [data, m.l0.weight, m.l3.weight])
        return float(sum(g.double().square().sum() for g in grads))
    n_plain, n_reused, _ = both(model, evaluate)
    assert n_reused <= n_plain + 10   # at most the evaluations that look beside


def test_another_thread():
    """A model that is called in another thread is called plainly."""
    torch.manual_seed(9)
    model, found = nn.Sequential(*[Counted(8, 8) for _ in range(4)]).eval(), []
    def evaluate(m):
        thread = threading.Thread(target=lambda: found.append(float(m(x).sum())))
        thread.start()
        thread.join()
        return found[-1]
    n_plain, n_reused, reuse = both(model, evaluate)
    assert n_plain == n_reused and not reuse.on


def test_random_control_flow():
    """A model that takes another way each time is computed."""
    torch.manual_seed(9)
    calls = []
    def graph(m, x):
        calls.append(1)
        x = m.l0(x)
        if len(calls) % 2: x = F.relu(x)
        return m.l4(m.l3(m.l2(m.l1(x))))
    model = Net(graph, **linears()).eval()
    def evaluate(m):
        calls.clear()
        with torch.no_grad(): return torch.cat([m(x), m(x)]).sum(1)
    both(model, evaluate)
    def drifting(m):
        with torch.no_grad(): return m(x).sum(1)
    units = find_units(model)[0]
    reuse = Reuse(True)
    measure(model, units, [Sparse(50), Sparse(60), Sparse(70)], drifting, reuse=reuse)   # no two plain runs are equal here, either
    assert reuse.n_strays or not reuse.on


# ---- perturbations of one's own


class Anything(Perturbation):
    """Does to the model what it is told to"""

    level = strength = 1

    def __init__(self, act):
        self.act = act

    def change(self, model, unit):
        """Whatever"""
        unit.weight.data.mul_(.5)
        self.act(model)


def replace(model): model.l1 = Counted(8, 8)


ACTS = dict(
    nothing=lambda m: None, other_weight=lambda m: m.l0.weight.data.add_(1), other_buffer=lambda m: m.norm.running_mean.data.add_(1),
    hook=lambda m: m.l1.register_forward_hook(lambda m, i, o: o * 2), before=lambda m: m.l2.register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
    new_weight=lambda m: setattr(m.l1, "weight", nn.Parameter(m.l1.weight.detach() * 2)), module=replace,
    attribute=lambda m: setattr(m, "scale", 3.), tensor=lambda m: m.plain.add_(1))


@pytest.mark.parametrize("name", ACTS)
def test_perturbations_that_do_more(name):
    """They write elsewhere, add hooks, replace modules, change attributes: every score is right."""
    def graph(m, x):
        x = m.norm(m.l0(x)) * m.scale + m.plain
        return m.l4(m.l3(m.l2(m.l1(x))))
    torch.manual_seed(10)
    model = Net(graph, **linears(), norm=nn.BatchNorm1d(8)).eval()
    model.scale, model.plain = 1., torch.zeros(8)
    def act(m):
        torch.manual_seed(0)   # new modules are the same each time
        ACTS[name](m)
    _, _, reuse = both(model, outputs, [Anything(act)])
    if name == "nothing": assert reuse.n_reused == 4


def test_unused_layers():
    """What compressing them changes is nothing at all."""
    torch.manual_seed(10)
    n_plain, n_reused, reuse = both(Net(lambda m, x: m.l1(m.l0(x)), **linears()).eval(), outputs)
    assert reuse.on and n_reused < .6 * n_plain


# ---- memory


@pytest.mark.parametrize("memory", [0, 300, 700, 2000, 10_000])
def test_less_memory(memory):
    """Less is kept at a time, and nothing else changes."""
    torch.manual_seed(11)
    model = Net(skip_connections, **linears()).eval()
    data = [torch.randn(n, 8) for n in (6, 6, 2)]
    @torch.no_grad()
    def evaluate(m): return torch.cat([m(b).sum(1) for b in data])
    n_plain, n_reused, reuse = both(model, evaluate, memory=memory)
    assert reuse.most_bytes <= memory
    if memory >= 300: assert reuse.n_reused and n_reused <= n_plain + 15   # one evaluation is made twice
    assert reuse.store.n_bytes == 0 and not reuse.traces   # nothing stays


def test_only_the_next_units_need_it():
    """What lies behind is let go of: at the end of a chain next to nothing is kept."""
    torch.manual_seed(11)
    model, kept = nn.Sequential(*[Counted(8, 8) for _ in range(8)]).eval(), []
    reuse = Reuse(True)
    def evaluate(m):
        kept.append(reuse.store.n_bytes)
        return outputs(m)
    measure(model, find_units(model)[0], [Sparse(50), Sparse(60)], evaluate, reuse=reuse)
    assert max(kept) <= 7 * x.numel() * 4 and kept[-1] <= 2 * x.numel() * 4


# ---- errors, interrupts, trust


@contextmanager
def no_trace_of_modes():
    """Fails if somebody still looks at operations after the block"""
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    yield
    hooks = nn.modules.module._global_forward_pre_hooks
    assert _get_current_dispatch_mode() is None and not hooks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(1, 9))
def test_errors_and_interrupts(error, at):
    """Wherever the model fails, the user sees that error, and the model is as it was."""
    calls = []
    def graph(m, x):
        x = m.l1(m.l0(x))
        calls.append(1)
        if len(calls) >= at: raise error("here")
        return m.l4(m.l3(m.l2(x)))
    torch.manual_seed(12)
    model = Net(graph, **linears()).eval()
    reuse = Reuse(True)
    with unchanged(model), no_trace_of_modes(), pytest.raises(error, match="here"):
        measure(model, find_units(model)[0], [Sparse(50), Sparse(60)], outputs, reuse=reuse)
    assert reuse.store.n_bytes == 0


@pytest.mark.parametrize("way", ["NumPy", "bytes"])
def test_model_that_checks_its_numbers(way):
    """Where NumPy reads them they are there; an error that only stand-ins cause, in memory that is read in another way, is nobody's: the evaluation is made again."""
    def graph(m, x):
        x = m.l1(m.l0(x))
        numbers = x.numpy() if way == "NumPy" else np.frombuffer(ctypes.string_at(x.data_ptr(), x.nbytes), np.float32)
        if not np.isfinite(numbers).all(): raise ValueError("not finite")
        x = m.l2(x)
        return m.l4(m.l3(x))
    torch.manual_seed(12)
    _, _, reuse = both(Net(graph, **linears()).eval(), outputs)
    if way == "NumPy": assert "memory is read by NumPy" in repr(reuse)
    else: assert reuse.n_strays > 0


def test_it_does_not_trust_itself(monkeypatch):
    """If something reused were wrong, the first score would show it, and everything is measured plainly."""
    from fasterai_sens.measure import traces
    torch.manual_seed(12)
    model, real = Net(skip_connections, **linears()).eval(), traces.over
    def wrong(storage, out):
        t = real(storage, out)
        return t.mul_(1.0001) if t.is_floating_point() else t
    monkeypatch.setattr(traces, "over", wrong)
    _, _, reuse = both(model, outputs)
    assert "not what a plain evaluation gives" in reuse.why and not reuse.on


# ---- the door


def test_of_the_analyzer():
    """Both ways to say it, wrong values, and what the report says."""
    torch.manual_seed(13)
    model = Net(skip_connections, **linears()).eval()
    with pytest.raises(ValueError): SensitivityAnalyzer(model, x, outputs, reuse="always")
    with pytest.raises(ValueError, match="reuse_memory is a number of bytes"): SensitivityAnalyzer(model, x, outputs, reuse_memory=-1)
    off = SensitivityAnalyzer(model, x, outputs, reuse=False)
    assert "nothing was measured yet" in repr(off.reuse_report)
    off.analyze(verbose=False)
    assert repr(off.reuse_report) == "nothing reused: reuse=False"
    small = SensitivityAnalyzer(model, x, outputs)
    computed.clear()
    small.analyze(verbose=False)
    assert "too little would be saved" in small.reuse_report.why and len(computed) == 5 * 6


def test_pruning_reuses():
    """Groups of layers that lose channels together."""
    model, data = conv_net(), images()
    units = Pruned.find_units(model, find_units(model)[0], data[:1])
    @torch.no_grad()
    def evaluate(m): return m(data)[:, 0].double()
    _, _, reuse = both(model, evaluate, [Pruned(25), Pruned(50)], units)
    assert reuse.on
    _, _, reuse = both(model, evaluate, [Quantized(4), Quantized(8)])
    assert reuse.n_reused >= 6
    _, _, reuse = both(model, evaluate, [methods["low_rank"](20), methods["low_rank"](40)])
    assert reuse.n_reused >= 2
