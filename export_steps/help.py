"""Docstrings that say of every parameter what the comment beside it says, so that `help(f)` and `f?` show it"""
import ast
import re
from textwrap import wrap

from nbdev.config import get_config
from nbdev.process import Processor

from .source import Index, Param, Signature, Source, decorators, patched, read_books, signature

WIDTH = 100     # of the text, without what it is indented by
SECTION = re.compile(r"\n\s*\n *(Parameters|Returns|Yields)\n *-{6,}\n.*", re.DOTALL)


def entry(
    head: str,       # name, type and default
    meaning: str,
) -> list:           # of lines
    "One parameter"
    return [head, *wrap(meaning, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)]


def param_lines(
    p: Param,
) -> list:
    "A parameter with type, default and meaning"
    parts = [p.type] if p.type else []
    if p.default: parts.append(f"default {p.default}")
    head = f"{p.name} : {', '.join(parts)}" if parts else p.name
    return entry(head, p.meaning)


def sections(
    found: Signature,
    yields: bool=False,   # whether it is a context manager, and `found.returns` is what `as` gets
) -> list:                # of lines
    "The sections about parameters and what is returned, as numpy writes them"
    r, out = found.returns, []
    if not found.params and not r.meaning: return []
    if found.params: out += ["", "Parameters", "----------", *(s for p in found.params for s in param_lines(p))]
    title = "Yields" if yields else "Returns"
    if r.meaning or r.type not in ("", "None"):
        lines = entry(r.type, r.meaning) if r.type else wrap(r.meaning, WIDTH)
        out += ["", title, "-"*len(title), *lines]
    return out


def docstring(
    text: str,       # as it is now
    lines: list,     # to follow it
    column: int,     # where it stands
) -> str:            # Python code
    "A docstring with sections below it"
    indent = "\n" + " "*column
    text = SECTION.sub("", text).rstrip() + "".join(indent + s if s else "\n" for s in lines) + indent
    return '"""' + text.replace("\\", "\\\\").replace('"""', '\\"""') + '"""'


def documented(
    node: ast.FunctionDef | ast.ClassDef,
) -> bool:
    "Whether a docstring stands first"
    return ast.get_docstring(node, clean=False) is not None


def public(
    name: str,
) -> bool:
    "Whether users may call it"
    return not name.startswith("_") or name == "__call__"


def found_in(
    source: Source,   # of a cell
    index: Index,
) -> list:            # of (node, lines)
    "What is said of the functions, classes and methods in a cell"
    out = []
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and public(node.name):
            owner = patched(node)
            if owner.startswith("_"): continue
            if owner in index.classes: out.append((node, index.method(owner, node.name)))
            else: out.append((node, index.delegated(signature(source, node, bool(owner)))))
        elif isinstance(node, ast.ClassDef) and public(node.name):
            out.append((node, Signature(index.constructor(node.name))))
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and public(m.name)]
            out += [(m, index.method(node.name, m.name)) for m in methods]
    return [(n, sections(s, "contextmanager" in decorators(n))) for n, s in out if documented(n)]


def with_help(
    text: str,      # of an exported cell
    index: Index,
) -> str:
    "The cell with docstrings that name every parameter"
    lines = text.split("\n")
    for node, said in sorted(found_in(Source(text), index), key=lambda row: -row[0].lineno):
        if not said: continue
        old = node.body[0]
        start = lines[old.lineno - 1].encode()[:old.col_offset].decode()
        end = lines[old.end_lineno - 1].encode()[old.end_col_offset:].decode()
        new = docstring(old.value.value, said, node.body[0].col_offset)
        lines[old.lineno - 1:old.end_lineno] = (start + new + end).split("\n")
    return "\n".join(lines)


class HelpFromComments(Processor):
    "A step of `nbdev-export`: the package has the help in its docstrings, the notebooks keep the comments"
    def begin(self):
        "Know the whole package: a method may be documented by the one that it overrides"
        self.index = Index(read_books(get_config().nbs_path.absolute()))

    def cell(self,
        cell,   # of the notebook that is exported
    ):
        "Change an exported cell in place"
        exported = {"export", "exporti", "exports"} & set(cell.directives_)
        if cell.cell_type == "code" and exported: cell.set_source(with_help(cell.source, self.index))
