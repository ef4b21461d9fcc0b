"""Bit plans: the exact choice against brute force, bytes counted by hand, and a quantized model that is what was measured."""
import copy
import gc
import logging
import math
import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from toys import SHORT
from transformers import GPT2Config, GPT2LMHeadModel

from fasterai_sens import (
    BitPlan,
    LayerSensitivity,
    LayerTargets,
    Quantized,
    SensitivityAnalyzer,
    SensitivityResult,
    SweepResult,
    kl_from,
    n_bytes,
    quantize_model,
)
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.state import leave_no_trace
from fasterai_sens.methods.grids import fake_quantize_weight
from fasterai_sens.methods.observers import Percentile
from fasterai_sens.methods.quantize import packed_bytes, plan_bytes
from fasterai_sens.plans.knapsack import choose

logging.getLogger("transformers").setLevel(logging.ERROR)
many = settings(max_examples=80, deadline=None, derandomize=True)
few = settings(many, max_examples=50)
USUAL = dict(per_channel=True, group_size=None, symmetric=True)


# ---------------------------------------------------------------- the best choice


@st.composite
def problems(draw):
    """Damages, costs and budgets of up to four units with up to four options."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    damage = st.one_of(st.floats(-1, 5), st.integers(0, 3).map(float), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
    names = ["bytes", "macs"][: draw(st.integers(1, 2))]
    table = lambda numbers: [draw(st.lists(numbers, min_size=n, max_size=n)) for n in sizes]
    return table(damage), {k: table(st.integers(0, 20)) for k in names}, {k: draw(st.integers(0, 50)) for k in names}


def brute_force(damage, costs, budgets):
    """(broken options, damage, ranks, choice) of the best choice, or None."""
    best = None
    for choice in product(*[range(len(d)) for d in damage]):
        if any(sum(c[u][i] for u, i in enumerate(choice)) > budgets[k] for k, c in costs.items()): continue
        picked = [damage[u][i] for u, i in enumerate(choice)]
        key = sum(not math.isfinite(d) for d in picked), math.fsum(d for d in picked if math.isfinite(d)), sum(choice), choice
        if best is None or key < best: best = key
    return best


@many
@given(problems())
def test_choice_is_the_best_there_is(problem):
    """As few broken options, and as little damage, as the best of all choices; within the budgets; or an error if there is none"""
    damage, costs, budgets = problem
    best = brute_force(*problem)
    if best is None:
        with pytest.raises(ValueError, match="cannot be below|meets the budgets"): choose(*problem)
        return
    choice = choose(*problem)
    picked = [damage[u][i] for u, i in enumerate(choice)]
    assert all(sum(c[u][i] for u, i in enumerate(choice)) <= budgets[k] for k, c in costs.items())
    assert sum(not math.isfinite(d) for d in picked) == best[0]
    assert math.fsum(d for d in picked if math.isfinite(d)) <= best[1] + 1e-8


@many
@given(problems(), st.integers(0, 10**6))
def test_ties_go_to_less_compression(problem, seed):
    """With whole-number damages, so that equal is equal, the sum of the ranks is the smallest of all best choices"""
    rng = np.random.default_rng(seed)
    whole = [rng.integers(0, 2, len(d)).astype(float).tolist() for d in problem[0]]
    best = brute_force(whole, *problem[1:])
    assume(best is not None)
    choice = choose(whole, *problem[1:])
    assert (sum(whole[u][i] for u, i in enumerate(choice)), sum(choice)) == best[1:3]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_choice_is_never_worse_than_greedy(seed, scale):
    """Also for costs in the millions, where a solver's tolerance is several bytes, and for damages of any size"""
    rng = np.random.default_rng(seed)
    damage = scale*(np.exp(rng.normal(0, 3, 60))[:, None]*np.linspace(0, 1, 8)**2 + .01*rng.random((60, 8)))
    cost = rng.integers(10**4, 10**8, 60)[:, None]*np.linspace(8, 1, 8).astype(int)
    budget, units, at = int(.45*cost[:, 0].sum()), np.arange(60), np.zeros(60, int)
    while cost[units, at].sum() > budget:
        gain = np.where(np.arange(8) > at[:, None], cost[units, at][:, None] - cost, 0)
        price = np.where(gain > 0, (damage - damage[units, at][:, None])/np.maximum(gain, 1), np.inf)
        u, o = divmod(int(price.argmin()), 8)
        at[u] = o
    choice = choose(damage, {"bytes": cost}, {"bytes": budget})
    assert cost[units, choice].sum() <= budget
    assert damage[units, choice].sum() <= damage[units, at].sum()*(1 + 1e-12)


def test_budgets_out_of_reach():
    """Each alone, or together: what the error says is possible is possible"""
    damage, a, b = [[0, 0], [0, 0]], [[1, 2], [1, 2]], [[2, 1], [2, 1]]
    with pytest.raises(ValueError, match="a cannot be below 2, the budget is 1"): choose(damage, {"a": a}, {"a": 1})
    assert choose(damage, {"a": a, "b": b}, {"a": 3, "b": 3}) in ([0, 1], [1, 0])


def test_choice_at_the_door():
    """Shapes and names are checked"""
    with pytest.raises(ValueError): choose([[0, 1], []], {"a": [[1, 2], []]}, {"a": 3})
    for cost, budget in ((math.nan, 3), (1, math.inf)):
        with pytest.raises(ValueError, match="finite numbers"): choose([[0, 1]], {"a": [[1, cost]]}, {"a": budget})


# ---------------------------------------------------------------- bytes


def by_hand(n, rows, bits, symmetric=True):
    """Packed weights and a scale, or a scale and a zero point, for each row"""
    return math.ceil(n*bits/8) + rows*(4 if symmetric else 8)


@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_by_hand(symmetric):
    """Weights, scales, biases in half precision, buffers with their own dtype; a transposed convolution has a scale for each output"""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ConvTranspose2d(5, 7, 3, bias=False)).half()
    rest = 2*5 + 4*2*5 + 8
    assert plan_bytes(model, {}) == n_bytes(model) == rest + 2*(135 + 315)
    assert plan_bytes(model, {"0": 3}, symmetric=symmetric) == rest + by_hand(135, 5, 3, symmetric) + 2*315
    assert plan_bytes(model, {"2": 5, "0": 2}, symmetric=symmetric) == rest + by_hand(135, 5, 2, symmetric) + by_hand(315, 7, 5, symmetric)
    assert plan_bytes(model, {"2": 5}, False, symmetric=symmetric) == rest + 2*135 + by_hand(315, 1, 5, symmetric)
    assert plan_bytes(model, {"0": 5}, group_size=9, symmetric=symmetric) == rest + by_hand(135, 15, 5, symmetric) + 2*315
    with pytest.raises(ValueError, match="groups of 4 do not divide"): packed_bytes(all_units(model)[0][0], 4, group_size=4)
    with pytest.raises(KeyError, match="unknown layer '7'"): plan_bytes(model, {"7": 4})
    with pytest.raises(ValueError, match="target of '0' is in bits"): plan_bytes(model, {"0": 50})


def tied():
    """An embedding tied to a head, attention, a layer whose weight two modules hold"""
    torch.manual_seed(0)
    class Tied(nn.Module):
        """tokens `[batch, 5]` -> logits"""
        def __init__(self):
            super().__init__()
            self.emb, self.attn, self.a, self.b, self.head = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)
            self.b.weight, self.head.weight = self.a.weight, self.emb.weight
        def forward(self, x):
            h = self.emb(x)
            return self.head(self.b(self.a(h + self.attn(h, h, h, need_weights=False)[0]).relu()))
    return Tied().eval(), torch.randint(0, 11, (4, 5))


def test_tied_weights_count_once():
    """Under either name, and the embedding shrinks with the head"""
    model, _ = tied()
    rest = 4*(24 + 8 + 8 + 8 + 11)
    assert plan_bytes(model, {}) == n_bytes(model) == rest + 4*(88 + 192 + 64 + 64)
    once = plan_bytes(model, {"b": 4, "head": 4})
    assert once == plan_bytes(model, {"a": 4, "b": 4, "head": 4}) == rest + by_hand(64, 8, 4) + by_hand(88, 11, 4) + 4*(192 + 64)
    with pytest.raises(ValueError): plan_bytes(model, {"a": 4, "b": 5})


# ---------------------------------------------------------------- from a sweep to a plan


def made_up(model, curves, base=2.0, higher=False, how=USUAL):
    """A sweep over a list of linear layers: `curves` has one dictionary of bits and deltas a layer."""
    levels = sorted({b for c in curves for b in c}, reverse=True)
    def row(i, bits):
        d = curves[i][bits]
        return LayerSensitivity(str(i), "Linear", sum(p.numel() for p in model[i].parameters()), base, base - d if higher else base + d, d)
    return SweepResult([SensitivityResult("quantization", b, base, [row(i, b) for i, c in enumerate(curves) if b in c], "loss", higher, [], dict(bits=b, **how)) for b in levels])


@st.composite
def sweeps(draw):
    """Small linear layers and measured curves, some of them ending early."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.booleans()), min_size=1, max_size=4))
    model = nn.Sequential(*[nn.Linear(i, o, bias=b) for i, o, b in sizes])
    curves = [dict(zip((8, 6, 4, 3, 2), draw(st.lists(st.floats(-.1, 2), min_size=1, max_size=5)), strict=False)) for _ in sizes]
    return model, made_up(model, curves), [[(b, max([0.0, *list(c.values())[: i + 1]])) for i, b in enumerate(c)] for c in curves]


@few
@given(sweeps(), st.floats(0, 1), st.booleans())
def test_plan_is_the_best_there_is(case, share, in_bytes):
    """Against all plans, with bytes, means and damages computed here"""
    model, sweep, curves = case
    n, out = [m.weight.numel() for m in model], [m.out_features for m in model]
    rest = sum(4*m.out_features for m in model if m.bias is not None)
    def size(bits): return rest + sum(by_hand(n[i], out[i], b) for i, b in enumerate(bits)) if in_bytes else sum(k*b for k, b in zip(n, bits, strict=True))/sum(n)
    ends = [size([pick(b for b, _ in c) for c in curves]) for pick in (min, max)]
    target = ends[0] + share*(ends[1] - ends[0])
    plan = sweep.to_bit_plan(model, **{"target_bytes" if in_bytes else "target_bits": target})
    chosen = [plan[str(i)] for i in range(len(model))]
    damages = [math.fsum(d for _, d in p) for p in product(*curves) if size([b for b, _ in p]) <= target*(1 + 1e-12)]
    assert size(chosen) <= target*(1 + 1e-9)
    assert plan.predicted_metric == pytest.approx(2 + sum(max(0, r.delta) for level in sweep for r in level.layers if plan[r.name] == level.compression_level), abs=1e-8)   # as measured, a gain as none
    assert sum(dict(c)[b] for c, b in zip(curves, chosen, strict=True)) == pytest.approx(min(damages), abs=1e-8)
    assert plan.size_bytes == plan_bytes(model, plan) == rest + sum(by_hand(n[i], out[i], b) for i, b in enumerate(chosen))
    assert (plan.settings, plan.weights, plan.metric_name) == (USUAL, {str(i): k for i, k in enumerate(n)}, "loss")
    if ends[0] > 2:
        with pytest.raises(ValueError): sweep.to_bit_plan(model, **{"target_bytes" if in_bytes else "target_bits": max(2, ends[0]*.99)})


def pair(**kwargs):
    """Two layers of 100 and 50 weights, the second one ending at 4 bits"""
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 5, bias=False))
    return model, made_up(model, [{8: -.1, 4: .2, 3: .1, 2: 5.}, {8: 0., 4: .3}], **kwargs)


def test_noise_is_not_bought():
    """An improvement counts as none, and 3 bits that look better than 4 count as much as 4: equal damage, so more bits where they fit. A gain is not predicted, either"""
    model, sweep = pair()
    assert sweep.to_bit_plan(model, 8) == {"0": 8, "1": 8} and sweep.to_bit_plan(model, 8).predicted_metric == 2
    assert sweep.to_bit_plan(model, 5.5) == {"0": 4, "1": 8} and sweep.to_bit_plan(model, 5.5).predicted_metric == pytest.approx(2.2)
    assert sweep.to_bit_plan(model, 4.9) == {"0": 3, "1": 8}
    same = made_up(model, [{8: 0., 4: 0., 2: 0.}, {8: 0., 4: 0., 2: 0.}])
    assert same.to_bit_plan(model, 8) == {"0": 8, "1": 8}
    model, up = pair(higher=True, base=.9)
    assert up.to_bit_plan(model, 4.9).predicted_metric == pytest.approx(.8)


def test_early_stopped_levels_are_no_options():
    """A layer does not go below its last measured level, and the error counts with that"""
    model, sweep = pair()
    assert sweep.to_bit_plan(model, 3)["1"] == 4
    with pytest.raises(ValueError, match=r"target_bits 2\.5 is out of reach: between 2\.66666666667 and 8 is possible"): sweep.to_bit_plan(model, 2.5)
    low, high = by_hand(100, 10, 2) + by_hand(50, 5, 4), by_hand(100, 10, 8) + by_hand(50, 5, 8)
    with pytest.raises(ValueError, match=f"between {low} and {high} is possible"): sweep.to_bit_plan(model, target_bytes=low - 1)
    assert sweep.to_bit_plan(model, target_bytes=low) == {"0": 2, "1": 4}


def test_levels_that_break_the_model_are_no_options():
    """Unless a layer has no other; then the prediction says so"""
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    sweep = made_up(model, [{8: 0., 2: math.nan}, {8: 0., 2: 1.}])
    assert sweep.to_bit_plan(model, 6) == {"0": 8, "1": 2}
    with pytest.raises(ValueError, match="between 6 and 8"): sweep.to_bit_plan(model, 5)
    plan = made_up(model, [{8: math.inf}, {8: 0.}]).to_bit_plan(model, 8)
    assert plan == {"0": 8, "1": 8} and not math.isfinite(plan.predicted_metric)


def test_bounds_and_locks():
    """Within min_bits and max_bits, and locked layers where they were put, whatever the bounds"""
    model, sweep = pair()
    assert sweep.to_bit_plan(model, 16, max_bits=4) == {"0": 4, "1": 4}
    assert sweep.to_bit_plan(model, 3.5, min_bits=3) == {"0": 3, "1": 4}
    assert sweep.to_bit_plan(model, 16, max_bits=4, locked={"0": 8}) == {"0": 8, "1": 4}
    with pytest.raises(ValueError): sweep.to_bit_plan(model, 8, locked={"0": 6})
    with pytest.raises(ValueError, match="1 was measured at 8, 4 bits, but min_bits is 2 and max_bits 3"): sweep.to_bit_plan(model, 8, max_bits=3)
    with pytest.raises(KeyError, match="unknown layer '00'; did you mean '0'"): sweep.to_bit_plan(model, 8, locked={"00": 8})
    with pytest.raises(ValueError, match="is in bits"): sweep.to_bit_plan(model, 8, locked={"0": 50})
    assert sweep.to_bit_plan(model, 8, locked=["0"]) == {"1": 8}
    partly = SweepResult([SensitivityResult("quantization", 8, 2., sweep[0].layers[:1], "loss", False, [], dict(bits=8))])
    with pytest.raises(KeyError, match="layer '1' is locked, but is not among the layers to plan for"): partly.to_bit_plan(model, 8, locked={"1": 8})


def test_plan_at_the_door():
    """Targets, kinds of results, other models"""
    model, sweep = pair()
    for bad in (50, 1, True, math.nan, "4"):
        with pytest.raises(ValueError, match="target_bits is a mean of bits, a number from 2 to 16"): sweep.to_bit_plan(model, bad)
    for bad in (0, -1, True, math.nan, math.inf, "4"):
        with pytest.raises(ValueError, match="target_bytes is the size of the whole model"): sweep.to_bit_plan(model, target_bytes=bad)
    with pytest.raises(ValueError, match="min_bits is in bits"): sweep.to_bit_plan(model, 4, min_bits=1)
    with pytest.raises(ValueError, match="min_bits 5 is above max_bits 4"): sweep.to_bit_plan(model, 4, min_bits=5, max_bits=4)
    with pytest.raises(ValueError, match="one level leaves nothing to choose"): sweep[0].to_bit_plan(model, 4)
    percent = SweepResult([SensitivityResult("sparsity", 50, 2., [])])
    with pytest.raises(ValueError, match="to_layer_targets turns it into targets"): percent.to_bit_plan(model, 4)
    mixed = SweepResult([sweep[0], made_up(model, [{4: .1}, {4: .1}], how=USUAL | dict(symmetric=False))[0]])
    with pytest.raises(ValueError, match="different settings"): mixed.to_bit_plan(model, 4)
    with pytest.raises(ValueError, match="0 had 100 parameters when it was measured, and has 20"): sweep.to_bit_plan(nn.Sequential(nn.Linear(2, 10, bias=False), nn.Linear(10, 5, bias=False)), 4)
    with pytest.raises(KeyError, match="unknown layer '1'"): sweep.to_bit_plan(model[:1], 4)


def test_plan_through_json(tmp_path):
    """All that it carries comes back; plain targets in bits stay plain"""
    model, sweep = pair()
    plan = sweep.to_bit_plan(model, 5)
    plan.to_json(tmp_path/"p.json")
    back = LayerTargets.from_json(tmp_path/"p.json")
    assert type(back) is BitPlan and back == plan and vars(back) == vars(plan) and plan.mean(model) <= 5
    LayerTargets(plan, "bits").to_json(tmp_path/"t.json")
    assert type(LayerTargets.from_json(tmp_path/"t.json")) is LayerTargets
    with pytest.raises(ValueError, match="not a BitPlan"): BitPlan.from_json(tmp_path/"t.json")
    assert vars(copy.deepcopy(plan)) == vars(plan)


# ---------------------------------------------------------------- quantize_model


def image_net(arch):
    """An untrained network with batch norm statistics, and images"""
    torch.manual_seed(0)
    model, x = arch(num_classes=10), torch.randn(6, 3, 32, 32)
    for _ in range(2): model(x)
    return model.eval(), x


def gpt2():
    """Two blocks with Hugging Face's Conv1D, the head tied to the embedding"""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8)).eval(), torch.randint(0, 40, (3, 8))


def score(model, x):
    """A smooth number for each sample"""
    out = model(x)
    return getattr(out, "logits", out).flatten(1).square().mean(1)


TOYS = {
    "resnet18": partial(image_net, SHORT["resnet18"]), "gpt2": gpt2, "tied": tied,
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(3, 4, 3, groups=1), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, groups=2)), torch.randn(4, 3, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOYS)
@pytest.mark.parametrize("how", [{}, dict(quant_per_channel=False, quant_symmetric=False), dict(quant_activations="both", quant_ranges="mse")], ids=["plain", "tensor", "activations"])
@torch.no_grad()
def test_done_is_what_was_measured(kind, how):
    """For every unit, a plan for it alone scores exactly what the analysis said; and the model comes back bit for bit"""
    model, x = TOYS[kind]()
    before = fingerprint(model)
    r = SensitivityAnalyzer(model, x, partial(score, x=x), calibration_data=[x]).analyze("quantization", 3, verbose=False, **how)
    rows = [row for row in r.layers if row.prunable]
    assert rows
    for row in rows:
        with quantize_model(model, {row.name: 3}, calibration_data=[x], sample=x, **how): assert score(model, x).double().mean().item() == row.compressed_metric, row.name
        assert changes(before, fingerprint(model)) == []
    assert len({row.compressed_metric for row in rows}) > 1


@torch.no_grad()
def test_a_plan_repeats_what_was_measured():
    """Groups, asymmetric grids, observed inputs: the plan carries them, and at one level for one layer the scores are equal"""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    x = torch.randn(20, 8)
    a = SensitivityAnalyzer(model, x, partial(score, x=x), calibration_data=[x[:10]], higher_is_better=False)
    how = dict(quant_group_size=4, quant_symmetric=False, quant_activations="input", quant_ranges=partial(Percentile, pct=99))
    sweep = a.sweep("quantization", [8, 4, 2], layers=["2"], verbose=False, **how)
    plan = sweep.to_bit_plan(model, 4, max_bits=4, min_bits=4)
    assert plan.size_bytes == 4*(64 + 8 + 4) + by_hand(32, 8, 4, symmetric=False)
    with quantize_model(model, plan, calibration_data=[x[:10]]) as applied:
        assert score(model, x).double().mean().item() == sweep[1].layers[0].compressed_metric
        assert applied.plan == plan and applied.plan.settings == plan.settings and applied.size_bytes == plan.size_bytes
        assert applied.plan.predicted_metric == plan.predicted_metric
    with quantize_model(model, plan, sample=x, **how) as applied: assert applied.plan.settings["observed_on"] == "sample"
    with pytest.raises(ValueError, match="measured with quant_group_size=4, not 2"): quantize_model(model, plan, quant_group_size=2, sample=x)
    with pytest.raises(ValueError, match="measured with quant_ranges='percentile 99', not 'mse'"): quantize_model(model, plan, quant_ranges="mse", sample=x)
    with quantize_model(model, dict(plan)) as applied: assert applied.plan.settings["group_size"] is None and applied.plan.settings["activations"] is None
    with quantize_model(model, LayerTargets(plan, "bits"), quant_group_size=8) as applied: assert applied.plan.settings["group_size"] == 8


@pytest.mark.parametrize("arch", ["resnet18", "mobilenet_v2"])
def test_all_layers_at_once(arch):
    """Each weight is what rounding it by hand gives, and the bytes are n_bytes with packed weights in place of the weights"""
    model, _ = image_net(SHORT[arch])
    before, weights = fingerprint(model), {n: m.weight.detach().clone() for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    applied = quantize_model(model, 4)
    assert set(applied.plan) == set(weights) and set(applied.plan.values()) == {4}
    for n, w in weights.items(): assert torch.equal(model.get_submodule(n).weight, fake_quantize_weight(w, 4)), n
    assert applied.size_bytes == n_bytes(model) + sum(by_hand(w.numel(), len(w), 4) - 4*w.numel() for w in weights.values())
    applied.remove()
    applied.remove()
    assert changes(before, fingerprint(model)) == [] and "removed" in repr(applied)


def test_tied_weights_are_rounded_once():
    """Under any of their names"""
    model, x = tied()
    with quantize_model(model, {"b": 3, "head": 4}) as applied:
        assert applied.plan == {"a": 3, "head": 4} and model.a.weight is model.b.weight and len(model.emb.weight.unique()) > 2
        assert torch.equal(model.emb.weight, fake_quantize_weight(applied.kept[1][3], 4))


def test_one_plan_at_a_time():
    """A second plan is refused, also through a part of the model; after the end, and when the handle is gone, it is not"""
    model, _ = tied()
    first = quantize_model(model, {"a": 4})
    for m, plan in ((model, 4), (model, {"head": 4}), (model.a, 4)):
        with pytest.raises(ValueError, match="Linear of this model"): quantize_model(m, plan)
    other = quantize_model(copy.deepcopy(model), 4)
    first.remove()
    with quantize_model(model, 4):
        first.remove()   # has nothing to do with the second
        with pytest.raises(ValueError, match="quantized already"): quantize_model(model, 4)
    kept = quantize_model(model, {"a": 4})
    del kept
    gc.collect()
    quantize_model(model, {"a": 3}).remove()
    other.remove()


def test_back_after_an_error_inside():
    """The block takes everything back when its body raises"""
    model, x = tied()
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="inside"):
        with quantize_model(model, {"a": 2}, quant_activations=True, sample=x): raise RuntimeError("inside")
    assert changes(before, fingerprint(model)) == []


def test_half_applied_is_taken_back(monkeypatch):
    """If a change fails halfway, what was done before it is undone"""
    model, _ = tied()
    before, change, calls = fingerprint(model), Quantized.change, []
    def fails(self, m, unit):
        calls.append(unit.name)
        if len(calls) == 3: raise MemoryError("third")
        return change(self, m, unit)
    monkeypatch.setattr(Quantized, "change", fails)
    with pytest.raises(MemoryError): quantize_model(model, 3)
    monkeypatch.undo()
    assert changes(before, fingerprint(model)) == []
    quantize_model(model, 3).remove()


def test_moved_while_in_force():
    """A model that changed its dtype meanwhile gets its weights back in the new one"""
    model = nn.Sequential(nn.Linear(4, 4))
    w = model[0].weight.detach().clone()
    applied = quantize_model(model, 2)
    model.double()
    applied.remove()
    assert model[0].weight.dtype == torch.float64 and torch.equal(model[0].weight, w.double())


def step(model, x, **options):
    """One step of training, by SGD."""
    opt = torch.optim.SGD(model.parameters(), 0.1, **options)
    model(x).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("how", [{}, {"quant_symmetric": False}, {"quant_per_channel": False}], ids=str)
def test_training_while_quantized_is_kept(how, options):
    """Weights stay parameters in place; what was trained stays, rounded, and is named; the rest is as it was before"""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    model[1].requires_grad_(False)
    p, before = model[0].weight, model[1].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"2 layers were trained while they were quantized \(0, 2\)"), quantize_model(model, 3, **how):
        step(model, x, **options)
        assert model[0].weight is p
        trained = p.detach().clone()
    grid = {k.removeprefix("quant_"): v for k, v in how.items()}
    assert torch.equal(p, fake_quantize_weight(trained, 3, **grid))
    assert torch.equal(model[1].weight, before)


def test_a_plain_loop_stays_on_the_grid():
    """`round` names what training moved, and rounds it; without training it does nothing."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    applied = quantize_model(model, {"0": 3})
    held = model[0].weight.detach().clone()
    assert applied.round() == [] and torch.equal(model[0].weight, held)
    for _ in range(3):
        step(model, x)
        assert applied.round() == ["0"]
        torch.testing.assert_close(model[0].weight.detach(), fake_quantize_weight(model[0].weight, 3))
    final = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="stay as trained"):
        applied.remove()
    torch.testing.assert_close(model[0].weight.detach(), final, rtol=0, atol=1e-6)
    applied.remove()


def test_without_training_the_originals_return_without_a_word():
    """Also after a change of the weights was undone, and for numbers that are not finite."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.data[0, 0] = torch.nan
    before = fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quantize_model(model, 3), leave_no_trace(model):
            model[1].weight.data.zero_()
    assert changes(before, fingerprint(model)) == []


def test_loaded_weights_are_not_thrown_away():
    """A checkpoint that is loaded into a quantized model counts as trained."""
    model, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="stay as trained"), quantize_model(model, 8):
        model.load_state_dict(other.state_dict())
    assert torch.equal(model[0].weight, fake_quantize_weight(other[0].weight, 8))


def test_quantize_at_the_door():
    """Bits, names, other models, groups, activations"""
    model, x = tied()
    before = fingerprint(model)
    for bad in (50, 1, 17, .5, True):
        with pytest.raises(ValueError, match="plan is in bits, a whole number from 2 to 16"): quantize_model(model, bad)
    for bad in (None, "8", ["a"]):
        with pytest.raises(TypeError, match="a plan is layer name -> bits, or one number of bits for all layers"): quantize_model(model, bad)
    with pytest.raises(ValueError, match="the plan for 'a' is in bits"): quantize_model(model, {"a": 32})
    with pytest.raises(KeyError, match="unknown layer 'heat'"): quantize_model(model, {"heat": 4})
    with pytest.raises(KeyError, match="layer '1' is a LayerNorm and not among the layers to compress"): quantize_model(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), {"1": 4})
    with pytest.raises(ValueError, match="leave them out of the plan: a: an output of this layer has 8 weights, which groups of 5 do not divide; head"): quantize_model(model, {"a": 4, "head": 4}, quant_group_size=5)
    with pytest.raises(ValueError, match="attn.in_proj_weight: no output of this layer was seen"): quantize_model(model, 4, quant_activations=True, sample=x)
    with pytest.raises(ValueError): quantize_model(model, {"a": 4}, quant_activations=True, quant_ranges="percentil", sample=x)
    assert set(changes(before, fingerprint(model))) <= {"rng: torch"}


# ---------------------------------------------------------------- divergence from the untouched model


@pytest.mark.parametrize("kind", ["gpt2", "tied", "resnet18"])
def test_divergence_is_pytorchs(kind):
    """The mean over positions of `F.kl_div`, a number for each sample, zero for the model itself; the model is left as it was, in training mode too"""
    model, x = TOYS[kind]()
    model.train()
    before = fingerprint(model)
    away = kl_from(model, [(x[:2], None), (x[2:], None)])
    assert changes(before, fingerprint(model)) == []
    model.eval()
    logits = lambda: getattr(out := model(x), "logits", out).detach().log_softmax(-1)
    was = logits()
    assert away(model).abs().max() < 1e-7
    with quantize_model(model, 3): now, got = logits(), away(model)
    assert got.shape == (len(x),) and (got > 0).all()
    assert torch.allclose(got, F.kl_div(now, was, log_target=True, reduction="none").sum(-1).reshape(len(x), -1).mean(1), rtol=1e-4, atol=1e-7)


def test_divergence_of_maps_and_keywords():
    """Classes on another axis, inputs by name"""
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 1), torch.randn(2, 3, 5, 5)
    was = model(x).log_softmax(1).detach()
    away = kl_from(model, {"input": x}, sample={"input": x}, axis=1)
    with quantize_model(model, 2), torch.no_grad():
        assert torch.allclose(away(model), F.kl_div(model(x).log_softmax(1), was, log_target=True, reduction="none").sum(1).flatten(1).mean(1), atol=1e-6)


# ---------------------------------------------------------------- all of it


@torch.no_grad()
def test_sweep_to_plan_to_model():
    """On a network whose first layer is by far the most sensitive, the plan protects it and beats uniform bits at their bytes"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).eval()
    model[2].weight.mul_(.05)
    x, held_out = torch.randn(200, 16), torch.randn(200, 16)
    goal = model(x), model(held_out)
    error = lambda m, d, t: (m(d) - t).square().mean(1)
    sweep = SensitivityAnalyzer(model, x[:1], lambda m: error(m, x, goal[0]), higher_is_better=False, metric_name="error").sweep("quantization", [8, 6, 5, 4, 3, 2], verbose=False)
    for bits in (3, 4):
        with quantize_model(model, bits) as applied: size, uniform = applied.size_bytes, error(model, held_out, goal[1]).mean()
        plan = sweep.to_bit_plan(model, target_bytes=size)
        with quantize_model(model, plan) as applied:
            assert applied.size_bytes == plan.size_bytes <= size
            assert error(model, held_out, goal[1]).mean() < .9*uniform
