//! The part of the machine that one replica has: devices, or cores.

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// `None`: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MachineShare {
    /// Value of `CUDA_VISIBLE_DEVICES`.
    pub(crate) devices: Option<String>,
    /// Numbers, separated by commas.
    pub(crate) cores: Option<String>,
}

impl MachineShare {
    /// The shares of all replicas. `visible_devices` is the value of `CUDA_VISIBLE_DEVICES`.
    pub(crate) fn of_each(
        num_replicas: usize,
        num_ranks: usize,
        num_devices: usize,
        visible_devices: Option<&str>,
    ) -> Vec<Self> {
        if num_replicas == 1 {
            return vec![Self::default()];
        }
        if num_devices > 0 {
            let numbers = || (0..num_devices).map(|number| number.to_string()).collect();
            let devices: Vec<_> =
                visible_devices.map_or_else(numbers, |list| list.split(',').map(str::to_owned).collect());
            return parts(&devices, num_replicas, num_ranks, |devices| Self { devices, cores: None });
        }
        let cores = usable_cores();
        let cores_each = cores.len() / num_replicas;
        if cores_each == 0 {
            return vec![Self::default(); num_replicas];
        }
        parts(&cores, num_replicas, cores_each, |cores| Self { devices: None, cores })
    }
}

/// Consecutive parts of a list, each of `num_each` elements.
fn parts(
    all: &[String],
    num_parts: usize,
    num_each: usize,
    share: impl Fn(Option<String>) -> MachineShare,
) -> Vec<MachineShare> {
    all.chunks(num_each).take(num_parts).map(|part| share(Some(part.join(",")))).collect()
}

/// Cores that the system lets this process use.
fn usable_cores() -> Vec<String> {
    let Ok(set) = sched_getaffinity(Pid::from_raw(0)) else { return Vec::new() };
    let is_set = |core: &usize| set.is_set(*core).unwrap_or(false);
    (0..CpuSet::count()).filter(is_set).map(|core| core.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(shares: &[MachineShare]) -> Vec<Option<&str>> {
        shares.iter().map(|share| share.devices.as_deref()).collect()
    }

    #[test]
    fn each_replica_has_devices_of_its_own() {
        let shares = MachineShare::of_each(2, 2, 5, None);
        assert_eq!(devices(&shares), [Some("0,1"), Some("2,3")]);
        let shares = MachineShare::of_each(3, 1, 3, Some("GPU-a,GPU-b,7"));
        assert_eq!(devices(&shares), [Some("GPU-a"), Some("GPU-b"), Some("7")]);
        assert!(shares.iter().all(|share| share.cores.is_none()));
    }

    #[test]
    fn on_a_cpu_each_replica_has_cores_of_its_own_if_there_are_enough() {
        let cores = usable_cores();
        let shares = MachineShare::of_each(cores.len(), 1, 0, None);
        if cores.len() > 1 {
            assert_eq!(shares.into_iter().map(|share| share.cores.unwrap()).collect::<Vec<_>>(), cores);
        }
        let shares = MachineShare::of_each(cores.len() + 1, 1, 0, None);
        assert_eq!(shares, vec![MachineShare::default(); cores.len() + 1]);
    }

    #[test]
    fn one_replica_has_the_whole_machine() {
        assert_eq!(MachineShare::of_each(1, 2, 8, Some("3,4")), [MachineShare::default()]);
    }
}
