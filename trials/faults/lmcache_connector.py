"""LMCache's own connector, made to start beside vLLM 0.32's CPU build.

LMCache imports numba, and numba llvmlite, whose library object answers to every name, `__dict__` included.
vLLM's CPU start-up looks into the `__dict__` of everything imported, and ends there with an AttributeError.
Nothing of LMCache or vLLM is changed: llvmlite's object learns to have no attributes with two underscores.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi

_wrapped = ffi._lib_wrapper.__getattr__


def _getattr(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _wrapped(self, name)


ffi._lib_wrapper.__getattr__ = _getattr

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]
