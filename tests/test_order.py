"""In which order the levels of a sweep come back, and that nothing else depends on it."""
import matplotlib
import pytest
import torch
from torch import nn

from fasterai_sens import SensitivityAnalyzer, SweepResult, allocate, identify_critical_layers

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def net():
    """Three layers, the last one fragile"""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


@pytest.fixture(scope="module")
def inputs():
    """Rows of numbers"""
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def analyzer(net, inputs):
    """How far the outputs move, as the metric"""
    with torch.no_grad():
        before = net(inputs)
    distance = lambda m: ((m(inputs) - before) ** 2).mean(1)
    return SensitivityAnalyzer(net, inputs[:1], distance, higher_is_better=False, metric_name="distance")


orders = ([25, 50, 90], [90, 25, 50], [50, 90, 25], [90, 50, 25])


@pytest.mark.parametrize("method, levels", [*(("sparsity", o) for o in orders), ("pruning", [75, 25]), ("quantization", [2, 8, 4])])
def test_levels_come_back_in_the_order_given(analyzer, method, levels):
    sweep = analyzer.sweep(method, levels, verbose=False)
    assert sweep.levels == levels
    assert all(level == result.compression_level for level, result in zip(levels, sweep, strict=True))
    single = {level: analyzer.analyze(method, level, verbose=False) for level in levels}
    assert all(single[level] == result for level, result in zip(levels, sweep, strict=True))


def test_levels_mentioned_twice_are_measured_once_and_come_back_twice(net, inputs, tmp_path):
    calls = []
    counting = SensitivityAnalyzer(net, inputs[:1], lambda m: (calls.append(1), m(inputs).detach().sum().item())[1])
    levels = [50, 25, 50.0, None]
    sweep = counting.sweep("sparsity", levels, layers=["0"], verbose=False)
    assert len(calls) == 1 + 2 and sweep.levels == [50, 25, 50, 50] and sweep.ladder == [25, 50]
    assert sweep[0] == sweep[2]
    assert len(sweep.to_dataframe()) == 2 and list(sweep.curve("0").index) == [25, 50]
    sweep.to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().splitlines()[0] == "layer,25,50"


def test_a_dict_of_levels_comes_back_mildest_first(analyzer):
    sweep = analyzer.sweep(levels={"2": [90, 25], "0": [50]}, verbose=False)
    assert sweep.levels == [25, 50, 90]
    assert analyzer.sweep("quantization", {"2": [2, 8]}, verbose=False).levels == [8, 2]


def files_of(sweep, folder):
    """What a sweep writes as a table"""
    sweep.to_csv(folder / "s.csv")
    return (folder / "s.csv").read_text()


@pytest.mark.parametrize("stop", [{}, dict(early_stop_mode="raised", early_stop_value=.0014)])
def test_nothing_made_of_a_sweep_depends_on_the_order(analyzer, net, inputs, stop, tmp_path):
    sweeps = [analyzer.sweep("sparsity", o, verbose=False, **stop) for o in orders]
    if stop:
        assert any(len(sweeps[0].rows(n)) < 3 for n in sweeps[0].names)
    first = sweeps[0]
    for s in sweeps[1:]:
        assert {r.compression_level: r for r in s} == {r.compression_level: r for r in first}
        assert s.names == first.names and s.ladder == first.ladder == [25, 50, 90]
        assert all(s.curve(n).equals(first.curve(n)) for n in s.names)
        assert s.to_dataframe().equals(first.to_dataframe())
        assert files_of(s, tmp_path) == files_of(first, tmp_path)
        assert dict(s.to_layer_targets(net, 20)) == dict(first.to_layer_targets(net, 20))
        assert {r.compression_level: r for r in s.smoothed()} == {r.compression_level: r for r in first.smoothed()}
        assert allocate(s, "80%", model=net, sample=inputs[:1]).as_dict() == allocate(first, "80%", model=net, sample=inputs[:1]).as_dict()
        assert identify_critical_layers(s) == identify_critical_layers(first)
        assert s.predict({"0": 37.5, "2": 10}) == first.predict({"0": 37.5, "2": 10})
        s.to_json(tmp_path / "s.json")
        back = SweepResult.from_json(tmp_path / "s.json")
        assert back == s and back.levels == s.levels


def test_bit_plans_do_not_depend_on_the_order(analyzer, net):
    plans = [analyzer.sweep("quantization", o, verbose=False).to_bit_plan(net, 4) for o in ([8, 4, 2], [2, 4, 8], [4, 2, 8])]
    assert plans[0] == plans[1] == plans[2] and plans[0].as_dict() == plans[1].as_dict()


def test_pictures_go_from_mild_to_harsh(analyzer):
    def drawn(levels, method):
        heat, lines = analyzer.sweep(method, levels, verbose=False).plot()
        return [t.get_text() for t in heat.get_xticklabels()], heat.images[0].get_array().tolist(), [line.get_ydata().tolist() for line in lines.lines]
    assert drawn([90, 25, 50], "sparsity") == drawn([25, 50, 90], "sparsity")
    assert drawn([90, 25, 50, 25], "sparsity")[0] == ["25", "50", "90"]
    assert drawn([2, 8, 4], "quantization")[0] == ["8", "4", "2"]


def test_files_without_strength_are_read(analyzer, tmp_path):
    import json
    sweep = analyzer.sweep("quantization", [2, 8], verbose=False)
    sweep.to_json(tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    for result in data["results"]:
        del result["strength"]
    (tmp_path / "s.json").write_text(json.dumps(data))
    back = SweepResult.from_json(tmp_path / "s.json")
    assert back.levels == [2, 8] and back.ladder == [8, 2]
