"""The contract of every perturbation and of every analysis: the model comes back bit for bit, whatever happens in between."""

import copy
import random as python_random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fasterai_sens import (
    Perturbation,
    Pruned,
    Quantized,
    SensitivityAnalyzer,
    Sparse,
    changes,
    fingerprint,
    large_final,
    leave_no_trace,
    taylor,
    wanda,
)
from fasterai_sens.core.inputs import check_sample
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.protocol import methods, taken
from fasterai_sens.methods.proof import channel_groups

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Boom(Exception):
    """Raised by the tests where something is to go wrong"""


# ---- models


class ConvNet(nn.Module):
    """Batch norm, and a grouped, a depthwise, a pointwise and a transposed grouped convolution"""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.grouped, self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point, self.up = nn.Conv2d(8, 8, 1, bias=False), nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(4, 3)
        self.register_buffer("gain", torch.tensor(0.7), persistent=False)

    def forward(self, x):
        x = self.bn(self.stem(x)).relu() * self.gain
        x = self.up(self.point(self.depthwise(self.grouped(x).relu()).relu()) + x)
        return self.head(self.drop(x.mean((2, 3))))


class TiedNet(nn.Module):
    """An embedding tied to the head, and a decoder that is the encoder transposed, over the same storage"""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.BatchNorm1d(8)
        self.encode, self.decode = nn.Linear(8, 16), nn.Linear(16, 8)
        self.decode.weight = nn.Parameter(self.encode.weight.data.t())
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.decode(self.encode(self.norm(self.embed(ids).mean(1))).relu()))


class AttentionNet(nn.Module):
    """An encoder layer with its eval fast path, attention with keys and values of another width, and a layer used twice"""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.cross, self.bn = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True), nn.BatchNorm1d(8)
        self.twice, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.encoder(x)
        x = x + self.cross(x, x[..., :4], x[..., 4:])[0]
        return self.head(self.bn(self.twice(self.twice(x).relu()).mean(1)))


class TransformerNet(nn.Module):
    """An encoder layer with its eval fast path, and layers behind it"""

    def __init__(self):
        super().__init__()
        self.encoder, self.mid = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8)
        self.bn, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.bn(self.mid(self.encoder(x)).mean(1)))


class ResidualNet(nn.Module):
    """Three layers that are added up, an inner one, and a linear layer that reads each channel at several places"""

    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.inner = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=1)
        self.slope, self.back, self.skip = nn.PReLU(6), nn.Conv2d(6, 8, 1, bias=False), nn.Conv2d(4, 8, 1)
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(32, 3)

    def forward(self, x):
        y = self.bn(self.stem(x)).relu()
        return self.head(self.pool(y + self.back(self.slope(self.inner(y))) + self.skip(x)).flatten(1))


MODELS = {"conv": ConvNet, "tied": TiedNet, "attention": AttentionNet}
PRUNABLE = {"conv": ConvNet, "residual": ResidualNet, "transformer": TransformerNet}  # those of which channels can be removed


def example(kind):
    """Four inputs for a model of this kind"""
    gen = torch.Generator().manual_seed(1)
    if kind == "tied":
        return torch.randint(12, (4, 5), generator=gen)
    return torch.randn((4, 4, 6, 6) if kind in ("conv", "residual") else (4, 5, 8), generator=gen)


MODULE_HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: None),
    "forward with kwargs": lambda m: m.register_forward_hook(lambda m, args, kwargs, out: None, with_kwargs=True),
    "forward always": lambda m: m.register_forward_hook(lambda m, args, out: None, always_call=True),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: None),
    "forward pre with kwargs": lambda m: m.register_forward_pre_hook(lambda m, args, kwargs: None, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(lambda m, into, out: None),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, out: None),
    "state_dict": lambda m: m.register_state_dict_post_hook(lambda m, state, prefix, meta: None),
    "state_dict pre": lambda m: m.register_state_dict_pre_hook(lambda m, prefix, keep_vars: None),
    "load_state_dict pre": lambda m: m.register_load_state_dict_pre_hook(lambda *args: None),
    "load_state_dict post": lambda m: m.register_load_state_dict_post_hook(lambda m, keys: None),
}
TENSOR_HOOKS = {
    "gradient": lambda p: p.register_hook(lambda g: None),
    "post accumulate": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
}


def hook_everything(module, param):
    """A hook of every kind on `module` and on `param`"""
    for add in MODULE_HOOKS.values():
        add(module)
    for add in TENSOR_HOOKS.values():
        add(param)


def lived_in(kind):
    """A model with a past: gradients, moved statistics, a frozen layer, mixed modes and hooks of every kind"""
    torch.manual_seed(0)
    model, x = (MODELS | PRUNABLE)[kind](), example(kind)
    for n, p in model.named_parameters():
        if n.endswith(("in_proj_bias", "out_proj.bias")): nn.init.normal_(p)   # attention begins with zeros
    score(model, x).backward()
    units, _ = all_units(model)
    units[0].weight.grad = None
    units[1].weight.requires_grad_(False)
    for m in (model, units[0].module, units[-1].module):
        hook_everything(m, units[0].weight)
    for i, m in enumerate(model.modules()):
        m.training = i % 3 != 1
    return model, x


def score(model, x):
    """A number that depends on every weight"""
    out = model(x).float()
    return (out * torch.linspace(1, 2, out.numel()).view(out.shape)).square().mean()


def evaluations(x, act):
    """An `eval_fn`, and the same one with `act(model, x)` after it"""
    def tidy(m):
        with torch.no_grad():
            return score(m, x).item()

    def untidy(m):
        value = tidy(m)
        act(m, x)
        return value

    return tidy, untidy


# ---- perturbations


class Untidy(Perturbation):
    """Adds noise to the weight, and leaves everything else lying about"""

    default_level = 10

    def __init__(self, level):
        self.pct = level

    @property
    def level(self):
        """Percent of noise"""
        return self.pct

    def change(self, model, unit):
        """Change the weight, a mode, an attribute, hooks, buffers and the generators"""
        unit.weight.data.add_(self.pct / 100 * torch.rand(unit.weight.shape, dtype=unit.weight.dtype))
        unit.module.note = "was here"
        unit.module.register_buffer("extra", torch.ones(2))
        unit.module.register_forward_hook(lambda m, args, out: None)
        model.train()
        np.random.rand()
        python_random.random()


OWN_METHODS = {n: cls for n, cls in methods.items() if cls.__module__.startswith("fasterai_sens.")}
CLASSES = {**OWN_METHODS, "untidy": Untidy}
OPTIONS = {
    "sparsity": [
        *({"granularity": g} for g in ("weight", "row", "column", "kernel", "channel", "filter", "1:2", "2:4")),
        {"granularity": "layer", "level": 100},
        {"criteria": wanda},
        {"criteria": taylor},
        {"criteria": torch.sin},
    ],
    "quantization": [{"level": 3}, {"level": 3, "quant_per_channel": False}, {"level": 3, "quant_activations": True}],
    "pruning": [{}, {"level": 75}, {"criteria": wanda}, {"criteria": taylor}],
}
SETUPS = [(name, options) for name in CLASSES for options in OPTIONS.get(name, [{}])]
SETUP_IDS = [" ".join([n, *(f"{k}={getattr(v, '__name__', v)}" for k, v in o.items())]) for n, o in SETUPS]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=SETUP_IDS)
each_model = pytest.mark.parametrize("kind", MODELS)
CASES = [(setup, kind) for setup in SETUPS for kind in (PRUNABLE if setup[0] == "pruning" else MODELS)]


def parametrize_cases(*kinds):
    """Each setup on each model that it is for"""
    chosen = [c for c in CASES if c[1] in kinds]
    return pytest.mark.parametrize("setup,kind", chosen, ids=[f"{SETUP_IDS[SETUPS.index(setup)]}-{kind}" for setup, kind in chosen])


each_case, each_conv_case = parametrize_cases(*MODELS, *PRUNABLE), parametrize_cases("conv", "residual")


def prepare(setup, model, x):
    """The perturbation as an analysis would make it, and the units it takes"""
    name, options = setup
    cls, (units, _) = CLASSES[name], all_units(model)
    units = cls.find_units(model, units, x)
    data = [(x, torch.zeros(len(x), dtype=torch.long))]
    offered = taken(cls.configure, dict(model=model, units=units, calibration_data=data, sample=x))
    make = cls.configure(**offered, **{k: v for k, v in options.items() if k != "level"})
    p = make(options.get("level", cls.default_level))
    reasons = {u: p.refusal(u) for u in units}
    assert all(why is None or isinstance(why, str) and why for why in reasons.values())
    return p, [u for u, why in reasons.items() if why is None]


def end(ending):
    """Leave a block in one of three ways"""
    if ending is not None:
        raise ending


def in_block(p, model, unit, act, ending):
    """Run `act` inside the perturbation and leave it by `ending`"""
    if ending is None:
        with p(model, unit):
            act()
        return
    with pytest.raises(type(ending)), p(model, unit):
        act()
        end(ending)


ENDINGS = (None, Boom(), KeyboardInterrupt())


def names_of(tensor, model):
    """Every name under which `model` holds the numbers of `tensor`"""
    return {n for n, p in model.named_parameters(remove_duplicate=False) if p.data_ptr() == tensor.data_ptr()}


def module_names(modules, model):
    """Every name under which `model` holds one of `modules`"""
    return {n for n, m in model.named_modules(remove_duplicate=False) if any(m is o for o in modules)}


# group -> modules that lose outputs or inputs with it
TOUCHED = {
    "conv": {"stem": {"stem", "bn", "grouped", "point", "up"}, "grouped": {"grouped", "depthwise", "point"}, "up": {"up", "head"}},
    "residual": {"stem": {"stem", "bn", "inner", "back", "skip", "head"}, "inner": {"inner", "slope", "back"}},
    "transformer": {"encoder.linear1": {"encoder.linear1", "encoder.linear2"}, "mid": {"mid", "bn", "head"}},
}
SHRINKS = {"weight", "bias", "running_mean", "running_var"}


def check_only_smaller(kind, name, found):
    """Tensors of the modules that are coupled, and their attributes for sizes; hooks of a parameter are left with the larger one"""
    for section, where in (c.split(": ", 1) for c in found):
        path, _, last = where.rpartition(".")
        if section == "attributes":
            assert where in TOUCHED[kind][name], where
        else:
            assert section in ("parameters", "buffers", "hooks") and path in TOUCHED[kind][name] and last in SHRINKS, (section, where)
    assert {c.removeprefix("parameters: ").rpartition(".")[0] for c in found if c.startswith("parameters: ")} == TOUCHED[kind][name]


@each_case
def test_acts_on_its_unit_alone(setup, kind):
    """Inside the block the weight of the unit differs and nothing else; gradients are set aside; after it all is as before"""
    model, x = lived_in(kind)
    before = fingerprint(model)
    p, units = prepare(setup, model, x)
    assert changes(before, fingerprint(model)) == [], "configure left a trace"
    assert units, "this setup is never tried on this model"
    for unit in units:
        with p(model, unit):
            found = {c for c in changes(before, fingerprint(model)) if not c.startswith("grads: ")}
            assert all(q.grad is None for q in model.parameters())
        if setup[0] == "pruning":
            check_only_smaller(kind, unit.name, found)
            assert changes(before, fingerprint(model)) == [], unit.name
            continue
        written = unit.tensors if setup[1].get("granularity") == "filter" else [unit.weight]   # a filter goes with its bias
        expected = {f"parameters: {n}" for t in written for n in names_of(t, model)}
        if setup[1].get("quant_activations"):
            expected |= {f"hooks: {n}" for n in module_names(unit.multiplying, model)}
        if setup[0] == "untidy":
            assert {"rng: python", "rng: numpy", "rng: torch"} < found
            found = {c for c in found if c.startswith("parameters: ")}
        assert found == expected, unit.name
        assert changes(before, fingerprint(model)) == [], unit.name


@each_case
def test_moves_the_output(setup, kind):
    """Inside the block the model answers differently, and after it as before"""
    model, x = lived_in(kind)
    model.eval()
    with torch.no_grad():
        before = model(x)
        p, units = prepare(setup, model, x)
        for unit in units:
            with p(model, unit):
                model.eval()
                assert not torch.equal(model(x), before), unit.name
            model.eval()
            assert torch.equal(model(x), before), unit.name


# ---- what may happen meanwhile


def nothing(model, x):
    """Only look"""
    with torch.no_grad():
        model(x)


def flip_modes(model, x):
    """Turn every train flag over"""
    for m in model.modules():
        m.training = not m.training


def move_statistics(model, x):
    """A forward pass in training mode"""
    model.train()
    model(x)


def run_backward(model, x):
    """A backward pass in training mode, gradients and all"""
    model.train().requires_grad_(True)
    score(model, x).backward()


def fill_gradients(model, x):
    """Gradients out of nowhere"""
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def add_hooks(model, x):
    """A hook of every kind, everywhere"""
    model.requires_grad_(True)
    for m in model.modules():
        hook_everything(m, next(model.parameters()))


def clear_hooks(model, x):
    """Not one hook is left"""
    for o in (*model.modules(), *model.parameters()):
        tables = vars(o).items() if isinstance(o, nn.Module) else ((k, getattr(o, k)) for k in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        for k, v in tables:
            if "hook" in k and hasattr(v, "clear"):
                v.clear()


def turn_requires_grad(model, x):
    """Freeze what was free and free what was frozen"""
    for p in model.parameters():
        p.requires_grad_(not p.requires_grad)


def go_half(model, x):
    """Another dtype for everything"""
    model.half()


def go_double(model, x):
    """Another dtype for everything, and a pass with it"""
    model.double().train()
    model(x.double() if x.is_floating_point() else x)


def draw(model, x):
    """Numbers from all generators"""
    python_random.random()
    np.random.rand(2)
    torch.rand(2)
    torch.manual_seed(3)


def move_storage(model, x):
    """The same numbers in another place"""
    for t in (*model.parameters(), *model.buffers()):
        t.data = t.data.clone()


def write_buffers(model, x):
    """Other numbers in every buffer, or another tensor"""
    for m in model.modules():
        for n, b in list(m._buffers.items()):
            b.zero_()
            if b.dim():
                setattr(m, n, b + 1)


def rebuild(model, x):
    """Add and delete children, buffers, parameters and attributes"""
    for m in list(model.modules()):
        m.extra = nn.Identity()
        m.note = "was here"
        m.register_buffer("remember", torch.ones(2))
        m.register_parameter("another", nn.Parameter(torch.ones(2)))
    last = list(dict(model.named_children()))[-2]
    delattr(model, last)


def reparametrize(model, x):
    """Weights that are computed: torch gives the module another class for that"""
    parametrize.register_parametrization(model.head, "weight", nn.Tanh())


BODIES = [
    nothing, flip_modes, move_statistics, run_backward, fill_gradients, add_hooks, clear_hooks, turn_requires_grad,
    go_half, go_double, draw, move_storage, write_buffers, rebuild, reparametrize,
]  # fmt: skip


@each_case
def test_no_trace_of_any_body(setup, kind):
    """Whatever the body does, and however it ends: each body and each ending in every case, each pair of them in many"""
    model, x = lived_in(kind)
    p, units = prepare(setup, model, x)
    before, first = fingerprint(model), CASES.index((setup, kind))
    for i, body in enumerate(BODIES):
        for unit in {units[0], units[-1]}:
            ending = ENDINGS[(first + i) % len(ENDINGS)]
            in_block(p, model, unit, lambda body=body: body(model, x), ending)
        assert changes(before, fingerprint(model)) == [], body.__name__


@each_conv_case
def test_unit_may_be_written_to(setup, kind):
    """What the body does to the weights of the unit is undone as well"""
    model, x = lived_in(kind)
    p, units = prepare(setup, model, x)
    before = fingerprint(model)
    for unit in units:
        for ending in ENDINGS:
            in_block(p, model, unit, lambda unit=unit: [u.weight.data.zero_() for u in unit.layers], ending)
    assert changes(before, fingerprint(model)) == []


@each_conv_case
def test_blocks_can_be_nested(setup, kind):
    """One perturbation inside another, on the same unit and on others"""
    model, x = lived_in(kind)
    p, units = prepare(setup, model, x)
    before, layers = fingerprint(model), all_units(model)[0]
    for unit in units:
        with Quantized(3)(model, unit.layers[0]):
            middle = fingerprint(model)
            with p(model, unit), Sparse(50)(model, layers[-1]):
                assert changes(middle, fingerprint(model))
            assert changes(middle, fingerprint(model)) == []
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("kind", ["conv", "residual", "transformer"])
def test_what_is_pruned_looks_like_before(kind):
    """A smaller parameter is trained or frozen, and of the type, as the larger one was; modules keep their modes; no number is new"""
    model, x = lived_in(kind)
    p, groups = prepare(("pruning", {}), model, x)
    assert {g.name for g in groups} == set(TOUCHED[kind])
    old, modes = dict(model.named_parameters()), {n: m.training for n, m in model.named_modules()}
    for group in groups:
        with p(model, group):
            new = dict(model.named_parameters())
            assert list(new) == list(old)
            assert {n: m.training for n, m in model.named_modules()} == modes
            smaller = [n for n in new if new[n].shape != old[n].shape]
            assert {n.rpartition(".")[0] for n in smaller} == TOUCHED[kind][group.name]
            for n in old:
                assert (new[n].requires_grad, new[n].dtype, new[n].is_leaf, type(new[n])) == (old[n].requires_grad, old[n].dtype, True, nn.Parameter)
                assert torch.isin(new[n], old[n]).all() and (n in smaller or new[n] is old[n])
            score(model.train(), x).backward()
            assert all((q.grad is None) == (not q.requires_grad) for n, q in new.items())


def test_pruned_inside_pruned():
    """Two groups at once, in either order, are as small as both, and the model comes back from each block"""
    model, x = lived_in("residual")
    p, groups = prepare(("pruning", {}), model, x)
    before, sizes = fingerprint(model), []
    for outer, inner in (groups, groups[::-1]):
        with p(model, outer):
            middle = fingerprint(model)
            with p(model, inner):
                model.eval()(x)
                sizes.append({n: tuple(q.shape) for n, q in model.named_parameters()})
            assert changes(middle, fingerprint(model)) == []
        assert changes(before, fingerprint(model)) == []
    assert sizes[0] == sizes[1] and sizes[0]["inner.weight"] == (3, 4, 3, 3) and sizes[0]["back.weight"] == (4, 3, 1, 1)


@pytest.mark.parametrize("error", ENDINGS[1:], ids=repr)
@pytest.mark.parametrize("kind", PRUNABLE)
def test_no_trace_of_pruning_that_fails(kind, error):
    """The criterion breaks; or a rule of torch-pruning does, when most of the group is smaller already"""
    model, x = lived_in(kind)
    before = fingerprint(model)

    def broken(w):
        draw(model, x)
        raise error

    class BrokenRule:
        handler = None

        def __call__(self, idxs):
            fill_gradients(model, x)
            raise error

    for group in [g for g in channel_groups(model, x) if g.reason is None]:
        with pytest.raises(type(error)), Pruned(50, broken)(model, group):
            pytest.fail("the body must not run")
        assert changes(before, fingerprint(model)) == []
        parts = [*group.parts, replace(group.parts[0], prune=BrokenRule())]
        with pytest.raises(type(error)), Pruned(50)(model, replace(group, parts=parts)):
            pytest.fail("the body must not run")
        assert changes(before, fingerprint(model)) == []


def test_pruning_does_not_break_ties():
    """A weight that two layers share, or see from two sides, would have to be cut differently for each: refused, with the reason"""
    model, x = lived_in("tied")
    before, calls = fingerprint(model), []
    found = SensitivityAnalyzer(model, x, lambda m: calls.append(m) or score(m, x).item()).analyze("pruning", verbose=False)
    assert [r.name for r in found.layers] == ["encode", "head"] and not any(r.prunable for r in found.layers) and found.top() == []
    reasons = dict(found.skipped)
    assert "encode.weight" in reasons["encode"] and "same numbers" in reasons["encode"]
    assert "embed.weight and head.weight share one weight" in reasons["head"]
    assert len(calls) == 1, "what is refused is not evaluated"
    assert changes(before, fingerprint(model)) == []
    for group in channel_groups(model, x):
        with pytest.raises(ValueError, match="would not any more"), Pruned(50)(model, group):
            pytest.fail("the body must not run")
        assert changes(before, fingerprint(model)) == []


class Shifted(nn.Module):
    """Rows of an image shifted against each other, channels last: torch-pruning's search has no end of its own"""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        """[n, 3, h, w] -> [n, h, w, 2]"""
        x = self.b(self.a(x).permute(0, 2, 3, 1).relu())
        return self.head(x + torch.cat([x[:, 1:], x[:, :1]], 1))


def test_pruning_of_a_model_on_which_the_search_does_not_end():
    """It is stopped, the layer says why, the others are measured, and nothing is left behind"""
    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(2, 3, 8, 8)
    before, calls = fingerprint(model), []
    found = SensitivityAnalyzer(model, x, lambda m: calls.append(m) or score(m, x).item()).analyze("pruning", verbose=False)
    assert changes(before, fingerprint(model)) == []
    reasons = dict(found.skipped)
    assert [r.name for r in found.layers if r.prunable] == ["a"] and len(calls) == 2
    endless = "does not come to an end", "follows more channels than any layer has"
    assert any(why in reasons["b"] for why in endless) and "coupled with b" in reasons["b"] and "output of the model" in reasons["head"]


class Breaks(Perturbation):
    """Fails half way through"""

    level = 50

    def __init__(self, error):
        self.error = error

    def change(self, model, unit):
        """Write, then fail"""
        unit.weight.data.flatten()[:3].zero_()
        unit.weight.data[0] = 0
        model.train().half()
        raise self.error


@each_model
@pytest.mark.parametrize("error", ENDINGS[1:], ids=repr)
def test_no_trace_of_a_change_that_fails(kind, error):
    """The perturbation itself breaks, alone and in an analysis"""
    model, x = lived_in(kind)
    before = fingerprint(model)
    for unit in all_units(model)[0]:
        with pytest.raises(type(error)), Breaks(error)(model, unit):
            pytest.fail("the body must not run")
    with pytest.raises(type(error)):
        SensitivityAnalyzer(model, x, lambda m: score(m, x).item()).analyze(Breaks(error), verbose=False)
    assert changes(before, fingerprint(model)) == []


@each_model
def test_leave_no_trace(kind):
    """The context manager by itself, with all weights changed too"""
    model, x = lived_in(kind)
    before = fingerprint(model)
    for body in BODIES:
        for ending in ENDINGS:
            try:
                with leave_no_trace(model):
                    body(model, x)
                    for p in model.parameters():
                        p.data.add_(1)
                    end(ending)
            except (Boom, KeyboardInterrupt) as e:
                assert e is ending
        assert changes(before, fingerprint(model)) == [], body.__name__


@each_model
def test_model_trains_on_as_if_nothing_had_been(kind):
    """Gradients after it equal those of a model that was never touched"""
    (model, x), (twin, _) = lived_in(kind), lived_in(kind)
    for body in BODIES:
        with leave_no_trace(model):
            body(model, x)
    for m in (model, twin):
        m.zero_grad()
        torch.manual_seed(0)
        score(m.train(), x).backward()
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        assert p.grad is None or torch.equal(p.grad, q.grad), n


def expanded(m):
    """A buffer that repeats one number"""
    m.register_buffer("odd", torch.ones(1).expand(3))


def nan_buffer(m):
    """Numbers that do not equal themselves"""
    m.register_buffer("odd", torch.full((3,), torch.nan))


def sparse_buffer(m):
    """As graph networks have them"""
    m.register_buffer("odd", torch.eye(3).to_sparse())


def empty_buffer(m):
    """No numbers at all"""
    m.register_buffer("odd", torch.zeros(0, 3))


def integer_buffer(m):
    """Not floating point"""
    m.register_buffer("odd", torch.arange(3))


def none_buffer(m):
    """A name without a tensor"""
    m.register_buffer("odd", None)


def trainable_buffer(m):
    """A buffer that takes part in the gradient"""
    m.register_buffer("odd", torch.ones(3, requires_grad=True))


def channels_last(m):
    """Weights in another memory order"""
    m.to(memory_format=torch.channels_last)


def complex_parameter(m):
    """A parameter that is no real number"""
    m.odd = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def expanded_parameter(m):
    """A weight that repeats one row, as tied or initialised by `expand`"""
    m.head.weight.data = torch.randn(1, 4).expand(3, 4)


ODD = [
    expanded, nan_buffer, sparse_buffer, empty_buffer, integer_buffer, none_buffer, trainable_buffer, channels_last, complex_parameter,
    expanded_parameter,
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda f: f.__name__)
def test_odd_tensors(odd):
    """Tensors of every kind are left alone, and put back where the body wrote to them"""
    model, x = lived_in("conv")
    odd(model)
    before = fingerprint(model)
    r = SensitivityAnalyzer(model, x, lambda m: score(m, x).item()).analyze("quantization", 3, layers=["stem", "up"], verbose=False)
    assert all(row.delta for row in r.layers)
    r = SensitivityAnalyzer(model, x, lambda m: score(m, x).item()).analyze("pruning", 50, layers=["grouped"], verbose=False)
    assert [(row.name, row.prunable) for row in r.layers] == [("grouped", True), ("depthwise", True)] and all(row.delta for row in r.layers)
    assert changes(before, fingerprint(model)) == []


def test_sparse_buffer_gets_its_numbers_back():
    """`fingerprint` does not look into sparse tensors, so this one looks"""
    model, _ = lived_in("conv")
    sparse_buffer(model)
    with leave_no_trace(model):
        model.odd.mul_(2)
    assert torch.equal(model.odd.to_dense(), torch.eye(3))


def test_buffer_keeps_requires_grad_and_gradient():
    """Buffers can ask for gradients as well"""
    model, _ = lived_in("conv")
    trainable_buffer(model)
    model.odd.grad = torch.ones(3)
    with leave_no_trace(model):
        model.odd.sum().backward()
        model.odd.requires_grad_(False)
    assert model.odd.requires_grad
    assert torch.equal(model.odd.grad, torch.ones(3))


# ---- whole analyses


RUNS = {
    "weights": (large_final, lambda a: a.analyze("sparsity", 50, verbose=False)),
    "filters": (large_final, lambda a: a.analyze("sparsity", 50, granularity="filter", verbose=False)),
    "2:4": (large_final, lambda a: a.analyze(granularity="2:4", verbose=False)),
    "bits": (large_final, lambda a: a.analyze("quantization", 3, verbose=False)),
    "activations": (large_final, lambda a: a.analyze("quantization", 4, quant_activations=True, verbose=False)),
    "wanda": (wanda, lambda a: a.analyze("sparsity", 50, verbose=False)),
    "taylor": (taylor, lambda a: a.analyze("sparsity", 50, verbose=False)),
    "own": (large_final, lambda a: a.analyze(Untidy(10), verbose=False)),
    "sweep": (large_final, lambda a: a.sweep("sparsity", [30, 60], verbose=False)),
    "stopped": (wanda, lambda a: a.sweep("quantization", [8, 3], early_stop_mode="dropped", early_stop_value=1e-6, verbose=False)),
    "progress": (large_final, lambda a: a.analyze("sparsity", 50, layers="head", verbose=True)),
}
CHANNEL_RUNS = {
    "channels": (large_final, lambda a: a.analyze("pruning", 50, verbose=False)),
    "channels wanda": (wanda, lambda a: a.analyze("pruning", 50, verbose=False)),
    "channels taylor": (taylor, lambda a: a.analyze("pruning", 50, verbose=False)),
    "channels sweep": (wanda, lambda a: a.sweep("pruning", [25, 50, 75], early_stop_mode="raised", early_stop_value=1e6, verbose=False)),
}
N_CALLS = {(k, run): 2 if run == "progress" else 3 for k in MODELS for run in RUNS}   # so many calls of `eval_fn` there are at least
N_CALLS |= {(k, run): 2 if k == "conv" else 3 for k in PRUNABLE for run in CHANNEL_RUNS}


def analyse(run, model, x, eval_fn, data=None):
    """One of `RUNS` on `model`"""
    criteria, call = (RUNS | CHANNEL_RUNS)[run]
    data = [(x, torch.zeros(len(x), dtype=torch.long))] if data is None else data
    return call(SensitivityAnalyzer(model, x, eval_fn, criteria=criteria, calibration_data=data))


def metrics(found):
    """All the metrics of a result or of a sweep, to compare, one for a group"""
    return [(r.name, r.compressed_metric) for s in (found if hasattr(found, "levels") else [found]) for r in s.ranked]


BODY_CASES = [(k, r) for k in MODELS for r in RUNS if k == "conv" or r in ("filters", "activations", "stopped")]
BODY_CASES += [*((k, "channels") for k in PRUNABLE), ("conv", "channels sweep")]


@pytest.mark.parametrize("kind,run", BODY_CASES)
def test_analysis_survives_what_eval_fn_does(kind, run):
    """The model comes back, and no row notices what `eval_fn` did in an earlier one: every other thing in each analysis, each of them in ten"""
    model, x = lived_in(kind)
    before, first = fingerprint(model), BODY_CASES.index((kind, run)) % 2
    expected = metrics(analyse(run, model, x, evaluations(x, nothing)[0]))
    assert len({m for _, m in expected}) > 1 or len(expected) == 1
    for body in BODIES[first::2]:
        _, eval_fn = evaluations(x, body)
        try:
            assert metrics(analyse(run, model, x, eval_fn)) == expected, body.__name__
        except ValueError as e:  # another set of weights is a change of weights: refused, or undone
            assert body in (rebuild, reparametrize) and "changed the weights" in str(e), body.__name__
        assert changes(before, fingerprint(model)) == [], body.__name__


@pytest.mark.parametrize("kind,run", N_CALLS)
def test_analysis_survives_eval_fn_that_raises(kind, run):
    """At the baseline, at the first unit, at the next one: the exception comes through and the model comes back"""
    model, x = lived_in(kind)
    before, first = fingerprint(model), list(N_CALLS).index((kind, run))
    for fails_at in range(1, N_CALLS[kind, run] + 1):
        error, calls = ENDINGS[1 + (first + fails_at) % 2], []

        def eval_fn(m, calls=calls, fails_at=fails_at, error=error):
            calls.append(m)
            run_backward(m, x)
            add_hooks(m, x)
            draw(m, x)
            if len(calls) == fails_at:
                raise error
            return score(m, x).item()

        with pytest.raises(type(error)) as caught:
            analyse(run, model, x, eval_fn)
        assert caught.value is error
        assert changes(before, fingerprint(model)) == [], (fails_at, error)


WITH_DATA = [(k, r) for k in MODELS for r in ("wanda", "taylor", "activations")] + [(k, r) for k in PRUNABLE for r in ("channels wanda", "channels taylor")]


@pytest.mark.parametrize("error", ENDINGS[1:], ids=repr)
@pytest.mark.parametrize("kind,run", WITH_DATA)
def test_analysis_survives_data_that_raises(kind, run, error):
    """The second batch of calibration data does not come"""
    model, x = lived_in(kind)
    before = fingerprint(model)

    def data():
        yield x, torch.zeros(len(x), dtype=torch.long)
        draw(model, x)
        raise error

    with pytest.raises(type(error)) as caught:
        analyse(run, model, x, lambda m: score(m, x).item(), data())
    assert caught.value is error
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt(), ValueError("no")], ids=repr)
@pytest.mark.parametrize("run", ["wanda", "taylor", "activations"])
def test_analysis_survives_a_model_that_raises(run, error):
    """The fifth forward pass fails: the sample has run, untouched and with noise for weights, and the first batch of calibration data; the second has not"""
    model, x = lived_in("conv")
    calls = []

    def hook(m, args):
        calls.append(m)
        if len(calls) == 5:
            raise error

    model.up.register_forward_pre_hook(hook)
    before = fingerprint(model)
    with pytest.raises(type(error)) as caught:
        analyse(run, model, x, lambda m: score(m, x).item(), [(x, torch.zeros(4, dtype=torch.long))] * 2)
    assert caught.value is error
    assert changes(before, fingerprint(model)) == []


def opt_step(model, x):
    """What training does"""
    run_backward(model, x)
    torch.optim.SGD(model.parameters(), 0.1).step()


def load_zeros(model, x):
    """Other weights from a file"""
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})


def write_data(model, x):
    """What averaging of weights does, past autograd"""
    for p in model.parameters():
        p.data.mul_(0.5)


def set_data(model, x):
    """Other numbers in another place"""
    for p in model.parameters():
        p.data = p.data * 0.5


@pytest.mark.parametrize("kind,run", [*((k, "weights") for k in MODELS), *((k, "channels") for k in PRUNABLE)])
@pytest.mark.parametrize("write", [opt_step, load_zeros, write_data, set_data], ids=lambda f: f.__name__)
def test_eval_fn_that_writes_weights_is_refused_or_undone(kind, run, write):
    """A row is never measured on weights that an earlier `eval_fn` left behind"""
    model, x = lived_in(kind)
    before = fingerprint(model)

    tidy, eval_fn = evaluations(x, write)

    expected = metrics(analyse(run, model, x, tidy))
    try:
        assert metrics(analyse(run, model, x, eval_fn)) == expected
    except ValueError as e:
        assert "changed the weights" in str(e)
    assert changes(before, fingerprint(model)) == []


class Sprawls(Perturbation):
    """Halves the weight, and the bias beside it, which is not among the tensors of the unit"""

    level = 50

    def change(self, model, unit):
        """Write beyond the unit"""
        for p in unit.module.parameters():
            p.data.mul_(0.5)


def test_perturbation_that_writes_beyond_its_unit_is_refused_or_undone():
    """One layer at a time: no row is measured on what an earlier one left behind"""
    model, x = lived_in("conv")
    before = fingerprint(model)
    a = SensitivityAnalyzer(model, x, lambda m: score(m, x).item())
    try:
        together = a.analyze(Sprawls(), verbose=False)
        alone = [a.analyze(Sprawls(), layers=r.name, verbose=False).layers[0] for r in together.layers]
        assert metrics(together) == [(r.name, r.compressed_metric) for r in alone]
    except ValueError as e:
        assert "Sprawls" in str(e)
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("kind,run", [*((k, "sweep") for k in MODELS), ("residual", "channels sweep")])
def test_every_evaluation_sees_the_same_random_numbers(kind, run):
    """An `eval_fn` that draws its data draws the same data for every row, so that rows can be compared"""
    model, x = lived_in(kind)
    seen = []

    def eval_fn(m):
        seen.append((python_random.random(), np.random.rand(), torch.rand(1).item()))
        return score(m, x).item()

    analyse(run, model, x, eval_fn)
    assert len(seen) > 4 and len(set(seen)) == 1


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("run", ["bits", "wanda", "taylor", "activations", *CHANNEL_RUNS])
def test_analysis_inside_no_grad(run, around):
    """Calling from a block without gradients changes neither the result nor the model"""
    model, x = lived_in("conv")
    before, data = fingerprint(model), [(x, torch.zeros(len(x), dtype=torch.long))]
    expected = metrics(analyse(run, model, x, lambda m: score(m, x).item(), data))
    with around():
        assert metrics(analyse(run, model, x, lambda m: score(m, x).item(), data)) == expected
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("kind,run", [*((k, "weights") for k in MODELS), *((k, "channels") for k in PRUNABLE)])
def test_gradients_are_out_of_the_way(kind, run):
    """Every evaluation starts in eval mode and without gradients"""
    model, x = lived_in(kind)

    def eval_fn(m):
        assert not any(s.training for s in m.modules())
        assert all(p.grad is None for p in m.parameters())
        fill_gradients(m, x)
        m.train()
        return score(m, x).item()

    assert len(analyse(run, model, x, eval_fn)) > 1


# ---- check_sample


@each_model
def test_check_sample_leaves_no_trace(kind):
    """Neither on a sample that runs nor on one that does not"""
    model, x = lived_in(kind)
    before = fingerprint(model)
    check_sample(model, x)
    check_sample(model, (x,))
    assert changes(before, fingerprint(model)) == []
    for bad in (torch.ones(2, 3), (x, x), {"nothing": x}):
        with pytest.raises(ValueError):
            check_sample(model, bad)
        assert changes(before, fingerprint(model)) == []


@each_model
@pytest.mark.parametrize("error", ENDINGS[1:], ids=repr)
def test_check_sample_lets_other_errors_through(kind, error):
    """An interrupt in the forward pass leaves no trace either"""
    model, x = lived_in(kind)

    def hook(m, args):
        draw(m, x)
        m.note = "was here"
        raise error

    model.head.register_forward_pre_hook(hook)
    before = fingerprint(model)
    with pytest.raises(type(error)):
        check_sample(model, x)
    assert changes(before, fingerprint(model)) == []


# ---- the fingerprint notices, or nothing above could fail


def on(path, act):
    """`act` on one submodule"""
    return lambda m: act(m.get_submodule(path))


def put(path, attr, value):
    """Another value for one attribute of one submodule"""
    return on(path, lambda m: setattr(m, attr, value))


def same_numbers_elsewhere(m):
    """Another storage"""
    m.stem.weight.data = m.stem.weight.data.clone()


def same_numbers_other_order(m):
    """Another stride"""
    m.stem.weight.data = m.stem.weight.data.contiguous(memory_format=torch.channels_last)


def same_numbers_other_parameter(m):
    """Another `Parameter` over the same storage"""
    m.stem.weight = nn.Parameter(m.stem.weight.data)


def one_bit(m):
    """The last bit of one number"""
    w = m.grouped.weight.data.view(-1)
    w[5] = torch.nextafter(w[5], torch.tensor(9.0))


NOTICED = {
    "modules: another object": ("bn", lambda m: setattr(m, "bn", copy.deepcopy(m.bn))),
    "modules: one more": ("extra", lambda m: m.add_module("extra", nn.Identity())),
    "modules: one less": ("bn", lambda m: delattr(m, "bn")),
    "modules: another class": ("point", put("point", "__class__", type("Other", (nn.Conv2d,), {}))),
    "parameters: one bit": ("grouped.weight", one_bit),
    "parameters: minus zero": ("head.bias", lambda m: m.head.bias.data.neg_()),
    "parameters: storage": ("stem.weight", same_numbers_elsewhere),
    "parameters: stride": ("stem.weight", same_numbers_other_order),
    "parameters: object": ("stem.weight", same_numbers_other_parameter),
    "parameters: dtype": ("head.weight", on("head", lambda m: m.half())),
    "parameters: requires_grad": ("head.weight", on("head", lambda m: m.requires_grad_(False))),
    "parameters: another": ("head.extra", on("head", lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2))))),
    "grads: gone": ("head.weight", lambda m: setattr(m.head.weight, "grad", None)),
    "grads: values": ("head.weight", lambda m: m.head.weight.grad.mul_(2)),
    "grads: object": ("head.weight", lambda m: setattr(m.head.weight, "grad", m.head.weight.grad.clone())),
    "grads: where there was none": ("stem.weight", lambda m: setattr(m.stem.weight, "grad", torch.zeros_like(m.stem.weight))),
    "buffers: values": ("bn.running_mean", on("bn", lambda m: m.running_mean.add_(1))),
    "buffers: counter": ("bn.num_batches_tracked", on("bn", lambda m: m.num_batches_tracked.add_(1))),
    "buffers: object": ("bn.running_var", on("bn", lambda m: setattr(m, "running_var", m.running_var.clone()))),
    "buffers: not persistent": ("gain", lambda m: m.gain.mul_(2)),
    "buffers: requires_grad": ("gain", lambda m: m.gain.requires_grad_()),
    "buffers: one more": ("extra", lambda m: m.register_buffer("extra", torch.ones(2), persistent=False)),
    "modes: of a layer": ("drop", on("drop", lambda m: m.train(not m.training))),
    "modes: of the model": ("", lambda m: setattr(m, "training", not m.training)),
    "attributes: one more": ("head", put("head", "note", 1)),
    "attributes: one less": ("head", on("head", lambda m: delattr(m, "in_features"))),
    "attributes: value": ("drop", put("drop", "p", 0.9)),
    "state_dict: one more": ("gain", lambda m: m._non_persistent_buffers_set.clear()),
    "state_dict: one less": ("bn.running_mean", on("bn", lambda m: m._non_persistent_buffers_set.add("running_mean"))),
    "rng: python": ("python", lambda m: python_random.random()),
    "rng: numpy": ("numpy", lambda m: np.random.rand()),
    "rng: numpy normal": ("numpy", lambda m: np.random.randn()),
    "rng: torch": ("torch", lambda m: torch.rand(1)),
    **{f"hooks: {k}": ("bn", on("bn", add)) for k, add in MODULE_HOOKS.items()},
    **{f"hooks: {k} of the model": ("", add) for k, add in MODULE_HOOKS.items()},
    **{f"hooks: {k} of a parameter": ("head.weight", lambda m, add=add: add(m.head.weight)) for k, add in TENSOR_HOOKS.items()},
    "hooks: one less": ("stem", on("stem", lambda m: m._forward_hooks.popitem())),
    "hooks: another function": ("stem", on("stem", lambda m: m._forward_hooks.update({min(m._forward_hooks): lambda *args: None}))),
    "hooks: another order": ("stem", on("stem", lambda m: m._forward_hooks.move_to_end(min(m._forward_hooks)))),
    "hooks: one less of a parameter": ("stem.weight", lambda m: m.stem.weight._backward_hooks.popitem()),
}


@pytest.mark.parametrize("name", NOTICED)
def test_fingerprint_notices(name):
    """Every kind of change, under the section and the name of what changed"""
    where, act = NOTICED[name]
    model, _ = lived_in("conv")
    model.head.bias.data.zero_()
    before = fingerprint(model)
    assert changes(before, fingerprint(model)) == []
    act(model)
    assert f"{name.partition(':')[0]}: {where}" in changes(before, fingerprint(model))


@pytest.mark.parametrize("name", [n for n in NOTICED if not n.startswith("grads: ")])
def test_leave_no_trace_undoes(name):
    """All that the fingerprint notices (gradients are set aside meanwhile, so that nothing can write to them)"""
    model, _ = lived_in("conv")
    before = fingerprint(model)
    with leave_no_trace(model):
        NOTICED[name][1](model)
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("section", fingerprint(nn.Linear(1, 1)))
def test_every_section_of_the_fingerprint_is_tried(section):
    """A section that is added needs a change that it notices"""
    assert any(name.startswith(f"{section}: ") for name in NOTICED)
