# SPDX-License-Identifier: Apache-2.0
"""Runs at the start of each of the engine's Python processes and disables the part that SEMKV_TAKEN_OUT names."""

import os

part = os.environ.get("SEMKV_TAKEN_OUT")

if part == "hooks":
    from semkv.engine_hooks import plugin

    plugin.register = lambda: None
elif part == "subscriber":
    from semkv.engine_hooks.worker_start import WorkerSide

    WorkerSide.engine_ready = lambda self: None  # type: ignore[method-assign]
elif part == "registration":
    from semkv.engine_hooks import patches

    patches.PATCHES = tuple(patch for patch in patches.PATCHES if patch.name != "warm_hot_cache")
