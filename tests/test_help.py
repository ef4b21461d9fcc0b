"""`help(f)` and `f?` show every parameter with its meaning."""
import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fasterai_sens
import fasterai_sens.all as everything

root = Path(__file__).parent.parent
sys.path.insert(0, str(root))   # the steps of `nbdev-export` are no part of the package
from export_steps.help import with_help  # noqa: E402
from export_steps.source import Index  # noqa: E402

modules = [p for p in sorted((root / "fasterai_sens").rglob("*.py")) if p.name not in ("__init__.py", "all.py", "_modidx.py")]


def module_of(path):
    """The module of a file."""
    return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def sections(doc):
    """Section of a docstring -> its lines, without the line below the title."""
    parts = re.split(r"^(Parameters|Returns|Yields)\n-+\n", doc, flags=re.M)
    return {title: body.rstrip().split("\n") for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def meanings(doc):
    """Name of a parameter -> its meaning."""
    out, name = {}, None
    for line in sections(doc).get("Parameters", []):
        if line.startswith("    "): out[name] = f"{out[name]} {line.strip()}".strip()
        elif line:
            name = line.split(" : ")[0].lstrip("*")
            out[name] = ""
    return out


def methods_of(cls):
    """The public methods of a class that are functions of this package, inherited ones too, by name."""
    for name, method in inspect.getmembers(cls, inspect.isroutine):
        method = getattr(method, "__func__", method)   # of a class method
        is_ours = inspect.isfunction(method) and method.__module__.startswith("fasterai_sens.")   # no property, which is a routine from 3.13
        if is_ours and (not name.startswith("_") or name == "__call__"): yield f"{cls.__name__}.{name}", method


def own_constructor(cls):
    """Whether a class is called with what this package says, not with what a class of another library takes."""
    return cls.__init__.__module__.startswith("fasterai_sens.") if inspect.isfunction(cls.__init__) else False


def unsaid(name, found):
    """`name(parameter)` for every parameter without a meaning in the help."""
    known = meanings(inspect.getdoc(found) or "")
    wanted = [n for n in inspect.signature(found).parameters if n not in ("self", "cls", "_")]
    return [f"{name}({n})" for n in wanted if not known.get(n)]


def all_unsaid(name, found):
    """The same for a function, or for a class with its methods."""
    if inspect.isfunction(found): return unsaid(name, found)
    if not inspect.isclass(found): return []
    out = unsaid(name, found) if own_constructor(found) else []
    return out + [u for key, method in methods_of(found) if method.__doc__ for u in unsaid(key, method)]


def public(name):
    """A public name; `random` and `CompressCallback` are not in `fasterai_sens.all`."""
    return getattr(fasterai_sens, name)


@pytest.mark.parametrize("name", sorted({*everything.__all__, "random", "CompressCallback"}))
def test_help_says_what_every_parameter_means(name):
    """Public functions, classes and their methods, inherited ones too."""
    found = public(name)
    assert not all_unsaid(name, found)
    if inspect.isfunction(found) and inspect.signature(found).return_annotation not in (inspect.Signature.empty, None):
        said = sections(inspect.getdoc(found))
        assert said.get("Returns") or said["Yields"]   # what a context manager gives


@pytest.mark.parametrize("path", modules, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_help_of_modules(path):
    """So do the names that each module exports."""
    module = module_of(path)
    assert not [u for name in module.__all__ for u in all_unsaid(name, getattr(module, name))]


def test_help_costs_nothing_at_import():
    """It stands in the files: what a function says of itself is what its file says, and nothing is imported to make it."""
    tree = ast.parse((root / "fasterai_sens" / "plans" / "allocate.py").read_text())
    in_file = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert in_file["allocate"] == inspect.getdoc(fasterai_sens.allocate) and "Parameters\n" in in_file["allocate"]
    code = "import sys, fasterai_sens; print(*[m for m in sys.modules if m.split('.')[0] in ('fasterai_sens', 'nbdev', 'export_steps')])"
    imported = set(subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout.split())
    rooms = {"fasterai_sens", *(f"fasterai_sens.{p.parent.name}" for p in modules)}
    assert imported <= rooms | {f"fasterai_sens.{p.parent.name}.{p.stem}" for p in modules}


def test_help_reads_comments_of_every_kind():
    """A comment behind a parameter, above it, of two on one line; fields; what a method overrides; a text with quotes."""
    index = Index([])
    code = """
def f(
    a:int, b=2, # both, in percent
    # a long story, told
    # in two lines
    c:str|None=None,
    *rest, # more
    **options, # named
)->list:   # what came of it
    "Says \\"hello\\""
    return []
""".lstrip()
    namespace = {}
    exec(with_help(code, index), namespace)
    said = meanings(inspect.getdoc(namespace["f"]))
    assert said == {"a": "both, in percent", "b": "both, in percent", "c": "a long story, told in two lines", "rest": "more", "options": "named"}
    assert sections(inspect.getdoc(namespace["f"]))["Returns"] == ["list", "    what came of it"]
    assert namespace["f"].__doc__.startswith('Says "hello"\n')
    assert with_help(with_help(code, index), index) == with_help(code, index)
    assert with_help("def g():\n    'Takes nothing'", index) == "def g():\n    'Takes nothing'"
