# SPDX-License-Identifier: Apache-2.0
"""What LMCache needs from us to move KV caches of engines it has no device connector for."""
