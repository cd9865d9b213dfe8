"""What may happen to a server, on purpose: each module disturbs the real one in one way and says what came of it.

The tests run each in small; `bench/chaos.py` runs the same code for as long as one likes.
"""
