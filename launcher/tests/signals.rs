//! Signals of the built binary when the program that starts it ignores some of them, with a shell script in place of Python.

use std::fs::{Permissions, exists, set_permissions, write};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Starts the binary with `ignored` signals and this script, sends `signals` once the script runs, and returns the exit status
/// and the log.
fn run(ignored: &str, script: &str, signals: &[Signal]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (python, running) = (folder.path().join("python"), folder.path().join("running"));
    write(&python, format!("#!/bin/sh\nmkdir -p {}\n{script}\n", running.display())).expect("a writable folder");
    set_permissions(&python, Permissions::from_mode(0o755)).expect("our own file");
    // A shell cannot undo what its parent ignores, as SIGHUP where these tests run under nohup.
    let mut server = Command::new("/usr/bin/env")
        .args([
            "--default-signal",
            "/bin/sh",
            "-c",
            &format!("trap '' {ignored}; exec \"$0\" \"$@\""),
            env!("CARGO_BIN_EXE_penstock"),
        ])
        .args(["--hostname", "127.0.0.1", "--port", "0", "--json-output"])
        .env_clear()
        .env("PENSTOCK_PYTHON", &python)
        .env("PATH", "/usr/bin:/bin")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    while !exists(&running).expect("our own folder") {
        std::thread::sleep(Duration::from_millis(10));
        assert!(server.try_wait().expect("our own child").is_none(), "the server ended before it started Python");
    }
    for &signal in signals {
        kill(Pid::from_raw(server.id().cast_signed()), signal).expect("our own child");
    }
    let mut log = String::new();
    server.stdout.take().expect("a pipe").read_to_string(&mut log).expect("text");
    (server.wait().expect("our own child").code(), log)
}

const WAITS: &str = "exec sleep 60";

#[test]
fn a_hang_up_stops_the_server_unless_it_was_started_with_nohup() {
    let (status, log) = run("USR1", WAITS, &[Signal::SIGHUP]);
    assert!(status == Some(0) && log.contains("SIGHUP: finishing running requests"), "{status:?}: {log}");
    let (status, log) = run("HUP", WAITS, &[Signal::SIGHUP, Signal::SIGTERM]);
    assert!(status == Some(0) && log.contains("SIGTERM: finishing running requests"), "{status:?}: {log}");
    assert!(!log.contains("SIGHUP"), "{log}");
}

#[test]
fn an_interrupt_stops_a_server_in_the_background_of_a_script() {
    let (status, log) = run("INT QUIT", WAITS, &[Signal::SIGINT]);
    assert!(status == Some(0) && log.contains("SIGINT: finishing running requests"), "{status:?}: {log}");
}

/// Time limits on templates and grammars end a process by a signal.
#[test]
fn the_processes_of_a_server_ignore_none_of_the_signals_that_end_them() {
    let script =
        "case $2 in *prepare) sleep 60;; *) sed -n 's/^SigIgn:./ignored /p' /proc/self/status >&2; exit 3;; esac";
    let (status, log) = run("TERM CHLD ALRM PROF", script, &[]);
    assert!(status == Some(1) && log.contains("the fork server exited with status 3: "), "{status:?}: {log}");
    let (_, ignored) = log.split_once("ignored ").expect("what the script prints");
    let ignored = u64::from_str_radix(&ignored[..16], 16).expect("a mask");
    for signal in [Signal::SIGTERM, Signal::SIGCHLD, Signal::SIGALRM, Signal::SIGPROF] {
        assert_eq!(ignored >> (signal as u64 - 1) & 1, 0, "{signal} is ignored");
    }
}
