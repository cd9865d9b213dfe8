"""Lets tests import the modules that lie beside them; pytest's importlib mode alone does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
