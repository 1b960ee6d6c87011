"""Hugging Face models on token graphs: the same numbers as eager attention, and another graph on request."""

# ruff: noqa: E402
import copy
import threading
from functools import partial

import pytest
import torch
from support.bounds import assert_exact, assert_rule, attention_truth, error
from support.extras import needs
from support.refusals import assert_refusals
from torch import nn

transformers = needs("transformers")

from support import hf_models
from support.hf_models import BATCH, FAMILIES, TOKENS, difference, exact, gradients, inputs, result
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as window_mask_function

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.huggingface import attention, interface, mask, use_graph
from gnn_attention.huggingface._alignment import recipe
from gnn_attention.huggingface._masks import LazyMask, of_tensor
from gnn_attention.verify.measure import EXACT

SEEN = 1e-3  # of the largest number: what a mistake changes at least
PADS = {"text": (None, "left", "right"), "pair": (None, "right"), "both": (None, "right")}
CASES = [
    pytest.param(name, pad, marks=() if family.default else pytest.mark.slow, id=f"{name}-{pad}")
    for name, family in FAMILIES.items()
    for pad in (PADS.get(family.inputs, (None,)) if family.padded else (None,))
]
ONCE = [pytest.param(name, marks=() if f.default else pytest.mark.slow) for name, f in FAMILIES.items()]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    hf_models.keep_float64(monkeypatch)


def build(name, implementation="eager", **changes):
    """A model of a family in float64."""
    model = exact(hf_models.build(name, **changes))
    model.set_attn_implementation(implementation)
    return model


@pytest.fixture
def llama():
    return build("llama", "gnn_attention")


@torch.no_grad()
def logits_of(model, **given):
    return model(**given).logits


@pytest.mark.parametrize(("name", "pad"), CASES)
def test_logits_are_those_of_eager(name, pad):
    """With and without padding, at every position that holds a token."""
    assert difference(name, build(name), inputs(name, pad)) <= EXACT


@pytest.mark.parametrize("name", ONCE)
def test_gradients_are_those_of_eager(name):
    """Of every parameter, with padding where the family takes it."""
    model, given = build(name), inputs(name, "right" if FAMILIES[name].padded else None)
    expected = gradients(name, model, given)
    model.set_attn_implementation("gnn_attention")
    found = gradients(name, model, given)
    assert found.keys() == expected.keys()
    assert_exact(list(found.values()), list(expected.values()))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model_type"), hf_models.swept())
def test_many_more_model_types_are_those_of_eager(kind, model_type):
    """Each made small from what its config knows, with padding."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model, given, found = exact(hf_models.build_generic(kind, model_type)), inputs("llama", "right"), []
    more = {"decoder_input_ids": given["input_ids"][:, :7]} if kind == "SEQ_TO_SEQ_CAUSAL_LM" else {}
    for implementation in ("eager", "gnn_attention"):
        model.set_attn_implementation(implementation)
        logits = logits_of(model, **given, **more)
        found.append(logits if more else logits[given["attention_mask"].bool()])
    assert_exact(found[1], found[0])


def without(option, value=None):
    """An attention function that forgets an argument."""
    return lambda *arguments, **keywords: attention(*arguments, **{**keywords, option: value})


def mask_without(option, value=None):
    """A mask function that forgets an argument."""
    return lambda **keywords: mask(**{**keywords, option: value})


FAULTS = {
    "softcap": ("gemma2", without("softcap"), None),
    "sinks": ("gpt_oss", without("s_aux"), None),
    "bias": ("t5", without("position_bias"), None),
    "window": ("mistral", None, mask_without("mask_function", causal_mask_function)),
    "padding": ("llama", None, mask_without("attention_mask")),
}


@pytest.mark.parametrize(("name", "attend", "masked"), FAULTS.values(), ids=list(FAULTS))
def test_the_comparison_sees_what_is_dropped(name, attend, masked, monkeypatch):
    if attend:
        monkeypatch.setitem(AttentionInterface._global_mapping, "gnn_attention", attend)
    if masked:
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "gnn_attention", masked)
    assert difference(name, build(name), inputs(name, "left" if name == "llama" else "right")) > SEEN
    # transformers passes no mask without a mask function: padding and windows would be lost
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "gnn_attention")
    monkeypatch.setitem(AttentionInterface._global_mapping, "gnn_attention", attention)
    with pytest.raises(RuntimeError, match="the mask function of 'gnn_attention' is not registered"):
        difference("llama", build("llama"), inputs("llama", "left"))


def generated(model, given, implementation="gnn_attention", **how):
    """Greedy tokens and the scores of each step."""
    model.set_attn_implementation(implementation)
    given = {key: value for key, value in given.items() if key != "decoder_input_ids"}
    how |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    out = model.generate(**given, max_new_tokens=9, **how)
    return out.sequences, torch.stack(out.scores)


CACHES = {"own": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "t5"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=list(CACHES))
def test_generation_is_that_of_eager(name, cache):
    """Dynamic, sliding, static and no cache, with prompts of different lengths, beyond the window."""
    model, given = build(name), inputs(name, "left" if FAMILIES[name].inputs == "text" else "right")
    tokens, scores = generated(model, given, "eager", **cache)
    found, found_scores = generated(model, given, **cache)
    assert torch.equal(found, tokens)
    assert_exact(found_scores, scores)


def checkpointed(model, reentrant):
    """In training, with layers that are recomputed; the method's name changed in transformers 5."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(llama, reentrant):
    """The mask of the forward pass serves the second one, outside the block too."""
    given, graph = inputs("llama", "right"), patterns.window(TOKENS, 3)
    with use_graph(llama, graph):
        expected = gradients("llama", llama, given, use_cache=False)
    checkpointed(llama, reentrant)
    with use_graph(llama, graph):
        out = result("llama", llama, given, use_cache=False)
    llama.zero_grad()
    hf_models.direction(out).backward()
    found = {k: p.grad for k, p in llama.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert_exact(list(found.values()), list(expected.values()))


def test_a_checkpointed_layer_without_a_mask_is_not_recomputed_on_another_graph():
    """CLIP's images have no mask that could carry the graph: outside the block it refuses."""
    model, given = build("clip_vision", "gnn_attention"), inputs("clip_vision")
    graph = patterns.window(17, 3)
    with use_graph(model, graph):
        expected = gradients("clip_vision", model, given)
    checkpointed(model, False)
    with use_graph(model, graph):
        assert_exact(list(gradients("clip_vision", model, given).values()), list(expected.values()))
        total = result("clip_vision", model, given).sum()
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside the block"):
        total.backward()


@pytest.mark.slow
def test_a_compiled_model_has_the_same_logits(llama, monkeypatch):
    """torch.compile breaks its program at the attention, and follows blocks that come and go."""
    # the compiler would trace what keeps float64; both round to float32 at the same places
    monkeypatch.undo()
    given = inputs("llama", "left")
    compiled = torch.compile(llama, backend="eager")
    for graph in (patterns.causal(64), patterns.self_loops(64), patterns.causal(64)):
        with use_graph(llama, graph):
            assert_exact(logits_of(compiled, **given), logits_of(llama, **given))


def some_graph(listed=False):
    """Not symmetric, with sinks and holes; every token attends to itself."""
    holes = patterns.dilated(64, 2, 2) - patterns.self_loops(64)
    graph = (patterns.window(64, 4) | patterns.sinks(64, 2)) - holes
    return ga.TokenGraph.from_edges(graph.edge_index, 64) if listed else graph


def as_mask(graph):
    """The graph's first tokens as SDPA's mask of four axes."""
    return graph.mask()[:TOKENS, :TOKENS].expand(BATCH, 1, TOKENS, TOKENS)


def by_head():
    """A window for each head as SDPA's mask."""
    return torch.stack([patterns.window(TOKENS, h + 1).mask() for h in range(4)]).expand(BATCH, -1, -1, -1)


def sdpa(model, tokens, allowed):
    """Logits of torch's own attention with a mask."""
    model.set_attn_implementation("sdpa")
    logits = logits_of(model, input_ids=tokens, attention_mask=allowed)
    model.set_attn_implementation("gnn_attention")
    return logits


@pytest.mark.parametrize("kind", ["bool", "heads", "keys", "lowest", "infinite", "numbers"])
def test_masks_with_four_axes(llama, kind):
    """True is an edge; -inf and the lowest number are none; other numbers are added."""
    tokens, allowed = inputs("llama")["input_ids"], as_mask(some_graph())
    zeros = torch.zeros(allowed.shape).double()
    given = {
        "bool": allowed,
        "heads": by_head(),
        "keys": allowed[:, :, -1:] | (torch.arange(TOKENS) == 0),
        "lowest": zeros.masked_fill(~allowed, torch.finfo(torch.float64).min),
        "infinite": zeros.masked_fill(~allowed, -torch.inf),
        "numbers": torch.randn(allowed.shape).double().masked_fill(~allowed, -torch.inf),
    }[kind]
    found = logits_of(llama, input_ids=tokens, attention_mask=given)
    assert_exact(found, sdpa(llama, tokens, given))


WRONG_MASKS = [
    (torch.ones(1, 1, 4, 4), ValueError, "zeros and ones is no additive mask .it would add 1 to logits."),
    (torch.full((1, 1, 4, 4), torch.nan), ValueError, "holds NaN or"),
    (torch.ones(1, 1, 4, 4).long(), TypeError, "must be bool .* or float .*, got torch.int64"),
    (torch.ones(4, 4).bool(), ValueError, r"must be \[batch, heads, dst, src\] .* got \[4, 4\]"),
    (torch.ones(1, 1, 4, 3).bool(), ValueError, r"for 4 receivers and 4 senders, got \[1, 1, 4, 3\]"),
]


def test_masks_are_read_once_for_all_layers_and_again_when_they_changed():
    assert_refusals((partial(of_tensor, mask, 4, 4), error, message) for mask, error, message in WRONG_MASKS)
    given = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    first, _ = of_tensor(given, 4, 4)
    assert of_tensor(given, 4, 4)[0] is first
    given[..., 0] = False
    assert of_tensor(given, 4, 4)[0].num_edges == 12
    # a static cache adds to the very tensor that it passed as q_offset
    offset = torch.tensor(2)
    lazy = lazily(dst=1, src=8, q_offset=offset)
    offset += 5
    assert lazy.place.own.in_degree().tolist() == [3]


def lazily(function=causal_mask_function, batch=2, dst=5, src=5, **more):
    """A mask as transformers makes one."""
    return mask(batch_size=batch, q_length=dst, kv_length=src, mask_function=function, device="cpu", **more)


def test_the_lazy_mask_is_what_generate_needs_and_otherwise_a_tensor():
    lazy, dense = lazily(), torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5)
    assert (lazy.shape, lazy.size(), lazy.size(-1), lazy.ndim, lazy.dim()) == (
        dense.shape,
        dense.shape,
        5,
        4,
        4,
    )
    assert lazy.dtype == torch.bool
    assert lazy.contiguous() is lazy.to("cpu") is lazily(attention_mask=lazy, dst=1) is lazy
    assert torch.equal(lazy.dense(), dense)
    assert torch.equal(lazy[:, :, :2, :3], dense[:, :, :2, :3])
    assert torch.equal(torch.where(lazy, 1.0, 0.0), dense.float())
    assert torch.equal(torch.cat([dense & lazy, lazy]), torch.cat([dense, dense]))
    assert torch.equal(lazy.to(torch.float32), dense.float())
    assert torch.equal(lazy.expand(2, 3, 5, 5), dense.expand(2, 3, 5, 5))


def test_adding_it_to_logits_is_refused():
    """Attention of a model's own, written for eager's mask, would take an edge for +1 and padding for 0."""
    uses = [
        lambda: torch.zeros(2, 1, 5, 5) + lazily(),
        lambda: torch.zeros(2, 1, 5, 5).add_(lazily()[:, :, :, :5]),
        lambda: (1.0 - lazily().expand(2, 3, 5, 5)) * -1e9,
    ]
    message = "computes with the attention mask .* as if it were one of 0 and -inf"
    assert_refusals((use, NotImplementedError, message) for use in uses)
    assert float((1.0 - lazily().float()).sum()) == 20  # float() says that numbers are wanted


CHUNKS = masking_utils.chunked_overlay(2, torch.zeros(2, dtype=torch.int64))
PACKED = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
RULES = {  # name: (rule, whether its graph is cached)
    "causal": (causal_mask_function, True),
    "window": (window_mask_function(3), True),
    "chunks": (masking_utils.and_masks(causal_mask_function, CHUNKS), False),
    "packed": (masking_utils.packed_sequence_mask_function(PACKED), False),
    "of the user's": (lambda b, h, dst, src: src + 2 >= dst, False),
}


@pytest.mark.parametrize("pad", [None, "left", "right", "same"])
@pytest.mark.parametrize("name", RULES)
def test_the_graph_is_the_mask_of_transformers(name, pad):
    """With padding and offsets, against transformers' own mask."""
    rule, _ = RULES[name]
    rows = {
        "left": [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
        "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "same": [[0, 1, 1, 1, 1, 1, 1]] * 2,
    }
    tokens = None if pad is None else torch.tensor(rows[pad]).bool()
    places = {"q_length": 3, "kv_length": 6, "q_offset": 4, "kv_offset": 1}
    lazy = lazily(rule, dst=3, src=6, q_offset=4, kv_offset=1, attention_mask=tokens)
    options = {"batch_size": 2, "mask_function": rule, "allow_is_causal_skip": False}
    assert torch.equal(lazy.dense(), masking_utils.sdpa_mask(attention_mask=tokens, **options, **places))
    assert (lazy.place.own.dst_offset, lazy.place.own.src_offset) == (4, 1)


@pytest.mark.parametrize("name", RULES)
def test_rules_without_tensors_are_cached_and_the_same_for_all_samples(name):
    rule, plain = RULES[name]
    first, second = lazily(rule, dst=7, src=7).place, lazily(rule, dst=7, src=7).place
    assert (first.own is second.own) == plain == first.cached == (first.own.batch is None)


def test_recipes_differ_by_code_and_constants():
    """What is not known to depend on these alone has none."""
    three, again, four = (recipe(window_mask_function(width)) for width in (3, 3, 4))
    assert three == again != four is not None
    assert recipe(causal_mask_function) != recipe(masking_utils.bidirectional_mask_function)
    assert recipe(patterns.window(8, 2).rule) == recipe(patterns.window(9, 2).rule) is not None
    assert recipe(lambda b, h, dst, src: src <= dst) is None
    assert recipe(RULES["packed"][0]) is None


def test_a_rule_for_single_numbers_is_mapped_over_the_pairs():
    """What transformers runs under vmap may index a table in steps, which no broadcasting could follow."""
    table = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    lazy = lazily(lambda b, h, dst, src: table[b][dst] == table[b][src], use_vmap=True)
    assert torch.equal(lazy.dense()[:, 0], table[:, :, None] == table[:, None, :])


def test_all_layers_of_a_forward_pass_share_one_graph(llama, monkeypatch):
    """And none makes the mask a tensor."""
    graphs = []
    monkeypatch.setattr(LazyMask, "dense", lambda self: pytest.fail("the mask became a tensor"))
    monkeypatch.setattr(interface, "attend", lambda *a, **k: graphs.append(a[3]) or ga.attend(*a, **k))
    logits_of(llama, **inputs("llama", "left"))
    assert len(graphs) == 2
    assert graphs[0] is graphs[1]


def qkv(dst=5, src=5, dtype=torch.float64):
    """Queries, keys and values of four query heads and two key/value heads."""
    draw = torch.Generator().manual_seed(3)
    sizes = ((4, dst, 8), (2, src, 8), (2, src, 6))
    drawn = [torch.randn(2, *size, generator=draw, dtype=torch.float64) for size in sizes]
    return [torch.empty_like(x, dtype=dtype).copy_(x) for x in drawn]


def oracle(q, k, v, allowed, scale=8**-0.5, cap=None, bias=0.0, sinks=None):
    """The dense formula in float64; ``sinks`` broadcast to ``[batch, heads, dst, 1]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = (logits + bias).masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    return (logits.softmax(-1).nan_to_num()[..., : k.shape[2]] @ v).transpose(1, 2)


LEFT_PADDED = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()


def test_everything_at_once():
    """Grouped heads, wide values, a learned scale, softcap, sinks, a bias and a window with padding."""
    q, k, v = qkv()
    sinks, bias = torch.randn(4).double(), torch.randn(1, 4, 5, 5).double()
    lazy = lazily(window_mask_function(3), attention_mask=LEFT_PADDED)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    options = {"scaling": scale, "softcap": 2.0, "s_aux": sinks, "position_bias": bias}
    out, weights = attention(nn.Module(), q, k, v, lazy, **options)
    allowed = patterns.window(5, 3).mask() & LEFT_PADDED[:, None, None, :]
    assert out.is_contiguous()
    assert weights is None
    assert_exact(out, oracle(q, k, v, allowed, 0.7, 2.0, bias, sinks.view(1, -1, 1, 1)))
    out.sum().backward()
    assert scale.grad.abs() > 0
    assert (out[0, 0] == 0).all()  # padding in front is isolated


@pytest.mark.parametrize("option", ["sinks", "position_bias"])
def test_sinks_of_receivers_and_biases_of_pairs_have_gradients(option):
    """Sinks as Inkling's, a function of the state; biases as T5's and Swin's tables."""
    q, k, v = qkv()
    shape, bias = ((2, 4, 5, 1), 0.0) if option == "sinks" else ((1, 4, 5, 5), 1.0)
    given = torch.randn(shape).double().requires_grad_()
    copied = given.detach().clone().requires_grad_()
    out, _ = attention(nn.Module(), q, k, v, lazily(attention_mask=LEFT_PADDED), **{option: given})
    allowed = (patterns.causal(5).mask() & LEFT_PADDED[:, None, None, :]).expand(2, 4, 5, 5)
    terms = {"sinks": copied} if option == "sinks" else {"bias": copied * bias}
    expected = oracle(q, k, v, allowed, **terms)
    assert_exact(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_exact(given.grad, copied.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_as_precise_as_sdpa(dtype):
    """Grouped heads and a window."""
    q, k, v = qkv(dst=40, src=40, dtype=dtype)
    out, _ = attention(nn.Module(), q, k, v, lazily(window_mask_function(9), dst=40, src=40))
    assert out.dtype == dtype
    assert_rule(out.transpose(1, 2), {}, attention_truth(q, k, v, patterns.window(40, 9)))


def test_weights_come_on_request():
    """As eager's, except that an isolated row has none."""
    model, given = build("gpt_oss"), inputs("gpt_oss", "right")
    expected = model(**given, output_attentions=True).attentions
    model.set_attn_implementation("gnn_attention")
    assert not model(**given).attentions
    assert_exact(list(model(**given, output_attentions=True).attentions), list(expected))


class Module(nn.Module):
    """Says whether it is causal."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


def test_without_a_mask_the_module_decides():
    """is_causal as an argument, else as an attribute; the newest token alone attends to all."""
    q, k, v = qkv()
    full, past = torch.ones(5, 5).bool(), torch.ones(5, 5).tril().bool()
    no, yes = Module(False), Module(True)
    for module, is_causal, allowed in ((yes, None, past), (no, None, full), (no, True, past)):
        assert_exact(attention(module, q, k, v, None, is_causal=is_causal)[0], oracle(q, k, v, allowed))
    assert_exact(attention(nn.Module(), q[:, :, :1], k, v, None)[0], oracle(q[:, :, :1], k, v, full[:1]))


CUMULATED, INDICES = {"cu_seq_lens_q": torch.tensor([0, 2, 5])}, {"indices": torch.zeros(1)}
UNKNOWN = {
    "does not say whether it is causal": (ValueError, nn.Module(), 5, None, {}),
    "came with no mask, but has 3 receivers and 5 senders": (ValueError, Module(True), 3, None, {}),
    "passes packed sequences by cu_seq_lens_q": (NotImplementedError, Module(True), 5, None, CUMULATED),
    "passes indices, senders chosen by": (NotImplementedError, Module(True), 5, lazily(), INDICES),
    "5 receivers and 5 senders, but its mask has 5 and 4": (ValueError, Module(True), 5, lazily(src=4), {}),
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_what_cannot_be_known_is_refused(message):
    """Never the future by guess."""
    (q, k, v), (error, module, dst, given, options) = qkv(), UNKNOWN[message]
    with pytest.raises(error, match=message):
        attention(module, q[:, :, :dst], k, v, given, **options)
    with pytest.raises(ValueError, match="mask_function is missing"):
        mask(1, 2, 2)


def test_dropout_is_for_training_alone():
    call, module = (*qkv(), lazily()), nn.Module()
    plain = attention(module.eval(), *call)[0]
    assert torch.equal(attention(module.eval(), *call, dropout=0.5)[0], plain)
    assert not torch.equal(attention(module.train(), *call, dropout=0.5)[0], plain)


def test_dtypes_are_made_one_under_autocast_alone():
    """As SDPA does it."""
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(nn.Module(), q, k, v.bfloat16(), lazily())[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="v must be like q"):
        attention(nn.Module(), q, k, v.bfloat16(), lazily())


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("instead", [False, True])
def test_a_graph_is_the_same_as_its_mask(llama, listed, instead):
    """Intersected with the model's own mask, or in its place; as a rule and as a list of edges."""
    graph = some_graph() | patterns.window(64, 2).T if instead else some_graph()
    graph = ga.TokenGraph.from_edges(graph.edge_index, 64) if listed else graph
    tokens = inputs("llama")["input_ids"]
    expected = sdpa(llama, tokens, as_mask(graph if instead else graph & patterns.causal(64)))
    with use_graph(llama, graph, replace=instead):
        assert_exact(logits_of(llama, input_ids=tokens), expected)
    assert float((logits_of(llama, input_ids=tokens) - expected).abs().max()) > SEEN


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("instead", [False, True])
def test_padding_does_not_count(llama, pad, listed, instead):
    """A sample's positions begin at its first token: alone and in a batch it has the same logits."""
    graph = patterns.full(64) if pad == "right" and instead else some_graph(listed)
    given = inputs("llama", pad)
    places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with use_graph(llama, graph, replace=instead):
        together = logits_of(llama, **given, position_ids=places)
        for sample, length in enumerate((TOKENS, 8, 5)):
            slots = slice(TOKENS - length, TOKENS) if pad == "left" else slice(length)
            alone = logits_of(llama, input_ids=given["input_ids"][sample : sample + 1, slots])
            assert_exact(together[sample, slots], alone[0])


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("left", [[0, 0], [4, 4], [4, 1]], ids=str)
@pytest.mark.parametrize("instead", [False, True])
def test_a_graph_is_aligned_with_the_slots(instead, left, listed):
    """Slots 3 .. 9 of a cache of 12 are senders, 6 .. 8 receivers, 9 still empty."""
    whole = some_graph() | patterns.window(64, 2).T
    graph = ga.TokenGraph.from_edges(whole.edge_index, 64) if listed else whole
    tokens = torch.arange(9) >= torch.tensor(left)[:, None] if any(left) else None
    lazy = lazily(dst=3, src=7, q_offset=6, kv_offset=3, attention_mask=tokens)
    mask = whole.mask()
    if instead and any(mask[6 - pads : 9 - pads, : max(0, 3 - pads)].any() for pads in left):
        with pytest.raises(ValueError, match="here: its cache has dropped the senders before 3"):
            lazy.place.under(graph, True, "here")
        return
    found = lazy.place.under(graph, instead, "here").own.mask().expand(2, 1, 3, 7)
    for sample, pads in enumerate(left):
        expected = torch.zeros(3, 7, dtype=torch.bool)
        for dst in range(6, 9):
            for src in range(max(3, pads), 9):
                expected[dst - 6, src - 3] = mask[dst - pads, src - pads] & (instead | (src <= dst))
        assert torch.equal(found[sample, 0], expected)


@pytest.mark.parametrize(("name", "instead"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_generation_follows_the_graph(name, instead):
    """With a dynamic and a static cache as without any, left padding included."""
    model, given = build(name), inputs(name, "left")
    model.set_attn_implementation("gnn_attention")
    with use_graph(model, some_graph(), replace=instead):
        expected, scores = generated(model, given, use_cache=False)
        for cache in (CACHES["own"], CACHES["static"]):
            found, found_scores = generated(model, given, **cache)
            assert torch.equal(found, expected)
            assert_exact(found_scores, scores)
    assert float((generated(model, given)[1] - scores).abs().max()) > SEEN


def test_a_sliding_cache_without_the_senders_of_a_graph_is_named():
    """Replacing a window by sinks cannot bring back keys that are gone."""
    model, given = build("mistral", "gnn_attention"), inputs("mistral")
    message = r"layer 0\): its cache has dropped the senders before 8, .* generate with use_cache=False"
    sinks = use_graph(model, patterns.sinks(64, 1) | patterns.window(64, 3), replace=True)
    with sinks, pytest.raises(ValueError, match=message):
        generated(model, given)
    with use_graph(model, patterns.window(64, 3), replace=True):
        assert torch.equal(generated(model, given)[0], generated(model, given, use_cache=False)[0])


def test_a_function_gives_each_layer_and_head_its_graph(llama):
    """None is the model's own; the length is that of the sequence."""
    calls, tokens = [], inputs("llama")["input_ids"]

    def choose(layer, head, length):
        calls.append((layer, head, length))
        return None if layer == 1 else patterns.window(length, head + 1)

    with use_graph(llama, choose):
        found = logits_of(llama, input_ids=tokens)
    assert calls == [(layer, head, TOKENS) for layer in (0, 1) for head in range(4)]

    def given(module, args, kwargs):
        return args, {**kwargs, "attention_mask": by_head()}

    llama.model.layers[0].register_forward_pre_hook(given, with_kwargs=True)
    assert_exact(found, sdpa(llama, tokens, as_mask(patterns.causal(TOKENS))))


def test_blocks_nest_and_end(llama):
    """The inner one is intersected with the outer one; both are gone after an exception."""
    given, narrow = inputs("llama"), patterns.window(64, 2) | patterns.sinks(64, 1)
    before = logits_of(llama, **given)
    with use_graph(llama, patterns.window(64, 4)):
        outer = logits_of(llama, **given)
        with use_graph(llama, narrow):
            both = logits_of(llama, **given)
        assert torch.equal(logits_of(llama, **given), outer)
    joined = patterns.window(64, 4) & narrow
    with use_graph(llama, joined):
        assert_exact(both, logits_of(llama, **given))
    with pytest.raises(TypeError, match="int"), use_graph(llama, joined):
        len(logits_of(llama, **given).numel())
    assert torch.equal(logits_of(llama, **given), before)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
@torch.no_grad()
def test_cross_attention_is_unchanged(name):
    """A decoder's receivers are not among the encoder's senders."""
    model, given, loops = build(name, "gnn_attention"), inputs(name), patterns.self_loops(64)
    with use_graph(model, loops):
        both = result(name, model, given)
    with use_graph(model.get_encoder(), loops):
        assert error(result(name, model, given), both) > SEEN / 10
        with use_graph(model.get_decoder(), loops):
            assert torch.equal(result(name, model, given), both)
    changed = {k: v.roll(1, 0) if k != "decoder_input_ids" else v for k, v in given.items()}
    with use_graph(model, loops):
        assert error(result(name, model, changed), both) > SEEN / 10  # the encoder still counts


def test_modules_without_a_mask_and_without_a_number():
    """CLIP's images: numbered in the order of calls, on the graph alone."""
    model, given, calls = build("clip_vision", "gnn_attention"), inputs("clip_vision"), []
    plain = result("clip_vision", model, given)
    with use_graph(model, lambda layer, head, length: calls.append((layer, head, length))):
        assert torch.equal(result("clip_vision", model, given), plain)
    assert calls == [(layer, head, 17) for layer in (0, 1) for head in range(4)]
    with use_graph(model, patterns.self_loops(17)):
        out = model(**given).last_hidden_state
        other = model(given["pixel_values"].clone().index_fill_(3, torch.arange(4), 0.0)).last_hidden_state
    assert torch.equal(out[:, 2], other[:, 2])  # the second patch attends to itself alone
    assert not torch.equal(out[:, 1], other[:, 1])


def test_a_part_or_a_copy_of_a_model_is_a_model(llama):
    """Blocks count for their modules alone."""
    given, loops, other = inputs("llama"), patterns.self_loops(64), copy.deepcopy(llama)
    before = logits_of(llama, **given)
    with use_graph(llama.model.layers[1], loops):
        part = logits_of(llama, **given)
        assert torch.equal(logits_of(other, **given), before)
    with use_graph(llama, lambda layer, head, length: loops if layer == 1 else None):
        assert torch.equal(logits_of(llama, **given), part)
    assert error(part, before) > SEEN


def gpt_neo():
    """set_attn_implementation only logs a warning for it."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 1}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global"], 1]])
    model = transformers.GPTNeoModel(config)
    model.set_attn_implementation("gnn_attention")
    return model


def half_clip():
    model = build("clip")
    parts = {"": "gnn_attention", "text_config": "gnn_attention", "vision_config": "sdpa"}
    model.set_attn_implementation(parts)
    return model


WRONG_MODELS = {
    "model must be a Hugging Face model or a part of one, got str": (TypeError, lambda: "gpt2"),
    "Linear has no part with a Hugging Face config": (ValueError, lambda: nn.Linear(2, 2)),
    r"LlamaForCausalLM is 'eager': call model.set_attn_im": (ValueError, lambda: build("llama")),
    "GPTNeoModel has attention of its own": (NotImplementedError, gpt_neo),
    r"vision.* is 'sdpa': call model.set_attn_implementation": (ValueError, half_clip),
}


@pytest.mark.parametrize("message", WRONG_MODELS)
def test_wrong_models_are_named(message):
    error, make = WRONG_MODELS[message]
    with pytest.raises(error, match=message):
        use_graph(make(), patterns.causal(64))
    wrong = r"graph_or_function must be a TokenGraph or a function .* got Tensor"
    with pytest.raises(TypeError, match=wrong):
        use_graph(make(), patterns.causal(64).mask())


CAUSAL = patterns.causal(64)
WRONG_GRAPHS = {
    "too short for a sequence of 12 tokens": (patterns.causal(8), {}),
    "must be that of whole sequences, from position 0": (CAUSAL.rows(8, 64), {}),
    "must return a TokenGraph or None, got str": (lambda *where: "window", {}),
    "padding cannot be recognised: pass a 2-D attention_mask": (CAUSAL, {"attention_mask": as_mask(CAUSAL)}),
}


@pytest.mark.parametrize("message", WRONG_GRAPHS)
def test_wrong_graphs_are_named(llama, message):
    """The model then serves the next call."""
    (graph, more), tokens = WRONG_GRAPHS[message], inputs("llama")["input_ids"]
    block = use_graph(llama, graph, replace=bool(more))
    with block, pytest.raises((TypeError, ValueError), match=message):
        logits_of(llama, input_ids=tokens, **more)
    assert logits_of(llama, input_ids=tokens).isfinite().all()


def test_a_block_in_which_nothing_was_computed_warns(llama, tmp_path):
    """In another thread, say, which has blocks of its own."""
    given, found = inputs("llama"), []
    before = logits_of(llama, **given)
    thread = threading.Thread(target=lambda: found.append(logits_of(llama, **given)))
    warns = pytest.warns(UserWarning, match="no self-attention of LlamaForCausalLM was computed")
    with warns, use_graph(llama, patterns.self_loops(64)):
        thread.start()
        thread.join()
    assert torch.equal(found[0], before)
    # a model that is saved on this attention loads without the library
    llama.save_pretrained(tmp_path)
    assert type(llama).from_pretrained(tmp_path).config._attn_implementation == "sdpa"
