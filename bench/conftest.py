"""Adds this folder to the import path, because the scripts import each other by plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
