"""Type information ships: a checker finds nothing in what users write, and finds their mistakes."""
import ast
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import fasterai_sens.all as everything

root = Path(__file__).parent.parent
package = root / "fasterai_sens"
stubs = sorted(package.glob("*/*.pyi"))
mistakes = """
import torch
from torch import nn
from fasterai_sens import SensitivityAnalyzer, SparsifyCallback, allocate, no_such_name
from fasterai_sens.all import *

analyzer = SensitivityAnalyzer(nn.Linear(2, 2), torch.zeros(1, 2), len)
analyzer.sweeps("sparsity")
analyzer.sweep("sparsity").plots()
analyzer.analyze("sparsity").to_layer_targets(nn.Linear(2, 2), target_pct=50).weight
sum(allocate([], 1).levels)
SparsifyCallback(granularity="weight")
analyze_sensitivity()
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """File -> line -> what mypy says of it."""
    wrong = tmp_path_factory.mktemp("types") / "mistakes.py"
    wrong.write_text(mistakes.lstrip())
    cache = Path(tempfile.gettempdir()) / f"fasterai_sens_mypy_{os.getuid() if hasattr(os, 'getuid') else 0}"
    command = [sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs", "--follow-imports=silent", f"--cache-dir={cache}",
               str(root / "tests" / "user_script.py"), str(wrong)]
    out = subprocess.run(command, cwd=wrong.parent, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(root)})
    assert out.returncode in (0, 1), out.stdout + out.stderr
    said = {"user_script.py": {}, "mistakes.py": {}}
    for path, line, text in re.findall(r"^(.*?):(\d+): error: (.*)$", out.stdout, re.M):
        said[Path(path).name].setdefault(int(line), []).append(text)
    return said


def test_a_checker_finds_nothing_in_a_users_script(checked):
    """Methods that `@patch` adds, names that are imported late, what they take and return."""
    assert checked["user_script.py"] == {}


def test_a_checker_finds_mistakes(checked):
    """So it does know the types: an unknown name, option, method or attribute, a wrong kind, a missing argument."""
    wanted = {3: "no_such_name", 7: '"sweeps"', 8: '"plots"', 9: '"weight"', 10: "sum", 11: '"sparsity"', 12: "Missing"}
    assert sorted(checked["mistakes.py"]) == sorted(wanted)
    for line, word in wanted.items(): assert any(word in text for text in checked["mistakes.py"][line]), checked["mistakes.py"][line]


def test_the_users_script_runs(tmp_path, monkeypatch, capsys):
    """It is no script for a checker only."""
    script = str(root / "tests" / "user_script.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    plt.switch_backend("agg")
    runpy.run_path(script, run_name="__main__")
    plt.close("all")
    assert "accuracy" in capsys.readouterr().out and (tmp_path / "plan.json").exists()


def members(node):
    """Names in the stub of a class."""
    named = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    named |= {ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)}
    return named | {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}


def classes_in(path):
    """Name -> node of the classes in a stub."""
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)}


@pytest.mark.parametrize("path", stubs, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_stub_has_what_the_module_has(path):
    """Every public name of the module, and every public method of its classes with the same parameters; no others."""
    module = importlib.import_module(f"fasterai_sens.{path.parent.name}.{path.stem}")
    tree = ast.parse(path.read_text())
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    classes, everywhere = classes_in(path), {n: c for p in stubs for n, c in classes_in(p).items()}
    values = {ast.unparse(n.target if isinstance(n, ast.AnnAssign) else n.targets[0]) for n in tree.body if isinstance(n, ast.AnnAssign | ast.Assign)}
    values |= {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {*functions, *values, *(n for n in classes if not n.startswith("_"))} >= set(module.__all__)
    for name, node in functions.items(): assert names_of(node) == list(inspect.signature(getattr(module, name)).parameters)
    for name, node in classes.items():
        cls = getattr(module, name)
        own = {n for n in vars(cls) if not n.startswith("_")}
        known = {m for c in cls.__mro__ if c.__name__ in everywhere for m in members(everywhere[c.__name__])}
        assert own <= known, f"{name} misses {own - known}"
        for item in node.body:
            found = inspect.getattr_static(cls, getattr(item, "name", ""), None)
            found = getattr(cls, item.name) if isinstance(found, classmethod | staticmethod) else found
            if inspect.isfunction(found): assert names_of(item) == list(inspect.signature(found).parameters), f"{name}.{item.name}"


def names_of(node):
    """Names of the parameters of a function in a stub."""
    a = node.args
    named = [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
    return [p.arg for p in named]


def test_the_package_exports_its_names():
    """The stubs of the package have all public names, those that are imported late too."""
    text = (package / "__init__.pyi").read_text()
    retired = set(re.findall(r"^(\w+) = ", text, re.M))
    assert {*everything.__all__, "random", "CompressCallback"} == set(re.findall(r"import (\w+) as \1$", text, re.M)) | retired
    assert set(everything.__all__) == set(re.findall(r"import (\w+) as \1$", (package / "all.pyi").read_text(), re.M))


def test_type_information_ships(tmp_path):
    """What a wheel is made of has `py.typed`, the stubs and the help, and no steps of `nbdev-export`."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build"), "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    assert [p.name for p in (tmp_path / "lib").iterdir()] == ["fasterai_sens"]
    shipped = tmp_path / "lib" / "fasterai_sens"
    assert (shipped / "py.typed").exists()
    assert {p.relative_to(shipped) for p in shipped.rglob("*.pyi")} == {p.relative_to(package) for p in package.rglob("*.pyi")}
    tree = ast.parse((shipped / "plans" / "allocate.py").read_text())
    doc = next(ast.get_docstring(n) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "allocate")
    assert "\nParameters\n----------\nsweeps\n" in doc
