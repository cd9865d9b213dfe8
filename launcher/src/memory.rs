//! How much memory this process and its children may still take.

use std::path::Path;

const MEMINFO: &str = "/proc/meminfo";
/// Of the container's own group, with version 2 of control groups.
const CGROUP: &str = "/sys/fs/cgroup";

/// `None` where the system does not say.
pub fn available_bytes() -> Option<u64> {
    let machine = available_of_meminfo(&std::fs::read_to_string(MEMINFO).ok()?)?;
    let of_group = |name: &str| std::fs::read_to_string(Path::new(CGROUP).join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number: no limit.
    match (of_group("memory.max"), of_group("memory.current")) {
        (Some(max), Some(current)) => Some(machine.min(max.saturating_sub(current))),
        _ => Some(machine),
    }
}

fn available_of_meminfo(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(available_of_meminfo("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(available_of_meminfo("MemTotal: 9 kB\n"), None);
    }
}
