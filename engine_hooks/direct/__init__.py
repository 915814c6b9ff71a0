# SPDX-License-Identifier: Apache-2.0
"""Direct mode: the two agent routes on LMCache's internal API server, for deployments without NATS."""
