# SPDX-License-Identifier: Apache-2.0
"""What runs inside a vLLM engine: the plugin, the connector, the lookup client, the publisher and the patches.

Nothing is imported here: vLLM loads `semkv.engine_hooks.plugin` in every one of its processes, and a process that has
nothing to hook should pay for nothing.
"""
