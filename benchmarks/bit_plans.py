"""Bit plans from measured curves against the same number of bits everywhere, at equal bytes.

    .venv/bin/python benchmarks/bit_plans.py [--seeds 3] [--models resnet18 mobilenet_v2 transformer] [--metric kl|loss]

ResNet-18 and MobileNetV2 are trained on scikit-learn's digits, a small causal transformer on bytes of Python's standard library. A sweep over 8, 6, 5, 4, 3
and 2 bits measures how far the predictions move from the model's own (`kl_from`) when each layer is rounded, on 150 samples of one part of the data; `to_bit_plan`
gets the bytes that a uniform quantization takes; both are measured on another part. The score is accuracy for the images, bits for a byte for the text.
Means over seeds; `worse` counts seeds on which the plan lost to uniform. `--metric loss` makes the curves from the loss instead, to see the difference.
"""
import argparse
import warnings
from time import perf_counter

import pandas as pd
import torch
import torch.nn.functional as F
from tasks import losses, scores, text_task
from torchvision.models import mobilenet_v2, resnet18

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.measure.objectives import kl_from
from fasterai_sens.methods.quantize import quantize_model
from fasterai_sens.show.demo import digits_learner

levels, uniform = (8, 6, 5, 4, 3, 2), (8, 6, 4, 3)


# ---- images


def image_model(arch, epochs, seed):
    """A network trained on the digits, inputs to measure layers on, losses there and on held-out images, the score on held-out images."""
    learn = digits_learner(epochs, seed, arch)
    parts = [t[:150] for t in learn.dls[1].dataset.tensors], learn.dls[2].dataset.tensors
    losses = [lambda m, x=x, y=y: F.cross_entropy(m(x), y, reduction="none") for x, y in parts]
    x, y = parts[1]
    return learn.model.eval(), parts[0][0], losses, lambda m: (m(x).argmax(1) == y).float().mean().item()


# ---- text


def text_model(seed):
    """The same for a transformer; its score is bits for a byte."""
    task = text_task(seed)
    parts = [lambda m, x=x, y=y: losses(m(x), y) for x, y in (task.measure, task.held_out)]
    return task.model, task.measure[0], parts, lambda m: scores(m(task.held_out[0]), task.held_out[1], text=True).mean().item()


models = {
    "resnet18": (lambda seed: image_model(resnet18, 5, seed), "accuracy"),
    "mobilenet_v2": (lambda seed: image_model(mobilenet_v2, 12, seed), "accuracy"),
    "transformer": (text_model, "bits/byte"),
}


@torch.no_grad()
def compare(name, seed, metric):
    """Rows of the table for one model and seed: uniform and plan at the bytes of each uniform."""
    with torch.enable_grad(): model, inputs, (loss, held_out), score = models[name][0](seed)
    start = perf_counter()
    sweep = SensitivityAnalyzer(model, inputs[:1], kl_from(model, inputs) if metric == "kl" else loss, higher_is_better=False, metric_name=metric).sweep("quantization", levels, verbose=False)
    print(f"{name}, seed {seed}: {models[name][1]} {score(model):.3f}, loss {held_out(model).mean().item():.4f}, sweep {perf_counter() - start:.0f} s", flush=True)
    for bits in uniform:
        with quantize_model(model, bits) as applied: row = {"bytes": applied.size_bytes, "uniform": score(model), "uniform loss": held_out(model).mean().item()}
        plan = sweep.to_bit_plan(model, target_bytes=row["bytes"])
        with quantize_model(model, plan): row |= {"plan": score(model), "plan loss": held_out(model).mean().item()}
        yield {"model": name, "bits": bits, "seed": seed, **row}


def table(rows):
    """Means over seeds, and on how many of them the plan was worse."""
    rows = pd.DataFrame(rows)
    sign = rows.model.map(lambda n: 1 if models[n][1] == "accuracy" else -1)
    rows["worse"] = (sign*(rows.plan - rows.uniform) < 0).astype(int)
    rows["worse loss"] = (rows["plan loss"] > rows["uniform loss"]).astype(int)
    means = rows.groupby(["model", "bits"], sort=False).agg({**dict.fromkeys(["bytes", "uniform", "plan", "uniform loss", "plan loss"], "mean"), "worse": "sum", "worse loss": "sum"})
    means["bytes"] = means["bytes"].astype(int)
    return means


def main():
    """Train, sweep, plan, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many trainings of each model")
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    parser.add_argument("--metric", default="kl", choices=["kl", "loss"], help="what the curves are made of")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [r for name in args.models for seed in range(args.seeds) for r in compare(name, seed, args.metric)]
    print(f"\n{args.seeds} seeds, means\n\n{table(rows).to_string(float_format=lambda v: f'{v:.4f}')}")


if __name__ == "__main__":
    main()
