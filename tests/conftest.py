"""What all tests share."""
import pytest
import torch

from fasterai_sens.core import checks


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One thread: sums in one order, and no waiting for a core that something else uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def warn_again():
    """What warns once for each value warns in every test."""
    checks._warn_fraction.cache_clear()
