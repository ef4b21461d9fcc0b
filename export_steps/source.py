"""Parameters of functions and classes, with what the comments beside them say, read from the notebooks"""
import ast
import json
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path


@dataclass(frozen=True)
class Param:
    "A parameter of a function, or what it returns"
    name: str           # with its stars, as in `**options`
    type: str = ""      # source of the annotation
    default: str = ""   # source of the default
    meaning: str = ""   # what the comment says


@dataclass
class Signature:
    "What a function takes and returns"
    params: list = field(default_factory=list)    # of `Param`, without `self` and `cls`
    returns: Param = Param("")
    delegates_to: str = ""                        # the function that takes what is in `**kwargs`


@dataclass
class Class:
    "What a class takes, and its methods, those added with `@patch` too"
    bases: list = field(default_factory=list)     # names
    fields: list = field(default_factory=list)    # of `Param`
    summary: str = ""                             # first sentence of its docstring
    methods: dict = field(default_factory=dict)   # name -> `Signature`


class Source:
    "Python code with its comments"
    def __init__(self,
        text: str,   # of a cell
    ):
        self.tree, self.lines = ast.parse(text), text.split("\n")
        self.beside, self.alone = {}, {}   # line -> comment, behind code and on a line of its own
        for token in tokenize.generate_tokens(StringIO(text).readline):
            if token.type != tokenize.COMMENT: continue
            before = token.line[:token.start[1]].strip()
            comment = token.string.lstrip("#").strip()
            if not before: self.alone[token.start[0]] = comment
            else: self.beside[token.start[0]] = (before, comment)

    def code(self,
        node: ast.AST | None,
    ) -> str:   # as it was written, in one line
        "The code of a node"
        if node is None: return ""
        lines = self.lines[node.lineno - 1:node.end_lineno]
        lines[-1] = lines[-1].encode()[:node.end_col_offset].decode()   # columns are counted in bytes
        lines[0] = lines[0].encode()[node.col_offset:].decode()
        return re.sub(r"\s+", " ", "\n".join(lines))

    def meaning(self,
        node: ast.AST,   # a parameter, or a field
        last: int,       # its last line
    ) -> str:
        "The comment behind a parameter, or else those above it"
        before, comment = self.beside.get(last, ("", ""))
        if comment and not before.endswith(":"): return comment   # behind a colon it says what is returned
        above, line = [], node.lineno - 1
        while line in self.alone:
            above.insert(0, self.alone[line])
            line -= 1
        return " ".join(above)

    def returned(self,
        f: ast.FunctionDef,
    ) -> Param:
        "What a function returns"
        args = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs, f.args.vararg, f.args.kwarg]
        first = max([f.lineno, *(a.end_lineno for a in args if a)])
        for line in range(first, f.body[0].lineno + 1):
            before, comment = self.beside.get(line, ("", ""))
            if before.endswith(":"): return Param("", self.code(f.returns), meaning=comment)
        return Param("", self.code(f.returns))


def decorators(
    node: ast.FunctionDef | ast.ClassDef,
) -> dict:   # name -> call, or None for one without arguments
    "Decorators by the last part of their names"
    out = {}
    for d in node.decorator_list:
        call = d if isinstance(d, ast.Call) else None
        out[ast.unparse(call.func if call else d).split(".")[-1]] = call
    return out


def signature(
    source: Source,
    f: ast.FunctionDef,
    is_method: bool,    # whether the first parameter is the object itself
) -> Signature:
    "Parameters in order, and what is returned"
    a = f.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(plain) - len(a.defaults)) + a.defaults + a.kw_defaults
    rows = [(p.arg, p) for p in plain]
    if a.vararg:
        rows.append((f"*{a.vararg.arg}", a.vararg))
        defaults.insert(len(plain), None)
    rows += [(p.arg, p) for p in a.kwonlyargs]
    if a.kwarg:
        rows.append((f"**{a.kwarg.arg}", a.kwarg))
        defaults.append(None)
    params = []
    for (name, p), default in zip(rows, defaults, strict=True):
        last = (default or p).end_lineno
        params.append(Param(name, source.code(p.annotation), source.code(default), source.meaning(p, last)))
    if is_method and "staticmethod" not in decorators(f): params = params[1:]
    delegates = decorators(f).get("delegates")
    return Signature(params, source.returned(f), ast.unparse(delegates.args[0]) if delegates else "")


def field_default(
    source: Source,
    value: ast.AST | None,   # what stands behind `=`
) -> str:
    "The default of a field: of `field(default_factory=dict)` it is `dict()`"
    if not isinstance(value, ast.Call) or ast.unparse(value.func) != "field": return source.code(value)
    given = {k.arg: k.value for k in value.keywords}
    if "default" in given: return source.code(given["default"])
    made = given.get("default_factory")
    return f"{made.id}()" if isinstance(made, ast.Name) else "made anew"


def read_class(
    source: Source,
    node: ast.ClassDef,
) -> Class:
    "Fields and methods of a class"
    summary = (ast.get_docstring(node) or "").split("\n")[0].split(". ")[0].split(": `")[0]
    out = Class([ast.unparse(b).split(".")[-1] for b in node.bases], summary=summary)
    has_fields = "dataclass" in decorators(node) or "NamedTuple" in out.bases
    for item in node.body:
        if isinstance(item, ast.FunctionDef): out.methods[item.name] = signature(source, item, True)
        elif has_fields and isinstance(item, ast.AnnAssign):
            param = Param(item.target.id, source.code(item.annotation), field_default(source, item.value),
                          source.meaning(item, item.end_lineno))
            out.fields.append(param)
    return out


def patched(
    f: ast.FunctionDef,
) -> str:   # empty for other functions
    "The class that `@patch` adds a function to"
    if "patch" not in decorators(f): return ""
    return ast.unparse(f.args.args[0].annotation).strip("'\"")


class Book:
    "What one notebook exports"
    def __init__(self,
        path: Path,
    ):
        self.path, self.module = path, ""
        self.functions, self.classes = {}, {}   # name -> `Signature`, `Class`
        self.patches = []                       # (name of a class, name of a method, `Signature`)
        self.sources, self.nodes = [], []       # of the exported cells; (source, node) of all that stands at their top
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if found := re.search(r"^#\|\s*default_exp\s+(\S+)", text, re.M): self.module = found[1]
            if cell["cell_type"] != "code" or not re.match(r"#\|\s*export", text): continue
            source = Source(text)
            self.sources.append(source)
            for node in source.tree.body:
                self.nodes.append((source, node))
                self.read(source, node)

    def read(self,
        source: Source,
        node: ast.AST,   # at the top of a cell
    ):
        "Note a function, a class, or a method for another class"
        if isinstance(node, ast.ClassDef): self.classes[node.name] = read_class(source, node)
        if not isinstance(node, ast.FunctionDef): return
        if owner := patched(node): self.patches.append((owner, node.name, signature(source, node, True)))
        else: self.functions[node.name] = signature(source, node, False)


@cache
def book(
    path: Path,
    changed: int,   # when, in nanoseconds: a notebook is read again when it changed
) -> Book:
    "What a notebook exports"
    return Book(path)


def read_books(
    folder: Path,   # of the notebooks
) -> list:          # of `Book`, in the order of their paths
    "What all notebooks export"
    paths = sorted(p for p in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return [book(p, p.stat().st_mtime_ns) for p in paths]


class Index:
    "Functions and classes of the whole package, by name"
    def __init__(self,
        books: list,   # of `Book`
    ):
        self.functions = {n: s for b in books for n, s in b.functions.items()}
        known = [(n, c) for b in books for n, c in b.classes.items()]
        self.classes = {n: Class(c.bases, c.fields, c.summary, dict(c.methods)) for n, c in known}
        for b in books:
            for owner, name, found in b.patches:
                if owner in self.classes: self.classes[owner].methods[name] = found

    def ancestors(self,
        name: str,   # of a class
    ) -> list:       # of `Class`, itself first
        "A class and those that it inherits from, as far as they are of this package"
        found = self.classes.get(name)
        if found is None: return []
        return [found, *(a for base in found.bases for a in self.ancestors(base))]

    def meaning(self,
        p: Param,
        known: str="",   # said elsewhere
    ) -> str:
        "What a parameter means; where no comment says it, its class does"
        kind = p.type.strip("'\"").removesuffix("|None")
        summary = self.classes[kind].summary if kind in self.classes else ""
        return p.meaning or known or (f"a `{kind}`: {summary[:1].lower()}{summary[1:]}" if summary else "")

    def method(self,
        owner: str,   # a class
        name: str,
    ) -> Signature | None:   # None if there is none
        "A method; what its comments leave open is said by the method that it overrides"
        found = [c.methods[name] for c in self.ancestors(owner) if name in c.methods]
        if not found: return None
        known, first = {}, found[0]
        for s in found:
            same = len(s.params) == len(first.params)   # then the order says what is what, whatever the names
            for p, mine in zip(s.params, first.params if same else s.params, strict=True):
                if p.meaning: known.setdefault(mine.name, p.meaning)
        params = [Param(p.name, p.type, p.default, self.meaning(p, known.get(p.name, ""))) for p in first.params]
        returned = next((s.returns for s in found if s.returns.meaning), first.returns)
        returns = Param("", first.returns.type or returned.type, "", first.returns.meaning or returned.meaning)
        return Signature(params, returns, first.delegates_to)

    def delegated(self,
        found: Signature,
    ) -> Signature:
        "The same, with the parameters of the function that it delegates to in place of `**kwargs`"
        params = [Param(p.name, p.type, p.default, self.meaning(p)) for p in found.params]
        if not found.delegates_to: return Signature(params, found.returns)
        own = [p for p in params if not p.name.startswith("**")]
        named = {p.name for p in own}
        rest = [p for p in self.functions[found.delegates_to].params if p.default and p.name not in named]
        return Signature(own + rest, found.returns)

    def constructor(self,
        name: str,   # of a class
    ) -> list:       # of `Param`
        "What a class is called with: the parameters of `__init__`, or its fields"
        for c in self.ancestors(name):
            if "__init__" in c.methods: return self.method(name, "__init__").params
            if c.fields: break
        fields = {}
        for c in reversed(self.ancestors(name)): fields |= {p.name: p for p in c.fields}
        return list(fields.values())
