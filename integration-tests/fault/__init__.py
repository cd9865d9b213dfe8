"""Faults injected into the real server. Each module injects one kind and returns what it observed.

The tests run each briefly; `bench/chaos.py` runs the same code for hours.
"""
