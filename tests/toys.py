"""What several test files build on: a small network from a function, and the versions of fasterai to compare with."""
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from torch import nn

peers = Path(__file__).parent.parent / ".venv" / "peers"


class Net(nn.Module):
    """Layers by name, and a function that calls them"""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = forward

    def forward(self, *args, **kwargs):
        """Whatever the function says"""
        return self.run(self, *args, **kwargs)


def folder_of(version):
    """Where one version of fasterai was installed; the test fails if it was not."""
    folder = peers / f"fasterai-{version}"
    if not (folder / "fasterai" / "__init__.py").exists():
        pytest.fail(f"fasterai {version} is not in .venv/peers; run `make peers`", pytrace=False)
    return folder


def forget_fasterai():
    """Take every module of `fasterai` out of `sys.modules`."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "fasterai"}


@contextmanager
def peer(version):
    """In the block, the function given imports modules of one version of fasterai; after it, imports find what they found before."""
    folder, path, held = folder_of(version), sys.path.copy(), forget_fasterai()
    sys.path.insert(0, str(folder))
    try:
        yield lambda name: import_module(f"fasterai.{name}")
    finally:
        sys.path[:] = path
        forget_fasterai()
        sys.modules.update(held)
