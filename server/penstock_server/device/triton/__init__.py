"""A GPU's kernels, written in Triton, and their launches."""
