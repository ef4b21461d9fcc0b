"""How `make docs` turns pages, notebooks and docstrings into a site that needs no network."""
import inspect
import json
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

root = Path(__file__).parent.parent
sys.path.insert(0, str(root))

import fasterai_sens  # noqa: E402
import fasterai_sens.all as everything  # noqa: E402

# all that has a place on the API pages
public = {*everything.__all__, "random", "CompressCallback"} - set(fasterai_sens._retired)

project = "fasterai_sens"
author = "The fasterai_sens developers"
project_copyright = author
version = release = fasterai_sens.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.autosummary", "myst_nb"]
# The pages are read where they stand, so that a link between two of them is the same here and in the repository.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "nbs/**.ipynb", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "_docs", "tests", "benchmarks", "fasterai_sens", "demo_output", "**/.ipynb_checkpoints", "build", "dist"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
templates_path = ["_templates"]

nb_execution_mode = "off"       # the outputs are those that the notebooks keep
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "deflist"]

autosummary_generate = False
autodoc_typehints = "none"      # the section on parameters has them
autodoc_default_options = {"members": True, "inherited-members": True, "member-order": "bysource"}
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
default_role = "code"

html_theme = "furo"
html_title = f"fasterai_sens {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_start.html"}
html_show_search_summary = False    # a page that was opened from a disk may not fetch others
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#7cc0ff", "color-brand-content": "#7cc0ff"},
}


def is_machinery(cell):
    """Whether a cell says something to nbdev, and nothing to a reader."""
    source = "".join(cell["source"])
    return cell["cell_type"] == "code" and bool(re.match(r"#\|\s*(default_exp|hide)|from nbdev|import nbdev", source))


def as_page(app, docname, source):
    """A notebook without nbdev's own cells and directives; the map gets the notebooks of each room as its children."""
    if app.env.doc2path(docname).suffix != ".ipynb": return
    book = json.loads(source[0])
    book["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    book["cells"] = [cell for cell in book["cells"] if not is_machinery(cell)]
    for cell in book["cells"]:
        if cell["cell_type"] == "code": cell["source"] = re.sub(r"^#\|.*\n?", "", "".join(cell["source"]), flags=re.M)
    if docname == "nbs/index": book["cells"].append({"cell_type": "markdown", "id": "rooms", "metadata": {}, "source": rooms()})
    source[0] = json.dumps(book)


def rooms():
    """Hidden lists of the notebooks, room by room in the order of the map; the tutorials have a list of their own."""
    text = (root / "nbs" / "index.ipynb").read_text(encoding="utf-8")
    names = re.findall(r"^ *\"\| \[(\w+)\]\(#\1\) \|", text, re.M)
    return "\n".join(f"```{{toctree}}\n:hidden:\n:glob:\n:caption: {name}\n\n{name}/*\n```\n" for name in names)


def is_ours(found):
    """Whether a member of a class is from this package, and not from fastai, Python or whoever else it inherits."""
    found = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", found))
    return (getattr(found, "__module__", None) or "").startswith("fasterai_sens")


def skipped(app, what, name, found, skip, options):
    """Members are skipped that are not ours or described elsewhere, and classes that a method refers to."""
    if what == "module": return skip or not found.__module__.startswith("fasterai_sens.compat.") or None
    return skip or (what == "class" and (inspect.isclass(found) or not is_ours(found))) or None


def plain(text):
    """Text as reStructuredText that reads the same: nothing but `code` is marked up."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*|\\]|_(?!\w)|`)", r"\\\1", p) for p in parts)


def linked(text):
    """The same, with `names` that are public as links."""
    def link(found):
        name = found[1].removesuffix("()")
        return f":py:obj:`~fasterai_sens.{name}`" if name in public else f"``{found[1]}``"

    return re.sub(r"(?<![:`])`([^`]+)`", link, text)


COLON = "\ue000"


def unbroken(lines):
    """The lines, with `code` that goes over the end of one on a single line."""
    out = []
    for line in lines:
        is_open = out and out[-1].count("`") % 2 and line.strip()
        if is_open: out[-1] += " " + line.strip()
        else: out.append(line)
    return out


def as_rst(app, what, name, found, options, lines):
    """Docstrings are plain text with sections that `export_steps/help.py` writes."""
    lines[:] = unbroken(lines)
    in_section = False
    for i, line in enumerate(lines):
        if re.fullmatch(r"-{6,}", "".join(lines[i + 1:i + 2])): in_section = True
        is_head = in_section and line and not line.startswith(" ")
        if not is_head: lines[i] = linked(plain(line))
        if what == "property": lines[i] = lines[i].replace(": ", f"{COLON} ")


def with_colons(app, what, name, found, options, lines):
    """What stands before a colon in the docstring of a property would have been taken for its type."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def math(self, node):
    """A formula as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    self.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def setup(app):
    """Hooks of Sphinx."""
    app.connect("source-read", as_page)
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", as_rst, priority=400)       # before the sections are read
    app.connect("autodoc-process-docstring", with_colons, priority=600)
    app.add_html_math_renderer("mathml", (math, None), (math, None))
    return {"parallel_read_safe": True}
