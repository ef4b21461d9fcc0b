"""Counters: every rule by hand, whole models against PyTorch's own counter, and no trace left."""

import math
from functools import cache, partial

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode
from toys import Net
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from fasterai_sens.core.counters import activations, count_flops_params, every_layer_called, full_rules, latency, n_bytes, print_counts
from fasterai_sens.core.fingerprint import changes, fingerprint

# a warning of layers that are not counted would be a rule that is missing
pytestmark = pytest.mark.filterwarnings("error:never called as modules", "ignore:LSTM with projections", "ignore:`torch.jit.script")
count = partial(count_flops_params, verbose=False)
aten = torch.ops.aten


# ---- every rule by hand: module, shape of the input, MACs of one sample, MACs with all that `full` adds

RULES = {
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 2, 8), 18 * 6, 18 * 6 + 18),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 6, 6), 27 * 18, 27 * 18 + 27),
    "conv2d without bias": (lambda: nn.Conv2d(2, 3, (1, 2), bias=False), (2, 2, 2, 3), 12 * 4, 12 * 4),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 3, 3), 24 * 16, 24 * 16 + 24),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 4, 4), 24 * 18, 24 * 18 + 24),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 4, 4), 32 * 9, 32 * 9 + 32),
    "dilated": (lambda: nn.Conv1d(1, 1, 3, dilation=2), (2, 1, 7), 3 * 3, 3 * 3 + 3),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=2), (2, 2, 4), 8 * 6, 8 * 6 + 24),
    "transposed 2d, grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 2, 2), 16 * 27, 16 * 27 + 96),
    "transposed 3d": (lambda: nn.ConvTranspose3d(1, 2, 2), (2, 1, 2, 2, 2), 8 * 16, 8 * 16 + 54),
    "linear": (lambda: nn.Linear(3, 2), (2, 3), 6, 6 + 2),
    "linear, rank 4": (lambda: nn.Linear(3, 2), (2, 4, 5, 3), 120, 120 + 40),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), (2, 3), 6, 6),
    "rnn": (lambda: nn.RNN(2, 3, batch_first=True), (2, 5, 2), 5 * 15, 5 * (15 + 6)),
    "rnn, 2 layers, both ways": (
        lambda: nn.RNN(2, 3, num_layers=2, bidirectional=True, batch_first=True),
        (2, 5, 2),
        5 * 2 * (3 * 2 + 9 + 3 * 6 + 9),
        5 * 2 * (3 * 2 + 9 + 3 * 6 + 9 + 12),
    ),
    "lstm": (lambda: nn.LSTM(2, 3, batch_first=True), (2, 5, 2), 5 * 60, 5 * (60 + 24)),
    "lstm, projected": (lambda: nn.LSTM(2, 3, proj_size=1, batch_first=True), (2, 5, 2), 5 * (4 * (6 + 3) + 3), 5 * (4 * (6 + 3) + 3 + 24)),
    "gru without bias": (lambda: nn.GRU(2, 3, bias=False, batch_first=True), (2, 5, 2), 5 * 45, 5 * 45),
    "rnn cell": (lambda: nn.RNNCell(2, 3), (2, 2), 15, 15 + 6),
    "lstm cell": (lambda: nn.LSTMCell(2, 3), (2, 2), 60, 60 + 24),
    "gru cell": (lambda: nn.GRUCell(2, 3, bias=False), (2, 2), 45, 45),
    "attention": (lambda: Net(lambda s, x: s.a(x, x, x), a=nn.MultiheadAttention(4, 2, batch_first=True)), (2, 5, 4), 4 * 80, 4 * 80 + 4 * 20),
    "attention without bias": (
        lambda: Net(lambda s, x: s.a(x, x, x), a=nn.MultiheadAttention(4, 2, bias=False, batch_first=True)),
        (2, 5, 4),
        4 * 80,
        4 * 80,
    ),
    "attention, other sizes, by keyword": (
        lambda: Net(lambda s, x: s.a(value=x[..., :2], key=x[..., :3], query=x), a=nn.MultiheadAttention(4, 1, kdim=3, vdim=2, batch_first=True)),
        (2, 5, 4),
        5 * 4 * (4 + 3 + 2 + 4),
        5 * 4 * (4 + 3 + 2 + 4) + 4 * 20,
    ),
}
EXTRAS = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(3), (2, 3, 4), 24),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4), 96),
    "batch norm 3d": (lambda: nn.BatchNorm3d(1), (2, 1, 2, 2, 2), 16),
    "batch norm, synchronized": (lambda: nn.SyncBatchNorm(3), (2, 3, 4), 24),
    "average pool 1d": (lambda: nn.AvgPool1d(2), (2, 3, 8), 12),
    "average pool 2d": (lambda: nn.AvgPool2d(2), (2, 3, 4, 4), 12),
    "average pool 3d": (lambda: nn.AvgPool3d(2), (2, 1, 4, 4, 4), 8),
    "adaptive pool 1d": (lambda: nn.AdaptiveAvgPool1d(3), (2, 2, 7), (2 + 1) * 6),
    "adaptive pool 2d": (lambda: nn.AdaptiveAvgPool2d((2, None)), (2, 2, 4, 3), (2 * 1 + 1) * 12),
    "adaptive pool 3d": (lambda: nn.AdaptiveAvgPool3d(1), (2, 2, 2, 3, 4), (24 + 1) * 2),
    "nearest": (lambda: nn.Upsample(scale_factor=2), (2, 1, 2, 2), 0),
    "linear": (lambda: nn.Upsample(scale_factor=2, mode="linear"), (2, 1, 2), 5 * 4),
    "bilinear": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), (2, 1, 2, 2), 11 * 16),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (2, 1, 2, 2, 2), 31 * 64),
}


@pytest.mark.parametrize("name", RULES)
def test_layers_with_weights(name):
    """Weights only by default, bias in full; parameters with bias in both."""
    build, shape, default, full = RULES[name]
    model = build()
    own = sum(p.numel() for p in model.parameters())
    flops, params, results = count(model, torch.randn(shape))
    assert (flops, params, len(results)) == (default, own, 1)
    assert results[0]["flops"] == default and results[0]["params"] == own and results[0]["calls"] == 1
    assert count(model, torch.randn(shape), mode="full")[:2] == (full, own)
    assert type(flops) is int and type(params) is int


@pytest.mark.parametrize("name", EXTRAS)
def test_layers_of_the_full_mode(name):
    """In the default mode they are not there at all."""
    build, shape, full = EXTRAS[name]
    model = build()
    flops, params, results = count(model, torch.randn(shape), mode="full")
    assert flops == results[0]["flops"] == full and params == sum(p.numel() for p in model.parameters())
    assert count(model, torch.randn(shape)) == (0, 0, [])


ACTIVATIONS = """ReLU ReLU6 LeakyReLU PReLU RReLU ELU SELU CELU GELU SiLU Mish Softplus Sigmoid LogSigmoid Tanh Hardtanh Hardswish Hardsigmoid
    Threshold""".split()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_count_one_for_each_element(name):
    """Whatever their formula."""
    model = nn.Threshold(0.1, 0.0) if name == "Threshold" else getattr(nn, name)()
    assert count(model, (4, 3, 5), mode="full")[0] == 15


def test_modules_without_a_rule_and_functions_are_not_seen():
    """Layer norm, softmax, max pool, dropout and arithmetic in the forward."""
    net = Net(lambda s, x: torch.relu(s.norm(s.drop(x)) + x) @ torch.ones(4, 4), norm=nn.LayerNorm(4), drop=nn.Dropout())
    flops, params, results = count(net, (2, 4), mode="full")
    assert (flops, results) == (0, []) and params == 8


# ---- whole models against PyTorch's counter, which sees the operations themselves

CONV_AND_LINEAR = [
    "resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "densenet121", "efficientnet_b0", "vgg11", "alexnet", "squeezenet1_1", "convnext_tiny",
    "regnet_y_400mf", "shufflenet_v2_x0_5",
]  # fmt: skip
OPTIONS = {"googlenet": dict(aux_logits=False, init_weights=False), "vit_b_16": dict(image_size=64)}
LARGE = {"vgg11", "alexnet", "vit_b_16"}  # made without numbers, which takes no time


@cache
def zoo(name):
    """A torchvision model in evaluation mode, made once."""
    with torch.device("meta" if name in LARGE else "cpu"):
        return getattr(torchvision.models, name)(weights=None, **OPTIONS.get(name, {})).eval()


def image(name, batch=1):
    """Images that `name` takes."""
    return torch.zeros(batch, 3, 64, 64, device="meta" if name in LARGE else "cpu")


def macs_by_op(model, *args, **kwargs):
    """MACs of one forward by operator, as PyTorch counts them."""
    with every_layer_called(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    counts = counter.get_flop_counts().get("Global", {})
    assert sum(counts.values()) == counter.get_total_flops()
    return {op: n // 2 for op, n in counts.items()}


def products_with_weights(macs):
    """Convolutions and linear layers, without the products inside attention."""
    return sum(macs.get(op, 0) for op in (aten.convolution, aten._convolution, aten.addmm, aten.mm))


@pytest.mark.parametrize("name", [*CONV_AND_LINEAR, "googlenet"])
def test_models_of_convolutions_and_linear_layers(name):
    """Exactly PyTorch's total; there is nothing else to count."""
    model, macs = zoo(name), macs_by_op(zoo(name), image(name))
    assert set(macs) <= {aten.convolution, aten._convolution, aten.addmm, aten.mm}
    flops, params, results = count(model, image(name))
    assert flops == sum(macs.values()) == sum(r["flops"] for r in results) > 0
    assert params == sum(r["params"] for r in results) <= sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "swin_v2_t"])
def test_models_with_attention(name):
    """All projections, also those that no module computes; not the products inside attention."""
    macs = macs_by_op(zoo(name), image(name))
    assert sum(macs.values()) > products_with_weights(macs)
    assert count(zoo(name), image(name))[0] == products_with_weights(macs)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16", "swin_t"])
@pytest.mark.parametrize("mode", ["default", "full"])
def test_batch_is_left_out(name, mode):
    """One sample costs the same in a batch of 1 and of 8; the shapes show the batch."""
    one, eight = (count(zoo(name), image(name, n), mode=mode) for n in (1, 8))
    assert one[:2] == eight[:2]
    assert [r["flops"] for r in one[2]] == [r["flops"] for r in eight[2]]
    assert {r["in_size"][0] for r in one[2]} == {1} and {r["out_size"][0] for r in eight[2]} == {8}


def test_known_figures():
    """What NNI reports for ResNet-50."""
    assert count(zoo("resnet50"), (1, 3, 224, 224))[:2] == (4089184256, 25503912)
    assert count(zoo("resnet50"), [1, 3, 64, 64], mode="full")[1] == 25557032


def test_full_resnet18_from_its_parts():
    """Recomputed from the shapes of all modules."""
    default, _, _ = count(zoo("resnet18"), (1, 3, 64, 64))
    full, _, results = count(zoo("resnet18"), (1, 3, 64, 64), mode="full")
    size = lambda kind: sum(r["calls"] * math.prod(r["out_size"]) for r in results if r["type"] == kind)
    assert full - default == 2 * size("BatchNorm2d") + size("ReLU") + (2 * 2 + 1) * 512 + 1000
    assert size("BatchNorm2d") > size("ReLU") > 0


@pytest.mark.parametrize("build", [
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=True),
    lambda: Net(lambda s, x: s.t(x, x), t=nn.Transformer(8, 2, 1, 1, 16, batch_first=True)),
    lambda: Net(lambda s, x: s.a(x, x, x, need_weights=False), a=nn.MultiheadAttention(8, 2, batch_first=True)),
], ids=["encoder", "transformer", "attention"])  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_transformers_in_spite_of_the_fast_path(build, training):
    """Also for models already in evaluation mode, whose layers are otherwise bypassed."""
    model = build().train(training)
    flops, params, _ = count(model, torch.randn(3, 5, 8))
    assert flops == products_with_weights(macs_by_op(build().eval(), torch.randn(1, 5, 8)))
    norms = sum(p.numel() for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
    assert params == sum(p.numel() for p in model.parameters()) - norms
    assert torch.backends.mha.get_fastpath_enabled()


def test_packed_sequence():
    """Only steps that exist are counted: 4 + 2 of 2 samples, so 3 for each."""
    net = Net(lambda s, x: s.rnn(pack_padded_sequence(x, [4, 2], batch_first=True)), rnn=nn.GRU(2, 3, batch_first=True))
    assert count(net, torch.randn(2, 4, 2))[0] == 3 * 45


# ---- Hugging Face

def gpt2():
    """A GPT-2 of two small layers."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2)).eval()


def bert():
    """A BERT of two small layers."""
    return BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)).eval()


@pytest.mark.parametrize("build", [gpt2, bert])
def test_hugging_face(build):
    """Conv1D and linear layers, given by keyword; the tied head counts its weight once."""
    model, ids = build(), torch.arange(12).reshape(2, 6)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    macs = products_with_weights(macs_by_op(model, **inputs))
    flops, params, results = count(model, inputs)
    assert flops == macs // 2 and macs % 2 == 0
    assert count(model, {k: v[:1] for k, v in inputs.items()})[:2] == (flops, params)
    assert count(model, inputs, mode="full")[1] == sum(p.numel() for p in model.parameters())
    assert {r["type"] for r in results} == ({"Conv1D", "Linear"} if build is gpt2 else {"Linear"})


def test_gpt2_by_hand():
    """A layer has 12 width² weights (and 13 width biases with its norms); 6 tokens; the head 50 x 8."""
    flops, params, _ = count(gpt2(), torch.arange(6)[None])
    assert flops == 6 * (2 * 12 * 64 + 50 * 8)
    assert params == 2 * (12 * 64 + 24 + 8 + 32 + 8) + 50 * 8
    full, _, _ = count(gpt2(), torch.arange(6)[None], mode="full")
    assert full - flops == 6 * 2 * (24 + 8 + 32 + 8)


# ---- ways to call, share, wrap, tie and prune

def two_inputs():
    """A model of two inputs, 3 and 4 wide."""
    return Net(lambda s, a, b: s.one(a) + s.two(b), one=nn.Linear(3, 2), two=nn.Linear(4, 2))


def test_tuple_list_and_dict_of_inputs():
    """All ways to give the same inputs."""
    a, b = torch.randn(5, 3), torch.randn(5, 4)
    for x in ((a, b), [a, b], dict(a=a, b=b), dict(b=b, a=a)):
        assert count(two_inputs(), x)[:2] == (6 + 8, 8 + 10)


def test_shape_takes_dtype_of_the_model():
    """A shape is as good as a tensor, as tuple, list or torch.Size, in every floating dtype."""
    net = nn.Linear(3, 2).to(torch.bfloat16)
    for shape in ((4, 3), [4, 3], torch.Size((4, 3))):
        flops, _, results = count(net, shape)
        assert flops == 6 and results[0]["in_size"] == (4, 3)
    assert count(nn.Flatten(), (4, 3)) == (0, 0, [])


def test_module_called_by_keyword():
    """The inputs of a rule come in the order of the signature."""
    net = Net(lambda s, x: s.up(input=s.lin(input=x)[:, None]), lin=nn.Linear(3, 2), up=nn.ConvTranspose1d(1, 5, 2))
    assert count(net, (7, 3))[0] == 6 + 2 * 5 * 2


@pytest.mark.parametrize("wrap", [
    nn.Sequential,
    lambda m: nn.DataParallel(m, device_ids=[]),
    lambda m: Net(lambda s, x: s.inner.net(x), inner=nn.ModuleDict({"net": m})),
    lambda m: nn.Sequential(nn.Sequential(m)),
], ids=["sequential", "data parallel", "held", "nested"])  # fmt: skip
@pytest.mark.parametrize("mode", ["default", "full"])
def test_wrapped_models(wrap, mode):
    """Same counts, longer names."""
    plain, wrapped = (count(m, image("resnet18"), mode=mode) for m in (zoo("resnet18"), wrap(zoo("resnet18"))))
    assert plain[:2] == wrapped[:2]
    assert [r["flops"] for r in plain[2]] == [r["flops"] for r in wrapped[2]]
    assert all(w["name"].endswith(p["name"]) and w["name"] != p["name"] for p, w in zip(plain[2], wrapped[2], strict=True))


def test_shared_module_counts_each_call():
    """Five calls, one row, parameters once; the shapes are those of the last call."""
    layer = nn.Conv1d(1, 1, 3)
    flops, params, (row,) = count(nn.Sequential(*[layer] * 5), (2, 1, 13))
    assert flops == row["flops"] == 3 * (11 + 9 + 7 + 5 + 3)
    assert (params, row["params"], row["calls"], row["name"]) == (4, 4, 5, "0")
    assert (row["in_size"], row["out_size"]) == ((2, 1, 5), (2, 1, 3))


@pytest.mark.parametrize("tie", ["parameter", "storage"])
def test_tied_weights_count_once(tie):
    """Also if two parameters lie over the same numbers; the work is done twice."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tie == "parameter":
        net[1].weight = net[0].weight
    else:
        net[1].weight.data = net[0].weight.data
    flops, params, results = count(net, (1, 3))
    assert (flops, params) == (18, 9 + 3 + 3) and [r["params"] for r in results] == [12, 3]
    assert count(net, (1, 3), mode="full")[1] == 15
    assert n_bytes(net) == 4 * 15


def test_subclasses_and_parametrizations():
    """They count as what they inherit from."""
    conv = type("MyConv", (nn.Conv2d,), {})(2, 3, 3)
    assert count(conv, (1, 2, 3, 3))[:2] == (54, 57)
    normed = parametrizations.weight_norm(nn.Linear(3, 2))
    flops, params, results = count(normed, (1, 3))
    assert (flops, params) == (6, 2 + 6 + 2) and results[0]["weight_shape"] == (2, 3)
    attention = type("MyAttention", (nn.MultiheadAttention,), {})(4, 2, batch_first=True)
    assert count(attention, (torch.zeros(1, 5, 4),) * 3)[0] == 320


def test_projection_that_is_called_counts_once():
    """Attention of one's own may call its `out_proj`; the rule of attention has counted it already."""
    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            return self.out_proj(nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)[..., :4])

    rule = {Attention: lambda module, inputs, output: inputs[0].numel() * 16}
    flops, params, results = count(Attention(4, 2), (1, 5, 4), rule)
    assert (flops, params, len(results)) == (320, 48 + 12 + 16 + 4, 1)


def test_weights_without_an_address():
    """On the meta device, or made of other tensors: they are not taken for one another."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert count(net, (4, 3))[:2] == (18, 24)
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for layer in net:
        layer.weight = nn.Parameter(TwoTensor(torch.zeros(3, 3), torch.ones(3, 3)))
    assert count(net, torch.zeros(4, 3))[:2] == (18, 18)


def test_compiled_and_scripted_models():
    """What was compiled is counted as it was before; what was scripted cannot be."""
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    assert count(torch.compile(net, backend="eager"), (1, 3)) == count(net, (1, 3))
    with pytest.raises(TypeError, match="a scripted model"):
        count(torch.jit.script(net), (1, 3))


def test_halved_channels():
    """Half the channels inside: half the first layer, half of the last; a quarter between two halved ones."""
    def net(width):
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 2, 1))

    cut = net(8)
    for conv, (n_out, n_in) in zip(cut, ((4, 3), (4, 4), (2, 4)), strict=True):
        conv.weight, conv.bias = nn.Parameter(conv.weight[:n_out, :n_in].detach()), nn.Parameter(conv.bias[:n_out].detach())
    full, half = count(net(8), (1, 3, 6, 6))[2], count(cut, (1, 3, 6, 6))
    assert [r["flops"] for r in half[2]] == [full[0]["flops"] // 2, full[1]["flops"] // 4, full[2]["flops"] // 2]
    assert half[:2] == count(net(4), (1, 3, 6, 6))[:2]


def test_layer_that_never_runs_is_warned_of():
    """It may be idle or used by a function; the counter cannot tell."""
    net = Net(lambda s, x: nn.functional.linear(s.one(x), s.two.weight), one=nn.Linear(3, 3), two=nn.Linear(3, 2))
    with pytest.warns(UserWarning, match="never called as modules, so not counted: two;"):
        flops, _, results = count(net, (1, 3))
    assert flops == 9 and [r["name"] for r in results] == ["one"]
    rule = {Net: lambda module, inputs, output: module.two.weight.numel() * len(output)}
    with pytest.warns(UserWarning, match="two"):
        assert count(net, (4, 3), rule)[0] == 9 + 6


# ---- rules of one's own

def test_custom_rules():
    """They win over the built-in ones, hold for subclasses, see the whole batch, and reach classes without a rule."""
    seen = []

    def rule(module, inputs, output):
        seen.append((type(module), inputs[0].shape, output.shape))
        return 100 * len(output)

    net = nn.Sequential(nn.Linear(3, 2), type("MyNorm", (nn.LayerNorm,), {})(2))
    assert count(net, (4, 3), {nn.Linear: rule})[0] == 100
    assert seen == [(nn.Linear, (4, 3), (4, 2))]
    flops, params, results = count(net, (4, 3), {nn.LayerNorm: rule})
    assert (flops, params) == (106, 8 + 4) and [r["type"] for r in results] == ["Linear", "MyNorm"]
    assert [r["flops"] for r in count(net, (4, 3), {nn.Module: rule})[2]] == [100, 100, 100]


def test_custom_rule_that_fails_says_so_itself():
    """Its error is not taken for one of the model."""
    net = nn.Linear(3, 2)
    before = fingerprint(net)
    with pytest.raises(ZeroDivisionError):
        count(net, (1, 3), {nn.Linear: lambda module, inputs, output: 1 // 0})
    assert changes(before, fingerprint(net)) == [] and torch.backends.mha.get_fastpath_enabled()


# ---- results and printing

def test_rows():
    """All that a row says, in the order of the first call, whatever the order of definition."""
    net = Net(lambda s, x: s.a(s.act(s.b(x))), a=nn.Linear(4, 2), act=nn.ReLU(), b=nn.Linear(3, 4, bias=False))
    _, _, results = count(net, (5, 3))
    assert results == [
        dict(name="b", type="Linear", calls=1, in_size=(5, 3), out_size=(5, 4), weight_shape=(4, 3), flops=12, params=12),
        dict(name="a", type="Linear", calls=1, in_size=(5, 4), out_size=(5, 2), weight_shape=(2, 4), flops=8, params=10),
    ]
    assert [r["name"] for r in count(net, (5, 3), mode="full")[2]] == ["b", "act", "a"]


def test_printing(capsys):
    """A table with aligned columns and totals, or nothing."""
    count(nn.Linear(3, 2), (1, 3))
    assert capsys.readouterr().out == ""
    _, _, results = count_flops_params(nn.Linear(300, 20), (1, 300), mode="full")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4 and out[0].split()[:2] == ["name", "type"] and out[1].split()[:2] == ["(model)", "Linear"]
    assert out[0].index("params") + len("params") == len(out[1]) and out[1].split()[-2:] == ["6,020", "6,020"]
    assert out[-1] == "6,020 multiply-accumulates for one sample, 6,020 parameters"
    print_counts([])
    assert "0 multiply-accumulates" in capsys.readouterr().out


# ---- no trace, and errors

def lively():
    """A model with modes, hooks, gradients, buffers and randomness that a careless counter would disturb."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU(), nn.Flatten(), parametrizations.spectral_norm(nn.Linear(64, 2)))
    net(torch.randn(2, 1, 6, 6)).sum().backward()
    net[1].eval()
    net[3].register_forward_hook(lambda module, args, out: None)
    net[0].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("act", [
    lambda m: count(m, (2, 1, 6, 6)),
    lambda m: count(m, torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)), mode="full"),
    lambda m: latency(m, (2, 1, 6, 6), runs=2, warmup=1),
    n_bytes,
    lambda m: pytest.raises(ValueError, count, m, (2, 1, 7, 7)),
    lambda m: pytest.raises(ValueError, latency, m, (2, 1, 7, 7)),
], ids=["default", "full", "latency", "bytes", "count that fails", "latency that fails"])  # fmt: skip
def test_model_comes_back_untouched(act):
    """Bit for bit, with its modes, hooks, gradients and the random numbers."""
    net = lively()
    before = fingerprint(net)
    act(net)
    assert changes(before, fingerprint(net)) == []


@pytest.mark.parametrize("error, words, args, kwargs", [
    (TypeError, "x is a tensor", (nn.Linear(3, 2), None), {}),
    (TypeError, "list without a tensor", (nn.Linear(3, 2), []), {}),
    (TypeError, "dict without a tensor", (nn.Linear(3, 2), {}), {}),
    (ValueError, "sizes of 1 and more", (nn.Linear(3, 2), (1, -3)), {}),
    (ValueError, "torch.float64", (nn.Linear(3, 2), torch.zeros(1, 3).double()), {}),
    (ValueError, "run the model once", (nn.LazyLinear(2), (1, 3)), {}),
    (TypeError, r"custom_ops\[Linear\] is a function", (nn.Linear(3, 2), (1, 3), {nn.Linear: 6}), {}),
])  # fmt: skip
def test_errors(error, words, args, kwargs):
    """Each says what came and what would do, and nothing is printed."""
    with pytest.raises(error, match=words):
        count_flops_params(*args, **kwargs)


# ---- bytes and time

def test_bytes_of_dtypes_and_buffers():
    """Element sizes differ, buffers count too, also those that are not saved."""
    net = nn.Sequential(nn.Linear(3, 2).half(), nn.BatchNorm1d(2))
    net.register_buffer("mask", torch.zeros(5, dtype=torch.bool), persistent=False)
    assert n_bytes(net) == 2 * 8 + 4 * 8 + 8 + 5
    assert n_bytes(nn.Flatten()) == 0
    with pytest.raises(TypeError, match="nn.Module"):
        n_bytes(net.state_dict())


def test_bytes_without_address():
    """Meta tensors are told apart, and a tensor made of two is as large as both."""
    with torch.device("meta"):
        assert n_bytes(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == 2 * 4 * 12
    net = nn.Linear(3, 2, bias=False)
    net.weight = nn.Parameter(TwoTensor(torch.zeros(2, 3), torch.ones(2, 3)))
    assert n_bytes(net) == 2 * 4 * 6


def test_latency_counts_its_calls_in_evaluation_mode():
    """One call to see that it runs, then warm-up and timed ones, without gradients; the median is returned."""
    calls = []

    def forward(self, x):
        calls.append((self.training, torch.is_grad_enabled()))
        return self.lin(x)

    net = Net(forward, lin=nn.Linear(3, 2))
    assert 0 < latency(net, torch.zeros(1, 3), runs=4, warmup=2) < 1
    assert calls == [(False, False)] * (1 + 2 + 4) and net.training


def test_latency_is_a_median(monkeypatch):
    """One slow run among five does not move it."""
    clock = iter([0, 1, 10, 13, 20, 22, 30, 130, 140, 144])
    monkeypatch.setattr("fasterai_sens.core.counters.perf_counter", lambda: next(clock))
    assert latency(nn.Linear(3, 2), (1, 3), runs=5, warmup=0) == 3


@pytest.mark.parametrize("kwargs", [dict(runs=0), dict(runs=-3), dict(runs=True), dict(warmup=1.5)])
def test_latency_errors(kwargs):
    """It needs at least one run."""
    with pytest.raises(ValueError, match="is a whole number"):
        latency(nn.Linear(3, 2), (1, 3), **kwargs)


def test_latency_takes_what_the_counter_takes():
    """And refuses the same."""
    assert latency(two_inputs(), dict(a=torch.zeros(1, 3), b=torch.zeros(1, 4)), runs=1, warmup=0) > 0
    with pytest.raises(TypeError):
        latency(nn.Linear(3, 2), 3)
    with pytest.raises(TypeError, match="nn.Module"):
        latency(len, (1, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    """Shapes become tensors on the model's device, and the clock waits for it."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)).cuda()
    assert count(net, (4, 3, 8, 8)) == count(net.cpu(), (4, 3, 8, 8))
    work = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
    assert latency(work, (4096, 4096), runs=5) > 1e-4


def test_every_rule_is_tested():
    """A new rule needs a case here."""
    assert {k.__name__ for k in activations} == set(ACTIVATIONS)
    tested = {type(m) for build, *_ in (*RULES.values(), *EXTRAS.values()) for m in build().modules()} | set(activations)
    assert [k for k in full_rules if isinstance(k, type) and not any(issubclass(t, k) for t in tested)] == []


def embedded():
    """An embedding, norms, a module that is never called, a parameter of the model's own, a tied head"""
    class Words(nn.Module):
        """Words to words"""
        def __init__(self):
            super().__init__()
            self.emb, self.norm, self.fc, self.head = nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
            self.positions, self.idle, self.attn = nn.Parameter(torch.zeros(3, 4)), nn.Linear(2, 2), nn.MultiheadAttention(4, 2)
            self.head.weight = self.emb.weight

        def forward(self, x):
            h = self.norm(self.emb(x) + self.positions)
            return self.head(self.fc(self.attn(h, h, h)[0]))
    return Words()


def test_left_out_parameters_are_named(capsys):
    """In default mode the returned parameters and those in `left_out` make up the model; the table says so, too."""
    model, x = embedded(), torch.zeros(1, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match="idle"): _, params, results = count_flops_params(model, x)
    assert results.left_out == {"": 12, "norm": 8, "idle": 6}
    assert params + sum(results.left_out.values()) == sum(p.numel() for p in model.parameters())
    assert params == sum(r["params"] for r in results)
    out = capsys.readouterr().out
    assert "not among them: 26 parameters" in out and "(model) 12, norm 8, idle 6" in out and "mode='full' has all" in out


def test_full_mode_leaves_nothing_out(capsys):
    """All parameters, and no such line; nor where every module is counted."""
    model, x = embedded(), torch.zeros(1, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match="idle"): _, params, results = count_flops_params(model, x, mode="full")
    assert results.left_out == {} and params == sum(p.numel() for p in model.parameters())
    assert count_flops_params(nn.Linear(2, 2), (1, 2))[2].left_out == {}
    assert "not among them" not in capsys.readouterr().out
    assert "left_out" in count_flops_params.__doc__
