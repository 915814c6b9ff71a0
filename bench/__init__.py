# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, measured against the real things. Run with `make bench`."""
