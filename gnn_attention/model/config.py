"""The sizes of a language model, and checks of vocabularies and files against them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from gnn_attention._support import checks
from gnn_attention._support.shapes import Tensor
from gnn_attention.model.tokenizer import BytePair


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


def check_vocabulary(vocabulary: BytePair, config: Config) -> None:
    if len(vocabulary) != (size := config.vocabulary_size):
        raise ValueError(f"vocabulary has {len(vocabulary)} pieces: expected {size}, the model's")


def check_tensors(tensors: Mapping[str, Tensor], config: Config) -> None:
    # before a model of that size is made
    if config.num_layers > len(tensors):
        raise ValueError(f"its config says {config.num_layers:.3g} layers, it holds {len(tensors)} tensors")
    if max(asdict(config).values()) >= 2**31:
        raise ValueError("its config has a size of 2**31 or more")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"its tensor {name[:80]!r} is {tensor.dtype}, expected floating point numbers")
