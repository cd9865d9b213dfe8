"""Drafters: each proposes the tokens that may follow those of a sequence. `load.py` chooses one."""
