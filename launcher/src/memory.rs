//! The memory that this process and its children can still allocate.

use std::path::Path;

const MEMINFO: &str = "/proc/meminfo";
/// The container's own control group (version 2).
const CGROUP: &str = "/sys/fs/cgroup";

/// The smaller of what the machine and the control group have left; `None` if the machine does not say.
pub(crate) fn available_bytes() -> Option<u64> {
    let machine = parse_meminfo(&std::fs::read_to_string(MEMINFO).ok()?)?;
    let cgroup = |name: &str| std::fs::read_to_string(Path::new(CGROUP).join(name)).ok()?.trim().parse::<u64>().ok();
    // A group without a limit says "max", which is not a number.
    match (cgroup("memory.max"), cgroup("memory.current")) {
        (Some(max), Some(current)) => Some(machine.min(max.saturating_sub(current))),
        _ => Some(machine),
    }
}

fn parse_meminfo(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_in_bytes() {
        assert_eq!(parse_meminfo("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(parse_meminfo("MemTotal: 9 kB\n"), None);
    }
}
