"""Coming from fasterai 0.3 and NNI 2.10: their documented examples, word for word but for the import, and the numbers that their rules give."""
import csv
import inspect
import math
import os
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torchvision import models
from toys import NarrowResNet, peer

import fasterai_sens
from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.compat import degradation, fasterai, nni
from fasterai_sens.core.fingerprint import changes, fingerprint

page = Path(__file__).parent.parent / "docs" / "migration.md"
moved = {   # where the old examples import from -> where they do now
    r"from fasterai\.(analyze\.sensitivity|core\.(all|criteria)|sparse\.all|prune\.(all|pruner)) import": "from fasterai_sens.compat.fasterai import",
    r"from nni\.compression\.pytorch\.utils(\.\w+)? import": "from fasterai_sens.compat.nni import"}


def run(example, **known):
    """Carry out an example with its imports changed; the names it leaves behind."""
    for old, new in moved.items(): example = re.sub(old, new, example)
    assert "from nni" not in example and "from fasterai." not in example
    exec(example, known)
    return known


tutorial = '''
import torch
import torch.nn as nn
from fasterai.analyze.sensitivity import SensitivityAnalyzer, analyze_sensitivity
from fasterai.core.all import large_final

# Load a pretrained model
model = resnet18(pretrained=True)
model.eval()

# Create sample input
sample = torch.randn(1, 3, 224, 224)

# Define an evaluation function
# In practice, this would evaluate on your validation set
def eval_fn(m):
    """Simple proxy: measure output magnitude (replace with real accuracy)"""
    with torch.no_grad():
        out = m(sample)
        return out.abs().mean().item()

result = analyze_sensitivity(
    model, 
    sample, 
    eval_fn,
    compression="sparsity",  # "sparsity", "pruning", or "quantization"
    level=50,                 # 50% sparsity
)
# Print a formatted summary
result.summary()
# Get the top 3 most sensitive layers
fragile = result.top(3, most_sensitive=True)
for layer in fragile:
    print(f"{layer.name}: Δ={layer.delta:.4f}")
# Get the top 3 most robust layers (safe to compress heavily)
robust = result.top(3, most_sensitive=False)
for layer in robust:
    print(f"{layer.name}: Δ={layer.delta:.4f}")
result.plot(figsize=(14, 5))
targets = result.to_layer_targets(
    model,
    target_pct=50,   # Target 50% average compression
    min_pct=10,      # No layer below 10%
    max_pct=80,      # No layer above 80%
    gamma=1.5,       # Higher = more differentiation between layers
)

# Show a few entries
for name, sparsity in list(targets.items())[:5]:
    print(f"{name}: {sparsity}%")
from fasterai.sparse.all import Sparsifier

# 1. Run sensitivity analysis
result = analyze_sensitivity(model, sample, eval_fn, compression="sparsity", level=50)

# 2. Generate per-layer targets (layer_name -> sparsity %)
targets = result.to_layer_targets(model, target_pct=50, min_pct=10, max_pct=80)

# 3. Create a fresh model and Sparsifier
model = resnet18(pretrained=True)
sparsifier = Sparsifier(model, granularity='weight', context='local', criteria=large_final)

# 4. Apply non-uniform sparsity using the targets
for name, module in model.named_modules():
    if name in targets:
        sparsifier.sparsify_layer(module, targets[name])
        
# 5. Check the results
sparsifier.print_sparsity()
from fasterai.prune.all import Pruner

# Use sensitivity to identify layers to EXCLUDE from pruning
fragile_layers = [layer.name for layer in result.top(3, most_sensitive=True)]
print(f"Fragile layers to protect: {fragile_layers}")

# Get the actual module references for ignored_layers
model = resnet18(pretrained=True)
ignored = []
for name, module in model.named_modules():
    if name in fragile_layers:
        ignored.append(module)

# Create Pruner with uniform ratio, but protect fragile layers
pruner = Pruner(
    model,
    example_inputs=sample,
    pruning_ratio=30,           # Uniform 30% pruning
    ignored_layers=ignored,     # Protect sensitive layers!
    context='global',
    criteria=large_final,
)

pruner.prune_model()
pruner.print_sparsity()
analyzer = SensitivityAnalyzer(
    model,
    sample,
    eval_fn,
    criteria=large_final,       # Importance scoring method
    higher_is_better=True,      # Higher metric = better
    metric_name="accuracy",     # For display
)

# Analyze sparsity sensitivity
sparsity_result = analyzer.analyze(
    compression="sparsity",
    level=50,
    granularity="weight",  # or "filter", "kernel", etc.
)
pruning_result = analyzer.analyze(
    compression="pruning",
    level=30,                # 30% of filters removed
)
quant_result = analyzer.analyze(
    compression="quantization",
    level=8,                     # 8-bit quantization
    quant_per_channel=True,      # Per-channel quantization
    quant_activations=False,     # Weights only
)
results = analyzer.sweep(
    compression="sparsity",
    levels=[25, 50, 75],
)
df = result.to_dataframe()
df.head()
'''


def test_the_tutorial_of_fasterai_runs(capsys):
    """All cells of its sensitivity tutorial in their order, on a network whose layers have the same names; only the imports differ."""
    import matplotlib.pyplot as plt

    class Quick(NarrowResNet):
        def forward(self, x): return super().forward(x[..., ::4, ::4])

    torch.manual_seed(0)
    made = partial(Quick, layers=[1, 1, 1, 1])
    with pytest.warns(UserWarning, match="fc could not be compressed"): found = run(tutorial, resnet18=lambda pretrained: made())
    plt.close("all")
    printed = capsys.readouterr().out
    names = [name for name, m in made().named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [row.name for row in found["result"].layers] == names and list(found["targets"]) == names
    assert "Sensitivity Analysis: sparsity @ 50%" in printed and "Fragile layers to protect: [" in printed
    assert [r.compression_level for r in found["results"]] == [25, 50, 75] and isinstance(found["results"], list)
    assert found["quant_result"].compression_type == "quantization-8bit" and found["pruning_result"].compression_level == 30
    assert list(found["df"]) == ["name", "layer_type", "params", "baseline_metric", "compressed_metric", "delta"]
    assert all(10 <= pct <= 80 for pct in found["targets"].values())


sparsifier_and_pruner = """
from fasterai.sparse.all import Sparsifier
from fasterai.prune.pruner import Pruner
from fasterai.core.criteria import large_final, random

model = resnet18()
sparsifier = Sparsifier(model, 'filter', 'local', large_final)
sparsifier.sparsify_layer(model.conv1, 70)
sparsifier.print_sparsity()
filters = (model.conv1.weight == 0).flatten(1).all(1).sum().item()

model = resnet18(weights=None)
params_orig = sum(p.numel() for p in model.parameters())

# Iterative pruning: 5 steps to reach 50% pruning
pruner = Pruner(
    model, 
    pruning_ratio=50,
    context='local', 
    criteria=large_final,
    iterative_steps=5  # Spread pruning over 5 steps
)

print('Iterative pruning (5 steps to reach 50%):')
for i in range(5):
    pruner.prune_model()
    params = sum(p.numel() for p in model.parameters())
    print(f'  Step {i+1}: {params:,} params ({100*(1-params/params_orig):.1f}% reduction)')

conv1, model = model.conv1, resnet18(weights=None)

# Conservative on early layers, aggressive on later layers
per_layer_ratios = {
    'layer1.0.conv1': 20,  'layer1.0.conv2': 20,  # 20% pruning
    'layer2.0.conv1': 40,  'layer2.0.conv2': 40,  # 40% pruning  
    'layer3.0.conv1': 60,  'layer3.0.conv2': 60,  # 60% pruning
    'layer4.0.conv1': 80,  'layer4.0.conv2': 80,  # 80% pruning
}

pruner = Pruner(model, per_layer_ratios, 'local', large_final)
pruner.prune_model()
"""


def test_the_tutorials_of_sparsifier_and_pruner_run(capsys):
    """Of fasterai 0.3.2; but for the import, only what the page renames is another."""
    made = partial(NarrowResNet, layers=[1, 1, 1, 1])
    assert "`iterative_steps=` is `steps=`" in page.read_text()
    renamed = re.sub(r"\biterative_steps=", "steps=", sparsifier_and_pruner)
    found = run(renamed, resnet18=lambda weights=None: made())
    assert found["filters"] == 11 and found["conv1"].out_channels == 8   # 70 % of 16, and half of them in five steps
    assert [found["model"].get_submodule(f"layer{i}.0.conv1").out_channels for i in (1, 2, 3, 4)] == [13, 20, 26, 26]
    callbacks = {}
    exec("""
from fasterai_sens.all import *
sp_cb = SparsifyCallback(sparsity=50, granularity='weight', context='local', criteria=large_final, schedule=one_cycle)
per_layer = SparsifyCallback(
    sparsity={'0.4.0.conv1': 30}, 
    granularity='weight', 
    context='local',  # Required for per-layer sparsity
    criteria=large_final, 
    schedule=cos
)
pr_cb = PruneCallback(pruning_ratio=40, context='global', criteria=large_final, schedule=one_cycle)
""", callbacks)
    assert "the same names in `fasterai_sens.all`" in page.read_text() and callbacks["sp_cb"].schedule is callbacks["one_cycle"]
    printed = capsys.readouterr().out
    assert len(re.findall(r"Step \d: [\d,]+ params", printed)) == 5


def small():
    """The network of fasterai's own test."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


def magnitude(x):
    """The `eval_fn` of fasterai's own test."""
    return lambda m: torch.no_grad()(m.eval())(x).abs().mean().item()


def test_same_answers_as_fasterai(capsys):
    """Names, keys, printed summary, targets and the metrics of quantization are those of fasterai 0.3.2; a percent drops the weight that it kept."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with peer("0.3.2") as load:
        theirs = load("analyze.sensitivity")
        kinds = load("core.granularity").Granularities
        axes = {kind: {name: kinds.get_dim(m, name) for name in fasterai.Granularities.allowed_granularities(m) if name in kinds.allowed_granularities(m)}
                for kind, m in dict(conv=nn.Conv2d(3, 8, 3), turned=nn.ConvTranspose2d(3, 8, 3), linear=nn.Linear(3, 8)).items()}
        old, new = (kind(small(), x, magnitude(x)) for kind in (theirs.SensitivityAnalyzer, fasterai.SensitivityAnalyzer))
        assert old.VALID_COMPRESSIONS == new.VALID_COMPRESSIONS and set(old.COMPRESSIBLE_LAYERS) == set(new.COMPRESSIBLE_LAYERS)
        for options in (dict(compression="quantization", level=4), dict(compression="quantization", level=1, quant_per_channel=False),
                        dict(compression="quantization", level=6, quant_activations=True), dict(compression="sparsity", level=50, layers=["8", "none", "0"])):
            a = old.analyze(**options, verbose=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")   # of the layer that does not exist
                b = new.analyze(**options, verbose=False)
            known = ["name", "layer_type", "params", "baseline_metric"]
            assert a.compression_type == b.compression_type and [[getattr(r, k) for k in known] for r in a.layers] == [[getattr(r, k) for k in known] for r in b.layers]
            near = 1e-6
            if options["compression"] == "sparsity" or "quant_activations" in options: near = 2e-3   # one weight more; ranges of one batch
            assert [r.compressed_metric for r in b.layers] == pytest.approx([r.compressed_metric for r in a.layers], abs=near)
        rows = [(f"layer{i}", "Linear", 50 * i + 7, 0.9, 0.9 - d, d) for i, d in enumerate((0.2, -0.05, 0.0, 0.4, 0.11))]
        made = [module.SensitivityResult("sparsity", 50, 0.9, [module.LayerSensitivity(*row) for row in rows]) for module in (theirs, fasterai)]
        printed = []
        for result in made:
            capsys.readouterr()
            result.summary(top=3)
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1] and made[0].as_dict() == made[1].as_dict()
        for bounds in ((50, 0, 90, 1), (30, 5, 50, 1), (50, 10, 80, 1.5), (0, 0, 90, 2), (60, 60, 60, 1)):
            a, b = (result.to_layer_targets(None, *bounds) for result in made)
            assert b == pytest.approx(a, abs=0.011) and b == made[1].to_schedule(None, *bounds)
    tested = dict(conv=nn.Conv2d(3, 8, 3), turned=nn.ConvTranspose2d(3, 8, 3), linear=nn.Linear(3, 8))
    for kind in ("conv", "linear"):
        for name, theirs_ in axes[kind].items(): assert fasterai.Granularities.get_dim(tested[kind], name) == theirs_, name


def test_lenient_names_orders_and_untouched_models():
    """Unknown layers are passed over with a warning, levels come back as they were given, even twice; nothing is left behind."""
    x, model = torch.randn(2, 3, 8, 8), small()
    before, analyzer = fingerprint(model), fasterai.SensitivityAnalyzer(model, x, magnitude(x))
    with pytest.warns(UserWarning, match="passed over: nowhere"): results = analyzer.sweep(levels=[75, 25, 75], layers=["8", "nowhere"], verbose=False)
    assert [r.compression_level for r in results] == [75, 25, 75] and [len(r.layers) for r in results] == [1, 1, 1]
    with pytest.warns(UserWarning): empty = analyzer.analyze(layers=["nowhere"], verbose=False)
    assert (empty.layers, empty.baseline_metric, empty.to_layer_targets()) == ([], magnitude(x)(model), {})
    assert [r.compression_level for r in analyzer.sweep(verbose=False)] == [25, 50, 75]
    with pytest.warns(UserWarning, match="8 could not be compressed"): stuck = analyzer.analyze("pruning", 50, verbose=False)
    assert stuck.layers[-1].delta == 0 and list(stuck.to_layer_targets(None)) == ["0", "3"] and stuck.measured.skipped
    with pytest.warns(UserWarning, match="0 could not be compressed"): few = analyzer.analyze("sparsity", 5, granularity="filter", layers=["0", "3"], verbose=False)
    assert [r.name for r in few.layers] == ["0", "3"] and few.layers[0].delta == 0 and list(few.to_layer_targets()) == ["3"]
    broken = fasterai.SensitivityResult("sparsity", 50, 0.9, [fasterai.LayerSensitivity(str(d), "Linear", 9, 0.9, 0.9 - d, d) for d in (0.1, math.nan, 0.2)])
    assert broken.top(1)[0].name == "nan" and broken.to_layer_targets()["nan"] == min(broken.to_layer_targets().values())
    assert not changes(before, fingerprint(model))


class Net(nn.Module):
    """Two convolutions with NNI's kind of names, and a classifier."""

    def __init__(self):
        super().__init__()
        self.Conv1, self.Conv2, self.fc = nn.Conv2d(1, 10, 3), nn.Conv2d(10, 8, 3), nn.Linear(128, 4)

    def forward(self, x): return self.fc(self.Conv2(self.Conv1(x).relu()).relu().flatten(1))


sensitivity_guide = '''
from nni.compression.pytorch.utils.sensitivity_analysis import SensitivityAnalysis

def val(model):
    model.eval()
    total = 0
    correct = 0
    with torch.no_grad():
        for batchid, (data, label) in enumerate(val_loader):
            data, label = data.cuda(), label.cuda()
            out = model(data)
            _, predicted = out.max(1)
            total += data.size(0)
            correct += predicted.eq(label).sum().item()
    return correct / total

s_analyzer = SensitivityAnalysis(model=net, val_func=val)
sensitivity = s_analyzer.analysis(val_args=[net])
os.makedir(outdir)
s_analyzer.export(os.path.join(outdir, filename))
first = sensitivity

s_analyzer = SensitivityAnalysis(model=net, val_func=val, sparsities=[0.25, 0.5, 0.75])
s_analyzer = SensitivityAnalysis(model=net, val_func=val, sparsities=[0.25, 0.5, 0.75], early_stop_mode='dropped', early_stop_value=0.1)
sensitivity = s_analyzer.analysis(val_args=[net], specified_layers=['Conv1'])
'''


@pytest.fixture
def loader():
    """Images, and the classes that an untouched `Net` gives them."""
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(64, 1, 8, 8)
    return net, [(part, net(part).argmax(1)) for part in x.split(32)]


def test_the_guide_of_nni_runs(tmp_path, monkeypatch, loader):
    """Its analysis as written, `.cuda()` and the misspelled `os.makedir` stood in for; the file to the letter."""
    net, val_loader = loader
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    monkeypatch.setattr(os, "makedir", os.makedirs, raising=False)
    before = fingerprint(net)
    found = run(sensitivity_guide, net=net, val_loader=val_loader, torch=torch, os=os, outdir=tmp_path / "out", filename="net.csv")
    assert not changes(before, fingerprint(net))
    lines = (tmp_path / "out" / "net.csv").read_bytes().split(b"\r\n")
    assert lines[0] == b"layername,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9" and lines[-1] == b"" and len(lines) == 4
    written = {row[0]: [float(v) for v in row[1:]] for row in csv.reader((tmp_path / "out" / "net.csv").open())}
    assert {name: list(curve.values()) for name, curve in found["first"].items()} == {name: written[name] for name in ("Conv1", "Conv2")}
    curve = found["sensitivity"]["Conv1"]
    assert list(found["sensitivity"]) == ["Conv1"] and all(v >= 0.9 for v in list(curve.values())[:-1])


def by_nni(weight, sparsity, kind):
    """The mask of NNI's one-shot pruners, by their rule: the whole part of the sparsity, everything above the highest score that goes."""
    flat = weight.flatten(1)
    scores = dict(l1=lambda: flat.abs().sum(1), l2=lambda: flat.norm(dim=1), level=lambda: weight.abs().flatten(),
                  fpgm=lambda: torch.stack([(flat - row).norm(dim=1).sum() for row in flat]))[kind]()
    k = int(len(scores) * sparsity)
    if not k: return torch.ones_like(weight)
    keep = scores > scores.topk(k, largest=False)[0].max()
    return keep.view_as(weight).float() if kind == "level" else keep.float().view(-1, 1, 1, 1).expand_as(weight)


@pytest.mark.parametrize("kind", ["l1", "l2", "level", "fpgm"])
def test_masks_are_those_of_nni(loader, kind):
    """What the function under test sees is the weight that NNI's rule leaves, with the bias of filters gone; also of layers pruned before."""
    net, _ = loader
    seen = []
    analysis = nni.SensitivityAnalysis(net, lambda: seen.append((net.Conv1.weight.clone(), net.Conv1.bias.clone())) or float(len(seen)), [0.58, 0.05, 0.9], kind)
    analysis.update_already_pruned("Conv1", 0.2)
    analysis.analysis(specified_layers=["Conv1"])
    for (weight, bias), s in zip(seen[1:], [0.05, 0.58, 0.9], strict=True):
        mask = by_nni(net.Conv1.weight.detach(), 0.8 * s + 0.2, kind)
        assert torch.equal(weight, net.Conv1.weight * mask), s
        assert torch.equal(bias == 0, mask.flatten(1).sum(1) == 0) if kind != "level" else bool((bias != 0).all())
    assert analysis.sensitivities == {"Conv1": {0.05: 2.0, 0.58: 3.0, 0.9: 4.0}} and analysis.layers_count == 2
    other = Net().state_dict()
    analysis.load_state_dict(other)
    assert torch.equal(net.Conv2.weight, other["Conv2.weight"])


# what NNI's own tests expect of the sets of more than one layer; mobilenet without depthwise convolutions, which NNI does not tie to the layer before
expected = dict(
    resnet18=[{"layer1.0.conv2", "layer1.1.conv2", "conv1"}, {"layer2.1.conv2", "layer2.0.conv2", "layer2.0.downsample.0"},
              {"layer3.0.downsample.0", "layer3.1.conv2", "layer3.0.conv2"}, {"layer4.0.downsample.0", "layer4.1.conv2", "layer4.0.conv2"}],
    mobilenet_v2=[{"features.3.conv.2", "features.2.conv.2"}, {"features.6.conv.2", "features.4.conv.2", "features.5.conv.2"},
                  {"features.8.conv.2", "features.7.conv.2", "features.10.conv.2", "features.9.conv.2"},
                  {"features.11.conv.2", "features.13.conv.2", "features.12.conv.2"}, {"features.14.conv.2", "features.16.conv.2", "features.15.conv.2"}])
topology_guide = '''
from nni.compression.pytorch.utils.shape_dependency import ChannelDependency
from nni.compression.pytorch.utils.mask_conflict import fix_mask_conflict
from nni.compression.pytorch.utils import not_safe_to_prune

data = torch.ones(1, 3, 224, 224).cuda()
channel_depen = ChannelDependency(net, data)
channel_depen.export('dependency.csv')
fixed_mask = fix_mask_conflict('./resnet18_mask', net, data)
not_safe = not_safe_to_prune(model, dummy_input)
'''


@pytest.mark.parametrize("name", expected)
def test_dependencies_are_those_of_nni(name, tmp_path, monkeypatch):
    """The guide as written; the sets are those of NNI's own test, and the masks it fixes agree within each."""
    net = dict(resnet18=NarrowResNet, mobilenet_v2=partial(models.mobilenet_v2, width_mult=0.35))[name]().eval()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t[..., :32, :32])   # as much shows the same, in a fiftieth of the time
    torch.manual_seed(0)
    convs = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    masks = {}
    for n, m in convs.items():
        gone = torch.randperm(len(m.weight))[:len(m.weight) // 3]
        masks[n] = {"weight": torch.ones_like(m.weight).index_fill_(0, gone, 0)}
    torch.save(masks, "resnet18_mask")
    found = run(topology_guide, net=net, model=net, dummy_input=torch.ones(1, 3, 32, 32), torch=torch)
    depthwise = {n for n, m in convs.items() if m.groups == m.out_channels}
    sets = [names - depthwise for names in found["channel_depen"].dependency_sets]
    assert sorted(map(sorted, (s for s in sets if len(s) > 1))) == sorted(map(sorted, expected[name]))
    assert Path("dependency.csv").read_bytes().startswith(b"Dependency Set,Layers\r\nSet 1,")
    for names in expected[name]:
        kept = [(found["fixed_mask"][n]["weight"].flatten(1).sum(1) > 0).tolist() for n in names]
        assert all(k == kept[0] for k in kept)
    assert found["not_safe"] == (["fc"] if name == "resnet18" else ["classifier.1"])
    groups = nni.GroupDependency(net, torch.ones(1, 3, 32, 32))
    groups.export("groups.csv")
    assert set(groups.dependency.values()) == {1} and Path("groups.csv").read_text().startswith("Conv Layer Name,Group\n")


def test_inputs_and_groups():
    """Layers that read one tensor stand together, whether from the model's input, a sum or a concatenation; divisors reach the layers before."""

    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(2, 4, 1)
            self.d, self.e, self.norm = nn.Conv2d(12, 12, 1, groups=6), nn.Conv2d(12, 12, 1), nn.GroupNorm(4, 12)

        def forward(self, x):
            joint = torch.cat([self.a(x), self.b(x)], 1)
            return self.norm(self.d(joint) + self.e(joint)), self.c(x[:, :2])

    net, x = Forked().eval(), torch.ones(1, 3, 4, 4)
    assert nni.InputChannelDependency(net, x).dependency_sets == [{"a", "b"}, {"c"}, {"d", "e"}]
    groups = nni.GroupDependency(net, x)
    assert groups.dependency == dict(a=6, b=6, c=1, d=12, e=4, norm=4) and groups.min_groups["d"] == 1


counter_guide = '''
from nni.compression.pytorch.utils import count_flops_params

# Given input size (1, 1, 28, 28)
flops, params, results = count_flops_params(model, (1, 1, 28, 28)) 

# Given input tensor with size (1, 1, 28, 28) and switch to full mode
x = torch.randn(1, 1, 28, 28)

flops, params, results = count_flops_params(model, (x,), mode='full') # tuple of tensor as input

# Format output size to M (i.e., 10^6)
print(f'FLOPs: {flops/1e6:.3f}M,  Params: {params/1e6:.3f}M')
print(results)
'''


def test_the_counter_of_nni(capsys):
    """The guide as written; masks count with the filters that are left, as those of torch's own pruning."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10))
    found = run(counter_guide, model=model, torch=torch)
    by_hand = 8 * 26 * 26 * (9 + 1) + 8 * 26 * 26 + (8 * 26 * 26 + 1) * 10   # with biases and the relu, which NNI left out
    assert found["flops"] == by_hand and found["params"] == sum(p.numel() for p in model.parameters())
    assert "FLOPs total: 102752" in capsys.readouterr().out.replace(",", "")
    prune.ln_structured(model[0], "weight", amount=6, n=1, dim=0)
    flops, _, results = nni.count_flops_params(model, (2, 1, 28, 28), verbose=False)
    assert [row["flops"] for row in results] == [2 * 26 * 26 * 9, 8 * 26 * 26 * 10] and flops == sum(row["flops"] for row in results)
    assert results[0]["input_size"] == (2, 1, 28, 28) and results[0]["module_type"] == "Conv2d"


def test_published_degradation_functions():
    """Sizes twice and in any order, a sign that is right, pairs that can be passed on, and a list of batches in place of a loader."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)).eval()
    x = torch.randn(200, 6)
    loader = [(part, net(part).argmax(1)) for part in x.split(50)]
    whole = degradation.size_mb(net)
    rows = degradation.analyze_degradation(net, [whole / 4, 2 * whole, whole / 2, whole / 4], loader, verbose=False)
    assert [row["target_size"] for row in rows] == [whole / 4, 2 * whole, whole / 2, whole / 4] and rows[0] == rows[3]
    assert list(rows[0]) == ["target_size", "accuracy", "accuracy_drop", "compression_ratio", "efficiency"]
    assert (rows[1]["accuracy_drop"], rows[1]["efficiency"], rows[1]["compression_ratio"]) == (0, None, 1) and rows[0]["compression_ratio"] >= 4
    assert rows[0]["efficiency"] == pytest.approx(rows[0]["accuracy_drop"] / (1 - 1 / rows[0]["compression_ratio"]))
    smaller = degradation.analyze_degradation(net, [whole / 2], loader, cost="bytes", compression="quantization", verbose=False)
    assert smaller[0]["compression_ratio"] >= 2
    pairs = degradation.identify_critical_layers(net, loader, level=80)
    assert sorted(name for name, _ in pairs) == ["0", "2", "4"] and pairs[0][1] == max(drop for _, drop in pairs)
    with_care = degradation.compress_with_layer_sensitivity(net, pairs, 2)
    assert (with_care[int(pairs[0][0])].weight != 0).float().mean() > (with_care[int(pairs[-1][0])].weight != 0).float().mean()
    for bad in (0.5, "2", True, math.inf):
        with pytest.raises(ValueError, match="how many times smaller"): degradation.compress_to_size(net, bad)
    assert not degradation.validate_compression_target(degradation.compress_to_size(net, 10), net, loader, 0.01)


def test_old_names_are_imported_by_who_asks():
    """`import fasterai_sens` has none of it, and the names of today are not those of before."""
    package = Path(fasterai_sens.__file__).parent   # rooms below may not import it, says `test_imports_go_down`
    assert not any("compat" in (package / name).read_text() for name in ("__init__.py", "all.py"))
    assert fasterai_sens.SensitivityAnalyzer is SensitivityAnalyzer is not fasterai.SensitivityAnalyzer
    assert repr(fasterai.SensitivityResult("sparsity", 50, 0.9, [])).startswith("SensitivityResult(compression_type='sparsity'")


def test_the_migration_page_names_everything():
    """Every public name of the old front ends stands on the page, and every name of this library on it exists."""
    text = page.read_text()
    for module in (fasterai, nni, degradation):
        assert len(module.__all__) > 5
        for name in module.__all__:
            all_names = [n for n in module.__all__ if getattr(module, n) is getattr(module, name)]   # a class may have two
            assert any(n in text for n in all_names), f"{module.__name__}.{name} is not on {page.name}"
    for name in re.findall(r"`fasterai_sens\.(\w+)`", text): assert hasattr(fasterai_sens, name) or name == "compat", name
    for name in re.findall(r"`fasterai_sens\.compat\.(\w+)`", text): assert inspect.ismodule(dict(fasterai=fasterai, nni=nni, degradation=degradation)[name])
