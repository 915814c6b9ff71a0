# SPDX-License-Identifier: Apache-2.0
"""Which earlier topic a sentence means."""

from __future__ import annotations

from semkv.consumers.memory.search.finder import Candidate, Finder, Found

__all__ = ["Candidate", "Finder", "Found"]
