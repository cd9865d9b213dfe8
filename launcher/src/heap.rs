//! The C library's heap.

/// Gives freed pages back to the system, where the C library can. glibc keeps those between blocks that are in use.
pub(crate) fn return_free_pages() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it frees only pages without a block in use, under the allocator's locks.
    #[allow(unsafe_code)]
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
