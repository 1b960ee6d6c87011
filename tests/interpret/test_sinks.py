"""Mean weights of heads against the weights that eager attention returns."""

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs

import gnn_attention as ga
from gnn_attention import patterns

needs("transformers")

hf_models = needs("support.hf_models")
from transformers import LlamaConfig, LlamaModel  # noqa: E402

from gnn_attention.interpret.sinks import mean_weights, sinks  # noqa: E402

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(18).view(2, 9)


def model():
    torch.manual_seed(0)
    made = LlamaModel(LlamaConfig(**SIZES, **HEADS, attn_implementation="eager")).eval().double()
    for name, weight in made.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(20)
    return made


@torch.no_grad()
def test_sinks_are_means_of_eager_weights():
    """Over both samples and all receivers; eager's softmax is float32: four roundings of at most 1."""
    llama = model()
    weights = torch.stack(llama(IDS, output_attentions=True).attentions).double()
    llama.set_attn_implementation("gnn_attention")
    receivers = torch.arange(9, 0, -1)
    found = sinks(llama, IDS)
    for mean, wanted in ((found.weight, weights), (found.square, weights.square())):
        assert float((mean - wanted.sum((1, 3)) / 2 / receivers).abs().max()) <= 4 * 2**-24
    assert found.over(0.5).shape[1] == 3


@torch.no_grad()
def test_a_window_and_distances_count():
    """By distance along the graph of use_graph; a distance without edges is NaN."""
    llama = model()
    llama.set_attn_implementation("gnn_attention")
    with ga.use_graph(llama, patterns.window(9, 3)):
        found = mean_weights(llama, IDS, torch.sub, 4)
        weights = torch.stack(llama(IDS, output_attentions=True).attentions).double()
    wanted = torch.stack([weights.diagonal(-k, -2, -1).mean((1, -1)) for k in range(3)], -1)
    assert_exact(found.weight[..., :3], wanted)
    assert bool(found.weight[..., 3].isnan().all())


def sender(dst, src):
    """The group of an edge in sinks."""
    return src


FULL = [1] * 9
PADDINGS = [
    ("llama", [FULL, [1] * 4 + [0] * 5]),
    ("llama", [FULL, [0] * 5 + [1] * 4]),
    ("llama", [[0] * 2 + [1] * 7, [0] * 5 + [1] * 4]),
    ("llama", [[0] * 3 + [1] * 6] * 2),
    ("llama", [[0] * 3 + [1] * 6, [1] * 6 + [0] * 3]),
    ("bert", [FULL, [1] * 4 + [0] * 5]),
    ("bart", [FULL, [1] * 4 + [0] * 5]),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "mask"), PADDINGS)
def test_padded_texts_count_as_each_alone(name, mask, monkeypatch):
    """By token and, in a window, by distance; a text counts where it has one."""
    hf_models.keep_float64(monkeypatch)
    built = hf_models.built(name, "gnn_attention")
    mask, more = torch.tensor(mask), {"decoder_input_ids": IDS[:, :6]} if name == "bart" else {}
    where = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if name == "llama" else {}
    for group, graph in ((sender, patterns.full(64)), (torch.sub, patterns.window(64, 3))):
        if group is torch.sub and name != "llama":
            continue
        with ga.use_graph(built, graph):
            found = mean_weights(built, IDS, group, 9, attention_mask=mask, **where, **more)
            alone = [
                mean_weights(built, IDS[b, own][None], group, 9, **{key: x[[b]] for key, x in more.items()})
                for b, own in enumerate(mask.bool())
            ]
        for part in ("weight", "square", "uniform"):
            wanted = torch.stack([getattr(one, part) for one in alone]).nanmean(0)
            assert_exact(getattr(found, part).nan_to_num(9.0), wanted.nan_to_num(9.0))
