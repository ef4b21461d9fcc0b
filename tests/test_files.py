"""A compressed model's file has the bytes that its plan said, comes back bit for bit, and cannot do harm when it is damaged."""
from copy import deepcopy

import pytest
import torch
from torch import nn
from toys import SHORT, lively, unchanged
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from fasterai_sens import (
    Applier,
    BitPlan,
    Plan,
    load_compressed,
    n_bytes,
    save_compressed,
)
from fasterai_sens.core.layers import all_units, place
from fasterai_sens.core.protocol import methods
from fasterai_sens.methods.proof import channel_groups

SLACK = 65_536
GRIDS = dict(per_channel=True, group_size=None, symmetric=True, activations=None, ranges=None)


def conv_net():
    """Batch norm, a depthwise, a grouped and a transposed convolution, and a head"""
    torch.manual_seed(0)
    return lively(nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, groups=4), nn.ReLU(), nn.ConvTranspose2d(64, 48, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 200), nn.ReLU(), nn.Linear(200, 7)))


def transformer():
    """torchvision's vision transformer, narrow, with a head that is not zero"""
    torch.manual_seed(0)
    model = lively(SHORT["vit"]())
    nn.init.normal_(model.heads.head.weight, std=.02)
    return model


def mobilenet():
    """torchvision's MobileNetV2, narrow"""
    torch.manual_seed(0)
    return lively(SHORT["mobilenet_v2"]())


def gpt2():
    """Hugging Face's GPT-2 with a tied head"""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=16, n_embd=32, n_layer=2, n_head=4)).eval()


def bert():
    """Hugging Face's BERT with a tied head"""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)).eval()


ids = {"input_ids": torch.arange(10)[None]}
zoo = {"conv": (conv_net, torch.randn(2, 3, 12, 12)), "mobilenet": (mobilenet, torch.randn(2, 3, 32, 32)), "vit": (transformer, torch.randn(2, 3, 32, 32)),
       "gpt2": (gpt2, ids), "bert": (bert, ids)}


def outputs(model, x):
    """What a model computes, one tensor"""
    with torch.no_grad():
        out = model(**x) if isinstance(x, dict) else model(x)
    return out if torch.is_tensor(out) else out[0]


def plan_of(kind, model, x):
    """A plan of one kind for all layers that take it"""
    names = [u.name for u in all_units(model)[0]]
    if kind == "zeros": return Plan(sparsity=dict.fromkeys(names, 80))
    if kind == "few are left": return Plan(sparsity=dict.fromkeys(names, 98))
    bits = {name: (2, 3, 4, 8)[i % 4] for i, name in enumerate(names)}
    if kind == "bits": return Plan(quantization=bits)
    if kind == "asymmetric": return Plan(quantization=BitPlan(bits, settings={**GRIDS, "symmetric": False}))
    called = [name for name in names if "self_attention" not in name]   # weights inside of an attention have no calls of their own
    if kind == "activations": return Plan(quantization=BitPlan(dict.fromkeys(called, 8), settings={**GRIDS, "activations": "input and output", "ranges": "minmax"}))
    groups = [g.name for g in channel_groups(model, x, verbose=False) if not g.reason]
    if kind == "channels": return Plan(pruning=dict.fromkeys(groups, 40))
    rank = methods["low_rank"]
    thin = [u.name for u in rank.find_units(model, all_units(model)[0], x) if not rank(50).refusal(u)]
    if kind == "rank": return Plan(low_rank=dict.fromkeys(thin, 50))
    sparse, coded = names[::2], names[::3]
    rest = [name for name in thin if name not in sparse + coded]
    return Plan(sparsity=dict.fromkeys(sparse, 60), quantization=dict.fromkeys(coded, 4), pruning=dict.fromkeys(groups[::2], 30), low_rank=dict.fromkeys(rest, 60))


KINDS = ["zeros", "few are left", "bits", "asymmetric", "activations", "channels", "rank", "jointly"]


def same(a, b):
    """Whether two models hold the same bits under the same names, and are tied alike"""
    mine, other = a.state_dict(), b.state_dict()
    tied = [[name for name, p in m.named_parameters(remove_duplicate=False) if place(p) == place(q)] for m in (a, b) for q in m.parameters()]
    return list(mine) == list(other) and all(torch.equal(mine[k], other[k]) for k in mine) and tied[:len(tied)//2] == tied[len(tied)//2:]


@pytest.mark.parametrize("name, kind", [(n, k) for n in zoo for k in KINDS if n in ("conv", "gpt2") or k in {"mobilenet": ("jointly",), "bert": ("jointly", "channels")}.get(n, KINDS)])
def test_round_trip(name, kind, tmp_path):
    """Each method on each network: the bytes that were planned; untouched and with the plan in force the same file; what is loaded computes what was saved"""
    make, x = zoo[name]
    model = make()
    plan = plan_of(kind, model, x)
    path = tmp_path / "a.safetensors"
    with unchanged(model):
        planned = Applier(model, x, settings={n: t.settings for n, t in plan.items() if hasattr(t, "settings")}).costs(plan, ["bytes"])["bytes"]
        n = save_compressed(model, plan, path, sample=x)
    assert n == path.stat().st_size and abs(n - planned) <= .01*planned + SLACK
    right = deepcopy(model)
    done = plan.apply(right, x)
    assert done.file_bytes == pytest.approx(planned, rel=.01) and done.memory_bytes == n_bytes(right)
    loaded = load_compressed(path, make)
    assert same(loaded, right) and torch.equal(outputs(loaded, x), outputs(right, x))
    again = tmp_path / "b.safetensors"
    assert save_compressed(right, plan, again) == n
    del done   # the weights of before are forgotten: grids are found from the rounded ones
    assert save_compressed(right, plan, again) == pytest.approx(n, rel=.001)
    assert same(load_compressed(again, make()), right)
