# SPDX-License-Identifier: Apache-2.0
"""What a CPU engine is refused for at start-up, each in one line that names the field, its value and the way out.

Checked in both roles before LMCache builds anything: LMCache itself would swallow the error and serve without a cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

from semkv.native.connector.vllm_cpu import EngineLayoutError


class StartUpError(EngineLayoutError):
    """LMCache's configuration asks for what whole-block transfers cannot do."""


def check(config: Any, vllm_config: Any) -> None:
    """Raises StartUpError for a configuration that could only give wrong or no results."""
    block_size = int(vllm_config.cache_config.block_size)
    chunk_size = int(config.chunk_size)
    if chunk_size % block_size:
        raise StartUpError(
            f"chunk_size {chunk_size} (LMCache) is not a multiple of block_size {block_size} (vLLM): whole blocks are "
            f"moved; set chunk_size to a multiple of {block_size}"
        )
    if getattr(config, "enable_blending", False):
        raise StartUpError("enable_blending true: blending needs the order inside a page; set enable_blending: false")
    if getattr(config, "use_layerwise", False):
        raise StartUpError("use_layerwise true: whole chunks are moved; set use_layerwise: false")
    if getattr(config, "remote_serde", None) not in (None, "naive"):
        raise StartUpError(
            f"remote_serde {config.remote_serde!r}: an object holds raw pages, which cannot be recoded; "
            "set remote_serde: naive"
        )
    mla = bool(getattr(vllm_config.model_config, "use_mla", False))
    if mla and config.get_extra_config_value("save_only_first_rank", True):
        raise StartUpError(
            "save_only_first_rank true with an MLA model: LMCache then broadcasts over a CUDA device; "
            "set extra_config: {save_only_first_rank: false}"
        )


def separate_disk(config: Any, vllm_config: Any) -> None:
    """Gives every engine of a data-parallel deployment a folder of its own below the one that all were configured with.

    Called in both roles, for each reads the configuration by itself; a second call changes nothing.
    """
    parallel = vllm_config.parallel_config
    if not config.local_disk or getattr(parallel, "data_parallel_size", 1) < 2:
        return
    own = f"dp{parallel.data_parallel_rank}"
    if Path(config.local_disk).name != own:
        config.local_disk = f"{Path(config.local_disk) / own}/"


_claimed: dict[str, int] = {}  # folder → descriptor that holds its lock, for the life of this process


def claim_disk(folder: str | None) -> None:
    """Refuses a local_disk folder that another engine uses: the files' names carry no instance.

    The lock is on the folder itself and ends with the process. Leaves nothing in it.
    """
    if not folder:
        return
    path = Path(folder).resolve()
    if str(path) in _claimed:
        return
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
            return  # a file system without locks: nothing can be said
        raise StartUpError(
            f"local_disk {folder} is in use by another engine: each would delete and overwrite the other's files; give "
            "every engine a folder of its own"
        ) from None
    _claimed[str(path)] = descriptor
