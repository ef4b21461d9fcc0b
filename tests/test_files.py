"""A compressed model's file has the bytes that its plan said, comes back bit for bit, and cannot do harm when it is damaged."""
import json
import os
import random
import resource
import sys
import time
import zlib
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from toys import SHORT, lively, three_layers, unchanged
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from fasterai_sens import (
    Applier,
    BitPlan,
    LayerTargets,
    Perturbation,
    Plan,
    PruneCallback,
    Pruner,
    QuantizeCallback,
    Sparsifier,
    agp,
    changes,
    compress_to_size,
    fingerprint,
    hold,
    load_compressed,
    method,
    n_bytes,
    quantize_model,
    save_compressed,
)
from fasterai_sens.core import packing
from fasterai_sens.core.layers import all_units, place, target_units
from fasterai_sens.core.packing import open_archive, write_archive
from fasterai_sens.core.protocol import Codes, methods
from fasterai_sens.methods.proof import channel_groups

SLACK = 65_536
GRIDS = dict(per_channel=True, group_size=None, symmetric=True, activations=None, ranges=None)


def conv_net():
    """Batch norm, a depthwise, a grouped and a transposed convolution, and a head"""
    torch.manual_seed(0)
    return lively(nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, groups=4), nn.ReLU(), nn.ConvTranspose2d(64, 48, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 200), nn.ReLU(), nn.Linear(200, 7)))


def transformer():
    """torchvision's vision transformer, narrow, with a head that is not zero"""
    torch.manual_seed(0)
    model = lively(SHORT["vit"]())
    nn.init.normal_(model.heads.head.weight, std=.02)
    return model


def mobilenet():
    """torchvision's MobileNetV2, narrow"""
    torch.manual_seed(0)
    return lively(SHORT["mobilenet_v2"]())


def gpt2():
    """Hugging Face's GPT-2 with a tied head"""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=16, n_embd=32, n_layer=2, n_head=4)).eval()


def bert():
    """Hugging Face's BERT with a tied head"""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)).eval()


ids = {"input_ids": torch.arange(10)[None]}
zoo = {"conv": (conv_net, torch.randn(2, 3, 12, 12)), "mobilenet": (mobilenet, torch.randn(2, 3, 32, 32)), "vit": (transformer, torch.randn(2, 3, 32, 32)),
       "gpt2": (gpt2, ids), "bert": (bert, ids)}


def outputs(model, x):
    """What a model computes, one tensor"""
    with torch.no_grad():
        out = model(**x) if isinstance(x, dict) else model(x)
    return out if torch.is_tensor(out) else out[0]


def plan_of(kind, model, x):
    """A plan of one kind for all layers that take it"""
    names = [u.name for u in all_units(model)[0]]
    if kind == "zeros": return Plan(sparsity=dict.fromkeys(names, 80))
    if kind == "few are left": return Plan(sparsity=dict.fromkeys(names, 98))
    bits = {name: (2, 3, 4, 8)[i % 4] for i, name in enumerate(names)}
    if kind == "bits": return Plan(quantization=bits)
    if kind == "asymmetric": return Plan(quantization=BitPlan(bits, settings={**GRIDS, "symmetric": False}))
    called = [name for name in names if "self_attention" not in name]   # weights inside of an attention have no calls of their own
    if kind == "activations": return Plan(quantization=BitPlan(dict.fromkeys(called, 8), settings={**GRIDS, "activations": "input and output", "ranges": "minmax"}))
    groups = [g.name for g in channel_groups(model, x, verbose=False) if not g.reason]
    if kind == "channels": return Plan(pruning=dict.fromkeys(groups, 40))
    rank = methods["low_rank"]
    thin = [u.name for u in rank.find_units(model, all_units(model)[0], x) if not rank(50).refusal(u)]
    if kind == "rank": return Plan(low_rank=dict.fromkeys(thin, 50))
    sparse, coded = names[::2], names[::3]
    rest = [name for name in thin if name not in sparse + coded]
    return Plan(sparsity=dict.fromkeys(sparse, 60), quantization=dict.fromkeys(coded, 4), pruning=dict.fromkeys(groups[::2], 30), low_rank=dict.fromkeys(rest, 60))


KINDS = ["zeros", "few are left", "bits", "asymmetric", "activations", "channels", "rank", "jointly"]


def same(a, b):
    """Whether two models hold the same bits under the same names, and are tied alike"""
    mine, other = a.state_dict(), b.state_dict()
    tied = [[name for name, p in m.named_parameters(remove_duplicate=False) if place(p) == place(q)] for m in (a, b) for q in m.parameters()]
    return list(mine) == list(other) and all(torch.equal(mine[k], other[k]) for k in mine) and tied[:len(tied)//2] == tied[len(tied)//2:]


trips = [(n, k) for n in zoo for k in KINDS if n in ("conv", "gpt2") or k in {"mobilenet": ("jointly",), "bert": ("jointly", "channels")}.get(n, KINDS)]

@pytest.mark.parametrize("name, kind", [pytest.param(*t, marks=[pytest.mark.slow]*(t[0] in ("mobilenet", "bert"))) for t in trips])
def test_round_trip(name, kind, tmp_path):
    """Each method on each network: the bytes that were planned; untouched and with the plan in force the same file; what is loaded computes what was saved"""
    make, x = zoo[name]
    model = make()
    plan = plan_of(kind, model, x)
    path = tmp_path / "a.safetensors"
    with unchanged(model):
        planned = Applier(model, x, settings={n: t.settings for n, t in plan.items() if hasattr(t, "settings")}).costs(plan, ["bytes"])["bytes"]
        n = save_compressed(model, plan, path, sample=x)
    assert n == path.stat().st_size and abs(n - planned) <= .01*planned + SLACK
    right = deepcopy(model)
    done = plan.apply(right, x)
    assert done.file_bytes == pytest.approx(planned, rel=.01) and done.memory_bytes == n_bytes(right)
    loaded = load_compressed(path, make)
    assert same(loaded, right) and torch.equal(outputs(loaded, x), outputs(right, x))
    again = tmp_path / "b.safetensors"
    assert save_compressed(right, plan, again) == n
    del done   # the weights of before are forgotten: grids are found from the rounded ones
    assert save_compressed(right, plan, again) == pytest.approx(n, rel=.001)
    assert same(load_compressed(again, make()), right)


def about_of(path):
    """The list in a file, and its tensors"""
    with open_archive(path) as archive: return archive.about, {name: archive.read(name) for name in archive.about["listed"]}


class Odd(nn.Module):
    """Tied and turned weights, a frozen one, a bare parameter, buffers of many types, half precision, and names nobody likes"""
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.back = nn.Embedding(20, 6), nn.Linear(6, 20), nn.Linear(20, 6, bias=False)
        self.head.weight = self.embed.weight
        self.back.weight = nn.Parameter(self.embed.weight.data.t())
        self.short = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2., dtype=torch.float64))
        self.register_buffer("hidden", torch.randn(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.names = nn.ParameterDict({'a,b"\n=1<b>': torch.randn(2), "ü" * 5000: torch.randn(3), "\ud800": torch.randn(1), "a:places": torch.zeros(0)})
        self.rnn = nn.LSTM(6, 4)
        self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
        parametrize.register_parametrization(self.rnn, "bias_hh_l0", nn.Identity())
    def forward(self, x):
        h = self.back(self.head(self.embed(x)))*self.scale
        return self.rnn(self.short(h.bfloat16()).float())[0].sum(-1), self.hidden


@pytest.mark.parametrize("plan", [None, {"sparsity": {"embed": 70, "short": 50}, "quantization": {"embed": 4, "short": 3}}])
def test_odd_tensors(plan, tmp_path):
    """All of it comes back to the bit: types, ties, order in memory, modes and what takes gradients; negative zeros too"""
    torch.manual_seed(0)
    model, x = Odd().train(), torch.arange(5)
    model.short.eval()
    if plan is None: model.embed.weight.data[3] = -0.
    with unchanged(model): save_compressed(model, plan and Plan(plan), tmp_path / "a")
    right = deepcopy(model)
    right.back.weight = nn.Parameter(right.embed.weight.data.t())
    if plan: Plan(plan).apply(right)
    loaded = load_compressed(tmp_path / "a", Odd)
    assert same(loaded, right) and torch.equal(loaded.hidden, right.hidden) and loaded.head.weight is loaded.embed.weight
    assert loaded.back.weight.data_ptr() == loaded.embed.weight.data_ptr() and loaded.conv.weight.stride() == right.conv.weight.stride()
    assert torch.equal(loaded.embed.weight.view(torch.int32), right.embed.weight.view(torch.int32))
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in right.parameters()]
    assert [m.training for m in loaded.modules()] == [m.training for m in right.modules()]
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), right(x), strict=True))


def test_tied_and_untied(tmp_path):
    """Ties are those of the file, whatever the fresh model has"""
    tied, loose = Odd(), Odd()
    loose.head.weight = nn.Parameter(torch.randn(20, 6))
    for saved, fresh in ((tied, Odd()), (loose, Odd()), (tied, deepcopy(loose))):
        save_compressed(saved, None, tmp_path / "a")
        loaded = load_compressed(tmp_path / "a", fresh)
        assert (loaded.head.weight is loaded.embed.weight) == (saved is tied) and torch.equal(loaded.head.weight, saved.head.weight)


def test_trained_on(tmp_path):
    """Zeros that are held and grids that are rounded again while training: saved with the plan, and as the model is"""
    net, x = three_layers().train(), torch.randn(30, 8)
    held, rounded = Sparsifier(net), quantize_model(net, {"2": 4, "4": 3})
    held.sparsify_model({"0": 75})
    for p in net[0].parameters(): assert p.requires_grad
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    for _ in range(3):
        net(x).square().mean().backward()
        opt.step()
        held.hold()
        rounded.round()
    plan = Plan(sparsity={"0": 75}, quantization={"2": 4, "4": 3})
    sizes = [save_compressed(net, p, tmp_path / "a", applied=True) for p in (plan, None)]
    loaded = load_compressed(tmp_path / "a", three_layers)
    assert same(loaded, net) and torch.equal(loaded(x), net(x)) and sizes[0] < 3000 and abs(sizes[0] - sizes[1]) < 200
    loaded[2].weight.data.mul_(torch.rand(16, 16))
    with pytest.raises(ValueError, match="or changed since"): save_compressed(loaded, plan, tmp_path / "b", applied=True)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("compression", ["sparsity", "pruning", "quantization", "low_rank"])
def test_sized(compression, tmp_path):
    """What `compress_to_size` made is saved in the bytes that it said"""
    net, x = conv_net(), zoo["conv"][1]
    small = compress_to_size(net, x, 40, compression, verbose=False)
    n = save_compressed(small.model, small.plan, tmp_path / "a", sample=x)
    assert abs(n - small.size) <= .01*small.size + 8000
    assert same(load_compressed(tmp_path / "a", conv_net), small.model)


@pytest.mark.parametrize("bits", [2, 4])
def test_zeros_on_few_bits(bits, tmp_path):
    """What few bits make zero beside what a plan drops, and what was zero before, is counted as it is written; refitted, the file is as long or shorter"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(600, 400), nn.ReLU(), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 10)).eval()
    for layer in net[::2]: nn.init.normal_(layer.weight, std=.05)
    x = torch.randn(300, 20)@torch.randn(20, 600)
    plan = Plan(sparsity={"0": 50, "2": 70}, quantization={"0": bits, "2": bits})
    said = Applier(net, x[:1]).costs(plan, ("bytes",))["bytes"]
    n, refitted = (save_compressed(net, plan, tmp_path / "a", reconstruct=data) for data in (None, x))
    assert abs(n - said) < .01*said + 8000 and refitted < 1.02*said + 8000
    Sparsifier(net).sparsify_model({"0": 80})
    untouched = Plan(quantization={"2": bits})
    said = Applier(net, x[:1]).costs(untouched, ("bytes",))["bytes"]
    assert abs(save_compressed(net, untouched, tmp_path / "a") - said) < .01*said + 8000


def test_refitted_models_come_back(tmp_path):
    """A plan of every method that was carried out with `reconstruct`, for the file alone or before: bit for bit the same"""
    x = torch.randn(60, 3, 12, 12).cumsum(-1)
    plan = Plan(pruning={"4": 25}, low_rank={"13": 60}, sparsity={"0": 40, "7": 60}, quantization={"7": 4, "9": 3, "15": 4})
    net = conv_net().eval()
    with unchanged(net): save_compressed(net, plan, tmp_path / "a", sample=x[:1], reconstruct=x)
    done, cut = conv_net().eval(), conv_net().eval()
    plan.apply(done, x[:1], reconstruct=x)
    save_compressed(done, plan, tmp_path / "b")
    plan.apply(cut, x[:1])
    loaded = [load_compressed(tmp_path / name, conv_net).eval() for name in "ab"]
    for model in loaded: assert same(model, done) and torch.equal(model(x), done(x))
    assert not torch.equal(cut(x), done(x)) and (done(x) - net(x)).square().mean() < .5*(cut(x) - net(x)).square().mean()


@pytest.mark.parametrize("how", ["rounded", "pruned"])
def test_trained_with_callbacks(how, tmp_path):
    """What `QuantizeCallback` or `PruneCallback` left of a model after training is saved and comes back bit for bit"""
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.randn(40, 8), torch.randint(0, 3, (40,)))
    dls = DataLoaders.from_dsets(data, data, bs=20, device="cpu", num_workers=0)
    learn = Learner(dls, three_layers(), loss_func=nn.CrossEntropyLoss())
    learn.remove_cb(ProgressCallback)
    cb = QuantizeCallback({"0": 4, "2": 3}) if how == "rounded" else PruneCallback({"0": 50}, steps=2)
    with learn.no_logging(): learn.fit(2, .05, cbs=cb)
    save_compressed(learn, None, tmp_path / "a")
    loaded = load_compressed(tmp_path / "a", three_layers)
    x = data.tensors[0]
    assert same(loaded, learn.model) and torch.equal(outputs(loaded.eval(), x), outputs(learn.model.eval(), x))


@pytest.mark.slow
def test_learner(tmp_path):
    """A fastai Learner with a head of fastai's own, pruned: saved and loaded by the Learner itself, which goes on training"""
    from fastai.callback.progress import ProgressCallback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.vision.learner import create_head
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.randn(16, 3, 12, 12), torch.randint(0, 3, (16,)))

    def make():
        dls = DataLoaders.from_dsets(data, data, bs=8, device="cpu", num_workers=0)
        body = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
        learn = Learner(dls, nn.Sequential(body, create_head(64, 3)), loss_func=nn.CrossEntropyLoss())
        learn.remove_cb(ProgressCallback)
        return learn

    learn, x = make(), data.tensors[0][:2]
    plan = Plan(pruning={"0.0": 50, "0.3": 25}, quantization={"1.8": 4})
    n = save_compressed(learn, plan, tmp_path / "a", sample=x)
    other = make()
    with other.no_logging(): other.fit(1)
    model = load_compressed(tmp_path / "a", other)
    plan.apply(learn.model, x)
    assert model is other.model and other.opt is None and same(model, learn.model)
    assert torch.equal(outputs(model.eval(), x), outputs(learn.model.eval(), x)) and n < .8*n_bytes(make().model) + 8000
    with other.no_logging(): other.fit(1)


@pytest.fixture
def fifth():
    """A method from outside: it drops the last bits of each number's mantissa"""
    @method("rounding")
    @dataclass(frozen=True)
    class Rounded(Perturbation):
        level: float = 50
        ranks = False
        @property
        def n_bits(self): return round(23*self.level/100)
        def change(self, model, unit):
            bits = unit.weight.data.view(torch.int32)
            bits &= -2**self.n_bits
        def shrink(self, unit, footprint, n_biases=0): return replace(footprint, bits=footprint.bits - self.n_bits)
        @classmethod
        def apply(cls, model, targets, **_):
            for unit, level in target_units(model, targets).items(): cls(level).change(model, unit)

    yield Rounded
    methods.pop("rounding", None)


def test_a_method_from_outside(fifth, tmp_path):
    """One that saves bits says how; one that does not is refused by name; a file is not read without the method"""
    net, plan = three_layers(), Plan(rounding={"0": 60, "2": 80})
    with unchanged(net), pytest.raises(ValueError, match="rounding says that it saves bits"): save_compressed(net, plan, tmp_path / "a")

    def encode(self, unit): return Codes((unit.weight.detach().view(torch.int32).long() & 0xFFFFFFFF) >> self.n_bits, 32 - self.n_bits, {})

    def decode(self, codes, unit):
        q = codes.q << self.n_bits
        return (q - (q >> 31 << 32)).int().view(torch.float32)

    fifth.encode, fifth.decode = encode, decode
    planned = Applier(net, torch.randn(1, 8)).costs(plan, ["bytes"])["bytes"]
    n = save_compressed(net, plan, tmp_path / "a")
    assert abs(n - planned) < 3000
    loaded = load_compressed(tmp_path / "a", three_layers)
    plan.apply(net)
    assert same(loaded, net)
    del methods["rounding"]
    with pytest.raises(ValueError, match="needs the method 'rounding'"): load_compressed(tmp_path / "a", three_layers)

    @method("swapping")
    class Swapped(Perturbation):
        @classmethod
        def apply(cls, model, targets, **_): model[1] = nn.Tanh()

    try:
        with unchanged(net), pytest.raises(ValueError, match="swapping puts other modules"): save_compressed(net, Plan(swapping={"0": 50}), tmp_path / "b")
    finally: del methods["swapping"]


def test_wrong_calls(tmp_path):
    """What came, and what would do; the model that was to be filled is as it was"""
    net, path = three_layers(), tmp_path / "a"
    path.write_bytes(b"of before")
    for bad in (lambda: save_compressed(net, {"0": 50}, path), lambda: save_compressed([net], None, path)):
        with pytest.raises(TypeError): bad()
    with pytest.raises(KeyError): save_compressed(net, Plan(sparsity={"9": 50}), path)
    with pytest.raises(ValueError): save_compressed(net, LayerTargets({"0": 50}), path)
    with pytest.raises(ValueError): save_compressed(net, Plan(sparsity={"0": 50}), path, applied=True)
    assert path.read_bytes() == b"of before" and os.listdir(tmp_path) == ["a"]
    save_compressed(net, Plan(sparsity={"0": 50}), path)
    others = [lambda: nn.Sequential(nn.Linear(8, 16)), lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
              lambda: nn.Sequential(*three_layers(), nn.Linear(4, 4)), lambda: nn.Linear(8, 16), lambda: nn.Sequential(*three_layers()[:4], nn.Linear(16, 4, bias=False))]
    for make in others:
        other = make()
        with unchanged(other), pytest.raises(ValueError, match="same class|too small"): load_compressed(path, other)
    with pytest.raises(FileNotFoundError): load_compressed(tmp_path / "none", net)
    with pytest.raises(ValueError): load_compressed(tmp_path, net)


def try_to_load(path, model, right):
    """Whether a file was refused; if not, what it holds is what was saved"""
    try: loaded = load_compressed(path, model)
    except ValueError: return True
    assert same(loaded, right)
    return False


def damaged(whole, chance):
    """The bytes of a file with something wrong"""
    n, kind = len(whole), chance.randrange(5)
    at = chance.randrange(n) if chance.random() < .5 else chance.randrange(2000)
    if kind == 0: return whole[:at]
    if kind == 1: return whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1:]
    if kind == 2: return whole[:at] + chance.randbytes(chance.randrange(1, 50)) + whole[at:]
    if kind == 3: return chance.choice([0, n, 2**24, 2**40, 2**63]).to_bytes(8, "little") + whole[8:]
    other = chance.randrange(n)
    return whole[:at] + whole[other:other + 40] + whole[at + 40:]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A file with every form in it, and the model in it"""
    path, net = tmp_path_factory.mktemp("files") / "a", three_layers()
    plan = Plan(sparsity={"0": 70}, quantization={"0": 3, "2": 4}, low_rank={"4": 20})
    save_compressed(net, plan, path)
    plan.apply(net)
    return path, net


@pytest.mark.parametrize("n", [250, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files(n, packed, tmp_path):
    """Cut off, bits turned, bytes put in, wrong lengths, pieces moved: an error, or what was saved; never anything else"""
    path, right = packed
    whole, chance, victim = path.read_bytes(), random.Random(0), three_layers()
    refused = 0
    for _ in range(n):
        (tmp_path / "b").write_bytes(damaged(whole, chance))
        refused += try_to_load(tmp_path / "b", three_layers() if refused % 50 == 0 else victim, right)
        if not refused: victim = three_layers()
    assert refused > .9*n


def spoiled(data, chance):
    """Plain data with one value changed into something that does not belong there"""
    at, keys = data, []
    while isinstance(at, dict | list) and at:
        key = chance.choice(sorted(at)) if isinstance(at, dict) else chance.randrange(len(at))
        keys.append((at, key))
        at = at[key]
        if chance.random() < .15: break
    holder, key = keys[-1]
    holder[key] = chance.choice([None, -1, 0, 10**18, 2.5, "", "0.weight", [], {}, [10**9, 10**9], True, "x"*10**5, [[["0"]]], {"0": {"training": 1}}])
    return data


@pytest.mark.slow
def test_made_up_files(packed, tmp_path):
    """A file whose checksums are right and whose list says anything: an error within bounded time and memory, or a model"""
    path, _ = packed
    about, tensors = about_of(path)
    about.pop("listed")
    chance, before, start = random.Random(1), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refused = 0
    for _ in range(250):
        write_archive(tmp_path / "b", tensors, spoiled(json.loads(json.dumps(about)), chance))
        try: load_compressed(tmp_path / "b", three_layers)
        except ValueError: refused += 1
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert refused > 100 and time.process_time() - start < 60 and more < 200_000 << (10 if sys.platform == "darwin" else 0)


def test_enormous_files(packed, tmp_path, monkeypatch):
    """A file of a terabyte, a list that unpacks to gigabytes, lists in lists without end"""
    path, _ = packed
    about, tensors = about_of(path)
    huge = tmp_path / "huge"
    huge.write_bytes(path.read_bytes())
    os.truncate(huge, 2**40)
    with pytest.raises(ValueError, match="1,099,511,627,776"): load_compressed(huge, three_layers)
    for text in (b" "*2**27, b"["*10**6, b"9"*10**6, b'{"listed": 3}'):
        monkeypatch.setattr(packing.zlib, "compress", lambda *_, text=text: zlib_compress(text))
        write_archive(tmp_path / "bomb", tensors, {})
        monkeypatch.undo()
        with pytest.raises(ValueError, match="is damaged: "): load_compressed(tmp_path / "bomb", three_layers)


zlib_compress = zlib.compress


def test_nothing_is_held_twice(tmp_path):
    """Saving a rounded model of 64 MB takes less than one more copy of it, on top of what `Plan.apply` takes"""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    plan = Plan(sparsity={str(i): 50 for i in range(8)}, quantization={str(i): 4 for i in range(8, 16)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n = save_compressed(model, plan, tmp_path / "a")
    planned = Applier(model, torch.randn(1, 1024)).costs(plan, ["bytes"])["bytes"]
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert abs(n - planned) < .01*planned
    assert more*1024 < 1.7*n_bytes(model), f"{more/1024:.0f} MB"


def test_recipe(tmp_path):
    """Replayed on fresh models of other weights, in one cut and in three: the same shapes; JSON and back; what does not fit is refused"""
    for name, steps in (("conv", 1), ("mobilenet", 1), ("conv", 3)):
        make, x = zoo[name]
        model, fresh = make(), make()
        for p in fresh.parameters(): p.data.normal_()
        pruner = Pruner(model, 40, example_inputs=x, steps=steps, verbose=False)
        for _ in range(steps): pruner.prune_model()
        pruner.recipe.to_json(tmp_path / "recipe.json")
        recipe = type(pruner.recipe).from_json(tmp_path / "recipe.json")
        assert recipe == pruner.recipe and len(recipe.cuts) == steps
        recipe.replay(fresh, x)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(outputs(fresh, x), outputs(model, x))
        with unchanged(fresh), pytest.raises(ValueError): recipe.replay(fresh, x)


def pruned_in(way, net, x, targets):
    """A network whose channels were taken out for good, in one of the ways there are"""
    if way == "Pruner": Pruner(net, targets, example_inputs=x[:1]).prune_model()
    elif way == "Plan.apply": Plan(pruning=targets).apply(net, x[:1])
    else:
        optimizer = torch.optim.SGD(net.parameters(), .01)
        with hold(net, targets, agp, 2, sample=x[:1], optimizer=optimizer) as step:
            for _ in range(2):
                net(x).square().mean().backward()
                optimizer.step()
                step()
    return net


@pytest.mark.parametrize("way", ["Pruner", "Plan.apply", "hold"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
def test_what_is_pruned_is_not_pruned_again(way, copied, tmp_path):
    """The targets of a network that has lost its channels are in it already; other targets are asked about."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).eval()
    targets = LayerTargets({"0": 50, "2": 50}, method="pruning")
    small = pruned_in(way, deepcopy(net), x, targets).eval()
    if copied: small = deepcopy(small)
    save_compressed(small, targets, tmp_path/"small.safetensors")
    back = load_compressed(tmp_path/"small.safetensors", deepcopy(net))
    assert [back[0].out_channels, back[2].out_channels] == [4, 8] and torch.equal(back(x), small(x))
    with pytest.raises(ValueError, match="already: give plan=None"): save_compressed(small, LayerTargets({"0": 25}, method="pruning"), tmp_path/"again.safetensors")
    save_compressed(small, LayerTargets({"0": 25}, method="pruning"), tmp_path/"again.safetensors", sample=x[:1], applied=False)
    assert load_compressed(tmp_path/"again.safetensors", deepcopy(net))[0].out_channels == 3


@pytest.mark.parametrize("saved", ["carried out for the file", "carried out before", "with plan=None"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
@pytest.mark.parametrize("plan", [Plan(pruning={"0": 50, "4": 50}), Plan(low_rank={"13": 50}), Plan(quantization={"4": 3}, sparsity={"0": 60})], ids=list)
def test_what_was_loaded_is_not_compressed_again(plan, saved, copied, tmp_path):
    """A model from a file, saved with the plan that it was saved with, comes back as it is or is asked about."""
    torch.manual_seed(0)
    x, net = torch.randn(2, 3, 8, 8), conv_net()
    small, asked = deepcopy(net), None if saved == "with plan=None" else plan
    if saved != "carried out for the file": plan.apply(small, x)
    save_compressed(small, asked, tmp_path/"first", sample=x)
    first = load_compressed(tmp_path/"first", deepcopy(net))
    again = deepcopy(first) if copied else first
    with unchanged(again):
        if "low_rank" in plan and (copied or asked is None):   # the layers that the plan names are gone
            with pytest.raises(KeyError, match="TwoLayers"): save_compressed(again, plan, tmp_path/"second", sample=x)
            save_compressed(again, plan, tmp_path/"second", applied=True)
        else: save_compressed(again, plan, tmp_path/"second", sample=x)
    assert same(load_compressed(tmp_path/"second", deepcopy(net)), first)


def test_files_that_do_not_say_what_was_reshaped(tmp_path):
    """Files of the versions before say nothing of it, and are read; one that says nonsense is refused."""
    net = three_layers()
    save_compressed(net, None, tmp_path/"a")
    about, tensors = about_of(tmp_path/"a")
    del about["listed"], about["reshaped"]
    write_archive(tmp_path/"old", tensors, about)
    assert same(load_compressed(tmp_path/"old", three_layers()), net)
    write_archive(tmp_path/"bad", tensors, dict(about, reshaped=3))
    with unchanged(other := three_layers()), pytest.raises(ValueError, match="damaged"): load_compressed(tmp_path/"bad", other)


@pytest.mark.parametrize("method, levels", [("quantization", {"0": 4, "2": 4}), ("low_rank", {"0": 50, "2": 50})])
def test_a_model_that_is_compressed_already(method, levels, tmp_path):
    """By a function of its method, which leaves no note: the error says which two words write it as it is"""
    net, targets, x = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4)), Plan({method: levels})[method], torch.randn(2, 40)
    held = methods[method].apply(net, targets, sample=x)
    with pytest.raises((ValueError, KeyError), match="is in the model already, say applied=True, or plan=None") as e:
        save_compressed(net, targets, tmp_path / "a")
    assert "quantized already" in str(e.value) or "TwoLayers" in str(e.value)   # what was wrong comes first
    for how in ({"plan": targets, "applied": True}, {"plan": None}):
        save_compressed(net, path=tmp_path / "a", **how)
        assert torch.equal(load_compressed(tmp_path / "a", nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4)))(x), net(x))
    del held


@pytest.mark.parametrize("plan", [50, "50%", {"0": 50}])
def test_what_a_plan_may_be(plan, tmp_path):
    with pytest.raises(TypeError, match=r"such as Plan\(sparsity=\{layer: percent\}\), .* None for the model as it is"):
        save_compressed(three_layers(), plan, tmp_path / "a")


def test_a_learner_has_inputs(tmp_path):
    """Channels of a network whose inputs cannot be guessed are taken out by one of its data, and the order of its batches stays"""
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from torch.utils.data import TensorDataset

    def make(): return nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(40, 2))

    data, net, plan = TensorDataset(torch.randn(12, 3, 9), torch.randint(0, 2, (12,))), make(), Plan(pruning={"0": 50})
    learn = Learner(DataLoaders.from_dsets(data, data, bs=4, device="cpu", num_workers=0), net, loss_func=nn.CrossEntropyLoss())
    for inputs in (learn, Learner(DataLoaders(learn.dls.train), net, loss_func=nn.CrossEntropyLoss())):
        with unchanged(net): save_compressed(inputs, plan, tmp_path / "a")
        assert load_compressed(tmp_path / "a", make)[0].out_channels == 4
    with pytest.raises(ValueError): save_compressed(net, plan, tmp_path / "b")   # without the Learner nothing tells them


def classifier(n):
    """So many classes"""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, n))


@pytest.mark.parametrize("how", ["planned", "pruned", "sparse", "low rank"])
def test_fresh_model_of_another_size_is_refused(how, tmp_path):
    """A larger head is not cut to the size of the saved one, as channels are that a plan took out; the model is as it was, and one of the right size is filled."""
    torch.manual_seed(0)
    model, x, path = classifier(10), torch.randn(3, 8), tmp_path/"small.safetensors"
    plan = Plan(**{{"sparse": "sparsity", "low rank": "low_rank"}.get(how, "pruning"): {"0": 50}})
    if how == "pruned": plan.apply(model, x)
    save_compressed(model, plan, path, sample=x)
    for wrong in (classifier(12), nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 10))):
        before = fingerprint(wrong)
        with pytest.raises(ValueError, match="before it was compressed"): load_compressed(path, wrong)
        assert changes(before, fingerprint(wrong)) == []
    loaded = load_compressed(path, classifier(10))
    again = tmp_path/"again.safetensors"
    save_compressed(loaded, plan, again)
    with pytest.raises(ValueError, match="before it was compressed"): load_compressed(again, classifier(12))
    assert torch.equal(load_compressed(again, classifier(10))(x), loaded(x))
