# SPDX-License-Identifier: Apache-2.0
"""Moves KV between an engine's pages and chunk objects: CPU memory in C++, accelerators through torch streams."""
