"""What is audited of the families of ``hf_models``: the graph that each promises, how it is asked, and why
what leaks does.

``python -m tests.support.hf_audits [FAMILY ...]`` audits them and prints a table; without families it also
writes the record that ``test_audit_families.py`` reads.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from support.hf_models import FAMILIES, TOKENS, VOCABULARY, build
from torch import Tensor, nn

import gnn_attention as ga
import gnn_attention.huggingface
from gnn_attention import TokenGraph, patterns
from gnn_attention.interpret.audit import PartOf, Verdict, audit

RECORD = Path(__file__).parents[1] / "records" / "2026-11-20-audit-families.json"
IMPLEMENTATIONS = ("gnn_attention", "eager", "sdpa", "flex_attention")
ANSWER, PAD, FRAMES, SOUNDS = (
    7,
    3,
    32,
    16,
)  # tokens of a decoder, of padding, and of a sound before and after its convolutions
CHUNKS = {TOKENS: (7, 1, 1, 3), ANSWER: (4, 1, 2)}  # how decoding is fed
EXPERTS = ("gpt_oss", "deepseek_v3", "mixtral")  # torch's grouped_mm, which their experts use, has no float64

DRAW = torch.Generator().manual_seed(3)
TEXT = torch.randint(3, VOCABULARY - 1, (1, TOKENS), generator=DRAW)
SAID = torch.randint(3, VOCABULARY - 1, (1, ANSWER), generator=DRAW)
PICTURE = torch.randn(1, 3, 16, 16, generator=DRAW)
SOUND = torch.randn(1, 8, FRAMES, generator=DRAW)


@dataclass(frozen=True)
class Subject:
    """One audit of a model: ``graphs``, one for each layer, are promised of ``of(model)``, called by
    ``call``.
    """

    graphs: tuple[TokenGraph, ...]
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
}  # of all others: model.layers


def without(graph: TokenGraph, padding: slice) -> TokenGraph:
    """The graph in which nobody hears padding."""
    heard = torch.ones(graph.num_src, dtype=torch.bool)
    heard[padding] = False
    tokens = TokenGraph.from_rule(
        lambda b, h, dst, src: heard[src] & (dst >= 0), graph.num_dst, graph.num_src, name="tokens"
    )
    return replace(graph & tokens, name=f"{graph.name} without padding")


def frames_heard() -> TokenGraph:
    """Whisper's two convolutions of width 3, the second with stride 2: two frames on either side of 2 dst."""
    return TokenGraph.from_rule(
        lambda b, h, dst, src: (src - 2 * dst).abs() <= 2, SOUNDS, FRAMES, name="two convolutions"
    )


def subjects(name: str) -> dict[str, Subject]:
    """All audits of a family, by what is audited."""
    family = FAMILIES[name]
    made = {
        "text": of_text,
        "pixels": of_pictures,
        "both": lambda _: of_clip(),
        "pair": of_pairs,
        "sound": lambda _: of_sound(),
    }
    found: dict[str, Subject] = made[family.inputs](name)
    least = torch.float32 if name in EXPERTS else torch.float64
    return {
        what: replace(subject, dtype=min(subject.dtype, least, key=lambda d: d.itemsize))
        for what, subject in found.items()
    }


def of_text(name: str) -> dict[str, Subject]:
    """A decoder or an encoder: all layers, each alone, with padding, and decoding."""
    encodes = "Masked" in FAMILIES[name].model
    graphs = LAYERS.get(name, (FULL, FULL) if encodes else (CAUSAL, CAUSAL))
    padding = slice(TOKENS - PAD, None) if encodes else slice(PAD)
    padded = (
        (patterns.documents([PAD, 5, TOKENS - PAD - 5]), CAUSAL) if name == "llama4" else graphs
    )  # chunks begin after padding
    side = "right" if encodes else "left"
    return {
        "tokens": Subject(graphs, (TOKENS,)),
        **layers(BLOCKS.get(name, "model.layers"), graphs, 32, input_ids=TEXT),
        f"padding on the {side}": Subject(
            tuple(without(graph, padding) for graph in padded),
            (TOKENS,),
            masked(padding),
            dtype=torch.float32,
        ),
        **({} if encodes else {"decoding": Subject(graphs, (TOKENS,), decoded)}),
    }


def layers(
    blocks: str,
    graphs: tuple[TokenGraph, ...],
    width: int,
    within: str = "",
    label: str = "layer",
    **inputs: Any,
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
        stages = [
            layers(
                f"encoder.layers.{s}.blocks", STAGES[s], 16 << s, "", f"stage {s} layer", pixel_values=PICTURE
            )
            for s in (0, 1)
        ]
        return {"patches": Subject((patterns.cross(16, 64),), (64, 12), painted), **stages[0], **stages[1]}
    tokens = 16 if name == "siglip" else 17
    graphs = (patterns.full(tokens),) * 2
    patches = Subject((patterns.cross(tokens, 16),), (16, 48), painted)
    return {"patches": patches, **layers(BLOCKS[name], graphs, 32, pixel_values=PICTURE)}


def of_clip() -> dict[str, Subject]:
    """CLIP's text is causal, its pictures are not; the two meet in one number alone."""
    text = Subject((CAUSAL, CAUSAL), (TOKENS,), of=lambda model: model.text_model)
    padding = slice(TOKENS - PAD, None)
    graphs = (without(CAUSAL, padding),) * 2
    picture = Subject((patterns.cross(17, 16),), (16, 48), painted, of=lambda model: model.vision_model)
    return {
        "text": text,
        "text, padding on the right": replace(text, graphs=graphs, call=masked(padding), dtype=torch.float32),
        **layers("encoder.layers", (CAUSAL, CAUSAL), 32, "text_model", "text layer", input_ids=TEXT),
        "patches": picture,
        **layers(
            "encoder.layers",
            (patterns.full(17),) * 2,
            32,
            "vision_model",
            "picture layer",
            pixel_values=PICTURE,
        ),
    }


def of_pairs(name: str) -> dict[str, Subject]:
    """An encoder of text, its decoder, and what goes from the one to the other."""
    base, blocks = ("", "block") if name == "t5" else ("model.", "layers")
    given = {"input_ids": TEXT, "decoder_input_ids": SAID}
    padding = slice(TOKENS - PAD, None)
    across = Subject((patterns.cross(ANSWER, TOKENS),), (TOKENS,), reads, f"{base}encoder.embed_tokens")
    padded = {
        "graphs": (without(across.graphs[0], padding),),
        "call": masked(padding, decoder_input_ids=SAID),
    }
    return {
        "encoder": Subject((FULL, FULL), (TOKENS,), of=lambda model: model.get_encoder()),
        **layers(f"{base}encoder.{blocks}", (FULL, FULL), 32, "", "encoder layer", **given),
        **of_decoder(f"{base}decoder", blocks, **given),
        "encoder to decoder": across,
        "encoder to decoder, padding on the right": replace(across, **padded, dtype=torch.float32),
    }


def of_sound() -> dict[str, Subject]:
    """Whisper: frames of a sound, its encoder, its decoder, and from frames to words."""
    given = {"input_features": SOUND, "decoder_input_ids": SAID}
    encoder = {"of": lambda model: model.get_encoder()}
    return {
        "frames": Subject(
            (frames_heard(),),
            (FRAMES, 8),
            lambda m, x: m(x.mT, output_hidden_states=True).hidden_states[0],
            **encoder,
        ),
        "encoder": Subject(
            (patterns.cross(SOUNDS, FRAMES),), (FRAMES, 8), lambda m, x: m(x.mT).last_hidden_state, **encoder
        ),
        **layers("model.encoder.layers", (patterns.full(SOUNDS),) * 2, 32, "", "encoder layer", **given),
        **of_decoder("model.decoder", "layers", **given),
        "encoder to decoder": Subject(
            (patterns.cross(ANSWER, FRAMES),),
            (FRAMES, 8),
            lambda m, x: m(x.mT, decoder_input_ids=SAID.expand(len(x), -1)),
        ),
    }


def of_decoder(decoder: str, blocks: str, **given: Tensor) -> dict[str, Subject]:
    """The decoder half of an encoder-decoder, whose encoder hears the same in all samples."""
    graphs = (patterns.causal(ANSWER),) * 2
    source = {name: value for name, value in given.items() if name != "decoder_input_ids"}

    def listening(model: nn.Module, ids: Tensor, **more: Any) -> Any:
        return model(
            **{name: repeated(value, ids, model) for name, value in source.items()},
            decoder_input_ids=ids,
            **more,
        )

    def padded(model: nn.Module, ids: Tensor) -> Any:
        return listening(model, ids, decoder_attention_mask=valid(slice(PAD), ANSWER).expand(len(ids), -1))

    whole = Subject(graphs, (ANSWER,), listening, f"{decoder}.embed_tokens")
    without_padding = tuple(without(graph, slice(PAD)) for graph in graphs)
    return {
        "decoder": whole,
        **layers(f"{decoder}.{blocks}", graphs, 32, "", "decoder layer", **given),
        "decoder, padding on the left": replace(
            whole, graphs=without_padding, call=padded, dtype=torch.float32
        ),
        "decoding": replace(whole, call=lambda m, x: decoded(m, x, listening)),
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
    """An encoder-decoder, asked about its encoder's tokens."""
    return model(input_ids=ids, decoder_input_ids=SAID.expand(len(ids), -1))


def decoded(
    model: nn.Module, ids: Tensor, call: Callable[..., Any] = lambda model, ids, **more: model(ids, **more)
) -> Tensor:
    """The logits of all tokens, fed in chunks with a cache."""
    cache, said = None, []
    for chunk in ids.split(CHUNKS[ids.shape[1]], 1):
        out = call(model, chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        said.append(out.logits)
    return torch.cat(said, 1)


def painted(model: nn.Module, x: Tensor) -> Any:
    """A vision model on pictures of patches ``[B, patches, 3 size size]``."""
    side = int(x.shape[1] ** 0.5)
    size = 16 // side
    return model(
        pixel_values=x.view(-1, side, side, 3, size, size).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 16, 16)
    )


@contextmanager
def eagerly() -> Iterator[None]:
    """FlexAttention without its compiler, which transformers calls for every mask."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


def audited(name: str, subject: Subject, implementation: str, **options: Any) -> Verdict:
    """The verdict; ValueError or NotImplementedError where a model or an implementation refuses."""
    model = build(name)
    model.set_attn_implementation(implementation)
    options = {"embedding": subject.embedding, "dtype": subject.dtype, **options}
    if implementation != "flex_attention":
        return audit(subject.of(model), subject.graphs, subject.shape, call=subject.call, **options)
    with eagerly():  # on a CPU it has no gradient: another input at each sender is the witness
        return audit(
            subject.of(model),
            subject.graphs,
            subject.shape,
            call=subject.call,
            witnesses=("perturbation", "nan"),
            **options,
        )


def found(name: str, subject: Subject, implementation: str) -> dict[str, Any]:
    """What the record says of an audit."""
    try:
        verdict = audited(name, subject, implementation)
    except IndexError as error:
        return {"verdict": "fails", "why": f"{error}: {ONE_BIAS}"}
    except (ValueError, NotImplementedError) as error:
        return {"verdict": "refused", "why": str(error).split(". ")[0]}
    said = "exact" if verdict.exact else "leaks" if not verdict.ok else "unused"
    figures = {"leaks": len(verdict.leaks), "unused": len(verdict.unused), "poisoned": len(verdict.poisoned)}
    return {"verdict": said, **figures, **({} if verdict.exact else {"why": reason(verdict, implementation)})}


EVEN = (
    "the receivers are padding whose senders are all padding too: transformers' eager_mask holds finfo.min, not -inf, so all "
    "their logits are equal and they hear everybody evenly, the future too; no token hears them"
)
FAINT = (
    "SwinLayer.get_attn_mask adds -100.0, not -inf, between parts that the cyclic shift alone brings together: a weight of "
    "e^-100, 1e-44, is left"
)
EVEN_BIAS = (
    "the receivers are padding whose senders are all padding too: transformers' create_position_bias_mask for sdpa holds "
    "finfo.min where its docstring says -inf, so they hear everybody evenly, the future too; no token hears them"
)
ONE_BIAS = (
    "flex_attention_forward reads position_bias[batch_idx, ...], but T5's bias [1, heads, dst, src] is that of all samples, so "
    "batches of more than one sample fail"
)


def reason(verdict: Verdict, implementation: str) -> str:
    """Why information flows where it must not, found in transformers' code; a question mark for anything
    else.
    """
    deaf = torch.stack([graph.in_degree() == 0 for graph in verdict.graphs]).any(
        0
    )  # in some layer they hear nobody
    if verdict.unused or verdict.crosses_samples:
        return "?"
    if all(leak.size < 1e-40 and "perturbation" not in leak.witnesses for leak in verdict.leaks):
        return FAINT
    even = {"eager": EVEN, "sdpa": EVEN_BIAS}
    return even.get(implementation, "?") if all(deaf[leak.dst] for leak in verdict.leaks) else "?"


def swept(names: list[str]) -> list[dict[str, Any]]:
    """A row for each subject of the families."""
    rows = []
    for name in names:
        for what, subject in subjects(name).items():
            start = time.process_time()
            graphs, dtype = (
                [graph.name for graph in subject.graphs],
                str(subject.dtype).removeprefix("torch."),
            )
            by = {implementation: found(name, subject, implementation) for implementation in IMPLEMENTATIONS}
            seconds = round(time.process_time() - start, 2)
            rows.append(
                {
                    "family": name,
                    "subject": what,
                    "graphs": graphs,
                    "dtype": dtype,
                    "by": by,
                    "cpu_s": seconds,
                }
            )
            print(
                f"{name:12} {what:42} " + " ".join(by[i]["verdict"] for i in IMPLEMENTATIONS), file=sys.stderr
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each family, a column for each implementation: how many audits are exact, and what the
    others are.
    """
    lines = ["| family | " + " | ".join(IMPLEMENTATIONS) + " |", "|---|" + "---|" * len(IMPLEMENTATIONS)]
    for name in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == name]
        lines.append(
            f"| {name} | "
            + " | ".join(cell(mine, implementation) for implementation in IMPLEMENTATIONS)
            + " |"
        )
    return "\n".join(lines)


def cell(rows: list[dict[str, Any]], implementation: str) -> str:
    """One cell of the table."""
    exact = [row for row in rows if row["by"][implementation]["verdict"] == "exact"]
    others = [(row["subject"], row["by"][implementation]) for row in rows if row not in exact]
    if len({by["verdict"] for _, by in others}) == 1 and len(others) == len(rows):
        return str(others[0][1]["verdict"])
    said = [
        f"{what}: {by['leaks']} leaks" if "leaks" in by else f"{what}: {by['verdict']}" for what, by in others
    ]
    return "; ".join([f"{len(exact)} of {len(rows)} exact", *said])


def main(names: list[str]) -> None:
    """Audit the families, print the table, and write the record of all."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = swept(names or list(FAMILIES))
    print(table(rows))
    if not names:
        write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """The record: versions, then a line for each subject."""
    packages = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gnn_attention": ga.__version__,
    }
    versions = {"python": platform.python_version(), **packages}
    head = {
        "date": "2026-11-20",
        "versions": versions,
        "threads": 1,
        "cpu_s": round(sum(row["cpu_s"] for row in rows), 1),
    }
    body = ",\n  ".join(json.dumps(row) for row in rows)
    RECORD.write_text(json.dumps(head)[:-1] + f', "rows": [\n  {body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
