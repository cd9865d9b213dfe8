//! Child processes: which Python, and how none of them survives this process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;

/// The interpreter that has the `penstock_server` package: `PENSTOCK_PYTHON`, or the one of the virtual environment that
/// this binary is in, is below, or that is active, or the system's.
pub fn find_python(get_env: impl Fn(&str) -> Option<OsString>, binary: Option<&Path>) -> PathBuf {
    if let Some(python) = get_env("PENSTOCK_PYTHON").filter(|python| !python.is_empty()) {
        return python.into();
    }
    let folders = binary.into_iter().flat_map(Path::ancestors).skip(1);
    let beside = folders.clone().take(1).map(|folder| folder.join("python"));
    let above = folders.map(|folder| folder.join(".venv/bin/python"));
    let active = get_env("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python"));
    beside.chain(above).chain(active).find(|python| python.is_file()).unwrap_or_else(|| "python3".into())
}

/// `python -m module`, in a process group of its own, so that Ctrl-C in a terminal reaches only this process.
///
/// Spawn it on the main thread: the kernel ends the child when the *thread* that spawned it ends.
pub fn python_module(python: &Path, module: &str) -> Command {
    let mut command = Command::new(python);
    command.arg("-m").arg(module).env_remove("LOG_LEVEL").env("HF_HUB_DISABLE_PROGRESS_BARS", "1");
    // Nobody but the router checks keys.
    command.env_remove("API_KEY").env_remove("API_KEY_FILE");
    // COMPAT: a third name of the hub's token, which the hub's own library does not know.
    if let (None, Some(token)) = (std::env::var_os("HF_TOKEN"), std::env::var_os("HF_API_TOKEN")) {
        command.env("HF_TOKEN", token);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
    let parent = Pid::this();
    let bind_to_parent = move || {
        // Not SIGTERM: a worker inside a long native call would live on.
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died before the line above.
        if getppid() != parent {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec; it makes two system calls and allocates nothing.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(bind_to_parent)
    };
    command
}

/// Hands each line to `each`, whatever bytes it holds, until the pipe closes.
pub async fn for_each_line(pipe: impl AsyncRead + Unpin, mut each: impl FnMut(&str)) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    // A pipe that cannot be read any more has ended.
    while matches!(pipe.read_until(b'\n', &mut line).await, Ok(1..)) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if !text.is_empty() {
            each(text);
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_python_that_was_named_is_used() {
        let python = find_python(|name| (name == "PENSTOCK_PYTHON").then(|| "/a/python".into()), None);
        assert_eq!(python, Path::new("/a/python"));
    }

    #[test]
    fn the_python_beside_the_binary_comes_before_one_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let touch = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        };
        let above = touch(".venv/bin/python");
        let binary = folder.path().join("target/release/penstock");
        assert_eq!(find_python(|_| None, Some(&binary)), above);
        let beside = touch("target/release/python");
        assert_eq!(find_python(|_| None, Some(&binary)), beside);
    }

    #[test]
    fn without_an_environment_it_is_the_systems() {
        assert_eq!(find_python(|_| None, Some(Path::new("/nonexistent/penstock"))), Path::new("python3"));
    }
}
