"Package metadata, read from settings.ini; the version is the one in fasterai_sens/__init__.py."
import re
import sys
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser()
ini.read(here / "settings.ini")
cfg = ini["DEFAULT"]
version = re.search(r'__version__ = "(.+?)"', (here / "fasterai_sens/__init__.py").read_text())[1]
# `nbdev-export` finds its steps where the package is installed to be edited; nobody else needs them
packages = ["fasterai_sens*"]
if "editable_wheel" in sys.argv: packages.append("export_steps")



def for_index(
    text,  # of the README
    url,   # of the repository; empty if there is none
):
    "The README with links that work anywhere: into the repository, or, if it has no address, just their text"
    link = r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)"
    if not url: return re.sub(link, lambda found: "" if found[1] else found[2], text)
    return re.sub(link, lambda found: f"{found[1]}[{found[2]}]({url}/{'raw' if found[1] else 'blob'}/main/{found[3]})", text)


setup(
    name=cfg["lib_name"],
    version=version,
    description=cfg["description"],
    long_description=for_index((here / "README.md").read_text(encoding="utf-8"), cfg["repository"]),
    url=cfg["repository"] or None,
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license=cfg["license"],
    keywords=cfg["keywords"],
    packages=find_packages(include=packages),
    package_data={"fasterai_sens": ["py.typed", "*.pyi", "*/*.pyi"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    entry_points={"console_scripts": ["fasterai-sens = fasterai_sens.show.terminal:main"]},
    extras_require={name: cfg[f"{name}_requirements"].split() for name in ("dev", "docs", "torchao", "tutorials")},
)
