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

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use super::*;

    fn resident_bytes() -> usize {
        let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = sizes.split(' ').nth(1).unwrap().parse().unwrap();
        pages * 4096
    }

    #[test]
    fn pages_between_blocks_in_use_are_returned() {
        const BLOCK: usize = 64 << 10;
        let blocks: Vec<Vec<u8>> = (0..1024).map(|_| vec![1; BLOCK]).collect();
        let kept: Vec<Vec<u8>> = blocks.into_iter().step_by(16).collect();
        let before = resident_bytes();
        return_free_pages();
        // 60 MiB are free; other tests run at the same time.
        assert!(resident_bytes() + (30 << 20) < before);
        assert_eq!(kept.len(), 64);
    }
}
