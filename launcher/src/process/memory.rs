//! The memory that this process and its children can still allocate.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

const MEMINFO: &str = "/proc/meminfo";
/// The container's own control group.
const CGROUP: &str = "/sys/fs/cgroup";
/// Limit and usage of a control group, of version 2 and of version 1.
const CGROUP_FILES: [(&str, &str); 2] =
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")];

/// A number of bytes, displayed in MiB or GiB with one decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl Display for Size {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / f64::from(1 << 20);
        // A size that rounds to 1024.0 MiB is 1.0 GiB.
        if mib < 1023.95 { write!(formatter, "{mib:.1} MiB") } else { write!(formatter, "{:.1} GiB", mib / 1024.0) }
    }
}

/// Bytes that both the machine and the control group have left; `None` if the machine does not say.
pub(crate) fn available_bytes() -> Option<u64> {
    let machine = parse_meminfo(&std::fs::read_to_string(MEMINFO).ok()?)?;
    Some(cgroup_bytes(Path::new(CGROUP)).map_or(machine, |cgroup| machine.min(cgroup)))
}

/// Bytes that the control group has left; `None`: it has no limit.
fn cgroup_bytes(folder: &Path) -> Option<u64> {
    // A group of version 2 without a limit says "max", which is not a number; one of version 1 says a number beyond any memory.
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    CGROUP_FILES.iter().find_map(|(limit, usage)| Some(read(limit)?.saturating_sub(read(usage)?)))
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
    fn a_size_has_one_decimal() {
        let shown = |bytes| Size(bytes).to_string();
        assert_eq!(
            (shown(0), shown(92 << 20), shown(1_572_864)),
            ("0.0 MiB".into(), "92.0 MiB".into(), "1.5 MiB".into())
        );
        assert_eq!((shown((1 << 30) - 1), shown(5 << 29)), ("1.0 GiB".into(), "2.5 GiB".into()));
    }

    #[test]
    fn available_memory_is_in_bytes() {
        assert_eq!(parse_meminfo("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(parse_meminfo("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn a_control_group_of_either_version_limits_the_memory() {
        let left = |files: [(&str, &str); 2]| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::create_dir(folder.path().join("memory")).unwrap();
            files.iter().for_each(|(name, content)| std::fs::write(folder.path().join(name), content).unwrap());
            cgroup_bytes(folder.path())
        };
        let version_1 = |limit| [(CGROUP_FILES[1].0, limit), (CGROUP_FILES[1].1, "300\n")];
        let version_2 = |limit| [(CGROUP_FILES[0].0, limit), (CGROUP_FILES[0].1, "300\n")];
        assert_eq!((left(version_1("1000\n")), left(version_2("1000\n"))), (Some(700), Some(700)));
        assert_eq!((left(version_1("200\n")), left(version_2("max\n"))), (Some(0), None));
        assert!(left(version_1("9223372036854771712\n")) > Some(1 << 60), "no limit");
        assert_eq!(cgroup_bytes(Path::new("/nowhere")), None);
    }
}
