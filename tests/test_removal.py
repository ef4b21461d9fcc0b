"""A method is one notebook: without that of low rank, the package exports, imports, measures and plans, and no other file has to change."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).parent.parent
gone = ("nbs/methods/12_lowrank.ipynb", "fasterai_sens/methods/lowrank.py", "fasterai_sens/methods/lowrank.pyi", "tests/test_lowrank.py", "benchmarks/lowrank.py")

MAIN_PATH = """
import sys
import fasterai_sens
assert not {"fastai", "pandas", "matplotlib", "scipy", "torch_pruning", "torchao"} & set(sys.modules), "importing is light"

import torch
from torch import nn
from fasterai_sens import Plan, SensitivityAnalyzer, allocate, compress_to_size
from fasterai_sens.core.protocol import methods
import fasterai_sens.all

assert list(methods) == ["sparsity", "pruning", "quantization"], list(methods)
assert "LowRank" not in dir(fasterai_sens) and "LowRank" not in fasterai_sens.all.__all__
torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(9, 8)
analyzer = SensitivityAnalyzer(net, x[:1], lambda m: m(x)[:, 0])
try: analyzer.analyze("low_rank", verbose=False)
except ValueError as e: assert "unknown compression 'low_rank'" in str(e)
else: raise AssertionError
sweeps = [analyzer.sweep(m, verbose=False) for m in methods]
assert len(analyzer.analyze(verbose=False).layers) == 3
for cost in ("bytes", "flops"):
    plan = allocate(sweeps, "40%", cost, model=net, sample=x[:1])
    assert plan.costs[cost] <= .4*plan.whole[cost]
assert compress_to_size(net, x[:1], 40, "sparsity").size <= .4*plan.whole.get("bytes", 1e9)
plan.apply(net, x[:1])
print(net(x).shape)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project without the notebook, exported anew"""
    folder = tmp_path_factory.mktemp("without")
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in listed:
        if name in gone or not (root / name).exists(): continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    index = folder / "nbs" / "index.ipynb"   # the map names every notebook that there is
    index.write_text(re.sub(r',\n *"\| \[12_lowrank\][^\n]*"', "", index.read_text().replace('|\\n",\n    "| [12_lowrank]', '|",\n    "| [12_lowrank]')))
    run(folder, "-c", "import nbdev.doclinks, nbdev.clean; nbdev.doclinks.nbdev_export(); nbdev.clean.nbdev_clean()")
    return folder


def run(folder, *command):
    """Python in the copy, in a process of its own"""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(folder)})
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_everything_else_works_without_it(project):
    """Import, one analysis, sweeps, a plan of the other three, a size"""
    assert not list(project.rglob("*lowrank*"))
    assert run(project, "-c", MAIN_PATH).strip() == "torch.Size([9, 4])"


@pytest.mark.slow
def test_the_rules_hold_without_it(project):
    """Exporting changed nothing but the lists of names, the map is complete, imports go down; nothing else names the module"""
    copied = [p.relative_to(project) for p in project.rglob("*") if p.suffix in (".py", ".pyi", ".ipynb") and (root / p.relative_to(project)).exists()]
    changed = {str(p) for p in copied if (project / p).read_text() != (root / p).read_text()}
    assert changed == {"fasterai_sens/_modidx.py", "fasterai_sens/__init__.pyi", "fasterai_sens/all.pyi", "nbs/index.ipynb"} and len(copied) > 150
    rules = "go_down or room_and_number or map_is_complete"
    assert " passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_structure.py", "-k", rules)
    named = [p for p in project.rglob("*.py*") if p.name != "test_removal.py" and re.search(r"lowrank|LowRank", p.read_text(errors="ignore"))]
    assert named == []
