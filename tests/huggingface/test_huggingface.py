"""Hugging Face models on token graphs: the same numbers as eager attention, and another graph when asked
for.
"""

import copy
import threading

import pytest
import torch
from support.bounds import assert_exact, assert_rule, attention_truth, error
from support.extras import needs
from torch import nn

transformers = needs("transformers")

from support import hf_models  # noqa: E402
from support.hf_models import (  # noqa: E402
    BATCH,
    FAMILIES,
    SWEPT,
    TOKENS,
    build_generic,
    difference,
    direction,
    exact,
    gradients,
    inputs,
    result,
)
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

import gnn_attention as ga  # noqa: E402
from gnn_attention import patterns  # noqa: E402
from gnn_attention.huggingface import attention, mask, use_graph  # noqa: E402
from gnn_attention.huggingface import interface as huggingface  # noqa: E402
from gnn_attention.huggingface._alignment import recipe  # noqa: E402
from gnn_attention.huggingface._masks import LazyMask, of_tensor  # noqa: E402
from gnn_attention.verify.measure import EXACT  # noqa: E402

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


def build(name, **changes):
    """A model of a family in float64."""
    return exact(hf_models.build(name, **changes))


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


def test_two_dozen_families_are_compared():
    """The table is as large as it says."""
    assert len(FAMILIES) >= 24
    assert sum(family.default for family in FAMILIES.values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model_type"), [(kind, name) for kind, names in SWEPT.items() for name in names.split()]
)
def test_many_more_model_types_are_those_of_eager(kind, model_type):
    """Each made small from what its config knows, with padding."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model, given, said = exact(build_generic(kind, model_type)), inputs("llama", "right"), []
    more = {"decoder_input_ids": given["input_ids"][:, :7]} if kind == "SEQ_TO_SEQ_CAUSAL_LM" else {}
    for implementation in ("eager", "gnn_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(**given, **more).logits
        said.append(logits if more else logits[given["attention_mask"].bool()])
    assert_exact(said[1], said[0])


CONTROLS = {  # what is left out -> the family whose comparison must see it
    "softcap": "gemma2",
    "s_aux": "gpt_oss",
    "position_bias": "t5",
    "scaling": "gemma2",
}


@pytest.mark.parametrize(("left_out", "name"), CONTROLS.items())
def test_the_comparison_sees_a_dropped_argument(left_out, name, monkeypatch):
    """An adapter that forgets one argument fails by far."""

    def forgetful(*arguments, **keywords):
        keywords[left_out] = 1.0 if left_out == "scaling" else None
        return attention(*arguments, **keywords)

    monkeypatch.setitem(AttentionInterface._global_mapping, "gnn_attention", forgetful)
    assert difference(name, build(name), inputs(name, "right")) > SEEN


@pytest.mark.parametrize("name", ["mistral", "gemma2", "modernbert"])
def test_the_comparison_sees_a_dropped_window(name, monkeypatch):
    """A mask function that knows causality and padding alone fails by far."""

    def short_sighted(**keywords):
        keywords["mask_function"] = (
            causal_mask_function if name != "modernbert" else masking_utils.bidirectional_mask_function
        )
        return mask(**keywords)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "gnn_attention", short_sighted)
    assert difference(name, build(name), inputs(name)) > SEEN


def test_the_comparison_sees_dropped_padding(monkeypatch):
    """A mask function without padding fails by far."""
    careless = {"attention_mask": None}
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping, "gnn_attention", lambda **k: mask(**{**k, **careless})
    )
    assert difference("llama", build("llama"), inputs("llama", "left")) > SEEN


def test_the_comparison_sees_a_dropped_additive_mask(monkeypatch):
    """Swin's own mask of numbers is a bias, not only a set of edges."""

    def coarse(module, query, key, value, attention_mask, **keywords):
        coarser = None if attention_mask is None else attention_mask > -50
        return attention(module, query, key, value, coarser, **keywords)

    monkeypatch.setitem(AttentionInterface._global_mapping, "gnn_attention", coarse)
    assert difference("swin", build("swin"), inputs("swin")) > SEEN


def test_without_its_mask_function_the_attention_refuses(monkeypatch):
    """transformers passes no mask then: padding and windows would be lost, so it must not go on."""
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "gnn_attention")
    with pytest.raises(RuntimeError, match="the mask function of 'gnn_attention' is not registered"):
        difference("llama", build("llama"), inputs("llama", "left"))


GENERATING = ["llama", "mistral", "gemma2", "t5"]


def generated(model, given, implementation, new=9, **how):
    """Greedy tokens and the scores of each step."""
    model.set_attn_implementation(implementation)
    given = {key: value for key, value in given.items() if key != "decoder_input_ids"}
    out = model.generate(
        **given,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **how,
    )
    return out.sequences, torch.stack(out.scores)


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=["own", "static", "none"]
)
def test_generation_is_that_of_eager(name, cache):
    """Dynamic, sliding, static and no cache, with prompts of different lengths, beyond the window."""
    model, given = build(name), inputs(name, "left" if FAMILIES[name].inputs == "text" else "right")
    tokens, scores = generated(model, given, "eager", **cache)
    found, found_scores = generated(model, given, "gnn_attention", **cache)
    assert torch.equal(found, tokens)
    assert_exact(found_scores, scores)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "lookup"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_searches_are_those_of_eager(name, how):
    """Beams reorder the cache, look-ups decode several tokens at once."""
    model, given = build(name), inputs(name)
    given = {key: value[:1] for key, value in given.items()}
    assert torch.equal(
        generated(model, given, "gnn_attention", **how)[0], generated(model, given, "eager", **how)[0]
    )


def test_packed_sequences_do_not_hear_each_other():
    """position_ids that begin again are documents, as long as there is no cache (transformers looks for them
    only then).
    """
    model = build("llama")
    model.set_attn_implementation("gnn_attention")
    tokens = inputs("llama")["input_ids"][:2]
    places = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, position_ids=places, use_cache=False).logits
        apart = torch.cat([model(tokens[:, :5]).logits, model(tokens[:, 5:]).logits], 1)
    assert_exact(packed, apart)


def test_a_decoder_may_be_told_not_to_be_causal():
    """config.is_causal = False opens every token to every other, in each implementation."""
    model = build("llama", is_causal=False)
    assert difference("llama", model, inputs("llama", "right")) <= EXACT
    causal, given = build("llama"), inputs("llama")
    with torch.no_grad():
        assert float((result("llama", model, given) - result("llama", causal, given)).abs().max()) > SEEN


def checkpointed(model, reentrant):
    """In training, with layers that are computed again; the method's name changed in transformers 5."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    """The mask of the forward pass serves the second one."""
    model, given = build("llama"), inputs("llama", "right")
    model.set_attn_implementation("gnn_attention")
    graph = patterns.window(TOKENS, 3)
    with use_graph(model, graph):
        expected = gradients("llama", model, given, use_cache=False)
    checkpointed(model, reentrant)
    with use_graph(model, graph):
        said = result("llama", model, given, use_cache=False)
    model.zero_grad()
    direction(said).backward()  # outside the block: what a layer heard, it hears again
    found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert_exact(list(found.values()), list(expected.values()))


def test_a_checkpointed_layer_without_a_mask_is_not_computed_again_on_another_graph():
    """CLIP's images have no mask that could carry the graph: in the block all is well, outside it refuses."""
    model, given = build("clip_vision"), inputs("clip_vision")
    model.set_attn_implementation("gnn_attention")
    graph = patterns.window(17, 3)
    with use_graph(model, graph):
        expected = gradients("clip_vision", model, given)
    checkpointed(model, False)
    with use_graph(model, graph):
        assert_exact(list(gradients("clip_vision", model, given).values()), list(expected.values()))
        said = result("clip_vision", model, given).sum()
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside the block"):
        said.backward()


@pytest.mark.slow
def test_a_compiled_model_says_the_same(llama, monkeypatch):
    """torch.compile breaks its program at the attention, and follows blocks that come and go."""
    monkeypatch.undo()  # the compiler would trace what keeps float64 wide; both round to float32 where the other does
    given = inputs("llama", "left")
    compiled = torch.compile(llama, backend="eager")
    for graph in (patterns.causal(64), patterns.self_loops(64), patterns.causal(64)):
        with use_graph(llama, graph):
            assert_exact(said(compiled, **given), said(llama, **given))


def some_graph():
    """Not symmetric, with sinks and holes, every token hears itself."""
    return (patterns.window(64, 4) | patterns.sinks(64, 2)) - (
        patterns.dilated(64, 2, 2) - patterns.self_loops(64)
    )


def as_mask(graph, length=TOKENS):
    """The graph's first tokens as SDPA's mask of four axes."""
    return graph.mask()[:length, :length].expand(BATCH, 1, length, length)


def sdpa(model, tokens, allowed):
    """Logits of torch's own attention with a mask."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(tokens, attention_mask=allowed).logits
    model.set_attn_implementation("gnn_attention")
    return logits


@pytest.mark.parametrize("kind", ["bool", "heads", "keys", "lowest", "infinite", "numbers"])
def test_masks_with_four_axes(kind):
    """True is an edge; -inf and the lowest number are none; other numbers are added."""
    model, tokens = build("llama"), inputs("llama")["input_ids"]
    allowed = as_mask(some_graph())
    given = {
        "bool": allowed,
        "heads": torch.stack([patterns.window(TOKENS, head + 1).mask() for head in range(4)]).expand(
            BATCH, -1, -1, -1
        ),
        "keys": allowed[:, :, -1:] | (torch.arange(TOKENS) == 0),
        "lowest": torch.zeros(allowed.shape).double().masked_fill(~allowed, torch.finfo(torch.float64).min),
        "infinite": torch.zeros(allowed.shape).double().masked_fill(~allowed, -torch.inf),
        "numbers": torch.randn(allowed.shape).double().masked_fill(~allowed, -torch.inf),
    }[kind]
    expected = sdpa(model, tokens, given)
    with torch.no_grad():
        assert_exact(model(tokens, attention_mask=given).logits, expected)


@pytest.mark.parametrize(
    "lowest", [torch.finfo(d).min for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
)
def test_the_lowest_number_of_any_dtype_is_no_edge(lowest):
    """And where nothing else is said, nothing is added."""
    given = torch.zeros(2, 1, 4, 4).double().masked_fill(~patterns.causal(4).mask(), lowest)
    graph, numbers = of_tensor(given, 4, 4)
    assert graph == patterns.causal(4)
    assert numbers is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            torch.ones(1, 1, 4, 4),
            ValueError,
            "zeros and ones is no additive mask .it would add 1 to logits.: use mask.bool()",
        ),
        (torch.full((1, 1, 4, 4), torch.nan), ValueError, "holds NaN or"),
        (
            torch.ones(1, 1, 4, 4, dtype=torch.int64),
            TypeError,
            "must be bool .* or float .*, got torch.int64",
        ),
        (
            torch.ones(4, 4, dtype=torch.bool),
            ValueError,
            r"must be \[batch, heads, dst, src\] .* got \[4, 4\]",
        ),
        (
            torch.ones(1, 1, 4, 3, dtype=torch.bool),
            ValueError,
            r"for 4 receivers and 4 senders, got \[1, 1, 4, 3\]",
        ),
    ],
)
def test_wrong_masks_are_named(given, error, message):
    """Nothing is guessed about a mask."""
    with pytest.raises(error, match=message):
        of_tensor(given, 4, 4)


def test_a_mask_is_read_once_for_all_layers_and_again_when_it_was_changed():
    """The graph is kept by tensor and version."""
    given = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    first, _ = of_tensor(given, 4, 4)
    assert of_tensor(given, 4, 4)[0] is first
    given[..., 0] = False
    assert of_tensor(given, 4, 4)[0].num_edges == 12


def lazily(function=causal_mask_function, batch=2, dst=5, src=5, **more):
    """A mask as transformers asks for it."""
    return mask(batch_size=batch, q_length=dst, kv_length=src, mask_function=function, device="cpu", **more)


def test_the_lazy_mask_behaves_as_generate_needs_it():
    """Four axes, contiguous, and it comes back as it is."""
    lazy = lazily()
    assert lazy.shape == (2, 1, 5, 5)
    assert lazy.ndim == lazy.dim() == 4
    assert (lazy.size(), lazy.size(-1), lazy.dtype) == (lazy.shape, 5, torch.bool)
    assert lazy.contiguous() is lazy
    assert lazy.to("cpu") is lazy
    assert lazily(attention_mask=lazy, dst=1) is lazy


def test_any_other_operation_writes_it_down():
    """As a model that works on SDPA's mask expects it."""
    lazy, dense = lazily(), torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5)
    assert torch.equal(lazy.dense(), dense)
    assert torch.equal(lazy[:, :, :2, :3], dense[:, :, :2, :3])
    assert torch.equal(torch.where(lazy, 1.0, 0.0), dense.float())
    assert torch.equal(dense & lazy, dense)
    assert torch.equal(torch.cat([lazy, dense]), torch.cat([dense, dense]))
    assert torch.equal(lazy.to(torch.float32), dense.float())
    assert lazy.to(torch.float32).dtype == torch.float32
    assert torch.equal(lazy.expand(2, 3, 5, 5), dense.expand(2, 3, 5, 5))


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: torch.zeros(2, 1, 5, 5) + mask,
        lambda mask: torch.zeros(2, 1, 5, 5).add_(mask[:, :, :, :5]),
        lambda mask: (1.0 - mask.expand(2, 3, 5, 5)) * -1e9,
    ],
)
def test_adding_it_to_logits_is_refused(use):
    """Attention of a model's own, written for eager's mask, would take an edge for +1 and padding for 0."""
    with pytest.raises(
        NotImplementedError, match="computes with the attention mask as if it were one of 0 and -inf"
    ):
        use(lazily())
    assert float((1.0 - lazily().float()).sum()) == 20  # who says that it wants numbers gets numbers


def test_an_offset_that_counts_on_is_read_at_once():
    """A static cache adds to the very tensor that it gave as q_offset."""
    offset = torch.tensor(2)
    lazy = lazily(dst=1, src=8, q_offset=offset)
    offset += 5
    assert lazy.place.own.in_degree().tolist() == [3]


RULES = {
    "causal": (causal_mask_function, True),
    "window": (sliding_window_causal_mask_function(3), True),
    "chunks": (and_masks(causal_mask_function, chunked_overlay(2, torch.zeros(2, dtype=torch.int64))), False),
    "packed": (
        packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])),
        False,
    ),
    "of the user's": (lambda b, h, dst, src: src + 2 >= dst, False),
}


@pytest.mark.parametrize("pad", [None, "left", "right", "same"])
@pytest.mark.parametrize("name", RULES)
def test_the_graph_is_the_mask_of_transformers(name, pad):
    """With padding and offsets, against transformers' own mask."""
    rule, _ = RULES[name]
    tokens = {
        None: None,
        "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]),
        "right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "same": torch.tensor([[0, 1, 1, 1, 1, 1, 1]] * 2),
    }[pad]
    tokens = None if tokens is None else tokens.bool()
    places = {"q_length": 3, "kv_length": 6, "q_offset": 4, "kv_offset": 1}
    lazy = lazily(rule, dst=3, src=6, q_offset=4, kv_offset=1, attention_mask=tokens)
    expected = masking_utils.sdpa_mask(
        batch_size=2, mask_function=rule, attention_mask=tokens, allow_is_causal_skip=False, **places
    )
    assert torch.equal(lazy.dense(), expected)
    assert (lazy.place.own.dst_offset, lazy.place.own.src_offset) == (4, 1)


@pytest.mark.parametrize("name", RULES)
def test_rules_without_tensors_are_kept_and_the_same_for_all_samples(name):
    """Two windows of one width are one graph, from forward pass to forward pass."""
    rule, plain = RULES[name]
    first, second = lazily(rule, dst=7, src=7).place, lazily(rule, dst=7, src=7).place
    assert (first.own is second.own) == plain == first.cached == (first.own.batch is None)


def test_recipes_tell_rules_apart():
    """By code and constants; what is not known to depend on these alone has none."""
    assert (
        recipe(sliding_window_causal_mask_function(3))
        == recipe(sliding_window_causal_mask_function(3))
        is not None
    )
    assert recipe(sliding_window_causal_mask_function(3)) != recipe(sliding_window_causal_mask_function(4))
    assert recipe(causal_mask_function) != recipe(masking_utils.bidirectional_mask_function)
    assert recipe(lambda b, h, dst, src: src <= dst) is None
    assert recipe(RULES["packed"][0]) is None


def test_a_rule_for_single_numbers_is_mapped_over_the_pairs():
    """What transformers runs under vmap may index a table in steps, which no broadcasting could follow."""
    table = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])

    def same_part(b, h, dst, src):
        return table[b][dst] == table[b][src]

    lazy = lazily(same_part, use_vmap=True)
    assert torch.equal(lazy.dense()[:, 0], table[:, :, None] == table[:, None, :])


def test_a_long_window_is_never_written_down():
    """A mask of a million tokens has a number of edges, and a tensor of 10^12 cells nobody could hold."""
    lazy = lazily(sliding_window_causal_mask_function(100), batch=1, dst=1_000_000, src=1_000_000)
    assert lazy.place.own.num_edges == patterns.window(1_000_000, 100).num_edges


def test_all_layers_of_a_forward_pass_share_one_graph(monkeypatch):
    """And nobody writes the mask down."""
    seen = []
    monkeypatch.setattr(LazyMask, "dense", lambda self: pytest.fail("the mask was written down"))
    monkeypatch.setattr(huggingface, "attend", lambda *a, **k: seen.append(a[3]) or ga.attend(*a, **k))
    model = build("llama")
    model.set_attn_implementation("gnn_attention")
    with torch.no_grad():
        model(**inputs("llama", "left"))
    assert len(seen) == 2
    assert seen[0] is seen[1]


def qkv(heads=4, kv_heads=2, dst=5, src=5, dim=8, value_dim=6, dtype=torch.float64):
    """Queries, keys and values."""
    draw = torch.Generator().manual_seed(3)
    sizes = ((heads, dst, dim), (kv_heads, src, dim), (kv_heads, src, value_dim))
    return [
        torch.empty(2, *size, dtype=dtype).copy_(torch.randn(2, *size, generator=draw, dtype=torch.float64))
        for size in sizes
    ]


def oracle(q, k, v, allowed, scale, cap=None, bias=0.0, sinks=None):
    """The dense formula in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = (logits + bias).masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1).nan_to_num()[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def test_everything_at_once():
    """Grouped heads, values of another width, a scale that is learned, softcap, sinks, a bias and a window
    with padding.
    """
    q, k, v = qkv()
    sinks, bias = torch.randn(4).double(), torch.randn(1, 4, 5, 5).double()
    tokens = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    lazy = lazily(sliding_window_causal_mask_function(3), attention_mask=tokens)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    out, weights = attention(
        nn.Module(), q, k, v, lazy, scaling=scale, softcap=2.0, s_aux=sinks, position_bias=bias
    )
    allowed = patterns.window(5, 3).mask() & tokens[:, None, None, :]
    expected = oracle(q, k, v, allowed, 0.7, 2.0, bias, sinks)
    assert out.is_contiguous()
    assert weights is None
    assert_exact(out, expected)
    out.sum().backward()
    assert scale.grad.abs() > 0
    assert (out[0, 0] == 0).all()  # padding in front hears nobody


def test_sinks_may_differ_by_receiver():
    """As Inkling's, a function of the state: one more logit for each receiver and head, with its gradient."""
    q, k, v = qkv()
    sinks = torch.randn(2, 4, 5, 1).double().requires_grad_()
    tokens = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    out, _ = attention(nn.Module(), q, k, v, lazily(attention_mask=tokens), sinks=sinks)
    out.square().sum().backward()
    wide = sinks.detach().double().requires_grad_()
    allowed = (patterns.causal(5).mask() & tokens[:, None, None, :]).expand(2, 4, 5, 5)
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    logits = (q.double() @ k.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
    expected = (torch.cat([logits, wide], -1).softmax(-1)[..., :5] @ v).transpose(1, 2)
    assert_exact(out, expected)
    expected.square().sum().backward()
    assert_exact(sinks.grad, wide.grad)


def test_a_bias_has_gradients_for_each_pair():
    """As T5's and Swin's tables need them."""
    q, k, v = qkv()
    bias = torch.randn(1, 4, 5, 5).double().requires_grad_()
    attention(nn.Module(), q, k, v, lazily(), position_bias=bias)[0].square().sum().backward()
    wide = bias.detach().double().requires_grad_()
    oracle(q, k, v, patterns.causal(5).mask(), 8**-0.5, bias=wide).square().sum().backward()
    assert_exact(bias.grad, wide.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_as_precise_as_sdpa(dtype):
    """Grouped heads and a window, at the model's door."""
    q, k, v = qkv(dst=40, src=40, dtype=dtype)
    out, _ = attention(nn.Module(), q, k, v, lazily(sliding_window_causal_mask_function(9), dst=40, src=40))
    assert out.dtype == dtype
    assert_rule(out.transpose(1, 2), {}, attention_truth(q, k, v, patterns.window(40, 9)))


def test_the_window_is_read_from_the_mask_and_not_from_its_number():
    """ModernBERT says sliding_window=3 and means a radius of 2."""
    q, k, v = qkv()
    given = lazily(sliding_window_causal_mask_function(4))
    assert torch.equal(
        attention(nn.Module(), q, k, v, given, sliding_window=1)[0], attention(nn.Module(), q, k, v, given)[0]
    )


def test_weights_come_when_they_are_asked_for():
    """As eager gives them, except that a receiver that hears nobody has none."""
    model, given = build("gpt_oss"), inputs("gpt_oss", "right")
    expected = model(**given, output_attentions=True).attentions
    model.set_attn_implementation("gnn_attention")
    assert not model(**given).attentions
    for found, wanted in zip(model(**given, output_attentions=True).attentions, expected, strict=True):
        assert_exact(found, wanted)


class Says(nn.Module):
    """A module that says whether it is causal."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


def test_without_a_mask_the_module_decides():
    """is_causal as an argument, else as an attribute; the newest token alone hears everyone."""
    q, k, v = qkv()
    scale = 8**-0.5
    everyone, past = torch.ones(5, 5).bool(), torch.ones(5, 5).tril().bool()
    for module, said, allowed in (
        (Says(True), None, past),
        (Says(False), None, everyone),
        (Says(False), True, past),
    ):
        out, _ = attention(module, q, k, v, None, is_causal=said)
        assert_exact(out, oracle(q, k, v, allowed, scale))
    out, _ = attention(nn.Module(), q[:, :, :1], k, v, None)
    assert_exact(out, oracle(q[:, :, :1], k, v, everyone[:1], scale))


def test_what_cannot_be_known_is_refused():
    """Never the future by guess."""
    q, k, v = qkv()
    with pytest.raises(ValueError, match="Module came with no mask and does not say whether it is causal"):
        attention(nn.Module(), q, k, v, None)
    with pytest.raises(
        ValueError, match="is causal and came with no mask, but has 3 receivers and 5 senders"
    ):
        attention(Says(True), q[:, :, :3], k, v, None)
    with pytest.raises(NotImplementedError, match="passes packed sequences by cu_seq_lens_q and no mask"):
        attention(Says(True), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 2, 5]))
    with pytest.raises(
        NotImplementedError, match="passes indices, senders chosen by the model's own indexer"
    ):
        attention(Says(True), q, k, v, lazily(), indices=torch.zeros(1))
    with pytest.raises(
        ValueError,
        match="5 receivers and 5 senders, but its mask has 5 and 4: it attends to senders of its own",
    ):
        attention(Says(True), q, k, v, lazily(src=4))
    with pytest.raises(ValueError, match="mask_function is missing"):
        mask(1, 2, 2)


def test_dropout_is_for_training_alone():
    """Whatever number the model passes."""
    q, k, v = qkv()
    module = nn.Module()
    kept = attention(module.eval(), q, k, v, lazily())[0]
    assert torch.equal(attention(module.eval(), q, k, v, lazily(), dropout=0.5)[0], kept)
    assert not torch.equal(attention(module.train(), q, k, v, lazily(), dropout=0.5)[0], kept)


def test_dtypes_are_made_one_under_autocast_alone():
    """As SDPA does it."""
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(nn.Module(), q, k, v.bfloat16(), lazily())[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="v must be like q"):
        attention(nn.Module(), q, k, v.bfloat16(), lazily())


@pytest.fixture
def llama():
    """On this library's attention."""
    model = build("llama")
    model.set_attn_implementation("gnn_attention")
    return model


def said(model, **given):
    """Logits, without gradients."""
    with torch.no_grad():
        return model(**given).logits


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("instead", [False, True])
def test_a_graph_is_the_same_as_its_mask(llama, listed, instead):
    """Intersected with the model's own mask, or in its place; as a rule and as a list of edges."""
    graph = some_graph() | patterns.window(64, 2).T if instead else some_graph()
    graph = ga.TokenGraph.from_edges(graph.edge_index, 64) if listed else graph
    tokens = inputs("llama")["input_ids"]
    expected = sdpa(llama, tokens, as_mask(graph if instead else graph & patterns.causal(64)))
    with use_graph(llama, graph, replace=instead):
        assert_exact(said(llama, input_ids=tokens), expected)
    assert float((said(llama, input_ids=tokens) - expected).abs().max()) > SEEN


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("instead", [False, True])
def test_padding_on_the_left_does_not_count(llama, listed, instead):
    """A sample's positions begin at its first token: alone and in a batch it hears the same, sinks
    included.
    """
    graph = ga.TokenGraph.from_edges(some_graph().edge_index, 64) if listed else some_graph()
    given = inputs("llama", "left")
    places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with use_graph(llama, graph, replace=instead):
        together = said(llama, **given, position_ids=places)
        for sample, length in enumerate((TOKENS, 8, 5)):
            alone = said(llama, input_ids=given["input_ids"][sample : sample + 1, TOKENS - length :])
            assert_exact(together[sample, TOKENS - length :], alone[0])


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("pad", [None, "equal", "different"])
@pytest.mark.parametrize("instead", [False, True])
def test_a_graph_is_laid_where_the_slots_are(instead, pad, listed):
    """Slots 3 .. 9 of a cache of 12 are senders, 6 .. 8 receivers, 9 still empty; against the mask cut by
    hand.
    """
    whole = some_graph() | patterns.window(64, 2).T
    graph = ga.TokenGraph.from_edges(whole.edge_index, 64) if listed else whole
    left = {None: [0, 0], "equal": [4, 4], "different": [4, 1]}[pad]
    tokens = None if pad is None else torch.arange(9) >= torch.tensor(left)[:, None]
    lazy = lazily(dst=3, src=7, q_offset=6, kv_offset=3, attention_mask=tokens)
    if instead:
        before = [whole.mask()[6 - pads : 9 - pads, : max(0, 3 - pads)].any() for pads in left]
        if any(before):
            with pytest.raises(ValueError, match="here: its cache has dropped the senders before 3"):
                lazy.place.under(graph, True, "here")
            return
    found = lazy.place.under(graph, instead, "here").own.mask().expand(2, 1, 3, 7)
    for sample, pads in enumerate(left):
        expected = torch.zeros(3, 7, dtype=torch.bool)
        for dst in range(6, 9):
            for src in range(max(3, pads), 9):
                expected[dst - 6, src - 3] = whole.mask()[dst - pads, src - pads] & (instead | (src <= dst))
        assert torch.equal(found[sample, 0], expected)


def test_empty_slots_of_a_static_cache_stay_unheard():
    """Behind the last receiver there is nothing yet, whatever a graph says that replaces the model's."""
    place = lazily(dst=3, src=8, q_offset=2).place.under(patterns.full(64), True, "here")
    assert place.own.in_degree().tolist() == [5, 5, 5]


def test_padding_stays_unheard_in_a_graph_that_hears_the_future(llama):
    """replace=True takes the graph's word for causality, not for padding on the right."""
    given = inputs("llama", "right")
    with use_graph(llama, patterns.full(64), replace=True):
        together = said(llama, **given)
        for sample, length in enumerate((TOKENS, 8, 5)):
            alone = said(llama, input_ids=given["input_ids"][sample : sample + 1, :length])
            assert_exact(together[sample, :length], alone[0])


@pytest.mark.parametrize(("name", "instead"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_generation_follows_the_graph(name, instead):
    """With a dynamic and a static cache as without any, left padding included."""
    model, given = build(name), inputs(name, "left")
    model.set_attn_implementation("gnn_attention")
    with use_graph(model, some_graph(), replace=instead):
        expected, scores = generated(model, given, "gnn_attention", use_cache=False)
        for cache in ({}, {"cache_implementation": "static"}):
            found, found_scores = generated(model, given, "gnn_attention", **cache)
            assert torch.equal(found, expected)
            assert_exact(found_scores, scores)
    assert float((generated(model, given, "gnn_attention")[1] - scores).abs().max()) > SEEN


def test_a_sliding_cache_without_the_senders_that_a_graph_needs_is_named():
    """Replacing a window by sinks cannot bring back keys that are gone."""
    model, given = build("mistral"), inputs("mistral")
    model.set_attn_implementation("gnn_attention")
    with (
        use_graph(model, patterns.sinks(64, 1) | patterns.window(64, 3), replace=True),
        pytest.raises(
            ValueError,
            match=r"layer 0\): its cache has dropped the senders before 8, .* generate with use_cache=False",
        ),
    ):
        generated(model, given, "gnn_attention")
    with use_graph(model, patterns.window(64, 3), replace=True):
        short = generated(model, given, "gnn_attention")[0]
        assert torch.equal(short, generated(model, given, "gnn_attention", use_cache=False)[0])


def test_a_function_gives_each_layer_and_head_its_graph(llama):
    """None is as the model does; the length is that of the sequence."""
    asked = []

    def choose(layer, head, length):
        asked.append((layer, head, length))
        return None if layer == 1 else patterns.window(length, head + 1)

    tokens = inputs("llama")["input_ids"]
    with use_graph(llama, choose):
        found = said(llama, input_ids=tokens)
    assert asked == [(layer, head, TOKENS) for layer in (0, 1) for head in range(4)]
    by_head = torch.stack([patterns.window(TOKENS, h + 1).mask() for h in range(4)]).expand(BATCH, -1, -1, -1)
    whole = as_mask(patterns.causal(TOKENS))
    llama.set_attn_implementation("sdpa")
    first = llama.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": by_head}), with_kwargs=True
    )
    expected = said(llama, input_ids=tokens, attention_mask=whole)
    first.remove()
    assert_exact(found, expected)


def test_a_function_follows_generation(llama):
    """The length grows; graphs of the length and of all lengths are the same."""
    given = inputs("llama", "left")
    with use_graph(llama, lambda layer, head, length: patterns.window(length, 3)):
        grown = generated(llama, given, "gnn_attention")[0]
    with use_graph(llama, patterns.window(64, 3)):
        assert torch.equal(generated(llama, given, "gnn_attention")[0], grown)


def test_blocks_nest_and_end(llama):
    """The inner one is intersected with the outer one; both are gone after an exception."""
    tokens = inputs("llama")["input_ids"]
    before = said(llama, input_ids=tokens)
    with use_graph(llama, patterns.window(64, 4)):
        outer = said(llama, input_ids=tokens)
        with use_graph(llama, patterns.window(64, 2) | patterns.sinks(64, 1)):
            both = said(llama, input_ids=tokens)
        assert torch.equal(said(llama, input_ids=tokens), outer)
    joined = patterns.window(64, 4) & (patterns.window(64, 2) | patterns.sinks(64, 1))
    with use_graph(llama, joined):
        assert_exact(both, said(llama, input_ids=tokens))
    with pytest.raises(TypeError, match="int"), use_graph(llama, joined):
        len(said(llama, input_ids=tokens).numel())
    assert torch.equal(said(llama, input_ids=tokens), before)


def test_other_threads_are_not_concerned(llama):
    """Each has the graphs of its own blocks."""
    tokens, found = inputs("llama")["input_ids"], {}
    before = said(llama, input_ids=tokens)

    def run(word, graph):
        if graph is None:
            found[word] = said(llama, input_ids=tokens)
            return
        with use_graph(llama, graph):
            for _ in range(5):
                found[word] = said(llama, input_ids=tokens)

    with use_graph(llama, patterns.window(64, 2)):
        here = said(llama, input_ids=tokens)
        threads = [
            threading.Thread(target=run, args=arg)
            for arg in (("plain", None), ("loops", patterns.self_loops(64)))
        ]
        [thread.start() for thread in threads]
        found["here"] = said(llama, input_ids=tokens)
        [thread.join() for thread in threads]
    with use_graph(llama, patterns.self_loops(64)):
        loops = said(llama, input_ids=tokens)
    for word, expected in (("plain", before), ("here", here), ("loops", loops)):
        assert_exact(found[word], expected)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_cross_attention_is_left_alone(name):
    """A decoder's receivers are not among the encoder's senders: the same result as with the encoder and
    decoder apart.
    """
    model, given = build(name), inputs(name)
    model.set_attn_implementation("gnn_attention")
    loops = patterns.self_loops(64)
    with torch.no_grad(), use_graph(model, loops):
        both = result(name, model, given)
    with torch.no_grad(), use_graph(model.get_encoder(), loops), use_graph(model.get_decoder(), loops):
        assert torch.equal(result(name, model, given), both)
    with torch.no_grad(), use_graph(model.get_encoder(), loops):
        assert error(result(name, model, given), both) > SEEN / 10
    changed = {k: v.roll(1, 0) if k != "decoder_input_ids" else v for k, v in given.items()}
    with torch.no_grad(), use_graph(model, loops):
        assert error(result(name, model, changed), both) > SEEN / 10  # the encoder is still heard


def test_modules_without_a_mask_and_without_a_number():
    """CLIP's images: numbered in the order of calls, on the graph alone."""
    model, given, asked = build("clip_vision"), inputs("clip_vision"), []
    model.set_attn_implementation("gnn_attention")
    plain = result("clip_vision", model, given)
    with use_graph(model, lambda layer, head, length: asked.append((layer, head, length))):
        assert torch.equal(result("clip_vision", model, given), plain)
    assert asked == [(layer, head, 17) for layer in (0, 1) for head in range(4)]
    with use_graph(model, patterns.self_loops(17)):
        out = model(**given).last_hidden_state
        other = model(given["pixel_values"].clone().index_fill_(3, torch.arange(4), 0.0)).last_hidden_state
    assert torch.equal(out[:, 2], other[:, 2])  # the second patch hears itself alone
    assert not torch.equal(out[:, 1], other[:, 1])


def test_one_layer_may_have_its_own_graph(llama):
    """A part of a model is a model."""
    tokens = inputs("llama")["input_ids"]
    with use_graph(llama.model.layers[1], patterns.self_loops(64)):
        part = said(llama, input_ids=tokens)
    with use_graph(llama, lambda layer, head, length: patterns.self_loops(length) if layer == 1 else None):
        assert torch.equal(said(llama, input_ids=tokens), part)


def test_a_copy_of_a_model_is_another_model(llama):
    """Blocks hold for the modules that they were given."""
    tokens, other = inputs("llama")["input_ids"], copy.deepcopy(llama)
    before = said(llama, input_ids=tokens)
    with use_graph(llama, patterns.self_loops(64)):
        assert torch.equal(said(other, input_ids=tokens), before)
        assert not torch.equal(said(llama, input_ids=tokens), before)


def test_wrong_uses_are_named(llama):
    """Before anything changes."""
    graph, tokens = patterns.causal(64), inputs("llama")["input_ids"]
    with pytest.raises(
        TypeError, match=r"graph_or_function must be a TokenGraph or a function .* got Tensor"
    ):
        use_graph(llama, graph.mask())
    with pytest.raises(TypeError, match="model must be a Hugging Face model or a part of one, got str"):
        use_graph("gpt2", graph)
    with pytest.raises(ValueError, match="Linear has no part with a Hugging Face config"):
        use_graph(nn.Linear(2, 2), graph)
    with pytest.raises(
        ValueError,
        match=r"LlamaForCausalLM is 'eager': call model.set_attn_implementation\('gnn_attention'\)",
    ):
        use_graph(build("llama"), graph)
    with (
        use_graph(llama, patterns.causal(8)),
        pytest.raises(ValueError, match="too short for a sequence of 12 tokens"),
    ):
        said(llama, input_ids=tokens)
    with (
        use_graph(llama, graph.rows(8, 64)),
        pytest.raises(ValueError, match="must be that of whole sequences, from position 0"),
    ):
        said(llama, input_ids=tokens)
    with (
        use_graph(llama, lambda *where: "window"),
        pytest.raises(TypeError, match="must return a TokenGraph or None, got str"),
    ):
        said(llama, input_ids=tokens)
    with (
        use_graph(llama, graph, replace=True),
        pytest.raises(ValueError, match="padding cannot be recognised: pass a 2-D attention_mask"),
    ):
        said(llama, input_ids=tokens, attention_mask=as_mask(graph))
    said(llama, input_ids=tokens)


def test_models_with_attention_of_their_own_are_refused():
    """set_attn_implementation only logs a warning there."""
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "attention_types": [[["global"], 1]],
    }
    model = transformers.GPTNeoModel(transformers.GPTNeoConfig(**sizes))
    model.set_attn_implementation("gnn_attention")
    with pytest.raises(NotImplementedError, match="GPTNeoModel has attention of its own"):
        use_graph(model, patterns.causal(8))


def test_a_part_on_another_attention_is_named():
    """Sub-configs count, too."""
    model = build("clip")
    model.set_attn_implementation(
        {"": "gnn_attention", "text_config": "gnn_attention", "vision_config": "sdpa"}
    )
    with pytest.raises(ValueError, match=r"vision.* is 'sdpa': call model.set_attn_implementation"):
        use_graph(model, patterns.causal(64))


def test_a_block_in_which_nothing_was_computed_says_so(llama):
    """In another thread or a copy of the model, say."""
    with (
        pytest.warns(UserWarning, match="no self-attention of LlamaForCausalLM was computed"),
        use_graph(llama, patterns.causal(4)),
    ):
        pass


def test_the_implementation_is_not_saved(llama, tmp_path):
    """A model that is saved on this attention loads without the library."""
    llama.save_pretrained(tmp_path)
    assert type(llama).from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_the_front_door_leads_here():
    """``ga.use_graph`` loads transformers when it is asked for."""
    assert ga.use_graph is use_graph
    assert hf_models.VOCABULARY == 64
