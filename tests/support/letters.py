"""A small Llama with random parameters that reads letters, in place of an installed language model."""

import torch
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}


class Letters:
    """A tokenizer with a token for each letter."""

    def __call__(self, text, return_tensors=None, **options):
        ids = [ord(letter) - 96 for letter in text]
        return BatchEncoding({"input_ids": torch.tensor([ids]) if return_tensors else ids})

    def decode(self, tokens):
        return "".join(chr(int(token) + 96) for token in tokens)


def llama():
    """Return a model in eval mode that runs the attention of this library."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation="gnn_attention")).eval()
