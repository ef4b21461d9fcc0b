"""What a user writes: `test_types.py` runs it, and a type checker reads it."""
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from fasterai_sens import (
    LayerTargets,
    Plan,
    Pruner,
    SensitivityAnalyzer,
    Sparsifier,
    SparsifyCallback,
    allocate,
    analyze_sensitivity,
    hold,
    large_final,
    quantize_model,
    search_targets,
    uniform,
)

folder = Path(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
images = torch.randn(64, 1, 8, 8)
labels: Tensor = model(images).argmax(1)


def correct(net: nn.Module) -> Tensor:
    """Which images are recognized."""
    with torch.no_grad():
        output: Tensor = net(images)
    return output.argmax(1) == labels


result = analyze_sensitivity(model, images[:1], correct, "quantization", 3, verbose=False)
result.summary(top=3)
worst = result.top(1)[0]
print(worst.name, f"{worst.delta:.3f}", worst.ci, result.metric_name, len(result), result.skipped)
result.plot()

analyzer = SensitivityAnalyzer(model, images[:1], correct, criteria=large_final)
sweep = analyzer.sweep("sparsity", [25, 50, 75], verbose=False)
targets: LayerTargets = sweep.to_layer_targets(model, target_pct=40)
print({name: round(pct) for name, pct in targets.items()}, sweep.names, sweep.levels)
sweep.plot(by="metric")
sweep.to_json(folder / "sweep.json")
bits = analyzer.sweep("quantization", [8, 4], verbose=False).to_bit_plan(model, target_bits=5)

plan = allocate([sweep], "70%", cost="params", model=model, sample=images[:1], verbose=False)
plan.summary()
plan.to_json(folder / "plan.json")
print(plan.costs["params"], plan.damage, plan.levels(), Plan.from_json(folder / "plan.json") == plan)

searched = search_targets(model, images[:1], correct, 40, evaluations=30, verbose=False)
print(searched.plan, searched.measured_metric)
with hold(model, targets, None, total_steps=2) as step:
    for _ in range(2):
        step()
reached: bool = step.report[0]["reached"]
callback = SparsifyCallback(sparsity=searched.plan, granularity="weight")
print(callback.granularity, uniform(model, 50))
with quantize_model(model, bits) as applied:
    print(applied.size_bytes)
sparsifier = Sparsifier(model, "weight")
sparsifier.sparsify_model(targets)
sparsifier.print_sparsity()
Pruner(model, 25, example_inputs=images[:1]).prune_model()
