//! The instructions that the kernels need, and those that they use where there are any. The build script compiles this file too.

/// Whether this CPU has the instructions that the kernels need.
pub(crate) fn supported() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("f16c")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Proof that this process may use AMX with bf16, which Linux permits to a process and all of its threads on request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

impl Amx {
    /// Requests the permission. None without the instructions, or if the system refuses: Linux before 5.16, some sandboxes, or a thread
    /// whose stack for signals is too small for the registers.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn request() -> Option<Amx> {
        const TILE: u32 = 1 << 24;
        const BF16: u32 = 1 << 22;
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const TILE_DATA: libc::c_long = 18;
        // SAFETY: a supported CPU has this leaf; the request only changes which instructions the process may use.
        let permitted = supported()
            && unsafe {
                std::arch::x86_64::__cpuid_count(7, 0).edx & (TILE | BF16) == TILE | BF16
                    && libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0
            };
        permitted.then_some(Amx(()))
    }

    /// None: other architectures have no AMX.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn request() -> Option<Amx> {
        None
    }
}
