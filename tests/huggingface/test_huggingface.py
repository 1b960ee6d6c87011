"""Hugging Face models on token graphs compute the same numbers as eager attention."""

# ruff: noqa: E402
from functools import partial

import pytest
import torch
from support.bounds import assert_exact
from support.extras import needs
from support.refusals import assert_refusals
from torch import nn

transformers = needs("transformers")

from support import hf_models
from support.hf_models import TOKENS, build64, generate, gradients, inputs, logits_of, some_graph
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as window_mask_function

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.huggingface import attention, interface, mask
from gnn_attention.huggingface._masks import LazyMask, graph_of_mask
from gnn_attention.verify.measure import FLOAT64_RTOL

pytestmark = pytest.mark.usefixtures("wide")
CAUSAL, FULL = nn.Module(), nn.Module()
CAUSAL.is_causal, FULL.is_causal = True, False
PADDING = {"text": (None, "left", "right"), "pair": (None, "right")}
# Another version of transformers may lack a model.
MODELS = {name: family for name, family in hf_models.EVERY.items() if hasattr(transformers, family.config)}


def mark_tier(name, *options):
    """Mark all families but the default ones as slow."""
    return pytest.param(name, *options, marks=() if MODELS[name].default else pytest.mark.slow)


CASES = [
    mark_tier(name, pad)
    for name, family in MODELS.items()
    for pad in (PADDING.get(family.inputs, (None,)) if family.padded else (None,))
    # MiniMax's own indexer scores padding on the left, so that its eager and sdpa attention differ.
    if (name, pad) != ("minimax_m3_vl", "left")
]


@pytest.mark.parametrize(("name", "pad"), CASES)
def test_logits_and_gradients_are_those_of_eager(name, pad):
    """Logits agree at every position that holds a token, and gradients for every parameter."""
    model, batch = build64(name), inputs(name, pad)
    assert hf_models.difference(name, model, batch) <= FLOAT64_RTOL
    output = gradients(name, model, batch)
    model.set_attn_implementation("eager")
    expected = gradients(name, model, batch)
    assert output.keys() == expected.keys()
    assert_exact(list(output.values()), list(expected.values()))


GENERATING = ["llama", "mistral", "gemma2", "t5", "doge"]
GENERATING += [name for name in hf_models.SELECTING if name in MODELS and "ForCausalLM" in MODELS[name].model]


@pytest.mark.parametrize("name", [mark_tier(name) for name in GENERATING])
@pytest.mark.parametrize("cache", hf_models.CACHES.values(), ids=list(hf_models.CACHES))
def test_generation_is_that_of_eager(name, cache):
    """It agrees with and without any cache, for prompts of different lengths, and beyond the window."""
    model, batch = build64(name), inputs(name, {"t5": "right", "minimax_m3_vl": None}.get(name, "left"))
    tokens, scores = generate(model, batch, "eager", **cache)
    output, output_scores = generate(model, batch, **cache)
    assert torch.equal(output, tokens)
    assert_exact(output_scores, scores)


@pytest.mark.parametrize("kind", ["bool", "heads", "keys", "lowest", "infinite", "numbers", "ones"])
def test_masks_with_four_axes(llama, kind):
    """True is an edge; -inf and the lowest number are no edges; other numbers are added."""
    tokens, allowed = inputs("llama")["input_ids"], hf_models.as_mask(some_graph())
    zeros = torch.zeros(allowed.shape).double()
    attention_mask = {
        "bool": allowed,
        "heads": hf_models.by_head(),
        "keys": allowed[:, :, -1:] | (torch.arange(TOKENS) == 0),
        "lowest": zeros.masked_fill(~allowed, torch.finfo(torch.float64).min),
        "infinite": zeros.masked_fill(~allowed, -torch.inf),
        # The same number everywhere is a bias, as in a fresh Doge, and not a table of edges.
        "ones": torch.ones(allowed.shape).double(),
        "numbers": torch.randn(allowed.shape).double().masked_fill(~allowed, -torch.inf),
    }[kind]
    output = logits_of(llama, input_ids=tokens, attention_mask=attention_mask)
    assert_exact(output, hf_models.run_sdpa(llama, tokens, attention_mask))


WRONG_MASKS = [
    (torch.full((1, 1, 4, 4), torch.nan), ValueError, "holds NaN or"),
    (torch.ones(1, 1, 4, 4).long(), TypeError, "must be bool .* or float .*, got torch.int64"),
    (torch.ones(4, 4).bool(), ValueError, r"must be \[batch, heads, 4, 4\], got \[4, 4\]"),
    (torch.ones(1, 1, 4, 3).bool(), ValueError, r"heads, 4, 4\], got \[1, 1, 4, 3\]"),
]


def test_a_fresh_doge_generates():
    """At first its dynamic mask is 1.0 everywhere, and its selections vary by head and sample."""
    model, batch = build64("doge", keep_window_size=64), inputs("doge")
    for part in model.model.layers:
        nn.init.zeros_(part.self_attn.A)
    tokens, scores = generate(model, batch, "eager")
    output, output_scores = generate(model, batch)
    assert torch.equal(output, tokens)
    assert_exact(output_scores, scores)


def test_masks_are_read_once_for_all_layers_and_again_when_they_changed():
    assert_refusals(
        (partial(graph_of_mask, mask, 4, 4), error, message) for mask, error, message in WRONG_MASKS
    )
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    first, _ = graph_of_mask(mask, 4, 4)
    assert graph_of_mask(mask, 4, 4)[0] is first
    mask[..., 0] = False
    assert graph_of_mask(mask, 4, 4)[0].num_edges == 12
    # A static cache adds to the tensor that it passed as q_offset.
    offset = torch.tensor(2)
    lazy = build_mask(dst=1, src=8, q_offset=offset)
    offset += 5
    assert lazy.layout.graph.in_degree().tolist() == [3]


def build_mask(function=causal_mask_function, batch=2, dst=5, src=5, **kwargs):
    """Build a mask with the arguments of transformers."""
    return mask(batch_size=batch, q_length=dst, kv_length=src, mask_function=function, device="cpu", **kwargs)


def test_the_lazy_mask_is_what_generate_needs_and_otherwise_a_tensor():
    lazy, dense = build_mask(), torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5)
    assert lazy.shape == lazy.size() == dense.shape
    assert (lazy.size(-1), lazy.ndim, lazy.dim(), lazy.dtype) == (5, 4, 4, torch.bool)
    assert lazy.contiguous() is lazy.to("cpu") is build_mask(attention_mask=lazy, dst=1) is lazy
    assert torch.equal(lazy.dense(), dense)
    assert torch.equal(lazy[:, :, :2, :3], dense[:, :, :2, :3])
    assert torch.equal(torch.where(lazy, 1.0, 0.0), dense.float())
    assert torch.equal(torch.cat([dense & lazy, lazy]), torch.cat([dense, dense]))
    assert torch.equal(lazy.to(torch.float32), dense.float())
    assert torch.equal(lazy.expand(2, 3, 5, 5), dense.expand(2, 3, 5, 5))


def test_adding_it_to_logits_is_refused():
    """A model's own attention, written for the mask of eager, would add +1 at edges and 0 at padding."""
    uses = [
        lambda: torch.zeros(2, 1, 5, 5) + build_mask(),
        lambda: torch.zeros(2, 1, 5, 5).add_(build_mask()[:, :, :, :5]),
        lambda: (1.0 - build_mask().expand(2, 3, 5, 5)) * -1e9,
    ]
    message = "computes with the bool mask as if it were one of 0 and -inf"
    assert_refusals((use, NotImplementedError, message) for use in uses)
    assert float((1.0 - build_mask().float()).sum()) == 20  # float() asks for numbers.


CHUNKS = masking_utils.chunked_overlay(2, torch.zeros(2, dtype=torch.int64))
PACKED = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
# A name has a rule, and whether its graph is cached.
RULES = {
    "causal": (causal_mask_function, True),
    "window": (window_mask_function(3), True),
    "chunks": (masking_utils.and_masks(causal_mask_function, CHUNKS), False),
    "packed": (masking_utils.packed_sequence_mask_function(PACKED), False),
    "of the user's": (lambda b, h, dst, src: src + 2 >= dst, False),
}


@pytest.mark.parametrize("pad", [None, "left", "right", "same"])
@pytest.mark.parametrize("name", RULES)
def test_the_graph_is_the_mask_of_transformers(name, pad):
    """It equals transformers' own mask with padding and offsets."""
    rule, _ = RULES[name]
    rows = {
        "left": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
        "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "same": [[0, 1, 1, 1, 1, 1, 1]] * 2,
    }
    tokens = None if pad is None else torch.tensor(rows[pad]).bool()
    sizes = {"q_length": 3, "kv_length": 6, "q_offset": 4, "kv_offset": 1}
    lazy = build_mask(rule, dst=3, src=6, q_offset=4, kv_offset=1, attention_mask=tokens)
    options = {"batch_size": 2, "mask_function": rule, "allow_is_causal_skip": False}
    assert torch.equal(lazy.dense(), masking_utils.sdpa_mask(attention_mask=tokens, **options, **sizes))
    assert (lazy.layout.graph.dst_offset, lazy.layout.graph.src_offset) == (4, 1)


@pytest.mark.parametrize("name", RULES)
def test_rules_without_tensors_are_cached_and_the_same_for_all_samples(name):
    """The key of the cache is their code and constants, so another width has another graph."""
    rule, is_cached = RULES[name]
    first, second = build_mask(rule, dst=7, src=7).layout, build_mask(rule, dst=7, src=7).layout
    assert (first.graph is second.graph) == is_cached == first.is_cached == (first.graph.batch is None)
    assert build_mask(window_mask_function(4), dst=7, src=7).layout.graph == patterns.window(7, 4)


def test_a_rule_for_single_numbers_is_mapped_over_the_pairs():
    """A function under vmap may index a table in steps, which broadcasting could not follow."""
    table = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    lazy = build_mask(lambda b, h, dst, src: table[b][dst] == table[b][src], use_vmap=True)
    assert torch.equal(lazy.dense()[:, 0], table[:, :, None] == table[:, None, :])


def test_all_layers_of_a_forward_pass_share_one_graph(llama, monkeypatch):
    """No layer turns the mask into a tensor."""
    graphs = []
    monkeypatch.setattr(LazyMask, "dense", lambda self: pytest.fail("the mask became a tensor"))
    monkeypatch.setattr(interface, "attend", lambda *a, **k: graphs.append(a[3]) or ga.attend(*a, **k))
    logits_of(llama, **inputs("llama", "left"))
    assert len(graphs) == 2
    assert graphs[0] is graphs[1]


def qkv(dst=5, src=5, dtype=torch.float64):
    """Draw queries, keys and values for four query heads and two key/value heads."""
    draw = torch.Generator().manual_seed(3)
    sizes = ((4, dst, 8), (2, src, 8), (2, src, 6))
    tensors = [torch.randn(2, *size, generator=draw, dtype=torch.float64) for size in sizes]
    return [torch.empty_like(x, dtype=dtype).copy_(x) for x in tensors]


def oracle(q, k, v, allowed, scale=8**-0.5, cap=None, bias=0.0, sinks=None):
    """Compute the dense formula in float64, with a sink for each head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = (logits + bias).masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    return (logits.softmax(-1).nan_to_num()[..., : k.shape[2]] @ v).transpose(1, 2)


LEFT_PADDED = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()


def test_everything_at_once():
    """All features are right together, with gradients; the bias has a value per pair, as in T5 and Swin."""
    scale = torch.tensor(0.7, dtype=torch.float64)
    tensors = [*qkv(), scale, torch.randn(4).double(), torch.randn(1, 4, 5, 5).double()]
    q, k, v, scale, sinks, bias = (x.requires_grad_() for x in tensors)
    # A cache has dropped four slots of padding: positions begin at 4, tables at 0.
    tokens = nn.functional.pad(LEFT_PADDED, (4, 0))
    lazy = build_mask(window_mask_function(3), q_offset=4, kv_offset=4, attention_mask=tokens)
    options = {"scaling": scale, "softcap": 2.0, "sinks": sinks, "position_bias": bias}
    out, weights = attention(nn.Module(), q, k, v, lazy, **options)
    allowed = patterns.window(5, 3).mask() & LEFT_PADDED[:, None, None, :]
    expected = oracle(q, k, v, allowed, scale, 2.0, bias, sinks)
    assert (out.is_contiguous(), weights) == (True, None)
    assert_exact(out, expected)
    assert_exact(*(torch.autograd.grad(y.square().sum(), tensors) for y in (out, expected)))
    assert (out[0, 0] == 0).all()  # Padding in front is isolated.
    output = attention(nn.Module(), q, k, v, lazy, s_aux=sinks)[0]
    assert_exact(output, oracle(q, k, v, allowed, sinks=sinks))


def test_weights_come_on_request():
    """The weights are those of eager, but an isolated receiver has none."""
    model, batch = build64("gpt_oss"), inputs("gpt_oss", "right")
    expected = model(**batch, output_attentions=True).attentions
    model.set_attn_implementation("gnn_attention")
    assert not model(**batch).attentions
    assert_exact(list(model(**batch, output_attentions=True).attentions), list(expected))


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])


def packed_logits(name="llama", **options):
    """Return a model and its logits for three documents in one row."""
    model = build64(name, "gnn_attention")
    return model, logits_of(
        model, input_ids=inputs(name, None)["input_ids"][:1, :8], position_ids=PACKED, **options
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_documents_that_leak_are_named(name):
    """If the mask holds only ones, transformers does not read documents off the positions."""
    with pytest.warns(
        UserWarning, match=r"begin again \(sample 0, token 4\).*: packed documents are not separated"
    ):
        packed_logits(name, attention_mask=torch.ones(1, 8, dtype=torch.int64))


def test_packed_documents_that_are_separated_are_silent():
    """transformers, a graph or padding separates them, and no warning, which is an error here, comes."""
    model, logits = packed_logits(use_cache=False)
    ids = inputs("llama", None)["input_ids"][:1, :8]
    with ga.use_graph(model, patterns.documents([4, 3, 1])):
        mask = torch.ones(1, 8, dtype=torch.int64)
        assert_exact(logits_of(model, input_ids=ids, position_ids=PACKED, attention_mask=mask), logits)
    assert_exact(logits[:, 4:7], logits_of(model, input_ids=ids[:, 4:7]))
    for mask in ([[0, 0, 0, 0, 1, 1, 1, 1]], [[1, 1, 1, 1, 0, 0, 0, 0]]):
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
        logits_of(model, input_ids=ids, position_ids=positions, attention_mask=torch.tensor(mask))


def test_what_lies_beyond_the_mask_is_no_token():
    """A static cache may have more slots than the 2-D mask."""
    q, k, v = qkv()
    ids = torch.tensor([[0, 1, 2, 0, 1]])
    lazy = build_mask(attention_mask=torch.ones(2, 3, dtype=torch.bool))
    attention(nn.Module(), q, k, v, lazy, position_ids=ids)
    with pytest.warns(UserWarning, match=r"sample 0, token 3"):
        attention(nn.Module(), q, k, v, build_mask(attention_mask=torch.ones(2, 4).bool()), position_ids=ids)


CUMULATED = torch.tensor([0, 4, 4, 7, 8], dtype=torch.int32)
STARTS = {"cu_seq_lens_q": CUMULATED, "cu_seq_lens_k": CUMULATED, "max_length_q": 4, "max_length_k": 4}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("mask", [None, torch.ones(1, 8, dtype=torch.int64)], ids=["no mask", "ones"])
def test_documents_of_cu_seq_lens_are_separated(name, mask):
    """They are separated although positions continue, and within windows and other graphs, too."""
    model, ids = build64(name, "gnn_attention"), inputs(name, None)["input_ids"][:1, :8]
    batch = {"input_ids": ids, "attention_mask": mask, **STARTS}
    documents = [logits_of(model, input_ids=part) for part in ids.split([4, 3, 1], 1)]
    assert_exact(logits_of(model, **batch), torch.cat(documents, 1))
    assert_exact(logits_of(model, **batch, position_ids=PACKED, use_cache=False), torch.cat(documents, 1))
    with ga.use_graph(model, some_graph()):
        graph_logits = logits_of(model, **batch)
    graph = some_graph() & patterns.window(64, 5) if name == "mistral" else some_graph()
    with ga.use_graph(model, graph & patterns.documents([4, 3, 57])):
        assert_exact(graph_logits, logits_of(model, input_ids=ids))
    with ga.use_graph(model, patterns.causal(8), replace=True):
        replacement = logits_of(model, **batch)
        assert_exact(replacement, logits_of(model, input_ids=ids))


def test_documents_without_a_mask():
    """The tokens of vision towers attend to their whole picture."""
    q, k, v = (x[:1] for x in qkv())
    allowed = patterns.documents([2, 3], causal=False).mask()
    assert_exact(
        attention(FULL, q, k, v, None, cu_seq_lens_q=torch.tensor([0, 2, 5]))[0], oracle(q, k, v, allowed)
    )
    allowed = allowed.tril()
    assert_exact(attention(CAUSAL, q, k, v, None, cu_seq_lens_q=[0, 2, 5])[0], oracle(q, k, v, allowed))


def test_without_a_mask_the_module_decides():
    """is_causal is an argument or an attribute; a single receiver, the newest token, attends to all."""
    q, k, v = qkv()
    full, past = torch.ones(5, 5).bool(), torch.ones(5, 5).tril().bool()
    for module, is_causal, allowed in ((CAUSAL, None, past), (FULL, None, full), (FULL, True, past)):
        assert_exact(attention(module, q, k, v, None, is_causal=is_causal)[0], oracle(q, k, v, allowed))
    assert_exact(attention(nn.Module(), q[:, :, :1], k, v, None)[0], oracle(q[:, :, :1], k, v, full[:1]))


PACKINGS = [
    (2, 5, [0, 2, 5], [0, 2, 5]),
    (1, 5, [0, 2, 4], [0, 2, 4]),
    (1, 5, [1, 2, 5], [1, 2, 5]),
    (1, 5, [0, 2, 5], [0, 3, 5]),
    (1, 1, [0, 1], None),
]


@pytest.mark.parametrize(("rows", "dst", "starts", "key_starts"), PACKINGS)
def test_cu_seq_lens_that_divide_no_row_are_refused(rows, dst, starts, key_starts):
    """Several rows, another length and the tokens of a cache are refused."""
    q, k, v = (x[:rows] for x in qkv())
    lengths = {"cu_seq_lens_q": torch.tensor(starts)}
    lengths |= {} if key_starts is None else {"cu_seq_lens_k": torch.tensor(key_starts)}
    message = rf"passes cu_seq_lens_q {starts} for {rows} rows of {dst} receivers and 5 senders"
    with pytest.raises(NotImplementedError, match=message.replace("[", r"\[")):
        attention(FULL, q[:, :, :dst], k, v, None, **lengths)


UNKNOWN = [
    (nn.Module(), 5, None, {}, ValueError, "does not say whether it is causal"),
    (CAUSAL, 3, None, {}, ValueError, "is causal and has 3 receivers and 5 senders, but got no mask"),
    (CAUSAL, 5, build_mask(), {"cache": object()}, NotImplementedError, "passes cache, a paged cache"),
    (CAUSAL, 5, build_mask(), {"sinks": torch.zeros(2, 4, 5, 1)}, NotImplementedError, "for each receiver"),
    (CAUSAL, 5, build_mask(src=4), {}, ValueError, "5 senders, but its mask has .5, 4."),
]


@pytest.mark.parametrize(("module", "dst", "attention_mask", "options", "error", "message"), UNKNOWN)
def test_what_cannot_be_known_is_refused(module, dst, attention_mask, options, error, message):
    """No call guesses that it may attend to the future."""
    q, k, v = qkv()
    with pytest.raises(error, match=message):
        attention(module, q[:, :, :dst], k, v, attention_mask, **options)


def test_dropout_is_for_training_and_dtypes_are_made_one_under_autocast_alone():
    call, module = (*qkv(), build_mask()), nn.Module()
    expected = attention(module.eval(), *call)[0]
    assert torch.equal(attention(module.eval(), *call, dropout=0.5)[0], expected)
    assert not torch.equal(attention(module.train(), *call, dropout=0.5)[0], expected)
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(module, q, k, v.bfloat16(), build_mask())[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="v must be like q"):
        attention(module, q, k, v.bfloat16(), build_mask())


def test_each_module_has_the_backend_that_a_function_returns(llama):
    names = {id(part): name for name, part in llama.named_modules()}
    calls = []

    def choose_backend(module):
        calls.append(names[id(module)])
        return "reference"

    with interface.attending(choose_backend):
        llama(torch.tensor([[1, 2, 3]]))
    assert calls
    assert calls == [name for name in names.values() if name.endswith("self_attn")]
