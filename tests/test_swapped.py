"""The compressed model comes first, and models that look swapped are refused before anything is measured."""
import copy

import pytest
import torch
from torch import nn

from fasterai_sens import Pruner, Sparsifier, compress_to_size, quantize_model, validate_compression_target

x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))


def made():
    """A small network; its biases are zero, as many have them"""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.zeros_(net[0].bias)
    return net


def pruned(net):
    """With fewer channels"""
    Pruner(net, 25, example_inputs=x[:1]).prune_model()
    return net


def sparse(net):
    """With a tenth of the weights at zero"""
    Sparsifier(net).sparsify_model(10)
    return net


def rounded(net):
    """In 2 bits"""
    quantize_model(net, 2)
    return net


def small(net):
    """What `compress_to_size` returns"""
    return compress_to_size(net, x[:1], "60 %")


def dynamic(net):
    """Integers in place of the parameters"""
    return torch.ao.quantization.quantize_dynamic(net.eval(), {nn.Linear}, torch.qint8)


def half(net):
    """In half precision"""
    return net.to(torch.bfloat16)


ways = [pruned, sparse, rounded, small, dynamic]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("way", ways)
def test_swapped_models_are_refused(way):
    calls = []
    eval_fn = lambda m: (calls.append(m), torch.ones(100))[1]
    original = made()
    compressed = way(copy.deepcopy(original))
    with pytest.raises(ValueError, match="then the original"):
        validate_compression_target(original, compressed, eval_fn, .1)
    assert not calls
    assert validate_compression_target(compressed, original, eval_fn, .1)
    assert len(calls) == 2 and calls[0] is original


@pytest.mark.parametrize("way", [half, copy.deepcopy])
def test_models_of_one_size_are_not_refused(way):
    original = made()
    other = way(copy.deepcopy(original))
    eval_fn = lambda m: torch.ones(100)
    assert validate_compression_target(other, original, eval_fn, .1)
    assert validate_compression_target(original, other, eval_fn, .1)


def test_biases_that_training_moved_are_no_growth():
    original = made()
    tuned = sparse(copy.deepcopy(original))
    nn.init.ones_(tuned[0].bias)
    assert validate_compression_target(tuned, original, lambda m: torch.ones(100), .1)


def test_the_way_out_that_the_message_names_works():
    original, larger = sparse(made()), made()
    with pytest.raises(ValueError, match=r"if they are in order, pass eval_fn\(original\)"):
        validate_compression_target(larger, original, lambda m: torch.ones(100), .1)
    assert validate_compression_target(larger, torch.ones(100), lambda m: torch.ones(100), .1)


def test_the_old_order_is_told():
    with pytest.raises(TypeError, match="then the original"):
        validate_compression_target(.9, made(), lambda m: .9, .1)
    net = made()
    loss = validate_compression_target(compressed=net, original=net, eval_fn=lambda m: torch.ones(100), allowed=.1)
    assert loss.drop == 0


@pytest.mark.parametrize("stored", [torch.Tensor.to_sparse, lambda w: w.to(torch.float8_e4m3fn)])
def test_weights_in_other_layouts_are_counted(stored):
    original = made()
    other = copy.deepcopy(original)
    other[0].weight = nn.Parameter(stored(other[0].weight.detach()), requires_grad=False)
    assert validate_compression_target(other, original, lambda m: torch.ones(100), .1)
