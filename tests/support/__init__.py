# SPDX-License-Identifier: Apache-2.0
"""Shared pieces of the tests: real engines and servers."""
