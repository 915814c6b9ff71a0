# SPDX-License-Identifier: Apache-2.0
"""What semkv changes in LMCache 0.4.3/0.4.4 inside the engine's process; nothing on disk.

`apply_all` goes through the patches in order, once LMCache's modules are imported (LMCache-Ascend's replacements come
first) and before an engine is made. Each is a module of its own that says what is wrong and what it does instead; one
that meets a function it does not know leaves that function alone and says so in one line.

Threads: call it from one thread, before the engine serves. Errors: none; the reports say what happened.
"""

from __future__ import annotations

from collections.abc import Collection

from semkv.engine_hooks.patches import (
    aligned_pool,
    allocation,
    completion,
    cpu_load,
    disk_load,
    disk_put,
    disk_read,
    disk_remove,
    selective_unpin,
    single_release,
    touch,
    warm_hot_cache,
)
from semkv.engine_hooks.patches._mechanism import (
    Patch,
    PatchReport,
    PatchState,
    Replacement,
    active_patches,
    apply,
    restore_all,
    source_digest,
)

PATCHES: tuple[Patch, ...] = (
    aligned_pool.PATCH,
    allocation.PATCH,
    single_release.PATCH,
    cpu_load.PATCH,
    disk_remove.PATCH,
    disk_put.PATCH,
    disk_read.PATCH,
    disk_load.PATCH,
    selective_unpin.PATCH,
    completion.PATCH,
    warm_hot_cache.PATCH,
    touch.PATCH,
)


def apply_all(*, leave_out: Collection[str] = ()) -> list[PatchReport]:
    """Apply every patch but those named; safe to call again."""
    return apply([patch for patch in PATCHES if patch.name not in leave_out])


__all__ = [
    "PATCHES",
    "Patch",
    "PatchReport",
    "PatchState",
    "Replacement",
    "active_patches",
    "apply",
    "apply_all",
    "restore_all",
    "source_digest",
]
