"""What runtimes make of plans for larger networks: bytes planned, in the file and in memory, milliseconds beside the untouched model in eager PyTorch, outputs.

    OMP_NUM_THREADS=1 python benchmarks/running.py resnet18 mobilenet transformer --rounds 20

The weights are random: bytes and time do not depend on them, and `off` says how far a runtime is from what its plan computes. Batch norm is estimated on noise, since without it the activations of a deep network with
random weights vanish, and integers of them with it.
"""
import argparse
import logging
import warnings

import pandas as pd
import torch
from torch import nn
from torchvision.models import mobilenet_v2, resnet18

from fasterai_sens import Plan, measure_runs, reestimate_norms, uniform
from fasterai_sens.core.layers import find_units
from fasterai_sens.core.protocol import methods
from fasterai_sens.methods.proof import channel_groups
from fasterai_sens.plans.running import runtimes


class Encoder(nn.Module):
    """Six blocks of a transformer of width 384, with a table of 10,000 words: ids `[batch, length]` -> `[batch, length, 384]`"""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10_000, 384)
        self.blocks = nn.ModuleList(nn.ModuleDict(dict(
            n1=nn.LayerNorm(384), n2=nn.LayerNorm(384), q=nn.Linear(384, 384), k=nn.Linear(384, 384), v=nn.Linear(384, 384),
            out=nn.Linear(384, 384), up=nn.Linear(384, 1536), down=nn.Linear(1536, 384))) for _ in range(6))

    def forward(self, ids):
        """One vector for each word"""
        h = self.words(ids)
        for b in self.blocks:
            q, k, v = (b[n](b["n1"](h)).unflatten(-1, (12, -1)).transpose(1, 2) for n in "qkv")
            h = h + b["out"](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            h = h + b["down"](nn.functional.gelu(b["up"](b["n2"](h))))
        return h


def of_pictures(make):
    """A network that sees noise of 224 by 224"""
    model = make().eval()
    reestimate_norms(model, torch.randn(8, 3, 224, 224))
    return model, torch.randn(1, 3, 224, 224)


networks = {
    "resnet18": lambda: of_pictures(resnet18),
    "mobilenet": lambda: of_pictures(mobilenet_v2),
    "transformer": lambda: (Encoder(), torch.randint(10_000, (1, 128))),
}


def plans_for(model, x):
    """A plan of each kind, and a joint one"""
    units = find_units(model)[0]
    names = [u.name for u in units]
    linear = [u.name for u in units if isinstance(u.module, nn.Linear) and u.weight.shape[1] % 64 == 0]
    groups = [g.name for g in channel_groups(model, x, verbose=False) if not g.reason]
    rank = methods["low_rank"]
    thin = [u.name for u in rank.find_units(model, units, x) if not rank(50).refusal(u)]
    return {
        "as it is": Plan(),
        "80 % zeros": Plan(sparsity=uniform(model, 80)),
        "2:4 zeros": Plan(sparsity=dict.fromkeys(linear, 50), settings={"sparsity": {"granularity": "2:4"}}),
        "8 bits": Plan(quantization=dict.fromkeys(names, 8)),
        "4 bits": Plan(quantization=dict.fromkeys(names, 4)),
        "channels": Plan(pruning=dict.fromkeys(groups, 40)),
        "low rank": Plan(low_rank=dict.fromkeys(thin, 50)),
        "jointly": Plan(pruning=dict.fromkeys(groups, 25), sparsity=dict.fromkeys(names[::2], 50), quantization=dict.fromkeys(names, 8)),
    }


def main():
    """One table for each network"""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("networks", nargs="*", default=list(networks), choices=list(networks))
    p.add_argument("--runtimes", nargs="*", default=list(runtimes), choices=list(runtimes))
    p.add_argument("--rounds", type=int, default=20, help="runs of each that are timed")
    p.add_argument("--device", default="cpu", help="such as cuda")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.onnx", "root"): logging.getLogger(name).setLevel(logging.ERROR)
    for name in args.networks:
        torch.manual_seed(0)
        model, x = networks[name]()
        model, x = model.eval().requires_grad_(False).to(args.device), x.to(args.device)
        table = measure_runs(model, plans_for(model, x), x, runtimes=args.runtimes, rounds=args.rounds).to_dataframe()
        sizes = ["planned", "file", "own_file", "memory"]
        table[sizes] = (table[sizes]/1e6).round(2)   # MB
        print(f"\n{name}, {torch.get_num_threads()} threads, sizes in MB")
        with pd.option_context("display.width", 250, "display.max_columns", 20, "display.max_rows", 200, "display.max_colwidth", 70):
            print(table.drop(columns="score").round(dict(saved=1, ms=2, ratio=2, off=4)).to_string(index=False, na_rep=""), flush=True)


if __name__ == "__main__":
    main()
