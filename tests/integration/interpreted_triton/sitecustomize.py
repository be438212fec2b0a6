"""Lets vLLM's Model Runner V2, and with it the native sampling masks, run on a machine without a GPU.

Put this folder on PYTHONPATH: every process, vLLM's children included, then imports this file first. Triton
runs its kernels in its interpreter, on CPU tensors, and is told that a `cpu` backend is active: slow but real code.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


class Driver:
    """As much of a Triton driver as is asked for without compiling anything."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", "cpu", 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


class ReplaceBackends(MetaPathFinder):
    """Leaves one backend, `cpu`, in `triton.backends` as soon as that is imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.backends = {"cpu": module.Backend(None, Driver)}

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, ReplaceBackends())
