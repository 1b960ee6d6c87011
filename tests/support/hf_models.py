"""Build tiny models of many Hugging Face families from configs, and compare two implementations of attention.

The logits of newly initialised models are so small that a missing softcap, bias or window would hardly show.
Therefore q and k are made larger, and sinks and position biases are drawn at random.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gnn_attention as ga

# This import registers "gnn_attention" as an implementation of attention.
import gnn_attention.huggingface
from gnn_attention import patterns

VOCABULARY, TOKENS, BATCH = 64, 12, 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SMALL = {**SIZES, **TEXT, **IDS}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True)
class Family:
    """A config class, a model class, sizes, a kind of inputs, and whether these include a mask of padding."""

    config: str
    model: str
    sizes: dict[str, Any] = field(default_factory=lambda: GROUPED)
    inputs: str = "text"
    padded: bool = True
    # Only these families are in the default run.
    default: bool = False


SEQ2SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SEQ2SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SEQ2SEQ |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 1, **IDS}
HYBRID = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA2 = {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
DEEPSEEK = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
DEEPSEEK |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
# In DeepSeek's sparse attention each token attends to 4 senders that an indexer selects.
SPARSE = {**SMALL, **DEEPSEEK, "head_dim": 8, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
SHARED = {**SPARSE, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
DOTS3 = {**SPARSE, "moe_intermediate_size": 16, "shared_experts_intermediate_size": 16, "sliding_window": 5}
DOTS3 |= {"layer_types": ["indexed_attention", "sliding_attention"], "head_dim": 24}
DOTS3 |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16}
DOTS3 |= {"swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 12}
GLM5 = {**SPARSE, "num_hidden_layers": 4, "qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2}
GLM5 |= {"linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 2, "hc_mult": 2}
GLM5 |= {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"]}
GLM5 |= {"indexer_types": ["full", "full", "shared", "full"]}
MINIMAX3 = {**GROUPED, **EXPERTS, "dense_intermediate_size": 48, "shared_intermediate_size": 48}
MINIMAX3 |= {"rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 3}
MINIMAX3 |= {"index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}
MINIMAX3 |= {"mlp_layer_types": ["dense", "sparse"]}
LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 5}
LLAMA4 |= {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
MODERNBERT = {"local_attention": 4, "global_attn_every_n_layers": 2, "num_hidden_layers": 3}
MODERNBERT |= {"cls_token_id": 1, "sep_token_id": 2}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "window_size": 4}
SWIN |= {"depths": [2, 2], "num_heads": [2, 4]}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
T5 |= {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": None}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}


def causal(name: str, sizes: dict[str, Any] = GROUPED, config: str = "", default: bool = False) -> Family:
    return Family(config or f"{name}Config", f"{name}ForCausalLM", sizes, default=default)


def masked(name: str, sizes: dict[str, Any] = SMALL, default: bool = False) -> Family:
    return Family(f"{name}Config", f"{name}ForMaskedLM", sizes, default=default)


def vision(name: str, sizes: dict[str, Any] = PICTURES, default: bool = False) -> Family:
    return Family(f"{name}Config", f"{name}Model", sizes, "pixels", padded=False, default=default)


def pairs(name: str, sizes: dict[str, Any], default: bool = False, **more: Any) -> Family:
    config, model = f"{name}Config", f"{name}ForConditionalGeneration"
    return Family(config, model, sizes, **{"inputs": "pair", **more}, default=default)


FAMILIES = {
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": None}),
    "llama": causal("Llama", default=True),
    "mistral": causal("Mistral", {**GROUPED, "sliding_window": 5}, default=True),
    "gemma": causal("Gemma"),
    "gemma2": causal("Gemma2", {**GROUPED, **GEMMA2}, default=True),
    "gemma3": causal("Gemma3", {**GROUPED, **HYBRID, "query_pre_attn_scalar": 8}, "Gemma3TextConfig"),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3"),
    "gpt_oss": causal("GptOss", {**GROUPED, **EXPERTS, **HYBRID}, default=True),
    "deepseek_v3": causal("DeepseekV3", {**SMALL, **DEEPSEEK}, default=True),
    "llama4": causal("Llama4", {**GROUPED, **EXPERTS, **LLAMA4}, "Llama4TextConfig"),
    "opt": causal("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bert": masked("Bert"),
    "modernbert": masked("ModernBert", {**SMALL, **MODERNBERT}, default=True),
    "vit": vision("ViT"),
    "clip_vision": vision("CLIPVision"),
    "swin": vision("Swin", SWIN, default=True),
    "t5": pairs("T5", T5, default=True),
    "whisper": pairs("Whisper", {**SEQ2SEQ, **WHISPER}, inputs="sound", padded=False),
}

# The layers of these families select the senders of each token.
SELECTING = {
    "deepseek_v32": causal("DeepseekV32", SPARSE, default=True),
    "axk2": causal("AXK2", SPARSE),
    "glm_moe_dsa": causal("GlmMoeDsa", SHARED),
    "hy_v4": causal("HYV4", SHARED),
    "dots3_note": causal("Dots3Note", DOTS3, "Dots3NoteTextConfig"),
    "mistral_large4": Family("MistralLarge4TextConfig", "MistralLarge4TextModel", SHARED),
    "glm5_next": Family("Glm5NextTextConfig", "Glm5NextTextModel", GLM5),
    "minimax_m3_vl": causal("MiniMaxM3VL", MINIMAX3, "MiniMaxM3VLTextConfig", default=True),
}
# The layers of this family add a learned mask and drop senders.
MASKING = {"doge": causal("Doge", {**GROUPED, "keep_window_size": 4}, default=True)}
EVERY = FAMILIES | SELECTING | MASKING
DRAWN_LARGER = (
    r"\.(q|k|query|key|[qk]_(proj|lin|b_proj)|kv_b_proj|c_attn|qkv_proj|query_key_value|Wqkv)\.weight$"
)
NORMS = r"\.[qk]_(norm|layernorm)\.weight$"
DRAWN = r"(sinks|\.A|relative_attention_bias\.weight|relative_position_bias_table)$"


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a model of a family in eval mode with large logits; ``changes`` go to the config."""
    family = EVERY[name]
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**{**family.sizes, **changes})
    config._attn_implementation = "eager"
    return sharpen(getattr(transformers, family.model)(config).eval())


def keep_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float64 where norms, routers, the softmax of eager attention and ``generate`` cast to float32."""

    def keep(x: torch.Tensor, dtype: Any) -> Any:
        return x.dtype if (dtype, x.dtype) == (torch.float32, torch.float64) else dtype

    def prevent_cast(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            if "dtype" in options:
                options["dtype"] = keep(x, options["dtype"])
            return function(x, *(keep(x, a) if isinstance(a, torch.dtype) else a for a in args), **options)

        monkeypatch.setattr(owner, name, call)

    prevent_cast(nn.functional, "softmax")
    prevent_cast(torch, "zeros_like")
    prevent_cast(torch.Tensor, "type")
    prevent_cast(torch.Tensor, "to")
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x.to(torch.float32))


def to_float64(model: Any) -> Any:
    """Convert a model to float64; it loops over experts, because torch's grouped matmul lacks float64."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    return model.double()


def build64(name: str, implementation: str = "eager", **changes: Any) -> Any:
    """Return a model of a family in float64 with an implementation of attention."""
    model = to_float64(build(name, **changes))
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def logits_of(model: Any, **inputs: Any) -> torch.Tensor:
    return model(**inputs).logits


CACHES = {"own": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


def generate(
    model: Any, inputs: dict[str, Any], implementation: str = "gnn_attention", **options: Any
) -> Any:
    """Generate greedily, and return the tokens and the scores of each step."""
    model.set_attn_implementation(implementation)
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    out = model.generate(**inputs, max_new_tokens=9, **options)
    return out.sequences, torch.stack(out.scores)


def some_graph(listed: bool = False) -> ga.TokenGraph:
    """Return an asymmetric graph with sinks and holes, in which every token attends to itself."""
    holes = patterns.dilated(64, 2, 2) - patterns.self_loops(64)
    graph = (patterns.window(64, 4) | patterns.sinks(64, 2)) - holes
    return ga.TokenGraph.from_edges(graph.edge_index, 64) if listed else graph


def as_mask(graph: ga.TokenGraph) -> torch.Tensor:
    """Return the mask of a graph's first tokens, with the four axes of SDPA."""
    return graph.mask()[:TOKENS, :TOKENS].expand(BATCH, 1, TOKENS, TOKENS)


def by_head() -> torch.Tensor:
    """Return a mask for SDPA in which each head has its own window."""
    return torch.stack([patterns.window(TOKENS, h + 1).mask() for h in range(4)]).expand(BATCH, -1, -1, -1)


def run_sdpa(model: Any, tokens: torch.Tensor, allowed: torch.Tensor | ga.TokenGraph) -> torch.Tensor:
    """Return the logits of a model with SDPA along a mask or a graph."""
    allowed = as_mask(allowed) if isinstance(allowed, ga.TokenGraph) else allowed
    model.set_attn_implementation("sdpa")
    logits = logits_of(model, input_ids=tokens, attention_mask=allowed)
    model.set_attn_implementation("gnn_attention")
    return logits


@torch.no_grad()
def sharpen(model: Any) -> Any:
    """Rescale parameters for logits of size 2 or more, and draw sinks and position biases of similar size."""
    for name, parameter in model.named_parameters():
        if re.search(DRAWN_LARGER, "." + name):
            parameter.mul_(0.24 / parameter.std())
        if re.search(NORMS, "." + name):
            parameter.fill_(2.0)
        if re.search(DRAWN, name):
            parameter.normal_()
    return model


def inputs(name: str, pad: str | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Return inputs of a family; with padding on the "left" or "right", the rows have 12, 8 and 5 tokens."""
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(3, VOCABULARY - 1, (BATCH, TOKENS), generator=rng)
    mask = torch.ones_like(text)
    if pad is not None:
        lengths = torch.tensor([[TOKENS], [8], [5]])
        index = torch.arange(TOKENS)
        mask = ((index < lengths) if pad == "right" else (index >= TOKENS - lengths)).long()
        text = text.masked_fill(mask == 0, 0)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=rng).to(dtype)
    answer = torch.randint(3, VOCABULARY - 1, (BATCH, 7), generator=rng)
    ids = {"input_ids": text} if pad is None else {"input_ids": text, "attention_mask": mask}
    sound = torch.randn(BATCH, 8, 32, generator=rng).to(dtype)
    return {
        "text": ids,
        "pixels": {"pixel_values": pixels},
        "pair": {**ids, "decoder_input_ids": answer},
        "sound": {"input_features": sound, "decoder_input_ids": answer},
    }[EVERY[name].inputs]


def result(name: str, model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """Return the model's output ``[positions, channels]`` without padding."""
    out = model(**inputs, **options)
    values = out.logits if "logits" in out else out.last_hidden_state
    if EVERY[name].inputs == "text" and "attention_mask" in inputs and inputs["attention_mask"].dim() == 2:
        return values[inputs["attention_mask"].bool()]
    return values.flatten(0, -2)


def difference(name: str, model: Any, inputs: dict[str, Any]) -> float:
    """Return the largest difference between our and eager attention, relative to the largest output."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = result(name, model, inputs)
        model.set_attn_implementation("gnn_attention")
        return float((result(name, model, inputs) - expected).abs().max() / expected.abs().max())


def gradients(name: str, model: Any, inputs: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of :func:`direction` of the output, by parameter."""
    model.zero_grad()
    direction(result(name, model, inputs, **options)).backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def direction(out: torch.Tensor) -> torch.Tensor:
    """Compute a fixed linear function of an output."""
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)).sum()
