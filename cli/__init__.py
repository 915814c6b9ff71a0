# SPDX-License-Identifier: Apache-2.0
"""semkv.cli: the `semkv` command, and the development engine that `semkv demo` and the tests start."""
