"""What users hand in, in all its forms: kinds of layers, layers that are quantized already."""
import warnings

import pytest
import torch
from torch import nn

from fasterai_sens import (
    SensitivityAnalyzer,
    Sparsifier,
    SparsifyCallback,
    changes,
    fingerprint,
    search_targets,
    uniform,
)
from fasterai_sens.layers import all_units, find_units


class Small(nn.Module):
    """A convolution, two linear layers, three classes"""

    def __init__(self):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv1d(1, 4, 3), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.fc1(self.conv(x[:, None]).flatten(1)).relu())


def small():
    """The network, the same each time."""
    torch.manual_seed(0)
    return Small()


# Kinds of layers

kinds = {
    "class": nn.Linear,
    "tuple": (nn.Linear,),
    "list": [nn.Linear],
    "set": {nn.Linear},
    "dict keys": {nn.Linear: 1}.keys(),
    "list with two": [nn.Linear, nn.Conv3d],
}


@pytest.mark.parametrize("kind", kinds.values(), ids=kinds)
def test_layer_types_of_any_form(kind):
    """A class, or several in a tuple, list or set, mean the same everywhere."""
    model, x, linear = small(), torch.randn(2, 6), ["fc1", "fc2"]
    analyzer = SensitivityAnalyzer(model, x, lambda m: m(x).mean())
    assert [r.name for r in analyzer.analyze(layer_types=kind, verbose=False).layers] == linear
    assert [r.name for r in analyzer.sweep(levels=[50], layer_types=kind, verbose=False)[0].layers] == linear
    assert list(uniform(model, 50, layer_types=kind)) == linear
    assert [u.name for u in Sparsifier(model, layer_type=kind).units] == linear
    assert SparsifyCallback(50, layer_type=kind).layer_type in ((nn.Linear,), (nn.Linear, nn.Conv3d))
    assert list(search_targets(model, x, lambda m: m(x).square().mean(), 50, layer_types=kind, evaluations=40, verbose=False).plan) == linear


def test_layer_types_that_can_be_read_once():
    """A generator of classes is read once, and used throughout."""
    model, x = small(), torch.randn(2, 6)
    found = search_targets(model, x, lambda m: m(x).square().mean(), 50, layer_types=(k for k in [nn.Linear]), evaluations=40, verbose=False)
    assert list(found.plan) == ["fc1", "fc2"]


# Layers that are quantized already

@pytest.fixture
def quantize_dynamic():
    """torch.ao's function, where this torch has it."""
    found = getattr(getattr(torch.ao, "quantization", None), "quantize_dynamic", None)
    if found is None: pytest.skip("this torch has no torch.ao.quantization.quantize_dynamic")
    if not torch.backends.quantized.supported_engines: pytest.skip("this torch has no engine for quantized layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


def test_dynamically_quantized_layers_are_skipped_with_the_reason(quantize_dynamic):
    """What `quantize_dynamic` replaced is in `skipped`; the rest is measured, and the model comes back."""
    model, x = quantize_dynamic(small().eval(), {"fc1": torch.ao.quantization.default_dynamic_qconfig}), torch.randn(2, 6)
    before = fingerprint(model)
    result = SensitivityAnalyzer(model, x, lambda m: m(x).mean()).analyze(verbose=False)
    assert [r.name for r in result.layers] == ["conv", "fc2"]
    assert [n for n, _ in result.skipped] == ["fc1"] and "quantized already" in dict(result.skipped)["fc1"]
    assert not changes(before, fingerprint(model))
    with pytest.raises(KeyError, match="fc1.*quantized already"): find_units(model, layers=["fc1"])


def test_a_model_of_quantized_layers_says_so(quantize_dynamic):
    """Recurrent layers too; where nothing is left, the error names them."""
    model = quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.ReLU()).eval(), {nn.Linear, nn.LSTM})
    assert [n for n, _ in all_units(model)[1]] == ["0", "1"]
    with pytest.raises(ValueError, match="no compressible layer.*0: Linear keeps its weights in packed numbers"): find_units(model)


def test_statically_quantized_layers_are_skipped(quantize_dynamic):
    """Convolutions and linear layers that `convert` put in, each once."""
    ao = torch.ao.quantization
    model = nn.Sequential(ao.QuantStub(), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Linear(4, 2), ao.DeQuantStub()).eval()
    model.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    ao.prepare(model, inplace=True)(torch.randn(2, 1, 6))
    ao.convert(model, inplace=True)
    assert [n for n, _ in all_units(model)[1]] == ["1", "3"]


def test_other_packages_layers_of_integers_are_skipped():
    """A weight in a buffer of integers, as GPTQ's layers keep it; buffers that are no weights say nothing."""
    model = small()
    quantized = nn.Module()
    quantized.register_buffer("qweight", torch.zeros(2, 16, dtype=torch.int32))
    model.fc1, model.loss = quantized, nn.CrossEntropyLoss(weight=torch.ones(3))
    model.register_buffer("position_ids", torch.arange(6)[None])
    units, skipped = all_units(model)
    assert [u.name for u in units] == ["conv", "fc2"]
    assert [n for n, _ in skipped] == ["fc1"] and "'qweight' of int32" in skipped[0][1]


def test_torchao_layers_are_skipped():
    """A weight that torchao made of other tensors."""
    torchao = pytest.importorskip("torchao.quantization")
    model = small()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert [u.name for u in all_units(model)[0]] == ["conv"]
    assert {"fc1", "fc2"} == {n for n, why in all_units(model)[1] if "quantized" in why}
