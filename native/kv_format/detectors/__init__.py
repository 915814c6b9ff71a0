# SPDX-License-Identifier: Apache-2.0
"""One file for each serving engine; a file that is here is registered."""
