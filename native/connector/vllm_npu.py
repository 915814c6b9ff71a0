# SPDX-License-Identifier: Apache-2.0
"""How vLLM-Ascend lays its KV pages out: which arrangement and block size; and whether our connector is the one to use.

Read from the engine's configuration alone, so that the scheduler, which owns no pages, and the workers agree. What the
engine registers later is checked against it. LMCache-Ascend, where it is installed, brings a connector of its own, and
ours stays away. Errors: `EngineLayoutError`; `AcceleratorMissingError` naming what of the device is not there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semkv.native.transfer.streams import AcceleratorMissingError, load_npu

if TYPE_CHECKING:
    from semkv.native.layout import LayoutHints

PLANES = "NL_X_TWO_X_NB_BS_NH_HS"  # (K, V) a layer
LATENT_PLANES = "NL_X_NP_X_NB_BS_ONE_HS"  # MLA: latent, rope and what else a layer keeps
NZ_PLANES = "NL_X_TWO_X_NB_NZ_BS_C0"  # (K, V) in the 310P's order
ASCEND_MODULE = "lmcache_ascend"
logger = logging.getLogger("semkv.native")


@dataclass(frozen=True)
class NpuLayout:
    """The layout of one engine's pages."""

    format: str
    block_size: int
    cache_dtype: str

    # Objects are whole blocks as they lie on the device, so only engines with the same blocks can read them.
    opaque = True

    @property
    def tag(self) -> str:
        """The layout's name in hash domains and keys: only characters that are safe in file names and keys."""
        dtype = "" if self.cache_dtype == "auto" else f".{self.cache_dtype}"
        return f"{self.format.lower()}.b{self.block_size}{dtype}"

    @property
    def hints(self) -> LayoutHints:
        """What the tensors' shapes cannot say."""
        return {
            "kv_layout": "NZ" if self.format == NZ_PLANES else "NHD",
            "use_mla": self.format == LATENT_PLANES,
        }


def npu_layout(vllm_config: Any) -> NpuLayout:
    """The layout that this vLLM-Ascend will use for this configuration."""
    cache = vllm_config.cache_config
    if bool(getattr(vllm_config.model_config, "use_mla", False)):
        form = LATENT_PLANES
    else:
        form = NZ_PLANES if _is_310p() else PLANES
    return NpuLayout(form, int(cache.block_size), str(cache.cache_dtype))


def _is_310p() -> bool:
    """vLLM-Ascend's own word: it is built for one kind of device, and the scheduler must not touch one to know it."""
    try:
        ask = importlib.import_module("vllm_ascend.utils").is_310p
    except (ImportError, AttributeError):
        return False
    return bool(ask())


def ours_serves() -> bool:
    """Whether the NPU is there and nobody else moves KV for LMCache. Raises if the NPU is not there."""
    if ASCEND_MODULE in sys.modules:
        return False
    if importlib.util.find_spec(ASCEND_MODULE) is not None:
        _say_not_loaded()
        return False
    npu = load_npu().npu
    if not npu.is_available():
        raise AcceleratorMissingError(
            "vLLM runs on an NPU and torch.npu.is_available() is false: check npu-smi info, and source CANN's "
            "set_env.sh"
        )
    return True


@functools.cache
def _say_not_loaded() -> None:
    """Once: LMCache will find no device connector."""
    logger.error(
        "LMCache-Ascend is installed and not loaded, so its device connector is not used, and semkv's stays away: name "
        "LMCache-Ascend's connector in kv_transfer_config, or uninstall it"
    )
