"""What runtimes really run is what was planned; what they cannot run is said, and the model comes back as it was."""
import sys
from functools import partial

import onnx
import pytest
import torch
from torch import nn
from toys import Net, lively, unchanged

from fasterai_sens import BitPlan, LayerTargets, Plan
from fasterai_sens.plans import running
from fasterai_sens.plans.running import CannotRun, deploy_onnx_integers, deploy_two_of_four, measure_runs, pick_runtimes, planned_bits


def net():
    """A convolution and two linear layers"""
    torch.manual_seed(0)
    return lively(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 64), nn.ReLU(), nn.Linear(64, 16)))


x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def by_runtime(rows):
    """runtime -> row"""
    return {row.runtime: row for row in rows}


def test_bytes_by_hand():
    """Each integer takes a byte in memory, whatever its bits; a scale and a zero point for each output; biases as they were"""
    found = by_runtime(measure_runs(net(), Plan(quantization={"4": 3, "6": 8}), x, rounds=1, runtimes=["eager", "torchao", "onnx integers"]))
    rest = 4*(8*27 + 8 + 4*8 + 64 + 16) + 8   # convolution, batch norm and its count, biases
    assert found["eager"].memory == rest + 4*(64*128 + 16*64) and found["eager"].saved == 0 and found["eager"].off == 0
    assert found["torchao"].memory == rest + (64*128 + 16*64) + 5*(64 + 16)
    assert found["torchao"].planned == rest + 3*64*128//8 + 16*64 + 4*(64 + 16)
    assert found["torchao"].off < 1e-5 and abs(found["torchao"].file - found["torchao"].planned) < 4096
    # of three bits the first layer stays in floats; batch norm is folded into the convolution
    held = 4*(8*27 + 8 + 64*128 + 64 + 16) + 16*64 + 5*16
    assert held <= found["onnx integers"].memory <= held + 64 and 1e-6 < found["onnx integers"].off < .02


def words(m, ids, shift=0):
    """Logits over a tied table, in a dict"""
    return {"logits": m.head(torch.relu(m.mid(m.table(ids)))) + shift}


def test_inputs_by_name_tied_weights_and_dicts():
    """Keyword inputs of whole numbers, a head tied to its table, outputs in a dict: every runtime computes the plan"""
    torch.manual_seed(0)
    model = Net(words, table=nn.Embedding(40, 32), mid=nn.Linear(32, 32), head=nn.Linear(32, 40, bias=False)).eval()
    model.head.weight = model.table.weight
    sample = {"ids": torch.arange(12).view(2, 6), "shift": torch.ones(1)}
    settings = dict(per_channel=True, group_size=None, symmetric=False, activations=None, ranges=None)
    plan = Plan(low_rank={"mid": 60}, quantization=BitPlan({"head": 4}, settings=settings))
    with unchanged(model): rows = by_runtime(measure_runs(model, plan, sample, rounds=1, score=lambda out: out.shape[-1]))
    ran = {name: row.off for name, row in rows.items() if row.memory}
    assert set(ran) == {"eager", "export", "onnx", "torchao"} and max(ran.values()) < 1e-4
    assert all(rows[name].score == 40 and rows[name].note == "" for name in ran)
    assert "8 bits" in rows["torchao dynamic"].note
    assert rows["torchao"].memory < .5*rows["eager"].memory < rows["export"].memory


def test_refitted_integers_are_those_of_the_file():
    """With the data to refit to, and a plan that rounds inputs, which only the graph keeps"""
    data = torch.randn(64, 3, 6, 6)
    plan = Plan(quantization={"4": 3, "6": 4})
    rows = by_runtime(measure_runs(net(), plan, x, rounds=1, reconstruct=data, runtimes=["eager", "torchao"]))
    assert rows["torchao"].off < 1e-5
    settings = dict(per_channel=True, group_size=None, symmetric=True, activations="input and output", ranges="minmax")
    rounding = Plan(quantization=BitPlan({"4": 8}, settings=settings))
    rows = by_runtime(measure_runs(net(), rounding, x, rounds=1, runtimes=["eager", "export", "torchao"]))
    assert rows["export"].off < 1e-5 and rows["export"].note == "" and rows["torchao"].memory is None and rows["torchao"].note


def test_what_is_not_there_is_said(monkeypatch):
    """A package that is missing, a plan with nothing for a runtime, one that fails: a reason each, and the others run"""
    def out_of_order(model, plan, sample):
        model[4].weight.data.zero_()
        raise CannotRun("out of order")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(running.runtimes, "mine", out_of_order)
    model = net()
    with unchanged(model): rows = by_runtime(measure_runs(model, {"none": Plan(), "8": Plan(quantization={"4": 8})}, x, rounds=1, runtimes=["mine", "onnx", "2:4", "eager"]))
    notes = {name: row.note for name, row in rows.items()}
    assert notes["mine"] == "out of order" and "onnxruntime" in notes["onnx"] and "zeros" in notes["2:4"] and not notes["eager"]
    assert rows["eager"].ms > 0 and rows["onnx"].ms is None
    assert list(pick_runtimes()) == list(running.runtimes)


@pytest.mark.parametrize("overflows", [False, True])
def test_integers_of_onnx_spare_a_bit_where_products_overflow(overflows, monkeypatch):
    """Their weights are at most 64 there, and still near the plan"""
    monkeypatch.setattr(running, "products_overflow", lambda: overflows)
    seen, open_session = [], running.open_session
    monkeypatch.setattr(running, "open_session", lambda proto, note="": seen.append(proto) or open_session(proto, note))
    row = measure_runs(net(), Plan(quantization={"4": 8, "6": 8}), x, rounds=1, runtimes=["onnx integers"])[0]
    weights = [onnx.numpy_helper.to_array(t) for t in seen[0].graph.initializer]
    largest = max(abs(w.astype(int)).max() for w in weights if w.dtype == "int8" and w.ndim == 2)
    assert 1e-6 < row.off < .03 and (largest <= 64) == overflows


def test_integer_products():
    """Inputs are rounded, on torchao's grid: near the plan; not for a plan with other grids"""
    for symmetric in (True, False):
        settings = dict(per_channel=True, group_size=None, symmetric=symmetric, activations=None, ranges=None)
        row = measure_runs(net(), Plan(quantization=BitPlan({"4": 8, "6": 4}, settings=settings)), x, rounds=1, runtimes=["torchao dynamic"])[0]
        assert 1e-4 < row.off < .02 and not row.note if symmetric else row.memory is None and "symmetric" in row.note


def test_factorized_and_absent_layers_have_no_bits_left():
    """A convolution of 8 bits is no product of onnxruntime, and bits of None are none"""
    model = net()
    assert planned_bits(Plan(quantization={"4": 8, "6": 4}), model) == {"4": 8, "6": 4}
    with pytest.raises(CannotRun, match="is a matrix product"): deploy_onnx_integers(model, Plan(quantization={"0": 8}), x)


def two_of_four():
    """Linear layers as large as the kernels want, and every second pair of their weights zero"""
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    return model, Plan(sparsity=LayerTargets({"0": 50, "2": 50}), settings={"sparsity": {"granularity": "2:4"}})


def test_two_of_four_wants_a_gpu():
    """The plan makes the zeros, and this device is asked for kernels"""
    model, plan = two_of_four()
    plan.apply(model)
    if torch.cuda.is_available(): model.cuda()
    try: deployed = deploy_two_of_four(model, plan, None)
    except CannotRun as e: assert "not on this device" in str(e) and not torch.cuda.is_available()
    else: assert deployed.memory < .7*2*(128*128 + 64*128) + 1000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_two_of_four_runs():
    """Half precision beside what the plan computes"""
    model, plan = two_of_four()
    row = measure_runs(model.cuda(), plan, torch.randn(64, 128, device="cuda"), rounds=3, runtimes=["2:4"])[0]
    assert row.off < .01 and row.memory < .6*4*128*192


def test_bad_calls():
    """Unknown runtimes and layers, no rounds"""
    run = partial(measure_runs, net(), Plan(sparsity={"4": 50}), x)
    with pytest.raises(ValueError): run(rounds=0)
    with pytest.raises(KeyError): run(runtimes=["eagre"])
    with pytest.raises(KeyError): measure_runs(net(), Plan(sparsity={"nope": 50}), x)
    with pytest.raises(TypeError): measure_runs("net", Plan(), x)
