# SPDX-License-Identifier: Apache-2.0
"""What the environment that `make` makes can import: semkv and what is installed, and nothing that lies about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_what_lies_beside_the_checkout_cannot_be_imported(tmp_path: Path) -> None:
    code = "import sys, semkv.bus; print('\\n'.join(sys.path))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(ROOT.parent) not in done.stdout.splitlines()
