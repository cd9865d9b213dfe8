"""The model worker of Penstock: one process per rank, driven by a stream of plans."""
