"Package metadata, read from settings.ini; the version is the one in fasterai_sens/__init__.py."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser()
ini.read(here / "settings.ini")
cfg = ini["DEFAULT"]
version = re.search(r'__version__ = "(.+?)"', (here / "fasterai_sens/__init__.py").read_text())[1]

setup(
    name=cfg["lib_name"],
    version=version,
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license=cfg["license"],
    keywords=cfg["keywords"],
    packages=find_packages(include=["fasterai_sens*"]),
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={name: cfg[f"{name}_requirements"].split() for name in ("dev", "torchao")},
    include_package_data=True,
)
