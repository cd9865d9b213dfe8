"""A CPU's native kernels, from a build of the package `penstock_kernels`."""
