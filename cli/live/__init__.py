# SPDX-License-Identifier: Apache-2.0
"""What `semkv top` and `semkv watch` show of what passes on the bus. Imported when they run, not for their help."""
