"""A small complete language model: each block is attention along the edges of a graph, then an MLP.

A token's state starts as its embedding; each block adds an update of its communication phase (attention) and
of its computation phase (the MLP); the last state is unembedded. Positions enter only as a learned bias for
each distance (:class:`gnn_attention.score_mods.RelativeBias`), so every head has one pattern matrix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import nn

from gnn_attention import algebra, patterns
from gnn_attention._support import atomic_files, checks
from gnn_attention._support.checks import quote
from gnn_attention._support.shapes import Float, Int, Tensor
from gnn_attention._support.text import one_line
from gnn_attention.backends import Backend
from gnn_attention.cache import KeyValueCache
from gnn_attention.graph import TokenGraph
from gnn_attention.heads import StandardHeads
from gnn_attention.layer import MessagePassingAttention
from gnn_attention.model.tokenizer import BytePair
from gnn_attention.score_mods import RelativeBias

Tokens = Int[Tensor, "batch tokens"]
Logits = Float[Tensor, "batch tokens vocabulary"]
States = Float[Tensor, "batch tokens width"]
Weights = Float[Tensor, "batch edges heads"]
File = str | os.PathLike[str]
# the weights that ship with the package
TRAINED = Path(__file__).parent / "data" / "trained.safetensors"


@dataclass(frozen=True)
class Config:
    """The sizes of a :class:`LanguageModel`; ``reach`` is the largest distance with its own bias.

    Raises TypeError or ValueError for a size that is no positive integer.
    """

    vocabulary_size: int
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    mlp_width: int = 512
    reach: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.size(field.name, getattr(self, field.name), 1)


class Block(nn.Module):
    """One layer in two phases, each of which returns an update of the state ``[B, T, width]``.

    Sources: Elhage et al. 2021 (residual stream); Xiong et al. 2020 (arXiv 2002.04745), the norms.

    >>> block = Block(Config(vocabulary_size=8, width=8, num_heads=2, head_dim=4, mlp_width=16))
    >>> state = torch.randn(1, 5, 8)
    >>> middle = state + block.communicate(state, patterns.causal(5))
    >>> torch.equal(block(state, patterns.causal(5)), middle + block.compute(middle))
    True
    """

    def __init__(self, config: Config, backend: str | Backend | None = "auto") -> None:
        """``backend`` as in :class:`MessagePassingAttention`. TypeError for no :class:`Config`."""
        checks.instance("config", config, Config)
        super().__init__()
        width, hidden = config.width, config.mlp_width
        heads = StandardHeads(width, config.num_heads, config.head_dim)
        position = RelativeBias(config.num_heads, config.reach)
        self.attention_norm = nn.RMSNorm(width)
        self.attention = MessagePassingAttention(heads, position, backend=backend)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def communicate(self, state: States, graph: TokenGraph) -> States:
        """The update of attention along ``graph``."""
        return cast("Tensor", self.attention(self.attention_norm(state), graph))

    def compute(self, state: States) -> States:
        """The update of the MLP, for each token alone."""
        return cast("Tensor", self.mlp(self.mlp_norm(state)))

    def forward(self, state: States, graph: TokenGraph) -> States:
        """The state after both updates."""
        state = state + self.communicate(state, graph)
        return state + self.compute(state)


class LanguageModel(nn.Module):
    """Embedding, blocks, unembedding: from tokens to the logits of the token that comes next.

    ``backend`` is that of all blocks' attention; "message_passing" is the path of torch_geometric. It can be
    set at any time: ``model.backend = "reference"``.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), the decoder; seed S4.11.

    >>> model = LanguageModel(Config(vocabulary_size=300))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])
    """

    blocks: Any

    def __init__(self, config: Config, backend: str | Backend | None = "auto") -> None:
        """Weights are drawn from torch's generator. TypeError for no :class:`Config`."""
        checks.instance("config", config, Config)
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary_size, bias=False)
        # small first logits: the loss begins near log(vocabulary)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.unembedding.weight, std=0.5 * config.width**-0.5)

    @property
    def backend(self) -> str | Backend:
        """That of all blocks' attention."""
        return self.layers[0].backend

    @backend.setter
    def backend(self, backend: str | Backend) -> None:
        for layer in self.layers:
            layer.backend = backend

    @property
    def layers(self) -> list[MessagePassingAttention]:
        """The attention layer of each block."""
        return [block.attention for block in self.blocks]

    def forward(self, tokens: Tokens, graph: TokenGraph | None = None) -> Logits:
        """Logits ``[B, T, vocabulary]``; along ``graph``, by default ``patterns.causal(T)``.

        Raises TypeError, ValueError or IndexError for tokens that are no ``[B, T]`` integers of the
        vocabulary, or a graph of another size.
        """
        tokens, graph = self._check_input(tokens, graph)
        state = self.embedding(tokens)
        for block in self.blocks:
            state = block(state, graph)
        return cast("Tensor", self.unembedding(self.norm(state)))

    def proceed(self, tokens: Tokens, cache: KeyValueCache) -> Logits:
        """Logits of the tokens that follow those in ``cache``, as in the full pass over its graph.

        A cache has a layer for each block: ``KeyValueCache(graph, model.config.num_layers)``. Raises as the
        model and :meth:`KeyValueCache.append` do, ValueError for a cache of other layers, NotImplementedError
        for ``backend="message_passing"`` and with hooks on a block or its attention, which are not called.
        """
        if not hasattr(cache, "all_or_nothing"):
            raise TypeError(f"cache must be a KeyValueCache(graph, config.num_layers), got {quote(cache)}")
        tokens, _ = self._check_input(tokens, cache.graph)
        if cache.layers != len(self.blocks):
            raise ValueError(f"cache must have {len(self.blocks)} layers, as the model, got {cache.layers}")
        if not self.can_proceed():
            raise NotImplementedError(
                "the message-passing path and hooks on blocks need all tokens at once: use backend='auto' "
                "without hooks, or call the model without a cache"
            )
        state = self.embedding(tokens)
        with cache.all_or_nothing():
            for number, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
                state = state + layer.decode(block.attention_norm(state), cache, number)
                state = state + block.compute(state)
        return cast("Tensor", self.unembedding(self.norm(state)))

    def can_proceed(self) -> bool:
        """False for the message-passing path, or hooks on a block or its attention."""
        if any(layer.uses_message_passing() for layer in self.layers):
            return False
        return not any(x._forward_hooks or x._forward_pre_hooks for x in (*self.blocks, *self.layers))

    def states(self, tokens: Tokens, graph: TokenGraph | None = None) -> list[States]:
        """The ``2 * num_layers + 1`` states of every token: embedded, then after each update (seed S4.11)."""
        tokens, graph = self._check_input(tokens, graph)
        states = [self.embedding(tokens)]
        for block in self.blocks:
            states.append(states[-1] + block.communicate(states[-1], graph))
            states.append(states[-1] + block.compute(states[-1]))
        return states

    def listen(self, tokens: Tokens, graph: TokenGraph | None = None) -> list[Weights]:
        """For each layer the weight of every edge and head, in the order of ``edge_index``."""
        tokens, graph = self._check_input(tokens, graph)
        # before each communication
        before = zip(self.blocks, self.states(tokens, graph)[:-1:2], strict=True)
        results = (
            block.attention(block.attention_norm(state), graph, return_attention_weights=True)
            for block, state in before
        )
        return [weights for _, (_, weights) in results]

    def _check_input(self, tokens: Tensor, graph: TokenGraph | None) -> tuple[Tensor, TokenGraph]:
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            got = checks.describe_type(tokens)
            raise TypeError(f"tokens must be an integer tensor [B, T], got {got}; see BytePair.encode")
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [B, T], got shape {list(tokens.shape)}; try tokens[None]")
        # a compiler has no values
        if tokens.numel() and not torch.compiler.is_compiling():
            low, high, last = int(tokens.min()), int(tokens.max()), self.config.vocabulary_size - 1
            if low < 0 or high > last:
                raise IndexError(f"tokens must be in 0 .. {last}, the vocabulary, got {low} .. {high}")
        return tokens.long(), patterns.causal(tokens.shape[1]) if graph is None else graph


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Int[Tensor, " tokens"],
    count: int,
    temperature: float = 1.0,
    seed: int = 0,
    graph: TokenGraph | None = None,
    cache: KeyValueCache | None = None,
) -> Int[Tensor, " tokens_and_more"]:
    """``tokens [T]`` and ``count`` more, each drawn from ``softmax(logits / temperature)``; 0: the likeliest.

    ``graph`` is that of all tokens, the new ones included: causal by default. Each token is computed once, in
    a :class:`KeyValueCache`, where the model can :meth:`~LanguageModel.proceed`; the tokens in ``cache`` come
    before these. ValueError for no tokens, a negative temperature, too small a graph, or another cache's.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        raise TypeError(f"tokens must be an integer tensor [T], got {checks.describe_type(tokens)}")
    if checks.number("temperature", temperature) < 0 or not len(tokens):
        got = f"{len(tokens)} tokens and {quote(temperature)}"
        raise ValueError(f"generate needs a first token and temperature >= 0, got {got}")
    count = checks.size("count", count)
    length = len(tokens) + count
    if cache is not None:
        cache.check_graph(cache.graph if graph is None else graph)
        graph, length = cache.graph, cache.length + length
    graph = patterns.causal(length) if graph is None else graph
    if graph.num_dst < length:
        raise ValueError(f"graph must have the {length} tokens that there will be in the end, got {graph!r}")
    if cache is None and model.can_proceed():
        cache = KeyValueCache(graph, model.config.num_layers)
    generator, new = torch.Generator().manual_seed(seed), tokens
    for _ in range(count):
        if cache is None:
            logits = model(tokens[None], algebra.restrict(graph, range(len(tokens))))[0, -1]
        else:
            logits = model.proceed(new[None], cache)[0, -1]
        if temperature:
            probabilities = (logits / temperature).softmax(-1).cpu()
            new = torch.multinomial(probabilities, 1, generator=generator).to(tokens.device)
        else:
            new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new])
    return tokens


def save(path: File, model: LanguageModel, vocabulary: BytePair, metadata: Mapping[str, Any]) -> None:
    """Write weights (as float16), config, vocabulary and ``metadata`` (JSON values) to one safetensors file.

    The file is written whole or not at all. Raises ValueError if the vocabulary is not the model's or
    ``metadata`` has a key "config" or "vocabulary".
    """
    _check_vocabulary(vocabulary, model.config)
    if taken := {"config", "vocabulary"} & set(metadata):
        raise ValueError(f"metadata has {sorted(taken)}, which save writes itself: rename them")
    texts = {key: json.dumps(value) for key, value in metadata.items()}
    texts |= {"config": json.dumps(asdict(model.config)), "vocabulary": vocabulary.to_json()}
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    atomic_files.write(path, safetensors.torch.save(tensors, texts))


def load(path: File) -> tuple[LanguageModel, BytePair, dict[str, Any]]:
    """The model (float32, in eval mode), vocabulary and metadata that :func:`save` wrote.

    Raises ValueError that names the file and what is wrong with it, OSError where it cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in sorted(file.keys())}
            texts = dict(sorted((file.metadata() or {}).items()))
        vocabulary = BytePair.from_json(texts.pop("vocabulary"))
        config = Config(**json.loads(texts.pop("config")))
        _check_vocabulary(vocabulary, config)
        # no memory and no random numbers for weights that are replaced
        with torch.device("meta"):
            model = LanguageModel(config)
        model.load_state_dict(tensors, assign=True)
        return model.eval(), vocabulary, {key: json.loads(text) for key, text in texts.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{os.fspath(path)}: expected a safetensors file: {one_line(str(error))}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{os.fspath(path)} holds no language model: {reason}") from error


def _check_vocabulary(vocabulary: BytePair, config: Config) -> None:
    if len(vocabulary) != config.vocabulary_size:
        expected = f"expected {config.vocabulary_size}, the model's"
        raise ValueError(f"vocabulary has {len(vocabulary)} pieces: {expected}")


def load_trained() -> tuple[LanguageModel, BytePair]:
    """The trained model that ships with the package, and its vocabulary.

    >>> model, vocabulary = load_trained()
    >>> vocabulary.pieces("def read(self):")
    ['def', ' read', '(', 'self', '):']
    """
    return load(TRAINED)[:2]


def induction_scores(
    model: LanguageModel, length: int = 64, seed: int = 0, samples: int = 16, graph: TokenGraph | None = None
) -> Float[Tensor, "layers heads"]:
    """Each head's mean weight on the token *after* the earlier occurrence of the receiver's own.

    ``samples`` random sequences of ``length`` tokens are repeated once: that sender is at distance ``length -
    1``. Uniform weights give about ``1 / (1.5 length)``; a missing edge counts 0. Source: Olsson et al. 2022
    (arXiv 2209.11895), prefix matching on repeated random tokens.
    """
    first = _random_tokens(model, length, seed, samples)
    return _mean_weight(model, torch.cat([first, first], dim=1), graph, distance=length - 1, start=length)


def previous_token_scores(
    model: LanguageModel, length: int = 128, seed: int = 0, samples: int = 16, graph: TokenGraph | None = None
) -> Float[Tensor, "layers heads"]:
    """Each head's mean weight on the token before the receiver, on random sequences (source as above)."""
    return _mean_weight(model, _random_tokens(model, length, seed, samples), graph, distance=1, start=1)


def _random_tokens(model: LanguageModel, length: int, seed: int, samples: int) -> Tensor:
    shape = (checks.size("samples", samples, 1), checks.size("length", length, 2))
    return torch.randint(model.config.vocabulary_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _mean_weight(
    model: LanguageModel, tokens: Tensor, graph: TokenGraph | None, distance: int, start: int
) -> Tensor:
    graph = patterns.causal(tokens.shape[1]) if graph is None else graph
    src, dst = graph.edge_index
    chosen = (dst >= start) & (dst - src == distance)
    count = tokens.shape[0] * (tokens.shape[1] - start)
    weights = model.listen(tokens.to(model.embedding.weight.device), graph)
    return torch.stack([layer[:, chosen.to(layer.device)].sum((0, 1)) / count for layer in weights]).cpu()
