"""Plans in torchao: its grids against ours, what it can run, names, ties, errors."""

import os
import subprocess
import sys
from copy import deepcopy
from functools import partial
from types import ModuleType

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torchao.quantization import quantize_
from toys import Net, all_pairs
from transformers.pytorch_utils import Conv1D

import fasterai_sens.methods.torchao
from fasterai_sens import BitPlan, LayerTargets, SensitivityAnalyzer, quantize_model, split_plan, to_torchao_config
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.layers import find_units
from fasterai_sens.methods.grids import fake_quantize_weight
from fasterai_sens.methods.quantize import Quantized, check_plan, plan_units
from fasterai_sens.methods.torchao import holders, layer_config, products_overflow, torchao_refusal

pytestmark = pytest.mark.filterwarnings("ignore:.*FqnToConfig.*")


@pytest.fixture(autouse=True)
def seeded():
    """The same weights in every test."""
    torch.manual_seed(0)


def run(model, config):
    """A copy of `model` as torchao runs it."""
    out = deepcopy(model).eval()
    quantize_(out, config, filter_fn=None)
    return out


def weight_of(w, config):
    """What torchao makes of one weight."""
    layer = nn.Sequential(nn.Linear(w.shape[1], w.shape[0]))
    layer[0].weight.data = w.clone()
    return run(layer, config)[0].weight


# ---------------------------------------------------------------- grids


grains = [{}, {"per_channel": False}, {"group_size": 16}, {"group_size": 4}]


@pytest.mark.parametrize("bits,symmetric,how,dtype", all_pairs(range(2, 9), [True, False], grains, [torch.float32, torch.float16, torch.bfloat16]), ids=str)
def test_weights_are_those_that_were_measured(bits, symmetric, how, dtype):
    """To the bit: torchao's own grids have another step."""
    w = torch.randn(32, 64).to(dtype)
    found = weight_of(w, to_torchao_config({"0": bits}, symmetric=symmetric, **how)).dequantize()
    assert found.dtype == dtype and torch.equal(found, fake_quantize_weight(w, bits, symmetric=symmetric, **how))


@pytest.mark.parametrize("w", [torch.zeros(4, 8), torch.full((4, 8), 3.0), torch.full((4, 8), -3.0), torch.randn(4, 8) * 1e-30, torch.randn(4, 8) * 1e30], ids=["zero", "positive", "negative", "tiny", "huge"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_unusual_weights(w, symmetric):
    found = weight_of(w, to_torchao_config({"0": 4}, symmetric=symmetric)).dequantize()
    torch.testing.assert_close(found, fake_quantize_weight(w, 4, symmetric=symmetric), rtol=1e-6, atol=0)


def test_dynamic_has_torchaos_own_step():
    """2 max|w| / (2^b - 1), with a bit less where products overflow; what is beyond the last step is cut off."""
    w, n_steps = torch.randn(32, 64), 127 if products_overflow() else 255
    found = weight_of(w, to_torchao_config({"0": 8}, dynamic=True))
    torch.testing.assert_close(found.scale.reshape(-1, 1).float(), 2 * w.abs().amax(1, keepdim=True) / n_steps)
    assert 0 < (found.dequantize() - fake_quantize_weight(w, 8)).abs().max() < 0.02 * w.abs().max()


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_trained_on_our_grid_stay_what_they_are(symmetric):
    w = fake_quantize_weight(torch.randn(32, 64), 3, symmetric=symmetric)
    torch.testing.assert_close(weight_of(w, to_torchao_config({"0": 3}, symmetric=symmetric)).dequantize(), w)


# ---------------------------------------------------------------- whole models


def bert():
    """Two layers of BERT with a classifier, from a config."""
    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    return transformers.BertForSequenceClassification(config), torch.randint(50, (2, 7))


def llama(tied=True):
    """Grouped queries, RMS norm and a head that is tied to the embedding, or not."""
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=tied
    )
    return transformers.LlamaForCausalLM(config), torch.randint(48, (2, 7))


def vit():
    """Patches of 4 x 4 by a convolution."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_channels=4
    )
    return transformers.ViTForImageClassification(config), torch.randn(2, 4, 16, 16)


def cnn():
    """Plain, grouped, depthwise and pointwise convolutions."""
    layers = [nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)), torch.randn(2, 4, 16, 16)


def outputs(model, x):
    """The logits."""
    with torch.no_grad():
        out = model(x)
    return getattr(out, "logits", out)


grids = [dict(symmetric=s, **how) for s in (True, False) for how in ({}, dict(per_channel=False), dict(group_size=4), dict(group_size=16))]


makers = {"bert": bert, "llama tied": llama, "llama": partial(llama, tied=False), "vit": vit, "cnn": cnn}


@pytest.mark.parametrize("bits,how,name", all_pairs([8, 4, 3, 2], grids, list(makers)), ids=str)
def test_models_compute_what_was_planned(name, how, bits):
    """With the settings of a measured plan, for each layer that torchao takes."""
    model, x = makers[name]()
    model.eval()
    settings = Quantized(bits, **how).settings
    named = BitPlan({u.name: bits for u in find_units(model)[0]}, settings=settings)
    plan, left = split_plan(named, model)
    assert plan.settings == settings and len(plan) >= 2 and all("groups" in why for _, why in left)
    before = outputs(model, x)
    with quantize_model(model, plan):
        planned = outputs(model, x)
    found = outputs(run(model, to_torchao_config(plan, model)), x)
    assert (found - planned).norm() <= 1e-5 * planned.norm()
    assert (planned - before).norm() > 1e-4 * before.norm()


def test_a_searched_plan_is_run_as_it_was_measured():
    """From an analysis with asymmetric groups to torchao, nothing said twice."""
    model, x = cnn()
    model.eval()
    analyzer = SensitivityAnalyzer(model, x, lambda m: outputs(m, x).square().mean(), higher_is_better=False, metric_name="power")
    sweep = analyzer.sweep("quantization", [8, 4, 2], quant_symmetric=False, quant_group_size=4, verbose=False)
    plan, left = split_plan(sweep.to_bit_plan(model, 4), model)
    assert plan and plan.settings["group_size"] == 4 and not plan.settings["symmetric"]
    with quantize_model(model, plan):
        planned = outputs(model, x)
    assert (outputs(run(model, to_torchao_config(plan, model)), x) - planned).norm() <= 1e-5 * planned.norm()


@pytest.mark.parametrize("activations", ["input", "output", "input and output"])
def test_activations_on_fixed_ranges_are_refused(activations):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    plan = BitPlan({"0": 8}, settings=Quantized(8).settings | dict(activations=activations, ranges="minmax", observed_on="sample"))
    with pytest.raises(ValueError, match="fixed ranges"):
        to_torchao_config(plan, model)
    assert to_torchao_config(dict(plan), model)


contradictions = [dict(symmetric=False), dict(per_channel=False), dict(group_size=4), dict(dynamic=True)]


@pytest.mark.parametrize("given", contradictions, ids=str)
def test_what_contradicts_a_plan_is_refused(given):
    plan = BitPlan({"0": 8}, settings=Quantized(8).settings)
    with pytest.raises(ValueError, match=r"pass dict\(plan\)"):
        to_torchao_config(plan, **given)
    assert to_torchao_config(dict(plan), **given)


def test_groups_that_are_no_rectangle():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3))
    runs, left = split_plan({"0": 4, "1": 4, "2": 4}, model, group_size=4)
    assert runs == {"1": 4} and [n for n, _ in left] == ["0", "2"] and all("no rectangle" in why for _, why in left)
    assert list(split_plan({"0": 4, "1": 4, "2": 4}, model, group_size=9)[0]) == ["0", "2"]


def test_weights_that_are_not_finite_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="'0': it has weights that are not finite"):
        to_torchao_config({"0": 8}, model)


# ---------------------------------------------------------------- what torchao can run

kinds = {
    "linear": (lambda: nn.Linear(16, 8), (3, 16)),
    "linear of one input": (lambda: nn.Linear(1, 8), (3, 1)),
    "conv": (lambda: nn.Conv2d(16, 8, 3), (2, 16, 5, 5)),
    "grouped conv": (lambda: nn.Conv2d(16, 8, 3, groups=4), (2, 16, 5, 5)),
    "same conv": (lambda: nn.Conv2d(16, 8, 3, padding="same"), (2, 16, 5, 5)),
    "circular conv": (lambda: nn.Conv2d(16, 8, 3, padding=1, padding_mode="circular"), (2, 16, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), (2, 16, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(16, 8, 3), (2, 16, 5)),
    "conv3d": (lambda: nn.Conv3d(16, 8, 3), (2, 16, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 8, 3), (2, 16, 5, 5)),
    "hugging face": (lambda: Conv1D(8, 16), (3, 16)),
    "double": (lambda: nn.Linear(16, 8).double(), (3, 16)),
    "half": (lambda: nn.Linear(16, 8).bfloat16(), (3, 16)),
}
can = {"linear", "conv", "grouped conv", "same conv", "circular conv", "depthwise", "half"}


@pytest.mark.parametrize("kind,bits,how", all_pairs(list(kinds), [3, 8], [{}, {"dynamic": True}, {"symmetric": False}]), ids=str)
def test_refused_is_what_torchao_cannot_run(kind, bits, how):
    """Both ways: what is accepted runs and is close to the float model, what is refused does not run."""
    make, shape = kinds[kind]
    model = nn.Sequential(make()).eval()
    x = torch.randn(shape, dtype=model[0].weight.dtype)
    reason = torchao_refusal(model, find_units(model)[0][0], bits, dynamic=how.get("dynamic", False))
    dynamic_input = how.get("dynamic") and bits == 8
    assert (reason is None) == (kind in can or kind == "linear of one input" and not dynamic_input)
    with torch.no_grad():
        if reason is None:
            before = model(x)
            after = run(model, to_torchao_config({"0": bits}, model, **how))(x)
            off = (after - before).float().norm()
            assert off < (0.05 if bits == 8 else 0.6) * before.float().norm()
            assert off > 0 or kind == "linear of one input"  # whose rows of one weight are the ends of their grids
        else:
            assert split_plan({"0": bits}, model, dynamic=how.get("dynamic", False)) == ({}, [("0", reason)])
            with pytest.raises(ValueError, match="cannot run '0'"):
                to_torchao_config({"0": bits}, model, **how)
            with pytest.raises((NotImplementedError, RuntimeError, ValueError, AssertionError)):
                run(model, to_torchao_config({"0": bits}, **how))(x)


@pytest.mark.parametrize("name", ["attn.out_proj", "attn.in_proj_weight"])
def test_attention_weights_are_refused_for_a_reason(name):
    model, x = Net(lambda m, x: m.attn(x, x, x)[0], attn=nn.MultiheadAttention(8, 2)).eval(), torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match="one fused operation"):
        to_torchao_config({name: 8}, model)
    with pytest.raises(NotImplementedError), torch.no_grad():
        run(model, to_torchao_config({name: 8}))(x)


def test_the_linear_layers_of_a_transformer_run():
    model, x = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval(), torch.randn(2, 3, 16)
    runs, left = split_plan(8, model)
    assert list(runs) == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert {n.rpartition(".")[2] for n, _ in left} >= {"in_proj_weight", "out_proj"}
    with torch.no_grad():
        assert 0 < (run(model, to_torchao_config(runs, model))(x) - model(x)).abs().max() < 0.05


def test_group_size_must_fit():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3))
    assert split_plan({"0": 4, "1": 4}, model, group_size=16) == ({"0": 4}, [("1", "an output of this layer has 8 weights, which groups of 16 do not divide")])
    assert run(model, to_torchao_config({"0": 4}, model, group_size=4))[0].weight.scale.shape == (8, 4)


# ---------------------------------------------------------------- names


def tied():
    """An embedding tied to the head, and two tied layers."""
    def forward(m, i):
        return m.head(m.b(m.a(m.emb(i))))
    model = Net(forward, emb=nn.Embedding(16, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 8), head=nn.Linear(8, 16, bias=False)).eval()
    model.b.weight, model.head.weight = model.a.weight, model.emb.weight
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tied_weight_is_quantized_wherever_it_is(bits):
    model, i = tied(), torch.arange(16)
    assert list(holders(model, find_units(model, layers="head")[0][0])) == ["emb", "head"]
    net = run(model, to_torchao_config({"head": bits, "b": bits}, model, symmetric=False))
    for name in ("emb", "head", "a", "b"):
        expected = fake_quantize_weight(model.get_submodule(name).weight, bits, symmetric=False)
        assert torch.equal(net.get_submodule(name).weight.dequantize(), expected)
    for w in (model.emb.weight, model.a.weight):
        w.data.copy_(fake_quantize_weight(w, bits, symmetric=False))
    with torch.no_grad():
        torch.testing.assert_close(net(i), model(i))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tied_embedding_in_eight_bits_runs(dynamic):
    model, i = tied(), torch.arange(16)
    with torch.no_grad():
        assert 0 < (run(model, to_torchao_config({"head": 8, "a": 8}, model, dynamic=dynamic))(i) - model(i)).abs().max() < (0.25 if dynamic and products_overflow() else 0.1)


def test_a_weight_shared_with_something_unknown_is_refused():
    class Own(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.table = weight

    model = Net(None, fc=nn.Linear(8, 4))
    model.own = Own(model.fc.weight)
    with pytest.raises(ValueError, match="belongs to Own 'own'"):
        to_torchao_config({"fc": 8}, model)


def test_tied_layers_need_the_same_bits():
    with pytest.raises(ValueError):
        to_torchao_config({"a": 4, "b": 8}, tied())


def test_a_module_under_two_names():
    layer = nn.Linear(8, 8)
    model, x = Net(lambda m, x: m.again(m.first(x)), first=layer, again=layer).eval(), torch.randn(2, 8)
    net = run(model, to_torchao_config({"again": 4}, model, symmetric=False))
    layer.weight.data = fake_quantize_weight(layer.weight, 4, symmetric=False)
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))


def test_a_model_that_is_a_layer():
    layer = nn.Linear(8, 4)
    assert torch.equal(run(layer, to_torchao_config({"": 4}, layer, symmetric=False)).weight.dequantize(), fake_quantize_weight(layer.weight, 4, symmetric=False))


def test_integers_are_not_quantized_again():
    """Nor taken for tied: such weights have no address of their own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net = run(model, to_torchao_config({"0": 8, "1": 4}, model))
    runs, left = split_plan(8, net)
    assert runs == {"2": 8} and [n for n, why in left if "already" in why] == ["0", "1"]
    with pytest.raises(KeyError, match="Int8Tensor.*already"):
        to_torchao_config({"0": 8}, net)


def test_the_rest_is_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
    before = fingerprint(model)
    config = to_torchao_config({"0": 8, "2": 3}, model)
    assert changes(before, fingerprint(model)) == [] and set(config.fqn_to_config) == {"0", "2"}
    net = run(model, config)
    changed = [n for n, p in net.named_parameters() if type(p) is not nn.Parameter]
    assert changed == ["0.weight", "2.weight"]
    assert all(torch.equal(p, net.state_dict()[n]) for n, p in model.state_dict().items() if n not in changed)
    assert net[2].weight.target_dtype == torch.int3 and net[0].weight.target_dtype == torch.int8


@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE"])
def test_dynamic_is_right_or_refused_without_vnni(instructions):
    """Such a CPU adds products of 8-bit integers up in 16 bits, where two of them overflow; oneDNN plays one"""
    code = """
import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from fasterai_sens import to_torchao_config
from fasterai_sens.methods.torchao import products_overflow
torch.manual_seed(0)
model, x, state = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64), torch.get_rng_state()
with torch.no_grad():
    right = model(x)
    try: quantize_(model, to_torchao_config({"0": 8}, model, dynamic=True), filter_fn=None)
    except ValueError as e:
        assert products_overflow() and not hasattr(Int8DynamicActivationInt8WeightConfig(version=2), "reduce_range"), e
    assert (model(x) - right).norm() < .03*right.norm()
assert torch.equal(torch.get_rng_state(), state)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": instructions})
    assert done.returncode == 0, done.stderr


def test_dynamic_needs_a_range_where_products_overflow(monkeypatch):
    """An older torchao has none, and would be a third off"""
    monkeypatch.setattr(fasterai_sens.methods.torchao, "products_overflow", lambda: True)
    monkeypatch.setattr(fasterai_sens.methods.torchao, "fields", lambda config: ())
    with pytest.raises(ValueError, match="no VNNI instructions.*or dynamic=False"):
        to_torchao_config({"0": 8}, nn.Sequential(nn.Linear(8, 8)), dynamic=True)


def test_dynamic_rounds_the_inputs_of_eight_bit_layers_only():
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(5, 64)
    with torch.no_grad():
        net = run(model, to_torchao_config({"0": 8}, model, dynamic=True))
        low, high = (-64, 63) if products_overflow() else (-128, 127)
        step = 2 * x.abs().amax(1, keepdim=True) / (high - low)
        rounded = (x / step).round().clamp(low, high) * step
        torch.testing.assert_close(net(x), F.linear(rounded, net[0].weight.dequantize()), rtol=1e-3, atol=1e-4)
        assert (net(x) - F.linear(x, net[0].weight.dequantize())).abs().max() > 1e-3
        four, same = (run(model, to_torchao_config({"0": 4}, model, dynamic=d)) for d in (True, False))
        assert torch.equal(four(x), same(x))


def test_the_model_can_be_saved_and_loaded(tmp_path):
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval(), torch.randn(2, 256)
    net = run(model, to_torchao_config({"0": 8, "1": 4}, model))
    torch.save(model.state_dict(), tmp_path / "float.pth")
    torch.save(net.state_dict(), tmp_path / "int.pth")
    assert (tmp_path / "int.pth").stat().st_size < 0.3 * (tmp_path / "float.pth").stat().st_size
    fresh = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    state = torch.load(tmp_path / "int.pth", weights_only=False)  # PyTorch 2.6 does not count `torch.int4` as harmless yet
    fresh.load_state_dict(state, assign=True)
    with torch.no_grad():
        assert torch.equal(fresh(x), net(x))


# ---------------------------------------------------------------- plans and errors


def test_one_number_means_every_layer():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    assert [(u.name, b) for u, b in plan_units(model, 5).items()] == [("0", 5), ("2", 5)]
    runs, left = split_plan(5, model)
    assert runs == {"0": 5, "2": 5} and [n for n, _ in left] == ["1"]


def test_more_than_eight_bits_stay_in_floating_point():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    runs, left = split_plan(LayerTargets({"0": 16, "1": 8}, "bits"), model)
    assert (runs, runs.unit) == ({"1": 8}, "bits") and left == [("0", "torchao has integers of 2 to 8 bits, not 16")]


net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
mistakes = [
    (dict(plan={"0": 50}, model=net), ValueError, "'0' is in bits"),
    (dict(plan={"0": 1}), ValueError, "in bits"),
    (dict(plan={"0": 17}), ValueError, "in bits"),
    (dict(plan={"0": True}), ValueError, "in bits"),
    (dict(plan={"0": 4.0}), ValueError, "in bits"),
    (dict(plan={"0": None}), ValueError, "in bits"),
    (dict(plan=50), ValueError, "a plan is in bits"),
    (dict(plan=True), ValueError, "a plan is in bits"),
    (dict(plan="0"), TypeError, "layer name -> bits"),
    (dict(plan=None), TypeError, "layer name -> bits"),
    (dict(plan={}), ValueError, "empty"),
    (dict(plan=8, model=net), ValueError, "by name: split_plan"),
    (dict(plan=LayerTargets({"0": 50})), ValueError, "in percent"),
    (dict(plan={"O": 8, "0": 8}, model=net), KeyError, "unknown layer 'O'"),
    (dict(plan={"1": 8}, model=net), KeyError, "BatchNorm1d"),
    (dict(plan={"0": 8}, model="net"), TypeError, "nn.Module"),
    (dict(plan={"0": 8}, group_size=0), ValueError, "group_size"),
    (dict(plan={"0": 8}, group_size=True), ValueError, "group_size"),
    (dict(plan={"0": 8}, group_size=4, dynamic=True), ValueError, "dynamic"),
    (dict(plan={"0": 8}, symmetric=False, dynamic=True), ValueError, "dynamic"),
    (dict(plan={"0": 8}, model=net, group_size=3), ValueError, "groups of 3"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), mistakes, ids=[str({k: v for k, v in m[0].items() if k != "model"}) for m in mistakes])
def test_mistakes_are_said(kwargs, error, message):
    with pytest.raises(error, match=message):
        to_torchao_config(**kwargs)


def test_near_matches():
    model = Net(None, query=nn.Linear(2, 2), key=nn.Linear(2, 2))
    with pytest.raises(KeyError, match="did you mean 'query'"):
        to_torchao_config({"qurey": 4}, model)
    with pytest.raises(KeyError, match="did you mean 'query'"):
        split_plan({"qurey": 4}, model)


def test_a_plan_is_checked_once():
    assert check_plan({"a": torch.tensor(4).item()}) == {"a": 4} and check_plan(16) == 16


def test_without_torchao_it_says_how_to_get_it(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match=r"pip install fasterai_sens\[torchao\]"):
        to_torchao_config({"0": 8})
    assert split_plan(8, nn.Sequential(nn.Linear(8, 8)))[0] == {"0": 8}


def test_an_old_torchao_is_named(monkeypatch):
    old, package = ModuleType("torchao.quantization"), ModuleType("torchao")
    package.quantization = old
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", old)
    with pytest.raises(ImportError, match="0.15 or newer"):
        layer_config(8)


def test_it_is_part_of_the_package():
    assert fasterai_sens.to_torchao_config is to_torchao_config and "QuantizeCallback" in dir(fasterai_sens)
