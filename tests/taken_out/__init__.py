# SPDX-License-Identifier: Apache-2.0
"""Proves that the end-to-end tests can fail: `make test-taken-out` takes one part out at a time and runs them.

Nothing in the product knows of this: `sitecustomize.py`, put on PYTHONPATH for the engine's processes alone, disables
the part before vLLM asks for it.
"""
