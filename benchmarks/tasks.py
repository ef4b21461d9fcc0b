"""What the benchmarks train: small networks, their data in parts, and one way to train them."""
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torchvision.models import MobileNetV2, resnet18

from fasterai_sens.show.demo import digits, digits_learner


@dataclass
class Task:
    """A trained model, and pairs of inputs and targets: to train on, to measure on, and those that nothing but the last score sees"""

    model: nn.Module
    train: tuple
    measure: tuple
    held_out: tuple
    spare: torch.Tensor | None = None  # inputs to estimate batch-norm statistics with, if there is batch norm
    text: bool = False                 # scored in bits a byte (lower is better), else in accuracy

    def loss(self, out, y):
        """What a search goes by, sample by sample."""
        return losses(out, y)

    def score(self, out, y):
        """What it is judged by, sample by sample."""
        return scores(out, y, self.text)


def losses(out, y):
    """Cross-entropy of each sample from a model's outputs; of a text, the mean over its bytes."""
    return F.cross_entropy(out.movedim(-1, 1), y, reduction="none").view(len(y), -1).mean(1)


def scores(out, y, text):
    """Accuracy, or bits a byte of a text, sample by sample."""
    return losses(out, y)/0.6931471805599453 if text else (out.argmax(1) == y).float()


def fit(model, x, y, steps, lr, batch=32, after_step=lambda: None):
    """Train for so many batches drawn at random, with one cycle up to `lr`."""
    model.train()
    opt = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, lr, steps)
    for _ in range(steps):
        i = torch.randint(len(x), (batch,))
        opt.zero_grad()
        losses(model(x[i]), y[i]).mean().backward()
        opt.step()
        schedule.step()
        after_step()
    return model.eval()


# ---- images


def mobilenet(num_classes):
    """A MobileNetV2 of half the width, with 8 of its 17 blocks: 26 layers."""
    return MobileNetV2(num_classes, .5, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2], [6, 64, 2, 2], [6, 160, 1, 1]], round_nearest=4)


def image_task(arch, epochs, seed):
    """A network trained on scikit-learn's digits. Up to 900 training images to measure on, the 300 others are spare, 597 are held out"""
    train, *held_out = (d.tensors for d in digits())
    order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(1))
    return Task(digits_learner(epochs, seed, arch).model.eval(), train, tuple(t[order.flip(0)[:900]] for t in train), tuple(torch.cat(t) for t in zip(*held_out, strict=True)), train[0][order[:300]])


# ---- a table


def table_task(seed):
    """A multilayer perceptron on scikit-learn's breast cancer table: 200 to train on, 120 to measure on, 249 held out"""
    d = load_breast_cancer()
    order = torch.randperm(len(d.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(d.data, dtype=torch.float32)[order], torch.tensor(d.target)[order]
    x = (x - x[:200].mean(0))/x[:200].std(0)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    parts = list(zip(x.split([200, 120, 249]), y.split([200, 120, 249]), strict=True))
    return Task(fit(model, *parts[0], 100, 3e-3), *parts)


# ---- text


class Decoder(nn.Module):
    """A causal transformer over bytes, its head tied to the embedding: `[batch, length]` -> `[batch, length, 256]`"""

    def __init__(self, width=64, layers=3, length=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width)*.02)
        self.blocks = nn.ModuleList(nn.ModuleDict(dict(n1=nn.LayerNorm(width), n2=nn.LayerNorm(width), q=nn.Linear(width, width), k=nn.Linear(width, width), v=nn.Linear(width, width),
                                                       out=nn.Linear(width, width), up=nn.Linear(width, 4*width), down=nn.Linear(4*width, width))) for _ in range(layers))  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        nn.init.normal_(self.emb.weight, std=.05)
        self.head.weight = self.emb.weight

    def forward(self, x):
        """Logits of the next byte"""
        h = self.emb(x) + self.pos[: x.shape[1]]
        for b in self.blocks:
            q, k, v = (b[n](b["n1"](h)).unflatten(-1, (4, -1)).transpose(1, 2) for n in "qkv")
            h = h + b["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            h = h + b["down"](F.gelu(b["up"](b["n2"](h))))
        return self.head(self.norm(h))


def text_task(seed, steps=800):
    """A small transformer on the sources of Python's standard library: 150 pieces of 64 bytes to measure on, 300 held out, the rest to train on"""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    data = data[: len(data)//65*65].view(-1, 65)[torch.randperm(len(data)//65, generator=torch.Generator().manual_seed(0))]
    measure, held_out, train = ((p[:, :-1], p[:, 1:]) for p in (data[:150], data[300:600], data[600:]))
    torch.manual_seed(seed)
    return Task(fit(Decoder(), *train, steps, 6e-3), train, measure, held_out, text=True)


tasks = {
    "mlp": table_task,
    "transformer": text_task,
    "mobilenet": lambda seed: image_task(mobilenet, 12, seed),
    "resnet18": lambda seed: image_task(resnet18, 5, seed),
}
