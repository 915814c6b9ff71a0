# SPDX-License-Identifier: Apache-2.0
"""The commands of `semkv`, a module each. A command parses, calls the library, prints; nothing else lives here."""
