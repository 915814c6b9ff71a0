# SPDX-License-Identifier: Apache-2.0
"""One file for each format; a file that is here is registered."""
