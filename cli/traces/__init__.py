# SPDX-License-Identifier: Apache-2.0
"""Looking at traces on this machine: `store` reads them, `tree` prints them."""
