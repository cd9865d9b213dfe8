//! Native CPU kernels.
