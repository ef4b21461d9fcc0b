"""Curves measured with batch-norm statistics estimated anew: the numbers by hand, the model as it was, plans judged otherwise."""
import warnings

import pytest
import torch
from torch import nn

from fasterai_sens import (
    Pruned,
    Quantized,
    Recalibrated,
    SensitivityAnalyzer,
    Sparse,
    SweepResult,
    analyze_degradation,
    analyze_sensitivity,
    changes,
    compress_to_size,
    compress_with_layer_sensitivity,
    evaluation,
    fingerprint,
    search_plan,
)

levels = {"sparsity": [50, 80], "pruning": [25, 50], "quantization": [8, 3]}


@pytest.fixture(scope="module")
def net():
    """A small trained network with two batch norms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)).train()
    for _ in range(20): model(1 + 2*torch.randn(64, 1, 6, 6))
    return model.eval()


@pytest.fixture(scope="module")
def data(net):
    """Images, and what the network says of them."""
    torch.manual_seed(1)
    x = 1 + 2*torch.randn(128, 1, 6, 6)
    with torch.no_grad(): return x, net(x).argmax(1)


def accuracy(data):
    """The evaluation of a model on the data, per sample."""
    def correct(model):
        with torch.no_grad(): return model(data[0]).argmax(1) == data[1]
    return correct


@pytest.mark.parametrize("method", levels)
def test_each_number_by_hand(net, data, method):
    """Every metric, that of the untouched model too, is the one inside `Recalibrated`; nothing is left behind."""
    before, metric = fingerprint(net), accuracy(data)
    sweep = SensitivityAnalyzer(net, data[0][:1], metric).sweep(method, levels[method], recalibrate=data[0][:64], verbose=False)
    assert changes(before, fingerprint(net)) == []
    again = Recalibrated(data[0][:64])
    with again(net): assert sweep[0].baseline_metric == metric(net).float().mean().item()
    units = {u.name: u for u in SensitivityAnalyzer(net, data[0][:1], metric).units}
    make = {"sparsity": Sparse, "quantization": Quantized, "pruning": Pruned}[method]
    for result in sweep:
        assert result.settings["recalibrated"] is True
        for row in result.layers:
            if not row.prunable: continue
            unit = next(u for u in make.find_units(net, list(units.values()), data[0][:1]) if u.name == row.name) if method == "pruning" else units[row.name]
            with make(result.compression_level)(net, unit), again(net):
                assert row.compressed_metric == pytest.approx(metric(net).float().mean().item(), abs=1e-6)


def test_distance_is_to_the_model_as_it_is(net, data):
    """The KL divergence compares with the untouched outputs, not with those after estimating again."""
    pair = evaluation(data, lambda p, y: p.argmax(1) == y, "kl")
    result = SensitivityAnalyzer(net, data[0][:1], pair).analyze(level=80, recalibrate=data[0][:64], verbose=False)
    plain = SensitivityAnalyzer(net, data[0][:1], evaluation(data, lambda p, y: p.argmax(1) == y, "kl")).analyze(level=80, verbose=False)
    assert plain.baseline_objective == 0 and result.baseline_objective > 0


def test_one_level_in_one_line(net, data, tmp_path):
    """`analyze_sensitivity` takes it, the setting is kept in files, and without batch norm it is an error."""
    result = analyze_sensitivity(net, data[0][:1], accuracy(data), level=80, recalibrate=data[0][:64], verbose=False)
    assert result.settings["recalibrated"] is True
    result.to_json(tmp_path / "r.json")
    assert type(result).from_json(tmp_path / "r.json").settings == result.settings


@pytest.fixture(scope="module")
def sweep(net, data):
    """Sparsity, measured with statistics estimated anew."""
    return SensitivityAnalyzer(net, data[0][:1], accuracy(data)).sweep(levels=[25, 50, 75, 90], recalibrate=data[0][:64], verbose=False)


plans = {
    "search": lambda net, x, metric, sweep, **more: search_plan(net, x[:1], metric, sweep, "60%", evaluations=20, verbose=False, **more),
    "degradation": lambda net, x, metric, sweep, **more: analyze_degradation(net, x[:1], metric, [90], "sparsity", cost="params", plan=sweep, runs=0, verbose=False, **more),
    "size": lambda net, x, metric, sweep, **more: compress_to_size(net, x[:1], "80%", "sparsity", cost="params", plan=sweep, verbose=False, **more),
    "sensitivities": lambda net, x, metric, sweep, **more: compress_with_layer_sensitivity(net, x[:1], sweep, 50, verbose=False, **more),
}


@pytest.mark.parametrize("name", plans)
def test_judged_otherwise_is_said(net, data, sweep, name):
    """A plan of such curves that is judged without is warned about; judged in the same way, it is not."""
    with pytest.warns(UserWarning, match="estimated anew, and the plan is judged without"): plans[name](net, data[0], accuracy(data), sweep)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the curves were measured")
        plans[name](net, data[0], accuracy(data), sweep, recalibrate=data[0][:64])
        old = SweepResult([r for r in SensitivityAnalyzer(net, data[0][:1], accuracy(data)).sweep(levels=[25, 50, 75, 90], verbose=False)], sweep.order)
        plans[name](net, data[0], accuracy(data), old)
