"""Every kind of model with all four methods: what is measured, what is refused for which reason, and whether the promises hold.

    .venv/bin/python benchmarks/models.py [--only bert timm ...] [--seconds 15] [--write docs/architectures.md]

Random weights, small inputs, and fewer and narrower layers where the architecture has keywords for that. Of each model and method: it comes
back bit for bit; one unit is compressed by hand (sparsity, quantization) or for good (pruning, low rank) on a copy, and must score what was
measured; some units are measured again without reuse, and must score the same to the bit. What breaks one of these, or raises from the depths,
is printed in capitals and counted. `--write` puts rows into the table of a page, which keeps the rows of models that were not asked for.
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
from dataclasses import dataclass
from functools import partial
from io import StringIO
from math import isclose
from pathlib import Path
from time import process_time

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent/"tests"))
from test_families import FAMILIES, build
from test_zoo import half_of_it, rounded_rows
from toys import NarrowResNet, lively

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

# the other families are in tests/test_families.py
for family in FAMILIES.values():
    if family.member in ("mobilenet_v3_small", "resnet18", "squeezenet1_1"): models[f"torchvision: {family.member}"] = partial(build, family)


def body():
    """A ResNet with a quarter of the channels, cut before its head."""
    from torchvision.models._utils import IntermediateLayerGetter
    return IntermediateLayerGetter(NarrowResNet(), dict(layer2="low", layer3="aux", layer4="out"))


def pyramid(channels=32):
    """The pyramid of torchvision's detectors over the same ResNet."""
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    return BackboneWithFPN(NarrowResNet(), {f"layer{i}": str(i - 1) for i in (1, 2, 3, 4)}, [16, 32, 64, 128], channels)


def detector(name):
    """A detector by its class, over a narrow pyramid, and two small images."""
    from torchvision.models import detection
    rcnn, masks, points = detection.faster_rcnn, detection.mask_rcnn, detection.keypoint_rcnn
    options = dict(num_classes=3)
    if "RCNN" in name: options = dict(box_head=rcnn.TwoMLPHead(32*7*7, 32), box_predictor=rcnn.FastRCNNPredictor(32, 3))
    if name == "KeypointRCNN": options |= dict(keypoint_head=points.KeypointRCNNHeads(32, (16, 16)), keypoint_predictor=points.KeypointRCNNPredictor(16, 3))
    if name == "MaskRCNN": options |= dict(mask_head=masks.MaskRCNNHeads(32, (16, 16), 1), mask_predictor=masks.MaskRCNNPredictor(16, 16, 3))
    net = getattr(detection, name)(pyramid(), min_size=64, max_size=64, **options)
    return net, ([torch.rand(3, 64, 64) for _ in range(2)],)


for name in "FasterRCNN", "MaskRCNN", "KeypointRCNN", "FCOS", "RetinaNet": models[f"detection: {name}"] = partial(detector, name)


@model("detection")
def SSDLite():
    """Boxes from six sizes of a MobileNet."""
    from torchvision.models import mobilenet_v3_small
    from torchvision.models.detection import _utils, anchor_utils, ssd, ssdlite
    norm = nn.BatchNorm2d
    backbone = ssdlite._mobilenet_extractor(mobilenet_v3_small(width_mult=.5), 6, norm)
    anchors = anchor_utils.DefaultBoxGenerator([[2, 3]]*6, min_ratio=.2, max_ratio=.95)
    channels = _utils.retrieve_out_channels(backbone, (64, 64))
    head = ssdlite.SSDLiteHead(channels, anchors.num_anchors_per_location(), 3, norm)
    return ssd.SSD(backbone, anchors, (64, 64), 3, head=head, score_thresh=.3), ([torch.rand(3, 64, 64) for _ in range(2)],)


def segmenter(name):
    """A segmenter of three classes by its class, over a narrow ResNet."""
    from torchvision.models import segmentation
    from torchvision.models.segmentation.lraspp import LRASPP
    if name == "LRASPP":
        backbone = body()
        backbone.return_layers = dict(layer2="low", layer4="high")
        return LRASPP(backbone, 32, 128, 3, 16), torch.rand(1, 3, 64, 64)
    head = segmentation.fcn.FCNHead(128, 3) if name == "FCN" else segmentation.deeplabv3.DeepLabHead(128, 3)
    return getattr(segmentation, name)(body(), head, segmentation.fcn.FCNHead(64, 3)), torch.rand(1, 3, 64, 64)


for name in "FCN", "DeepLabV3", "LRASPP": models[f"segmentation: {name}"] = partial(segmenter, name)


# ---- timm: a small member of each of many files

timm_models = (
    "levit_128s test_byobnet cait_xxs24_224 coat_tiny convit_tiny test_convnext cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s "
    "cspnext_tiny deit_tiny_patch16_224 dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1 "
    "efficientvit_b0 efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_s12 gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 "
    "hrnet_w18_small iformer_t inception_next_atto lcnetv2_small lowformer_b0 test_mambaout test_coatnet gmlp_ti16_224 mobilenetv3_small_050 "
    "mobilevit_xxs test_nfnet pit_xs_224 pvt_v2_b0 regnetx_004_tv repghostnet_050 repvit_m1 resnest14d test_resnet resnetv2_18 rexnet_100 "
    "legacy_seresnet18 shvit_s1 skresnet18 starnet_s050 swiftformer_xs tiny_vit_5m_224 visformer_tiny test_vit vit_tiny_r_s16_p8_224 "
    "test_vit_relpos ese_vovnet19b_slim_dw xcit_nano_12_p8_224 dla34"
).split()


# fewer and narrower blocks, where the file of the architecture has keywords for that
four, narrow = (1, 1, 1, 1), (16, 32, 48, 64)
narrower = dict(
    cait_xxs24_224=dict(embed_dim=32, depth=3), coat_tiny=dict(embed_dims=[32]*4, serial_depths=[1]*4, parallel_depth=1),
    convit_tiny=dict(embed_dim=16, depth=3, local_up_to_layer=2), crossvit_tiny_240=dict(embed_dim=[24, 48], depth=[[1, 1, 0]]*2),
    cpubone_nano=dict(width_list=[8, 12, 16, 24, 32]), csatv2=dict(dims=narrow), deit_tiny_patch16_224=dict(embed_dim=48, depth=3),
    dpn48b=dict(k_sec=four), edgenext_xx_small=dict(depths=(1, 1, 2, 1)), efficientformer_l1=dict(depths=(1, 1, 1, 2), embed_dims=(24, 32, 48, 64)),
    efficientformerv2_s0=dict(depths=(1, 1, 2, 2)), efficientvim_m1=dict(embed_dim=narrow[:3], depths=four[:3]),
    efficientvit_m0=dict(embed_dim=narrow[:3], depth=four[:3]), fasternet_t0=dict(depths=four), inception_next_atto=dict(depths=four),
    lowformer_b0=dict(width_list=[8, 16, 24, 32, 48], depth_list=[0, 1, 1, 1, 2]), pvt_v2_b0=dict(depths=four, embed_dims=(16, 32, 80, 128)),
    repvit_m1=dict(embed_dim=narrow, depth=four), rexnet_100=dict(width_mult=.5, depth_mult=.5), shvit_s1=dict(depth=four[:3]),
    swiftformer_xs=dict(layers=four), test_vit_relpos=dict(depth=2), tiny_vit_5m_224=dict(embed_dims=narrow, depths=four, num_heads=[1, 2, 3, 4]),
    visformer_tiny=dict(embed_dim=48, depth=four[:3], num_heads=3), vit_tiny_patch16_dinov3_qkvb=dict(embed_dim=48, depth=3),
    vit_tiny_r_s16_p8_224=dict(depth=2), xcit_nano_12_p8_224=dict(depth=2, embed_dim=32))


def fit_timm(name, px):
    """A model of timm with five classes, made for inputs of a size if it is made for one."""
    import timm
    options = dict(num_classes=5) | narrower.get(name, {})
    try: found = timm.create_model(name, img_size=px, **options)
    except TypeError: found = timm.create_model(name, **options)
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
    """A U-Net on a narrow ResNet."""
    from fastai.vision.models.unet import DynamicUnet
    return DynamicUnet(nn.Sequential(*list(NarrowResNet().children())[:-2]), 3, (32, 32)), torch.rand(1, 3, 32, 32)


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


# families by their names, each from a configuration of the same small shape
families = dict(
    qwen2=("ForCausalLM", dict(num_key_value_heads=2)), qwen3=("ForCausalLM", dict(num_key_value_heads=2, head_dim=8)),
    qwen2_moe=("ForCausalLM", dict(num_key_value_heads=2, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)),
    gemma=("ForCausalLM", dict(num_key_value_heads=1, head_dim=4)), gemma2=("ForCausalLM", dict(num_key_value_heads=2, head_dim=4)),
    phi=("ForCausalLM", {}), falcon=("ForCausalLM", {}), gpt_neox=("ForCausalLM", {}), opt=("ForCausalLM", dict(ffn_dim=24, word_embed_proj_dim=16)),
    bloom=("ForCausalLM", dict(n_head=4, n_layer=2)), electra=("ForSequenceClassification", dict(embedding_size=8)),
    albert=("ForSequenceClassification", dict(embedding_size=8)), roberta=("ForTokenClassification", dict(pad_token_id=0)),
    deberta_v2=("ForSequenceClassification", dict(relative_attention=True, pos_att_type=["p2c", "c2p"])),
    mobilebert=("ForSequenceClassification", dict(embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8)))


def of_family(name):
    """A model of Hugging Face by the name of its family."""
    import transformers
    task, more = families[name]
    kind = dict(qwen2="Qwen2", qwen3="Qwen3", qwen2_moe="Qwen2Moe", gpt_neox="GPTNeoX", opt="OPT", deberta_v2="DebertaV2", mobilebert="MobileBert")
    prefix = kind.get(name, name.capitalize())
    without_cache = dict(use_cache=False) if task == "ForCausalLM" else {}
    return getattr(transformers, prefix + task)(getattr(transformers, f"{prefix}Config")(**tiny | more | without_cache)), text()


for name in families: models[f"transformers: {name}"] = partial(of_family, name)


@model("transformers")
def swin():
    """Windows that are shifted."""
    from transformers import SwinConfig, SwinForImageClassification
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4)
    return SwinForImageClassification(config), dict(pixel_values=torch.randn(1, 3, 32, 32))


@model("transformers")
def dinov2():
    """Patches, with a scale for each layer."""
    from transformers import Dinov2Config, Dinov2ForImageClassification
    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
    return Dinov2ForImageClassification(config), dict(pixel_values=torch.randn(1, 3, 16, 16))


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


for name in "r3d_18", "mc3_18", "r2plus1d_18":
    def video(name=name):
        """Clips of frames."""
        from torchvision.models import get_model
        return get_model(name, weights=None, num_classes=3), torch.randn(1, 3, 4, 32, 32)
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


# ---- what is unusual in how a model is held, called or built


class Given(nn.Module):
    """Modules, and a function of them and the input"""
    def __init__(self, forward, **parts):
        super().__init__()
        self.parts, self.way = nn.ModuleDict(parts), forward
    def forward(self, *x): return self.way(self.parts, *x)


def plain(dtype=None): return nn.Sequential(nn.Linear(8, 12, dtype=dtype), nn.ReLU(), nn.Linear(12, 12, dtype=dtype), nn.ReLU(), nn.Linear(12, 3, dtype=dtype))


def pictures(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, 3))


def one_buffer():
    """All weights are slices of one tensor, side by side."""
    net, numbers, start = plain(), torch.randn(300), 0
    for layer in (net[0], net[2], net[4]):
        n = layer.weight.numel()
        layer.weight = nn.Parameter(numbers[start:start + n].view_as(layer.weight))
        start += n
    return net


def strided():
    """Weights that are the transposed of what lies in memory, or every second column of it."""
    net = plain()
    net[0].weight, net[2].weight = nn.Parameter(torch.randn(12, 16)[:, ::2]), nn.Parameter(torch.randn(12, 12).t())
    return net


def shared():
    """One layer, called three times."""
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer, nn.Linear(8, 3))


def with_hooks():
    """Hooks that change what goes in and comes out."""
    net = plain()
    net[0].register_forward_hook(lambda _, __, out: 2*out)
    net[2].register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    return net


def in_place_compiled():
    """One layer compiled inside a model that is not."""
    net = plain()
    net[2].compile(backend="eager")
    return net


def fake_quantized():
    """Prepared for quantization-aware training."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3)).train()
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(net).eval()


@dataclass
class Answer:
    """An output with names"""
    logits: torch.Tensor
    hidden: list


def answered():
    """A dataclass comes out."""
    return Given(lambda m, x: Answer(m.b(m.a(x).relu()), [m.a(x)]), a=nn.Linear(8, 12), b=nn.Linear(12, 3))


def packed():
    """A recurrent layer without bias, in both directions, over sequences of different length."""
    def forward(m, x):
        out = m.rnn(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2])))[0]
        return m.head(nn.utils.rnn.pad_packed_sequence(out)[0])
    return Given(forward, rnn=nn.GRU(6, 8, bidirectional=True, bias=False), head=nn.Linear(16, 3))


def other_widths():
    """Attention whose keys and values are of other widths than its queries."""
    def forward(m, q, k, v):
        h = m.first(q, k, v)[0]
        return m.head(m.second(h, h, h)[0])
    return Given(forward, first=nn.MultiheadAttention(8, 2, kdim=6, vdim=10, batch_first=True), head=nn.Linear(8, 3),
                 second=nn.MultiheadAttention(8, 4, add_bias_kv=True, add_zero_attn=True))


def checkpointed(): return Given(lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)), body=plain()[:3], head=nn.Linear(12, 3))


def mapped(): return Given(lambda m, x: m.b(torch.func.vmap(lambda row: m.a(row).relu())(x)), a=nn.Linear(8, 12), b=nn.Linear(12, 3))


def deformed():
    """A convolution that looks where another one says."""
    from torchvision.ops import DeformConv2d
    return Given(lambda m, x: m.head(m.bent(x, m.where(x))), where=nn.Conv2d(3, 18, 3, padding=1), bent=DeformConv2d(3, 6, 3, padding=1), head=nn.Conv2d(6, 2, 1))


class Named(nn.Module):
    """Layers whose names are odd"""
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("=a b", "weight", "Ünï", "$x$", "_", "0")})
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        for layer in self.layers.values(): x = layer(x).relu()
        return self.head(x)


rows, image = partial(torch.randn, 6, 8), partial(torch.randn, 2, 3, 8, 8)
unusual = {
    "64 bits": (lambda: plain(torch.float64), lambda: rows(dtype=torch.float64)), "frozen": (lambda: plain().requires_grad_(False), rows),
    "channels last": (lambda: pictures().to(memory_format=torch.channels_last), lambda: image().to(memory_format=torch.channels_last)),
    "slices of one tensor": (one_buffer, rows), "strided weights": (strided, rows), "a layer called thrice": (shared, rows), "hooks": (with_hooks, rows),
    "compiled": (lambda: torch.compile(plain(), backend="eager"), rows), "a compiled layer": (in_place_compiled, rows),
    "traced by torch.fx": (lambda: torch.fx.symbolic_trace(plain()), rows), "DataParallel": (lambda: nn.DataParallel(plain()), rows),
    "averaged weights": (lambda: torch.optim.swa_utils.AveragedModel(plain()), rows), "fake quantized": (fake_quantized, image),
    "a dataclass comes out": (answered, rows), "odd names": (Named, rows), "packed sequences": (packed, lambda: torch.randn(5, 3, 6)),
    "attention of other widths": (other_widths, lambda: (torch.randn(2, 5, 8), torch.randn(2, 4, 6), torch.randn(2, 4, 10))),
    "nn.Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), lambda: (torch.randn(2, 4, 8), torch.randn(2, 3, 8))),
    "checkpointed": (checkpointed, rows), "vmap": (mapped, rows), "deformed": (deformed, image),
    "pixels shuffled": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(4, 3, 1)), image),
    "transposed in 3-D": (lambda: nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.ConvTranspose3d(6, 4, 2, 2, groups=2), nn.Conv3d(4, 2, 1)),
                          lambda: torch.randn(1, 1, 4, 6, 6))}
for name, (make, sample) in unusual.items(): models[f"unusual: {name}"] = lambda make=make, sample=sample: (make(), sample())


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
    def stop(*_): raise Slow(f"{seconds} s of CPU time")
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)   # of CPU time
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# words of the reasons -> what they come to, in the order in which they are looked for
words = {
    "are the output of the model": "the output of the model", "gates and states": "gates and states of a recurrent layer",
    "a table loses columns only": "a table whose columns nothing else shares", "share one weight": "tied where its channels differ",
    "by a parametrization": "its weight or that of a layer coupled with it is computed", "is computed by": "its weight or that of a layer coupled with it is computed",
    "cannot assign": "its weight or that of a layer coupled with it is computed", "cannot be followed": "used as a bare weight, or not used",
    "the model does not run": "the model does not run with fewer channels there", "does not come to an end": "torch-pruning's search has no end",
    "are moved or mixed": "channels change places on the way", "in no regular pattern": "channels tied in no regular pattern",
    "smallest set that can go": "all channels or none", "torch-pruning breaks": "torch-pruning breaks on it", "cannot trace": "torch-pruning cannot trace the model",
    "follows more channels": "torch-pruning loses track of its channels", "read by no layer": "torch-pruning loses track of its channels",
    "nothing can be saved": "no rank saves anything", "is out of reach": "no rank saves anything",
    "does not call it as a layer": "not called as a layer", "it is not called as a layer": "not called as a layer",
    "is a class of its own": "a subclass that may do more", "not reached in": "not reached in the time"}


def shorten(reason):
    """What a reason comes to; the reason itself, without names, numbers and advice, if it is a new one."""
    known = next((text for word, text in words.items() if word in reason), None)
    reason = re.sub(r"'[^']*'", "'...'", reason.split(";")[0])
    return known or re.sub(r"\d[\d,.]*", "n", reason)[:110].replace("|", "/")


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


def analyse(analyzer, method, seconds):
    """Rows that were measured, and name -> reason for the others; when the time is over, what was measured until then."""
    try:
        with limit(seconds): found = analyzer.analyze(method, levels[method], verbose=False)
        late = {}
    except Slow as e:
        found = analyzer.last[0] if analyzer.last else None
        late = {u.name: f"not reached in {e}" for u in analyzer.units}
    except ValueError as e: return [], {u.name: str(e) for u in analyzer.units}
    skipped = dict(found.skipped) if found else {}
    rows = [row for row in found.layers if row.name not in skipped] if found else []
    return rows, {u.name: (late | skipped)[u.name] for u in analyzer.units if u.name in late | skipped and u.name not in {row.name for row in rows}}


def ask(net, x, method, seconds):
    """Analysed and refused units of one method, reasons, and what went wrong."""
    wrong, before, start = [], fingerprint(net), process_time()
    analyzer = SensitivityAnalyzer(net, x, Score(x), reuse=True)
    rows, reasons = analyse(analyzer, method, seconds)
    if changes(before, fingerprint(net)): wrong.append("LEFT A TRACE")
    neither = len(analyzer.units) - len(rows) - len(reasons)
    if neither: wrong.append(f"{neither} UNITS ARE NEITHER")
    quick = process_time() - start < seconds/5   # to find the channels of a large model again takes too long
    wrong += check(net, x, method, rows, seconds, again=quick or method != "pruning")
    if changes(before, fingerprint(net)): wrong.append("LEFT A TRACE THE SECOND TIME")
    return len(rows), Counter(map(shorten, reasons.values())), wrong


def check(net, x, method, rows, seconds, again):
    """What is wrong with what a copy scores, and with some of the rows when they are measured again."""
    if not rows: return []
    wrong, row = [], spread(rows, 3)[-1]
    try:
        with limit(seconds):
            score = by_hand(net, x, row.name, method, levels[method])
            if not isclose(score, row.compressed_metric, rel_tol=1e-4, abs_tol=1e-5):
                wrong.append(f"{row.name} BY HAND {score:.7g}, MEASURED {row.compressed_metric:.7g}")
            was = {row.name: row.compressed_metric for row in spread(rows, 4)}
            if not again: return wrong
            plain = SensitivityAnalyzer(net, x, Score(x), reuse=False).analyze(method, levels[method], layers=[*was], verbose=False)
            other = [row.name for row in plain.layers if row.name in was and row.compressed_metric != was[row.name]]
            if other: wrong.append(f"REUSE DIFFERS: {other[0]}")
    except Slow: pass
    return wrong


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
        for method in levels: row[method] = ask(net, x, method, seconds)
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


def as_line(row):
    """A row as Markdown."""
    counts = " | ".join(str(row[method][0]) for method in levels)
    return f"| {row['model']} | {row['parameters']:,} | {row['units']} | {counts} | {reasons_of(row)} |"


def from_line(line):
    """The row that a line of a page says, or None."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if len(cells) != 8 or not cells[2].isdigit(): return None
    row = dict(model=cells[0], parameters=int(cells[1].replace(",", "")), units=int(cells[2]), others=Counter(), seconds=0)
    for method, n in zip(levels, cells[3:7], strict=True): row[method] = int(n), Counter(), []
    for text in filter(None, cells[7].split("; ")):
        what, _, why = text.partition(": ")
        if what.endswith("without a unit"): row["others"][why] = int(what.split()[0])
        else: row[what.rpartition(" ")[0].replace(" ", "_")][1][why] = int(what.rpartition(" ")[2])
    return row


def table(rows):
    """All rows as Markdown."""
    head = "| model | parameters | units | sparsity | quantization | pruning | low rank | refused, and why |"
    return "\n".join([head, "|" + "---|"*8, *map(as_line, rows)])


def by_kind(rows):
    """One line for each kind of model."""
    lines = ["| kind | models | units | sparsity | quantization | pruning | low rank |", "|" + "---|"*7]
    for kind in dict.fromkeys(row["model"].split(":")[0] for row in rows):
        some = [row for row in rows if row["model"].startswith(kind + ":")]
        sums = [sum(row["units"] for row in some), *(sum(row[method][0] for row in some) for method in levels)]
        lines.append(f"| {kind} | {len(some)} | " + " | ".join(f"{n:,}" for n in sums) + " |")
    return "\n".join(lines)


def totals(rows):
    """What it comes to, in sentences."""
    units = sum(row["units"] for row in rows)
    counts = ", ".join(f"{method.replace('_', ' ')} {sum(row[method][0] for row in rows):,}" for method in levels)
    lines = [f"{len(rows)} models, {units:,} units; measured: {counts}. Refused:\n"]
    for method in levels:
        reasons = sum((row[method][1] for row in rows), Counter())
        if reasons: lines.append(f"* {method.replace('_', ' ')}: " + "; ".join(f"{n:,} {why}" for why, n in reasons.most_common()))
    return "\n".join(lines)


def write(page, rows):
    """The rows into the table of a page, which keeps those of other models."""
    before, _, rest = page.read_text().partition("<!-- models -->\n")
    inside, _, after = rest.partition("<!-- /models -->")
    kept = {row["model"]: row for row in filter(None, map(from_line, inside.splitlines()))}
    kept |= {row["model"]: row for row in rows}
    rows = [kept[name] for name in models if name in kept]
    shown = f"{totals(rows)}\n\n{by_kind(rows)}\n\n<details><summary>{len(rows)} models</summary>\n\n{table(rows)}\n\n</details>\n"
    page.write_text(f"{before}<!-- models -->\n{shown}<!-- /models -->{after}")


def main():
    """Look at all that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--seconds", type=int, default=15, help="most for an analysis, and for its checks, of CPU time")
    parser.add_argument("--json", type=Path, help="file to which each row is added, and from which rows are taken that are there")
    parser.add_argument("--write", type=Path, help="page with the lines <!-- models --> and <!-- /models -->")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = {}
    if args.json and args.json.exists():
        for line in args.json.read_text().splitlines():
            row = json.loads(line)
            counted = {m: (row[m][0], Counter(row[m][1]), row[m][2]) for m in levels if m in row}
            known[row["model"]] = row | counted | dict(others=Counter(row.get("others")))
    rows = []
    asked = dict.fromkeys(name for part in args.only or [""] for name in models if part in name)
    for name in asked:
        row = known.get(name) or look(name, args.seconds)
        if args.json and name not in known:
            with args.json.open("a") as f: f.write(json.dumps(row) + "\n")
        print(told(row), flush=True)
        rows.append(row)
    right = [row for row in rows if "failed" not in row]
    n_wrong = sum("failed" in row or any(row[m][2] for m in levels) for row in rows)
    print(f"\n{totals(right)}\n\n{by_kind(right)}\n\n{n_wrong} of {len(rows)} models broke a promise")
    if args.write: write(args.write, right)
    return n_wrong


def told(row):
    """One line for the terminal."""
    start = f"{row['model']}: {row['parameters']:,} parameters, {row['seconds']} s, "
    if "failed" in row: return start + f"FAILED {row['failed']}"
    counts = ", ".join(f"{m} {row[m][0]} of {row['units']}" for m in levels)
    return start + f"{counts} {'; '.join(text for m in levels for text in row[m][2])}"


if __name__ == "__main__": sys.exit(bool(main()))
