# SPDX-License-Identifier: Apache-2.0
"""What makes the memory map a drop-in for the xiaoO agent: its settings and its debug files."""

from __future__ import annotations

from semkv.consumers.memory.xiaoo.debug_files import DebugFiles
from semkv.consumers.memory.xiaoo.settings import XiaoOError, XiaoOSettings

__all__ = ["DebugFiles", "XiaoOError", "XiaoOSettings"]
