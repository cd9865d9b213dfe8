"""Puts this folder on the import path of its tests: the scripts import each other by their plain names, as when run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
