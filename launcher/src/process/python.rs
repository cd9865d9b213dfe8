//! Python child processes: which interpreter runs them, and how they end with this process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};
use tokio::process::Command;

/// The interpreter that has the `penstock_server` package: `PENSTOCK_PYTHON`, or else the first that exists of the one next
/// to `binary`, the one of a `.venv` in a folder above it, and the one of the active virtual environment; or `python3`.
pub(crate) fn find(get_env: impl Fn(&str) -> Option<OsString>, binary: Option<&Path>) -> PathBuf {
    if let Some(python) = get_env("PENSTOCK_PYTHON").filter(|python| !python.is_empty()) {
        return python.into();
    }
    let folders = binary.into_iter().flat_map(Path::ancestors).skip(1);
    let adjacent = folders.clone().take(1).map(|folder| folder.join("python"));
    let above = folders.map(|folder| folder.join(".venv/bin/python"));
    let active = get_env("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python"));
    adjacent.chain(above).chain(active).find(|python| python.is_file()).unwrap_or_else(|| "python3".into())
}

/// Why the interpreter does not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {}: {source}; set PENSTOCK_PYTHON to the interpreter that has penstock_server", .python.display())]
pub(crate) struct SpawnError {
    python: PathBuf,
    source: std::io::Error,
}

impl SpawnError {
    pub(crate) fn new(python: &Path, source: std::io::Error) -> Self {
        Self { python: python.to_owned(), source }
    }
}

/// COMPAT: the Hub's token under the name that the Hub's library reads, if only TGI's `HF_API_TOKEN` is set.
pub(crate) fn hub_token() -> Option<(&'static str, OsString)> {
    let token = std::env::var_os("HF_API_TOKEN").filter(|_| std::env::var_os("HF_TOKEN").is_none());
    token.map(|token| ("HF_TOKEN", token))
}

/// `python -m module` in its own process group, so that Ctrl-C in a terminal reaches only this process.
///
/// Spawn it on the main thread: the kernel ends the child when the *thread* that spawned it ends.
pub(crate) fn module(python: &Path, module: &str) -> Command {
    let mut command = Command::new(python);
    command.arg("-m").arg(module).env_remove("LOG_LEVEL").env("HF_HUB_DISABLE_PROGRESS_BARS", "1");
    // Only the router checks keys, and a model's own code must not read them.
    for secret in
        ["API_KEY", "API_KEY_FILE", "ENGINE_SECRET", "ENGINE_SECRET_FILE", "ENGINE_TLS_KEY", "NODE_SECRET_FILE"]
    {
        command.env_remove(secret);
    }
    command.envs(hub_token());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
    let parent = Pid::this();
    let bind_to_parent = move || {
        // SIGTERM would not end a worker that is inside a long native call.
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have exited before the call above.
        if getppid() != parent {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(bind_to_parent)
    };
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_python_is_used() {
        let python = find(|name| (name == "PENSTOCK_PYTHON").then(|| "/a/python".into()), None);
        assert_eq!(python, Path::new("/a/python"));
    }

    #[test]
    fn a_python_next_to_the_binary_precedes_one_in_a_folder_above() {
        let folder = tempfile::tempdir().unwrap();
        let touch = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        let above = touch(".venv/bin/python");
        let binary = folder.path().join("target/release/penstock");
        assert_eq!(find(|_| None, Some(&binary)), above);
        let adjacent = touch("target/release/python");
        assert_eq!(find(|_| None, Some(&binary)), adjacent);
    }

    #[test]
    fn without_an_environment_the_system_python_is_used() {
        assert_eq!(find(|_| None, Some(Path::new("/nonexistent/penstock"))), Path::new("python3"));
    }
}
