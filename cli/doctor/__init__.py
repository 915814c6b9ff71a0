# SPDX-License-Identifier: Apache-2.0
"""What `semkv doctor` looks at: `checks` finds, one function a topic; the command prints."""
