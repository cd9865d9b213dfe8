//! The command line of the built binary, as far as it needs neither Python nor a model.

use std::process::{Command, Output};

/// TGI's 54 flags (and its environment variable for each, but for `env`).
const TGI_FLAGS: [&str; 54] = [
    "model-id",
    "revision",
    "validation-workers",
    "sharded",
    "num-shard",
    "quantize",
    "speculate",
    "dtype",
    "kv-cache-dtype",
    "trust-remote-code",
    "max-concurrent-requests",
    "max-best-of",
    "max-stop-sequences",
    "max-top-n-tokens",
    "max-input-tokens",
    "max-input-length",
    "max-total-tokens",
    "waiting-served-ratio",
    "max-batch-prefill-tokens",
    "max-batch-total-tokens",
    "max-waiting-tokens",
    "max-batch-size",
    "cuda-graphs",
    "hostname",
    "port",
    "prometheus-port",
    "shard-uds-path",
    "master-addr",
    "master-port",
    "huggingface-hub-cache",
    "weights-cache-override",
    "disable-custom-kernels",
    "cuda-memory-fraction",
    "rope-scaling",
    "rope-factor",
    "json-output",
    "otlp-endpoint",
    "otlp-service-name",
    "cors-allow-origin",
    "api-key",
    "watermark-gamma",
    "watermark-delta",
    "ngrok",
    "ngrok-authtoken",
    "ngrok-edge",
    "tokenizer-config-path",
    "disable-grammar-support",
    "env",
    "max-client-batch-size",
    "lora-adapters",
    "usage-stats",
    "payload-limit",
    "enable-prefill-logprobs",
    "graceful-termination-timeout",
];

/// Runs the binary with these arguments and no environment but this.
fn penstock(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    command.args(arguments).env_clear().envs(environment.iter().copied()).output().expect("the binary was built")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A start that ends before any port or process: two settings contradict each other.
const CONTRADICTION: [&str; 4] = ["--max-input-tokens", "2", "--max-total-tokens", "2"];

#[test]
fn every_flag_of_tgi_is_known() {
    for flag in TGI_FLAGS {
        for value in [None, Some("1")] {
            let flag = format!("--{flag}");
            let arguments: Vec<&str> = [flag.as_str()].into_iter().chain(value).collect();
            let message = said(&penstock(&[&arguments[..], &["--version"]].concat(), &[]));
            assert!(!message.contains(&format!("unexpected argument '{flag}'")), "{message}");
        }
    }
}

#[test]
fn an_unknown_flag_is_refused_by_name() {
    let output = penstock(&["--no-such-flag"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("--no-such-flag"));
}

#[test]
fn an_unsupported_flag_is_refused_with_what_to_do_instead() {
    for (flag, value, advice) in [
        ("quantize", "awq", "not supported yet"),
        ("speculate", "3", "not supported yet"),
        ("api-key", "secret", "let a proxy check them"),
        ("lora-adapters", "a/b", "merge the adapter"),
        ("rope-factor", "2.0", "config.json"),
    ] {
        let output = penstock(&[&format!("--{flag}"), value], &[]);
        assert_eq!(output.status.code(), Some(2));
        let message = said(&output);
        assert!(message.contains(&format!("--{flag} is refused: ")) && message.contains(advice), "{message}");
        assert!(!message.contains("secret"), "{message}");
        let name = flag.replace('-', "_").to_uppercase();
        let message = said(&penstock(&[], &[(&name, value)]));
        assert!(message.contains(&format!("environment variable {name} is refused: ")), "{message}");
    }
}

#[test]
fn a_switch_that_the_environment_turns_off_is_not_asked_for() {
    let output = penstock(&CONTRADICTION, &[("NGROK", "false"), ("ENABLE_PREFILL_LOGPROBS", "0"), ("QUANTIZE", "")]);
    assert!(said(&output).contains("max-input-tokens must be less than max-total-tokens"), "{}", said(&output));
}

#[test]
fn a_flag_without_effect_is_accepted() {
    for arguments in [
        &["--cuda-graphs", "0"][..],
        &["--usage-stats", "off"],
        &["--disable-custom-kernels"],
        &["--prometheus-port", "9000"],
        &["--waiting-served-ratio", "1.2"],
    ] {
        let message = said(&penstock(&[arguments, &CONTRADICTION].concat(), &[]));
        assert!(message.contains("max-input-tokens must be less than"), "{message}");
    }
}

#[test]
fn a_flag_comes_before_the_environment() {
    let by_environment = said(&penstock(&[], &[("NUM_SHARD", "0")]));
    assert!(by_environment.contains("--num-shard is 0"), "{by_environment}");
    let by_flag = said(&penstock(&[&["--num-shard", "1"], &CONTRADICTION[..]].concat(), &[("NUM_SHARD", "0")]));
    assert!(by_flag.contains("max-input-tokens must be less than"), "{by_flag}");
}

#[test]
fn both_names_of_the_input_limit_are_refused() {
    let message = said(&penstock(&["--max-input-tokens", "1", "--max-input-length", "1"], &[]));
    assert!(message.contains("cannot be used with"), "{message}");
}

#[test]
fn a_busy_port_ends_the_start_before_anything_is_loaded() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("a bound socket").port().to_string();
    let output = penstock(&["--hostname", "127.0.0.1", "--port", &port], &[("PENSTOCK_PYTHON", "/nonexistent")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains(&format!("port {port} on 127.0.0.1 is in use")), "{}", said(&output));
}

#[test]
fn a_python_that_is_not_there_is_named() {
    let output = penstock(&["--hostname", "127.0.0.1", "--port", "0"], &[("PENSTOCK_PYTHON", "/nonexistent")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("cannot start /nonexistent"), "{}", said(&output));
}

/// Python's part is played by a shell script.
fn with_python(script: &str) -> Output {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let python = folder.path().join("python");
    std::fs::write(&python, format!("#!/bin/sh\n{script}\n")).expect("a writable folder");
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).expect("our own file");
    let python = python.to_string_lossy().into_owned();
    let environment = [("PENSTOCK_PYTHON", python.as_str()), ("PATH", "/usr/bin:/bin")];
    penstock(&["--hostname", "127.0.0.1", "--port", "0", "--json-output"], &environment)
}

#[test]
fn a_worker_that_ends_at_start_ends_the_start_with_its_words() {
    let output = with_python("case $2 in *prepare) sleep 60;; *) echo 'error: no such device' >&2; exit 3;; esac");
    assert_eq!(output.status.code(), Some(1));
    let expected = "the worker of rank 0 ended with exit status 3: no such device";
    assert!(said(&output).contains(expected), "{}", said(&output));
}

#[test]
fn a_model_that_cannot_be_prepared_ends_the_start_with_its_reason() {
    let output =
        with_python("case $2 in *prepare) echo 'error: there is no such model' >&2; exit 1;; *) sleep 60;; esac");
    assert_eq!(output.status.code(), Some(1));
    let message = said(&output);
    assert!(message.contains("the model cannot be prepared: there is no such model"), "{message}");
}

#[test]
fn the_environment_is_described_without_its_secrets() {
    let environment = [("HF_TOKEN", "hf_secret"), ("PENSTOCK_PYTHON", "/nonexistent")];
    let message = said(&penstock(&["--env", "--hostname", "127.0.0.1", "--port", "0"], &environment));
    assert!(message.contains("environment: penstock ") && !message.contains("hf_secret"), "{message}");
}
