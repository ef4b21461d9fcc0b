"""The site of `make docs`: every page and every public name has its place, sources and promises exist, and a browser finds no fault."""
import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import fasterai_sens
import fasterai_sens.all as everything

root = Path(__file__).parent.parent
docs = root / "docs"
books = sorted(p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
texts = [root / "README.md", root / "CHANGELOG.md", root / "CONTRIBUTING.md", *sorted(docs.rglob("*.md")), *books]


@cache
def read(path):
    """The text of a file, of a notebook with its own line ends."""
    text = path.read_text(encoding="utf-8")
    return text.replace("\\n", "\n").replace("\\\\", "\\") if path.suffix == ".ipynb" else text


def entries(page):
    """What the lists of contents of a page name, as files without their endings."""
    lists = re.findall(r"```\{toctree\}\n(.*?)```", read(page), re.S)
    lines = [line for text in lists for line in text.splitlines() if line and not line.startswith(":")]
    names = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    return [(root / name[1:] if name.startswith("/") else page.parent / name) for name in names]


def test_every_page_has_its_place():
    """All pages are reached from the first one by lists of contents, and what they list is there."""
    reached, waiting = set(), [docs / "index.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for name in entries(page):
            found = sorted(name.parent.glob(name.name + ".ipynb")) + sorted(name.parent.glob(name.name + ".md"))
            assert found, f"{page.name} lists {name}"
            waiting += [p for p in found if p.suffix == ".md" and p not in reached]
            reached |= set(found)
    assert {p for p in reached if p.suffix == ".md"} == {p for p in texts if p.suffix == ".md"}
    assert set((root / "nbs" / "tutorials").glob("*.ipynb")) | {root / "nbs" / "index.ipynb"} <= reached


def test_every_public_name_is_described_once():
    """The API pages have every public name, and no other; the table of contents of the reference has those that are described by their docstrings."""
    described = [name for page in (docs / "api").glob("*.md") for name in re.findall(r"^\.\. (?:autofunction|autoclass|py:data):: (\w+)$", read(page), re.M)]
    public = {*everything.__all__, "random", "CompressCallback"} - set(fasterai_sens._retired)
    assert sorted(described) == sorted(public)
    kinds = (fasterai_sens.Criterion, fasterai_sens.Schedule)
    values = {name for name in public if isinstance(getattr(fasterai_sens, name), kinds)}
    listed = re.findall(r"^   (\w+)$", read(docs / "api" / "index.md"), re.M)
    assert sorted(listed) == sorted(public - values)


def test_every_source_is_on_the_page_of_the_method():
    """Whatever paper a docstring or a notebook gives the number of, the page lists."""
    number = r"(?i)arxiv(?:\.org/abs/|[: ]+)(\d{4}\.\d{4,5})\b"
    page = set(re.findall(number, read(docs / "method.md")))
    cited = {n: p.name for p in [*books, *docs.glob("*.md")] for n in re.findall(number, read(p))}
    assert len(page) > 20 and not {n: name for n, name in cited.items() if n not in page}


def test_every_promise_names_its_test():
    """Each row of the page of guarantees has a test that is there, and a figure."""
    rows = [line.split(" | ") for line in read(docs / "guarantees.md").splitlines() if line.startswith("| ") and "| promise |" not in line]
    assert len(rows) > 40 and all(len(row) == 3 and len(row[2].strip(" |")) > 3 for row in rows)
    for _, test, _ in rows:
        name, function = re.fullmatch(r"`(tests/test_\w+\.py)::(test_\w+)`", test).groups()
        tree = ast.parse((root / name).read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], test


@pytest.mark.parametrize("path", texts, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_links_outside_are_well_formed(path):
    """Every link to another site is a whole address; nobody is asked whether it answers."""
    for link in re.findall(r"\]\(<?(http[^)\s>]*)", read(path)):
        parts = urlsplit(link)
        assert parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link


def test_the_readme_works_on_a_package_index():
    """There, no link or picture is relative: with an address of the repository they lead into it, without one only their text is left."""
    source = (root / "setup.py").read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "for_index")
    names = {"re": re}
    exec(ast.get_source_segment(source, node), names)
    text = read(root / "README.md")
    parts = re.findall(r"(!?)\[([^\]]*)\]\(([^)]+)\)", text)
    assert len(parts) > 10
    linked = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", names["for_index"](text, "https://example.org/a/b"))
    assert [mark for mark, _ in linked] == [mark for mark, *_ in parts]
    assert all(url.startswith("https://example.org/a/b/raw/main/" if mark else "https://") for mark, url in linked)
    alone = names["for_index"](text, "")
    assert not re.search(r"\]\((?!https://)", alone) and all(words in alone for mark, words, _ in parts if not mark)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, built with every warning as an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-c", "docs", "-d", str(folder / "doctrees"), ".", str(folder / "html")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-5000:]
    return folder / "html"


@pytest.mark.slow
def test_the_site_is_whole(site):
    """A page for every text and notebook, with its pictures; every link between them leads somewhere; nothing is asked of a network."""
    pages = {p.relative_to(site).with_suffix("") for p in site.rglob("*.html")}
    assert {p.relative_to(root).with_suffix("") for p in texts} <= pages
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?:src|<link[^>]*href)=\"https?:[^\"]*", text), path
        for link in re.findall(r"(?:href|src)=\"([^\"#?:]+)[\"#?]", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
    for found in re.findall(r"href=\"([^\"#]*)#([^\"]+)\"", (site / "docs" / "index.html").read_text(encoding="utf-8")):
        page = site / "docs" / found[0] if found[0] else site / "docs" / "index.html"
        assert f'id="{found[1]}"' in page.read_text(encoding="utf-8")
    parameters = (site / "docs" / "api" / "plans.html").read_text(encoding="utf-8")
    assert "<strong>budget</strong>" in parameters and "most that the whole model may cost" in parameters


@pytest.mark.slow
def test_a_browser_finds_no_fault(site):
    """From the disk, with a phone's width and in the dark too: no error, no page wider than the screen, and the search finds names."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium: pytest.skip("there is no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    faults = []
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            phone = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 844}).new_page()
            phone.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
            phone.on("pageerror", lambda e: faults.append(str(e)))
            phone.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else faults.append(r.url))
            phone.on("requestfailed", lambda r: faults.append(r.url))
            grounds = set()
            shown = site if scheme == "light" else site / "docs"
            for path in sorted(shown.rglob("*.html")):
                if path == site / "index.html": continue   # sends on to the first page
                phone.goto(path.as_uri(), wait_until="load")
                wide = phone.evaluate("document.documentElement.scrollWidth")
                if wide > 390: faults.append(f"{path.relative_to(site)} is {wide} wide")
                grounds.add(phone.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert len(grounds) == 1
            phone.goto((site / "docs" / "index.html").as_uri())
            phone.goto((site / "search.html").as_uri() + "?q=search_targets")
            phone.wait_for_selector("#search-results li a", timeout=20_000)
            assert any("search_targets" in text for text in phone.locator("#search-results li").all_inner_texts())
        browser.close()
    assert not faults, faults[:20]
