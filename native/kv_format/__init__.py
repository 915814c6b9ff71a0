# SPDX-License-Identifier: Apache-2.0
"""The one place that interprets a KV cache's layout. Consumers use semkv.native.layout and index no raw shape."""
