"""What torch computes on any device: the tests' truth, and what an odd shape falls back to."""
