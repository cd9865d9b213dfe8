//! Puts known bugs into a copy of the code, one by one, and has the suites run over it: each must be noticed. What can be
//! checked cheaply always is; the runs are for `make mutants` (MUTANT='part of a name' for some of them).

mod mutant;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use mutant::{MUTANTS, Mutant, Suite};

const COPIED: [&str; 8] =
    ["Cargo.toml", "Cargo.lock", "proto", "scheduler", "router", "launcher", "kernels", "bench/worker"];

/// Most bugs show within the first thousand.
const STEPS: &str = "100000";

/// Of the scheduler, whose builds take longer than its runs.
const QUICK_BUILD: [&str; 4] =
    ["--config", "profile.dev.debug=false", "--config", "profile.dev.package.penstock-scheduler.opt-level=1"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The file with the bug in it.
fn mutated(mutant: &Mutant) -> String {
    let source = fs::read_to_string(root().join(mutant.file)).expect("the file is there");
    let Mutant { name, file, from, to, .. } = mutant;
    assert_eq!(
        source.matches(from).count(),
        1,
        "{name}: {from:?} must occur once in {file}; adapt scheduler/tests/mutation"
    );
    source.replace(from, to)
}

#[test]
fn every_mutant_applies_and_is_documented() {
    let page = fs::read_to_string(root().join("docs/testing.md")).expect("docs/testing.md");
    for mutant in &MUTANTS {
        assert_ne!(mutant.from, mutant.to, "{}", mutant.name);
        mutated(mutant);
        let suites: Vec<_> = mutant.caught_by.iter().map(|suite| format!("{suite:?}").to_lowercase()).collect();
        let row = format!("| {} | `{}` | {} |", mutant.name, mutant.file, suites.join(", "));
        assert!(page.contains(&row), "docs/testing.md lacks the row\n{row}");
    }
}

#[test]
#[ignore = "takes some ten minutes: make mutants"]
fn every_mutant_is_caught() {
    let wanted = std::env::var("MUTANT").unwrap_or_default();
    let copy = root().join("target/mutation");
    fs::create_dir_all(&copy).expect("a writable folder");
    let copy = copy.canonicalize().expect("a path");
    for name in COPIED {
        copy_all(&root().join(name), &copy.join(name));
    }
    let mut missed = Vec::new();
    for mutant in MUTANTS.iter().filter(|mutant| mutant.name.contains(&wanted)) {
        let file = copy.join(mutant.file);
        fs::write(&file, mutated(mutant)).expect("a writable copy");
        println!("{}", mutant.name);
        for suite in mutant.caught_by {
            let failed = failed_tests(*suite, &copy);
            println!("    {suite:?}: {}", if failed.is_empty() { "NOT CAUGHT".to_owned() } else { failed.join(", ") });
            if failed.is_empty() {
                missed.push((mutant.name, suite));
            }
        }
        fs::copy(root().join(mutant.file), &file).expect("a writable copy");
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

/// Names of the tests that failed, or that hang. Code that does not build has caught nothing.
fn failed_tests(suite: Suite, copy: &Path) -> Vec<String> {
    let built = run(suite, copy, true);
    assert!(built.status.success(), "{suite:?} does not build: {}", String::from_utf8_lossy(&built.stderr));
    let output = run(suite, copy, false);
    // `timeout` dies of its own KILL.
    let hangs = output.status.code().is_none_or(|code| code == 137);
    let output = String::from_utf8_lossy(&output.stdout);
    let name = |line: &str| match line.strip_prefix("test ")? {
        line if hangs => {
            line.strip_suffix(" has been running for over 60 seconds").map(|name| format!("{name} (hangs)"))
        }
        line => line.strip_suffix(" ... FAILED").map(str::to_owned),
    };
    output.lines().filter_map(name).collect()
}

fn run(suite: Suite, copy: &Path, only_builds: bool) -> Output {
    // A bug may be noticed by waiting for ever.
    let seconds = if only_builds { "3600" } else { "120" };
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", seconds, env!("CARGO"), "test", "--offline"]).current_dir(copy);
    command.env("SIMULATION_STEPS", STEPS).env("RUST_BACKTRACE", "0");
    match suite {
        Suite::Unit => command.args(QUICK_BUILD).args(["--package", "penstock-scheduler", "--lib"]),
        Suite::Simulation => {
            command.args(QUICK_BUILD).args(["--package", "penstock-scheduler", "--test", "simulation"])
        }
        Suite::Loom => command.args(["--package", "penstock-kernels", "--lib"]).env("RUSTFLAGS", "--cfg loom"),
        Suite::Http => command.args(["--package", "penstock-router", "--test", "http"]),
    };
    // Not the folder of the code itself: cargo would take the mutant's build for that of the original.
    command.env("CARGO_TARGET_DIR", copy.join(if suite == Suite::Loom { "target/loom" } else { "target" }));
    match (only_builds, suite) {
        (true, _) => command.arg("--no-run"),
        (false, Suite::Loom) => command.arg("pool::"),
        (false, Suite::Http) => command.arg("admission::"),
        (false, _) => &mut command,
    };
    command.output().expect("cargo runs")
}

fn copy_all(from: &Path, to: &Path) {
    if from.is_file() {
        fs::create_dir_all(to.parent().expect("a folder")).expect("a writable folder");
        fs::copy(from, to).expect("a readable file");
        return;
    }
    for entry in fs::read_dir(from).expect("a readable folder") {
        let name = entry.expect("a readable folder").file_name();
        if name != "target" {
            copy_all(&from.join(&name), &to.join(&name));
        }
    }
}
