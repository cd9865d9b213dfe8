//! Instructions that are asked for at run time. The build script compiles this file too.

/// Proof that this process may use AMX with bf16 and integers, which Linux permits to a process and all of its threads on request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amx(());

impl Amx {
    /// Requests the permission. None without the instructions, or if the system refuses: Linux before 5.16, some sandboxes, or a thread
    /// whose stack for signals is too small for the registers.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn request() -> Option<Amx> {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const TILE: u32 = 1 << 24;
        const BF16: u32 = 1 << 22;
        const INT8: u32 = 1 << 25;
        const ALL: u32 = TILE | BF16 | INT8;
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const TILE_DATA: libc::c_long = 18;
        // SAFETY: the leaf is only read where there is one; the request only changes which instructions the process may use.
        let permitted = unsafe {
            __cpuid(0).eax >= 7
                && __cpuid_count(7, 0).edx & ALL == ALL
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
