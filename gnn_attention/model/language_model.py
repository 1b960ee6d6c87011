"""A small complete language model: each block is attention along the edges of a graph, then an MLP.

The state of a token starts as its embedding. Each block adds the update of its communication phase
(attention), then that of its computation phase (the MLP). The last state gives logits. Positions
enter only as a learned bias for each distance, so that every head has one pattern matrix.
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
PathLike = str | os.PathLike[str]
TRAINED = Path(__file__).parent / "data" / "trained.safetensors"


@dataclass(frozen=True)
class Config:
    """Sizes of a :class:`LanguageModel`; ``reach`` is the largest distance with its own bias."""

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
    """One layer in two phases, each of which computes an update of the state ``[B, T, width]``.

    Sources: Elhage et al. 2021 (residual stream); Xiong et al. 2020 (arXiv 2002.04745), norms.

    >>> block = Block(Config(vocabulary_size=8, width=8, num_heads=2, head_dim=4, mlp_width=16))
    >>> state = torch.randn(1, 5, 8)
    >>> middle = state + block.communicate(state, patterns.causal(5))
    >>> torch.equal(block(state, patterns.causal(5)), middle + block.compute(middle))
    True
    """

    def __init__(self, config: Config, backend: str | Backend | None = "auto") -> None:
        checks.instance("config", config, Config)
        super().__init__()
        width, hidden = config.width, config.mlp_width
        heads = StandardHeads(width, config.num_heads, config.head_dim)
        distance_bias = RelativeBias(config.num_heads, config.reach)
        self.attention_norm = nn.RMSNorm(width)
        self.attention = MessagePassingAttention(heads, distance_bias, backend=backend)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def communicate(self, state: States, graph: TokenGraph) -> States:
        """Compute the update of attention on ``graph``."""
        return cast("Tensor", self.attention(self.attention_norm(state), graph))

    def compute(self, state: States) -> States:
        """Compute the update of the MLP, which processes each token separately."""
        return cast("Tensor", self.mlp(self.mlp_norm(state)))

    def forward(self, state: States, graph: TokenGraph) -> States:
        """Return the state after both updates."""
        state = state + self.communicate(state, graph)
        return state + self.compute(state)


class LanguageModel(nn.Module):
    """An embedding, blocks and an unembedding, which compute logits for the next token at each position.

    The attention of all blocks runs on ``backend``; "message_passing" runs the steps of PyG.
    The backend can be set at any time: ``model.backend = "reference"``.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), the decoder; S4.11 of docs/sources.md.

    >>> model = LanguageModel(Config(vocabulary_size=300))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])
    """

    blocks: Any

    def __init__(self, config: Config, backend: str | Backend | None = "auto") -> None:
        checks.instance("config", config, Config)
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary_size, bias=False)
        # With small logits the loss starts near log(vocabulary_size).
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.unembedding.weight, std=0.5 * config.width**-0.5)

    @property
    def backend(self) -> str | Backend:
        """Backend of the attention in all blocks."""
        return self.layers[0].backend

    @backend.setter
    def backend(self, backend: str | Backend) -> None:
        for layer in self.layers:
            layer.backend = backend

    @property
    def layers(self) -> list[MessagePassingAttention]:
        """The attention layers, one for each block."""
        return [block.attention for block in self.blocks]

    def forward(self, tokens: Tokens, graph: TokenGraph | None = None) -> Logits:
        """Compute logits ``[B, T, vocabulary]`` on ``graph``, by default ``patterns.causal(T)``.

        TypeError, ValueError or IndexError if tokens are not ``[B, T]`` integers of the vocabulary,
        or if the graph does not have T tokens.
        """
        tokens, graph = self._check_input(tokens, graph)
        state = self.embedding(tokens)
        for block in self.blocks:
            state = block(state, graph)
        return cast("Tensor", self.unembedding(self.norm(state)))

    def proceed(self, tokens: Tokens, cache: KeyValueCache) -> Logits:
        """Compute the logits of tokens that follow those in ``cache``, as a full pass would.

        The cache is a ``KeyValueCache(graph, model.config.num_layers)``. Raises the errors of a
        full pass and of :meth:`KeyValueCache.append`, ValueError if the cache and the model differ
        in their number of layers, and NotImplementedError unless :meth:`can_proceed`.
        """
        if not hasattr(cache, "all_or_nothing"):
            raise TypeError(f"cache must be a KeyValueCache(graph, num_layers), got {checks.quote(cache)}")
        tokens, _ = self._check_input(tokens, cache.graph)
        if cache.layers != len(self.blocks):
            raise ValueError(f"cache must have {len(self.blocks)} layers, like the model, got {cache.layers}")
        if not self.can_proceed():
            raise NotImplementedError(
                "the message-passing path and hooks on blocks need all tokens at once: use backend='auto' "
                "and remove the hooks, or call the model without a cache"
            )
        state = self.embedding(tokens)
        with cache.all_or_nothing():
            for index, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
                state = state + layer.decode(block.attention_norm(state), cache, index)
                state = state + block.compute(state)
        return cast("Tensor", self.unembedding(self.norm(state)))

    def can_proceed(self) -> bool:
        """Return False if hooks on a block, or the message-passing path, need all tokens at once."""
        if any(layer.uses_message_passing() for layer in self.layers):
            return False
        return not any(x._forward_hooks or x._forward_pre_hooks for x in (*self.blocks, *self.layers))

    def states(self, tokens: Tokens, graph: TokenGraph | None = None) -> list[States]:
        """Return the ``2 * num_layers + 1`` states: the embedding, then one after each update (S4.11)."""
        tokens, graph = self._check_input(tokens, graph)
        states = [self.embedding(tokens)]
        for block in self.blocks:
            states.append(states[-1] + block.communicate(states[-1], graph))
            states.append(states[-1] + block.compute(states[-1]))
        return states

    def listen(self, tokens: Tokens, graph: TokenGraph | None = None) -> list[Weights]:
        """Return each layer's attention weights ``[B, E, heads]``, with edges in ``edge_index`` order."""
        tokens, graph = self._check_input(tokens, graph)
        weights = []
        # Every second state is the input of a block.
        for block, state in zip(self.blocks, self.states(tokens, graph)[:-1:2], strict=True):
            x = block.attention_norm(state)
            _, (_, layer_weights) = block.attention(x, graph, return_attention_weights=True)
            weights.append(layer_weights)
        return weights

    def _check_input(self, tokens: Tensor, graph: TokenGraph | None) -> tuple[Tensor, TokenGraph]:
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            got = checks.describe_type(tokens)
            raise TypeError(f"tokens must be an integer tensor [B, T], got {got}; see BytePair.encode")
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [B, T], got shape {list(tokens.shape)}; try tokens[None]")
        # Inside a compiled program no value can be read.
        if tokens.numel() and not torch.compiler.is_compiling():
            low, high = int(tokens.min()), int(tokens.max())
            last_token = self.config.vocabulary_size - 1
            if low < 0 or high > last_token:
                raise IndexError(f"tokens must be in 0 .. {last_token}, the vocabulary, got {low} .. {high}")
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
    """Append ``count`` tokens to ``tokens [T]``, each drawn from ``softmax(logits / temperature)``.

    At temperature 0 each is the most likely token. ``graph`` (by default causal) includes the new
    tokens. The tokens in ``cache`` come before ``tokens``. ValueError if there are no tokens, if
    the temperature is negative, or if the graph is too small or differs from the cache's.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        raise TypeError(f"tokens must be an integer tensor [T], got {checks.describe_type(tokens)}")
    if checks.number("temperature", temperature) < 0 or not len(tokens):
        raise ValueError(f"generate needs tokens and temperature >= 0, got {len(tokens)} and {temperature}")
    count = checks.size("count", count)
    length = len(tokens) + count
    if cache is not None:
        cache.check_graph(cache.graph if graph is None else graph)
        graph, length = cache.graph, cache.length + length
    graph = patterns.causal(length) if graph is None else graph
    if graph.num_dst < length:
        raise ValueError(f"graph must have at least {length} tokens, old and new, got {graph!r}")
    if cache is None and model.can_proceed():
        cache = KeyValueCache(graph, model.config.num_layers)
    generator = torch.Generator().manual_seed(seed)
    new_tokens = tokens
    for _ in range(count):
        if cache is None:
            logits = model(tokens[None], algebra.restrict(graph, range(len(tokens))))[0, -1]
        else:
            logits = model.proceed(new_tokens[None], cache)[0, -1]
        if temperature:
            probabilities = (logits / temperature).softmax(-1).cpu()
            new_tokens = torch.multinomial(probabilities, 1, generator=generator).to(tokens.device)
        else:
            new_tokens = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new_tokens])
    return tokens


def save(path: PathLike, model: LanguageModel, vocabulary: BytePair, metadata: Mapping[str, Any]) -> None:
    """Write a model (float16), its vocabulary and ``metadata`` (JSON values) to a safetensors file.

    A failure leaves no partial file. ValueError if the vocabulary is not the model's, or if
    ``metadata`` has a key "config" or "vocabulary".
    """
    _check_vocabulary(vocabulary, model.config)
    if reserved_keys := {"config", "vocabulary"} & set(metadata):
        raise ValueError(f"metadata has {sorted(reserved_keys)}, which save writes itself: rename them")
    json_texts = {key: json.dumps(value) for key, value in metadata.items()}
    json_texts |= {"config": json.dumps(asdict(model.config)), "vocabulary": vocabulary.to_json()}
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    atomic_files.write(path, safetensors.torch.save(tensors, json_texts))


def load(path: PathLike) -> tuple[LanguageModel, BytePair, dict[str, Any]]:
    """Read the model (float32, in eval mode), vocabulary and metadata that :func:`save` wrote.

    Raises ValueError, which names the file and its fault, or OSError if the file cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in sorted(file.keys())}
            json_texts = dict(sorted((file.metadata() or {}).items()))
        vocabulary = BytePair.from_json(json_texts.pop("vocabulary"))
        config = Config(**json.loads(json_texts.pop("config")))
        _check_vocabulary(vocabulary, config)
        # The parameters of the file replace those of the constructor, which on "meta" need no memory.
        with torch.device("meta"):
            model = LanguageModel(config)
        model.load_state_dict(tensors, assign=True)
        return model.eval(), vocabulary, {key: json.loads(text) for key, text in json_texts.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{os.fspath(path)}: expected a safetensors file: {one_line(str(error))}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{os.fspath(path)} holds no language model: {reason}") from error


def _check_vocabulary(vocabulary: BytePair, config: Config) -> None:
    if len(vocabulary) != config.vocabulary_size:
        raise ValueError(f"vocabulary has {len(vocabulary)} pieces, but the model {config.vocabulary_size}")


def load_trained() -> tuple[LanguageModel, BytePair]:
    """Load the trained model that ships with the package, and its vocabulary.

    >>> model, vocabulary = load_trained()
    >>> vocabulary.pieces("def read(self):")
    ['def', ' read', '(', 'self', '):']
    """
    return load(TRAINED)[:2]


def induction_scores(
    model: LanguageModel, length: int = 64, seed: int = 0, samples: int = 16, graph: TokenGraph | None = None
) -> Float[Tensor, "layers heads"]:
    """Compute each head's mean weight on the token *after* the previous copy of the receiver.

    Each of ``samples`` random sequences of ``length`` tokens is repeated once, so this sender is at
    distance ``length - 1``. Uniform weights give about ``1 / (1.5 length)``; a missing edge counts
    as 0. Source: Olsson et al. 2022 (arXiv 2209.11895), prefix matching on random tokens.
    """
    tokens = _random_tokens(model, length, seed, samples)
    return _mean_weight(model, tokens.repeat(1, 2), graph, distance=length - 1, start=length)


def previous_token_scores(
    model: LanguageModel, length: int = 128, seed: int = 0, samples: int = 16, graph: TokenGraph | None = None
) -> Float[Tensor, "layers heads"]:
    """Compute each head's mean weight on the previous token in random sequences (Olsson et al.)."""
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
    is_counted = (dst >= start) & (dst - src == distance)
    num_receivers = tokens.shape[0] * (tokens.shape[1] - start)
    weights = model.listen(tokens.to(model.embedding.weight.device), graph)
    sums = [x[:, is_counted.to(x.device)].sum((0, 1)) for x in weights]
    return (torch.stack(sums) / num_receivers).cpu()
