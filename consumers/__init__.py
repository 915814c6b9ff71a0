# SPDX-License-Identifier: Apache-2.0
"""What subscribes: the rank worker and its storage operations, the REST gateway, the agent-side memory map."""
