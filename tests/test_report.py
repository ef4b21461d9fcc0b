"""The page: it says what was measured, needs nothing else, and nothing in a name is markup; in a browser it can be sorted, folded and filtered."""
import json
import math
import re
import shutil
import time
from html.parser import HTMLParser

import pytest

from fasterai_sens import LayerSensitivity, LayerTargets, Plan, SensitivityResult, SweepResult, report
from fasterai_sens.show.page import plotly_program

evil = [
    '<img src=x onerror="window.ran=1">', "</script><script>window.ran=1</script>", "a\"b'c\u2028d & e", "]]><!--<script>",
    '%{y} <a href="javascript:window.ran=1">x</a>', "{{ 7*7 }} &lt;b&gt;",
]
chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def sweep_of(n, levels=(50, 70, 90)):
    """A sweep over `n` layers in blocks of eight, and those whose names are markup; one layer broke the metric."""
    names = [f"encoder.layer.{i // 8}.part{i % 8}" for i in range(n - len(evil))] + evil
    results = []
    for k, level in enumerate(levels):
        rows = []
        for i, name in enumerate(names):
            delta = math.nan if i == 3 and k == 2 else (i * 37 % 101) * (k + 1) / 1000 - .01
            rows.append(LayerSensitivity(name, evil[0] if name in evil else "Linear", 10 + i, .9, .9 - delta, delta, stderr=.01, ci=(delta - .02, delta + .02)))
        settings = {"criteria": evil[1]}
        results.append(SensitivityResult("sparsity", level, .9, rows, evil[2], skipped=[(evil[1], evil[0])], settings=settings))
    return SweepResult(results)


class Page(HTMLParser):
    """What a parser sees: tags with their attributes, the cells of all rows, and the text outside of scripts"""

    def __init__(self, path):
        super().__init__()
        self.tags, self.rows, self.texts, self.inside = [], [], [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        self.tags.append((tag, dict(attrs)))
        if tag == "tr": self.rows.append([])
        if tag in ("td", "th") and "data-value" in dict(attrs): self.rows[-1].append(dict(attrs)["data-value"])

    def handle_data(self, data):
        if self.inside not in ("script", "style"): self.texts.append(data.strip())


def test_numbers_are_those_of_the_result_and_names_are_text(tmp_path):
    """Each damage stands in the page to the last digit; no name, setting or reason has made a tag; nothing is fetched."""
    sweep = sweep_of(30)
    path = report(sweep, tmp_path / "a.html", title=evil[0])
    page = Page(path)
    rows = {row[0]: row for row in page.rows if len(row) > 5}
    for name in sweep.names:
        shown = [float(value) for value in rows[name][-3:]]
        for value, result in zip(shown, sweep, strict=True):
            delta = next(row.delta for row in result.layers if row.name == name)
            assert value == delta or math.isnan(value) and math.isnan(delta)
    tags = [tag for tag, _ in page.tags]
    assert not {"img", "a", "b", "iframe", "link", "object"} & set(tags) and tags.count("script") == 2 + tags.count("figure")
    for _, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name in ("src", "href", "srcset", "action")], attrs
    for name in evil: assert any(name.strip() in text for text in page.texts), name
    assert path.read_text(encoding="utf-8").count(plotly_program()) == 1


def test_charts_are_what_plotly_knows(tmp_path):
    """Plotly's own check of every trace and layout; the only markup in their texts is the line break."""
    graph = pytest.importorskip("plotly.graph_objects")
    text = report([sweep_of(12), sweep_of(12)[0], LayerTargets({evil[0]: 50}, method="sparsity")], tmp_path / "a.html").read_text(encoding="utf-8")
    specs = [json.loads(s) for s in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(specs) == 2 + 1 + 1
    for spec in specs:
        graph.Figure(data=spec["traces"], layout=spec["layout"])   # raises for what it does not know
        assert set(re.findall(r"<[^>]*>", json.dumps(spec))) <= {"<br>"}


def test_what_screen_readers_say(tmp_path):
    """A language, captions, scopes, an order to sort by, labels of controls and charts."""
    page = Page(report([sweep_of(12)], tmp_path / "a.html"))
    by_tag = {}
    for tag, attrs in page.tags: by_tag.setdefault(tag, []).append(attrs)
    assert by_tag["html"][0]["lang"] == "en" and len(by_tag["caption"]) == len(by_tag["table"]) == 2
    assert {attrs["scope"] for attrs in by_tag["th"]} == {"col", "row", "rowgroup"}
    assert all(attrs["aria-sort"] == "none" for attrs in by_tag["th"] if attrs["scope"] == "col")
    labelled = {attrs["for"] for attrs in by_tag["label"]}
    assert labelled == {attrs["id"] for attrs in by_tag["input"]}
    assert all(attrs.get("aria-label") for attrs in by_tag["div"] if attrs.get("role") in ("img", "region"))
    sections = {attrs["aria-labelledby"] for attrs in by_tag["section"]}
    assert sections <= {attrs.get("id") for attrs in by_tag["h2"]}


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window."""
    if chromium is None: pytest.skip("no Chromium on PATH")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser, path, **options):
    """The page with all charts drawn, what its console said, and what it asked for."""
    page = browser.new_page(**dict(viewport=dict(width=1200, height=900)) | options)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=120_000)
    return page, said, asked


def visible(page):
    """Names of the rows that are seen, from top to bottom."""
    return page.eval_on_selector_all("table >> nth=0 >> tbody tr:not(.fold) th", "cells => cells.filter(c => c.offsetParent).map(c => c.dataset.value)")


def test_in_a_browser(browser, tmp_path):
    """500 layers: quiet, inert, without a network; blocks fold, clicks sort, words filter, and paper shows everything in light."""
    start, sweep = time.perf_counter(), sweep_of(500)
    path = report(sweep, tmp_path / "a.html")
    written = time.perf_counter()
    page, said, asked = opened(browser, path, color_scheme="dark")
    print(f"500 layers: written in {written - start:.2f} s, {path.stat().st_size / 1e6:.1f} MB, drawn in {time.perf_counter() - written:.2f} s")
    assert not said and asked == [path.as_uri()] and page.evaluate("window.ran") is None
    assert page.locator(".plot svg.main-svg").count() >= 2

    assert len(visible(page)) == 0   # blocks are folded
    page.get_by_role("button", name="encoder.layer.0 (8)").first.click()
    assert visible(page) == [f"encoder.layer.0.part{i}" for i in range(8)]
    page.get_by_role("button", name="By block").click()
    head = page.locator("table >> nth=0 >> thead th", has_text="90 %")
    damages = {row.name: row.delta for row in sweep[-1].layers}
    rising = sorted(sweep.names, key=lambda name: math.inf if math.isnan(damages[name]) else damages[name])
    for way, wanted in (("descending", rising[::-1]), ("ascending", rising)):
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == way
        shown = visible(page)
        assert set(shown) == set(wanted) and len(shown) == 500
        assert [damages[name] for name in shown[1:-1]] == [damages[name] for name in wanted[1:-1]]
    assert shown[-1] == "encoder.layer.0.part3"   # not a number: the worst
    box = page.get_by_label("Filter").first
    for words, wanted in (("layer.7. part1", ["encoder.layer.7.part1"]), ("onerror", evil), ("no such layer", [])):
        box.fill(words)
        assert sorted(visible(page)) == sorted(wanted)
        assert page.locator("[role=status]").first.inner_text() == f"{len(wanted)} of 500 rows"
    box.fill("")
    page.locator("div.plot >> nth=1").hover()
    page.get_by_role("button", name="By block").click()
    for event, n in ((None, 8), ("beforeprint", 500), ("afterprint", 8)):
        if event: page.evaluate("event => dispatchEvent(new Event(event))", event)
        assert len(visible(page)) == n, event
    assert not said and page.evaluate("window.ran") is None
    page.close()


def test_on_a_phone(browser, tmp_path):
    """The page does not move sideways; a table that does says so, and its names stay; hints can be read in the dark."""
    path = report(sweep_of(30), tmp_path / "a.html")
    page, said, _ = opened(browser, path, color_scheme="dark", viewport=dict(width=390, height=800))
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.wait_for_selector(".scroll.wide")
    assert "more to the right" in page.evaluate("getComputedStyle(document.querySelector('.wide caption'), '::after').content")
    page.get_by_role("button", name="By block").click()
    seen = page.evaluate("""() => {
        const region = document.querySelector('.scroll'), name = region.querySelector('tbody:not([hidden]) th');
        region.scrollLeft = 1000;
        return [region.scrollLeft, name.getBoundingClientRect().left - region.getBoundingClientRect().left];
    }""")
    assert seen[0] > 100 and abs(seen[1]) <= 2
    hint = page.evaluate("getComputedStyle(document.querySelector('input'), '::placeholder').color")
    soft = page.evaluate("getComputedStyle(document.querySelector('figcaption')).color")
    assert hint == soft and not said
    page.close()


@pytest.mark.parametrize("width", [390, 1200])
def test_every_bar_has_its_name(browser, tmp_path, width):
    """Of a plan for an encoder: names stay on the page, those of the last layers too."""
    names = [f"bert.encoder.layer.{i}.{part}" for i in (0, 1) for part in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")]
    path = report(Plan(pruning=dict.fromkeys(names, 25)), tmp_path / "a.html")
    page, said, _ = opened(browser, path, viewport=dict(width=width, height=800))
    drawn = page.eval_on_selector_all(".xtick text", "texts => texts.filter(t => t.style.display != 'none' && getComputedStyle(t).opacity != 0).map(t => t.textContent)")
    assert [name.removeprefix("…")[-12:] for name in drawn] == [name[-12:] for name in names]
    assert not said
    page.close()
