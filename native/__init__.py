# SPDX-License-Identifier: Apache-2.0
"""KV layouts, the C++ core, transfers between pages and chunks, and the LMCache device connector."""
