"""The project's own rules: package and notebooks in step, imports that go down, cells that stay small."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import fasterai_sens

root = Path(__file__).parent.parent
books = sorted(p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
rooms = {   # room -> rooms that it may import from
    "core": (),
    "methods": ("core",),
    "topology": ("core", "methods"),
    "measure": ("core", "methods"),
    "plans": ("core", "methods", "topology", "measure"),
    "train": ("core", "methods", "topology", "measure", "plans"),
    "show": ("core", "methods", "topology", "measure", "plans", "train"),
    "compat": ("core", "methods", "topology", "measure", "plans", "train", "show"),
}
numbered = [p for p in books if p.parent.name in rooms]
modules = [p for p in sorted((root / "fasterai_sens").rglob("*.py")) if p.name not in ("__init__.py", "all.py", "_modidx.py")]


@cache
def cells(path, kind="code"):
    """Sources of the cells of one kind."""
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


@cache
def tree_of(path):
    """The syntax tree of a module."""
    return ast.parse(path.read_text())


def exported(path):
    """Sources of the exported cells."""
    return [s for s in cells(path) if re.match(r"#\|\s*export", s)]


def module_of(path):
    """Name of the module that a notebook exports to."""
    return next(m[1] for s in cells(path) if (m := re.search(r"#\|\s*default_exp\s+(\S+)", s)))


def run(code, **kwargs):
    """Standard output of Python code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, **kwargs).stdout


def test_package_and_notebooks_are_in_step(tmp_path):
    """Exporting and cleaning a copy of the project changes nothing."""
    for name in ("nbs", "fasterai_sens"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    for name in ("state.py", "results.pyi"): (tmp_path / "fasterai_sens" / "core" / name).unlink()
    steps = {**os.environ, "PYTHONPATH": str(root)}
    run("import nbdev.doclinks, nbdev.clean; nbdev.doclinks.nbdev_export(); nbdev.clean.nbdev_clean()", cwd=tmp_path, env=steps)
    for old in [p for name in ("nbs", "fasterai_sens") for p in (root / name).rglob("*") if p.suffix in (".py", ".pyi", ".ipynb") and ".ipynb_checkpoints" not in p.parts]:
        assert (tmp_path / old.relative_to(root)).read_text() == old.read_text(), f"{old.name}: run `make export`"


def test_every_notebook_has_its_room_and_number():
    """A folder in `nbs/` is a folder in the package, and no two notebooks of a room have the same number."""
    assert {p.parent.name for p in books} == {*rooms, "nbs", "tutorials"}
    assert {str(p.relative_to(root / "fasterai_sens"))[:-3].replace("/", ".") for p in modules} == {module_of(p) for p in numbered}
    for p in numbered:
        number, name = re.fullmatch(r"(\d\d)_(\w+)\.ipynb", p.name).groups()
        assert module_of(p) == f"{p.parent.name}.{name}"
        assert [q.name for q in numbered if q.parent == p.parent and q.name.startswith(number)] == [p.name]


def test_imports_go_down():
    """A notebook imports only from lower numbers of its room, and from rooms below."""
    place = {module_of(p): p.name[:2] for p in numbered}
    for p in numbered:
        for room, name in re.findall(r"^\s*from fasterai_sens\.(\w+)\.(\w+) import", "\n".join(exported(p)), re.M):
            if room == p.parent.name: assert place[f"{room}.{name}"] < p.name[:2], f"{p.name} imports {name}"
            else: assert room in rooms[p.parent.name], f"{p.parent.name}/{p.name} imports {room}.{name}"


def test_the_map_is_complete():
    """`nbs/index.ipynb` names every notebook, with the sentence that it opens with, and every room with what it may import."""
    text = "\n".join(cells(root / "nbs" / "index.ipynb", "markdown"))
    for p in books:
        if p.name == "index.ipynb": continue
        job = re.search(r"^> (.*)$", cells(p, "markdown")[0], re.M)[1]
        assert f"| [{p.stem}]({p.parent.name}/{p.name}) | {job} |" in text
    for room, below in rooms.items():
        allowed = "all above" if len(below) > 2 else ", ".join(below) or "nothing"
        assert re.search(rf"^\| \[{room}\].* \| {allowed} \|$", text, re.M), room


@pytest.mark.parametrize("path", books, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_notebook_reads_well(path):
    """A title, one sentence, small exported cells with checks between them, no cell that never runs, a small file."""
    source = path.read_text()
    assert re.match(r"# \S.*\n\n> \S.*\n", cells(path, "markdown")[0] + "\n"), "opens with `# Title` and `> one sentence`"
    for cell in exported(path):
        lines = [s for s in cell.splitlines() if s.strip() and not s.strip().startswith("#")]
        assert len(lines) <= 60, f"{len(lines)} lines in an exported cell:\n{lines[0]}"
        assert "----------" not in cell, "parameters are documented by comments; `make export` writes them into the package"
    assert not re.search(r"skip_exec|#\|\s*eval:\s*false", source)
    assert re.search(r"assert |test_eq|test_close|expect_fail", source), "checks nothing"
    assert "site-packages" not in source, "a warning with a path of this machine is in the outputs"
    assert path.stat().st_size < 300_000


shown_elsewhere = ("def print_demo(",)   # `make demo` runs it; it takes minutes


def defines(source):
    """Whether an exported cell holds functions, classes or more than imports and constants."""
    tree = ast.parse(source)
    plain = ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign
    return not all(isinstance(node, plain) for node in tree.body)


def shows(source):
    """Whether a cell that is not exported computes or defines something a reader sees: not only imports, or nbdev's own."""
    if re.match(r"#\|\s*(default_exp|hide)", source): return False
    code = "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))
    return not all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(code).body)


@pytest.mark.parametrize("path", numbered, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_each_exported_cell_is_shown(path):
    """Behind each exported cell stands one that shows it working; what only imports or names constants needs none."""
    waiting = None   # the exported cell that nothing has shown yet
    for source in cells(path):
        if re.match(r"#\|\s*export", source):
            if not defines(source): continue
            first = next(line for line in source.splitlines() if line.startswith(("def ", "class ")))
            assert waiting is None, f"nothing between {waiting!r} and {first!r} shows the first one working"
            waiting = None if first in shown_elsewhere else first
        elif shows(source): waiting = None
    assert waiting is None, f"nothing shows {waiting!r} working"


def test_showing_is_told_from_importing():
    """What the rule above takes for a definition, and for a cell that shows one."""
    assert not defines("#| export\nimport math\nfrom torch import nn\nmost = 2**20")
    assert defines("#| export\nmost = 2**20\ndef f(): return most")
    assert not shows("import torch\nfrom fastcore.test import test_eq") and not shows("#| hide\nnbdev_export()")
    assert shows("f()") and shows("import torch\ntest_eq(f(), 1)")


@pytest.mark.parametrize("path", modules, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_module_is_documented_and_quiet(path):
    """Every public name has a docstring; only `summary` and `print_*` print; no exception is swallowed."""
    tree = tree_of(path)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
        if isinstance(node, ast.FunctionDef) and node.name != "summary" and not node.name.startswith("print_"):
            calls = [c for c in ast.walk(node) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "print"]
            assert not calls, f"{node.name} prints"
    for handler in (n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)):
        assert handler.type is not None and getattr(handler.type, "id", "") not in ("Exception", "BaseException")


def density(function):
    """Syntax nodes per line of a function's body, its decisions and its lines."""
    statements = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    nodes = [n for s in statements for n in ast.walk(s)]
    n_lines = len({n.lineno for n in nodes if hasattr(n, "lineno")})
    signs = ast.Load, ast.Store, ast.Del, ast.operator, ast.cmpop, ast.unaryop, ast.boolop
    branches = ast.If, ast.IfExp, ast.For, ast.While, ast.comprehension, ast.ExceptHandler, ast.BoolOp
    return sum(not isinstance(n, signs) for n in nodes), sum(isinstance(n, branches) for n in nodes), n_lines


comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def packed(node):
    """What makes a line hard to read aloud, in words; None if nothing does."""
    if not isinstance(node, ast.Assign | ast.IfExp | ast.BinOp | comprehensions): return None
    within = [n for n in ast.walk(node) if n is not node]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda): return "a named lambda"
    if isinstance(node, ast.IfExp) and any(isinstance(n, ast.IfExp) for n in within): return "a condition inside a condition"
    if isinstance(node, comprehensions) and any(isinstance(n, comprehensions) for n in within): return "a comprehension inside a comprehension"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = node.left, node.right
        texts = [n for n in sides if isinstance(n, ast.JoinedStr | ast.List) or isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if texts and any(isinstance(n, ast.Compare | ast.BoolOp) or isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not) for n in sides):
            return "text or a list times a condition"
    return None


@pytest.mark.parametrize("path", modules, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_module_reads_aloud(path):
    """No line over 120 columns, one statement a line, names for the steps, functions that do one thing."""
    text = path.read_text()
    long = [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith(("__all__", "#"))]
    assert not long, f"{len(long)} lines over 120 columns:\n{long[0]}"
    for node in ast.walk(tree_of(path)):
        why = packed(node)
        assert not why, f"line {node.lineno}: {why}"
        if not isinstance(node, ast.FunctionDef): continue
        n_nodes, decisions, n_lines = density(node)
        assert n_lines < 3 or n_nodes / n_lines <= 15, f"{node.name}: {n_nodes / n_lines:.0f} syntax nodes a line"
        assert decisions <= 15, f"{node.name}: {decisions} decisions; two things in one?"


def test_package_is_not_packed():
    """Over the whole package, no more syntax nodes a line than fastai has."""
    counts = [density(n) for p in modules for n in ast.walk(tree_of(p)) if isinstance(n, ast.FunctionDef)]
    assert sum(nodes for nodes, _, _ in counts) / sum(lines for _, _, lines in counts) <= 9.5


def in_words(node):
    """The literals in a node that is one, or a list of them; a pattern as the text that it stands for."""
    if isinstance(node, ast.List | ast.Tuple): return [text for n in node.elts for text in in_words(n)]
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str): return []
    return [re.sub(r"\\(.)", r"\1", node.value).strip()]


def wanted_of_errors(tree):
    """Texts that an error must hold: in `match=` and `expect_fail`, and from 20 characters on behind an error in the row of a table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [k.value for k in node.keywords if k.arg in ("match", "contains", "regex")]
            if name in ("raises", "warns", "expect_fail"): yield from in_words(ast.List([*given, *node.args[1:]]))
        if isinstance(node, ast.Tuple):
            errors = [i for i, n in enumerate(node.elts) if re.search(r"(Error|Warning)$", getattr(n, "id", ""))]
            if errors: yield from (text for text in in_words(ast.List(node.elts[errors[-1] + 1:])) if len(text) >= 20)


def test_what_an_error_reads_is_asked_for_once():
    """No two files ask for the same text of an error, nor one for 20 characters or more of what the other asks for; several times in one file is one place."""
    sources = {p: [p.read_text()] for p in sorted((root / "tests").glob("*.py"))} | {p: cells(p) for p in books}
    found = {str(p.relative_to(root)): {text for s in source for text in wanted_of_errors(ast.parse(s)) if text} for p, source in sources.items()}
    assert sum(map(len, found.values())) > 500
    for one, other in combinations(found, 2):
        twice = {a for a in found[one] for b in found[other] if a == b or len(min(a, b, key=len)) >= 20 and (a in b or b in a)}
        assert not twice, f"{one} and {other} both ask for {twice.pop()!r}: keep it where it teaches or is tested best; elsewhere the kind of error will do"


def test_methods_are_named_only_at_home():
    """Outside the notebooks of the methods, code asks the table of methods and compares with no method's name."""
    from fasterai_sens.core.protocol import methods

    for path in modules:
        if path.parent.name == "methods": continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare):
                named = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and n.value in list(methods)]
                assert not named, f"{path.name}, line {node.lineno} compares with {named[0]!r}"
        for name in ("in_bits", "step_methods", "kinds"):
            assert not re.search(rf"^(def )?{name}\b", path.read_text(), re.M), f"{path.name} has {name} again"


def test_version_lives_in_one_place():
    """`setup.py` reports the version of `__init__.py`, and requirements from settings.ini."""
    out = subprocess.run([sys.executable, "setup.py", "--version"], cwd=root, check=True, capture_output=True, text=True).stdout
    assert out.strip().splitlines()[-1] == fasterai_sens.__version__
    ini = ConfigParser()
    ini.read(root / "settings.ini")
    named = {re.match(r"[\w-]+", line)[0] for line in ini["DEFAULT"]["requirements"].split()}
    assert {"torch", "torchvision", "fastai", "numpy", "matplotlib", "pandas", "torch-pruning"} <= named
    assert "torchao" in ini["DEFAULT"]["torchao_requirements"] and ini["DEFAULT"]["torchao_requirements"] in ini["DEFAULT"]["dev_requirements"]
    assert "version" not in ini["DEFAULT"]


def test_import_is_light():
    """Importing the package does not import the heavy libraries; both ways to import work."""
    heavy, names = run("import sys, fasterai_sens; print([m for m in ('fastai', 'pandas', 'matplotlib', 'scipy', 'torch_pruning', 'fastprogress', 'torchao') if m in sys.modules])\n"
        "from fasterai_sens import analyze_sensitivity, SensitivityAnalyzer, SparsifyCallback, LayerTargets, large_final; print('ok')").splitlines()
    assert heavy == "[]"
    star = run("from fasterai_sens.all import *; import random as r; assert random is r if 'random' in globals() else True\n"
               "print(SparsifyCallback.__name__, SensitivityAnalyzer.__name__, agp, wanda)")
    assert names == "ok" and star.startswith("SparsifyCallback SensitivityAnalyzer")
    with pytest.raises(AttributeError, match="no attribute 'Sparsify'"): fasterai_sens.Sparsify  # noqa: B018
    assert "SparsifyCallback" in dir(fasterai_sens)


def test_retired_names_work_and_say_so():
    """A name of before is the new one, with a warning that names it; `fasterai_sens.all` still has it."""
    from fasterai_sens import all as everything

    for old, new in fasterai_sens._retired.items():
        with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
            assert getattr(fasterai_sens, old) is getattr(fasterai_sens, new)
        assert getattr(everything, old) is getattr(fasterai_sens, new) and old in everything.__all__


def test_contributing_names_every_test_file():
    """The table in CONTRIBUTING.md lists what is in `tests/`, and nothing else."""
    named = set(re.findall(r"`(\w+\.py)`", (root / "CONTRIBUTING.md").read_text().split("| file | proves |")[1].split("\n\n")[0]))
    assert named == {p.name for p in (root / "tests").glob("*.py")}


def test_citation_has_the_version():
    """CITATION.cff names the version of `__init__.py`."""
    assert f"\nversion: {fasterai_sens.__version__}\n" in (root / "CITATION.cff").read_text()
