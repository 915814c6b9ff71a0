# SPDX-License-Identifier: Apache-2.0
"""The gateway's fixtures: a real nats-server, ranks on a stand-in storage, a real HTTP server."""

from tests.consumers.gateway.conftest import gateway, rank_of, settings

__all__ = ["gateway", "rank_of", "settings"]
