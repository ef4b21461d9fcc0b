"""Quantization against numbers worked by hand, PyTorch's and torchao's own operations, and properties that hold for any numbers."""
import logging
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn, tensor
from torch.ao.quantization.observer import MovingAverageMinMaxObserver
from transformers.pytorch_utils import Conv1D

from fasterai_sens import Quantized, SensitivityAnalyzer, analyze_sensitivity
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.layers import all_units, filters_first
from fasterai_sens.methods.grids import asymmetric_grid, fake_quantize, fake_quantize_weight, scale_rows, symmetric_grid, weight_grid
from fasterai_sens.methods.observers import MSE, Histogram, MinMax, MovingAverage, Percentile, observers

logging.getLogger("torchao").setLevel(logging.ERROR)
BITS = 2, 3, 4, 8, 12, 16
HOW = {"tensor": (False, None), "channel": (True, None), "group": (True, 6)}
few = settings(max_examples=60, deadline=None, derandomize=True)
numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40).map(lambda v: tensor(v, dtype=torch.float32))
bits = st.integers(2, 16)


def random_weight(seed=0):
    """Four outputs of 3x2x2 weights, each of another size"""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 2, 2, generator=g)*tensor([.01, 1., 10., 300.])[:, None, None, None]


def seen_by(observer, *tensors):
    """The observer after it looked at the tensors"""
    for t in tensors: observer.update(t)
    return observer


def mse(x, lo, hi, n):
    """Mean squared error of rounding to the grid of a range"""
    return (fake_quantize(x, asymmetric_grid(lo, hi, n)).double() - x.double()).square().mean().item()


# ---- by hand


def test_grids_by_hand():
    """3 bits: -4..3 around zero, 0..7 from the smallest to the largest"""
    g = symmetric_grid(-6., 3., 3)
    assert (g.scale.item(), g.zero.item(), g.low, g.high) == (2., 0, -4, 3)
    g = asymmetric_grid(-2., 5., 3)
    assert (g.scale.item(), g.zero.item(), g.low, g.high) == (1., 2, 0, 7)
    assert [e.item() for e in g.ends] == [-2., 5.]
    assert asymmetric_grid(3., 7., 3).zero.item() == 0 and asymmetric_grid(3., 7., 3).scale.item() == 1.
    assert asymmetric_grid(-14., -7., 3).zero.item() == 7 and asymmetric_grid(-14., -7., 3).scale.item() == 2.


def test_weights_by_hand():
    """One row of four weights with each kind of grid"""
    w = tensor([[3., .6, -30., 11.]])
    assert fake_quantize_weight(w, 3).tolist() == [[0., 0., -30., 10.]]                        # steps of 10
    assert torch.allclose(fake_quantize_weight(w, 3, group_size=2), tensor([[3., 1., -30., 10.]]))   # steps of 1 and of 10
    assert torch.allclose(fake_quantize_weight(tensor([[-1., .4, 1.6, 6.]]), 3, symmetric=False), tensor([[-1., 0., 2., 6.]]))
    assert torch.allclose(fake_quantize_weight(tensor([[1.], [10.]]), 2, per_channel=False), tensor([[0.], [10.]]))


def test_rows():
    """Neighbours along inputs and kernel of one output share a grid"""
    w = torch.arange(24.).reshape(2, 3, 2, 2)
    assert scale_rows(w, False).shape == (1, 24) and scale_rows(w).shape == (2, 12)
    assert scale_rows(w, group_size=4)[1].tolist() == [4., 5., 6., 7.], "the kernel of the second input"


# ---- PyTorch's operations


@pytest.mark.parametrize("n", BITS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("symmetric", [True, False])
def test_same_as_torch(n, how, symmetric):
    """Bit for bit what torch's operation gives with scales computed here by the textbook formulas"""
    w = random_weight()
    rows = scale_rows(w, *HOW[how])
    lo, hi = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    if symmetric:
        scale, low, high = torch.maximum(-lo, hi)/(2**(n-1) - 1), -2**(n-1), 2**(n-1) - 1
        zero = torch.zeros_like(scale, dtype=torch.int32)
    else:
        scale, low, high = (hi - lo)/(2**n - 1), 0, 2**n - 1
        zero = (-lo/scale).round().int()
    if how == "tensor": expected = torch.fake_quantize_per_tensor_affine(w, scale.item(), zero.item(), low, high)
    else: expected = torch.fake_quantize_per_channel_affine(rows, scale, zero, 0, low, high).reshape(w.shape)
    assert torch.equal(fake_quantize_weight(w, n, *HOW[how], symmetric), expected)


def test_beyond_the_grid():
    """torch's operation wraps around 2**63 steps away (per channel) and turns NaN into a number; here the end of the grid and NaN come out"""
    far, grid = tensor([1e30, -1e30, torch.inf, -torch.inf]), asymmetric_grid(-1., 3., 8)
    low, high = (e.item() for e in grid.ends)
    assert fake_quantize(far, grid).tolist() == pytest.approx([high, low, high, low])
    rows = asymmetric_grid(tensor([-1., -1.]), tensor([3., 3.]), 8)
    assert fake_quantize(far.repeat(2, 1), rows).tolist() == [pytest.approx([high, low, high, low])]*2
    assert fake_quantize(tensor([torch.nan, 0.]), grid).isnan().tolist() == [True, False]


def test_gradients_pass_inside():
    """Straight through where the input is on the grid's range, nothing beyond"""
    x = tensor([-5., .3, 5.], requires_grad=True)
    fake_quantize(x, asymmetric_grid(-1., 1., 4)).sum().backward()
    assert x.grad.tolist() == [0., 1., 0.]


# ---- torchao


@pytest.mark.parametrize("n", BITS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("symmetric", [True, False])
def test_same_as_torchao(n, how, symmetric):
    """Scales and zero points are torchao's bit for bit, if its symmetric grid is told to leave out `-2**(n-1)`, and values agree.

    Differences: by default torchao's symmetric scale is `max/((high - low)/2)`, that is `max/127.5` for 8 bits, which cuts the
    largest weight; and the scale of an all-zero row is its smallest normal number, where ours is 1.
    """
    from torchao.quantization.quant_primitives import MappingType, _fake_quantize_affine, choose_qparams_affine
    w = random_weight(1).flatten(1)
    block = {"tensor": tuple(w.shape), "channel": (1, 12), "group": (1, 6)}[how]
    low, high = (-2**(n-1) + 1, 2**(n-1) - 1) if symmetric else (0, 2**n - 1)
    kind = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    scale, zero = choose_qparams_affine(w, kind, block, torch.int32, low, high, eps=torch.finfo(torch.float32).tiny)
    grid = weight_grid(w, n, *HOW[how], symmetric)
    assert torch.equal(grid.scale, scale.flatten()) and torch.equal(grid.zero, zero.flatten().int())
    theirs = _fake_quantize_affine(w, block, scale, zero, torch.int32, low, high)
    assert torch.equal(fake_quantize_weight(w, n, *HOW[how], symmetric), theirs)


def test_torchao_cuts_the_largest_weight():
    """The stated difference is there: over -128..127 the largest weight is off its grid, and on ours"""
    from torchao.quantization.quant_primitives import MappingType, _fake_quantize_affine, choose_qparams_affine
    w = tensor([[127.5, 1.]])
    scale, zero = choose_qparams_affine(w, MappingType.SYMMETRIC, (1, 2), torch.int8)
    assert scale.item() == 1. and _fake_quantize_affine(w, (1, 2), scale, zero, torch.int8)[0, 0] == 127.
    assert fake_quantize_weight(w, 8)[0, 0] == 127.5


# ---- properties


@few
@given(numbers, bits, st.booleans())
def test_zero_is_on_every_grid(x, n, symmetric):
    """Zero stays exactly zero, whatever the range"""
    grid = weight_grid(x[None], n, symmetric=symmetric)
    assert fake_quantize(tensor([0.]), grid).item() == 0
    assert grid.low <= grid.zero.item() <= grid.high


@few
@given(numbers, bits, st.booleans())
def test_error_is_at_most_half_a_step(x, n, symmetric):
    """No weight moves further than half a step, up to float32's precision"""
    grid = weight_grid(x[None], n, symmetric=symmetric)
    moved = (fake_quantize(x, grid).double() - x.double()).abs().max()
    assert moved <= grid.scale.double().item()/2 + 4*torch.finfo(torch.float32).eps*x.abs().max().item()


@few
@given(numbers, bits, st.booleans())
def test_rounding_again_changes_nothing(x, n, symmetric):
    """On the same grid bit for bit"""
    grid = weight_grid(x[None], n, symmetric=symmetric)
    once = fake_quantize(x, grid)
    assert torch.equal(fake_quantize(once, grid), once)
    assert len(once.unique()) <= 2**n


@few
@given(numbers, numbers, bits, st.booleans())
def test_order_is_kept(x, y, n, symmetric):
    """A larger number never comes out smaller, also beyond the grid"""
    grid = weight_grid(x[None], n, symmetric=symmetric)
    out = fake_quantize(torch.cat([x, 3*y]).sort().values, grid)
    assert (out.diff() >= 0).all()


@few
@given(numbers, bits)
def test_mse_range_is_never_worse(x, n):
    """Measured, not estimated: the MSE range has at most the error of min-max"""
    low, high = seen_by(MinMax(), x).range(n)
    assert mse(x, *seen_by(MSE(), x).range(n), n) <= mse(x, low, high, n)*(1 + 1e-5) + 1e-12*x.abs().max().item()**2


@few
@given(numbers, st.integers(1, 7), bits)
@example(torch.tensor([0., .25]), 1, 2)   # a first piece of zeros
def test_histograms_do_not_depend_on_batches(x, size, n):
    """In one piece, in small pieces, backwards: the same counts"""
    whole = seen_by(Histogram(), x)
    for parts in (x.split(size), x.flip(0).split(size)):
        other = seen_by(Histogram(), *parts)
        assert other.width == whole.width and torch.equal(other.bins[0], whole.bins[0])
        assert torch.allclose(other.bins, whole.bins, rtol=1e-12, atol=0)


@few
@given(numbers, st.floats(51, 100))
def test_percentile_holds_its_share(x, pct):
    """At least `pct` percent are not above the range, and at least as many not below"""
    lo, hi = seen_by(Percentile(pct), x).range(8)
    assert (x <= hi).double().mean() >= pct/100 - 1e-9 and (x >= lo).double().mean() >= pct/100 - 1e-9
    assert x.min() <= lo <= hi <= x.max()


# ---- odd tensors


ODD = {"constant": [7., 7.], "zero": [0., 0.], "huge": [1e30, -3e30], "largest": [3.4e38, -3.4e38], "tiny": [1e-30, -3e-30], "subnormal": [1e-42, 0.], "negative": [-5., -5.]}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("n", [2, 8, 16])
def test_odd_weights(kind, symmetric, n):
    """Finite, of the same sign, within half a step; and with several groups, one of them all zero"""
    w = tensor([ODD[kind]])
    q, grid = fake_quantize_weight(w, n, symmetric=symmetric), weight_grid(w, n, symmetric=symmetric)
    assert q.isfinite().all() and (q*w >= 0).all() and grid.scale.gt(0).all() and grid.scale.isfinite().all()
    assert ((q.double() - w.double()).abs() <= grid.scale.double()*.5000001 + 1e-6*w.double().abs()).all()
    if kind in ("constant", "negative", "zero"): assert torch.allclose(q, w)
    both = fake_quantize_weight(torch.cat([w, torch.zeros(1, 2)], 1), n, group_size=2, symmetric=symmetric)
    assert torch.equal(both[:, :2], q) and not both[:, 2:].any()


@pytest.mark.parametrize("bad", [[torch.nan, 1.], [torch.inf, 1.], [-torch.inf, torch.inf]])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_that_are_not_finite(bad, symmetric):
    """No grid holds them: their row turns into NaN, so that the metric shows it; other rows do not"""
    for n in (2, 8):
        assert fake_quantize_weight(tensor([bad]), n, symmetric=symmetric).isnan().all()
        q = fake_quantize_weight(tensor([bad, [1., 0.]]), n, symmetric=symmetric)
        assert q[0].isnan().all() and torch.allclose(q[1], tensor([1., 0.]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_other_dtypes(dtype, symmetric):
    """Computed in float32 and rounded back once; the largest half stays finite"""
    w = random_weight().flatten(1).to(dtype)
    for how in HOW.values():
        q = fake_quantize_weight(w, 4, *how, symmetric)
        assert q.dtype == dtype and torch.equal(q, fake_quantize_weight(w.float(), 4, *how, symmetric).to(dtype))
    if dtype.itemsize == 2:
        top = torch.finfo(dtype).max
        for n in (2, 8): assert fake_quantize_weight(tensor([[top, -top]], dtype=dtype), n, symmetric=symmetric).isfinite().all()


# ---- layers


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), 6), "conv": (lambda: nn.Conv2d(4, 6, 3), 36), "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), 18),
    "depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4), 3), "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), 36),
    "grouped transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), 18), "hf": (lambda: Conv1D(4, 6), 6), "attention": (lambda: nn.MultiheadAttention(6, 2), 6),
}  # fmt: skip


def filter_of(layer, w, o):
    """The weights of output `o`, by the layer's own documentation"""
    if isinstance(layer, nn.ConvTranspose2d):
        each = w.shape[1]
        per = w.shape[0]//layer.groups
        return w[o//each*per:(o//each + 1)*per, o % each].flatten()
    return w[:, o] if isinstance(layer, Conv1D) else w[o].flatten()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_right_axis(kind, symmetric):
    """Per channel and per group of three, each output is rounded by itself; the layer comes back bit for bit"""
    torch.manual_seed(0)
    layer = LAYERS[kind][0]()
    unit = next(u for u in all_units(layer)[0] if u.attr != "weight" or kind != "attention")
    unit.weight.data.mul_(torch.rand_like(unit.weight)*9)
    n, before, w = LAYERS[kind][1], fingerprint(layer), unit.weight.detach().clone()
    for group in (None, 3):
        with Quantized(4, group_size=group, symmetric=symmetric)(layer, unit): q = unit.weight.detach().clone()
        assert changes(before, fingerprint(layer)) == []
        for o in range(len(unit.filters)):
            row = filter_of(layer, w, o)
            assert len(row) == n
            each = [fake_quantize_weight(part[None], 4, symmetric=symmetric)[0] for part in row.split(group or n)]
            assert torch.equal(filter_of(layer, q, o), torch.cat(each)), (group, o)
    assert torch.equal(filters_first(layer, unit.filters), unit.weight)


def test_groups_that_do_not_divide_are_skipped():
    """The layer they do not fit is listed with its reason, the other one is measured"""
    model, x = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch.randn(3, 6)
    r = analyze_sensitivity(model, x, lambda m: m(x).sum().item(), "quantization", 3, quant_group_size=3, verbose=False)
    assert [row.prunable for row in r.layers] == [True, False]
    assert dict(r.skipped)["1"] == "an output of this layer has 4 weights, which groups of 3 do not divide"


# ---- observers


def test_moving_average_is_pytorchs():
    """Each call moves the ends by the rate, so the order counts; PyTorch's observer agrees"""
    parts = [tensor([0., 1.]), tensor([-4., 2.]), tensor([1., 9.])]
    assert seen_by(MovingAverage(.5), *parts).range(8) == (-.5, 5.25)
    assert seen_by(MovingAverage(.5), *parts[::-1]).range(8) == (-.75, 3.25)
    for order in (parts, parts[::-1]):
        theirs = MovingAverageMinMaxObserver(averaging_constant=.01)
        for p in order: theirs(p)
        assert seen_by(MovingAverage(), *order).range(8) == pytest.approx((theirs.min_val.item(), theirs.max_val.item()), abs=1e-5)


def test_mse_range_cuts_an_outlier():
    """Where it matters it is much better than min-max, and never narrower than the grid needs at 16 bits"""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(10000), tensor([30.])])
    (lo, hi), whole = seen_by(MSE(), x).range(4), seen_by(MinMax(), x).range(4)
    assert mse(x, lo, hi, 4) < .3*mse(x, *whole, 4)
    grid = [mse(x, a, b, 4) for a in torch.linspace(-4, -1, 16).tolist() for b in torch.linspace(1, 8, 29).tolist()]
    assert mse(x, lo, hi, 4) < 1.05*min(grid), "within 5 % of a full search"
    assert seen_by(MSE(), x).range(16) == whole


@pytest.mark.parametrize("name", observers)
def test_observers_on_odd_data(name):
    """Constants, zeros, zeros before small numbers, huge and half"""
    for parts in ([torch.zeros(3)], [torch.zeros(3), tensor([1e-30, -1e-30])], [tensor([7., 7.])], [tensor([1e30, 1.])], [tensor([6e4, -6e4]).half()], [tensor([1e38, 1.]).bfloat16()]):
        o, x = seen_by(observers[name](), *parts), torch.cat(parts).float()
        lo, hi = o.range(8)
        assert x.min() <= lo and hi <= x.max()
        assert fake_quantize(x, asymmetric_grid(lo, hi, 8)).isfinite().all()


def test_memory_is_bounded():
    """The histogram has as many bins after wide data as before"""
    o = Histogram()
    size = o.bins.shape
    for e in range(-30, 31, 5): o.update(torch.rand(100)*10.**e)
    assert o.bins.shape == size and o.bins[0].sum() == 1300


# ---- the analyzer


def tanh_net():
    """Two linear layers and data for them"""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(64, 4)


@pytest.mark.parametrize("name", observers)
@pytest.mark.parametrize("at", ["output", "input", "both"])
def test_activations_by_hand(name, at):
    """What is measured is what hooks with grids of the same ranges give; the evaluation's batches do not matter, and no trace is left"""
    model, x = tanh_net()
    data, before = [x[:16]*2, x[16:32]], fingerprint(model)
    def score(m, size): return torch.cat([m(part) for part in x.split(size)]).square().sum(1)
    got = [SensitivityAnalyzer(model, x, partial(score, size=size), calibration_data=data).analyze("quantization", 3, quant_activations=at, quant_ranges=name, verbose=False) for size in (64, 5, 1)]
    assert changes(before, fingerprint(model)) == []
    for r in got[1:]: assert [row.compressed_metric for row in r.layers] == pytest.approx([row.compressed_metric for row in got[0].layers], rel=1e-5)
    assert got[0].settings == dict(bits=3, per_channel=True, group_size=None, symmetric=True, activations={"both": "input and output"}.get(at, at),
                                   ranges=str(observers[name]()), observed_on="calibration_data")
    with torch.no_grad():
        inputs = [[d for d in data], [model[:2](d) for d in data]]
        for i, row in zip((0, 2), got[0].layers, strict=True):
            layer, seen = model[i], inputs[i//2]
            grids = [asymmetric_grid(*seen_by(observers[name](), *what).range(3), 3) for what in (seen, [layer(v) for v in seen])]
            v = model[:i](x)
            if at != "output": v = fake_quantize(v, grids[0])
            v = v @ fake_quantize_weight(layer.weight, 3).T + layer.bias
            if at != "input": v = fake_quantize(v, grids[1])
            assert row.compressed_metric == pytest.approx(model[i+1:](v).square().sum(1).mean().item(), rel=1e-4), row.name


def test_one_pass_for_all_layers():
    """The model sees each calibration batch once, whatever is observed and at however many levels"""
    model, x = tanh_net()
    calls = []
    class Data:
        """Batches that are counted"""
        def __iter__(self):
            for part in x.split(16):
                calls.append(len(part))
                yield part
    a = SensitivityAnalyzer(model, x[:2], lambda m: m(x).sum().item(), calibration_data=Data())
    sweep = a.sweep("quantization", [8, 4, 2], quant_activations="both", quant_ranges="mse", verbose=False)
    assert calls == [16]*4
    assert [r.settings["bits"] for r in sweep] == [8, 4, 2]


def test_mse_ranges_follow_the_bits():
    """Fewer bits, narrower range: a sweep uses a range for each level"""
    model, x = tanh_net()
    make = Quantized.configure(model=model, units=all_units(model)[0], quant_activations=True, quant_ranges="mse", sample=x, calibration_data=None)
    spans = [hi - lo for lo, hi in (make(n).ranges["output"]["0"] for n in (8, 4, 2))]
    assert spans[0] > spans[1] > spans[2]
    assert make(4).observed_on == "sample"


@pytest.mark.parametrize("at", [True, "input", "both"])
def test_no_trace_when_the_body_raises(at):
    """Weights and hooks of both sides are put back"""
    model, x = tanh_net()
    units, before = all_units(model)[0], fingerprint(model)
    p = Quantized.configure(model=model, units=units, quant_activations=at, quant_group_size=2, quant_symmetric=False, sample=x)(3)
    with pytest.raises(KeyboardInterrupt), p(model, units[0]):
        assert changes(before, fingerprint(model)) != []
        raise KeyboardInterrupt
    assert changes(before, fingerprint(model)) == []


class Keyword(nn.Module):
    """Calls its layer by keyword"""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        """One layer"""
        return self.fc(input=x)


def test_input_by_keyword():
    """An input is seen and quantized however it is passed"""
    model, x = Keyword(), torch.randn(8, 4)
    r = analyze_sensitivity(model, x, lambda m: m(x).square().sum().item(), "quantization", 2, quant_activations="input", verbose=False)
    assert r.layers[0].prunable
    with torch.no_grad():
        expected = fake_quantize(x, asymmetric_grid(x.min(), x.max(), 2)) @ fake_quantize_weight(model.fc.weight, 2).T + model.fc.bias
    assert r.layers[0].compressed_metric == pytest.approx(expected.square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", observers)
def test_calibration_that_is_not_finite(bad, name):
    """The layer and the side are named, and the model is as before"""
    model, x = tanh_net()
    data, before = [x[:4], torch.full((2, 4), bad)], fingerprint(model)
    for at, side in (("input", "input"), ("output", "output")):
        a = SensitivityAnalyzer(model, x, lambda m: 0., calibration_data=data)
        with pytest.raises(ValueError, match=f"the {side} of '0' is not finite"): a.analyze("quantization", quant_activations=at, quant_ranges=name, verbose=False)
    assert changes(before, fingerprint(model)) == []


WRONG = [
    (dict(quant_ranges="min_max"), "unknown quant_ranges 'min_max'; did you mean 'minmax'"),
    (dict(quant_ranges="xyz"), "known are 'minmax', 'moving_average', 'percentile', 'mse'"),
    (dict(quant_ranges=["mse"]), "unknown quant_ranges"),
    (dict(quant_activations="outputs"), "got 'outputs', did you mean 'output'"),
    (dict(quant_activations=1), "False, True"), (dict(quant_activations=["input"]), "got"),
    (dict(quant_group_size=0), "positive whole number, or None; got 0"), (dict(quant_group_size=-2), "got -2"), (dict(quant_group_size=2.), "got 2.0"),
    (dict(quant_group_size=True), "got True"), (dict(quant_group_size="8"), "got '8'"), (dict(quant_group_size=2, quant_per_channel=False), "leave per_channel at True"),
    (dict(level=17), "level is in bits"), (dict(level=1), "level is in bits"), (dict(level=4.), "level is in bits"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_errors_at_the_door(options, message):
    """What came and what would do, before anything is evaluated"""
    model, x = tanh_net()
    a = SensitivityAnalyzer(model, x, lambda m: pytest.fail("evaluated"))
    with pytest.raises(ValueError, match=message): a.analyze("quantization", **{"quant_activations": False, **options}, verbose=False)


@pytest.mark.parametrize("bad", [0, 2, True, "x"])
def test_rates_and_percentiles_at_the_door(bad):
    """Parameters of observers say their unit"""
    with pytest.raises(ValueError): MovingAverage("x" if bad is True else True if bad == "x" else 2 if bad else 0)
    with pytest.raises(ValueError, match="percentile above 50"): Percentile(bad)


def test_an_observer_of_your_own():
    """Any function that makes an object with `update` and `range` will do, and the result says its name"""
    class Fixed(MinMax):
        """The same range always"""
        name = "fixed"
        def range(self, bits):
            """Minus one to one"""
            return -1., 1.
    model, x = tanh_net()
    r = analyze_sensitivity(model, x, lambda m: m(x).sum().item(), "quantization", 4, quant_activations=True, quant_ranges=Fixed, verbose=False)
    assert r.settings["ranges"] == "fixed" and r.settings["observed_on"] == "sample"
    r = analyze_sensitivity(model, x, lambda m: m(x).sum().item(), "quantization", 4, quant_activations=True, quant_ranges=partial(Percentile, pct=99), verbose=False)
    assert r.settings["ranges"] == "percentile 99"
