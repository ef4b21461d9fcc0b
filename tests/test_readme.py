"""The code in the README and in the tour runs, and all links lead somewhere."""
import re
from functools import partial
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import NarrowResNet

import fasterai_sens
import fasterai_sens.show.demo as demo
from fasterai_sens import SensitivityAnalyzer, changes, count_flops_params, fingerprint

root = Path(__file__).parent.parent
pages = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(root)) for p in (root / "docs").glob("*.md"))]


@pytest.fixture
def short_demo(monkeypatch):
    """The learner of the demo with one block instead of two in each stage of its ResNet and a quarter of the channels, and a third of the digits, of 16 pixels"""
    learner, digits = demo.digits_learner, demo.digits
    monkeypatch.setattr(demo, "digits", lambda: [TensorDataset(*part[:len(part)//3]) for part in digits(16)])
    monkeypatch.setattr(demo, "digits_learner", lambda epochs=3: learner(epochs=epochs, arch=partial(NarrowResNet, layers=[1, 1, 1, 1])))


@pytest.mark.slow
def test_quick_start_runs(capsys, short_demo, monkeypatch, tmp_path):
    """The blocks run one after the other, as a reader would run them, and do what the text says."""
    matplotlib.use("Agg")
    names = {}
    text = "".join((root / page).read_text() for page in ("README.md", "docs/tour.md"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    first, plain, search, pruning, sizes, bits, loop, budget, files = (compile(block, "README.md", "exec") for block in blocks)
    exec(first, names)
    assert isinstance(names["result"], fasterai_sens.SweepResult), "targets from one level alone cost a quarter of the accuracy"
    exec(plain, names)
    assert "most sensitive (fragile)" in capsys.readouterr().out
    assert names["targets"].mean(names["model"]) == pytest.approx(80, abs=1e-6)
    weights = [p for n, p in names["model"].named_parameters() if n.removesuffix(".weight") in names["targets"]]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    assert zeros == pytest.approx(.8, abs=1e-4)
    assert names["result"].compression_level == 4
    exec(search, names)
    assert names["found"].plan.mean(names["model"]) == pytest.approx(50, abs=1e-3) and "uniform" in capsys.readouterr().out
    params = sum(p.numel() for p in names["model"].parameters())
    exec(pruning, names)
    assert sum(p.numel() for p in names["learn"].model.parameters()) < .7 * params
    assert names["ratios"]["conv1"] == names["ratios"]["layer1.0.conv2"]
    before = fingerprint(names["learn"].model)
    exec(sizes, names)
    assert changes(before, fingerprint(names["learn"].model)) == [] and names["small"].size <= .8*names["small"].dense_size
    assert names["curve"].points[0].size_pct == 100 and re.search("passes|fails|not enough data to tell", capsys.readouterr().out)
    exec(bits, names)
    model, plan = names["model"], names["plan"]
    assert plan.mean(model) <= 4 and names["applied"].size_bytes == plan.size_bytes
    assert all(m.weight[0].unique().numel() <= 2 ** plan[n] for n, m in model.named_modules() if n in plan), "the fit ends with rounded weights"
    exec(loop, names)
    assert names["step"].n_steps == len(names["loader"]) and all(r["reached"] for r in names["step"].report if r["target" if "target" in r else "bits"])
    whole = count_flops_params(model, names["images"][:1], verbose=False)[0]
    exec(budget, names)
    best = names["best"]
    assert best.costs["bytes"] <= .15*best.whole["bytes"] and count_flops_params(model, names["images"][:1], verbose=False)[0] == best.costs["flops"] <= .75*whole
    monkeypatch.chdir(tmp_path)
    exec(files, names)
    again, images = names["again"].eval(), names["images"][:8]
    with torch.no_grad(): assert torch.equal(again(images), model.eval()(images))
    assert Path("small.safetensors").stat().st_size <= 1.01*best.costs["bytes"] + 64_000 and Path("report.html").stat().st_size > 100_000


@pytest.mark.parametrize("page", pages)
def test_links_lead_somewhere(page):
    """Every relative link exists."""
    links = re.findall(r"\]\(([^)#]+)\)", (root / page).read_text())
    folder = (root / page).parent
    assert [x for x in links if not x.startswith("http") and not (folder / x).exists()] == []


def test_table_of_calls_has_one_for_targets_of_every_method():
    """What it says of targets makes a smaller model of them: by name for three methods, and for the fourth as it stands there."""
    rows = [line.split(" | ") for line in (root / "README.md").read_text().splitlines() if line.startswith("| ")]
    calls = {have.strip("| "): re.findall(r"`([^`]+)`", call) for have, _, call in (row for row in rows if len(row) == 3)}
    assert [getattr(fasterai_sens, name).__name__ for name in calls["targets"]] == ["Sparsifier", "Pruner", "quantize_model"]
    call, _ = calls["low-rank targets, a plan"]
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), torch.randn(64, 32)
    n = sum(p.numel() for p in model.parameters())
    analyzer = SensitivityAnalyzer(model, x[:1], (x, model(x).argmax(1)))
    targets = analyzer.sweep("low_rank", [25, 50, 75], verbose=False).to_layer_targets(model, target_pct=40)
    eval(call, dict(vars(fasterai_sens), targets=targets, model=model, x=x))
    assert targets.method == "low_rank" and sum(p.numel() for p in model.parameters()) < .7*n


def test_readme_is_read_in_a_minute():
    """At most 900 words beside the code."""
    text = re.sub(r"```.*?```|<[^>]+>|\|", " ", (root / "README.md").read_text(), flags=re.S)
    assert len(text.split()) <= 900


@pytest.mark.parametrize("path", sorted(p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_links_between_notebooks_lead_somewhere(path):
    """Every relative link in the text of a notebook exists."""
    links = re.findall(r"\]\(([^)#\s]+\.ipynb)\)", path.read_text())
    assert [x for x in links if not x.startswith("http") and not (path.parent / x).exists()] == []
