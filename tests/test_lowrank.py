"""Low rank: ranks and errors against oracles, two layers that are what was measured, and everything that they go through."""
import copy
import io
import math

import fastai.callback.progress  # noqa: F401  gives Learner its `no_bar`
import numpy as np
import onnxruntime
import pytest
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_zoo import ZOO, built, fresh, scores
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import NarrowResNet, Net, lively, rows, three_layers, unchanged
from transformers.pytorch_utils import Conv1D

from fasterai_sens import (
    FineTuned,
    LowRank,
    Plan,
    SensitivityAnalyzer,
    allocate,
    analyze_degradation,
    compress_to_size,
    compress_with_layer_sensitivity,
    cost_table,
    count_flops_params,
    n_bytes,
    search_plan,
)
from fasterai_sens.core.layers import all_units
from fasterai_sens.methods import lowrank
from fasterai_sens.methods.lowrank import (
    LowRankInPlan,
    MatrixSize,
    Spectra,
    TwoLayers,
    as_matrices,
    count_groups,
    decompose,
    factorize,
    matrix_size,
    rank_units,
)
from fasterai_sens.plans.applier import Applier

torch.set_num_threads(1)


# ---- ranks


sides = st.integers(1, 300)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), sides, sides, st.integers(1, 100))
def test_rank_is_the_largest_that_saves_so_much(groups, rows_, columns, pct):
    """In whole numbers: r*(m + n) weights are at most (100 - pct) percent of m*n, and one rank more is too many"""
    size = MatrixSize(groups, rows_, columns)
    rank = size.rank_at(pct)
    assert 100 * rank * (rows_ + columns) <= (100 - pct) * rows_ * columns < 100 * (rank + 1) * (rows_ + columns)
    assert size.n_numbers(rank) == groups * rank * (rows_ + columns) and size.n_numbers() == groups * rows_ * columns
    assert rank < min(rows_, columns)


@settings(max_examples=100, deadline=None)
@given(sides, sides)
def test_a_level_computed_from_a_rank_comes_back_to_it(rows_, columns):
    """Although percent are rounded"""
    size = MatrixSize(1, rows_, columns)
    for rank in range(1, rows_ * columns // (rows_ + columns)):
        assert size.rank_at(size.pct_removed(rank)) == rank


def test_by_hand():
    """Two by two, from the singular values 3 and 1; the rotation does not matter"""
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    found = decompose((turn @ torch.diag(torch.tensor([3.0, 1.0])))[None])
    torch.testing.assert_close(found.values, torch.tensor([[3.0, 1.0]]))
    torch.testing.assert_close(found.product(1)[0], turn @ torch.diag(torch.tensor([3.0, 0.0])))
    assert found.error(1) == pytest.approx(1 / math.sqrt(10)) and found.error(0) == 1


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (25, 25), (1, 9), (40, 3)])
def test_no_matrix_of_that_rank_is_nearer(shape):
    """NumPy's decomposition, and the bound of Eckart and Young; in Frobenius and in spectral norm"""
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=torch.float64)
    u, s, v = np.linalg.svd(w.numpy(), full_matrices=False)
    found = decompose(w[None])
    np.testing.assert_allclose(found.values[0], s, rtol=1e-12)
    for rank in range(1, found.left.shape[-1] + 1):
        product = found.product(rank)[0].numpy()
        np.testing.assert_allclose(product, u[:, :rank] * s[:rank] @ v[:rank], atol=1e-12)
        assert np.linalg.norm(w - product) == pytest.approx(np.sqrt((s[rank:] ** 2).sum()), abs=1e-10)
        assert np.linalg.norm(w - product, 2) == pytest.approx(s[rank] if rank < len(s) else 0, abs=1e-10)
        assert found.error(rank) == pytest.approx(np.linalg.norm(w - product) / np.linalg.norm(w), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision(dtype):
    """Computed in single precision at least, and rounded once"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 16)).to(dtype)
    unit, w = all_units(net)[0][0], net[0].weight.detach().clone()
    found = Spectra().find(w)
    assert found.left.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    u, s, v = torch.linalg.svd(w.double(), full_matrices=False)
    with LowRank(50)(net, unit):
        assert net[0].weight.dtype == dtype
        torch.testing.assert_close(net[0].weight.detach(), (u[:, :4] * s[:4] @ v[:4]).to(dtype))
    small = copy.deepcopy(net)
    factorize(small, 50)
    assert {p.dtype for p in small.parameters()} == {dtype}
    x = torch.randn(3, 24, dtype=dtype)
    with LowRank(50)(net, unit): torch.testing.assert_close(small(x), net(x), atol=4e-2 if dtype.itemsize == 2 else 1e-5, rtol=0)


def test_outer_autocast_changes_nothing():
    """The approximation is not computed in half precision because its user evaluates in it"""
    net = three_layers()
    unit = all_units(net)[0][1]
    with LowRank(50)(net, unit): expected = net[2].weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16), LowRank(50)(net, unit): assert torch.equal(net[2].weight, expected)


# ---- measured


def test_four_levels_cost_one_decomposition_each(monkeypatch):
    """A sweep decomposes each weight once; a new sweep starts anew"""
    calls, real = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    net, x = three_layers(), torch.randn(9, 8)
    analyzer = SensitivityAnalyzer(net, x[:1], rows(x))
    analyzer.sweep("low_rank", [20, 40, 60], verbose=False)
    assert len(calls) == 3
    analyzer.sweep("low_rank", [50], verbose=False)
    assert len(calls) == 6


@pytest.mark.parametrize("write", ["data", "in place", "another tensor", "swapped data"])
def test_no_stale_decomposition(write):
    """However the weight was changed"""
    net, make = three_layers(), LowRank.configure()
    unit = all_units(net)[0][1]
    with make(50)(net, unit): pass
    new = torch.randn(16, 16)
    with torch.no_grad():
        if write == "data": net[2].weight.data.copy_(new)
        elif write == "in place": net[2].weight.copy_(new)
        elif write == "another tensor": net[2].weight = nn.Parameter(new)
        else: net[2].weight.data = new
    with make(50)(net, unit): found = net[2].weight.detach().clone()
    assert torch.equal(found, Spectra().find(new).product(4)[0])


def test_levels_out_of_reach_are_skipped_with_what_can_be_had():
    """In measurements; the level that is named can be had"""
    net, x = three_layers(), torch.randn(9, 8)
    found = SensitivityAnalyzer(net, x[:1], rows(x)).sweep("low_rank", [50, 70], verbose=False)
    assert [[row.prunable for row in r.layers] for r in found] == [[True, True, True], [True, True, False]]
    assert "4" in dict(found[1].skipped) and "levels up to 68.75 % can be had" in dict(found[1].skipped)["4"]
    unit = all_units(net)[0][2]
    assert LowRank(68.75).refusal(unit) is None and LowRank(68.76).refusal(unit)
    assert LowRankInPlan(99).refusal(unit) is None and LowRankInPlan(99).rank_of(unit) == 1


def test_level_0_changes_nothing():
    """As with every method in percent"""
    net, unit = three_layers(), all_units(three_layers())[0][0]
    w = net[0].weight.detach().clone()
    with LowRank(0)(net, all_units(net)[0][0]): assert torch.equal(net[0].weight, w)
    assert LowRank(0).refusal(unit) is None and LowRank(0).rank_of(unit) is None
    assert factorize(net, 0).report() == [] and isinstance(net[0], nn.Linear)


def expected_low_rank(module, w, pct):
    """The same by NumPy, group by group"""
    groups = getattr(module, "groups", 1)
    parts = []
    for part in np.split(w.double().numpy(), groups):
        matrix = part.reshape(len(part), -1)
        m, n = matrix.shape
        rank = math.floor((100 - pct) * m * n / (100 * (m + n)))
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        parts.append((u[:, :rank] * s[:rank] @ v[:rank]).reshape(part.shape))
    return torch.tensor(np.concatenate(parts)).to(w.dtype)


HALF_PRECISE = ("half", "bfloat16")


@pytest.mark.parametrize("name", ZOO)
def test_zoo_agrees_with_a_recomputation_and_with_two_layers(name):
    """Every row is what NumPy's approximation gives in a second copy, and what the model with two layers gives; the rest has a reason"""
    found, twin = built(name), fresh(name)
    analyzer = SensitivityAnalyzer(found.model, found.sample, lambda m: scores(m, found.sample))
    with unchanged(found.model): r = analyzer.analyze("low_rank", 30, verbose=False)
    reasons, precision = dict(r.skipped), 3e-2 if name in HALF_PRECISE else 2e-5
    assert all(reasons[row.name] for row in r.layers if not row.prunable)
    for row in r.layers:
        if not row.prunable: continue
        module = twin.model.get_submodule(row.name)
        before = module.weight.data.clone()
        module.weight.data.copy_(expected_low_rank(module, before, 30))
        assert row.compressed_metric == pytest.approx(scores(twin.model.eval(), twin.sample).mean().item(), abs=precision), row.name
        module.weight.data.copy_(before)
        small = fresh(name)
        applied = factorize(small.model, {row.name: 30}, sample=small.sample)
        assert row.compressed_metric == pytest.approx(scores(small.model.eval(), small.sample).mean().item(), abs=precision), row.name
        assert any(isinstance(m, TwoLayers) for m in small.model.modules())
        applied.remove()
        assert row.compressed_metric == pytest.approx(scores(small.model.eval(), small.sample).mean().item(), abs=precision), row.name
        assert not any(isinstance(m, TwoLayers) for m in small.model.modules())


@pytest.mark.parametrize("name", ZOO)
def test_zoo_counts_are_what_was_promised(name):
    """Parameters, multiply-accumulates and bytes, all layers at once; nothing that cannot be factorized is touched"""
    found = fresh(name)
    units = rank_units(found.model, all_units(found.model)[0], found.sample)
    plan = Plan(low_rank={u.name: 30 for u in units if lowrank.never_factorized(u) is None})
    if not plan.levels(): pytest.skip("nothing in it can be factorized")
    promised = Applier(found.model, found.sample, ["low_rank"]).costs(plan, ("params", "flops", "bytes"))
    small = fresh(name)
    applied = plan.apply(small.model, small.sample)["low_rank"]
    assert [row["layer"] for row in applied.report()] == list(plan.low_rank)
    macs, _, _ = count_flops_params(small.model, small.sample, verbose=False)
    assert sum({p.data_ptr(): p.numel() for p in small.model.parameters()}.values()) == promised["params"]
    assert n_bytes(small.model) == promised["bytes"]
    assert macs == pytest.approx(promised["flops"], rel=1e-6, abs=1)
    assert sum(row["before"] - row["after"] for row in applied.report()) == sum(p.numel() for p in {p.data_ptr(): p for p in found.model.parameters()}.values()) - promised["params"]


# ---- what two layers cannot stand for


REFUSED = {
    "root_is_a_layer": {"": "the model is this layer"},
    "subclasses": {"0": "Scaled is a class of its own"},
    "attention": {"attn.in_proj_weight": "does not call it as a layer", "attn.out_proj": "NonDynamicallyQuantizableLinear is a class of its own"},
    "swin": {"features.1.0.attn.qkv": "not called as a layer on the sample"},
    "depthwise_separable": {"1": "1 x 9 in each of 8 groups, where two layers of rank 1 keep 111 %"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    """By the measurement and by what acts, before anything is changed"""
    found = fresh(name)
    r = SensitivityAnalyzer(found.model, found.sample, lambda m: scores(m, found.sample)).analyze("low_rank", 20, verbose=False)
    for layer, why in REFUSED[name].items():
        assert why in dict(r.skipped)[layer]
        with unchanged(found.model), pytest.raises(ValueError, match="cannot be factorized; leave them out of the plan") as e:
            factorize(found.model, {layer: 20}, sample=found.sample)
        assert why in str(e.value)
    applied = factorize(found.model, 20, sample=found.sample)
    assert dict(applied.skipped).keys() >= REFUSED[name].keys()
    scores(found.model, found.sample)


def test_replaced_forward_extra_inputs_numbers_that_are_none():
    """Packages that put their own `forward` on a layer; `output_size`; NaN"""
    net = Net(lambda m, x: m.up(m.a(m.b(x)), output_size=[13, 13]), b=nn.Conv2d(8, 8, 3, padding=1), a=nn.Conv2d(8, 8, 3, padding=1), up=nn.ConvTranspose2d(8, 8, 3, stride=2))
    net.a.forward = lambda x, f=net.a.forward: f(x)
    x = torch.randn(1, 8, 6, 6)
    reasons = {u.name: u.in_the_way for u in rank_units(net, all_units(net)[0], x)}
    assert reasons["b"] is None and "Conv2d is a class of its own" in reasons["a"] and "more than its input" in reasons["up"]
    net.b.weight.data[0] = torch.nan
    assert "not finite" in LowRank(50).refusal(all_units(net)[0][0])


def test_bad_plans():
    """Names, levels, other methods' targets"""
    net, x = three_layers(), torch.randn(2, 8)
    with unchanged(net):
        with pytest.raises(KeyError, match="unknown layer 'out'"): factorize(net, {"out": 50})
        with pytest.raises(ValueError): factorize(net, {"0": True})
        with pytest.raises(ValueError, match="are in bits"): factorize(net, type("Odd", (dict,), {"unit": "bits"})({"0": 8}))
        with pytest.raises(TypeError, match="low_rank takes no option 'criteria'"): SensitivityAnalyzer(net, x, rows(x)).analyze("low_rank", criteria=1, verbose=False)


# ---- two layers


LAYERS = {
    "linear": lambda: (nn.Linear(24, 16), torch.randn(5, 24)),
    "no bias": lambda: (nn.Linear(24, 16, bias=False), torch.randn(5, 3, 24)),
    "Conv1D": lambda: (Conv1D(16, 24), torch.randn(5, 24)),
    "conv1d": lambda: (nn.Conv1d(8, 12, 5, padding="same", dilation=2), torch.randn(2, 8, 20)),
    "strided": lambda: (nn.Conv2d(8, 12, (3, 5), stride=2, padding=(1, 2), padding_mode="reflect"), torch.randn(2, 8, 9, 9)),
    "pointwise": lambda: (nn.Conv2d(24, 16, 1), torch.randn(2, 24, 4, 4)),
    "grouped": lambda: (nn.Conv2d(16, 24, 3, groups=2), torch.randn(2, 16, 6, 6)),
    "3d": lambda: (nn.Conv3d(6, 8, 3), torch.randn(1, 6, 5, 5, 5)),
    "transposed 1d": lambda: (nn.ConvTranspose1d(8, 12, 4, stride=3, padding=1, output_padding=2, dilation=2), torch.randn(2, 8, 7)),
    "transposed 2d grouped": lambda: (nn.ConvTranspose2d(16, 24, 3, stride=2, groups=2, bias=False), torch.randn(2, 16, 5, 5)),
    "transposed 3d": lambda: (nn.ConvTranspose3d(6, 8, 3), torch.randn(1, 6, 4, 4, 4)),
}


def layer_in_net(kind):
    """A network of one layer, and an input"""
    torch.manual_seed(0)
    layer, x = LAYERS[kind]()
    return nn.Sequential(lively(layer)), x


@pytest.mark.parametrize("kind", LAYERS)
def test_two_layers_are_what_was_measured(kind):
    """Output, gradients of the input, the product read as `weight`; and one layer again"""
    net, x = layer_in_net(kind)
    unit, small, x2 = all_units(net)[0][0], copy.deepcopy(net), x.clone().requires_grad_()
    applied = factorize(small, 60, sample=x)
    x.requires_grad_()
    with LowRank(60)(net, unit):
        out, w = net(x), net[0].weight.detach().clone()
        out.square().sum().backward()
    small(x2).square().sum().backward()
    torch.testing.assert_close(small(x2), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x2.grad, x.grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(small[0].weight.detach(), w)
    assert small[0].bias is small[0][1].bias and small[0][0].bias is None
    assert {n: v for n, v in vars(net[0]).items() if n[0] != "_"} == {n: v for n, v in vars(small[0]).items() if n[0] != "_"}
    row, = applied.report()
    assert row["after"] == sum(p.numel() for p in small.parameters()) and row["before"] == sum(p.numel() for p in net.parameters())
    assert row["error"] == pytest.approx(100 * float((w - net[0].weight).norm() / net[0].weight.norm()), rel=1e-3)
    assert applied.remove() == ["0"] and type(small[0]) is type(net[0])
    torch.testing.assert_close(small[0].weight.detach(), w)


def test_the_look_of_it_is_kept():
    """Mode, frozen weights, hooks (also taken off later), the bias itself, and the weight tensor after `remove`"""
    net, seen = three_layers(), []
    w, bias = net[2].weight, net[2].bias
    net.train()[2].eval().weight.requires_grad_(False)
    forward = net[2].register_forward_hook(lambda *args: seen.append("forward"))
    before = net[2].register_forward_pre_hook(lambda *args: seen.append("before"))
    net[2].register_full_backward_hook(lambda *args: seen.append("backward"))
    applied = factorize(net, {"2": 50})
    pair = net[2]
    assert not pair.training and not any(m.training for m in pair.modules()) and net.training
    assert [p.requires_grad for p in pair.parameters()] == [False, False, True] and pair[1].bias is bias
    net(torch.randn(2, 8)).sum().backward()
    assert seen == ["before", "forward", "backward"]
    forward.remove()
    before.remove()
    net(torch.randn(2, 8))
    assert len(seen) == 3
    net.double()
    assert applied.remove() == ["2"] and net[2].weight is w and net[2].bias is bias and w.dtype == torch.float64 and not w.requires_grad
    net(torch.randn(2, 8).double()).sum().backward()
    assert len(seen) == 4


def test_tied_and_shared_layers_stay_so():
    """One factorization for all that hold a weight, also where one of them holds it turned round; shared modules in all places"""
    for name in ("tied_linears", "tied_transposed", "tied_transposed_square", "tied_convs", "shared_module"):
        found = fresh(name)
        unit = all_units(found.model)[0][0]
        with LowRank(30)(found.model, unit): expected = scores(found.model, found.sample)
        w = unit.weight
        applied = factorize(found.model, 30, sample=found.sample)
        torch.testing.assert_close(scores(found.model, found.sample), expected, atol=1e-5, rtol=1e-5)
        pairs = {id(m): m for m in found.model.modules() if isinstance(m, TwoLayers)}.values()
        assert len({m[0].weight.data_ptr() for m in pairs} | {m[1].weight.data_ptr() for m in pairs}) == 2, name
        assert n_bytes(found.model) == sum(row["after"] for row in applied.report()) * 4
        assert len(applied.remove()) == len(pairs) and unit.weight is w
        assert len({m.weight.data_ptr() for m in unit.modules}) == 1
        torch.testing.assert_close(scores(found.model, found.sample), expected, atol=1e-5, rtol=1e-5)


def test_what_reads_weights_goes_on():
    """The fast path through an encoder layer, and torchvision's Swin where nobody looked who is called"""
    net, x = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True).eval(), torch.randn(4, 5, 8)
    with torch.no_grad():
        applied = factorize(net, {"linear1": 50, "linear2": 50}, sample=x)
        fast = net(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try: torch.testing.assert_close(net(x), fast, atol=1e-5, rtol=1e-5)
        finally: torch.backends.mha.set_fastpath_enabled(True)
    assert len(applied.report()) == 2
    found = fresh("swin")
    applied = factorize(found.model, 50)
    assert any(row["layer"].endswith("attn.qkv") for row in applied.report())
    assert scores(found.model, found.sample).isfinite().all()


def test_saved_and_loaded():
    """state_dict into a model that was factorized alike, the whole model, a deep copy"""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 10)), torch.randn(2, 3, 8, 8)
    other = copy.deepcopy(net)
    for p in other.parameters(): p.data.normal_()
    factorize(net, 40)
    expected, file = net(x), io.BytesIO()
    assert list(net.state_dict())[:3] == ["0.0.weight", "0.1.weight", "0.1.bias"]
    factorize(other, 40)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), expected) and torch.equal(copy.deepcopy(net)(x), expected)
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_exported():
    """torch.export, torch.jit.trace, torch.jit.script"""
    net, x = layer_in_net("strided")
    net.append(nn.Flatten()).append(nn.Linear(300, 20)).eval()
    factorize(net, 50, sample=x)
    expected = net(x)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), expected)
    torch.testing.assert_close(torch.jit.trace(net, x)(x), expected)
    torch.testing.assert_close(torch.jit.script(net)(x), expected)


def test_runs_as_onnx():
    """What ONNX Runtime computes of a factorized ResNet is what PyTorch computes, and the file holds the numbers that are left"""
    torch.manual_seed(0)
    net, x, file = NarrowResNet(layers=[1, 1, 1, 1], num_classes=10).eval(), torch.randn(2, 3, 64, 64), io.BytesIO()
    whole = sum(p.numel() for p in net.parameters())
    factorize(net, 60, sample=x)
    torch.onnx.export(net, (x,), file, input_names=["x"], dynamo=True, verbose=False)
    assert len(file.getvalue()) < 4*whole*.5
    found = onnxruntime.InferenceSession(file.getvalue()).run(None, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), net(x), rtol=1e-3, atol=1e-4)


def test_all_or_nothing(monkeypatch):
    """What fails half way, or is interrupted, leaves the model as it was"""
    net, real = three_layers(), lowrank.forget_casts

    def interrupted():
        real()
        raise KeyboardInterrupt

    with unchanged(net):
        monkeypatch.setattr(lowrank, "forget_casts", interrupted)
        with pytest.raises(KeyboardInterrupt): factorize(net, 50)
        monkeypatch.setattr(lowrank, "forget_casts", real)


def test_remove_leaves_what_was_changed_since():
    """A half that was replaced; a pair that is not in the model any more; the others are merged, and once more does nothing"""
    net = three_layers()
    applied = factorize(net, 50)
    net[0][0] = nn.Sequential(net[0][0], nn.ReLU())
    net[4] = nn.Identity()
    with pytest.warns(UserWarning, match="not the two layers any more"): assert applied.remove() == ["2"]
    assert [type(m).__name__ for m in net[::2]] == ["TwoLayers", "Linear", "Identity"]
    assert applied.remove() == []


def test_same_result_each_time():
    """Whatever was drawn before"""
    nets = [three_layers() for _ in range(2)]
    for net in nets:
        factorize(net, 50)
        torch.rand(7)
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    net = three_layers()
    state = torch.get_rng_state()
    factorize(net, 50)
    assert torch.equal(torch.get_rng_state(), state)


# ---- plans


@pytest.fixture(scope="module")
def measured():
    """A network, sweeps by all methods with the same eval_fn, and its input"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    x = torch.randn(60, 1, 8, 8)
    with torch.no_grad(): y = net(x)

    def near(model):
        with torch.no_grad(): return -(model(x) - y).square().mean(1)

    analyzer = SensitivityAnalyzer(net, x[:1], near)
    sweeps = {m: analyzer.sweep(m, verbose=False) for m in ("low_rank", "sparsity", "pruning", "quantization")}
    return net, x, near, sweeps


def check_plan(net, x, plan):
    """Carried out for good, the model says and costs what the plan says"""
    small = copy.deepcopy(net)
    with torch.no_grad():
        with Applier(net, x[:1], tuple(plan), settings=plan.settings)(plan): expected = net(x)
        applied = plan.apply(small, x[:1])
        torch.testing.assert_close(small(x), expected, atol=1e-4, rtol=1e-4)
    assert applied.keys() == {m for m, targets in plan.items() if any(targets.values())}
    return small


@pytest.mark.parametrize("cost", ["params", "flops", "bytes"])
def test_planned_alone(measured, cost):
    """Within the budget, and what it costs is what the counters find"""
    net, x, _, sweeps = measured
    plan = allocate(sweeps["low_rank"], "50%", cost, model=net, sample=x[:1])
    small = check_plan(net, x, plan)
    counted = dict(params=sum(p.numel() for p in small.parameters()), flops=count_flops_params(small, x[:1], verbose=False)[0], bytes=n_bytes(small))
    assert counted[cost] == plan.costs[cost] <= plan.whole[cost] / 2


def test_targets(measured, tmp_path):
    """From one level and from a sweep, exactly on the mean that was asked for, saved and read"""
    net, x, _, sweeps = measured
    targets = sweeps["low_rank"].to_layer_targets(net, 60)
    assert targets.method == "low_rank" and targets.mean(net) == pytest.approx(60, abs=1e-6)
    factorize(copy.deepcopy(net), targets)
    plan = Plan(low_rank=targets)
    plan.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == plan
    check_plan(net, x, plan)


@pytest.mark.parametrize("cost,budget", [("flops", "25%"), ("flops", "60%"), ("bytes", "30%")])
def test_planned_with_the_others(measured, cost, budget):
    """One method a layer, within the budget; carried out last, since names change"""
    net, x, _, sweeps = measured
    plan = allocate(list(sweeps.values()), budget, cost, model=net, sample=x[:1])
    assert plan.costs[cost] <= plan.whole[cost] * float(budget[:-1]) / 100 and list(plan)[-1] == "low_rank"
    check_plan(net, x, plan)


def test_layer_behind_a_pruned_one(measured):
    """Its rank is that of the smaller weight: measured, counted and carried out alike"""
    net, x, _, _ = measured
    plan = Plan(pruning={"0": 50}, low_rank={"2": 50, "5": 70})
    costs = Applier(net, x[:1]).costs(plan, ("params", "flops", "bytes"))
    small = check_plan(net, x, plan)
    assert costs == dict(params=sum(p.numel() for p in small.parameters()), flops=count_flops_params(small, x[:1], verbose=False)[0], bytes=n_bytes(small))


def test_searched(measured):
    """Jointly with the others, within the budget"""
    net, x, near, sweeps = measured
    with unchanged(net): r = search_plan(net, x[:1], near, [sweeps["low_rank"], sweeps["sparsity"], sweeps["quantization"]], "30%", "bytes", evaluations=40, verbose=False)
    assert r.plan.costs["bytes"] <= 0.3 * n_bytes(net)
    assert {row["plan"] for row in r.ranking} >= {"allocate", "uniform low_rank", "search"}
    check_plan(net, x, r.plan)


def test_does_not_meet_others_in_one_layer(measured):
    """Said at the door"""
    net, x, _, sweeps = measured
    with pytest.raises(ValueError, match="low_rank meets no other method in one layer"): allocate([sweeps["low_rank"], sweeps["quantization"]], "20%", "bytes", model=net, sample=x[:1], combine=[("low_rank", "quantization")])
    table = cost_table([sweeps["low_rank"], sweeps["quantization"]], net, x[:1])
    assert not any("low_rank" in key and "quantization" in key for key in table.saved)


def test_sized(measured):
    """Within a size, uniform, by a plan and by curves; the size is that of the file's numbers"""
    net, x, _, sweeps = measured
    for plan in (None, {"5": 50}, sweeps["low_rank"]):
        found = compress_to_size(net, x[:1], 50, "low_rank", plan=plan)
        assert found.size == n_bytes(found.model) <= n_bytes(net) / 2
    assert n_bytes(compress_with_layer_sensitivity(net, x[:1], sweeps["low_rank"], 50).model) < n_bytes(net)
    with pytest.raises(ValueError, match="%"): compress_to_size(net, x[:1], 1, "low_rank")


def test_a_tied_head_computes_with_the_factors_of_its_table():
    """What is factorized is one matrix, used twice, as before"""
    found = fresh("gpt2")
    small = compress_to_size(found.model, found.sample, 80, "low_rank", cost="params").model
    head, table = small.lm_head, small.transformer.wte
    assert {*map(id, head.parameters())} == {*map(id, table.parameters())} and torch.equal(head.weight, table.weight)
    assert sum(p.numel() for p in head.parameters()) < found.model.lm_head.weight.numel()
    scores(small, found.sample)


def test_degraded(measured):
    """The metric over the size"""
    net, x, near, _ = measured
    with unchanged(net): r = analyze_degradation(net, x[:1], near, (100, 60, 30), "low_rank", verbose=False, runs=0)
    assert [p.size for p in r.points] == sorted((p.size for p in r.points), reverse=True) and r.points[0].drop == 0 < r.points[1].drop < r.points[2].drop


# ---- trained


def test_rank_stays_without_a_callback():
    """Plain training, and fastai's"""
    torch.manual_seed(0)
    x, net = torch.randn(128, 8), three_layers()
    y = x[:, :4].argmax(1)
    applied = factorize(net, 60)
    ranks = {row["layer"]: row["rank"] for row in applied.report()}
    data = DataLoader(TensorDataset(x, y), 32)
    learn = Learner(DataLoaders(data, data), net, nn.CrossEntropyLoss(), cbs=[])
    before = [p.detach().clone() for p in net.parameters()]
    with learn.no_bar(), learn.no_logging(): learn.fit(3, 1e-2)
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    for name, rank in ranks.items():
        w = net.get_submodule(name).weight
        assert torch.linalg.matrix_rank(w.detach(), rtol=1e-5) == rank
    expected = net(x)
    applied.remove()
    torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-5)


def test_finetuned_is_refused_with_what_to_do():
    """In a measurement the approximation stands in one weight, and training would raise its rank"""
    net, x = three_layers(), torch.randn(9, 8)
    with pytest.raises(ValueError, match="training undoes low_rank.*train the model with two layers"):
        SensitivityAnalyzer(net, x[:1], FineTuned(lambda m: None, rows(x))).analyze("low_rank", verbose=False)


def test_cache_holds_no_more_than_the_weights():
    """The useful part of a decomposition is never larger than the weight, and it is no view of something larger"""
    for m, n in ((300, 200), (64, 64), (10, 1000)):
        found = decompose(torch.randn(1, m, n))
        assert found.left.numel() + found.right.numel() <= m * n
        assert found.left.untyped_storage().nbytes() + found.right.untyped_storage().nbytes() <= 4 * m * n
    net, _ = layer_in_net("grouped")
    small = copy.deepcopy(net)
    factorize(small, 50)
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in small.parameters())
    assert as_matrices(net[0].weight, count_groups(all_units(net)[0][0])).shape == (2, 12, 72)
    assert matrix_size(all_units(net)[0][0]) == MatrixSize(2, 12, 72)
