# SPDX-License-Identifier: Apache-2.0
"""Tests, laid out like the rooms."""
