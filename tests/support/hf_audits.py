"""What is audited of the families of ``hf_models``: the graph that each promises, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support.hf_models import FAMILIES, TOKENS, VOCABULARY, build
from torch import Tensor, nn

import gnn_attention.huggingface  # noqa: F401 (registers the attention)
from gnn_attention import TokenGraph, patterns
from gnn_attention.interpret.audit import PartOf, Verdict, audit

# tokens of a decoder, of padding, and of a sound before and after its convolutions
ANSWER, PAD, FRAMES, SOUNDS = 7, 3, 32, 16
CHUNKS = {TOKENS: (7, 1, 1, 3), ANSWER: (4, 1, 2)}  # how decoding is fed
EXPERTS = ("gpt_oss", "deepseek_v3", "mixtral")  # torch's grouped_mm, which their experts use, has no float64

DRAW = torch.Generator().manual_seed(3)
TEXT = torch.randint(3, VOCABULARY - 1, (1, TOKENS), generator=DRAW)
ANSWERED = torch.randint(3, VOCABULARY - 1, (1, ANSWER), generator=DRAW)
PICTURE = torch.randn(1, 3, 16, 16, generator=DRAW)
SOUND = torch.randn(1, 8, FRAMES, generator=DRAW)


Graphs = tuple[TokenGraph, ...]


@dataclass(frozen=True)
class Subject:
    """One audit: ``graphs``, one for each layer, are promised of ``of(model)``, called by ``call``."""

    graphs: Graphs
    shape: tuple[int, ...]
    call: Callable[[nn.Module, Tensor], Any] | None = None
    embedding: str | None = None
    of: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)
    dtype: torch.dtype = torch.float64


CAUSAL, FULL = patterns.causal(TOKENS), patterns.full(TOKENS)
WINDOW, CHUNKED = patterns.window(TOKENS, 5), patterns.chunked(TOKENS, 5)
LAYERS = {
    "mistral": (WINDOW, WINDOW),
    "phi3": (WINDOW, WINDOW),
    **dict.fromkeys(("gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2"), (WINDOW, CAUSAL)),
    "llama4": (CHUNKED, CAUSAL),
    "modernbert": (FULL, patterns.band(TOKENS, 2, 2), FULL),  # local_attention=4 counts both sides together
}
GRID = (8, 8)  # swin's patches, in windows of 4 x 4; patches are merged by four then, to 4 x 4
STAGES = ((patterns.swin(GRID, 4), patterns.swin(GRID, 4, 2)), (patterns.full(16), patterns.full(16)))
# of all others: model.layers
BLOCKS = {
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
    "vit": "layers",
    "dinov2": "encoder.layer",
    "siglip": "encoder.layers",
    "clip_vision": "encoder.layers",
}


def without(graph: TokenGraph, padding: slice) -> TokenGraph:
    """The graph without edges from padding."""
    is_token = torch.ones(graph.num_src, dtype=torch.bool)
    is_token[padding] = False
    rule = lambda b, h, dst, src: is_token[src] & (dst >= 0)  # noqa: E731
    return graph & TokenGraph.from_rule(rule, graph.num_dst, graph.num_src)


# Whisper's two convolutions of width 3, the second with stride 2: two frames on either side of 2 dst
CONVOLUTIONS = TokenGraph.from_rule(lambda b, h, dst, src: (src - 2 * dst).abs() <= 2, SOUNDS, FRAMES)


def subjects(name: str) -> dict[str, Subject]:
    """All audits of a family, by what is audited."""
    family = FAMILIES[name]
    made = {"text": of_text, "pixels": of_pictures, "both": of_clip, "pair": of_pairs, "sound": of_sound}
    found: dict[str, Subject] = made[family.inputs](name)
    if name in EXPERTS:
        return {what: replace(subject, dtype=torch.float32) for what, subject in found.items()}
    return found


def of_text(name: str) -> dict[str, Subject]:
    """A decoder or an encoder: all layers, each alone, with padding, and decoding."""
    encodes = "Masked" in FAMILIES[name].model
    graphs = LAYERS.get(name, (FULL, FULL) if encodes else (CAUSAL, CAUSAL))
    padding = slice(TOKENS - PAD, None) if encodes else slice(PAD)
    # chunks begin after padding
    padded = (patterns.documents([PAD, 5, TOKENS - PAD - 5]), CAUSAL) if name == "llama4" else graphs
    padded = tuple(without(graph, padding) for graph in padded)
    side = "right" if encodes else "left"
    return {
        "tokens": Subject(graphs, (TOKENS,)),
        **layers(BLOCKS.get(name, "model.layers"), graphs, 32, input_ids=TEXT),
        f"padding on the {side}": Subject(padded, (TOKENS,), masked(padding), dtype=torch.float32),
        **({} if encodes else {"decoding": Subject(graphs, (TOKENS,), decoded)}),
    }


def layers(
    blocks: str, graphs: Graphs, width: int, within: str = "", label: str = "layer", **inputs: Any
) -> dict[str, Subject]:
    """Each layer in its place, against its own graph; ``within``: of this part of the model."""

    def alone(number: int) -> Callable[[nn.Module], nn.Module]:
        return lambda model: PartOf(model.get_submodule(within), f"{blocks}.{number}", **inputs)

    return {
        f"{label} {number}": Subject((graph,), (graph.num_src, width), of=alone(number))
        for number, graph in enumerate(graphs)
    }


def of_pictures(name: str) -> dict[str, Subject]:
    """From the pixels of a patch to all tokens, the class token among them, and each layer alone."""
    if name == "swin":
        found = {"patches": Subject((patterns.cross(16, 64),), (64, 12), painted)}
        for s, graphs in enumerate(STAGES):
            blocks, label = f"encoder.layers.{s}.blocks", f"stage {s} layer"
            found |= layers(blocks, graphs, 16 << s, "", label, pixel_values=PICTURE)
        return found
    tokens = 16 if name == "siglip" else 17
    graphs = (patterns.full(tokens),) * 2
    patches = Subject((patterns.cross(tokens, 16),), (16, 48), painted)
    return {"patches": patches, **layers(BLOCKS[name], graphs, 32, pixel_values=PICTURE)}


def of_clip(name: str) -> dict[str, Subject]:
    """CLIP's text is causal; its pictures are those of ``clip_vision``, and meet it in one number alone."""
    text = Subject((CAUSAL, CAUSAL), (TOKENS,), of=lambda model: model.text_model)
    padding = slice(TOKENS - PAD, None)
    graphs = (without(CAUSAL, padding),) * 2
    return {
        "text": text,
        "text, padding on the right": replace(text, graphs=graphs, call=masked(padding), dtype=torch.float32),
        **layers("encoder.layers", (CAUSAL, CAUSAL), 32, "text_model", "text layer", input_ids=TEXT),
    }


def of_pairs(name: str) -> dict[str, Subject]:
    """An encoder of text, its decoder, and what goes from the one to the other."""
    base, blocks = ("", "block") if name == "t5" else ("model.", "layers")
    given = {"input_ids": TEXT, "decoder_input_ids": ANSWERED}
    padding = slice(TOKENS - PAD, None)
    across = Subject((patterns.cross(ANSWER, TOKENS),), (TOKENS,), reads, f"{base}encoder.embed_tokens")
    padded = (without(across.graphs[0], padding),)
    call = masked(padding, decoder_input_ids=ANSWERED)
    padded_across = replace(across, graphs=padded, call=call, dtype=torch.float32)
    return {
        "encoder": Subject((FULL, FULL), (TOKENS,), of=lambda model: model.get_encoder()),
        **layers(f"{base}encoder.{blocks}", (FULL, FULL), 32, "", "encoder layer", **given),
        **of_decoder(f"{base}decoder", blocks, **given),
        "encoder to decoder": across,
        "encoder to decoder, padding on the right": padded_across,
    }


def of_sound(name: str) -> dict[str, Subject]:
    """Whisper: frames of a sound, its encoder, its decoder, and from frames to words."""
    given = {"input_features": SOUND, "decoder_input_ids": ANSWERED}
    whole = Subject((patterns.cross(ANSWER, FRAMES),), (FRAMES, 8), of_frames)
    encoder = replace(whole, of=lambda model: model.get_encoder())
    frames = (patterns.cross(SOUNDS, FRAMES),)
    return {
        "frames": replace(encoder, graphs=(CONVOLUTIONS,), call=lambda m, x: states(m, x)[0]),
        "encoder": replace(encoder, graphs=frames, call=lambda m, x: states(m, x)[-1]),
        **layers("model.encoder.layers", (patterns.full(SOUNDS),) * 2, 32, "", "encoder layer", **given),
        **of_decoder("model.decoder", "layers", **given),
        "encoder to decoder": whole,
    }


def of_frames(model: nn.Module, x: Tensor) -> Any:
    return model(x.mT, decoder_input_ids=ANSWERED.expand(len(x), -1))


def states(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    out: Any = model(x.mT, output_hidden_states=True)
    return (*out.hidden_states[:-1], out.last_hidden_state)


def of_decoder(decoder: str, blocks: str, **given: Tensor) -> dict[str, Subject]:
    """The decoder half of an encoder-decoder, whose encoder has the same input in all samples."""
    graphs = (patterns.causal(ANSWER),) * 2
    source = {name: value for name, value in given.items() if name != "decoder_input_ids"}

    def call(model: nn.Module, ids: Tensor, **more: Any) -> Any:
        inputs = {name: repeated(value, ids, model) for name, value in source.items()}
        return model(**inputs, decoder_input_ids=ids, **more)

    def padded(model: nn.Module, ids: Tensor) -> Any:
        return call(model, ids, decoder_attention_mask=valid(slice(PAD), ANSWER).expand(len(ids), -1))

    whole = Subject(graphs, (ANSWER,), call, f"{decoder}.embed_tokens")
    tokens = tuple(without(graph, slice(PAD)) for graph in graphs)
    return {
        "decoder": whole,
        **layers(f"{decoder}.{blocks}", graphs, 32, "", "decoder layer", **given),
        "decoder, padding on the left": replace(whole, graphs=tokens, call=padded, dtype=torch.float32),
        "decoding": replace(whole, call=lambda m, x: decoded(m, x, call)),
    }


def repeated(value: Tensor, like: Tensor, model: nn.Module) -> Tensor:
    """One sample's input for as many samples, in the model's dtype."""
    value = value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
    return value.expand(len(like), *value.shape[1:])


def valid(padding: slice, tokens: int) -> Tensor:
    """The 2-D mask of one sample: 1 for a token, 0 for padding."""
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, padding] = 0
    return mask


def masked(padding: slice, **more: Tensor) -> Callable[[nn.Module, Tensor], Any]:
    """A call with the same padding in all samples."""

    def call(model: nn.Module, ids: Tensor) -> Any:
        others = {name: value.expand(len(ids), -1) for name, value in more.items()}
        return model(input_ids=ids, attention_mask=valid(padding, TOKENS).expand(len(ids), -1), **others)

    return call


def reads(model: nn.Module, ids: Tensor) -> Any:
    return model(input_ids=ids, decoder_input_ids=ANSWERED.expand(len(ids), -1))


def decoded(
    model: nn.Module, ids: Tensor, call: Callable[..., Any] = lambda model, ids, **more: model(ids, **more)
) -> Tensor:
    """The logits of all tokens, fed in chunks with a cache."""
    # its name since transformers 5.24, and before
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, logits = None, []
    for chunk in ids.split(CHUNKS[ids.shape[1]], 1):
        out = call(model, chunk, **{name: cache}, use_cache=True)
        cache = out[name]
        logits.append(out.logits)
    return torch.cat(logits, 1)


def painted(model: nn.Module, x: Tensor) -> Any:
    """A vision model on pictures of patches ``[B, patches, 3 size size]``."""
    side = int(x.shape[1] ** 0.5)
    pixels = x.view(-1, side, side, 3, 16 // side, 16 // side).permute(0, 3, 1, 4, 2, 5)
    return model(pixel_values=pixels.reshape(-1, 3, 16, 16))


def audited(name: str, subject: Subject, **options: Any) -> Verdict:
    """The verdict on this library's attention."""
    model = build(name)
    model.set_attn_implementation("gnn_attention")
    options = {"call": subject.call, "embedding": subject.embedding, "dtype": subject.dtype, **options}
    return audit(subject.of(model), subject.graphs, subject.shape, **options)
