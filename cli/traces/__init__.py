# SPDX-License-Identifier: Apache-2.0
"""Traces on this machine: `receiver` takes them over OTLP/HTTP, `store` reads and writes them, `tree` prints them."""
