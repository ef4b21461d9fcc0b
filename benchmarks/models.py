"""Every kind of model with all four methods: what is measured, what is refused for which reason, and whether the promises hold.

    .venv/bin/python benchmarks/models.py [--only bert timm ...] [--seconds 40] [--write docs/architectures.md]

Random weights, tiny inputs, narrow configurations. Of each model and method: it is bit for bit as before; one unit is compressed by hand (sparsity, quantization)
or for good (pruning, low rank) on a copy, and must score what was measured; some units are measured again with reuse, and must score the same to the bit. What breaks
one of these, or raises from the depths, is printed in capitals and counted. `--write` puts the table between two lines of a page.
"""
import argparse
import json
import re
import signal
import sys
import warnings
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import partial
from io import StringIO
from math import isclose
from pathlib import Path
from time import process_time

import torch
from torch import nn
from torch.nn.utils import prune

sys.path.insert(0, str(Path(__file__).parent.parent/"tests"))
from test_families import FAMILIES, build
from test_zoo import half_of_it, rounded_rows
from toys import lively

from fasterai_sens import SensitivityAnalyzer
from fasterai_sens.core.fingerprint import changes, fingerprint
from fasterai_sens.core.inputs import call, tensors_in
from fasterai_sens.core.layers import all_units
from fasterai_sens.core.plans import LayerTargets
from fasterai_sens.core.protocol import methods

levels = dict(sparsity=50, quantization=4, pruning=50, low_rank=50)
models = {}   # name -> function that returns a model and its input


def model(group):
    """Enter a builder."""
    def enter(make):
        models[f"{group}: {make.__name__.removeprefix('_')}"] = make
        return make
    return enter


# ---- torchvision: classification, detection, segmentation

for family in FAMILIES: models[f"torchvision: {FAMILIES[family].member}"] = partial(build, FAMILIES[family])


def images(n, px): return [torch.rand(3, px, px) for _ in range(n)],


def detector(name, px=64, **options):
    """A detector or segmenter with few classes, on two small images."""
    from torchvision.models import get_model
    return get_model(name, weights=None, weights_backbone=None, num_classes=3, **options), images(2, px)


small = dict(min_size=64, max_size=64)
for name, options in dict(fasterrcnn_mobilenet_v3_large_320_fpn=small, fasterrcnn_resnet50_fpn=small, fcos_resnet50_fpn=small, retinanet_resnet50_fpn=small,
                          maskrcnn_resnet50_fpn=small, keypointrcnn_resnet50_fpn=small, ssdlite320_mobilenet_v3_large={}).items():
    models[f"detection: {name}"] = partial(detector, name, **options)


def segmenter(name):
    """A segmenter of three classes."""
    from torchvision.models import get_model
    return get_model(name, weights=None, weights_backbone=None, num_classes=3), torch.rand(1, 3, 64, 64)


for name in "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50": models[f"segmentation: {name}"] = partial(segmenter, name)


# ---- timm: one small member of each of sixty files

timm_models = (
    "halonet_h1 test_byobnet cait_xxs24_224 coat_tiny convit_tiny test_convnext cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s "
    "cspnext_tiny deit_tiny_patch16_224 dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1 "
    "efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_s12 gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 "
    "hrnet_w18_small iformer_t inception_next_atto lcnetv2_small lowformer_b0 test_mambaout test_coatnet gmlp_ti16_224 mobilenetv3_small_050 "
    "mobilevit_xxs test_nfnet pit_xs_224 pvt_v2_b0 regnetx_004_tv repghostnet_050 repvit_m1 resnest14d test_resnet resnetv2_18 rexnet_100 "
    "legacy_seresnet18 shvit_s1 skresnet18 starnet_s050 swiftformer_xs tiny_vit_5m_224 visformer_tiny test_vit vit_tiny_r_s16_p8_224 "
    "test_vit_relpos ese_vovnet19b_slim_dw xcit_nano_12_p8_224 dla34"
).split()


def fit_timm(name, px):
    """A model of timm with five classes, made for inputs of a size if it is made for one."""
    import timm
    try: found = timm.create_model(name, num_classes=5, img_size=px)
    except TypeError: found = timm.create_model(name, num_classes=5)
    x = torch.randn(1, 3, px, px)
    with torch.no_grad(): found.eval()(x)
    return found, x


def of_timm(name):
    """The model, and the smallest input that it takes."""
    for px in (32, 64, 96, 128, 160, 224, 240):
        try: return fit_timm(name, px)
        except (RuntimeError, ValueError, AssertionError, IndexError, ZeroDivisionError): continue
    return fit_timm(name, 256)


for name in timm_models: models[f"timm: {name}"] = partial(of_timm, name)


# ---- fastai


@model("fastai")
def unet():
    """A U-Net on a small ResNet."""
    from fastai.vision.models.unet import DynamicUnet
    from torchvision.models import resnet18
    return DynamicUnet(nn.Sequential(*list(resnet18(weights=None).children())[:-2]), 3, (32, 32)), torch.rand(1, 3, 32, 32)


@model("fastai")
def tabular():
    """Embeddings beside numbers."""
    from fastai.tabular.model import TabularModel
    return TabularModel([(5, 3), (7, 4)], 4, 2, [16, 8]), (torch.randint(5, (6, 2)), torch.randn(6, 4))


@model("fastai")
def awd_lstm():
    """A language model whose recurrent weights are dropped out before each call."""
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    config = awd_lstm_lm_config | dict(emb_sz=12, n_hid=16, n_layers=2)
    return get_language_model(AWD_LSTM, 20, config), torch.randint(20, (2, 5))


@model("fastai")
def xresnet():
    """A ResNet with a deeper stem."""
    from fastai.vision.models.xresnet import xresnet18
    return xresnet18(n_out=3), torch.rand(1, 3, 32, 32)


# ---- Hugging Face, from configurations


def text(n=6, words=20): return dict(input_ids=torch.randint(1, words, (2, n)))


tiny = dict(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=16, initializer_range=.3)


@model("transformers")
def bert():
    """An encoder that classifies."""
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig(**tiny, num_labels=3)), text()


@model("transformers")
def distilbert():
    """A shorter one."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=20, dim=16, n_layers=2, n_heads=4, hidden_dim=24, max_position_embeddings=16)), text()


@model("transformers")
def gpt2():
    """A decoder whose head is its table."""
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=4, initializer_range=.3, use_cache=False)), text()


@model("transformers")
def t5():
    """Encoder and decoder with one table."""
    from transformers import T5Config, T5ForConditionalGeneration
    net = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False))
    return net, text() | dict(decoder_input_ids=torch.randint(1, 20, (2, 4)))


@model("transformers")
def llama_grouped_queries():
    """Four heads of queries for two of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(**tiny, num_key_value_heads=2, use_cache=False)), text()


@model("transformers")
def mistral():
    """A window over the past."""
    from transformers import MistralConfig, MistralForCausalLM
    return MistralForCausalLM(MistralConfig(**tiny, num_key_value_heads=2, sliding_window=4, use_cache=False)), text()


@model("transformers")
def mixtral():
    """Experts, of which each token asks two."""
    from transformers import MixtralConfig, MixtralForCausalLM
    return MixtralForCausalLM(MixtralConfig(**tiny, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, use_cache=False)), text()


@model("transformers")
def mamba():
    """A state that is carried along."""
    from transformers import MambaConfig, MambaForCausalLM
    return MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False)), text()


@model("transformers")
def vit():
    """Patches as words."""
    from transformers import ViTConfig, ViTForImageClassification
    shape = {k: v for k, v in tiny.items() if k not in ("vocab_size", "max_position_embeddings")}
    return ViTForImageClassification(ViTConfig(**shape, image_size=16, patch_size=4, num_labels=3)), dict(pixel_values=torch.randn(2, 3, 16, 16))


@model("transformers")
def clip():
    """Images and words."""
    from transformers import CLIPConfig, CLIPModel
    shape = {k: v for k, v in tiny.items() if k not in ("vocab_size", "max_position_embeddings", "initializer_range")}
    words, pixels = shape | dict(vocab_size=20, max_position_embeddings=16, eos_token_id=19), shape | dict(image_size=16, patch_size=4)
    return CLIPModel(CLIPConfig(text_config=words, vision_config=pixels, projection_dim=8)), text() | dict(pixel_values=torch.randn(2, 3, 16, 16))


@model("transformers")
def whisper():
    """Sound to words."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    shape = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False)
    config = WhisperConfig(vocab_size=20, num_mel_bins=8, max_source_positions=16, max_target_positions=16, **shape, **ends)
    sample = dict(input_features=torch.randn(2, 8, 32), decoder_input_ids=torch.randint(3, 20, (2, 4)))
    return WhisperForConditionalGeneration(config), sample


@model("transformers")
def wav2vec2():
    """Sound, with a convolution whose weight is normed."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC
    shape = {k: v for k, v in tiny.items() if k != "max_position_embeddings"}
    config = Wav2Vec2Config(**shape, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    return Wav2Vec2ForCTC(config), dict(input_values=torch.randn(2, 400))


@model("transformers")
def segformer():
    """Stages of attention, then a mask."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation
    config = SegformerConfig(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2],
                             mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3)
    return SegformerForSemanticSegmentation(config), dict(pixel_values=torch.randn(1, 3, 32, 32))


# ---- sound, video, recurrent nets, computed weights


@model("audio")
def m5():
    """Convolutions over raw sound, the first one wide."""
    layers = [nn.Conv1d(1, 8, 20, 4), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveAvgPool1d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5)), torch.randn(4, 1, 400)


class Wave(nn.Module):
    """Dilated convolutions with gates, a sum of what each adds, and a transposed one at the end"""
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Conv1d(2, 8, 1), nn.ConvTranspose1d(8, 2, 4, stride=2)
        self.gates = nn.ModuleList([nn.Conv1d(8, 16, 3, padding=d, dilation=d) for d in (1, 2, 4)])
        self.back = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])
    def forward(self, x):
        """Sound, twice as long."""
        x = total = self.start(x)
        for gate, back in zip(self.gates, self.back, strict=True):
            a, b = gate(x).chunk(2, 1)
            x = x + back(a.tanh()*b.sigmoid())
            total = total + x
        return self.end(total)


@model("audio")
def wavenet():
    """Gates and skips."""
    return Wave(), torch.randn(2, 2, 32)


for name in "r3d_18", "mc3_18", "r2plus1d_18", "s3d":
    def video(name=name):
        """Clips of frames."""
        from torchvision.models import get_model
        frames = 16 if name == "s3d" else 4
        return get_model(name, weights=None, num_classes=3), torch.randn(1, 3, frames, 32 if name != "s3d" else 64, 32 if name != "s3d" else 64)
    models[f"video: {name}"] = video


class Recurrent(nn.Module):
    """Words, a recurrent layer, a head"""
    def __init__(self, rnn, n_out):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 8), rnn, nn.Linear(n_out, 4)
    def forward(self, ids): return self.head(self.rnn(self.embed(ids))[0][:, -1])


for name, rnn, n_out in (("lstm", partial(nn.LSTM, num_layers=2, bidirectional=True), 24), ("gru", nn.GRU, 12), ("rnn", nn.RNN, 12), ("lstm_projected", partial(nn.LSTM, proj_size=6), 6)):
    models[f"recurrent: {name}"] = lambda rnn=rnn, n_out=n_out: (Recurrent(rnn(8, 12, batch_first=True), n_out), torch.randint(20, (4, 5)))


class Cells(nn.Module):
    """Cells, step by step"""
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(6, 8), nn.GRUCell(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        """A sequence `[batch, steps, 6]`."""
        state, h = None, None
        for step in x.unbind(1):
            state = self.first(step, state)
            h = self.second(state[0], h)
        return self.head(h)


@model("recurrent")
def cells():
    """Two kinds of cells."""
    return Cells(), torch.randn(4, 5, 6)


@model("recurrent")
def convlstm_sound():
    """Convolutions before a recurrent layer, as for speech."""
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn, self.head = nn.Conv1d(8, 12, 3, padding=1), nn.GRU(12, 10, 2, batch_first=True), nn.Linear(10, 5)
        def forward(self, x): return self.head(self.rnn(self.conv(x).relu().transpose(1, 2))[0])
    return Speech(), torch.randn(2, 8, 12)


computed = dict(
    weight_norm=nn.utils.parametrizations.weight_norm, spectral_norm=nn.utils.parametrizations.spectral_norm, orthogonal=nn.utils.parametrizations.orthogonal,
    old_weight_norm=nn.utils.weight_norm, old_spectral_norm=nn.utils.spectral_norm,
    torch_prune=lambda m: prune.l1_unstructured(m, "weight", .3))
for name, wrap in computed.items():
    models[f"computed weights: {name}"] = lambda wrap=wrap: (
        nn.Sequential(nn.Linear(8, 12), nn.ReLU(), wrap(nn.Linear(12, 12)), nn.ReLU(), nn.Linear(12, 3)), torch.randn(4, 8))


# ---- what is asked of each


class Score:
    """All numbers of all outputs, each with a weight of its own."""
    def __init__(self, x): self.x = x
    @torch.no_grad()
    def __call__(self, model):
        total = 0.
        for t in tensors_in(call(model, self.x)):
            if not t.numel(): continue
            flat = t.double().flatten().nan_to_num(0, 0, 0)
            total += float(flat@torch.cos(torch.arange(len(flat), dtype=torch.double) + .5))/len(flat)**.5
        return total


class Slow(BaseException):
    """A model took too long."""


@contextmanager
def limit(seconds):
    """Raises `Slow` in the block when its time is over."""
    def stop(*_): raise Slow(f"not done in {seconds} s of CPU time")
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)   # of CPU time
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def shorten(reason):
    """A reason without names, numbers and advice, so that equal ones can be counted."""
    reason = re.sub(r"'[^']*'", "'...'", reason.split(";")[0])
    return re.sub(r"\d[\d,.]*", "n", reason)[:110]


def by_hand(net, x, name, method, level):
    """What a copy scores with one layer compressed: by rules of the tests where there is one, else for good."""
    twin = deepcopy(net)
    unit = next(u for u in all_units(twin)[0] if u.name == name)
    if method in ("sparsity", "quantization"):
        w = unit.weight.data
        w.copy_(half_of_it(unit.module, w) if method == "sparsity" else rounded_rows(unit.module, w, level))
    else:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()): methods[method].apply(twin, LayerTargets({name: level}, "percent", method), sample=x)
    return Score(x)(twin.eval())


def spread(rows, n):
    """At most `n` of them, from first to last."""
    step = max(1, len(rows)//n)
    return rows[::step][:n]


def ask(net, x, method):
    """Analysed and refused units of one method, reasons, and what went wrong."""
    level, wrong = levels[method], []
    n, before = len(all_units(net)[0]), fingerprint(net)
    analyzer = SensitivityAnalyzer(net, x, Score(x), reuse=True)
    rows, reasons = [], {}
    try:
        found = analyzer.analyze(method, level, verbose=False)
        names = {u.name for u in analyzer.units}
        rows = [row for row in found.layers if row.name not in dict(found.skipped)]
        reasons = {name: why for name, why in found.skipped if name in names}
    except ValueError as e: reasons = dict.fromkeys([u.name for u in analyzer.units], str(e))
    if changes(before, fingerprint(net)): wrong.append("LEFT A TRACE")
    if len(rows) + len(reasons) != n: wrong.append(f"{n - len(rows) - len(reasons)} UNITS ARE NEITHER")
    for row in spread(rows, 3)[-1:]:
        score = by_hand(net, x, row.name, method, level)
        if not isclose(score, row.compressed_metric, rel_tol=1e-4, abs_tol=1e-5): wrong.append(f"{row.name} BY HAND {score:.7g}, MEASURED {row.compressed_metric:.7g}")
    some = [row.name for row in spread(rows, 6)]
    if some:
        again = SensitivityAnalyzer(net, x, Score(x), reuse=False).analyze(method, level, layers=some, verbose=False)
        was = {row.name: row.compressed_metric for row in rows}
        other = [row.name for row in again.layers if row.name in some and row.compressed_metric != was[row.name]]
        if other: wrong.append(f"REUSE DIFFERS: {other[0]}")
    return len(rows), Counter(map(shorten, reasons.values())), wrong


def look(name, seconds):
    """One row of the table."""
    start = process_time()
    torch.manual_seed(0)
    row = dict(model=name, parameters=0)
    try:
        net, x = models[name]()
        net = lively(net)
        row["parameters"] = sum(p.numel() for p in net.parameters())
        with torch.no_grad(): call(net, x)
        row["units"], others = len(all_units(net)[0]), all_units(net)[1]
        row["others"] = Counter(shorten(why) for _, why in others if "is not a compressible layer" not in why)
        for method in levels:
            try:
                with limit(seconds): row[method] = ask(net, x, method)
            except Slow as e: row[method] = 0, Counter({str(e): row["units"]}), []
    except Exception as e: row["failed"] = f"{type(e).__name__}: {e}"[:300]   # noqa: BLE001 (what may come is what is looked for)
    row["seconds"] = round(process_time() - start, 1)
    return row


def reasons_of(row):
    """What was refused, by method."""
    texts = []
    for method in levels:
        for why, n in sorted(row[method][1].items(), key=lambda item: -item[1]): texts.append(f"{method.replace('_', ' ')} {n}: {why}")
    for why, n in row["others"].items(): texts.append(f"{n} without a unit: {why}")
    return "; ".join(texts)


def table(rows):
    """All rows as Markdown."""
    head = "| model | parameters | units | sparsity | quantization | pruning | low rank | seconds | refused, and why |"
    lines = [head, "|" + "---|"*9]
    for row in rows:
        counts = " | ".join(str(row[method][0]) for method in levels)
        lines.append(f"| {row['model']} | {row['parameters']:,} | {row['units']} | {counts} | {row['seconds']} | {reasons_of(row)} |")
    return "\n".join(lines)


def totals(rows):
    """What it comes to, in sentences."""
    units = sum(row["units"] for row in rows)
    counts = ", ".join(f"{method.replace('_', ' ')} {sum(row[method][0] for row in rows):,}" for method in levels)
    lines = [f"{len(rows)} models, {units:,} units; measured: {counts}."]
    for method in levels:
        reasons = sum((row[method][1] for row in rows), Counter())
        lines += [f"* {method.replace('_', ' ')}: {n:,} refused, {why}" for why, n in reasons.most_common()]
    return "\n".join(lines)


def main():
    """Look at all that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--seconds", type=int, default=40, help="most for a method of a model, of CPU time")
    parser.add_argument("--json", help="file to which each row is added, and from which rows are taken that are there")
    parser.add_argument("--write", help="page with the lines <!-- models --> and <!-- /models -->")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = {}
    if args.json and Path(args.json).exists():
        for line in Path(args.json).read_text().splitlines():
            row = json.loads(line)
            known[row["model"]] = row | {m: (row[m][0], Counter(row[m][1]), row[m][2]) for m in levels if m in row} | dict(others=Counter(row.get("others")))
    rows = []
    asked = dict.fromkeys(name for part in args.only or [""] for name in models if part in name)
    for name in asked:
        row = known.get(name) or look(name, args.seconds)
        if args.json and name not in known: Path(args.json).open("a").write(json.dumps(row) + "\n")
        wrong = row.get("failed") or "; ".join(text for m in levels for text in row[m][2])
        print(f"{name}: {row['parameters']:,} parameters, {row['seconds']} s, " + (f"FAILED {row['failed']}" if "failed" in row else
              ", ".join(f"{m} {row[m][0]} of {row['units']}" for m in levels) + f" {wrong}"), flush=True)
        rows.append(row)
    right = [row for row in rows if "failed" not in row]
    text = totals(right)
    n_wrong = sum("failed" in row or any(row[m][2] for m in levels) for row in rows)
    print(f"\n{text}\n{n_wrong} of {len(rows)} models broke a promise")
    if args.write:
        page = Path(args.write)
        before, _, rest = page.read_text().partition("<!-- models -->\n")
        after = rest.partition("<!-- /models -->")[2]
        page.write_text(f"{before}<!-- models -->\n{text}\n\n<details><summary>{len(right)} models</summary>\n\n{table(right)}\n\n</details>\n<!-- /models -->{after}")
    return n_wrong


if __name__ == "__main__": sys.exit(bool(main()))
