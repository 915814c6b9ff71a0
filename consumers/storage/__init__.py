# SPDX-License-Identifier: Apache-2.0
"""Storage operations of one rank: prefetch, evict, retain, release and locate on an LMCache engine."""
