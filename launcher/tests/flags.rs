//! The command line of the built binary, where it needs neither Python nor a model.

use std::process::{Command, Output};

/// TGI's 54 flags. Each but `env` also has an environment variable.
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

/// TGI's environment variables that do not belong to a flag.
const TGI_VARIABLES: [&str; 40] = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_API_TOKEN",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_HUB_USER_AGENT_ORIGIN",
    "HF_HUB_ENABLE_HF_TRANSFER",
    "LOG_LEVEL",
    "LOG_COLORIZE",
    "COMPUTE_TYPE",
    "ATTENTION",
    "PREFILL_CHUNKING",
    "USE_FLASH_ATTENTION",
    "TGI_WIGGLE_ROOM",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "DISABLE_EXLLAMA",
    "EXLLAMA_VERSION",
    "USE_CUTLASS_W8A8",
    "XPU_MEMORY_FRACTION",
    "OMP_NUM_THREADS",
    "ROCM_USE_FLASH_ATTN_V2_TRITON",
    "ROCM_USE_CUSTOM_PAGED_ATTN",
    "ROCM_USE_SKINNY_GEMM",
    "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
    "PYTORCH_TUNABLEOP_SEQLENS",
    "PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP",
    "DEBUG",
    "AIP_HTTP_PORT",
    "AIP_PREDICT_ROUTE",
    "AIP_HEALTH_ROUTE",
    "DOCKER_LABEL",
    "GIT_SHA",
    "MAX_IMAGE_FETCH_SIZE",
    "HF_MODEL_ID",
    "HF_MODEL_REVISION",
    "SM_NUM_GPUS",
    "HF_MODEL_QUANTIZE",
];

/// Runs the binary with exactly these arguments and environment variables.
fn penstock(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    command.args(arguments).env_clear().envs(environment.iter().copied()).output().expect("the binary was built")
}

/// Standard output, then standard error.
fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Two settings that contradict each other, so the start fails before it binds a port or starts a process.
const CONTRADICTION: [&str; 4] = ["--max-input-tokens", "2", "--max-total-tokens", "2"];

#[test]
fn every_flag_of_tgi_is_accepted_or_refused_by_name() {
    for flag in TGI_FLAGS {
        for value in [None, Some("1")] {
            let flag = format!("--{flag}");
            let arguments: Vec<&str> = [flag.as_str()].into_iter().chain(value).collect();
            let message = printed(&penstock(&[&arguments[..], &["--version"]].concat(), &[]));
            assert!(!message.contains(&format!("unexpected argument '{flag}'")), "{message}");
        }
    }
}

/// The table rows of a page that start with the flag or variable `name`.
fn rows<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    page.lines().filter(|line| line.starts_with(&format!("| `{name}`"))).collect()
}

#[test]
fn generated_pages_of_docs_are_up_to_date() {
    for (page, written) in
        [("flags", include_str!("../../docs/flags.md")), ("metrics", include_str!("../../docs/metrics.md"))]
    {
        let output = penstock(&["--reference", page], &[("PORT", "7"), ("SM_NUM_GPUS", "2")]);
        let printed = String::from_utf8(output.stdout).expect("text");
        assert_eq!(printed, written, "docs/{page}.md is stale: run `make docs`");
    }
}

#[test]
fn every_flag_and_variable_of_tgi_is_documented_once() {
    let page = include_str!("../../docs/flags.md");
    for flag in TGI_FLAGS {
        let rows = rows(page, &format!("--{flag}"));
        assert_eq!(rows.len(), 1, "--{flag}: {rows:?}");
        assert!(!rows[0].ends_with("| not in TGI |"), "--{flag} is a flag of TGI: {rows:?}");
        let reason = rows[0].trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        assert!(!reason.is_empty(), "--{flag} has no verdict: {rows:?}");
    }
    for variable in TGI_VARIABLES {
        // Some of TGI's variables have a flag here.
        let column = format!("| `{variable}` |");
        let of_a_flag = page.lines().filter(|line| line.starts_with("| `--") && line.contains(&column)).count();
        let own = rows(page, variable).len();
        assert!(own == 1 || own == 0 && of_a_flag == 1, "{variable}: {own} rows, and {of_a_flag} of flags");
    }
}

#[test]
fn an_unknown_flag_is_refused_by_name() {
    let output = penstock(&["--no-such-flag"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(printed(&output).contains("--no-such-flag"));
}

#[test]
fn an_unsupported_flag_is_refused_with_a_remedy() {
    for flag in ["ngrok-edge", "ngrok-authtoken"] {
        let (value, advice) = ("secret", "run a separate tunnel");
        let output = penstock(&[&format!("--{flag}"), value], &[]);
        assert_eq!(output.status.code(), Some(2));
        let message = printed(&output);
        assert!(message.contains(&format!("--{flag} is refused: ")) && message.contains(advice), "{message}");
        assert!(!message.contains("secret"), "{message}");
        let name = flag.replace('-', "_").to_uppercase();
        let message = printed(&penstock(&[], &[(&name, value)]));
        assert!(message.contains(&format!("environment variable {name} is refused: ")), "{message}");
    }
}

#[test]
fn a_kv_cache_dtype_is_one_of_those_listed() {
    for output in [penstock(&["--kv-cache-dtype", "int4"], &[]), penstock(&[], &[("KV_CACHE_DTYPE", "int4")])] {
        assert_eq!(output.status.code(), Some(2));
        let message = printed(&output);
        assert!(message.contains("'int4'") && message.contains("auto, fp8_e4m3fn, fp8_e5m2"), "{message}");
    }
    for dtype in ["auto", "fp8_e4m3fn", "fp8_e5m2"] {
        let message = printed(&penstock(&[&["--kv-cache-dtype", dtype], &CONTRADICTION[..]].concat(), &[]));
        assert!(message.contains("max-input-tokens must be less than"), "{message}");
    }
}

#[test]
fn a_trace_collector_is_a_plain_http_url() {
    for arguments in [&["--otlp-endpoint", "http://localhost:4317", "--otlp-service-name", "name"][..], &[]] {
        let output = penstock(&[arguments, &CONTRADICTION].concat(), &[("OTLP_ENDPOINT", "")]);
        let message = printed(&output);
        assert!(message.contains("max-input-tokens must be less than"), "{message}");
    }
    for endpoint in ["localhost:4317", "https://localhost:4317"] {
        for (arguments, environment) in
            [(&["--otlp-endpoint", endpoint][..], &[][..]), (&[], &[("OTLP_ENDPOINT", endpoint)])]
        {
            let output = penstock(arguments, environment);
            assert_eq!(output.status.code(), Some(2));
            let message = printed(&output);
            assert!(message.contains("as in http://localhost:4317") && message.contains("TLS"), "{message}");
        }
    }
}

#[test]
fn image_hosts_are_names_endings_or_networks_and_need_image_urls() {
    let run = |arguments: &[&str], environment: &[(&str, &str)]| {
        printed(&penstock(&[arguments, &CONTRADICTION].concat(), environment))
    };
    let hosts = "images.internal,*.internal,10.1.0.0/16,fd00::/8,127.0.0.1";
    let accepted = run(&["--allow-image-urls", "--allowed-image-hosts", hosts], &[]);
    assert!(accepted.contains("max-total-tokens") && !accepted.contains("images.internal"), "{accepted}");
    let accepted = run(&[], &[("ALLOW_IMAGE_URLS", "true"), ("ALLOWED_IMAGE_HOSTS", hosts)]);
    assert!(accepted.contains("max-total-tokens") && !accepted.contains("images.internal"), "{accepted}");
    assert!(run(&["--allowed-image-hosts", hosts], &[]).contains("--allow-image-urls"));
    let refused = run(&["--allow-image-urls", "--allowed-image-hosts", "internal,http://internal"], &[]);
    assert!(refused.contains("\"http://internal\" must be a name"), "{refused}");
    assert!(run(&["--max-image-fetch-size", "0"], &[]).contains("--max-image-fetch-size is 0, must be at least 1"));
}

#[test]
fn batch_sizes_of_cuda_graphs_are_numbers() {
    for sizes in ["0", "1,2,4,8,16,32", "64"] {
        let message = printed(&penstock(&[&["--cuda-graphs", sizes], &CONTRADICTION[..]].concat(), &[]));
        assert!(message.contains("max-input-tokens must be less than"), "{message}");
    }
    let message = printed(&penstock(&["--cuda-graphs", "1,many"], &[]));
    assert!(message.contains("invalid value 'many' for '--cuda-graphs <SIZES>'"), "{message}");
}

#[test]
fn a_refused_switch_that_the_environment_turns_off_is_ignored() {
    let output = penstock(&CONTRADICTION, &[("NGROK", "false"), ("DISABLE_CUSTOM_KERNELS", "0"), ("QUANTIZE", "")]);
    assert!(printed(&output).contains("max-input-tokens must be less than max-total-tokens"), "{}", printed(&output));
}

#[test]
fn a_flag_without_effect_is_accepted() {
    for arguments in [
        &["--usage-stats", "off"][..],
        &["--disable-custom-kernels"],
        &["--prometheus-port", "9000"],
        &["--waiting-served-ratio", "1.2"],
    ] {
        let message = printed(&penstock(&[arguments, &CONTRADICTION].concat(), &[]));
        assert!(message.contains("max-input-tokens must be less than"), "{message}");
    }
}

#[test]
fn a_flag_overrides_its_environment_variable() {
    let by_environment = printed(&penstock(&[], &[("NUM_SHARD", "0")]));
    assert!(by_environment.contains("--num-shard is 0"), "{by_environment}");
    let by_flag = printed(&penstock(&[&["--num-shard", "1"], &CONTRADICTION[..]].concat(), &[("NUM_SHARD", "0")]));
    assert!(by_flag.contains("max-input-tokens must be less than"), "{by_flag}");
}

#[test]
fn both_names_of_the_input_limit_together_are_refused() {
    let message = printed(&penstock(&["--max-input-tokens", "1", "--max-input-length", "1"], &[]));
    assert!(message.contains("cannot be used with"), "{message}");
}

#[test]
fn an_attention_of_tgi_or_none_is_accepted_from_the_environment_and_an_unknown_one_refused() {
    for attention in ["", "paged", "flashinfer", "triton"] {
        let message = printed(&penstock(&CONTRADICTION, &[("ATTENTION", attention)]));
        assert!(message.contains("max-input-tokens must be less than"), "{attention}: {message}");
    }
    let message = printed(&penstock(&["--attention", "fast"], &[]));
    assert!(message.contains("[possible values: auto, native, flash, triton, reference]"), "{message}");
}

fn busy_port() -> (std::net::TcpListener, String) {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("a bound socket").port().to_string();
    (taken, port)
}

#[test]
fn a_busy_port_is_reported_before_anything_is_loaded() {
    let (_taken, port) = busy_port();
    let output = penstock(&["--hostname", "127.0.0.1", "--port", &port], &[("PENSTOCK_PYTHON", "/nonexistent")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(printed(&output).contains(&format!("port {port} on 127.0.0.1 is in use")), "{}", printed(&output));
}

#[test]
fn a_unix_socket_excludes_the_flags_of_a_port_but_not_their_variables() {
    // Not in TMPDIR, whose path may be too long for a socket.
    let folder = tempfile::tempdir_in("/tmp").expect("a temporary folder");
    let path = folder.path().join("socket").to_string_lossy().into_owned();
    for flag in ["--port", "--hostname"] {
        let output = penstock(&["--uds", &path, flag, "127"], &[]);
        assert_eq!(output.status.code(), Some(2));
        let expected = format!("{flag} cannot be used with --uds: the server listens on one of them");
        assert!(printed(&output).contains(&expected), "{}", printed(&output));
    }
    let environment = [("PORT", "80"), ("HOSTNAME", "3f2a9c"), ("PENSTOCK_PYTHON", "/nonexistent")];
    let output = penstock(&["--uds", &path], &environment);
    for expected in ["PORT has no effect: --uds is set", "HOSTNAME has no effect", "cannot start /nonexistent"] {
        assert!(printed(&output).contains(expected), "{}", printed(&output));
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "the socket's files were left behind");
}

#[test]
fn the_end_of_standard_input_stops_the_server_only_with_the_flag() {
    let fails_after = |seconds: u32| format!("case $2 in *prepare) sleep 60;; *) sleep {seconds}; exit 3;; esac");
    assert_eq!(with_python(&fails_after(60), &["--stop-with-stdin"], &[]).status.code(), Some(0));
    assert_eq!(with_python(&fails_after(2), &[], &[]).status.code(), Some(1));
}

#[test]
fn a_missing_python_is_named() {
    let output = penstock(&["--hostname", "127.0.0.1", "--port", "0"], &[("PENSTOCK_PYTHON", "/nonexistent")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(printed(&output).contains("cannot start /nonexistent"), "{}", printed(&output));
}

/// Runs the binary with a shell script in place of Python.
fn with_python(script: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let python = folder.path().join("python");
    std::fs::write(&python, format!("#!/bin/sh\n{script}\n")).expect("a writable folder");
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).expect("our own file");
    let python = python.to_string_lossy().into_owned();
    let environment = [&[("PENSTOCK_PYTHON", python.as_str()), ("PATH", "/usr/bin:/bin")], environment].concat();
    penstock(&[&["--hostname", "127.0.0.1", "--port", "0", "--json-output"], arguments].concat(), &environment)
}

#[test]
fn a_worker_that_exits_at_startup_ends_the_server_with_its_error() {
    let output =
        with_python("case $2 in *prepare) sleep 60;; *) echo 'error: no such device' >&2; exit 3;; esac", &[], &[]);
    assert_eq!(output.status.code(), Some(1));
    let expected = "the fork server exited with status 3: no such device";
    assert!(printed(&output).contains(expected), "{}", printed(&output));
}

#[test]
fn a_model_that_cannot_be_prepared_ends_the_server_with_the_reason() {
    let output = with_python(
        "case $2 in *prepare) echo 'error: there is no such model' >&2; exit 1;; *) sleep 60;; esac",
        &[],
        &[],
    );
    assert_eq!(output.status.code(), Some(1));
    let message = printed(&output);
    assert!(message.contains("the model cannot be prepared: there is no such model"), "{message}");
}

#[test]
fn keys_appear_in_no_log_line_and_no_worker_environment() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "hidden-in-file\n").expect("a writable folder");
    let file = file.to_string_lossy().into_owned();
    let script = "tr '\\0' '\\n' < /proc/self/environ >&2; tr '\\0' ' ' < /proc/self/cmdline >&2; exit 3";
    let environment = [("API_KEY", "hidden-one,hidden-two"), ("API_KEY_FILE", file.as_str()), ("SEEN", "yes")];
    let message = printed(&with_python(script, &["--env"], &environment));
    assert!(message.contains("SEEN=yes") && message.contains("api-key is (hidden)"), "{message}");
    assert!(!message.contains("hidden-"), "{message}");
    let message = printed(&with_python(script, &["--api-key", "hidden-three"], &[]));
    assert!(message.contains("api-key is (hidden)") && !message.contains("hidden-three"), "{message}");
}

#[test]
fn ranks_listen_on_the_loopback_interface_unless_told_otherwise() {
    // The fork server starts the ranks. The preparation of the model runs beside it, and its end would stop the server.
    let script = "case $2 in *prepare) sleep 60;; *) tr '\\0' '\\n' < /proc/self/environ >&2; exit 3;; esac";
    let message = printed(&with_python(script, &[], &[]));
    for variable in ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] {
        assert!(message.contains(&format!("{variable}=lo")), "{message}");
        let message = printed(&with_python(script, &[], &[(variable, "eth7")]));
        assert!(message.contains(&format!("{variable}=eth7")), "{message}");
    }
}

#[test]
fn unusable_keys_are_refused() {
    for (arguments, environment, words) in [
        (&["--api-key", ""][..], &[][..], "is empty; remove it"),
        (&[], &[("API_KEY", "")], "is empty; remove it"),
        (&["--api-key-file", "/nonexistent"], &[], "cannot read --api-key-file /nonexistent"),
        (&["--api-key", "two words"], &[], "key 1 of --api-key cannot be sent"),
    ] {
        let output = penstock(arguments, environment);
        assert_eq!(output.status.code(), Some(2));
        let message = printed(&output);
        assert!(message.contains(words) && !message.contains("two words"), "{message}");
    }
}

#[test]
fn platform_defaults_yield_to_flags_and_override_the_port_variable() {
    let settings = |arguments: &[&str], environment: &[(&str, &str)]| {
        printed(&penstock(&[arguments, &["--hostname", "127.0.0.1"]].concat(), environment))
    };
    let (_taken, port) = busy_port();
    let busy = format!("port {port} on 127.0.0.1 is in use");

    let sagemaker = [("HF_MODEL_ID", "a/b"), ("SM_NUM_GPUS", "3"), ("PORT", "1"), ("SAGEMAKER_BIND_TO_PORT", &port)];
    let message = settings(&["--json-output"], &sagemaker);
    for words in ["model-id is a/b (from HF_MODEL_ID)", "num-shard is 3 (from SM_NUM_GPUS)", &busy] {
        assert!(message.contains(words), "{words}: {message}");
    }
    let message = settings(&["--model-id", "c/d", "--port", &port], &[("HF_MODEL_ID", "a/b"), ("SM_NUM_GPUS", "1")]);
    assert!(message.contains("c/d") && !message.contains("a/b") && message.contains(&busy), "{message}");

    // SageMaker starts a container with the argument `serve`.
    let variables = [("HF_MODEL_ID", "/opt/ml/model"), ("SAGEMAKER_BIND_TO_PORT", &port), ("PORT", "1")];
    let message = settings(&["serve"], &variables);
    assert!(message.contains("model-id is /opt/ml/model (from HF_MODEL_ID)") && message.contains(&busy), "{message}");

    let message = settings(&[], &[("AIP_HTTP_PORT", &port), ("PORT", "1")]);
    assert!(message.contains(&busy), "{message}");
    let message = settings(&["--port", &port], &[("HF_MODEL_QUANTIZE", "awq")]);
    assert!(message.contains("quantize is awq (from HF_MODEL_QUANTIZE)") && message.contains(&busy), "{message}");
    let message = settings(&[], &[("HF_MODEL_QUANTIZE", "q4")]);
    assert!(message.contains("'q4'") && message.contains("eetq, exl2, fp8, gptq"), "{message}");
}

#[test]
fn a_variable_without_effect_is_reported() {
    let (_taken, port) = busy_port();
    let environment = [("USE_FLASH_ATTENTION", "true"), ("HOSTNAME", "127.0.0.1"), ("PORT", port.as_str())];
    let message = printed(&penstock(&[], &environment));
    assert!(message.contains("environment variable USE_FLASH_ATTENTION has no effect: "), "{message}");
}

#[test]
fn the_environment_report_contains_no_secret() {
    let environment = [("HF_TOKEN", "hf_secret"), ("PENSTOCK_PYTHON", "/nonexistent")];
    let message = printed(&penstock(&["--env", "--hostname", "127.0.0.1", "--port", "0"], &environment));
    assert!(message.contains("environment: penstock ") && !message.contains("hf_secret"), "{message}");
}

#[test]
fn bench_passes_its_settings_on_and_refuses_wrong_numbers() {
    let echo = [("PENSTOCK_PYTHON", "/bin/echo")];
    let arguments = ["bench", "--url", "http://a:1", "--against=-x", "--concurrency", "4,1", "--endpoint", "generate"];
    let output = penstock(&arguments, &echo);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "-m penstock_server.bench --endpoint generate --url=http://a:1 --input-tokens=512 --output-tokens=128 \
         --requests-per-stream=5 --against=-x --concurrency 4 1 --output penstock-bench"
    );
    for wrong in [
        &["--concurrency", "0"][..],
        &["--concurrency", "1,x"],
        &["--output-tokens", "1"],
        &["--endpoint", "embed"],
        &["--dataset", "prompts.jsonl", "--input-tokens", "7"],
    ] {
        let output = penstock(&[&["bench"], wrong].concat(), &echo);
        assert_eq!(output.status.code(), Some(2), "{}", printed(&output));
        assert!(printed(&output).contains(wrong[0]), "{}", printed(&output));
    }
}

/// Standard output of a command that succeeds.
fn shown(arguments: &[&str]) -> String {
    let output = penstock(arguments, &[]);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", printed(&output));
    String::from_utf8(output.stdout).expect("text")
}

const COMMANDS: [&str; 6] = ["route", "node", "check", "models", "bench", "help"];

#[test]
fn the_help_begins_with_all_commands_and_has_the_flags_in_groups() {
    let help = shown(&["--help"]);
    assert_eq!(help, shown(&["help"]));
    let (_, commands) = help.split_once("\nCommands:\n").expect("a list of commands");
    let (commands, flags) = commands.split_once("\n\n").expect("an end of the list");
    let names: Vec<_> = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    assert_eq!(names.into_iter().filter(|name| !name.is_empty()).collect::<Vec<_>>(), COMMANDS);
    let headings = ["Model:", "Adapters:", "Address and keys:", "KV cache:", "Speculative decoding:"];
    assert!(headings.iter().all(|heading| flags.contains(&format!("\n{heading}\n"))), "{flags}");
    for of_others in ["--ngrok", "--waiting-served-ratio", "--prometheus-port", "--replica-file"] {
        assert!(!flags.contains(of_others), "{of_others} has no effect here: {flags}");
    }
}

#[test]
fn the_short_help_fits_on_a_screen_and_names_the_long_one() {
    for (arguments, flag) in [(&["-h"][..], "--model-id"), (&["route", "-h"], "--replica ")] {
        let help = String::from_utf8(penstock(arguments, &[("COLUMNS", "80")]).stdout).expect("text");
        assert!((15..=32).contains(&help.lines().count()), "{help}");
        assert!(help.lines().all(|line| line.len() <= 80), "{help}");
        assert!(help.contains(flag) && help.contains("--help`") && !help.contains("--max-best-of"), "{help}");
    }
}

#[test]
fn each_command_has_a_help_of_its_own() {
    for command in &COMMANDS[..5] {
        let help = shown(&["help", command]);
        assert!(help.contains(&format!("Usage: penstock {command}")), "{help}");
        assert_eq!(help, shown(&[command, "--help"]));
    }
    let router = shown(&["help", "route"]);
    assert!(router.contains("--replica-file") && router.contains("--max-best-of"), "{router}");
    assert!(!router.contains("--speculate") && !router.contains("--lora-adapters"), "set on the servers: {router}");
}

#[test]
fn an_unknown_command_is_refused_with_the_known_ones() {
    for arguments in [&["help", "nonsense"][..], &["nonsense"]] {
        let output = penstock(arguments, &[]);
        assert_eq!(output.status.code(), Some(2));
        let expected = "there is no command \"nonsense\"; the commands are ";
        let message = printed(&output);
        let (_, known) = message.split_once(expected).unwrap_or_else(|| panic!("{message}"));
        assert!(COMMANDS.iter().all(|command| known.contains(command)), "{message}");
    }
}
