//! The machine and its software: cores, devices, and versions for `--env`.

use std::path::Path;
use std::process::Command;

const PACKAGES: &str = "\
import importlib.metadata as m, platform
found = []
for name in ('penstock', 'penstock-kernels', 'torch', 'transformers', 'safetensors', 'grpcio', 'protobuf', 'huggingface_hub'):
    try: found.append(f'{name} {m.version(name)}')
    except m.PackageNotFoundError: found.append(f'{name} not installed')
print('Python ' + platform.python_version() + ', ' + ', '.join(found))
";

/// The resources of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) num_cores: usize,
    /// Accelerators that the environment makes visible; `None` if it does not say.
    pub(crate) num_visible_devices: Option<usize>,
}

/// This machine's cores and visible accelerators.
pub(crate) fn this() -> Machine {
    Machine {
        num_cores: std::thread::available_parallelism().map_or(1, usize::from),
        num_visible_devices: visible_devices(
            |name| std::env::var(name).ok(),
            || output("nvidia-smi", &["-L"]).as_deref().map(listed_devices),
        ),
    }
}

/// The lines that `--env` logs. They contain no environment variables, because some hold secrets.
pub(crate) fn report(python: &Path, machine: Machine) -> Vec<String> {
    let mut lines = vec![
        format!("penstock {} for {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH),
        format!("{} cores", machine.num_cores),
    ];
    let kernel = std::fs::read_to_string("/proc/version").ok();
    lines.extend(kernel.map(|version| version.trim().to_owned()));
    let memory = std::fs::read_to_string("/proc/meminfo").ok();
    lines.extend(
        memory.and_then(|memory| {
            memory.lines().next().map(|total| total.split_whitespace().collect::<Vec<_>>().join(" "))
        }),
    );
    let packages = output(&python.to_string_lossy(), &["-c", PACKAGES]);
    lines.push(packages.unwrap_or_else(|| format!("{} cannot be run", python.display())));
    match output("nvidia-smi", &["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]) {
        Some(devices) => lines.extend(devices.lines().map(str::to_owned)),
        None => lines.push("no NVIDIA device".to_owned()),
    }
    lines
}

/// A program's standard output; `None` if the program fails or prints nothing.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

/// Number of accelerators that the environment makes visible; `None` if it does not say. `list_all` counts the machine's.
pub(super) fn visible_devices(
    get_env: impl Fn(&str) -> Option<String>,
    list_all: impl FnOnce() -> Option<usize>,
) -> Option<usize> {
    let count = |list: &str| {
        let is_named = |device: &&str| !device.is_empty() && !device.starts_with('-'); // CUDA ignores all after a -1
        let devices: Vec<&str> = list.split(',').map(str::trim).take_while(is_named).collect();
        if devices.iter().any(|device| device.starts_with("MIG-")) { 1 } else { devices.len() }
    };
    if let Some(list) = get_env("CUDA_VISIBLE_DEVICES") {
        return Some(count(&list));
    }
    match get_env("NVIDIA_VISIBLE_DEVICES").as_deref() {
        None => get_env("ZE_AFFINITY_MASK").map(|list| count(&list)),
        Some("all" | "") => list_all(),
        Some("void" | "none") => Some(0),
        Some(list) => Some(count(list)),
    }
}

/// The devices that a process can use, of those that `nvidia-smi -L` lists. A process sees one MIG instance.
pub(super) fn listed_devices(list: &str) -> usize {
    if list.lines().any(|line| line.trim_start().starts_with("MIG ")) { 1 } else { list.lines().count() }
}
