"""What all tests share."""
import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One thread: sums in one order, and no waiting for a core that something else uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
