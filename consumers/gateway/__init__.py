# SPDX-License-Identifier: Apache-2.0
"""The REST gateway: today's ``/memory/*`` calls and more, over the bus."""
